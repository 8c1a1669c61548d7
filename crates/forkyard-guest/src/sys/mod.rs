//! System calls that the standard library has no words for.

pub mod ipc;
pub mod landlock;
pub mod mount;
pub mod process;
pub mod seccomp;
pub mod socket;

/// What failed, by the step a person can look up, and the kernel's reason.
#[derive(Debug, Clone)]
pub struct Failure {
    pub step: String,
    pub errno: i32,
}

pub type Result<T> = std::result::Result<T, Failure>;

/// Names the step of a system call that failed.
pub trait Step<T> {
    fn step(self, step: &str) -> Result<T>;
}

impl<T> Step<T> for rustix::io::Result<T> {
    fn step(self, step: &str) -> Result<T> {
        self.map_err(|e| Failure { step: step.into(), errno: e.raw_os_error() })
    }
}

impl<T> Step<T> for std::io::Result<T> {
    fn step(self, step: &str) -> Result<T> {
        self.map_err(|e| Failure { step: step.into(), errno: e.raw_os_error().unwrap_or(libc::EIO) })
    }
}

/// The result of a raw system call.
pub fn check(result: libc::c_long) -> rustix::io::Result<libc::c_long> {
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        Err(rustix::io::Errno::from_raw_os_error(errno))
    } else {
        Ok(result)
    }
}
