//! Decisions kept in files, one for each sandbox, for whoever asks later: what did it reach, what was it refused? They outlast the
//! sandbox.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
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
const COUNTS_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
const SUFFIX: &str = "jsonl";
const OLDER: &str = "jsonl.1";

/// A decision, and when it was reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    pub at: Timestamp,
    #[serde(flatten)]
    pub decision: EgressDecision,
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

    /// A line is one write to the page cache, and records are few by their nature: that is not to block.
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
        let open = || OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        let mut file = open().or_else(|_| {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            open()
        })?;
        if file.metadata()?.len() >= MAX_BYTES {
            std::fs::rename(&path, self.path(&decision.sandbox, OLDER))?;
            file = open()?;
        }
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at = Timestamp(u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
        let mut line = serde_json::to_vec(&Recorded { at, decision })?;
        line.push(b'\n');
        // In one piece: several processes may serve the same sandbox.
        file.write_all(&line)
    }

    /// Oldest first. Lines that were torn by a full disk are left out.
    pub fn read(&self, sandbox: &SandboxId) -> std::io::Result<Vec<Recorded>> {
        let mut all = Vec::new();
        for suffix in [OLDER, SUFFIX] {
            match File::open(self.path(sandbox, suffix)) {
                Ok(file) => {
                    let lines = BufReader::new(file).lines().map_while(Result::ok);
                    all.extend(lines.filter_map(|line| serde_json::from_str::<Recorded>(&line).ok()));
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
            let Ok(meta) = entry.metadata() else { continue };
            // A sandbox that lives may not have used its network for long.
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
}
