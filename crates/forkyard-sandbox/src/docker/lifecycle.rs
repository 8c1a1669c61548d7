//! From nothing to a sandbox and back.
//!
//! | engine says | and here | status |
//! |---|---|---|
//! | created | | dead: its maker did not live to start it |
//! | running | | running, or paused if the record says so |
//! | paused | | paused |
//! | exited | marked as stopped | stopped |
//! | exited | | dead: deadline or crash |
//!
//! A container may have been started before its sandbox was asked for ([`super::warm`]); from then on they are one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bollard::models::{ContainerStateStatusEnum, ContainerSummary, ContainerSummaryStateEnum};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListVolumesOptionsBuilder, LogsOptionsBuilder, RemoveContainerOptionsBuilder, RemoveVolumeOptionsBuilder,
};
use forkyard_core::{Attempt, SandboxId, SnapshotId, Timestamp};
use forkyard_guest::container::NoStart;
use futures::StreamExt;

use super::container::{self, FROM_PATH, GUEST_PATH, LABEL_ID, LABEL_INFO, LABEL_MAKER, VOLUMES};
use super::engine::{gone_is_ok, is_conflict, is_missing, translate};
use super::image::{self, Prepared};
use super::record::{self, Home, Record, SOCKET_NAME};
use super::sandbox::DockerSandbox;
use super::warm::WARM_LABEL;
use super::{Inner, connect, limits, snapshot, utf8};
use crate::guest_client::GuestClient;
use crate::traits::Tie;
use crate::{
    ErrorKind, ExecRequest, Labels, ProviderKind, Result, Root, Sandbox, SandboxError, SandboxInfo,
    SandboxSpec, SandboxStatus, now,
};

/// From the container's start to the guest's first answer; a slow disk included.
const GUEST_WITHIN: Duration = Duration::from_secs(30);
const GUEST_POLL: Duration = Duration::from_millis(5);
/// The engine takes its time to remove; it says `conflict` meanwhile.
const REMOVE_WITHIN: Duration = Duration::from_secs(30);
const REMOVE_POLL: Duration = Duration::from_millis(50);
/// Younger leftovers may be somebody's work under way.
const ORPHAN_AFTER_MS: u64 = 10 * 60 * 1000;
/// The guest ends a sandbox at its deadline. One that is frozen, or that somebody inside holds up, does not.
const OVERDUE_MS: u64 = 60 * 1000;
/// How long the files of a sandbox that met its deadline, running or stopped, stay for whoever still wants its files.
const DEAD_FOR_MS: u64 = 60 * 60 * 1000;
/// Of the guest's last words.
const MAX_LOG_BYTES: usize = 2048;

fn not_found(id: &SandboxId, why: &str) -> SandboxError {
    SandboxError::gone(id, why)
}

/// 128 bits that nobody inside can guess.
pub fn token() -> Result<String> {
    let mut bytes = [0; 16];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| SandboxError::new(ErrorKind::Unavailable, "the system gives no random numbers"))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// A container as far as anybody here cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Missing,
    /// Made, never started.
    Unfinished,
    Running,
    Ended,
}

impl Inner {
    pub(super) fn container(&self, id: &SandboxId) -> String {
        container::name(&self.owner, &self.home.made_as(id))
    }

    async fn look(&self, id: &SandboxId) -> Result<Found> {
        let name = self.container(id);
        let found = match self.docker.inspect_container(&name, None).await {
            Ok(found) => found,
            Err(fault) if is_missing(&fault) => return Ok(Found::Missing),
            Err(fault) => return Err(translate(&name, &fault)),
        };
        Ok(match found.state.and_then(|s| s.status) {
            Some(ContainerStateStatusEnum::RUNNING | ContainerStateStatusEnum::PAUSED) => Found::Running,
            Some(ContainerStateStatusEnum::CREATED) => Found::Unfinished,
            Some(_) | None => Found::Ended,
        })
    }

    pub(super) async fn is_running(&self, id: &SandboxId) -> Result<bool> {
        Ok(self.look(id).await? == Found::Running)
    }

    pub(super) fn record(&self, id: &SandboxId) -> Result<Record> {
        // By the name of what waits for its sandbox nobody gets in, before it has one or after.
        let own = |record: &Record| record.id == *id && !record.spec.labels.contains_key(WARM_LABEL);
        self.home.read(id)?.filter(own).ok_or_else(|| not_found(id, "does not exist on this host"))
    }

    pub(super) async fn create(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        container::check(spec)?;
        let kept = self.kept().await?;
        kept.check()?;
        self.sweep_once();
        if spec.network.has_proxy() {
            let Some(egress) = &self.egress else {
                let what = "this network mode needs the egress proxy, which this provider was made without";
                return Err(
                    SandboxError::new(ErrorKind::Unsupported, what).hint("use the network mode `none`")
                );
            };
            egress.check(&spec.network)?;
        }
        // Of several who ask for it one makes it. To the others it would look like what somebody left unfinished, to be removed.
        let _lock = self.home.lock(id).await?;
        match self.look(id).await? {
            Found::Running | Found::Ended if !self.home.is_unfinished(id) => {
                return self.attach(id, attempt, Tie::Owner).await;
            }
            Found::Missing if !self.home.knows(id) => {}
            Found::Running | Found::Ended | Found::Unfinished | Found::Missing => self.destroy(id).await?,
        }
        let volumes = container::volumes(spec, &self.private, &self.files)?;
        container::check_writable(&volumes, self.user)?;
        let spec = &SandboxSpec { volumes, ..spec.clone() };
        let (image, from) = match &spec.root {
            Root::Snapshot(snapshot) => {
                let record = self.home.read_snapshot(snapshot)?.ok_or_else(|| {
                    SandboxError::new(ErrorKind::NotFound, format!("no snapshot {snapshot} on this host"))
                })?;
                (record.image, Some(snapshot.clone()))
            }
            root => (image::reference(&self.docker, &self.home, root, &self.image).await?, None),
        };
        let prepared = {
            let _one = self.preparing.lock().await;
            image::prepare(self, &image).await?
        };
        container::check_image(&prepared, &spec.volumes, &self.files)?;
        image::check_links(self, &prepared, &spec.volumes).await?;
        let achieved = kept.achieved(spec);
        let kind = self.kind(&prepared, &image, spec, &achieved);
        let created_at = now();
        let record = Record {
            id: id.clone(),
            attempt,
            spec: spec.clone(),
            token: token()?,
            image,
            achieved,
            created_at,
            deadline: created_at + spec.lifetime.0,
            paused: false,
            maker: record::maker(),
            adopted: None,
        };
        let egress = self.egress.as_ref().filter(|_| spec.network.has_proxy());
        let proxy = egress.map(|egress| egress.env(id, &spec.network)).unwrap_or_default();
        let env = container::environment(&prepared.env, proxy, spec);
        let made = async {
            let taken = match &kind {
                Some(kind) => self.take(kind, &record, &env, from.as_ref()).await?,
                None => None,
            };
            let sandbox = match taken {
                Some((record, client)) => self.finish(&record, Some(client)).await?,
                None => {
                    self.home.make(&record, self.user.0, self.user.1)?;
                    let offered = from.as_ref().map(|snapshot| self.offer(id, snapshot)).transpose()?;
                    self.make(&record, &prepared, &env, offered).await?;
                    let client = self.begin(&record).await?;
                    self.finish(&record, Some(client)).await?
                }
            };
            if from.is_some() {
                self.restore(&sandbox).await?;
            }
            Ok(sandbox)
        };
        match made.await {
            Ok(sandbox) => Ok(sandbox),
            Err(error) => {
                // What can't be removed now is found by its label later; the first error is the one to tell.
                if let Err(e) = self.destroy(id).await {
                    tracing::warn!(sandbox = %id, error = %e, "leftovers of a failed creation");
                }
                Err(error)
            }
        }
    }

    /// The first sandbox of a process cleans up after those that did not live to do it, in the background.
    fn sweep_once(self: &Arc<Self>) {
        if !self.swept.swap(true, Ordering::Relaxed) {
            let inner = Arc::clone(self);
            tokio::spawn(async move {
                if let Err(e) = inner.sweep().await {
                    tracing::warn!(error = %e, "cleaning up after others");
                }
            });
        }
    }

    /// The streams of a snapshot, in the sandbox's own folder.
    pub(super) fn offer(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<PathBuf> {
        self.home.offer(id, snapshot, &VOLUMES.map(|(_, short)| snapshot::file_name(short)))
    }

    /// Its folders are there. `from`: the one that snapshots are unpacked from.
    pub(super) async fn make(
        &self,
        record: &Record,
        image: &Prepared,
        env: &BTreeMap<String, String>,
        from: Option<PathBuf>,
    ) -> Result<()> {
        let id = &record.id;
        let shared = container::Shared {
            guest: self.guest.clone(),
            files: self.files.clone(),
            run: utf8(&self.home.run(id))?,
            folders: self.put_folders(record)?.as_deref().map(utf8).transpose()?,
            from: from.as_deref().map(utf8).transpose()?,
        };
        let info = info(record, SandboxStatus::Running);
        let body = container::body(&self.owner, record, &info, image, self.user, env, &shared)?;
        let name = self.container(id);
        let options = CreateContainerOptionsBuilder::default().name(&name).build();
        let made = self.docker.create_container(Some(options), body).await;
        limits::check_warnings(&made.map_err(|e| unstarted(&name, &e, record))?.warnings)
    }

    fn put_folders(&self, record: &Record) -> Result<Option<PathBuf>> {
        self.home.put_folders(&record.id, &container::folders(&record.spec.volumes)?)
    }

    /// Unpacks what was offered, as the user inside, whose files they become.
    async fn restore(&self, sandbox: &Arc<dyn Sandbox>) -> Result<()> {
        for (dir, short) in VOLUMES {
            let archive = format!("{FROM_PATH}/{}", snapshot::file_name(short));
            let request = ExecRequest::new([GUEST_PATH, "unpack", &archive, dir]).cwd("/");
            let (result, _, err) = sandbox.exec(request).await?.output().await?;
            if result.exit_code != 0 {
                let said: String =
                    String::from_utf8_lossy(&err).chars().filter(|c| !c.is_control()).collect();
                let error = SandboxError::new(
                    ErrorKind::Unavailable,
                    format!("the snapshot can't be unpacked into sandbox {}: {said}", sandbox.id()),
                );
                return Err(error.hint("does it fit the sandbox's disk limit?"));
            }
        }
        let from = self.home.from(sandbox.id());
        for (_, short) in VOLUMES {
            let path = from.join(snapshot::file_name(short));
            std::fs::remove_file(&path)
                .map_err(|e| SandboxError::new(ErrorKind::Unavailable, format!("{}: {e}", path.display())))?;
        }
        Ok(())
    }

    /// Starts a container that is there, and waits for its guest.
    pub(super) async fn begin(&self, record: &Record) -> Result<GuestClient> {
        let name = self.container(&record.id);
        self.docker.start_container(&name, None).await.map_err(|e| unstarted(&name, &e, record))?;
        let client = self.wait_for_guest(record).await?;
        // The socket is there: from now on nobody inside puts anything beside it.
        self.home.own_run(&record.id, 0, 0, 0o711)?;
        Ok(client)
    }

    /// Greets the guest, and tells one that did not know for whom it was started.
    pub(super) async fn greet(&self, made_as: &SandboxId, record: &Record) -> Result<GuestClient> {
        let client = connect::guest(&self.home.run(made_as), record.attempt, &record.token).await?;
        if let Some(env) = &record.adopted {
            client.adopt(record.deadline.since(now()).0, env).await?;
        }
        Ok(client)
    }

    async fn wait_for_guest(&self, record: &Record) -> Result<GuestClient> {
        let begin = tokio::time::Instant::now();
        loop {
            match self.greet(&record.id, record).await {
                Ok(client) => return Ok(client),
                Err(e) if e.kind != ErrorKind::NotFound => return Err(e),
                Err(_) => {}
            }
            if self.look(&record.id).await? != Found::Running {
                return Err(self.no_start(&record.id).await);
            }
            if begin.elapsed() > GUEST_WITHIN {
                return Err(SandboxError::new(
                    ErrorKind::Timeout,
                    format!("the guest of sandbox {} does not answer", record.id),
                )
                .hint("the engine must run on this machine and see the state folder"));
            }
            tokio::time::sleep(GUEST_POLL).await;
        }
    }

    /// Why the guest ended before it said a word.
    async fn no_start(&self, id: &SandboxId) -> SandboxError {
        let words = self.last_words(id).await;
        let state = self.docker.inspect_container(&self.container(id), None).await.ok().and_then(|c| c.state);
        let hint = match NoStart::of(state.and_then(|state| state.exit_code).unwrap_or_default()) {
            NoStart::OtherFolder => {
                "it was replaced while the sandbox started: leave it in its place, and try again"
            }
            NoStart::UnseenFolder => {
                "is each folder on the way there open to the user inside? mount it at another path, like /data"
            }
            NoStart::Image => "use another image",
            NoStart::Other if words.is_empty() => "is the image for this machine's architecture?",
            NoStart::Other => {
                "this engine or its kernel refuses what the guest needs: try a newer engine, or the local provider"
            }
        };
        let what = format!("the guest of sandbox {id} did not start: {words}");
        SandboxError::new(ErrorKind::Unavailable, what).hint(hint)
    }

    async fn last_words(&self, id: &SandboxId) -> String {
        let options = LogsOptionsBuilder::default().stdout(true).stderr(true).build();
        let mut logs = Box::pin(self.docker.logs(&self.container(id), Some(options)));
        let mut words = Vec::new();
        while let Some(Ok(line)) = logs.next().await {
            words.extend_from_slice(&line.into_bytes());
            if words.len() > MAX_LOG_BYTES {
                break;
            }
        }
        words.truncate(MAX_LOG_BYTES);
        let words = String::from_utf8_lossy(&words);
        words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_string()
    }

    /// The egress proxy, and the connection.
    async fn finish(
        self: &Arc<Self>,
        record: &Record,
        client: Option<GuestClient>,
    ) -> Result<Arc<dyn Sandbox>> {
        let egress = match &self.egress {
            None => None,
            Some(factory) => {
                let run = self.home.run(&record.id);
                let listener =
                    connect::proxy_listener(&record.id, &run, record.attempt, &record.token).await?;
                let limit = record.spec.limits.network_bytes_per_s;
                Some(factory.serve(&record.id, &record.spec.network, limit, listener)?)
            }
        };
        Ok(DockerSandbox::new(Arc::clone(self), record, client, egress))
    }

    pub(super) async fn attach(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        tie: Tie,
    ) -> Result<Arc<dyn Sandbox>> {
        match self.look(id).await? {
            Found::Running if self.home.is_unfinished(id) => return Err(not_found(id, "was never finished")),
            Found::Running => {}
            Found::Missing | Found::Unfinished => return Err(not_found(id, "does not exist")),
            Found::Ended if self.home.is_stopped(id) => {
                return Err(not_found(id, "is stopped").hint("start it first"));
            }
            Found::Ended => return Err(SandboxError::ended(id)),
        }
        let mut record = self.record(id)?;
        let newest = record.attempt;
        record.attempt = attempt;
        // Another process may have started the container just now.
        let client = self.wait_for_guest(&record).await?;
        if attempt > newest {
            self.home.write(&record)?;
        }
        if !tie.serves(&record.spec.network) {
            return Ok(DockerSandbox::new(Arc::clone(self), &record, Some(client), None));
        }
        self.finish(&record, Some(client)).await
    }

    /// What waits for its sandbox is none yet, and listed only for who asks for just that.
    pub(super) async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>> {
        let found = self.containers().await?;
        let ready = if labels.contains_key(WARM_LABEL) { self.home.ready()? } else { Vec::new() };
        let is_meant = |info: &SandboxInfo| {
            let waits = info.labels.contains_key(WARM_LABEL);
            (!waits || ready.iter().any(|r| r.id == info.id))
                && labels.iter().all(|(key, value)| info.labels.get(key) == Some(value))
        };
        let mut all: Vec<SandboxInfo> =
            found.iter().filter_map(|c| self.listed(c)).filter(is_meant).collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(all)
    }

    pub(super) async fn containers(&self) -> Result<Vec<ContainerSummary>> {
        let filters = container::owner_filter(&self.owner);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        let mut found =
            self.docker.list_containers(Some(options)).await.map_err(|e| translate("list", &e))?;
        found.retain(|found| container::is_ours(&self.owner, found));
        Ok(found)
    }

    /// None: not a sandbox, or one that is being removed.
    pub(super) fn listed(&self, container: &ContainerSummary) -> Option<SandboxInfo> {
        let labels = container.labels.as_ref()?;
        let made: SandboxInfo = serde_json::from_str(labels.get(LABEL_INFO)?).ok()?;
        let record = self.home.read(&made.id).ok().flatten();
        let status = match container.state? {
            ContainerSummaryStateEnum::RUNNING if record.as_ref().is_some_and(|r| r.paused) => {
                SandboxStatus::Paused
            }
            ContainerSummaryStateEnum::RUNNING | ContainerSummaryStateEnum::RESTARTING => {
                SandboxStatus::Running
            }
            ContainerSummaryStateEnum::PAUSED => SandboxStatus::Paused,
            ContainerSummaryStateEnum::REMOVING => return None,
            _ if self.home.is_stopped(&made.id) => SandboxStatus::Stopped,
            _ => SandboxStatus::Dead,
        };
        Some(record.map_or(SandboxInfo { status, ..made }, |record| info(&record, status)))
    }

    pub(super) async fn status(&self, id: &SandboxId) -> Result<SandboxInfo> {
        let made_as = self.home.made_as(id).to_string();
        let own = |c: &&ContainerSummary| c.labels.as_ref().and_then(|l| l.get(LABEL_ID)) == Some(&made_as);
        self.containers()
            .await?
            .iter()
            .find(own)
            .and_then(|c| self.listed(c))
            .ok_or_else(|| not_found(id, "does not exist"))
    }

    pub(super) async fn stop(&self, id: &SandboxId) -> Result<()> {
        match self.look(id).await? {
            Found::Running => {}
            Found::Missing | Found::Unfinished => return Err(not_found(id, "does not exist")),
            // Its files are there, which is all that a stopped one has.
            Found::Ended => return self.home.set_stopped(id, true),
        }
        let mut record = self.record(id)?;
        self.home.set_stopped(id, true)?;
        let name = self.container(id);
        let options = KillContainerOptionsBuilder::default().signal("SIGKILL").build();
        match self.docker.kill_container(&name, Some(options)).await {
            Ok(()) => {}
            // Ended by itself meanwhile.
            Err(fault) if is_missing(&fault) || is_conflict(&fault) => {}
            Err(fault) => return Err(translate(&name, &fault)),
        }
        let begin = tokio::time::Instant::now();
        while self.look(id).await? == Found::Running {
            if begin.elapsed() > REMOVE_WITHIN {
                return Err(SandboxError::new(ErrorKind::Timeout, format!("sandbox {id} does not end")));
            }
            tokio::time::sleep(REMOVE_POLL).await;
        }
        record.paused = false;
        self.home.write(&record)
    }

    pub(super) async fn start(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
    ) -> Result<Arc<dyn Sandbox>> {
        match self.look(id).await? {
            Found::Running => return self.attach(id, attempt, Tie::Owner).await,
            Found::Missing | Found::Unfinished => return Err(not_found(id, "does not exist")),
            Found::Ended => {}
        }
        let mut record = self.record(id)?;
        if attempt < record.attempt {
            return Err(SandboxError::stale(id, record.attempt, attempt));
        }
        if record.deadline <= now() {
            return Err(SandboxError::overdue(id));
        }
        // The engine follows links anew each time, and a sandbox may have put one into a folder that it was given.
        if container::volumes(&record.spec, &self.private, &self.files)? != record.spec.volumes {
            let what = format!("volumes: a part of a path of sandbox {id} became a link");
            return Err(SandboxError::new(ErrorKind::Denied, what).hint("put the folder back in its place"));
        }
        self.put_folders(&record)?;
        record.attempt = attempt;
        record.paused = false;
        self.home.write(&record)?;
        // The guest binds its socket anew, and an old one must not be taken for it.
        let old = self.home.run(id).join(SOCKET_NAME);
        if let Err(e) = std::fs::remove_file(&old)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(SandboxError::new(ErrorKind::Unavailable, format!("{}: {e}", old.display())));
        }
        self.home.own_run(id, self.user.0, self.user.1, 0o700)?;
        let client = self.begin(&record).await?;
        // Until here it is as stopped as it was, and can be started again.
        self.home.set_stopped(id, false)?;
        self.finish(&record, Some(client)).await
    }

    pub(super) async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let begin = tokio::time::Instant::now();
        loop {
            match self.remove(id).await {
                Err(fault) if is_conflict(&fault) && begin.elapsed() < REMOVE_WITHIN => {
                    tokio::time::sleep(REMOVE_POLL).await;
                }
                done => {
                    done.map_err(|e| translate(&self.container(id), &e))?;
                    let id = id.clone();
                    return self.with_home(move |home| home.remove(&id)).await;
                }
            }
        }
    }

    /// Beside the runtime: whole trees go, by a program that is waited for.
    async fn with_home(&self, work: impl FnOnce(&Home) -> Result<()> + Send + 'static) -> Result<()> {
        let home = self.home.clone();
        let done = tokio::task::spawn_blocking(move || work(&home)).await;
        done.map_err(|e| SandboxError::new(ErrorKind::Unavailable, e.to_string()))?
    }

    /// All of it once more each time: `conflict` means that a removal is under way, or that the engine has only now made the
    /// container that somebody asked for who is gone.
    async fn remove(&self, id: &SandboxId) -> std::result::Result<(), bollard::errors::Error> {
        let gone = |done: std::result::Result<(), bollard::errors::Error>| match done {
            Err(fault) if is_missing(&fault) => Ok(()),
            done => done,
        };
        let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
        gone(self.docker.remove_container(&self.container(id), Some(options)).await)?;
        let made_as = self.home.made_as(id);
        for (_, short) in VOLUMES {
            let volume = container::volume(&self.owner, &made_as, short);
            let options = RemoveVolumeOptionsBuilder::default().force(true).build();
            gone(self.docker.remove_volume(&volume, Some(options)).await)?;
        }
        Ok(())
    }

    /// Finds what nobody works at any more: unfinished containers and folders of makers that are gone, sandboxes long past their
    /// deadline, volumes of neither. What can't be removed keeps nothing else; the first error is told at the end.
    pub(super) async fn sweep(&self) -> Result<()> {
        let now = now();
        let mut left = Left { live: BTreeSet::new(), done: Ok(()) };
        left.note(None, self.with_home(Home::sweep_staged).await);
        left.note(None, image::sweep(&self.docker, &self.home, Duration::ZERO, &[]).await.map(drop));
        left.note(None, self.sweep_ready().await);
        // Before anything else: whose volume is seen now has a container or a folder that is seen below.
        let filters = container::owner_filter(&self.owner);
        let options = ListVolumesOptionsBuilder::default().filters(&filters).build();
        let found = self.docker.list_volumes(Some(options)).await.map_err(|e| translate("volumes", &e))?;
        let containers = self.containers().await?;
        for container in &containers {
            let labels = container.labels.clone().unwrap_or_default();
            let id = labels.get(LABEL_ID).and_then(|id| SandboxId::new(id.clone()).ok());
            // Whoever made a sandbox of the container counts, not who started it.
            let record = match id.as_ref().map(|id| self.home.read(id)).transpose() {
                Ok(record) => record.flatten(),
                Err(e) => {
                    left.note(id, Err(e));
                    continue;
                }
            };
            let made = Timestamp(u64::try_from(container.created.unwrap_or(0)).unwrap_or(0) * 1000);
            let made = record.as_ref().map_or(made, |r| r.created_at);
            let maker = record.as_ref().map(|r| &r.maker).or(labels.get(LABEL_MAKER));
            let given_up = maker.is_some_and(|maker| !record::is_at_work(maker));
            let old = given_up || now.since(made).0 > ORPHAN_AFTER_MS;
            match id {
                Some(id) => {
                    let created = container.state == Some(ContainerSummaryStateEnum::CREATED);
                    let unfinished = (created || self.home.is_unfinished(&id)) && old
                        || given_up && self.is_nobodys(&id)?;
                    let over = self.listed(container).is_some_and(|info| {
                        // The label's is that of the first start.
                        let deadline = record.as_ref().map_or(info.deadline, |record| record.deadline);
                        let late = match info.status {
                            SandboxStatus::Dead | SandboxStatus::Stopped => DEAD_FOR_MS,
                            SandboxStatus::Running | SandboxStatus::Paused => OVERDUE_MS,
                        };
                        now.since(deadline).0 > late
                    });
                    if unfinished || over {
                        let done = self.destroy(&id).await;
                        left.note(Some(id), done);
                    } else {
                        left.live.insert(id);
                    }
                }
                // An image was being prepared.
                None if old => {
                    let id = container.id.clone().unwrap_or_default();
                    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
                    let done = self.docker.remove_container(&id, Some(options)).await;
                    left.note(None, gone_is_ok(&id, done));
                }
                None => {}
            }
        }
        for id in self.home.known()? {
            let made_as = self.home.made_as(&id);
            let is_young =
                |r: Record| record::is_at_work(&r.maker) && now.since(r.created_at).0 < ORPHAN_AFTER_MS;
            match self.home.read(&id).map(|record| record.is_some_and(is_young)) {
                _ if left.live.contains(&made_as) => {}
                Ok(true) => _ = left.live.insert(id),
                Ok(false) => left.note(Some(made_as), self.destroy(&id).await),
                Err(e) => left.note(Some(made_as), Err(e)),
            }
        }
        for volume in found.volumes.unwrap_or_default() {
            let id = volume.labels.get(LABEL_ID).and_then(|id| SandboxId::new(id.clone()).ok());
            if let Some(id) = id.filter(|id| !left.live.contains(id)) {
                let done = self.destroy(&id).await;
                left.note(Some(id), done);
            }
        }
        left.done
    }
}

/// What a sweep leaves where it is.
struct Left {
    live: BTreeSet<SandboxId>,
    done: Result<()>,
}

impl Left {
    /// What could not be removed is there still, and is not tried again by another of its parts.
    fn note(&mut self, made_as: Option<SandboxId>, done: Result<()>) {
        let Err(e) = done else { return };
        tracing::warn!(sandbox = made_as.as_ref().map(SandboxId::as_str), error = %e, "a leftover stays");
        self.live.extend(made_as);
        self.done = std::mem::replace(&mut self.done, Ok(())).and(Err(e));
    }
}

/// The image is there by now: no registry is to blame.
fn unstarted(name: &str, fault: &bollard::errors::Error, record: &Record) -> SandboxError {
    translate(name, fault).or_hint(if record.spec.volumes.is_empty() {
        "the engine's own log says more, where it has one (journalctl -u docker)"
    } else {
        "is each volume's path inside a folder in the image, or nothing? try it without --volume"
    })
}

pub fn info(record: &Record, status: SandboxStatus) -> SandboxInfo {
    SandboxInfo {
        id: record.id.clone(),
        provider: ProviderKind::Docker,
        status,
        attempt: record.attempt,
        labels: record.spec.labels.clone(),
        limits: record.spec.limits,
        achieved: record.achieved.clone(),
        created_at: record.created_at,
        deadline: record.deadline,
    }
}
