//! Sandboxes of a Docker engine: the same traits over containers, hardened.
//!
//! A sandbox is a container whose pid 1 is the guest, without a network, on a read-only root, with volumes of its own (/workspace, /home/user, /tmp). The
//! engine's labels say what exists; a folder beside them says what only owners may know. Invariants:
//! - The container has loopback alone in every network mode; the egress proxy accepts on the guest's listener inside.
//! - A container that was made but never served is nobody's: whoever finds it makes it again.
//! - What is destroyed leaves no container, no volume and no folder.
//! - What is kept ready for later is nobody's sandbox until exactly one process has taken it.

mod archive;
mod connect;
mod container;
mod engine;
mod image;
mod lifecycle;
mod limits;
mod load;
mod oom;
pub(crate) mod record;
mod sandbox;
mod snapshot;
mod warm;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use bollard::Docker;
use forkyard_core::{Attempt, SandboxId, SnapshotId};
use tokio_util::sync::CancellationToken;

use self::limits::Kept;
use self::record::Home;
use crate::traits::{FREEZE, Tie};
use crate::{
    Capabilities, EgressFactory, ErrorKind, ForkCost, Labels, NetworkMode, Provider, ProviderKind, Result,
    Sandbox, SandboxError, SandboxInfo, SandboxSpec, SnapshotInfo, UnusedImage,
};

pub use self::engine::{describe as engine, socket_path};
pub use self::warm::WARM_LABEL;

/// The user inside when Forkyard runs as root; an ordinary user is itself inside.
const ROOTS_USER: (u32, u32) = (1000, 1000);
/// The image of [`crate::Root::Default`] where the configuration names none.
pub const DEFAULT_IMAGE: &str = "debian:stable-slim";

#[derive(Clone)]
pub struct DockerOptions {
    /// `unix:///path`; None is the engine's usual socket.
    pub host: Option<String>,
    /// Of [`crate::Root::Default`]; None is [`DEFAULT_IMAGE`].
    pub image: Option<String>,
    /// Without one, only the network mode `none` can be had.
    pub egress: Option<Arc<dyn EgressFactory>>,
    /// Beside the state folder and the engine's socket: what no sandbox may see in a folder of the host, by itself or in one
    /// around it.
    pub private: Vec<PathBuf>,
    /// Containers that a process that stays keeps started for the next sandboxes, of each image with its limits.
    pub warm: usize,
    /// The longest that commands are frozen for a snapshot.
    pub freeze: Duration,
}

impl Default for DockerOptions {
    fn default() -> Self {
        DockerOptions { host: None, image: None, egress: None, private: Vec::new(), warm: 0, freeze: FREEZE }
    }
}

#[derive(Clone)]
pub struct DockerProvider {
    inner: Arc<Inner>,
}

struct Inner {
    docker: Docker,
    /// Asked once, by the first sandbox.
    kept: tokio::sync::OnceCell<Kept>,
    home: Home,
    /// What no folder that a sandbox gets may hold or be in.
    private: Vec<PathBuf>,
    /// Sets this install's containers apart from others' on the same engine.
    owner: String,
    image: String,
    egress: Option<Arc<dyn EgressFactory>>,
    /// Host path, path inside.
    files: Vec<(String, String)>,
    guest: String,
    user: (u32, u32),
    /// One image is looked for at a time: twenty forks of one run want the same, and none of them pulls it once more.
    preparing: tokio::sync::Mutex<()>,
    /// Whether this process has looked for orphans.
    swept: AtomicBool,
    warm: usize,
    freeze: Duration,
    wants: std::sync::Mutex<Vec<warm::Want>>,
    wanted: tokio::sync::Notify,
}

fn utf8(path: &Path) -> Result<String> {
    path.to_str().map(String::from).ok_or_else(|| {
        SandboxError::new(ErrorKind::Invalid, format!("the path {} is not UTF-8", path.display()))
            .hint("use another state folder")
    })
}

impl Inner {
    /// Which limits the engine can keep.
    async fn kept(&self) -> Result<Kept> {
        let ask = async || self.docker.info().await.map(|info| Kept::by(&info));
        self.kept.get_or_try_init(ask).await.copied().map_err(|e| engine::translate("info", &e))
    }
}

impl DockerProvider {
    /// Reaches the engine and opens the state folder.
    pub async fn connect(state_dir: &Path, options: DockerOptions) -> Result<DockerProvider> {
        let docker = engine::connect(options.host.as_deref()).await?;
        let home = Home::open(state_dir)?;
        let files = options.egress.as_ref().map(|egress| egress.files()).unwrap_or_default();
        let files = home
            .inside_files(&files)?
            .into_iter()
            .map(|(path, inside)| Ok((utf8(&path)?, inside)))
            .collect::<Result<_>>()?;
        let guest = utf8(&home.guest()?)?;
        // SAFETY: getegid and geteuid take nothing and can't fail.
        let user = if record::is_root() { ROOTS_USER } else { unsafe { (libc::geteuid(), libc::getegid()) } };
        let socket = socket_path(options.host.as_deref()).map(Path::to_path_buf);
        let private = options.private.into_iter().chain([home.root().to_path_buf()]).chain(socket).collect();
        let inner = Inner {
            docker,
            kept: tokio::sync::OnceCell::new(),
            private,
            owner: record::digest(home.root().as_os_str().as_encoded_bytes())[..12].to_string(),
            home,
            image: options.image.unwrap_or_else(|| DEFAULT_IMAGE.to_string()),
            egress: options.egress,
            files,
            guest,
            user,
            preparing: tokio::sync::Mutex::new(()),
            swept: AtomicBool::new(false),
            warm: options.warm,
            freeze: options.freeze,
            wants: std::sync::Mutex::default(),
            wanted: tokio::sync::Notify::new(),
        };
        Ok(DockerProvider { inner: Arc::new(inner) })
    }
}

#[async_trait]
impl Provider for DockerProvider {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            provider: ProviderKind::Docker,
            attach: true,
            fencing: true,
            snapshot: true,
            fork: ForkCost::BySize,
            pause: true,
            start_stop: true,
            pty: true,
            volumes: true,
            network_modes: match self.inner.egress {
                Some(_) => vec![NetworkMode::None, NetworkMode::Isolated, NetworkMode::Bridge],
                None => vec![NetworkMode::None],
            },
            snapshots_travel: true,
        }
    }

    async fn create(&self, id: &SandboxId, attempt: Attempt, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>> {
        self.inner.create(id, attempt, spec).await.map_err(|e| e.of_create(spec))
    }
    async fn attach(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.attach(id, attempt, Tie::Owner).await
    }
    async fn attach_beside(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.attach(id, attempt, Tie::Beside).await
    }
    async fn observe(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.attach(id, attempt, Tie::Onlooker).await
    }
    async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>> {
        self.inner.list(labels).await
    }
    async fn spec(&self, id: &SandboxId) -> Result<Option<SandboxSpec>> {
        let record =
            self.inner.home.read(id)?.ok_or_else(|| SandboxError::gone(id, "is not of this host"))?;
        Ok(Some(record.spec))
    }
    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        self.inner.destroy(id).await
    }
    async fn stop(&self, id: &SandboxId) -> Result<()> {
        self.inner.stop(id).await
    }
    async fn start(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.inner.start(id, attempt).await
    }
    async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.inner.home.snapshots()
    }
    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<()> {
        snapshot::remove(&self.inner.home, id).await
    }
    async fn export_snapshot(&self, id: &SnapshotId, to: &Path) -> Result<()> {
        snapshot::export(&self.inner.home, id, to).await
    }
    async fn import_snapshot(
        &self,
        id: &SnapshotId,
        from: &Path,
        image: Option<&str>,
    ) -> Result<SnapshotInfo> {
        let image = image.unwrap_or(&self.inner.image);
        let made = snapshot::import(&self.inner.home, id, from, image).await;
        made.map_err(|e| e.or_hint("import what `export` wrote, whole and unchanged"))
    }
    async fn unused_images(
        &self,
        age: Duration,
        without: &[SnapshotId],
        remove: bool,
    ) -> Result<Vec<UnusedImage>> {
        let Inner { docker, home, .. } = &*self.inner;
        if remove {
            image::sweep(docker, home, age, without).await
        } else {
            image::unused(docker, home, age, without).await
        }
    }
    async fn sweep(&self) -> Result<()> {
        self.inner.sweep().await
    }
    async fn keep_ready(&self, stop: CancellationToken) {
        self.inner.keep_ready(stop).await;
    }
}
