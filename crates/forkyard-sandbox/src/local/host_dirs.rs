//! Folders of the host that a sandbox gets because its user says so: volumes, and the directory that a root starts from.

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use forkyard_guest::zygote::{Tree, TreesAnswer, TreesAsk};

use super::state::Meta;
use super::zygote::{ask_once, setup_error, unavailable};
use super::{Inner, state};
use crate::{ErrorKind, Result, SandboxError, Volume};

/// Together with a sandbox's other descriptors they must fit one message.
const MAX_VOLUMES: usize = 32;
/// Never shown, whole or in part: the kernel's and the services' own, where a socket or a file is power over the host.
const CLOSED: &[&str] = &["/proc", "/sys", "/dev", "/run", "/var/run", "/boot"];
/// Where nothing can be mounted inside.
const CLOSED_INSIDE: &[&str] = &["/proc", "/sys", "/dev"];

fn invalid(message: String) -> SandboxError {
    SandboxError::new(ErrorKind::Invalid, message)
}

/// The folder that the user means, without links. What was checked here is what the sandbox gets: the mount refuses links.
fn canonical(what: &str, path: &str, state: &Path) -> Result<String> {
    if !Path::new(path).is_absolute() {
        return Err(invalid(format!("{what}: {path:?} is not an absolute path")));
    }
    let real = std::fs::canonicalize(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            SandboxError::new(ErrorKind::NotFound, format!("{what}: {path}: {e}"))
        }
        _ => state::io_error(Path::new(path), &e),
    })?;
    if !real.is_dir() {
        return Err(invalid(format!("{what}: {path} is not a folder")).hint("name the folder that holds it"));
    }
    let holds_or_is_in = |other: &Path| real.starts_with(other) || other.starts_with(&real);
    if CLOSED.iter().any(|closed| real.starts_with(closed)) || real == Path::new("/") {
        return Err(SandboxError::new(
            ErrorKind::Denied,
            format!("{what}: {} is never shown", real.display()),
        )
        .hint(format!("use a folder that holds files: not {} and not / itself", CLOSED.join(", "))));
    }
    if holds_or_is_in(state) {
        let message = format!("{what}: {} holds Forkyard's own state, or is in it", real.display());
        return Err(SandboxError::new(ErrorKind::Denied, message).hint("use another folder"));
    }
    real.into_os_string().into_string().map_err(|p| invalid(format!("{what}: {p:?} is not UTF-8")))
}

/// The place inside, in its plain form.
fn inside(path: &str) -> Result<String> {
    let given = Path::new(path);
    let plain = given.is_absolute()
        && given.components().skip(1).all(|part| matches!(part, Component::Normal(_)))
        && given.components().count() > 1
        && !path.contains('\0');
    if !plain {
        return Err(invalid(format!("volumes: {path:?} is not an absolute path inside")));
    }
    if CLOSED_INSIDE.iter().any(|closed| given.starts_with(closed)) {
        return Err(invalid(format!("volumes: nothing can be put on {path}")));
    }
    Ok(given.components().collect::<PathBuf>().display().to_string())
}

/// Volumes as they will be mounted: an outer one before one inside it.
pub fn check_volumes(volumes: &[Volume], state: &Path) -> Result<Vec<Volume>> {
    if volumes.len() > MAX_VOLUMES {
        return Err(invalid(format!("volumes: at most {MAX_VOLUMES}")));
    }
    let mut checked = Vec::new();
    for volume in volumes {
        checked.push(Volume {
            host_path: canonical("volumes", &volume.host_path, state)?,
            path: inside(&volume.path)?,
            writable: volume.writable,
        });
    }
    // By their parts: as text, /data-x would stand between /data and /data/sub.
    checked.sort_by(|a, b| Path::new(&a.path).cmp(Path::new(&b.path)));
    if let Some(pair) = checked.windows(2).find(|pair| Path::new(&pair[1].path).starts_with(&pair[0].path)) {
        // One in another would have to be made in it, in a folder of the host.
        let message = format!("volumes: {} is in {}", pair[1].path, pair[0].path);
        return Err(invalid(message).hint("put them side by side"));
    }
    Ok(checked)
}

pub fn check_directory(path: &str, state: &Path) -> Result<String> {
    canonical("root", path, state)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(host: &Path, path: &str) -> Volume {
        Volume { host_path: host.display().to_string(), path: path.into(), writable: false }
    }

    #[test]
    fn only_folders_that_hold_nothing_of_the_machine_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (state, data) = (dir.path().join("state"), dir.path().join("data"));
        std::fs::create_dir(&state).unwrap();
        std::fs::create_dir(&data).unwrap();
        std::fs::write(data.join("file"), "").unwrap();
        let state = state.canonicalize().unwrap();
        std::os::unix::fs::symlink("/proc", dir.path().join("link")).unwrap();
        let kind = |path: &Path| check_volumes(&[volume(path, "/x")], &state).map_err(|e| e.kind);
        assert_eq!(kind(&data).unwrap()[0].host_path, data.canonicalize().unwrap().display().to_string());
        for denied in [Path::new("/"), Path::new("/proc/self"), &dir.path().join("link"), dir.path(), &state]
        {
            assert_eq!(kind(denied).unwrap_err(), ErrorKind::Denied, "{denied:?}");
        }
        assert_eq!(kind(Path::new("relative")).unwrap_err(), ErrorKind::Invalid);
        assert_eq!(kind(&data.join("file")).unwrap_err(), ErrorKind::Invalid);
        assert_eq!(kind(&data.join("none")).unwrap_err(), ErrorKind::NotFound);
    }

    #[test]
    fn places_inside_are_plain_and_apart() {
        for bad in ["x", "/", "/a/../b", "/proc", "/dev/shm/x", ""] {
            assert!(inside(bad).is_err(), "{bad:?}");
        }
        assert_eq!(inside("//data///x/").unwrap(), "/data/x");
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().canonicalize().unwrap();
        let both =
            |a: &str, b: &str| check_volumes(&[volume(&data, a), volume(&data, b)], Path::new("/none/state"));
        assert!(both("/a", "/a/b").is_err() && both("/a", "/a").is_err());
        assert_eq!(both("/b", "/a").unwrap()[0].path, "/a");
        let three = ["/data/sub", "/data-x", "/data"].map(|path| volume(&data, path));
        let refused = check_volumes(&three, Path::new("/none/state")).unwrap_err();
        assert!(refused.message.contains("/data/sub is in /data"), "{refused}");
    }
}
