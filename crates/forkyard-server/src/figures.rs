//! What the sandboxes of this machine use, now and before: a page that is opened late shows the past, too.
//!
//! Every sandbox that runs is asked now and then, whether somebody looks or not, over one connection that is kept: CPU is
//! what was used since the last question. What is remembered is bounded, and goes with the process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId, Timestamp};
use forkyard_engine::clock::Clock;
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_engine::sandboxes::types::{
    ErrorKind, Limits, Sandbox, SandboxError, SandboxInfo, SandboxStatus, Stats,
};
use futures::StreamExt;
use tokio::time::Instant;

/// How often a sandbox is asked while nobody looks.
const EVERY: Duration = Duration::from_secs(5);
/// Questions of one sandbox that come faster get the same answer: CPU over a shorter time says little.
const FRESH: Duration = Duration::from_secs(1);
/// A sandbox with many files takes long to measure: it rests this many times as long.
const REST: u32 = 20;
/// An answer that takes longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Sandboxes that are asked at the same time.
const AT_ONCE: usize = 8;
/// Samples of one sandbox: an hour and more, half an hour while somebody looks.
const MAX_SAMPLES: usize = 1000;
/// Sandboxes that are remembered; with [`MAX_SAMPLES`] it bounds the memory to about 15 MB. Those that are gone are
/// forgotten first, the one that went first before the others.
const MAX_SANDBOXES: usize = 256;

#[derive(Debug, Clone)]
pub struct Sample {
    pub at: Timestamp,
    pub stats: Stats,
}

#[derive(Clone)]
pub struct History {
    pub limits: Limits,
    pub samples: Vec<Sample>,
}

#[derive(Default)]
pub struct Figures(Mutex<BTreeMap<SandboxId, Kept>>);

struct Kept {
    limits: Limits,
    samples: VecDeque<Sample>,
    /// Of the attempt that the sandbox had.
    connection: Option<(Attempt, Arc<dyn Sandbox>)>,
    asked: Option<Instant>,
    /// Not before then, unless somebody looks.
    due: Instant,
    /// It was there at the last look.
    alive: bool,
}

impl Figures {
    fn kept(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Kept>> {
        // Nothing in here panics half way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the sandbox uses now.
    pub async fn ask(
        &self,
        all: &Sandboxes,
        clock: &Clock,
        info: &SandboxInfo,
    ) -> Result<Stats, SandboxError> {
        let held = {
            let mut kept = self.kept();
            let of = kept.entry(info.id.clone()).or_insert_with(|| Kept {
                limits: info.limits,
                samples: VecDeque::new(),
                connection: None,
                asked: None,
                due: Instant::now(),
                alive: true,
            });
            if let (Some(asked), Some(last)) = (of.asked, of.samples.back())
                && asked.elapsed() < FRESH
            {
                return Ok(last.stats.clone());
            }
            of.connection.as_ref().filter(|(attempt, _)| *attempt == info.attempt).map(|(_, c)| c.clone())
        };
        let began = Instant::now();
        let asking = async {
            let connection = match held {
                Some(connection) => connection,
                None => all.provider(info.provider)?.observe(&info.id, info.attempt).await?,
            };
            let stats = connection.stats().await?;
            Ok::<_, SandboxError>((connection, stats))
        };
        let answer = tokio::time::timeout(PATIENCE, asking).await.unwrap_or_else(|_| {
            Err(SandboxError::new(ErrorKind::Unavailable, format!("sandbox {} does not answer", info.id)))
        });
        let mut kept = self.kept();
        let Some(of) = kept.get_mut(&info.id) else { return answer.map(|(_, stats)| stats) };
        of.due = Instant::now() + EVERY.max(began.elapsed() * REST);
        match answer {
            Ok((connection, stats)) => {
                of.connection = Some((info.attempt, connection));
                of.asked = Some(Instant::now());
                of.samples.push_back(Sample { at: clock.now(), stats: stats.clone() });
                if of.samples.len() > MAX_SAMPLES {
                    of.samples.pop_front();
                }
                Ok(stats)
            }
            Err(e) => {
                // Made anew next time.
                of.connection = None;
                Err(e)
            }
        }
    }

    /// What is remembered of a sandbox after this time.
    pub fn history(&self, id: &SandboxId, after: Timestamp) -> Option<History> {
        let kept = self.kept();
        let of = kept.get(id)?;
        let samples = of.samples.iter().filter(|s| s.at > after).cloned().collect();
        Some(History { limits: of.limits, samples })
    }

    /// Asks those that run, for ever.
    pub async fn keep(&self, all: &Sandboxes, clock: &Clock) {
        loop {
            match all.list().await {
                Ok(found) => self.round(all, clock, &found).await,
                Err(e) => tracing::debug!("sandboxes could not be listed: {e}"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    async fn round(&self, all: &Sandboxes, clock: &Clock, found: &[SandboxInfo]) {
        let due: Vec<&SandboxInfo> = {
            let mut kept = self.kept();
            tidy(&mut kept, found);
            let now = Instant::now();
            let is_due = |s: &&SandboxInfo| kept.get(&s.id).is_none_or(|of| of.due <= now);
            let running = |s: &&SandboxInfo| s.status == SandboxStatus::Running;
            found.iter().filter(running).filter(is_due).take(MAX_SANDBOXES).collect()
        };
        futures::stream::iter(due)
            .for_each_concurrent(AT_ONCE, |info| async move {
                if let Err(e) = self.ask(all, clock, info).await {
                    tracing::debug!(sandbox = %info.id, "no figures: {e}");
                }
            })
            .await;
    }
}

/// Lets go of those that are gone, and forgets what is too much.
fn tidy(kept: &mut BTreeMap<SandboxId, Kept>, found: &[SandboxInfo]) {
    for (id, of) in kept.iter_mut() {
        of.alive = found.iter().any(|s| s.id == *id && s.status == SandboxStatus::Running);
        if !of.alive {
            of.connection = None;
        }
    }
    kept.retain(|_, of| of.alive || !of.samples.is_empty());
    while kept.len() > MAX_SANDBOXES {
        let last = |of: &Kept| (of.alive, of.samples.back().map(|s| s.at));
        let Some(oldest) = kept.iter().min_by_key(|(_, of)| last(of)).map(|(id, _)| id.clone()) else {
            return;
        };
        kept.remove(&oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_went_first_are_forgotten_first() {
        let kept = |at: u64| Kept {
            limits: Limits::default(),
            samples: [Sample { at: Timestamp(at), stats: Stats::default() }].into(),
            connection: None,
            asked: None,
            due: Instant::now(),
            alive: true,
        };
        let id = |n: usize| SandboxId::new(format!("s{n}")).unwrap();
        let mut all: BTreeMap<SandboxId, Kept> =
            (0..MAX_SANDBOXES + 10).map(|n| (id(n), kept(n as u64))).collect();
        // Made a moment ago, and nothing is known of it yet.
        all.insert(id(9999), Kept { samples: VecDeque::new(), ..kept(0) });
        tidy(&mut all, &[]);
        assert_eq!(all.len(), MAX_SANDBOXES);
        assert!((10..MAX_SANDBOXES + 10).all(|n| all.contains_key(&id(n))));
    }
}
