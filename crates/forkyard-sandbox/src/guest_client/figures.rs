//! What a sandbox uses and whether it is well, as every provider whose sandboxes have a guest tells it.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use forkyard_core::{CallId, SandboxId, Timestamp};
use forkyard_guest::protocol::{Answer, Op};

use super::{GuestClient, unexpected};
use crate::{EgressCounters, EgressFactory, EgressHandle, ErrorKind, Health, Result, Stats};

/// A guest that takes longer to answer is not healthy.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);

/// Pages of files, of a group's `memory.stat`: the kernel gives them back before it ends anybody. Not only those that it calls
/// inactive: which these are depends on how a file was read. Version 1 counts groups below under names of its own.
pub fn file_pages(part: impl Fn(&str) -> Option<u64>) -> u64 {
    let sum = |names: [&str; 2]| names.into_iter().map(&part).sum::<Option<u64>>();
    let below = sum(["total_inactive_file", "total_active_file"]);
    below.or_else(|| sum(["inactive_file", "active_file"])).unwrap_or(0)
}

/// What the guest counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    pub memory_bytes: u64,
    pub cpu_us: u64,
    pub processes: u32,
    /// Where it can see it.
    pub disk_bytes: Option<u64>,
}

impl Figures {
    /// The kernel's own count of memory and CPU time is the better one, where there is one.
    pub fn or_kernel(self, (memory_bytes, cpu_us): (Option<u64>, Option<u64>)) -> Figures {
        Figures {
            memory_bytes: memory_bytes.unwrap_or(self.memory_bytes),
            cpu_us: cpu_us.unwrap_or(self.cpu_us),
            ..self
        }
    }
}

impl GuestClient {
    pub async fn figures(&self) -> Result<Figures> {
        match self.ask(Op::Stats, &[]).await? {
            (Answer::Stats { memory_bytes, cpu_us, processes, disk_bytes }, _) => {
                Ok(Figures { memory_bytes, cpu_us, processes, disk_bytes })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// Remembers of one handle what CPU time it was told and when, for the next question.
#[derive(Default)]
pub struct Meter(Mutex<Option<(Instant, u64)>>);

impl Meter {
    pub fn stats(&self, figures: Figures, network: EgressCounters) -> Stats {
        let now = Instant::now();
        // A panic while it was held leaves a whole pair.
        let mut last = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = last.replace((now, figures.cpu_us));
        let cpu_percent = before.map_or(0.0, |(then, us)| {
            let elapsed_us = now.saturating_duration_since(then).as_micros().max(1) as f64;
            figures.cpu_us.saturating_sub(us) as f64 / elapsed_us * 100.0
        });
        Stats {
            memory_bytes: figures.memory_bytes,
            cpu_percent,
            disk_bytes: figures.disk_bytes.unwrap_or(0),
            network_rx_bytes: network.rx_bytes,
            network_tx_bytes: network.tx_bytes,
            processes: figures.processes,
        }
    }
}

/// What has passed the proxy of a sandbox. `own`: of the handle that is asked.
pub fn network(
    own: Option<&dyn EgressHandle>,
    factory: Option<&dyn EgressFactory>,
    id: &SandboxId,
    since: Timestamp,
) -> EgressCounters {
    // All proxies that it had, where they are counted; else its own.
    let all = factory.and_then(|factory| factory.counters(id, since));
    all.or_else(|| own.map(|own| own.counters())).unwrap_or_default()
}

/// `asked`: any question that a guest answers at once.
pub async fn health(asked: impl Future<Output = Result<Vec<CallId>>>) -> Result<Health> {
    let sick = |detail: String| Health { healthy: false, detail };
    Ok(match tokio::time::timeout(HEALTH_WITHIN, asked).await {
        Ok(Ok(_)) => Health { healthy: true, detail: "the guest answers".into() },
        Ok(Err(e)) if e.kind == ErrorKind::Stale => return Err(e),
        Ok(Err(e)) => sick(e.to_string()),
        Err(_) => sick("the guest does not answer".into()),
    })
}
