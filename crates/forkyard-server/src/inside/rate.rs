//! How often a sandbox may ask, by kind of request and minute. What waited or streams for long is
//! not counted: it can't flood.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use forkyard_core::SandboxId;
use tokio::time::Instant;

use crate::error::{ApiError, Code, Result};

/// Sandboxes that are remembered; those that have not asked for a minute are forgotten first.
const MAX_BUCKETS: usize = 40_000;
const MINUTE_S: f64 = 60.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    Events,
    Heartbeats,
    Messages,
    Other,
}

impl Class {
    /// Requests of one sandbox in a minute.
    pub fn per_minute(self) -> u32 {
        match self {
            Class::Events => 100,
            Class::Heartbeats => 10,
            Class::Messages => 30,
            Class::Other => 60,
        }
    }
}

/// What is left of a minute's requests; it fills up as time passes.
struct Bucket {
    left: f64,
    at: Instant,
}

#[derive(Default)]
pub struct Rates(Mutex<HashMap<(SandboxId, Class), Bucket>>);

impl Rates {
    pub fn take(&self, sandbox: &SandboxId, class: Class) -> Result<()> {
        let now = Instant::now();
        let most = f64::from(class.per_minute());
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_BUCKETS {
            buckets.retain(|_, b| now.duration_since(b.at).as_secs_f64() < MINUTE_S);
        }
        let bucket =
            buckets.entry((sandbox.clone(), class)).or_insert_with(|| Bucket { left: most, at: now });
        let passed = now.duration_since(bucket.at).as_secs_f64();
        bucket.left = (bucket.left + passed * most / MINUTE_S).min(most);
        bucket.at = now;
        if bucket.left < 1.0 {
            let why = format!("more than {most} such requests of this sandbox in a minute");
            let error = ApiError::new(Code::RateLimited, why).hint("wait for as long as Retry-After says");
            let wait_s = (1.0 - bucket.left) * MINUTE_S / most;
            return Err(ApiError { retry_after_s: wait_s.ceil().max(1.0) as u32, ..error });
        }
        bucket.left -= 1.0;
        Ok(())
    }

    /// A request that waited for something does not count.
    pub fn give_back(&self, sandbox: &SandboxId, class: Class) {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = buckets.get_mut(&(sandbox.clone(), class)) {
            bucket.left = (bucket.left + 1.0).min(f64::from(class.per_minute()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_minute_has_so_many_requests_and_no_more() {
        let rates = Rates::default();
        let (a, b) = (SandboxId::new("a").unwrap(), SandboxId::new("b").unwrap());
        for (class, most) in
            [(Class::Events, 100), (Class::Heartbeats, 10), (Class::Messages, 30), (Class::Other, 60)]
        {
            for _ in 0..most {
                rates.take(&a, class).unwrap();
            }
            let refused = rates.take(&a, class).unwrap_err();
            assert_eq!(refused.code, Code::RateLimited, "{class:?}");
            assert_eq!(refused.retry_after_s, 60_u32.div_ceil(most), "{class:?}");
            rates.take(&b, class).unwrap();
        }
        rates.give_back(&a, Class::Messages);
        rates.take(&a, Class::Messages).unwrap();
        tokio::time::advance(Duration::from_secs(6)).await;
        rates.take(&a, Class::Heartbeats).unwrap();
        assert!(rates.take(&a, Class::Heartbeats).is_err());
    }
}
