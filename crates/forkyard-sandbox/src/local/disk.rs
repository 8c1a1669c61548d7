//! A disk of its own for a sandbox: a file system in a file, behind a loop device, so that the kernel itself keeps the limit.
//! Only root can have one.
//!
//! Nothing shows on the host: the mount has no place there and lives as long as the sandbox, and the device frees itself with
//! the mount. So a kill of anybody leaves nothing but the file.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use super::state;
use super::zygote::unavailable;
use crate::{ErrorKind, Result, SandboxError};

/// In the sandbox's folder.
const IMAGE: &str = "disk.img";
/// What the layer and overlayfs' own folder are called on the disk.
pub const UPPER: &str = "up";
pub const WORK: &str = "work";
/// Where the program that makes file systems is looked for: root's search path may lack some.
const MKFS: [&str; 4] =
    ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4", "/usr/local/sbin/mkfs.ext4"];
const LOOP_CONTROL: &str = "/dev/loop-control";
/// Of ext4: in its superblock, 1024 bytes from the start.
const MAGIC: u16 = 0xEF53;
const MAGIC_AT: u64 = 1024 + 56;
/// Another process may take the free device first.
const TRIES: usize = 64;

/// Why sandboxes of this machine can't have one, and the fix.
pub fn check() -> std::result::Result<(), (String, &'static str)> {
    if !rustix::process::geteuid().is_root() {
        return Err(("only root can mount a disk image".into(), "run as root"));
    }
    if mkfs().is_none() {
        return Err(("there is no mkfs.ext4".into(), "install e2fsprogs"));
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !known.lines().any(|line| line.trim() == "ext4") {
        return Err(("the kernel does not know ext4".into(), "modprobe ext4"));
    }
    match File::options().read(true).write(true).open(LOOP_CONTROL) {
        Ok(_) => Ok(()),
        Err(e) => {
            Err((format!("{LOOP_CONTROL}: {e}"), "modprobe loop; in a container, give it the loop devices"))
        }
    }
}

fn mkfs() -> Option<&'static Path> {
    MKFS.iter().map(Path::new).find(|path| path.exists())
}

/// The sandbox's disk as a detached mount, made if it is not there. `owner` is whose its files are.
pub async fn mount(dir: &Path, bytes: u64, owner: u32) -> Result<OwnedFd> {
    let image = dir.join(IMAGE);
    tokio::task::spawn_blocking(move || {
        if !image.exists() {
            make(&image, bytes, owner)?;
        }
        let mount =
            mount_image(&image).map_err(|e| unavailable(format!("the disk image can't be mounted: {e}")))?;
        folders(&mount, owner).map_err(|e| state::io_error(&image, &e))?;
        Ok(mount)
    })
    .await
    .map_err(unavailable)?
}

/// Under its name only when it is whole.
fn make(image: &Path, bytes: u64, owner: u32) -> Result<()> {
    let part: PathBuf = image.with_extension("new");
    let failed = |e: std::io::Error| state::io_error(&part, &e);
    File::create(&part).and_then(|file| file.set_len(bytes)).map_err(failed)?;
    let program = mkfs().ok_or_else(|| unavailable("mkfs.ext4 is gone"))?;
    // No journal: what survives a crash of the machine is a checkpoint. No reserve: nobody inside is root.
    let made = Command::new(program)
        .args(["-q", "-F", "-m", "0", "-O", "^has_journal", "-E"])
        .arg(format!("root_owner={owner}:{owner},lazy_itable_init=1,nodiscard"))
        .arg(&part)
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .map_err(failed)?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr).trim().to_string();
        let message = format!("limits.disk_bytes: no file system of {bytes} bytes can be made: {said}");
        return Err(SandboxError::new(ErrorKind::Invalid, message).hint("use a larger disk"));
    }
    std::fs::rename(&part, image).map_err(failed)
}

/// The layer's folder as it is; overlayfs' own anew, since it carries the mark of its last mount.
fn folders(mount: &OwnedFd, owner: u32) -> std::io::Result<()> {
    let at = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
    match std::fs::remove_dir_all(at.join(WORK)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    for name in [UPPER, WORK] {
        match rustix::fs::mkdirat(mount, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                let id = |raw| rustix::fs::Uid::from_raw(raw);
                let group = rustix::fs::Gid::from_raw(owner);
                rustix::fs::chownat(mount, name, Some(id(owner)), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn mount_image(image: &Path) -> std::io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open(image)?;
    // Said before a device is taken for what can't be mounted.
    let mut magic = [0; 2];
    file.read_exact_at(&mut magic, MAGIC_AT)?;
    if u16::from_le_bytes(magic) != MAGIC {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "it holds no ext4 file system"));
    }
    let (device, path) = loop_device(&file)?;
    let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(fs.as_fd(), "source", path.as_str())?;
    // What is removed inside is free outside too.
    fsconfig_set_flag(fs.as_fd(), "discard")?;
    fsconfig_create(fs.as_fd())?;
    let attrs = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attrs)?;
    drop(device); // the mount holds it from now on
    Ok(mount)
}

/// `struct loop_info64` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of the kernel.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
/// It frees itself when its last user is gone.
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// A device over the file, and its path.
fn loop_device(file: &File) -> std::io::Result<(OwnedFd, String)> {
    let control = rustix::fs::open(LOOP_CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for _ in 0..TRIES {
        // SAFETY: takes no argument and gives a number.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let path = format!("/dev/loop{number}");
        let device = rustix::fs::open(path.as_str(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        // SAFETY: all zeros is a valid value of this struct of numbers.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = file.as_raw_fd() as u32;
        config.info.flags = LO_FLAGS_AUTOCLEAR;
        let name = CString::new("forkyard sandbox").expect("has no zero byte");
        config.info.file_name[..name.as_bytes().len()].copy_from_slice(name.as_bytes());
        // SAFETY: the kernel reads one loop_config, which lives across the call and has its layout.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
            return Ok((device, path));
        }
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(std::io::Error::other("other processes take every free loop device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_no_file_system_is_refused_as_that() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        std::fs::write(&image, vec![0; 64 << 10]).unwrap();
        assert_eq!(mount_image(&image).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
        std::fs::write(&image, "short").unwrap();
        assert_eq!(mount_image(&image).unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    }
}
