//! Quiet, for a snapshot: nothing starts and nothing is written while the root may be replaced.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use forkyard_guest::protocol::{Answer, Descriptors, Fault};
use rustix::fs::{Mode, OFlags};

use super::outbox::Outbox;
use super::server::{Server, has_children};
use crate::sys::landlock::{self, Rights};
use crate::sys::{Result, Step};

/// Somebody asked for quiet.
pub struct Quiet {
    pub owner: u64,
    pub seq: u32,
    /// Set when it is quiet: the layer that the root wrote to then.
    pub since: Option<Option<String>>,
    /// The upper layer of the root that may replace this one meanwhile.
    pub next: Option<OwnedFd>,
    /// Commands stand still too, until the quiet ends: whoever asked for it may not live to let them go on.
    pub frozen: bool,
}

impl Server {
    /// Answers whoever asked for quiet, once nothing changes any more.
    pub(super) fn on_quiet(&mut self) {
        let Some(quiet @ Quiet { since: None, .. }) = &mut self.quiet else { return };
        if self.changes.load(Ordering::SeqCst) > 0 {
            return;
        }
        let layer = root_layer();
        quiet.since = Some(layer.clone());
        if let Some(conn) = self.conns.get(&quiet.owner) {
            conn.out.push(quiet.seq, Answer::Quiet { busy: has_children(), layer }, &[]);
        }
    }

    pub(super) fn thaw(&mut self) {
        let Some(Quiet { since, next, frozen, .. }) = self.quiet.take() else { return };
        if frozen {
            self.keep_still();
        }
        // Whoever replaced the root may not have lived to say so.
        if since.is_some_and(|layer| layer != root_layer()) {
            if let Some(upper) = next {
                self.watchdog.go_on_in(upper);
            }
            // Landlock's rules hold for one root. Without them nothing may run.
            if self.renew_landlock().is_err() {
                self.ending = true;
                return;
            }
        }
        for (number, request, body) in std::mem::take(&mut self.deferred) {
            self.on_request(number, request, body);
        }
    }

    /// Whether commands may not run: for a user, or for a snapshot.
    pub(super) fn stands_still(&self) -> bool {
        self.paused || self.quiet.as_ref().is_some_and(|quiet| quiet.frozen)
    }

    /// After either of its reasons came or went.
    pub(super) fn keep_still(&mut self) {
        let freezer = self.config.freezer.as_ref();
        if self.stands_still() {
            if !freezer.is_some_and(|freezer| freezer.freeze()) {
                self.still.get_or_insert_default().renew();
                self.expect_work();
            }
        } else {
            if let Some(freezer) = freezer {
                freezer.thaw();
            }
            self.still = None;
        }
    }

    pub(super) fn renew_landlock(&mut self) -> Result<()> {
        self.landlock = None;
        if self.config.landlock {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open("/", flags, Mode::empty()).step("landlock")?;
            self.landlock = landlock::ruleset([(root.as_fd(), Rights::All)]).step("landlock")?;
        }
        Ok(())
    }

    pub(super) fn descriptors(&mut self, seq: u32, what: Descriptors, out: &Outbox) {
        let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let fds: rustix::io::Result<Vec<OwnedFd>> = match what {
            Descriptors::Proxy => self.config.proxy.iter().map(rustix::io::dup).collect(),
            Descriptors::Upper => self.watchdog.upper().iter().map(rustix::io::dup).collect(),
            Descriptors::Namespaces => {
                ["/proc/self/ns/user", "/proc/self/ns/mnt"].into_iter().map(open).collect()
            }
        };
        match fds {
            Ok(fds) if !fds.is_empty() => out.push_with(seq, Answer::Done, &[], fds),
            Ok(_) => out.error(seq, Fault::NotFound, "this sandbox has no such descriptor"),
            Err(e) => out.error(seq, Fault::Unavailable, e.to_string()),
        }
    }
}

/// The name of the layer that this root writes to, as the kernel has it.
fn root_layer() -> Option<String> {
    upper_of_root(&std::fs::read_to_string("/proc/self/mountinfo").ok()?)
}

fn upper_of_root(mounts: &str) -> Option<String> {
    let root = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some("/"))?;
    let (_, options) = root.split_once(" - overlay ")?;
    let upper = options.split([' ', ',']).find_map(|option| option.strip_prefix("upperdir="))?;
    upper.rsplit('/').next()?.strip_prefix("up").map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_is_read_from_the_mount_of_the_root() {
        let mounts = "\
90 80 0:50 / / rw,nosuid,nodev - overlay none rw,lowerdir+=/skel,upperdir=/state/sandboxes/a/up12,workdir=/state/sandboxes/a/work12,userxattr
91 90 0:51 / /proc rw - proc none rw
92 90 0:52 / /workspace/x rw - overlay none rw,upperdir=/elsewhere/up7
";
        assert_eq!(upper_of_root(mounts).as_deref(), Some("12"));
        assert_eq!(upper_of_root("90 80 0:50 / / rw - ext4 /dev/x rw\n"), None);
    }
}
