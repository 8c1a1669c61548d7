//! How much has passed the proxies of a sandbox, kept in files: proxies come and go with the commands of a terminal, and whoever
//! asks may be another process.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forkyard_core::{SandboxId, Timestamp};

use super::log::COUNTS;
use crate::{EgressCounters, now};

/// Of one file; then every two of its lines become one.
const MAX_BYTES: u64 = 256 << 10;

fn line(at: Timestamp, more: EgressCounters) -> String {
    format!("{} {} {}\n", at.0, more.rx_bytes, more.tx_bytes)
}

fn plus(sum: EgressCounters, more: EgressCounters) -> EgressCounters {
    EgressCounters {
        rx_bytes: sum.rx_bytes.saturating_add(more.rx_bytes),
        tx_bytes: sum.tx_bytes.saturating_add(more.tx_bytes),
    }
}

/// A folder of such files. A line is when it was written, the bytes in and the bytes out since the line before.
#[derive(Debug, Clone)]
pub struct TrafficLog {
    dir: PathBuf,
}

impl TrafficLog {
    pub fn new(dir: &Path) -> TrafficLog {
        TrafficLog { dir: dir.into() }
    }

    pub(super) fn add(&self, sandbox: &SandboxId, more: EgressCounters) {
        if let Err(e) = self.try_add(sandbox, more) {
            tracing::warn!(%sandbox, error = %e, "bytes of the proxy are not counted");
        }
    }

    fn try_add(&self, sandbox: &SandboxId, more: EgressCounters) -> std::io::Result<()> {
        let path = self.path(sandbox);
        let open = || OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        let mut file = open().or_else(|_| {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            open()
        })?;
        if file.metadata()?.len() < MAX_BYTES {
            // In one piece: several processes may serve the same sandbox.
            return file.write_all(line(now(), more).as_bytes());
        }
        let mut lines = self.lines(sandbox);
        lines.push((now(), more));
        let mut shorter = tempfile::NamedTempFile::new_in(&self.dir)?;
        for two in lines.chunks(2) {
            let sum = two.iter().fold(EgressCounters::default(), |sum, (_, more)| plus(sum, *more));
            shorter.write_all(line(two[two.len() - 1].0, sum).as_bytes())?;
        }
        shorter.persist(&path).map(drop).map_err(|e| e.error)
    }

    /// Lines of another sandbox that had the same name before do not count.
    pub(super) fn since(&self, sandbox: &SandboxId, begin: Timestamp) -> EgressCounters {
        let lines = self.lines(sandbox).into_iter().filter(|(at, _)| *at >= begin);
        lines.fold(EgressCounters::default(), |sum, (_, more)| plus(sum, more))
    }

    fn lines(&self, sandbox: &SandboxId) -> Vec<(Timestamp, EgressCounters)> {
        let text = std::fs::read_to_string(self.path(sandbox)).unwrap_or_default();
        let parse = |line: &str| {
            let mut numbers = line.split(' ').map_while(|number| number.parse::<u64>().ok());
            let (at, rx_bytes, tx_bytes) = (numbers.next()?, numbers.next()?, numbers.next()?);
            Some((Timestamp(at), EgressCounters { rx_bytes, tx_bytes }))
        };
        text.lines().filter_map(parse).collect()
    }

    fn path(&self, sandbox: &SandboxId) -> PathBuf {
        self.dir.join(format!("{sandbox}.{COUNTS}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_adds_up_for_one_sandbox_of_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let log = TrafficLog::new(&dir.path().join("traffic"));
        let one = SandboxId::new("one").unwrap();
        let of = |rx_bytes, tx_bytes| EgressCounters { rx_bytes, tx_bytes };
        assert_eq!(log.since(&one, Timestamp(0)), of(0, 0));
        for _ in 0..3 {
            log.add(&one, of(10, 1));
        }
        assert_eq!(log.since(&one, Timestamp(0)), of(30, 3));
        assert_eq!(log.since(&one, Timestamp(now().0 + 1000)), of(0, 0));
        // However many there are, they take little room, and none is lost.
        let lines = usize::try_from(MAX_BYTES).unwrap() / 10;
        for _ in 0..lines {
            log.add(&one, of(1, 0));
        }
        assert_eq!(log.since(&one, Timestamp(0)), of(30 + lines as u64, 3));
        assert!(log.path(&one).metadata().unwrap().len() <= MAX_BYTES + 100);
        assert_eq!(std::fs::read_dir(&log.dir).unwrap().count(), 1);
    }
}
