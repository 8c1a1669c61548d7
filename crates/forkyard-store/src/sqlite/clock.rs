//! One host's clock for leases: boot time runs on through suspend, is the same in every process, and no change of the
//! wall clock moves it. It starts again at boot, so it is only comparable within one boot.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use crate::codec::int;
use crate::{Result, StoreError};

#[derive(Clone)]
pub(super) struct Clock {
    pub boot: String,
}

impl Clock {
    pub(super) fn new() -> Result<Clock> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|e| StoreError::Unavailable(format!("the boot id can't be read: {e}")))?;
        Ok(Clock { boot: boot.trim().to_string() })
    }

    pub(super) fn now_ms(&self) -> i64 {
        let now = clock_gettime(ClockId::Boottime);
        now.tv_sec.saturating_mul(1000).saturating_add(now.tv_nsec / 1_000_000)
    }

    pub(super) fn until(&self, ttl: Duration) -> i64 {
        self.now_ms().saturating_add(i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX))
    }

    /// For people: when something was done.
    pub(super) fn wall_ms() -> i64 {
        int(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64))
    }
}
