//! Limits that the machine can't keep: the guest looks, and stops an offender.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forkyard_guest::zygote::Watch;

use super::procs;
use super::procs::Proc;
use crate::files::tree::ENTRY_BYTES;

/// Five looks a second: an offender is stopped well within one.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// Free space of the host's disk may move this much (by anybody) before the layer is measured again.
const DISK_SLACK_DIVISOR: u64 = 64;
/// The longest a layer goes unmeasured while something runs, in looks.
const MEASURE_AT_LEAST_EVERY: u32 = 25;

pub enum Verdict {
    Fine,
    /// Over its memory: everything is to be killed.
    Memory,
    Disk,
}

pub struct Watchdog {
    limits: Watch,
    page: u64,
    ticks_per_second: u64,
    cpu: Option<CpuSample>,
    disk: Arc<Disk>,
    judge: Judge,
    looks: u32,
    /// Killed, and not gone yet: what they still hold is nobody's fault any more.
    dying: Vec<(i32, u64)>,
}

struct CpuSample {
    at: Instant,
    ticks: u64,
    stopped: bool,
}

/// Shared with the thread that measures.
pub struct Disk {
    layers: Mutex<Layers>,
    /// The newest measurement, until it is judged.
    measured: Mutex<Option<Measured>>,
    free_then: AtomicU64,
    busy: AtomicBool,
}

/// What the sandbox wrote: the layer that it writes to now, and those that snapshots have sealed. Only the first can change.
#[derive(Default)]
struct Layers {
    live: Option<Arc<OwnedFd>>,
    /// Sealed since the last measurement.
    unmeasured: Vec<Arc<OwnedFd>>,
    sealed_bytes: u64,
}

struct Measured {
    /// The stretch of work in which the walk began.
    stretch: u32,
    bytes: u64,
}

/// Judges the measurements of one stretch of work: from the first command after quiet, or from the last kill, on. Only what
/// grew past the limit in this stretch is killed, and only after a second measurement: commands that clean up a layer which
/// was over its limit before them are left alone.
#[derive(Debug)]
struct Judge {
    limit: u64,
    stretch: u32,
    /// How much this stretch may hold. None: it began over the limit, and its first measurement will say.
    allowed: Option<u64>,
    /// The last measurement, if it was over.
    suspect: Option<u64>,
    over: bool,
}

impl Judge {
    fn new(limit: u64) -> Judge {
        Judge { limit, stretch: 0, allowed: Some(limit), suspect: None, over: false }
    }

    /// What was measured before this does not count from now on.
    fn begin(&mut self) {
        self.stretch = self.stretch.wrapping_add(1);
        self.allowed = (!self.over).then_some(self.limit);
        self.suspect = None;
    }

    /// Whether whoever runs has to be killed.
    fn take(&mut self, measured: &Measured) -> bool {
        let bytes = measured.bytes;
        if measured.stretch != self.stretch {
            return false;
        }
        self.over = bytes > self.limit;
        // Some room to work in for whoever cleans up, and never more than the least that was seen.
        let room = self.limit / DISK_SLACK_DIVISOR;
        let allowed = match self.allowed {
            Some(allowed) => allowed.min(bytes.saturating_add(room)).max(self.limit),
            None => bytes.saturating_add(room).max(self.limit),
        };
        self.allowed = Some(allowed);
        match self.suspect.replace(bytes) {
            _ if bytes <= allowed => {
                self.suspect = None;
                false
            }
            Some(before) => bytes >= before,
            None => false,
        }
    }
}

impl Watchdog {
    pub fn new(limits: Watch, upper: Option<OwnedFd>) -> Watchdog {
        Watchdog {
            limits,
            page: rustix::param::page_size() as u64,
            ticks_per_second: rustix::param::clock_ticks_per_second(),
            cpu: None,
            disk: Arc::new(Disk {
                layers: Mutex::new(Layers { live: upper.map(Arc::new), ..Layers::default() }),
                measured: Mutex::default(),
                free_then: AtomicU64::new(u64::MAX),
                busy: AtomicBool::new(false),
            }),
            judge: Judge::new(limits.disk_bytes.unwrap_or(u64::MAX)),
            looks: 0,
            dying: Vec::new(),
        }
    }

    /// A snapshot has sealed the layer; this is the new one. What was sealed goes on to count.
    pub fn go_on_in(&mut self, upper: OwnedFd) {
        let mut layers = self.disk.layers();
        let sealed = layers.live.replace(Arc::new(upper));
        layers.unmeasured.extend(sealed);
    }

    /// Commands start where nothing ran.
    pub fn begin(&mut self) {
        self.judge.begin();
    }

    /// Before a command starts in a layer that was over its limit: what is left by now decides what it may hold. Measured at
    /// once, or it could fill again what a quick `rm` has just made free.
    pub fn measure_if_over(&mut self) {
        if self.judge.over && self.disk.has_upper() {
            let measured = Measured { stretch: self.judge.stretch, bytes: self.disk.measure() };
            // A second look confirms it before anybody is killed.
            let _ = self.judge.take(&measured);
        }
    }

    /// Kills everything; what it did so far is judged by now.
    pub fn kill(&mut self) {
        procs::kill_all();
        self.dying = procs::all().iter().map(|p| (p.pid, p.born)).collect();
        self.judge.begin();
    }

    pub fn is_needed(&self) -> bool {
        let Watch { memory_bytes, cpus, disk_bytes } = self.limits;
        memory_bytes.is_some() || cpus.is_some() || disk_bytes.is_some()
    }

    pub fn look(&mut self, paused: bool) -> Verdict {
        self.looks = self.looks.wrapping_add(1);
        let processes = procs::all();
        self.dying.retain(|(pid, born)| processes.iter().any(|p| (p.pid, p.born) == (*pid, *born)));
        if let Some(limit) = self.limits.memory_bytes {
            let is_dying = |p: &Proc| self.dying.contains(&(p.pid, p.born));
            let used: u64 =
                processes.iter().filter(|p| !is_dying(p)).map(|p| p.resident_pages * self.page).sum();
            if used > limit {
                return Verdict::Memory;
            }
        }
        if let (Some(cpus), false) = (self.limits.cpus, paused) {
            self.throttle(cpus, processes.iter().map(|p| p.ticks).sum());
        }
        if self.disk_is_over() { Verdict::Disk } else { Verdict::Fine }
    }

    /// Whoever used more than its share since the last look rests until the next one.
    fn throttle(&mut self, cpus: f64, ticks: u64) {
        let now = Instant::now();
        let Some(sample) = &mut self.cpu else {
            self.cpu = Some(CpuSample { at: now, ticks, stopped: false });
            return;
        };
        let used = ticks.saturating_sub(sample.ticks) as f64 / self.ticks_per_second as f64;
        let allowed = cpus * (now - sample.at).as_secs_f64();
        if sample.stopped {
            if used <= allowed {
                procs::continue_all();
                *sample = CpuSample { at: now, ticks, stopped: false };
            }
        } else if used > allowed * 1.1 {
            procs::stop_all();
            sample.stopped = true;
        } else {
            *sample = CpuSample { at: now, ticks, stopped: false };
        }
    }

    /// Judges the last measurement; starts a new one if the disk moved, or if the last one needs another to confirm it.
    fn disk_is_over(&mut self) -> bool {
        let disk = &self.disk;
        let (Some(limit), Some(upper)) = (self.limits.disk_bytes, disk.live()) else { return false };
        let measured = disk.measured.lock().unwrap_or_else(PoisonError::into_inner).take();
        if measured.is_some_and(|measured| self.judge.take(&measured)) {
            return true;
        }
        // Inodes too: a flood of empty files hardly moves the bytes.
        let free = rustix::fs::fstatvfs(&*upper)
            .map_or(0, |s| (s.f_bavail * s.f_frsize).saturating_add(s.f_favail.saturating_mul(ENTRY_BYTES)));
        let moved = disk.free_then.load(Ordering::Relaxed).abs_diff(free) > limit / DISK_SLACK_DIVISOR;
        let due = moved
            || self.judge.allowed.is_none()
            || self.judge.suspect.is_some()
            || self.looks.is_multiple_of(MEASURE_AT_LEAST_EVERY);
        if due && !disk.busy.swap(true, Ordering::Acquire) {
            disk.free_then.store(free, Ordering::Relaxed);
            let (shared, stretch) = (Arc::clone(disk), self.judge.stretch);
            let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
                let measured = Measured { stretch, bytes: shared.measure() };
                *shared.measured.lock().unwrap_or_else(PoisonError::into_inner) = Some(measured);
                shared.busy.store(false, Ordering::Release);
            });
            if thread.is_err() {
                disk.busy.store(false, Ordering::Release);
            }
        }
        false
    }

    /// The directory of the layer that is written to.
    pub fn upper(&self) -> Option<Arc<OwnedFd>> {
        self.disk.live()
    }

    pub fn disk(&self) -> Arc<Disk> {
        Arc::clone(&self.disk)
    }
}

impl Disk {
    fn layers(&self) -> MutexGuard<'_, Layers> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Option<Arc<OwnedFd>> {
        self.layers().live.clone()
    }

    /// Walks the layers. Folders that their owner closed are read all the same: this thread alone raises that right.
    pub fn measure(&self) -> u64 {
        let (live, sealed) = {
            let layers = self.layers();
            (layers.live.clone(), layers.unmeasured.clone())
        };
        let raised = crate::sys::process::set_capabilities(true).is_ok();
        let size = |dir: &OwnedFd| crate::files::tree::measure_at(dir.as_fd()).map_or(0, |size| size.bytes);
        let sealed: Vec<(Arc<OwnedFd>, u64)> =
            sealed.into_iter().map(|dir| (dir.clone(), size(&dir))).collect();
        let live = live.map_or(0, |dir| size(&dir));
        if raised {
            let _ = crate::sys::process::set_capabilities(false);
        }
        let mut layers = self.layers();
        for (dir, bytes) in sealed {
            // Another thread may have measured it too: it counts once.
            let before = layers.unmeasured.len();
            layers.unmeasured.retain(|other| !Arc::ptr_eq(other, &dir));
            if layers.unmeasured.len() < before {
                layers.sealed_bytes += bytes;
            }
        }
        live + layers.sealed_bytes
    }

    pub fn has_upper(&self) -> bool {
        self.layers().live.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 6400;

    fn take(judge: &mut Judge, bytes: u64) -> bool {
        let stretch = judge.stretch;
        judge.take(&Measured { stretch, bytes })
    }

    #[test]
    fn growth_past_the_limit_is_killed_when_confirmed() {
        let mut judge = Judge::new(LIMIT);
        assert!(!take(&mut judge, LIMIT));
        assert!(!take(&mut judge, LIMIT + 1));
        assert!(take(&mut judge, LIMIT + 1));
    }

    #[test]
    fn who_shrinks_is_left_alone() {
        let mut judge = Judge::new(LIMIT);
        for bytes in [9000, 8000, 7000, 6401, 100, 6500, 6400] {
            assert!(!take(&mut judge, bytes), "{bytes}");
        }
    }

    #[test]
    fn an_old_measurement_does_not_count() {
        let mut judge = Judge::new(LIMIT);
        let old = Measured { stretch: judge.stretch, bytes: 9000 };
        assert!(!take(&mut judge, 9000));
        judge.begin();
        for _ in 0..3 {
            assert!(!judge.take(&old));
        }
    }

    #[test]
    fn after_a_kill_there_is_room_to_clean_up_and_none_to_go_on() {
        let mut judge = Judge::new(LIMIT);
        assert!(!take(&mut judge, 9000) && take(&mut judge, 9000));
        judge.begin();
        // Still over by what was written before: `sleep`, `ls`, then `rm`, with a little file of its own.
        for bytes in [9000, 9000, 9100, 8000, 8100] {
            assert!(!take(&mut judge, bytes), "{bytes}");
        }
        // It may not fill again what it made free.
        assert!(!take(&mut judge, 8500) && take(&mut judge, 8600));
        judge.begin();
        assert!(!take(&mut judge, 100));
        judge.begin();
        assert!(!take(&mut judge, 6500) && take(&mut judge, 6500), "back under it, the limit holds again");
    }
}
