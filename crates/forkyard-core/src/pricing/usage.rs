use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// Tokens of one or many requests, by the kinds that are priced apart. No token is in two kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct Usage {
    /// Read by the model and neither written to nor read from a cache.
    pub input: u64,
    /// Thinking included.
    pub output: u64,
    pub cache_write_5m: u64,
    pub cache_write_1h: u64,
    pub cache_read: u64,
}

impl Usage {
    /// Everything that the model read: what decides the tier, and the size of the context.
    pub fn prompt(&self) -> u64 {
        [self.input, self.cache_write_5m, self.cache_write_1h, self.cache_read]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
    pub fn total(&self) -> u64 {
        self.prompt().saturating_add(self.output)
    }
}

impl Add for Usage {
    type Output = Usage;
    fn add(self, o: Usage) -> Usage {
        Usage {
            input: self.input.saturating_add(o.input),
            output: self.output.saturating_add(o.output),
            cache_write_5m: self.cache_write_5m.saturating_add(o.cache_write_5m),
            cache_write_1h: self.cache_write_1h.saturating_add(o.cache_write_1h),
            cache_read: self.cache_read.saturating_add(o.cache_read),
        }
    }
}
impl AddAssign for Usage {
    fn add_assign(&mut self, o: Usage) {
        *self = *self + o;
    }
}
impl Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(iter: I) -> Usage {
        iter.fold(Usage::default(), Add::add)
    }
}
