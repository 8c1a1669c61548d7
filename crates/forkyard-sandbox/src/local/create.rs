//! Making, starting and attaching to sandboxes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use forkyard_core::{Attempt, SandboxId};
use forkyard_guest::protocol::{Descriptors, Op};
use forkyard_guest::zygote::{Ask, Groups, RootAsk, SandboxAsk, Watch};

use super::cgroup::{Enforced, Group};
use super::image::ImageConfig;
use super::link::{self, Line, SocketPath};
use super::sandbox::LocalSandbox;
use super::state::{self, Boot, Meta};
use super::zygote::unavailable;
use super::{Inner, disk, no_egress, status};
use crate::guest_client::GuestClient;
use crate::traits::Tie;
use crate::{
    Achieved, EgressHandle, ErrorKind, LimitMeans, PROXY_ADDRESS, Result, Root, Sandbox, SandboxError,
    SandboxSpec, SandboxStatus, born, bounds, now, volumes,
};

/// Least memory of a sandbox.
const MIN_MEMORY: u64 = 4 << 20;
/// Shared memory counts as memory and outlives who filled it, so a part must be left: else the kernel's next choice is the
/// sandbox itself.
const MAX_SHM: u64 = 512 << 20;
/// The user inside, also when Forkyard runs as root, unless an image names another.
const USER_ID: u32 = 1000;
/// Where programs are looked for in a root that does not say.
const IMAGE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A bound of this account can only be lowered: the kernel refuses to start any command under a higher one.
fn check_account(processes: u32, bound: Option<u64>) -> Result<()> {
    match bound {
        Some(bound) if bound < u64::from(processes) => {
            let message =
                format!("limits.processes: {processes} is more than this account may have, which is {bound}");
            Err(SandboxError::new(ErrorKind::Unsupported, message)
                .hint(format!("use --processes {bound}, or raise the bound (ulimit -Hu, `nproc` in /etc/security/limits.conf)")))
        }
        Some(_) | None => Ok(()),
    }
}

/// By what means each limit will hold.
fn achieved(spec: &SandboxSpec, enforced: Enforced, disk: bool) -> Achieved {
    let means = |kernel| if kernel { LimitMeans::Kernel } else { LimitMeans::Watchdog };
    // Of the machine: those of this thread are fewer for the moment in which the helper parts from it.
    // SAFETY: sysconf takes a number and gives one.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    Achieved {
        memory: means(enforced.memory),
        // Nobody can use more than the machine has.
        cpu: means(enforced.cpu || (online > 0 && spec.limits.cpus >= online as f64)),
        disk: means(disk),
        // By rlimit where no cgroup: the kernel counts it per user namespace, which is per sandbox.
        processes: LimitMeans::Kernel,
        network: match spec.limits.network_bytes_per_s {
            Some(_) => LimitMeans::Watchdog,
            None => LimitMeans::None,
        },
        layers: Vec::new(),
    }
}

fn refuse_weak(achieved: &Achieved) -> Result<()> {
    let parts = [
        (
            "memory",
            achieved.memory,
            "run as root, or in a delegated cgroup v2 (systemd-run --user --scope -p Delegate=yes)",
        ),
        (
            "cpu",
            achieved.cpu,
            "run as root, or in a delegated cgroup v2 (systemd-run --user --scope -p Delegate=yes)",
        ),
        (
            "disk",
            achieved.disk,
            "use --disk-image, or mount the file system of the state folder with prjquota",
        ),
        (
            "network",
            achieved.network,
            "leave the rate out, or --strict: it is the proxy that keeps a rate, on every machine",
        ),
    ];
    match parts.iter().find(|(_, means, _)| *means == LimitMeans::Watchdog) {
        Some((what, _, hint)) => {
            let message = format!("strict: the kernel would not keep the {what} limit");
            Err(SandboxError::new(ErrorKind::Unsupported, message).hint(*hint))
        }
        None => Ok(()),
    }
}

/// What a root starts from.
#[derive(Default)]
struct Start {
    lower: Vec<String>,
    host_trees: bool,
    directory: Option<String>,
    image: ImageConfig,
}

impl Inner {
    pub(super) async fn create(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        bounds::check(spec, MIN_MEMORY)?;
        check_account(
            spec.limits.processes,
            rustix::process::getrlimit(rustix::process::Resource::Nproc).maximum,
        )?;
        if spec.network.has_proxy() {
            self.egress.as_ref().ok_or_else(no_egress)?.check(&spec.network)?;
        }
        // The first sandbox's helper starts while the rest is made ready; whether it did, is asked where it is needed.
        tokio::join!(self.zygote(), self.create_with(id, attempt, spec)).1
    }

    async fn create_with(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        let _lock = self.state.lock(id.as_str()).await?;
        if let Some(meta) = self.state.load(id)? {
            return match status(&meta) {
                SandboxStatus::Running | SandboxStatus::Paused => {
                    self.attach_as(meta, attempt, Tie::Owner).await
                }
                SandboxStatus::Stopped | SandboxStatus::Dead => {
                    let message = format!("sandbox {id} exists and does not run");
                    Err(SandboxError::new(ErrorKind::NotFound, message).hint("start it, or destroy it first"))
                }
            };
        }
        let dir = self.state.sandbox(id);
        if dir.exists() {
            self.end(id, None).await?; // its maker did not live to finish it
        }
        // Where there is no quota the kernel can keep a disk's limit only if the sandbox has one of its own, which costs speed:
        // for who asks for it.
        let quotas = if spec.disk_image { None } else { self.quotas().ok() };
        let disk = spec.disk_image || (spec.strict && quotas.is_none());
        if disk && let Err((why, fix)) = disk::check() {
            let message = match spec.disk_image {
                true => format!("disk_image: the sandbox can't have a disk of its own: {why}"),
                false => format!("strict: the kernel can't keep the disk limit: {why}"),
            };
            return Err(SandboxError::new(ErrorKind::Unsupported, message).hint(fix));
        }
        let volumes = volumes::check(&spec.volumes, &self.private)?;
        let Start { lower, host_trees, directory, image } = self.root_layers(id, &spec.root).await?;
        if let Some((private, tree)) = self.trees.exposed.as_ref().filter(|_| host_trees) {
            let what = format!("{} lies in {}, which sandboxes see", private.display(), tree.display());
            let hint = "set FORKYARD_HOME and HOME to folders outside of it, or use --image";
            return Err(SandboxError::new(ErrorKind::Unsupported, what).hint(hint));
        }
        let mut meta = Meta {
            format: state::format(),
            id: id.clone(),
            attempt,
            labels: spec.labels.clone(),
            limits: spec.limits,
            achieved: achieved(spec, Enforced::default(), disk),
            created_at: now(),
            deadline: now() + spec.lifetime.0,
            spec: SandboxSpec { volumes, ..spec.clone() },
            pid: 0,
            born: 0,
            boot: Boot::default(),
            cgroups: Vec::new(),
            lower,
            upper: 0,
            tried: 0,
            host_trees,
            disk,
            project: None,
            directory,
            skeleton: String::new(),
            binds: Vec::new(),
            sealing: None,
            image,
            stopped: false,
            paused: false,
        };
        let made = async {
            self.state.make_dir(&dir)?;
            if !disk {
                let parts = ["up0", "work0"].map(|part| dir.join(part));
                for part in &parts {
                    self.state.make_dir(part)?;
                }
                let claimed = quotas.map(|quotas| quotas.claim(&parts.each_ref().map(|part| part.as_path())));
                meta.project = claimed.transpose().unwrap_or_else(|e| {
                    tracing::warn!(sandbox = %id, error = %e, "no project for a disk quota");
                    None
                });
            }
            self.launch(meta.clone(), spec).await
        };
        match made.await {
            Ok(sandbox) => Ok(sandbox),
            Err(e) => {
                // Whatever was made goes; the first error is the one that counts.
                let _ = self.end(id, Some(meta)).await;
                Err(e)
            }
        }
    }

    pub(super) async fn start(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
    ) -> Result<Arc<dyn Sandbox>> {
        let _lock = self.state.lock(id.as_str()).await?;
        let mut meta = self.meta(id)?;
        if link::is_alive(&meta) {
            return self.attach_as(meta, attempt, Tie::Owner).await;
        }
        fence(&meta, attempt)?;
        if meta.deadline <= now() {
            return Err(SandboxError::overdue(id));
        }
        self.remove_groups(std::mem::take(&mut meta.cgroups));
        self.repair(&mut meta)?;
        (meta.attempt, meta.stopped, meta.paused) = (attempt, false, false);
        let spec = meta.spec.clone();
        self.launch(meta, &spec).await
    }

    /// The layers below a new sandbox; it is a user of each from now on.
    async fn root_layers(self: &Arc<Self>, id: &SandboxId, root: &Root) -> Result<Start> {
        match root {
            Root::Default => Ok(Start { host_trees: true, ..Start::default() }),
            Root::Directory(path) => {
                let directory = Some(volumes::check_directory(path, &self.private)?);
                Ok(Start { directory, ..Start::default() })
            }
            Root::Snapshot(snapshot) => {
                let gone =
                    || SandboxError::new(ErrorKind::NotFound, format!("there is no snapshot {snapshot}"));
                let meta = self.state.load_snapshot(snapshot)?.ok_or_else(gone)?;
                self.use_layers(id, &meta.layers, gone)?;
                Ok(Start {
                    lower: meta.layers,
                    host_trees: meta.host_trees,
                    directory: meta.directory,
                    image: meta.image,
                })
            }
            Root::Image(reference) => {
                let image = self.image(reference).await?;
                let gone = || unavailable(format!("image {reference} was removed just now"));
                self.use_layers(id, &image.layers, gone)?;
                Ok(Start { lower: image.layers, image: image.config, ..Start::default() })
            }
        }
    }

    /// The sandbox is a user of all these layers, or of none.
    fn use_layers(
        self: &Arc<Self>,
        id: &SandboxId,
        layers: &[String],
        gone: impl FnOnce() -> SandboxError,
    ) -> Result<()> {
        let user = format!("sandbox.{id}");
        if self.state.add_refs(layers, &user)? {
            return Ok(());
        }
        for taken in layers {
            self.drop_layer(taken, &user)?;
        }
        Err(gone())
    }

    pub(super) fn root_ask(&self, meta: &Meta) -> RootAsk {
        let id = &meta.id;
        let n = meta.upper;
        let (upper, work) = match meta.disk {
            true => (disk::UPPER.into(), disk::WORK.into()),
            false => (format!("sandboxes/{id}/up{n}"), format!("sandboxes/{id}/work{n}")),
        };
        RootAsk {
            disk: meta.disk,
            upper,
            work,
            lower: meta.lower.iter().map(|layer| format!("layers/{layer}/fs")).collect(),
            host_trees: meta.host_trees,
            directory: meta.directory.is_some(),
            volumes: meta.spec.volumes.iter().map(|volume| volume.path.clone()).collect(),
            spool: "spool".into(),
        }
    }

    fn env(&self, meta: &Meta, spec: &SandboxSpec) -> BTreeMap<String, String> {
        let id = &meta.id;
        let path: Vec<String> = self.trees.path.iter().map(|p| p.display().to_string()).collect();
        let (user, home) = match &meta.image.user {
            Some(user) => (user.name.as_str(), user.home.as_str()),
            None => ("user", "/home/user"),
        };
        let fixed = [
            ("HOME", home),
            ("USER", user),
            ("LOGNAME", user),
            ("SHELL", if meta.host_trees { "/bin/bash" } else { "/bin/sh" }),
            ("LANG", "C.UTF-8"),
            ("TERM", "xterm-256color"),
            ("FORKYARD_SANDBOX", id.as_str()),
        ];
        let mut env: BTreeMap<String, String> = fixed.map(|(k, v)| (k.to_string(), v.to_string())).into();
        if meta.host_trees {
            env.insert("PATH".into(), path.join(":"));
            env.extend(self.trees.env.clone());
        } else {
            env.insert("PATH".into(), IMAGE_PATH.into());
            env.extend(meta.image.env.clone());
            env.insert("HOME".into(), home.into());
        }
        if let (Some(egress), true) = (&self.egress, spec.network.has_proxy()) {
            env.extend(egress.env(id, &spec.network));
        }
        env.extend(spec.env.clone());
        env
    }

    /// Starts the processes of a sandbox whose folders exist, and writes down that it runs.
    async fn launch(self: &Arc<Self>, mut meta: Meta, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>> {
        let id = meta.id.clone();
        let dir = self.state.sandbox(&id);
        let zygote = self.zygote().await?;
        let (control, theirs) = UnixStream::pair().map_err(unavailable)?;
        let room = self.room(&meta);
        let make_group = || self.cgroups.make(self.state.tag(), &id, &meta.limits, self.state.owner);
        let mut group = self.cgroups.births().then(make_group);
        let born_in = group.as_mut().and_then(|group| group.dir.take());
        let ask = Ask::Sandbox(Box::new(SandboxAsk {
            root: self.root_ask(&meta),
            hostname: "sandbox".into(),
            id: meta.image.user.as_ref().map_or(USER_ID, |user| user.id),
            env: self.env(&meta, spec),
            deadline_ms: meta.deadline.since(now()).0,
            attempt: meta.attempt.0,
            processes: meta.limits.processes,
            group: born_in.is_some(),
            shm_bytes: MAX_SHM.min(meta.limits.memory_bytes / 2),
            proxy_port: spec.network.has_proxy().then_some(PROXY_ADDRESS.port()),
        }));
        let started = async {
            let mut fds: Vec<OwnedFd> = vec![theirs.into(), listen(&dir)?.into()];
            fds.extend(born_in);
            if let (true, Some(owner)) = (meta.disk, self.state.owner) {
                fds.push(disk::mount(&dir, meta.limits.disk_bytes, owner).await?);
            }
            fds.extend(self.host_dirs(&meta).await?);
            zygote.sandbox(ask, fds).await
        };
        let started = started.await;
        // While the clone makes its namespaces and mounts, all that it does not need for that is done here.
        let Group { dirs, joins, dir: _, oom_events, freezer, enforced } =
            group.unwrap_or_else(|| if started.is_ok() { make_group() } else { Group::default() });
        meta.cgroups = dirs;
        let cloned = match started {
            Ok(cloned) => cloned,
            Err(e) => {
                self.remove_groups(meta.cgroups);
                return Err(e);
            }
        };
        meta.pid = cloned.pid;
        meta.born = u32::try_from(cloned.pid).ok().and_then(born).unwrap_or(0);
        meta.boot = Boot::now();
        meta.skeleton.clone_from(&self.skeleton);
        meta.binds = if meta.host_trees { zygote.binds.clone() } else { Vec::new() };
        meta.achieved = achieved(spec, enforced, meta.disk || room.is_some());
        meta.achieved.layers.clone_from(&zygote.layers);
        let result = async {
            if spec.strict {
                refuse_weak(&meta.achieved)?;
            }
            let watch = |means, value| (means == LimitMeans::Watchdog).then_some(value);
            let watch = Watch {
                memory_bytes: watch(meta.achieved.memory, meta.limits.memory_bytes),
                cpus: (meta.achieved.cpu == LimitMeans::Watchdog).then_some(meta.limits.cpus),
                disk_bytes: watch(meta.achieved.disk, meta.limits.disk_bytes),
            };
            let groups = Groups { oom_events: oom_events.is_some(), freezer: !freezer.is_empty(), watch };
            let fds: Vec<OwnedFd> = joins.into_iter().chain(oom_events).chain(freezer).collect();
            cloned.join(&groups, &fds).await;
            self.state.save(&meta)?;
            // The greeting waits for the guest in its socket.
            let (proxy, client) =
                tokio::join!(cloned.ready(), GuestClient::connect(control, meta.attempt, None));
            // One that died has its own reason, which comes before what /proc says of it.
            let (proxy, client) = (proxy?, client?);
            if !link::is_seen(&meta)? {
                return Err(unseen(&id));
            }
            let egress = self.serve(&id, spec, proxy)?;
            Ok(LocalSandbox::new(Arc::clone(self), &meta, client, egress) as Arc<dyn Sandbox>)
        };
        let result = result.await;
        drop(room); // from now on the limit holds
        if result.is_err() {
            // Also one whose birth nobody could see.
            let _ = link::kill_by(cloned.pidfd, &id).await;
            self.remove_groups(meta.cgroups);
        }
        result
    }

    fn serve(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        proxy: Option<OwnedFd>,
    ) -> Result<Option<Box<dyn EgressHandle>>> {
        match (&self.egress, proxy) {
            (Some(egress), Some(socket)) => {
                let listener = std::net::TcpListener::from(socket);
                listener.set_nonblocking(true).map_err(unavailable)?;
                egress.serve(id, &spec.network, spec.limits.network_bytes_per_s, listener).map(Some)
            }
            _ => Ok(None),
        }
    }

    pub(super) async fn attach(
        self: &Arc<Self>,
        id: &SandboxId,
        attempt: Attempt,
        tie: Tie,
    ) -> Result<Arc<dyn Sandbox>> {
        let meta = self.meta(id)?;
        match status(&meta) {
            SandboxStatus::Running | SandboxStatus::Paused => self.attach_as(meta, attempt, tie).await,
            SandboxStatus::Stopped => {
                let message = format!("sandbox {id} is stopped");
                Err(SandboxError::new(ErrorKind::NotFound, message).hint("start it"))
            }
            SandboxStatus::Dead => Err(SandboxError::ended(id)),
        }
    }

    /// The guest decides who is stale; what it accepted is written down.
    async fn attach_as(
        self: &Arc<Self>,
        mut meta: Meta,
        attempt: Attempt,
        tie: Tie,
    ) -> Result<Arc<dyn Sandbox>> {
        fence(&meta, attempt)?;
        let id = meta.id.clone();
        let dir = self.state.sandbox(&id);
        let client = connect(&id, &dir, attempt).await?;
        if attempt > meta.attempt {
            meta.attempt = attempt;
            // Others hold no lock, and what they read may be old by now.
            if tie == Tie::Owner {
                self.state.save(&meta)?;
            }
        }
        let mut egress = None;
        let network = &meta.spec.network;
        let serves = network.has_proxy() && tie.serves(network);
        if serves && self.egress.is_some() {
            let ask = Op::Descriptors { what: Descriptors::Proxy };
            let mut sockets = Line::open(&id, &dir, attempt).await?.ask(ask, Vec::new()).await?;
            let socket = sockets.pop();
            egress = self.serve(&id, &meta.spec, socket)?;
        }
        Ok(LocalSandbox::new(Arc::clone(self), &meta, client, egress))
    }
}

/// It is there, and /proc does not say so: whoever looks for it later would take it for gone, or could not end it.
fn unseen(id: &SandboxId) -> SandboxError {
    let what = format!("sandbox {id} is made, but /proc does not show its process to this user");
    SandboxError::new(ErrorKind::Unsupported, what).hint(
        "if /proc is mounted with hidepid (grep ' /proc ' /proc/mounts): mount -o remount,hidepid=0 /proc, or its gid= for a group of this user",
    )
}

fn fence(meta: &Meta, attempt: Attempt) -> Result<()> {
    if attempt < meta.attempt {
        return Err(SandboxError::stale(&meta.id, meta.attempt, attempt));
    }
    Ok(())
}

pub(super) async fn connect(id: &SandboxId, dir: &Path, attempt: Attempt) -> Result<GuestClient> {
    let stream = link::connect(id, dir)?;
    let greeted =
        tokio::time::timeout(link::ANSWER_WITHIN, GuestClient::connect(stream, attempt, None)).await;
    greeted.unwrap_or_else(|_| {
        Err(SandboxError::new(ErrorKind::Timeout, format!("sandbox {id} does not answer"))
            .hint(format!("remove it: forkyard sandbox rm {id}")))
    })
}

fn listen(dir: &Path) -> Result<UnixListener> {
    let failed = |e| unavailable(format!("control socket: {e}"));
    let socket = SocketPath::new(dir).map_err(failed)?;
    let _ = std::fs::remove_file(dir.join("ctl"));
    UnixListener::bind(&socket.path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    #[test]
    fn a_bound_of_the_account_is_said_before_anything_is_made() {
        assert!(check_account(512, None).is_ok() && check_account(512, Some(512)).is_ok());
        let refused = check_account(512, Some(100)).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unsupported);
        assert!(refused.message.contains("512") && refused.message.contains("100"), "{refused}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("--processes 100")));
    }

    #[test]
    fn what_is_refused_can_be_put_right() {
        let spec = SandboxSpec {
            strict: true,
            limits: Limits { network_bytes_per_s: Some(1 << 20), ..SandboxSpec::default().limits },
            ..SandboxSpec::default()
        };
        let kept = Enforced { memory: true, cpu: true, processes: true };
        let refused = refuse_weak(&achieved(&spec, kept, true)).unwrap_err();
        assert!(refused.hint.unwrap().contains("leave the rate out"));
    }
}
