//! Which kernels can hold a sandbox.

use crate::{ErrorKind, Result, SandboxError};

/// Debian 12's. Older ones lack calls that the isolation is made of, or are not tried.
const OLDEST: (u32, u32) = (6, 1);

/// What `uname -r` says.
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Refuses a kernel that is too old, with the way to a newer one.
pub fn check(release: &str) -> Result<()> {
    // A release that is written in another way is given the chance to work.
    match version(release) {
        Some(version) if version < OLDEST => {
            let message = format!("kernel {release} is too old for local sandboxes: 6.1 or newer is needed");
            Err(SandboxError::new(ErrorKind::Unsupported, message)
                .hint("install a newer kernel (Debian 12, Ubuntu 24.04 or 22.04 with linux-generic-hwe-22.04, RHEL 10), or use --provider docker"))
        }
        _ => Ok(()),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_before_6_1_are_refused_with_the_reason_and_the_fix() {
        for old in ["6.0.19", "5.15.0-139-generic", "5.10.0-35-amd64", "4.18.0-553.el8.x86_64", "2.6.78"] {
            let refused = check(old).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Unsupported);
            assert!(refused.message.contains(old) && refused.message.contains("6.1"), "{refused}");
            assert!(refused.hint.is_some_and(|hint| hint.contains("newer kernel")));
        }
        for new in ["6.1.0-54-amd64", "6.1", "6.12.3+deb13-amd64", "7.0.0-rc1", "10.2.1", "odd"] {
            assert!(check(new).is_ok(), "{new}");
        }
        assert!(check(&release()).is_ok());
    }
}
