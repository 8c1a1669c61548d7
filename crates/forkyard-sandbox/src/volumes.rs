//! Folders of the host that a sandbox gets because its user says so, whichever provider shows them: volumes, and the directory
//! that a root starts from.

use std::path::{Component, Path, PathBuf};

use crate::{ErrorKind, Result, SandboxError, Volume};

/// Together with a local sandbox's other descriptors they must fit one message.
const MAX_VOLUMES: usize = 32;
/// Never shown, whole or in part: the kernel's and the services' own, where a socket or a file is power over the host.
const CLOSED: &[&str] = &["/proc", "/sys", "/dev", "/run", "/var/run", "/boot"];
/// Where nothing can be mounted inside.
const CLOSED_INSIDE: &[&str] = &["/proc", "/sys", "/dev", "/.forkyard"];

fn invalid(message: String) -> SandboxError {
    SandboxError::new(ErrorKind::Invalid, message)
}

/// The folder that the user means, without links. What was checked here is what the sandbox gets: a local one's mount refuses
/// links. `private`: what no sandbox may see, by itself or in a folder around it; also the socket of an engine.
fn canonical(what: &str, path: &str, private: &[PathBuf]) -> Result<String> {
    if !Path::new(path).is_absolute() {
        return Err(
            invalid(format!("{what}: {path:?} is not an absolute path")).hint("name a folder of this host")
        );
    }
    let real = std::fs::canonicalize(path).map_err(|e| {
        let error = |kind| SandboxError::new(kind, format!("{what}: {path}: {e}"));
        match e.kind() {
            std::io::ErrorKind::NotFound => error(ErrorKind::NotFound),
            std::io::ErrorKind::PermissionDenied => error(ErrorKind::Denied)
                .hint(format!("this user may not use it: `ls -ld {path}` says who may")),
            _ => error(ErrorKind::Unavailable),
        }
    })?;
    if !real.is_dir() {
        return Err(invalid(format!("{what}: {path} is not a folder")).hint("name the folder that holds it"));
    }
    let shown = real.display();
    if CLOSED.iter().any(|closed| real.starts_with(closed)) || real == Path::new("/") {
        return Err(invalid(format!("{what}: {shown} is never shown"))
            .hint(format!("use a folder that holds files: not {} and not / itself", CLOSED.join(", "))));
    }
    for own in private {
        // As late as in the path: a socket may have come since. What is not there shows nothing.
        let own = match std::fs::canonicalize(own) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            found => found.unwrap_or_else(|_| own.clone()),
        };
        if real.starts_with(&own) || own.starts_with(&real) {
            let message =
                format!("{what}: {shown} holds {}, which no sandbox may see, or is in it", own.display());
            return Err(invalid(message).hint("use another folder"));
        }
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
        return Err(invalid(format!("volumes: {path:?} is not an absolute path inside"))
            .hint("use one like /data, without .."));
    }
    if CLOSED_INSIDE.iter().any(|closed| given.starts_with(closed)) {
        return Err(
            invalid(format!("volumes: nothing can be put on {path}")).hint("use another path, like /data")
        );
    }
    Ok(given.components().collect::<PathBuf>().display().to_string())
}

/// Volumes as they will be mounted: an outer one before one inside it.
pub(crate) fn check(volumes: &[Volume], private: &[PathBuf]) -> Result<Vec<Volume>> {
    if volumes.len() > MAX_VOLUMES {
        return Err(invalid(format!("volumes: at most {MAX_VOLUMES}")).hint("name a folder around several"));
    }
    let mut checked = Vec::new();
    for volume in volumes {
        checked.push(Volume {
            host_path: canonical("volumes", &volume.host_path, private)?,
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

pub(crate) fn check_directory(path: &str, private: &[PathBuf]) -> Result<String> {
    canonical("root", path, private)
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
        let (engine, other) = (dir.path().join("engine"), dir.path().join("other"));
        for folder in [&state, &data, &engine, &other] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(data.join("file"), "").unwrap();
        let _engine = std::os::unix::net::UnixListener::bind(engine.join("e.sock")).unwrap();
        std::os::unix::fs::symlink(engine.join("e.sock"), dir.path().join("e")).unwrap();
        std::os::unix::fs::symlink("/proc", dir.path().join("link")).unwrap();
        let private = [state.clone(), dir.path().join("e"), dir.path().join("none")];
        let check = |path: &Path| check(&[volume(path, "/x")], &private);
        assert_eq!(check(&data).unwrap()[0].host_path, data.canonicalize().unwrap().display().to_string());
        assert!(check(&other).is_ok());
        let closed = [Path::new("/"), Path::new("/proc/self"), &dir.path().join("link"), dir.path(), &state];
        for path in closed.into_iter().chain([engine.as_path(), Path::new("relative"), &data.join("file")]) {
            let refused = check(path).unwrap_err();
            assert_eq!((refused.kind, refused.hint.is_some()), (ErrorKind::Invalid, true), "{path:?}");
        }
        assert_eq!(check(&data.join("none")).unwrap_err().kind, ErrorKind::NotFound);
    }

    #[test]
    fn places_inside_are_plain_and_apart() {
        for bad in ["x", "/", "/a/../b", "/proc", "/dev/shm/x", "/.forkyard/run", ""] {
            assert!(inside(bad).is_err_and(|e| e.hint.is_some()), "{bad:?}");
        }
        assert_eq!(inside("//data///x/").unwrap(), "/data/x");
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().canonicalize().unwrap();
        let both = |a: &str, b: &str| check(&[volume(&data, a), volume(&data, b)], &[]);
        assert!(both("/a", "/a/b").is_err() && both("/a", "/a").is_err());
        assert_eq!(both("/b", "/a").unwrap()[0].path, "/a");
        let three = ["/data/sub", "/data-x", "/data"].map(|path| volume(&data, path));
        let refused = check(&three, &[]).unwrap_err();
        assert!(refused.message.contains("/data/sub is in /data"), "{refused}");
    }
}
