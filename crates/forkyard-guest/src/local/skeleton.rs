//! The lowest layer of the default root: empty directories, an /etc of its own, links as the host has them.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use forkyard_guest::zygote::{ETC, Start};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use crate::files::tree::OPEN_DIR;
use crate::sys::mount::{attach, clone_tree};
use crate::sys::{Result, Step};

/// Larger files of /etc are not what programs need to start.
const MAX_ETC_FILE: u64 = 4 << 20;
const ETC_DEPTH: usize = 6;

const DIRS: &[&str] = &[
    "workspace",
    "home/user",
    "root",
    "run/lock",
    "var/lib",
    "var/log",
    "var/cache",
    "mnt",
    "srv",
    "media",
    "opt",
    "proc",
    "sys",
    "dev",
    "tmp",
    "var/tmp",
    "etc",
];
const GENERATED: &[(&str, &str)] = &[
    (
        "passwd",
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    ),
    ("group", "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ("hostname", "sandbox\n"),
    ("resolv.conf", "# names are resolved by the egress proxy\n"),
    (
        "nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    ),
    ("profile", "if [ -r /etc/bash.bashrc ] && [ -n \"$BASH_VERSION\" ]; then . /etc/bash.bashrc; fi\n"),
    ("machine-id", ""),
];
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// Links of the host's root, as a merged /usr has them.
const ROOT_LINKS: &[&str] = &["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// The provider's own files.
struct Extra {
    path: String,
    data: Vec<u8>,
    mode: u32,
}

fn read_files(dir: &str, start: &Start) -> Result<Vec<Extra>> {
    let read = |file: &forkyard_guest::zygote::SkeletonFile| {
        let data =
            fs::read(format!("{dir}/{}.files/{}", start.skeleton, file.index)).step("skeleton file")?;
        Ok(Extra { path: file.path.clone(), data, mode: file.mode })
    };
    start.files.iter().map(read).collect()
}

/// The skeleton in `dir` that `start` names, made if it is not there: `root` for the default root, with a place for each of
/// `trees`, and `extra` for others. It is locked for as long as what is returned is open.
pub fn open(dir: &str, start: &Start, trees: &[&str]) -> Result<OwnedFd> {
    let path = format!("{dir}/{}", start.skeleton);
    loop {
        match rustix::fs::open(&path, OPEN_DIR, Mode::empty()) {
            Ok(opened) => {
                rustix::fs::flock(&opened, FlockOperation::LockShared).step("skeleton")?;
                // Removed between the two calls: somebody thought it old.
                if rustix::fs::stat(format!("{path}/extra")).is_ok() {
                    return Ok(opened);
                }
            }
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e).step("skeleton"),
        }
        let part = format!("{path}.part{}", std::process::id());
        let files = read_files(dir, start)?;
        let _ = crate::files::tree::remove(&part);
        build(&format!("{part}/root"), &files)?;
        for tree in trees {
            fs::create_dir_all(format!("{part}/root{tree}")).step("mount point")?;
        }
        fs::create_dir_all(format!("{part}/extra")).step("skeleton")?;
        add_files(&format!("{part}/extra"), &files)?;
        if fs::rename(&part, &path).is_err() {
            crate::files::tree::remove(&part)?; // another process was quicker
        }
    }
}

fn build(dir: &str, files: &[Extra]) -> Result<()> {
    for name in DIRS {
        fs::create_dir_all(format!("{dir}/{name}")).step("skeleton")?;
    }
    for name in ["tmp", "var/tmp"] {
        fs::set_permissions(format!("{dir}/{name}"), fs::Permissions::from_mode(0o1777)).step("skeleton")?;
    }
    for name in ETC {
        copy(
            Path::new("/etc").join(name).as_path(),
            Path::new(dir).join("etc").join(name).as_path(),
            ETC_DEPTH,
        );
    }
    for (name, text) in GENERATED {
        fs::write(format!("{dir}/etc/{name}"), text).step("skeleton /etc")?;
    }
    let _ = symlink("/proc/self/mounts", format!("{dir}/etc/mtab"));
    let _ = symlink("/run", format!("{dir}/var/run"));
    for name in ROOT_LINKS {
        if let Ok(target) = fs::read_link(format!("/{name}")) {
            symlink(target, format!("{dir}/{name}")).step("skeleton link")?;
        }
    }
    add_files(dir, files)
}

/// The provider's own files alone: all that a root which is not ours gets.
fn add_files(dir: &str, files: &[Extra]) -> Result<()> {
    for file in files {
        let path = format!("{dir}/{}", file.path.trim_start_matches('/'));
        if let Some(parent) = Path::new(&path).parent() {
            fs::create_dir_all(parent).step("skeleton file")?;
        }
        let _ = fs::remove_file(&path); // a link of the host's /etc in its place would lead elsewhere
        fs::write(&path, &file.data).step("skeleton file")?;
        fs::set_permissions(&path, fs::Permissions::from_mode(file.mode)).step("skeleton file")?;
    }
    Ok(())
}

/// Copies what may be read; what may not is not there. Links stay links: they are followed inside, where they lead nowhere new.
fn copy(from: &Path, to: &Path, depth: usize) {
    let Ok(meta) = fs::symlink_metadata(from) else { return };
    if meta.is_symlink() {
        if let Ok(target) = fs::read_link(from) {
            let _ = symlink(target, to);
        }
    } else if meta.is_dir() && depth > 0 {
        let (Ok(()), Ok(entries)) = (fs::create_dir_all(to), fs::read_dir(from)) else { return };
        for entry in entries.flatten() {
            if entry.file_name() != "private" {
                copy(&entry.path(), &to.join(entry.file_name()), depth - 1);
            }
        }
    } else if meta.is_file() && meta.len() <= MAX_ETC_FILE {
        let _ = fs::copy(from, to);
    }
}

pub fn build_dev(dir: &str) -> Result<()> {
    for name in DEVICES {
        fs::write(format!("{dir}/{name}"), "").step("device")?;
        let device = clone_tree(&format!("/dev/{name}"), false).step("device")?;
        attach(device, &format!("{dir}/{name}")).step("device")?;
    }
    for name in ["pts", "shm"] {
        fs::create_dir(format!("{dir}/{name}")).step("device")?;
    }
    for (name, target) in DEVICE_LINKS {
        symlink(target, format!("{dir}/{name}")).step("device")?;
    }
    let attrs = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let here = rustix::fs::open(
        dir,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .step("dev")?;
    crate::sys::mount::set_attributes(std::os::fd::AsFd::as_fd(&here), attrs, false).step("dev")
}
