//! A share of the processors where no cgroup keeps it: pure, so that every case of it can be played.

use std::time::{Duration, Instant};

/// Looks at which work went on while all should rest, until whoever does not rest is killed.
const MAX_AWAKE: u32 = 25;

/// Of the processors. Whoever used more than its share rests until it is made up for.
#[derive(Debug)]
pub struct Share {
    cpus: f64,
    /// From here on it is counted.
    at: Instant,
    used: Duration,
    pub resting: bool,
}

impl Share {
    pub fn new(cpus: f64, now: Instant, used: Duration) -> Share {
        Share { cpus, at: now, used, resting: false }
    }

    /// `used`: all that was ever used. Whether everybody has to rest until the next look.
    pub fn take(&mut self, now: Instant, used: Duration) -> bool {
        let spent = used.saturating_sub(self.used).as_secs_f64();
        let allowed = self.cpus * (now - self.at).as_secs_f64();
        // A rest ends when it is made up for; what begins one is more than a tick too many.
        self.resting = spent > if self.resting { allowed } else { allowed * 1.1 };
        if !self.resting {
            (self.at, self.used) = (now, used);
        }
        self.resting
    }
}

/// A process that is stopped can have a timer that lets it go on. It is stopped again at every look; who goes on all the same for
/// seconds is no accident. Commands that have only just begun, or are in the middle of a call, are.
#[derive(Debug, Default)]
pub struct Awake {
    last: Option<(Instant, Duration)>,
    looks: u32,
}

impl Awake {
    /// `resting`: the share that even those who should rest may use.
    pub fn take(&mut self, now: Instant, used: Duration, resting: Option<f64>) -> bool {
        let last = self.last.replace((now, used));
        let (Some((then, before)), Some(share)) = (last, resting) else {
            self.looks = 0;
            return false;
        };
        let went_on =
            used.saturating_sub(before).as_secs_f64() > (now - then).as_secs_f64() * (share / 2.0).max(0.25);
        self.looks = if went_on { self.looks + 1 } else { self.looks.saturating_sub(1) };
        self.looks >= MAX_AWAKE
    }
}

#[cfg(test)]
mod tests {
    use super::super::watch::INTERVAL;
    use super::*;

    #[test]
    fn what_was_used_too_much_is_made_up_for() {
        let begun = Instant::now();
        let mut share = Share::new(2.0, begun, Duration::ZERO);
        let mut rests =
            |at_ms, used_ms| share.take(begun + Duration::from_millis(at_ms), Duration::from_millis(used_ms));
        assert!(!rests(200, 400));
        assert!(!rests(400, 830), "a tick too many");
        assert!(rests(600, 1630), "four processors where two are allowed");
        // Others go on meanwhile: it is one share.
        assert!(rests(800, 1930));
        assert!(rests(900, 1930));
        assert!(!rests(950, 1930));
        assert!(!rests(1150, 2330));
    }

    #[test]
    fn who_goes_on_while_all_should_rest_is_killed_in_the_end() {
        let begun = Instant::now();
        let mut awake = Awake::default();
        let (mut at, mut used) = (Duration::ZERO, Duration::ZERO);
        let mut look = |ms, resting| {
            at += INTERVAL;
            used += Duration::from_millis(ms);
            awake.take(begun + at, used, resting)
        };
        for _ in 0..1000 {
            assert!(!look(800, None), "nobody should rest");
        }
        for _ in 0..1000 {
            // A few commands that have only just begun; a rest that ends.
            assert!(!look(400, Some(2.0)) && !look(50, Some(2.0)) && !look(10, Some(0.0)));
        }
        for number in 1..=MAX_AWAKE {
            assert_eq!(look(60, Some(0.0)), number == MAX_AWAKE, "{number}");
        }
    }
}
