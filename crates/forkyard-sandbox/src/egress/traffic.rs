//! How much has passed the proxies of a sandbox, kept in files: proxies come and go with the commands of a terminal, and whoever
//! asks may be another process.

use std::io::Write;
use std::path::{Path, PathBuf};

use forkyard_core::{SandboxId, Timestamp};

use super::log::{COUNTS, append, hold};
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

/// Lines that are no three numbers were torn by a full disk, and are left out.
fn parse(text: &[u8]) -> Vec<(Timestamp, EgressCounters)> {
    let parse = |line: &str| {
        let numbers: Option<Vec<u64>> = line.split(' ').map(|number| number.parse().ok()).collect();
        let [at, rx_bytes, tx_bytes] = *numbers?.as_slice() else { return None };
        Some((Timestamp(at), EgressCounters { rx_bytes, tx_bytes }))
    };
    String::from_utf8_lossy(text).lines().filter_map(parse).collect()
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
        // Several processes may serve the same sandbox.
        let mut file = hold(&path)?;
        if file.metadata()?.len() < MAX_BYTES {
            return append(&mut file, line(now(), more).into());
        }
        let mut lines = parse(&std::fs::read(&path)?);
        lines.push((now(), more));
        let both = |two: &[(Timestamp, EgressCounters)]| {
            let sum = two.iter().fold(EgressCounters::default(), |sum, (_, more)| plus(sum, *more));
            line(two[two.len() - 1].0, sum)
        };
        let mut shorter = tempfile::NamedTempFile::new_in(&self.dir)?;
        shorter.write_all(lines.chunks(2).map(both).collect::<String>().as_bytes())?;
        shorter.persist(&path).map(drop).map_err(|e| e.error)
    }

    /// Lines of another sandbox that had the same name before do not count.
    pub(super) fn since(&self, sandbox: &SandboxId, begin: Timestamp) -> EgressCounters {
        let text = std::fs::read(self.path(sandbox)).unwrap_or_default();
        let lines = parse(&text).into_iter().filter(|(at, _)| *at >= begin);
        lines.fold(EgressCounters::default(), |sum, (_, more)| plus(sum, more))
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

    #[test]
    fn a_torn_line_spoils_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let log = TrafficLog::new(dir.path());
        let one = SandboxId::new("one").unwrap();
        for torn in ["1731830300000 45", "17318", "1731830300000 ", "1731830300000 4 51731830400000 7 7\n"] {
            std::fs::write(log.path(&one), torn).unwrap();
            log.add(&one, EgressCounters { rx_bytes: 10, tx_bytes: 5 });
            let sum = log.since(&one, Timestamp(0));
            assert_eq!(sum, EgressCounters { rx_bytes: 10, tx_bytes: 5 }, "{torn:?}");
        }
    }

    #[test]
    fn nothing_is_lost_when_several_shorten_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let log = TrafficLog::new(dir.path());
        let one = SandboxId::new("one").unwrap();
        let full = line(now(), EgressCounters { rx_bytes: 1, tx_bytes: 0 });
        let lines = MAX_BYTES.div_ceil(full.len() as u64);
        for round in 0..20 {
            std::fs::write(log.path(&one), full.repeat(usize::try_from(lines).unwrap())).unwrap();
            let start = std::sync::Barrier::new(8);
            std::thread::scope(|threads| {
                for _ in 0..8 {
                    threads.spawn(|| {
                        start.wait();
                        log.add(&one, EgressCounters { rx_bytes: 1, tx_bytes: 0 });
                    });
                }
            });
            assert_eq!(log.since(&one, Timestamp(0)).rx_bytes, lines + 8, "round {round}");
        }
    }
}
