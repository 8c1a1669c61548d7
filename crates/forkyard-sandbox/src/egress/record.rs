//! From judgements to records. The first of its kind is reported at once; equal ones that follow within [`WINDOW`] are counted
//! and reported together, so that a sandbox which knocks a million times makes a handful of records.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forkyard_core::SandboxId;

use super::decision::{EgressDecision, MAX_HOST_SHOWN, Reason};

/// How long repeats are collected.
pub const WINDOW: Duration = Duration::from_secs(5);
/// Different decisions kept apart in one window; of the rest, all of one reason are counted together.
const MAX_KINDS: usize = 512;
/// Under this name, which no host has, and port 0.
const OVERFLOW_HOST: &str = "(many others)";
const OVERFLOW_DETAIL: &str = "hosts and ports that were too many to tell apart";

/// Where records go. Called from the proxy's tasks: it must not block.
pub type DecisionSink = Arc<dyn Fn(EgressDecision) + Send + Sync>;

/// One sandbox's decisions.
pub struct Recorder {
    sandbox: SandboxId,
    sink: DecisionSink,
    pending: Mutex<HashMap<(String, u16, Reason), Pending>>,
}

struct Pending {
    detail: String,
    repeats: u64,
}

impl Recorder {
    pub fn new(sandbox: SandboxId, sink: DecisionSink) -> Recorder {
        Recorder { sandbox, sink, pending: Mutex::default() }
    }

    pub fn record(&self, host: &str, port: u16, reason: Reason, detail: &str) {
        let (mut kind, mut detail) = ((shown(host), port, reason), detail);
        {
            let mut pending = self.lock();
            if pending.len() >= MAX_KINDS && !pending.contains_key(&kind) {
                // The port too is the sandbox's choice.
                (kind, detail) = ((OVERFLOW_HOST.to_string(), 0, reason), OVERFLOW_DETAIL);
            }
            if let Some(known) = pending.get_mut(&kind) {
                known.repeats += 1;
                return;
            }
            pending.insert(kind.clone(), Pending { detail: detail.to_string(), repeats: 0 });
        }
        let (host, port, reason) = kind;
        self.report(host, port, reason, detail.to_string(), 1);
    }

    /// Reports what was held back; called once per window and at the end.
    pub fn flush(&self) {
        let pending = std::mem::take(&mut *self.lock());
        for ((host, port, reason), held) in pending {
            if held.repeats > 0 {
                self.report(host, port, reason, held.detail, held.repeats);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(String, u16, Reason), Pending>> {
        // A panic while the map was held leaves it whole.
        self.pending.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn report(&self, host: String, port: u16, reason: Reason, detail: String, count: u64) {
        let decision = reason.decision();
        tracing::debug!(sandbox = %self.sandbox, %host, port, reason = reason.as_str(), count, "egress");
        (self.sink)(EgressDecision {
            sandbox: self.sandbox.clone(),
            host,
            port,
            decision,
            reason,
            layer: reason.layer(),
            detail,
            count,
        });
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Host names come from inside: cut, and without characters that mean something to a terminal.
pub fn shown(text: &str) -> String {
    text.chars().take(MAX_HOST_SHOWN).map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> (Recorder, Arc<Mutex<Vec<EgressDecision>>>) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        let sandbox = SandboxId::new("s1").unwrap();
        (Recorder::new(sandbox, Arc::new(move |d| sink.lock().unwrap().push(d))), seen)
    }

    #[test]
    fn every_decision_is_counted_once() {
        let (recorder, seen) = recorder();
        for _ in 0..1000 {
            recorder.record("a.example", 443, Reason::NotListed, "no");
        }
        recorder.record("a.example", 80, Reason::NotListed, "no");
        assert_eq!(seen.lock().unwrap().len(), 2, "the first of a kind comes at once");
        drop(recorder);
        let seen = seen.lock().unwrap();
        assert_eq!(seen.iter().map(|d| d.count).sum::<u64>(), 1001);
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn many_different_hosts_stay_bounded() {
        let (recorder, seen) = recorder();
        for i in 0..10_000 {
            let reason = if i % 2 == 0 { Reason::NotListed } else { Reason::Port };
            recorder.record(&format!("h{}.example", i % 3_000), i, reason, &format!("no {i}"));
        }
        drop(recorder);
        let seen = seen.lock().unwrap();
        // For either reason, the first of the others and all that followed.
        assert!(seen.len() <= MAX_KINDS + 4, "{}", seen.len());
        assert_eq!(seen.iter().map(|d| d.count).sum::<u64>(), 10_000);
        let mut others = seen.iter().filter(|d| d.host == OVERFLOW_HOST);
        assert!(others.all(|d| d.port == 0 && !d.detail.starts_with("no")), "{seen:?}");
    }

    #[test]
    fn hostile_names_are_harmless_to_show() {
        assert_eq!(shown("a\x1b[31mb\nc\u{202e}d"), "a?[31mb?c?d");
        assert_eq!(shown(&"x".repeat(1000)).len(), MAX_HOST_SHOWN);
    }
}
