//! From nothing to a sandbox and back.
//!
//! | engine says | and here | status |
//! |---|---|---|
//! | created | | dead: its maker did not live to start it |
//! | running | | running, or paused if the record says so |
//! | paused | | paused |
//! | exited | marked as stopped | stopped |
//! | exited | | dead: deadline or crash |

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use bollard::models::{ContainerStateStatusEnum, ContainerSummary, ContainerSummaryStateEnum};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListVolumesOptionsBuilder, LogsOptionsBuilder, RemoveContainerOptionsBuilder, RemoveVolumeOptionsBuilder,
};
use forkyard_core::{Attempt, SandboxId, Timestamp};
use futures::StreamExt;

use super::container::{self, FROM_PATH, GUEST_PATH, LABEL_ID, LABEL_INFO, LABEL_MAKER, VOLUMES};
use super::engine::{gone_is_ok, is_conflict, is_missing, translate};
use super::image::{self, Prepared};
use super::record::{self, Record, SOCKET_NAME};
use super::sandbox::DockerSandbox;
use super::{Inner, connect, snapshot, utf8};
use crate::{
    ErrorKind, ExecRequest, Labels, ProviderKind, Result, Root, Sandbox, SandboxError, SandboxInfo,
    SandboxSpec, SandboxStatus,
};

/// From the container's start to the guest's first answer; a slow disk included.
const GUEST_WITHIN: Duration = Duration::from_secs(30);
const GUEST_POLL: Duration = Duration::from_millis(5);
/// The engine takes its time to remove; it says `conflict` meanwhile.
const REMOVE_WITHIN: Duration = Duration::from_secs(30);
const REMOVE_POLL: Duration = Duration::from_millis(50);
/// Younger leftovers may be somebody's work under way.
const ORPHAN_AFTER_MS: u64 = 10 * 60 * 1000;
/// How long the leftovers of a sandbox that met its deadline stay for whoever still wants its files.
const DEAD_FOR_MS: u64 = 60 * 60 * 1000;
/// Of the guest's last words.
const MAX_LOG_BYTES: usize = 2048;

pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn not_found(id: &SandboxId, why: &str) -> SandboxError {
    SandboxError::gone(id, why)
}

/// 128 bits that nobody inside can guess.
fn token() -> Result<String> {
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
        container::name(&self.owner, id)
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

    pub(super) fn record(&self, id: &SandboxId) -> Result<Record> {
        self.home.read(id)?.ok_or_else(|| not_found(id, "does not exist on this host"))
    }

    pub(super) async fn create(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        container::check(spec)?;
        self.sweep_once();
        if spec.network.has_proxy() && self.egress.is_none() {
            let what = "this network mode needs the egress proxy, which this provider was made without";
            return Err(SandboxError::new(ErrorKind::Unsupported, what).hint("use the network mode `none`"));
        }
        match self.look(id).await? {
            Found::Running | Found::Ended if !self.home.is_unfinished(id) => {
                return self.attach(id, attempt, false).await;
            }
            Found::Running | Found::Ended | Found::Unfinished => self.destroy(id).await?,
            Found::Missing => {}
        }
        let (image, from) = match &spec.root {
            Root::Snapshot(snapshot) => {
                let record = self.home.read_snapshot(snapshot)?.ok_or_else(|| {
                    SandboxError::new(ErrorKind::NotFound, format!("no snapshot {snapshot} on this host"))
                })?;
                (record.image, Some(snapshot.clone()))
            }
            root => (image::reference(&self.docker, root, &self.image).await?, None),
        };
        let prepared = {
            let _one = self.preparing.lock().await;
            image::prepare(&self.docker, &self.owner, &image, self.user).await?
        };
        let created_at = now();
        let record = Record {
            id: id.clone(),
            attempt,
            spec: spec.clone(),
            token: token()?,
            image,
            achieved: container::achieved(spec),
            created_at,
            deadline: created_at + spec.lifetime.0,
            paused: false,
            maker: record::maker(),
        };
        let made = async {
            self.make(&record, &prepared, from.as_ref()).await?;
            let sandbox = self.run(&record).await?;
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

    async fn make(
        &self,
        record: &Record,
        prepared: &Prepared,
        from: Option<&forkyard_core::SnapshotId>,
    ) -> Result<()> {
        let id = &record.id;
        self.home.make(record, self.user.0, self.user.1)?;
        let proxy = self.egress.as_ref().map(|e| e.env(id, &record.spec.network)).unwrap_or_default();
        let env: BTreeMap<_, _> = container::environment(&prepared.env, proxy, &record.spec)?;
        let shared = container::Shared {
            guest: self.guest.clone(),
            files: self.files.clone(),
            run: utf8(&self.home.run(id))?,
            from: match from {
                Some(snapshot) => {
                    let names = VOLUMES.map(|(_, short)| snapshot::file_name(short));
                    Some(utf8(&self.home.offer(id, snapshot, &names)?)?)
                }
                None => None,
            },
        };
        let info = info(record, SandboxStatus::Running);
        let body = container::body(&self.owner, record, &info, &prepared.tag, self.user, &env, &shared)?;
        let name = self.container(id);
        let options = CreateContainerOptionsBuilder::default().name(&name).build();
        self.docker.create_container(Some(options), body).await.map_err(|e| translate(&name, &e))?;
        Ok(())
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
    async fn run(self: &Arc<Self>, record: &Record) -> Result<Arc<dyn Sandbox>> {
        let name = self.container(&record.id);
        self.docker.start_container(&name, None).await.map_err(|e| translate(&name, &e))?;
        let client = self.wait_for_guest(record).await?;
        // The socket is there: from now on nobody inside puts anything beside it.
        self.home.own_run(&record.id, 0, 0, 0o711)?;
        self.finish(record, Some(client)).await
    }

    async fn wait_for_guest(&self, record: &Record) -> Result<crate::guest_client::GuestClient> {
        let run = self.home.run(&record.id);
        let begin = tokio::time::Instant::now();
        loop {
            match connect::guest(&run, record.attempt, &record.token).await {
                Ok(client) => return Ok(client),
                Err(e) if e.kind != ErrorKind::NotFound => return Err(e),
                Err(_) => {}
            }
            if self.look(&record.id).await? != Found::Running {
                let words = self.last_words(&record.id).await;
                return Err(SandboxError::new(
                    ErrorKind::Unavailable,
                    format!("the guest of sandbox {} did not start: {words}", record.id),
                )
                .hint("is the image for this machine's architecture?"));
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
        client: Option<crate::guest_client::GuestClient>,
    ) -> Result<Arc<dyn Sandbox>> {
        let egress = match &self.egress {
            None => None,
            Some(factory) => {
                let run = self.home.run(&record.id);
                let listener = connect::proxy_listener(&run, record.attempt, &record.token).await?;
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
        beside: bool,
    ) -> Result<Arc<dyn Sandbox>> {
        match self.look(id).await? {
            Found::Running if self.home.is_unfinished(id) => return Err(not_found(id, "was never finished")),
            Found::Running => {}
            Found::Missing | Found::Unfinished => return Err(not_found(id, "does not exist")),
            Found::Ended if self.home.is_stopped(id) => {
                return Err(not_found(id, "is stopped").hint("start it first"));
            }
            Found::Ended => return Err(not_found(id, "has ended")),
        }
        let mut record = self.record(id)?;
        let newest = record.attempt;
        record.attempt = attempt;
        // Another process may have started the container just now.
        let client = self.wait_for_guest(&record).await?;
        if attempt > newest {
            self.home.write(&record)?;
        }
        if beside && record.spec.network.internal {
            return Ok(DockerSandbox::new(Arc::clone(self), &record, Some(client), None));
        }
        self.finish(&record, Some(client)).await
    }

    pub(super) async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>> {
        let found = self.containers(labels).await?;
        let mut all: Vec<SandboxInfo> = found.iter().filter_map(|c| self.listed(c)).collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(all)
    }

    async fn containers(&self, labels: &Labels) -> Result<Vec<ContainerSummary>> {
        let filters = container::label_filters(&self.owner, labels);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        self.docker.list_containers(Some(options)).await.map_err(|e| translate("list", &e))
    }

    /// None: not a sandbox, or one that is being removed.
    fn listed(&self, container: &ContainerSummary) -> Option<SandboxInfo> {
        let labels = container.labels.as_ref()?;
        let mut info: SandboxInfo = serde_json::from_str(labels.get(LABEL_INFO)?).ok()?;
        let record = self.home.read(&info.id).ok().flatten();
        info.status = match container.state? {
            ContainerSummaryStateEnum::RUNNING if record.as_ref().is_some_and(|r| r.paused) => {
                SandboxStatus::Paused
            }
            ContainerSummaryStateEnum::RUNNING | ContainerSummaryStateEnum::RESTARTING => {
                SandboxStatus::Running
            }
            ContainerSummaryStateEnum::PAUSED => SandboxStatus::Paused,
            ContainerSummaryStateEnum::REMOVING => return None,
            _ if self.home.is_stopped(&info.id) => SandboxStatus::Stopped,
            _ => SandboxStatus::Dead,
        };
        if let Some(record) = record {
            info.attempt = record.attempt;
            info.deadline = record.deadline;
        }
        Some(info)
    }

    pub(super) async fn status(&self, id: &SandboxId) -> Result<SandboxInfo> {
        let wanted = self.containers(&Labels::new()).await?;
        let own =
            |c: &&ContainerSummary| c.labels.as_ref().and_then(|l| l.get(LABEL_ID)) == Some(&id.to_string());
        wanted.iter().find(own).and_then(|c| self.listed(c)).ok_or_else(|| not_found(id, "does not exist"))
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
            Found::Running => return self.attach(id, attempt, false).await,
            Found::Missing | Found::Unfinished => return Err(not_found(id, "does not exist")),
            Found::Ended => {}
        }
        let mut record = self.record(id)?;
        if attempt < record.attempt {
            let what = format!("attempt {} owns sandbox {id}, {attempt} is older", record.attempt);
            return Err(SandboxError::new(ErrorKind::Stale, what));
        }
        record.attempt = attempt;
        record.deadline = now() + record.spec.lifetime.0;
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
        self.home.set_stopped(id, false)?;
        self.run(&record).await
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
                    return self.home.remove(id);
                }
            }
        }
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
        for (_, short) in VOLUMES {
            let volume = container::volume(&self.owner, id, short);
            let options = RemoveVolumeOptionsBuilder::default().force(true).build();
            gone(self.docker.remove_volume(&volume, Some(options)).await)?;
        }
        Ok(())
    }

    /// Finds what nobody works at any more: unfinished containers and folders of makers that are gone, sandboxes long past their
    /// deadline, volumes of neither.
    pub(super) async fn sweep(&self) -> Result<()> {
        let now = now();
        self.home.sweep_snapshots()?;
        // Before anything else: whose volume is seen now has a container or a folder that is seen below.
        let filters: HashMap<String, Vec<String>> = container::label_filters(&self.owner, &Labels::new());
        let options = ListVolumesOptionsBuilder::default().filters(&filters).build();
        let found = self.docker.list_volumes(Some(options)).await.map_err(|e| translate("volumes", &e))?;
        let containers = self.containers(&Labels::new()).await?;
        let mut live = BTreeSet::new();
        for container in &containers {
            let labels = container.labels.clone().unwrap_or_default();
            let made = Timestamp(u64::try_from(container.created.unwrap_or(0)).unwrap_or(0) * 1000);
            let given_up = labels.get(LABEL_MAKER).is_some_and(|maker| !record::is_at_work(maker));
            let old = given_up || now.since(made).0 > ORPHAN_AFTER_MS;
            match labels.get(LABEL_ID).and_then(|id| SandboxId::new(id.clone()).ok()) {
                Some(id) => {
                    let created = container.state == Some(ContainerSummaryStateEnum::CREATED);
                    let unfinished = (created || self.home.is_unfinished(&id)) && old;
                    let over = self.listed(container).is_some_and(|info| {
                        info.status == SandboxStatus::Dead && now.since(info.deadline).0 > DEAD_FOR_MS
                    });
                    if unfinished || over {
                        self.destroy(&id).await?;
                    } else {
                        live.insert(id.to_string());
                    }
                }
                // An image was being prepared.
                None if old => {
                    let id = container.id.clone().unwrap_or_default();
                    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
                    gone_is_ok(&id, self.docker.remove_container(&id, Some(options)).await)?;
                }
                None => {}
            }
        }
        for id in self.home.known()? {
            let young = self
                .home
                .read(&id)?
                .is_some_and(|r| record::is_at_work(&r.maker) && now.since(r.created_at).0 < ORPHAN_AFTER_MS);
            if young {
                live.insert(id.to_string());
            } else if !live.contains(id.as_str()) {
                self.destroy(&id).await?;
            }
        }
        for volume in found.volumes.unwrap_or_default() {
            let id = volume.labels.get(LABEL_ID).and_then(|id| SandboxId::new(id.clone()).ok());
            if let Some(id) = id.filter(|id| !live.contains(id.as_str())) {
                self.destroy(&id).await?;
            }
        }
        Ok(())
    }
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
