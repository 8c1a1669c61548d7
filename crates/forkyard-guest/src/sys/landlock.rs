//! Landlock: commands may open only what is below their own root, even through a descriptor that points elsewhere.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Result;

use super::check;

/// File rights by version of the interface: execute to make_sym, then refer, truncate, device ioctl.
const FS_RIGHTS: [(i64, u64); 4] = [(1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15)];
/// Execute, read a file, list a directory.
const READ_RIGHTS: u64 = 1 | 1 << 2 | 1 << 3;
const RULE_PATH_BENEATH: libc::c_int = 1;

#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: RawFd,
}

/// The version that the kernel speaks, or None without Landlock. The first one forbids to move files between folders: none.
pub fn version() -> Option<i64> {
    // SAFETY: with the VERSION flag (1) the kernel takes no pointer.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, 1u32) };
    (version > 1).then_some(version)
}

/// What may be done below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    All,
    Read,
}

impl Rights {
    fn of(self, version: i64) -> u64 {
        match self {
            Rights::All => {
                FS_RIGHTS.iter().filter(|(since, _)| *since <= version).map(|(_, bits)| bits).sum()
            }
            Rights::Read => READ_RIGHTS,
        }
    }
}

/// What is below these directories, nothing else. The rules hold for directories as they are mounted now: a new root needs a
/// new ruleset. None without Landlock.
pub fn ruleset<'a>(allowed: impl IntoIterator<Item = (BorrowedFd<'a>, Rights)>) -> Result<Option<OwnedFd>> {
    let Some(version) = version() else { return Ok(None) };
    let attr = RulesetAttr { handled_access_fs: Rights::All.of(version) };
    // SAFETY: `attr` lives across the call and its size is the one passed.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size_of::<RulesetAttr>(), 0u32)
    })?;
    // SAFETY: the kernel has just made this descriptor for us.
    let ruleset = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    for (dir, rights) in allowed {
        let rule = PathBeneathAttr { allowed_access: rights.of(version), parent_fd: dir.as_raw_fd() };
        // SAFETY: `rule` lives across the call and has the layout of the rule type that is named.
        check(unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                ruleset.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0u32,
            )
        })?;
    }
    Ok(Some(ruleset))
}

/// Binds the calling thread to the rules. Async-signal-safe: used between clone and exec.
pub fn restrict_self(ruleset: RawFd) -> bool {
    // SAFETY: takes a descriptor and flags, touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0u32) == 0 }
}
