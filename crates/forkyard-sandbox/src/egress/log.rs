//! Decisions kept in files, one for each sandbox, for whoever asks later: what did it reach, what was it refused? They outlast the
//! sandbox.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use forkyard_core::{SandboxId, Timestamp};
use serde::{Deserialize, Serialize};

use super::decision::EgressDecision;
use super::record::DecisionSink;

/// Of one file. A full one becomes the older one, of which there is one: a sandbox keeps twice this at most.
const MAX_BYTES: u64 = 1 << 20;
/// Of the files of [`super::TrafficLog`], which are in the same folder.
pub(super) const COUNTS: &str = "bytes";
/// As long as a sandbox may live: it may not use its network for long.
const COUNTS_KEPT: Duration = Duration::from_secs(366 * 24 * 3600);
const SUFFIX: &str = "jsonl";
const OLDER: &str = "jsonl.1";

/// A decision, and when it was reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    pub at: Timestamp,
    #[serde(flatten)]
    pub decision: EgressDecision,
}

/// A file to append to, made where there is none, that no other process adds to or replaces until it is closed.
pub(super) fn hold(path: &Path) -> std::io::Result<File> {
    let open = || OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    loop {
        let file = open().or_else(|_| {
            let dir = path.parent().unwrap_or(path);
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            open()
        })?;
        file.lock()?;
        let (held, named) = (file.metadata()?, path.metadata());
        // Whoever held it before may have put another in its place: only the file that the name leads to counts.
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
            return Ok(file);
        }
    }
}

/// A line, in one piece for whoever reads meanwhile. It does not become part of one before it that a full disk has torn.
pub(super) fn append(file: &mut File, mut line: Vec<u8>) -> std::io::Result<()> {
    let (len, mut last) = (file.metadata()?.len(), [b'\n']);
    if len > 0 {
        file.read_exact_at(&mut last, len - 1)?;
    }
    if last != [b'\n'] {
        line.insert(0, b'\n');
    }
    file.write_all(&line)
}

/// A folder of such files.
#[derive(Debug, Clone)]
pub struct DecisionLog {
    dir: PathBuf,
}

impl DecisionLog {
    pub fn new(dir: &Path) -> DecisionLog {
        DecisionLog { dir: dir.into() }
    }

    /// A line is one write to the page cache, records are few by their nature, and nobody holds a file for longer: that is not
    /// to block.
    pub fn sink(&self) -> DecisionSink {
        let log = self.clone();
        Arc::new(move |decision| {
            let sandbox = decision.sandbox.clone();
            if let Err(e) = log.add(decision) {
                tracing::warn!(%sandbox, error = %e, "a decision of the proxy is not recorded");
            }
        })
    }

    fn add(&self, decision: EgressDecision) -> std::io::Result<()> {
        let path = self.path(&decision.sandbox, SUFFIX);
        let mut file = hold(&path)?;
        if file.metadata()?.len() >= MAX_BYTES {
            std::fs::rename(&path, self.path(&decision.sandbox, OLDER))?;
            file = hold(&path)?;
        }
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at = Timestamp(u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
        let mut line = serde_json::to_vec(&Recorded { at, decision })?;
        line.push(b'\n');
        append(&mut file, line)
    }

    /// Oldest first. Lines that were torn by a full disk are left out.
    pub fn read(&self, sandbox: &SandboxId) -> std::io::Result<Vec<Recorded>> {
        let mut all = Vec::new();
        for suffix in [OLDER, SUFFIX] {
            match File::open(self.path(sandbox, suffix)) {
                Ok(file) => {
                    // Of bytes: one may be torn within a character.
                    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
                    all.extend(lines.filter_map(|line| serde_json::from_slice::<Recorded>(&line).ok()));
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    /// Forgets what nobody added to for so long, and says how many bytes that were.
    pub fn forget(&self, older_than: Duration, dry_run: bool) -> u64 {
        let mut freed = 0;
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            // Held: nobody adds to it between the look and the end.
            let Ok(held) = hold(&entry.path()) else { continue };
            let Ok(meta) = held.metadata() else { continue };
            let counts = entry.path().extension().is_some_and(|suffix| suffix == COUNTS);
            let keep = if counts { older_than.max(COUNTS_KEPT) } else { older_than };
            let old = meta.modified().ok().and_then(|at| at.elapsed().ok()).is_some_and(|age| age > keep);
            if old && (dry_run || std::fs::remove_file(entry.path()).is_ok()) {
                freed += meta.len();
            }
        }
        freed
    }

    fn path(&self, sandbox: &SandboxId, suffix: &str) -> PathBuf {
        self.dir.join(format!("{sandbox}.{suffix}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::decision::{Decision, Layer, Reason};
    use super::*;

    fn decision(sandbox: &str, host: String) -> EgressDecision {
        EgressDecision {
            sandbox: SandboxId::new(sandbox).unwrap(),
            host,
            port: 443,
            decision: Decision::Denied,
            reason: Reason::NotListed,
            layer: Layer::AllowList,
            detail: "no".into(),
            count: 1,
        }
    }

    #[test]
    fn each_sandbox_has_its_decisions_and_old_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let log = DecisionLog::new(&dir.path().join("decisions"));
        let (sink, one) = (log.sink(), SandboxId::new("one").unwrap());
        assert_eq!(log.read(&one).unwrap(), []);
        for host in ["a", "b"] {
            sink(decision("one", host.into()));
        }
        sink(decision("two", "c".into()));
        let hosts = |log: &DecisionLog| -> Vec<String> {
            log.read(&one).unwrap().into_iter().map(|r| r.decision.host).collect()
        };
        assert_eq!(hosts(&log), ["a", "b"]);
        assert_eq!(log.forget(Duration::from_secs(60), false), 0);
        assert!(log.forget(Duration::ZERO, true) > 0);
        assert_eq!(hosts(&log), ["a", "b"]);
        assert!(log.forget(Duration::ZERO, false) > 0);
        assert_eq!(hosts(&log), [""; 0]);
    }

    #[test]
    fn a_file_is_bounded_and_keeps_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let log = DecisionLog::new(dir.path());
        let (sink, one) = (log.sink(), SandboxId::new("one").unwrap());
        for number in 0..30 {
            sink(decision("one", format!("{number}{}", "x".repeat(200_000))));
        }
        let size: u64 =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(size < 3 * MAX_BYTES, "{size}");
        assert!(log.read(&one).unwrap().last().unwrap().decision.host.starts_with("29"));
    }

    #[test]
    fn a_torn_line_spoils_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let log = DecisionLog::new(dir.path());
        let (sink, one) = (log.sink(), SandboxId::new("one").unwrap());
        // The second within a character.
        for torn in [&b"{\"at\":17318"[..], b"{\"at\":1,\"detail\":\"\xc3"] {
            std::fs::write(log.path(&one, SUFFIX), torn).unwrap();
            for host in ["a", "b"] {
                sink(decision("one", host.into()));
            }
            let hosts: Vec<_> = log.read(&one).unwrap().into_iter().map(|r| r.decision.host).collect();
            assert_eq!(hosts, ["a", "b"], "{torn:?}");
        }
    }

    #[test]
    fn nothing_is_lost_when_several_find_a_file_full() {
        let dir = tempfile::tempdir().unwrap();
        let log = DecisionLog::new(dir.path());
        let sink = log.sink();
        for round in 0..20 {
            let name = format!("box{round}");
            sink(decision(&name, "x".repeat(MAX_BYTES as usize)));
            let start = std::sync::Barrier::new(8);
            std::thread::scope(|threads| {
                for _ in 0..8 {
                    threads.spawn(|| {
                        start.wait();
                        sink(decision(&name, "a".into()));
                    });
                }
            });
            assert_eq!(log.read(&SandboxId::new(name).unwrap()).unwrap().len(), 9, "round {round}");
        }
    }

    #[test]
    fn counts_are_kept_for_as_long_as_a_sandbox_may_live() {
        let dir = tempfile::tempdir().unwrap();
        let log = DecisionLog::new(dir.path());
        let one = SandboxId::new("one").unwrap();
        log.sink()(decision("one", "a".into()));
        let counts = log.path(&one, COUNTS);
        std::fs::write(&counts, "1 2 3\n").unwrap();
        for (days, kept) in [(365, true), (367, false)] {
            let then = SystemTime::now() - Duration::from_secs(days * 24 * 3600);
            File::options().append(true).open(&counts).unwrap().set_modified(then).unwrap();
            log.forget(Duration::ZERO, false);
            assert_eq!((counts.exists(), log.path(&one, SUFFIX).exists()), (kept, false), "{days} days");
        }
    }
}
