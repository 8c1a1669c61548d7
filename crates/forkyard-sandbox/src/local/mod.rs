//! Sandboxes of this machine: no daemon, no image, no root.
//!
//! A [`LocalProvider`] starts one helper process (the zygote) and asks it for clones; each clone isolates itself and serves as
//! pid 1 of its sandbox. A sandbox outlives the process that made it: what is known of it lies in the state folder, and its
//! control socket beside it.

mod cgroup;
mod create;
mod detect;
mod disk;
mod doctor;
mod fd;
mod host_dirs;
pub(crate) mod image;
mod kernel;
pub(crate) mod link;
mod quota;
mod sandbox;
mod sizes;
mod skeleton;
mod snapshot;
pub(crate) mod state;
mod sweep;
mod sync;
mod zygote;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::{Attempt, SandboxId, SnapshotId, Timestamp};
use forkyard_guest::zygote::{Bind, Start, Work};
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use self::cgroup::Cgroups;
use self::detect::HostTrees;
use self::state::{Meta, State};
use self::zygote::Zygote;
use crate::traits::{FREEZE, Tie};
use crate::{
    Achieved, Capabilities, EgressFactory, ErrorKind, ForkCost, InsideFile, Labels, LimitMeans, Limits,
    NetworkMode, Provider, ProviderKind, Result, Sandbox, SandboxError, SandboxInfo, SandboxSpec,
    SandboxStatus, SnapshotInfo, UnusedImage,
};

pub use detect::{Shown, host_trees};
pub use doctor::{Finding, Level, doctor};
pub use zygote::{GUEST, expect_sandboxes};

/// As root, sandboxes' files and processes belong to this id, which nobody else uses: above all ranges that distributions,
/// systemd and subuid hand out.
pub const DEFAULT_ROOT_ID: u32 = 0x7EED_0001;

#[derive(Clone)]
pub struct LocalOptions {
    /// Without one, only the network mode `none` can be had.
    pub egress: Option<Arc<dyn EgressFactory>>,
    /// Where toolchains are looked for.
    pub home: Option<PathBuf>,
    /// Beside the state folder: what no sandbox may see in a folder of the host, by itself or in one around it.
    pub private: Vec<PathBuf>,
    /// Whose the sandboxes are when Forkyard runs as root.
    pub root_id: u32,
    /// The longest that commands are frozen for the copy of a snapshot.
    pub freeze: Duration,
}

impl Default for LocalOptions {
    fn default() -> Self {
        LocalOptions {
            egress: None,
            home: None,
            private: Vec::new(),
            root_id: DEFAULT_ROOT_ID,
            freeze: FREEZE,
        }
    }
}

/// Makes, finds and ends local sandboxes. Clones share one helper process.
#[derive(Clone)]
pub struct LocalProvider {
    inner: Arc<Inner>,
}

struct Inner {
    state: State,
    egress: Option<Arc<dyn EgressFactory>>,
    cgroups: Cgroups,
    trees: HostTrees,
    /// What no folder that a sandbox gets may hold or be in.
    private: Vec<PathBuf>,
    /// Read-only, for every root.
    files: Vec<InsideFile>,
    /// The name of the lowest layer.
    skeleton: String,
    zygote: Mutex<Option<Arc<Zygote>>>,
    removals: TaskTracker,
    /// Those of the removals that would not go on without this process.
    handovers: TaskTracker,
    /// This provider has looked for leftovers, or found that others did.
    swept: AtomicBool,
    owed: Arc<sync::Owed>,
    sizes: sizes::Sizes,
    freeze: Duration,
}

impl LocalProvider {
    /// Opens the state folder. Nothing is started before it is needed.
    pub fn new(state_dir: &Path, options: LocalOptions) -> Result<LocalProvider> {
        let is_root = rustix::process::geteuid().is_root();
        let state = State::open(state_dir, is_root.then_some(options.root_id))?;
        raise_open_files();
        let files = options.egress.as_ref().map(|egress| egress.files()).unwrap_or_default();
        let trees = detect::host_trees(options.home.as_deref(), state_dir);
        let inner = Inner {
            private: options.private.into_iter().chain([state.root.clone()]).collect(),
            state,
            egress: options.egress,
            cgroups: Cgroups::detect(),
            skeleton: skeleton::name(&trees.shown, &files),
            trees,
            files,
            zygote: Mutex::default(),
            removals: TaskTracker::new(),
            handovers: TaskTracker::new(),
            swept: AtomicBool::new(false),
            owed: Arc::default(),
            sizes: sizes::Sizes::default(),
            freeze: options.freeze,
        };
        Ok(LocalProvider { inner: Arc::new(inner) })
    }

    /// The host's trees that sandboxes of the default root see.
    pub fn shown(&self) -> &[Shown] {
        &self.inner.trees.shown
    }

    /// Images that were unpacked for sandboxes, as their users wrote them.
    pub fn images(&self) -> Result<Vec<String>> {
        self.inner.images()
    }

    /// Forgets an image: the next sandbox unpacks it again. Sandboxes and snapshots that use it keep working.
    pub async fn remove_image(&self, reference: &str) -> Result<()> {
        self.inner.remove_image(reference).await
    }
}

/// Each live sandbox costs this process a few descriptors.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current < limit.maximum || limit.maximum.is_none() {
        limit.current = limit.maximum;
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

impl Inner {
    async fn zygote(&self) -> Result<Arc<Zygote>> {
        let mut slot = self.zygote.lock().await;
        if let Some(zygote) = slot.as_ref().filter(|zygote| zygote.is_alive()) {
            return Ok(Arc::clone(zygote));
        }
        kernel::check(&kernel::release())?;
        let state = self.state.root.to_str().ok_or_else(|| {
            SandboxError::new(ErrorKind::Invalid, "the path of the state folder is not UTF-8")
                .hint("use another")
        })?;
        let bind = |shown: &Shown| Some(Bind { path: shown.path.to_str()?.to_string() });
        let start = Start {
            state: state.into(),
            become_id: self.state.owner,
            binds: self.trees.shown.iter().filter_map(bind).collect(),
            skeleton: self.skeleton.clone(),
            files: self.offer_files()?,
        };
        let zygote = Arc::new(Zygote::start(&start).await?);
        self.cgroups.adopt(zygote.pid(), self.state.owner);
        *slot = Some(Arc::clone(&zygote));
        Ok(zygote)
    }

    /// Removes something of the trash in the background. What a crash interrupts is removed by the next sweep.
    fn remove_later(self: &Arc<Self>, path: String) {
        let (inner, handover) = (Arc::clone(self), self.handovers.token());
        self.removals.spawn(async move {
            let removed = async {
                let begun =
                    inner.zygote().await?.begin(Work::Remove { path: path.clone() }, Vec::new()).await?;
                drop(handover);
                begun.result().await
            };
            if let Err(e) = removed.await {
                tracing::warn!(path, error = %e, "can't remove what a sandbox left");
            }
        });
    }

    /// The kernel needs a moment to let go of a group; nobody waits for that.
    fn remove_groups(&self, dirs: Vec<PathBuf>) {
        if !dirs.is_empty() {
            self.removals.spawn(self.handovers.track_future(async move { cgroup::remove(&dirs).await }));
        }
    }

    /// Ends whatever is left of a sandbox; its lock is held.
    async fn end(self: &Arc<Self>, id: &SandboxId, meta: Option<Meta>) -> Result<()> {
        let dir = self.state.sandbox(id);
        match &meta {
            Some(meta) => link::kill(meta).await?,
            None => link::shut_down_unknown(id, &dir).await,
        }
        // While there is a folder by which to find it again.
        let project = match &meta {
            Some(meta) => meta.project,
            None => {
                let names = state::names(&dir).unwrap_or_default();
                names
                    .iter()
                    .filter(|name| name.starts_with("up"))
                    .find_map(|name| quota::project_of(&dir.join(name)))
            }
        };
        project.into_iter().for_each(|project| self.lift_quota(project));
        for layer in meta.iter().flat_map(|meta| &meta.lower) {
            if let Some(path) = self.state.drop_ref(layer, &format!("sandbox.{id}"))? {
                self.remove_later(path);
            }
        }
        if let Some(path) = self.state.trash(&dir)? {
            self.remove_later(path);
        }
        // Last: by then the helper is at work on the rest.
        self.remove_groups(meta.map(|meta| meta.cgroups).unwrap_or_default());
        Ok(())
    }

    /// One whose record can't be read: nobody can come to it any more, and it is there to be removed. Why it can't be read says
    /// whoever tries.
    fn damaged(&self, id: SandboxId) -> SandboxInfo {
        let made = self.state.sandbox(&id).metadata().and_then(|meta| meta.modified()).ok();
        let made = made.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
        let made = Timestamp(u64::try_from(made.as_millis()).unwrap_or(u64::MAX));
        SandboxInfo {
            id,
            provider: ProviderKind::Local,
            status: SandboxStatus::Dead,
            attempt: Attempt(1),
            labels: Labels::new(),
            limits: Limits {
                memory_bytes: 0,
                cpus: 0.0,
                disk_bytes: 0,
                processes: 0,
                network_bytes_per_s: None,
            },
            achieved: Achieved {
                memory: LimitMeans::None,
                cpu: LimitMeans::None,
                disk: LimitMeans::None,
                processes: LimitMeans::None,
                network: LimitMeans::None,
                layers: Vec::new(),
            },
            created_at: made,
            deadline: made,
        }
    }

    fn meta(&self, id: &SandboxId) -> Result<Meta> {
        self.state.load(id)?.ok_or_else(|| not_found(id))
    }
}

fn not_found(id: &SandboxId) -> SandboxError {
    SandboxError::gone(id, "does not exist")
}

fn status(meta: &Meta) -> SandboxStatus {
    match (link::is_alive(meta), meta.stopped, meta.paused) {
        (true, _, true) => SandboxStatus::Paused,
        (true, _, false) => SandboxStatus::Running,
        (false, true, _) => SandboxStatus::Stopped,
        (false, false, _) => SandboxStatus::Dead,
    }
}

fn info(meta: &Meta) -> SandboxInfo {
    SandboxInfo {
        id: meta.id.clone(),
        provider: ProviderKind::Local,
        status: status(meta),
        attempt: meta.attempt,
        labels: meta.labels.clone(),
        limits: meta.limits,
        achieved: meta.achieved.clone(),
        created_at: meta.created_at,
        deadline: meta.deadline,
    }
}

#[async_trait]
impl Provider for LocalProvider {
    fn capabilities(&self) -> Capabilities {
        let mut network_modes = vec![NetworkMode::None];
        if self.inner.egress.is_some() {
            network_modes.extend([NetworkMode::Isolated, NetworkMode::Bridge]);
        }
        Capabilities {
            provider: ProviderKind::Local,
            attach: true,
            fencing: true,
            snapshot: true,
            fork: ForkCost::Constant,
            pause: true,
            start_stop: true,
            pty: true,
            volumes: true,
            network_modes,
            snapshots_travel: false,
        }
    }

    async fn create(&self, id: &SandboxId, attempt: Attempt, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>> {
        self.inner.sweep_if_due();
        self.inner.create(id, attempt, spec).await.map_err(|e| e.of_create(spec))
    }

    async fn attach(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.sweep_if_due();
        let _lock = self.inner.state.lock(id.as_str()).await?;
        self.inner.attach(id, attempt, Tie::Owner).await
    }
    async fn attach_beside(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.attach(id, attempt, Tie::Beside).await
    }
    async fn observe(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.attach(id, attempt, Tie::Onlooker).await
    }

    async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>> {
        let mut found = Vec::new();
        for id in self.inner.state.sandboxes()? {
            let info = match self.inner.state.load(&id) {
                Ok(Some(meta)) => info(&meta),
                // Gone between the two looks.
                Ok(None) => continue,
                Err(_) => self.inner.damaged(id),
            };
            if labels.iter().all(|(key, value)| info.labels.get(key) == Some(value)) {
                found.push(info);
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    async fn spec(&self, id: &SandboxId) -> Result<Option<SandboxSpec>> {
        self.inner.meta(id).map(|meta| Some(meta.spec))
    }

    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let _lock = self.inner.state.lock(id.as_str()).await?;
        let meta = match self.inner.state.load(id) {
            // Another version knows better what it left; of what is damaged the rest can go.
            Err(e) if e.kind == ErrorKind::Unsupported => return Err(e),
            Err(e) => {
                tracing::warn!(sandbox = %id, error = %e, "what is known of a sandbox is damaged");
                None
            }
            Ok(meta) => meta,
        };
        self.inner.end(id, meta).await
    }

    async fn stop(&self, id: &SandboxId) -> Result<()> {
        let _lock = self.inner.state.lock(id.as_str()).await?;
        let mut meta = self.inner.meta(id)?;
        link::kill(&meta).await?;
        self.inner.remove_groups(std::mem::take(&mut meta.cgroups));
        (meta.stopped, meta.paused) = (true, false);
        self.inner.state.save(&meta)
    }

    async fn start(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.sweep_if_due();
        self.inner.start(id, attempt).await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.inner.snapshots()
    }

    async fn measured_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.inner.measured_snapshots().await
    }

    async fn damaged_snapshots(&self) -> Result<Vec<(SnapshotId, SandboxError)>> {
        self.inner.damaged_snapshots()
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.inner.remove_snapshot(id).await
    }

    async fn export_snapshot(&self, id: &SnapshotId, to: &Path) -> Result<()> {
        self.inner.export_snapshot(id, to).await
    }

    async fn import_snapshot(
        &self,
        id: &SnapshotId,
        from: &Path,
        image: Option<&str>,
    ) -> Result<SnapshotInfo> {
        if image.is_some() {
            let what = "image: a local snapshot brings its root along";
            return Err(SandboxError::new(ErrorKind::Invalid, what).hint("leave --image out"));
        }
        let made = self.inner.import_snapshot(id, from).await;
        made.map_err(|e| e.or_hint("import what `export` wrote, whole and unchanged"))
    }

    async fn unused_images(
        &self,
        age: Duration,
        without: &[SnapshotId],
        remove: bool,
    ) -> Result<Vec<UnusedImage>> {
        self.inner.unused_images(age, without, remove).await
    }

    async fn sweep(&self) -> Result<()> {
        let swept = self.inner.sweep().await;
        self.settle().await;
        swept
    }

    async fn settle(&self) {
        idle(&self.inner.removals).await;
    }

    async fn leave(&self) {
        idle(&self.inner.handovers).await;
        if let Some(zygote) = &*self.inner.zygote.lock().await {
            zygote.leave();
        }
    }
}

async fn idle(tasks: &TaskTracker) {
    tasks.close();
    tasks.wait().await;
    tasks.reopen();
}

/// For messages about what this provider was not given.
fn no_egress() -> SandboxError {
    let message = "this network mode needs the egress proxy, which this provider was made without";
    SandboxError::new(ErrorKind::Unsupported, message).hint("use the network mode `none`")
}
