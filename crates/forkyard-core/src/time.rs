//! Time as the machines see it: a number that somebody passes in. Nothing here reads a clock.

use std::fmt;
use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// Milliseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

/// A span of time in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    pub const ZERO: Millis = Millis(0);
    pub const fn secs(s: u64) -> Millis {
        Millis(s.saturating_mul(1000))
    }
    pub const fn minutes(m: u64) -> Millis {
        Millis::secs(m.saturating_mul(60))
    }
    pub fn as_duration(self) -> std::time::Duration {
        std::time::Duration::from_millis(self.0)
    }
    pub fn saturating_sub(self, other: Millis) -> Millis {
        Millis(self.0.saturating_sub(other.0))
    }
}

impl Timestamp {
    /// Time that passed since `earlier`; zero if the clock went back.
    pub fn since(self, earlier: Timestamp) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Millis> for Timestamp {
    type Output = Timestamp;
    fn add(self, d: Millis) -> Timestamp {
        Timestamp(self.0.saturating_add(d.0))
    }
}

impl Sub<Millis> for Timestamp {
    type Output = Timestamp;
    fn sub(self, d: Millis) -> Timestamp {
        Timestamp(self.0.saturating_sub(d.0))
    }
}

impl Add for Millis {
    type Output = Millis;
    fn add(self, d: Millis) -> Millis {
        Millis(self.0.saturating_add(d.0))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ms if ms < 1000 => write!(f, "{ms}ms"),
            ms if ms < 60_000 => write!(f, "{}.{}s", ms / 1000, ms % 1000 / 100),
            ms if ms < 3_600_000 => write!(f, "{}m{:02}s", ms / 60_000, ms % 60_000 / 1000),
            ms => write!(f, "{}h{:02}m", ms / 3_600_000, ms % 3_600_000 / 60_000),
        }
    }
}
