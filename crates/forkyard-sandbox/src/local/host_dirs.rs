//! Mounts of the folders of the host that a sandbox gets: its volumes, and the directory that its root starts from.

use std::os::fd::OwnedFd;

use forkyard_guest::zygote::{Tree, TreesAnswer, TreesAsk};

use super::Inner;
use super::state::Meta;
use super::zygote::{ask_once, setup_error, unavailable};
use crate::{ErrorKind, Result, SandboxError};

impl Inner {
    /// Mounts for a sandbox: of its directory, if it has one, and of its volumes in order.
    pub(super) async fn host_dirs(&self, meta: &Meta) -> Result<Vec<OwnedFd>> {
        let directory = meta.directory.iter().map(|path| Tree {
            path: path.clone(),
            writable: false,
            below: false, // overlayfs would not look below it
        });
        let volumes = meta.spec.volumes.iter().map(|volume| Tree {
            path: volume.host_path.clone(),
            writable: volume.writable,
            below: true,
        });
        self.trees(directory.chain(volumes).collect()).await
    }

    /// The directory's mount alone, for a new root.
    pub(super) async fn directory(&self, meta: &Meta) -> Result<Vec<OwnedFd>> {
        let tree = |path: &String| Tree { path: path.clone(), writable: false, below: false };
        self.trees(meta.directory.iter().map(tree).collect()).await
    }

    async fn trees(&self, trees: Vec<Tree>) -> Result<Vec<OwnedFd>> {
        if trees.is_empty() {
            return Ok(Vec::new());
        }
        let count = trees.len();
        let ask = TreesAsk { trees, shown_as: self.state.owner };
        let (text, fds) = ask_once("trees", &ask, &[]).await?;
        match serde_json::from_slice(&text) {
            Ok(TreesAnswer::Done) if fds.len() == count => Ok(fds),
            Ok(TreesAnswer::Failed { path, errno }) if path.starts_with('/') => Err(refused(&path, errno)),
            Ok(TreesAnswer::Failed { path, errno }) => Err(setup_error(&path, errno)),
            Ok(TreesAnswer::Done) | Err(_) => Err(unavailable("folders of the host could not be mounted")),
        }
    }
}

fn refused(path: &str, errno: i32) -> SandboxError {
    let reason = std::io::Error::from_raw_os_error(errno);
    let message = format!("{path} can't be mounted: {reason}");
    match errno {
        libc::ENOENT | libc::ENOTDIR => SandboxError::new(ErrorKind::NotFound, message),
        libc::ELOOP => SandboxError::new(ErrorKind::Denied, message).hint("a part of it became a link"),
        libc::EINVAL => SandboxError::new(ErrorKind::Unsupported, message)
            .hint("as an ordinary user, a root can't be a folder with other mounts below it"),
        libc::EACCES | libc::EPERM => SandboxError::new(ErrorKind::Denied, message),
        _ => unavailable(message),
    }
}
