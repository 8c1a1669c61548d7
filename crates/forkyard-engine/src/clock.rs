//! Time for machines. Read from the wall clock once and moved by the monotonic one, so that a jump of the wall clock neither
//! ends a fork nor keeps it alive.

use forkyard_core::Timestamp;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall: Timestamp,
    since: Instant,
}

impl Clock {
    pub fn system() -> Clock {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Clock::at(Timestamp(wall.as_millis() as u64))
    }
    /// Starts at a given time; the simulation's way.
    pub fn at(wall: Timestamp) -> Clock {
        Clock { wall, since: Instant::now() }
    }
    pub fn now(&self) -> Timestamp {
        Timestamp(self.wall.0 + self.since.elapsed().as_millis() as u64)
    }
    /// When a timestamp comes; now, if it has passed.
    pub fn instant(&self, at: Timestamp) -> Instant {
        self.since + at.since(self.wall).as_duration()
    }
}
