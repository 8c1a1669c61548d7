//! Times, what they should be, and a report of both.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Of one thing: when most and when nearly all of the tries were done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub count: usize,
    pub p50_us: u64,
    pub p95_us: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Times,
    Ms,
    KiB,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Want {
    AtMost(f64),
    AtLeast(f64),
    Nothing,
}

/// A number that something is promised about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub name: String,
    pub value: f64,
    pub unit: Unit,
    pub want: Want,
}

impl Outcome {
    pub fn holds(&self) -> bool {
        match self.want {
            Want::AtMost(bound) => self.value <= bound,
            Want::AtLeast(bound) => self.value >= bound,
            Want::Nothing => true,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub kernel: String,
    pub cpus: usize,
    /// Of the last minute, when it began: more than a few tenths, and times are not to be trusted.
    pub load: f64,
    pub root: bool,
    pub figures: Vec<Figure>,
    pub outcomes: Vec<Outcome>,
    /// What could not be measured, and why.
    pub missing: Vec<String>,
}

impl Report {
    pub(super) fn new() -> Report {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Report {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get()),
            load: read("/proc/loadavg").split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0),
            root: rustix::process::geteuid().is_root(),
            figures: Vec::new(),
            outcomes: Vec::new(),
            missing: Vec::new(),
        }
    }

    pub(super) fn times(&mut self, times: Times) {
        for (name, mut durations) in times.0 {
            durations.sort_unstable();
            let at = |part: f64| durations[((durations.len() - 1) as f64 * part) as usize].as_micros() as u64;
            self.figures.push(Figure { name, count: durations.len(), p50_us: at(0.5), p95_us: at(0.95) });
        }
    }

    pub(super) fn ratio(&mut self, name: &str, time: Duration, other: Duration, want: Want) {
        let value = time.as_secs_f64() / other.as_secs_f64();
        self.result(name, value, Unit::Times, want);
    }

    pub(super) fn result(&mut self, name: &str, value: f64, unit: Unit, want: Want) {
        self.outcomes.push(Outcome { name: name.into(), value, unit, want });
    }
}

pub(super) fn at_most(bound: f64) -> Want {
    Want::AtMost(bound)
}

pub(super) fn at_least(bound: f64) -> Want {
    Want::AtLeast(bound)
}

pub(super) fn p50(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) / 2]
}

/// Tries by name, in the order of their first.
#[derive(Default)]
pub(super) struct Times(Vec<(String, Vec<Duration>)>);

impl Times {
    pub fn add(&mut self, name: &str, time: Duration) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, times)) => times.push(time),
            None => self.0.push((name.into(), vec![time])),
        }
    }

    pub fn p50(&self, name: &str) -> Duration {
        let known = self.0.iter().find(|(known, _)| known == name);
        known.map_or(Duration::ZERO, |(_, times)| p50(&mut times.clone()))
    }

    pub fn slowest(&self, name: &str) -> Duration {
        let known = self.0.iter().find(|(known, _)| known == name);
        known.and_then(|(_, times)| times.iter().max()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_tries_and_what_is_promised() {
        let mut times = Times::default();
        for us in [5, 1, 9, 3, 7] {
            times.add("a", Duration::from_micros(us));
        }
        assert_eq!(times.p50("a"), Duration::from_micros(5));
        let mut report = Report::new();
        report.ratio("r", times.p50("a"), Duration::from_micros(4), at_most(1.2));
        report.ratio("r", times.p50("a"), Duration::from_micros(5), at_most(1.2));
        report.ratio("r", times.p50("a"), Duration::from_micros(1), at_least(5.5));
        assert_eq!(report.outcomes.iter().map(Outcome::holds).collect::<Vec<_>>(), [false, true, false]);
        report.times(times);
        assert_eq!(report.figures[0].p95_us, 7);
    }
}
