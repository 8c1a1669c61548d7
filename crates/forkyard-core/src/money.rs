//! Money in whole nano-dollars: the cheapest token of the price list costs ten of them, so sums are exact.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// US dollars, in billionths. Never negative, never rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Usd(pub u64);

impl Usd {
    pub const ZERO: Usd = Usd(0);
    /// The largest amount that may be given as a limit: a million dollars.
    pub const MAX_LIMIT: Usd = Usd(1_000_000 * 1_000_000_000);

    pub const fn nanos(n: u64) -> Usd {
        Usd(n)
    }
    pub const fn micros(n: u64) -> Usd {
        Usd(n * 1000)
    }
    pub const fn cents(n: u64) -> Usd {
        Usd(n * 10_000_000)
    }
    pub const fn dollars(n: u64) -> Usd {
        Usd(n * 1_000_000_000)
    }
    /// From a decimal number of dollars, as users and configuration write it.
    pub fn from_dollars(d: f64) -> Option<Usd> {
        let nanos = (d * 1e9).round();
        (d.is_finite() && d >= 0.0 && nanos <= Usd::MAX_LIMIT.0 as f64).then_some(Usd(nanos as u64))
    }
    pub fn as_dollars(self) -> f64 {
        self.0 as f64 / 1e9
    }
    pub fn saturating_sub(self, other: Usd) -> Usd {
        Usd(self.0.saturating_sub(other.0))
    }
    pub fn saturating_mul(self, n: u64) -> Usd {
        Usd(self.0.saturating_mul(n))
    }
}

impl Add for Usd {
    type Output = Usd;
    fn add(self, o: Usd) -> Usd {
        Usd(self.0.saturating_add(o.0))
    }
}
impl AddAssign for Usd {
    fn add_assign(&mut self, o: Usd) {
        *self = *self + o;
    }
}
impl Sum for Usd {
    fn sum<I: Iterator<Item = Usd>>(iter: I) -> Usd {
        iter.fold(Usd::ZERO, Add::add)
    }
}
impl fmt::Display for Usd {
    /// `$1.25`; small amounts keep what makes them differ from zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("$0.00"),
            n if n < 1_000_000 => write!(f, "${:.6}", self.as_dollars()),
            n if n < 1_000_000_000 => write!(f, "${:.4}", self.as_dollars()),
            _ => write!(f, "${:.2}", self.as_dollars()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_convert_exactly_and_refuse_nonsense() {
        assert_eq!(Usd::from_dollars(0.01), Some(Usd::cents(1)));
        for bad in [f64::NAN, f64::INFINITY, -0.01, 1e12] {
            assert_eq!(Usd::from_dollars(bad), None, "{bad}");
        }
        assert_eq!(Usd::cents(125).to_string(), "$1.25");
        assert_eq!(Usd::nanos(10).to_string(), "$0.000000");
    }
}
