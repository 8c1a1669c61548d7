//! Limits that the machine can't keep: the guest looks, and stops an offender.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forkyard_guest::zygote::Watch;

use super::aside::Aside;
use super::memory::Memory;
use super::procs::{Held, Proc};
use super::share::{Awake, Share};
use super::{procs, unlinked};
use crate::files::tree::{ENTRY_BYTES, survey};
use crate::sys::process::seeing_all;

/// Five looks a second: an offender is stopped well within one.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// Free space of the host's disk may move this much (by anybody) before the layer is measured again.
const DISK_SLACK_DIVISOR: u64 = 64;
/// The longest a layer goes unmeasured while something runs, in looks.
const MEASURE_AT_LEAST_EVERY: u32 = 25;
/// Walks in a row that did not see all of it, before one is made while everything stands still: builds move folders too.
const MAX_UNSURE: u32 = 25;
/// Walks of such a standstill: a process stops only after the rename that it is in.
const STILL_WALKS: u32 = 3;
/// Standstills in a row in which it could not be measured all the same, until it counts as over its limit. The host's own
/// requests change files meanwhile: seconds of them are no reason.
const MAX_BLIND: u32 = 25;
/// The same where all that has a name was seen, and commands held what nobody could look at. Descriptors on their way are taken
/// between two of them.
const MAX_UNSEEN: u32 = 5;
/// What others wrote may make up so much of the room that is left, until a standstill tells it from what is the sandbox's own.
const DRIFT_DIVISOR: u64 = 4;
/// Of the time, at most one part in so many is spent in standstills.
const STILL_SHARE: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Fine,
    /// Over a limit: everything is to be killed.
    Over(Limit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    Memory,
    Disk,
    Processors,
    Pause,
}

pub struct Watchdog {
    limits: Watch,
    memory: Option<Memory>,
    ticks_per_second: u64,
    cpu: Option<Share>,
    /// Who rests, for having used more than its share.
    resting: Option<Held>,
    awake: Awake,
    disk: Arc<Disk>,
    judge: Judge,
    doubt: Doubt,
    looks: u32,
    /// Killed, and not gone yet: what they still hold is nobody's fault any more.
    dying: Vec<(i32, u64)>,
}

/// Shared with the thread that measures.
pub struct Disk {
    layers: Mutex<Layers>,
    aside: Arc<Aside<Measured>>,
    free_then: AtomicU64,
    limit: u64,
    room: Mutex<Room>,
}

/// For what the host writes, which no command is to be killed for: it is refused what does not fit.
#[derive(Default)]
struct Room {
    /// The last figure that is certain, and the free space of the disk just before.
    certain: Option<(u64, u64)>,
    /// Written by the host since.
    written: u64,
}

impl Room {
    /// Whether so much more surely fits: whoever wrote since then, the disk has less free space for it.
    fn has(&self, bytes: u64, limit: u64, free: u64) -> bool {
        self.certain.is_some_and(|(certain, then)| {
            let grown = self.written.max(then.saturating_sub(free));
            certain.saturating_add(grown).saturating_add(bytes) <= limit
        })
    }
}

/// What the sandbox wrote: the layer that it writes to now, and those that snapshots have sealed. Only the first can change.
#[derive(Default)]
struct Layers {
    live: Option<Layer>,
    /// Sealed, and not measured as a whole since.
    unmeasured: Vec<Layer>,
    sealed_bytes: u64,
}

#[derive(Clone)]
struct Layer {
    dir: Arc<OwnedFd>,
    /// When all of it was seen last.
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Total {
    bytes: u64,
    /// All that has a name was seen.
    whole: bool,
    /// Commands may hold files without a name that were not.
    unseen: bool,
}

struct Measured {
    /// The stretch of work in which the walk began.
    stretch: u32,
    total: Total,
    /// Free space of the disk just before it.
    free: u64,
}

/// How far walks can be trusted while the sandbox runs. Whoever moves folders ahead of a walk hides them from it; but what fills
/// the disk is missing from its free space, and nobody moves anything while all stand still. So once what anybody took of the
/// free space since the last figure that is certain could bring this sandbox past its limit, it has to stand still for a walk. What
/// can't be looked at even then is no reason by itself: it holds no more than what is missing.
#[derive(Debug, Default)]
struct Doubt {
    /// The last figure that it certainly does not pass, and the free space then.
    certain: Option<(u64, u64)>,
    /// Free space when this stretch of work began: nobody held anything.
    begun: Option<u64>,
    /// Walks in a row that did not see all.
    unsure: u32,
    /// Standstills in a row that did not either.
    blind: u32,
    /// No standstill before this.
    rest_until: Option<Instant>,
}

impl Doubt {
    /// Nothing ran before.
    fn begin(&mut self) {
        self.begun = None;
    }

    /// After a walk while the sandbox ran: whether it has to be repeated in a standstill.
    fn take(&mut self, total: Total, free: u64, allowed: Option<u64>) -> bool {
        let Total { bytes, whole, unseen } = total;
        if !whole {
            self.unsure += 1;
        } else {
            self.unsure = 0;
            if !unseen {
                self.certain.get_or_insert((bytes, free));
            }
        }
        let could_hold = self.could_hold(free);
        match allowed {
            // Seen, and judged as it is.
            Some(allowed) if whole && bytes > allowed => false,
            Some(allowed) => {
                // The less of it is others', the longer something unseen that comes later is not taken for more than it is.
                let drifts = could_hold.saturating_sub(bytes) > allowed.saturating_sub(bytes) / DRIFT_DIVISOR;
                could_hold > allowed
                    || whole && !unseen && drifts
                    || self.unsure >= MAX_UNSURE
                    || !whole && bytes > allowed
            }
            None => !whole,
        }
    }

    /// All that anybody took of the disk may be this sandbox's.
    fn could_hold(&self, free: u64) -> u64 {
        self.certain.map_or(u64::MAX, |(bytes, then)| bytes.saturating_add(then.saturating_sub(free)))
    }

    /// After a walk while everything stood still: whether it counts as over its limit, since nobody can say that it is not.
    fn settle(&mut self, total: Total, free: u64, allowed: Option<u64>) -> bool {
        let held = if total.unseen {
            // What is held was written since this stretch began.
            let held = self.begun.map_or(u64::MAX, |begun| begun.saturating_sub(free));
            self.could_hold(free).min(total.bytes.saturating_add(held)).max(total.bytes)
        } else {
            total.bytes
        };
        if total.whole && (!total.unseen || allowed.is_none_or(|allowed| held <= allowed)) {
            (self.certain, self.unsure, self.blind) = (Some((held, free)), 0, 0);
            return false;
        }
        self.blind += 1;
        if self.blind < if total.whole { MAX_UNSEEN } else { MAX_BLIND } {
            return false;
        }
        self.blind = 0;
        true
    }
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
    fn take(&mut self, stretch: u32, bytes: u64) -> bool {
        if stretch != self.stretch {
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
            memory: limits.memory_bytes.map(Memory::new),
            ticks_per_second: rustix::param::clock_ticks_per_second(),
            cpu: None,
            resting: None,
            awake: Awake::default(),
            disk: Arc::new(Disk {
                layers: Mutex::new(Layers { live: upper.map(Layer::new), ..Layers::default() }),
                aside: Arc::default(),
                free_then: AtomicU64::new(u64::MAX),
                limit: limits.disk_bytes.unwrap_or(u64::MAX),
                room: Mutex::default(),
            }),
            judge: Judge::new(limits.disk_bytes.unwrap_or(u64::MAX)),
            doubt: Doubt::default(),
            looks: 0,
            dying: Vec::new(),
        }
    }

    /// A snapshot has sealed the layer; this is the new one. What was sealed goes on to count.
    pub fn go_on_in(&mut self, upper: OwnedFd) {
        let mut layers = self.disk.layers();
        let sealed = layers.live.replace(Layer::new(upper));
        layers.unmeasured.extend(sealed);
    }

    /// Commands start where nothing ran.
    pub fn begin(&mut self) {
        self.judge.begin();
        self.doubt.begin();
        if let Some(memory) = &mut self.memory {
            memory.begin();
        }
    }

    /// Before a command starts in a layer that was over its limit: what is left by now decides what it may hold. Measured at
    /// once, or it could fill again what a quick `rm` has just made free.
    pub fn measure_if_over(&mut self) {
        if self.judge.over && self.disk.has_upper() {
            let free = self.disk.free();
            let total = self.disk.walk();
            let total = if total.whole { total } else { self.disk.walk_still() };
            if total.whole {
                // From here on the disk moves: not from when it was as full as it may soon be again.
                self.disk.free_then.store(free, Ordering::Relaxed);
                // A second look confirms it before anybody is killed.
                let _ = self.judge.take(self.judge.stretch, total.bytes);
            }
        }
    }

    /// Kills everything; what it did so far is judged by now.
    pub fn kill(&mut self) {
        procs::kill_all();
        (self.cpu, self.resting, self.awake) = (None, None, Awake::default());
        self.dying = procs::all().iter().map(|p| (p.pid, p.born)).collect();
        self.judge.begin();
        if let Some(memory) = &mut self.memory {
            memory.begin();
        }
    }

    pub fn is_needed(&self) -> bool {
        let Watch { memory_bytes, cpus, disk_bytes } = self.limits;
        memory_bytes.is_some() || cpus.is_some() || disk_bytes.is_some()
    }

    /// `by_signals`: that all stand still is by signals. `paused`: that they do, whatever by.
    pub fn look(&mut self, by_signals: bool, paused: bool) -> Verdict {
        self.looks = self.looks.wrapping_add(1);
        let processes = procs::all();
        self.dying.retain(|(pid, born)| processes.iter().any(|p| (p.pid, p.born) == (*pid, *born)));
        if let Some(memory) = &mut self.memory {
            let is_dying = |p: &Proc| self.dying.contains(&(p.pid, p.born));
            let living: Vec<Proc> = processes.iter().filter(|p| !is_dying(p)).copied().collect();
            if memory.is_over(&living) {
                return Verdict::Over(Limit::Memory);
            }
        }
        if by_signals || self.limits.cpus.is_some() && !paused {
            let ticks = procs::ticks(&processes) as f64;
            let used = Duration::from_secs_f64(ticks / self.ticks_per_second as f64);
            if let Some(limit) = self.throttle(by_signals, used) {
                return Verdict::Over(limit);
            }
        }
        if self.disk_is_over() { Verdict::Over(Limit::Disk) } else { Verdict::Fine }
    }

    /// Whoever runs while there is something to make up for is stopped, whenever it began and whoever let it go on; what
    /// stopped itself stays so.
    fn throttle(&mut self, paused: bool, used: Duration) -> Option<Limit> {
        let now = Instant::now();
        let mut resting = paused.then_some(0.0);
        if let (Some(cpus), false) = (self.limits.cpus, paused) {
            let share = self.cpu.get_or_insert(Share::new(cpus, now, used));
            let rested = share.resting;
            let rests = share.take(now, used);
            resting = (rested && rests).then_some(cpus);
            if rests {
                self.resting.get_or_insert_default().renew();
            } else {
                self.resting = None;
            }
        }
        let limit = if paused { Limit::Pause } else { Limit::Processors };
        self.awake.take(now, used, resting).then_some(limit)
    }

    /// Judges the last measurement; starts a new one if the disk moved, or if the last one needs another to confirm it.
    fn disk_is_over(&mut self) -> bool {
        let disk = &self.disk;
        let (Some(limit), true) = (self.limits.disk_bytes, disk.has_upper()) else { return false };
        let free = disk.free();
        self.doubt.begun.get_or_insert(free);
        let measured = disk.aside.take();
        if measured.is_some_and(|measured| self.weigh(&measured, Disk::walk_still)) {
            return true;
        }
        let disk = &self.disk;
        let moved = disk.free_then.load(Ordering::Relaxed).abs_diff(free) > limit / DISK_SLACK_DIVISOR;
        let due = moved
            || self.judge.allowed.is_none()
            || self.judge.suspect.is_some()
            || self.looks.is_multiple_of(MEASURE_AT_LEAST_EVERY);
        if !due {
            return false;
        }
        let (shared, stretch) = (Arc::clone(disk), self.judge.stretch);
        let begun = disk.aside.start(move || Measured { stretch, total: shared.walk(), free });
        if begun.is_ok() {
            disk.free_then.store(free, Ordering::Relaxed);
        }
        matches!(begun, Ok(Some(measured)) if self.weigh(&measured, Disk::walk_still))
    }

    /// `still`: measures while everything stands still.
    fn weigh(&mut self, measured: &Measured, still: impl FnOnce(&Disk) -> Total) -> bool {
        let Measured { stretch, total, free } = *measured;
        if !self.doubt.take(total, free, self.judge.allowed) {
            return total.whole && self.judge.take(stretch, total.bytes);
        }
        // A walk that is doubted acquits nobody either.
        if self.doubt.rest_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let (begun, free) = (Instant::now(), self.disk.free());
        let total = still(&self.disk);
        self.doubt.rest_until = Some(Instant::now() + begun.elapsed() * STILL_SHARE);
        self.doubt.settle(total, free, self.judge.allowed)
            || total.whole && self.judge.take(self.judge.stretch, total.bytes)
    }

    /// The directory of the layer that is written to.
    pub fn upper(&self) -> Option<Arc<OwnedFd>> {
        self.disk.layers().live.as_ref().map(|layer| Arc::clone(&layer.dir))
    }

    pub fn disk(&self) -> Arc<Disk> {
        Arc::clone(&self.disk)
    }
}

impl Disk {
    fn layers(&self) -> MutexGuard<'_, Layers> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free space of the disk that the layer lies on, whoever uses it. Inodes too: a flood of empty files hardly moves the bytes.
    fn free(&self) -> u64 {
        let live = self.layers().live.clone();
        live.and_then(|layer| rustix::fs::fstatvfs(&*layer.dir).ok())
            .map_or(0, |s| (s.f_bavail * s.f_frsize).saturating_add(s.f_favail.saturating_mul(ENTRY_BYTES)))
    }

    /// Takes room for so much that the host is about to write, if there is any. Only what could pass the limit is measured.
    pub fn take_room(&self, bytes: u64) -> bool {
        if self.limit == u64::MAX || !self.has_upper() {
            return true;
        }
        let bytes = bytes.max(ENTRY_BYTES);
        let has = || self.room().has(bytes, self.limit, self.free());
        if !has() {
            self.walk();
            if !has() {
                return false;
            }
        }
        self.room().written += bytes;
        true
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much the layers hold: of one that could not be seen as a whole, no less than when it was.
    pub fn measure(&self) -> u64 {
        self.walk().bytes
    }

    /// The same while every process stands still.
    fn walk_still(&self) -> Total {
        let _held = procs::hold();
        let mut total = self.walk();
        for _ in 1..STILL_WALKS {
            if total.whole {
                break;
            }
            total = self.walk();
        }
        total
    }

    /// Walks the layers. Folders and processes that their owner closed are looked into all the same: this thread alone raises that
    /// right.
    fn walk(&self) -> Total {
        let (free, written) = (self.free(), self.room().written);
        let (live, sealed) = {
            let layers = self.layers();
            (layers.live.clone(), layers.unmeasured.clone())
        };
        let (sealed, live, nameless) = seeing_all(|| {
            let sealed: Vec<Layer> = sealed.into_iter().filter_map(Layer::seen).collect();
            let live = live.map(|layer| (Arc::clone(&layer.dir), layer.bytes, survey(layer.dir.as_fd())));
            let nameless = live.as_ref().map(|(dir, ..)| unlinked::on_disk(dir.as_fd())).unwrap_or_default();
            (sealed, live, nameless)
        });
        let mut layers = self.layers();
        for layer in sealed {
            // Another thread may have measured it too: it counts once.
            let before = layers.unmeasured.len();
            layers.unmeasured.retain(|other| !Arc::ptr_eq(&other.dir, &layer.dir));
            if layers.unmeasured.len() < before {
                layers.sealed_bytes += layer.bytes;
            }
        }
        let mut total = Total {
            bytes: layers.sealed_bytes + nameless.bytes,
            whole: layers.unmeasured.is_empty(),
            unseen: nameless.unseen,
        };
        total.bytes += layers.unmeasured.iter().map(|layer| layer.bytes).sum::<u64>();
        if let Some((dir, last, seen)) = live {
            total.whole &= seen.whole;
            total.bytes += if seen.whole { seen.size.bytes } else { seen.size.bytes.max(last) };
            if let Some(layer) =
                layers.live.as_mut().filter(|layer| seen.whole && Arc::ptr_eq(&layer.dir, &dir))
            {
                layer.bytes = seen.size.bytes;
            }
        }
        drop(layers);
        if total.whole {
            let mut room = self.room();
            // What was written meanwhile may have been seen, and counts once more.
            *room =
                Room { certain: Some((total.bytes, free)), written: room.written.saturating_sub(written) };
        }
        total
    }

    pub fn has_upper(&self) -> bool {
        self.layers().live.is_some()
    }
}

impl Layer {
    fn new(dir: OwnedFd) -> Layer {
        Layer { dir: Arc::new(dir), bytes: 0 }
    }

    /// None if it could not be seen as a whole.
    fn seen(self) -> Option<Layer> {
        let seen = survey(self.dir.as_fd());
        seen.whole.then_some(Layer { bytes: seen.size.bytes, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 6400;

    fn take(judge: &mut Judge, bytes: u64) -> bool {
        judge.take(judge.stretch, bytes)
    }

    fn empty(name: &str) -> (std::path::PathBuf, OwnedFd) {
        let path = std::env::temp_dir().join(format!("forkyard-watch-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let dir = crate::files::tree::open(path.to_str().unwrap()).unwrap();
        (path, dir)
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
        let old = judge.stretch;
        assert!(!take(&mut judge, 9000));
        judge.begin();
        for _ in 0..3 {
            assert!(!judge.take(old, 9000));
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

    #[test]
    fn the_disk_moves_from_what_was_measured_at_a_start() {
        let (path, upper) = empty("start");
        let limits = Watch { memory_bytes: None, cpus: None, disk_bytes: Some(LIMIT) };
        let mut watchdog = Watchdog::new(limits, Some(upper));
        let then = |watchdog: &Watchdog| watchdog.disk.free_then.load(Ordering::Relaxed);
        watchdog.disk.free_then.store(0, Ordering::Relaxed);
        watchdog.measure_if_over();
        assert_eq!(then(&watchdog), 0, "nothing was over");
        watchdog.judge.over = true;
        watchdog.measure_if_over();
        assert!(then(&watchdog) > 0);
        std::fs::remove_dir(&path).unwrap();
    }

    fn seen(bytes: u64, whole: bool) -> Total {
        Total { bytes, whole, unseen: false }
    }

    const FREE: u64 = 1 << 30;

    #[test]
    fn what_hides_from_walks_is_missing_from_the_free_space() {
        let mut doubt = Doubt::default();
        assert!(!doubt.take(seen(1000, true), FREE, Some(LIMIT)));
        // Folders move, as they do in a build, and somebody writes a little.
        assert!(!doubt.take(seen(1000, false), FREE - 5400, Some(LIMIT)));
        // Whether a walk noticed it or not.
        assert!(doubt.take(seen(0, false), FREE - 5401, Some(LIMIT)));
        assert!(doubt.take(seen(1000, true), FREE - 5401, Some(LIMIT)));
        // It was somebody else.
        assert!(!doubt.settle(seen(1000, true), FREE - 5401, Some(LIMIT)));
        assert!(!doubt.take(seen(1000, true), FREE - 5401, Some(LIMIT)));
        // One that can be seen to be over is judged; one that nobody saw yet can't be.
        assert!(!doubt.take(seen(9000, true), FREE - 9000, Some(LIMIT)));
        assert!(doubt.take(seen(9000, false), FREE, Some(LIMIT)));
        assert!(Doubt::default().take(seen(0, false), FREE, Some(LIMIT)));
        assert!(Doubt::default().take(seen(0, false), FREE, None));
    }

    #[test]
    fn what_nobody_can_look_at_holds_no_more_than_is_missing() {
        let hidden = |bytes| Total { bytes, whole: true, unseen: true };
        let mut doubt = Doubt { begun: Some(FREE), ..Doubt::default() };
        // It was there before the first walk: what is missing since the first look is all that it can hold.
        assert!(doubt.take(hidden(1000), FREE - 100, Some(LIMIT)));
        assert!(!doubt.settle(hidden(1000), FREE - 100, Some(LIMIT)));
        assert_eq!(doubt.certain, Some((1100, FREE - 100)));
        // However long it is there, nobody stands still for it, nor is killed.
        for _ in 0..2 * MAX_UNSURE {
            assert!(!doubt.take(hidden(1000), FREE - 5400, Some(LIMIT)));
        }
        // It could be over.
        for still in 1..=MAX_UNSEEN {
            assert!(doubt.take(hidden(1000), FREE - 5501, Some(LIMIT)));
            assert_eq!(doubt.settle(hidden(1000), FREE - 5501, Some(LIMIT)), still == MAX_UNSEEN, "{still}");
        }
        // Whatever others took before this stretch began.
        doubt.begin();
        doubt.begun = Some(FREE - 9000);
        assert!(doubt.take(hidden(1000), FREE - 9100, Some(LIMIT)));
        assert!(!doubt.settle(hidden(1000), FREE - 9100, Some(LIMIT)));
        assert_eq!(doubt.certain, Some((1100, FREE - 9100)));
    }

    #[test]
    fn what_others_write_is_told_apart_while_all_can_be_seen() {
        let mut doubt = Doubt::default();
        assert!(!doubt.take(seen(1000, true), FREE, Some(LIMIT)));
        // Its own, in the open.
        assert!(!doubt.take(seen(6000, true), FREE - 5000, Some(LIMIT)));
        // A quarter of the room that is left.
        assert!(!doubt.take(seen(1000, true), FREE - 1350, Some(LIMIT)));
        assert!(doubt.take(seen(1000, true), FREE - 1351, Some(LIMIT)));
        assert!(!doubt.settle(seen(1000, true), FREE - 1351, Some(LIMIT)));
        assert!(!doubt.take(seen(1000, true), FREE - 1351, Some(LIMIT)));
    }

    #[test]
    fn a_walk_that_saw_too_little_does_not_clear_a_suspect() {
        let limits = Watch { memory_bytes: None, cpus: None, disk_bytes: Some(LIMIT) };
        let mut watchdog = Watchdog::new(limits, None);
        let mut look = |total, free, still: Option<Total>| {
            watchdog.doubt.rest_until = None;
            if let Some((_, then)) = &mut watchdog.doubt.certain {
                *then = FREE; // of no disk
            }
            let measured = Measured { stretch: watchdog.judge.stretch, total, free };
            watchdog.weigh(&measured, |_| still.expect("no reason to stand still"))
        };
        assert!(!look(seen(1000, true), FREE, None));
        for whole in [true, false] {
            // Twice over in a row, however little the walks saw before.
            assert!(!look(seen(1000, whole), FREE - 9000, Some(seen(9000, true))));
            assert!(look(seen(1000, whole), FREE - 9000, Some(seen(9000, true))));
            assert!(!look(seen(1000, whole), FREE - 9000, Some(seen(1000, true))), "it has cleaned up");
        }
    }

    #[test]
    fn who_can_not_be_measured_for_long_has_to_stand_still_and_then_counts_as_over() {
        let mut doubt = Doubt::default();
        assert!(!doubt.take(seen(1000, true), FREE, Some(LIMIT)));
        for walk in 1..=MAX_UNSURE {
            assert_eq!(doubt.take(seen(1000, false), FREE, Some(LIMIT)), walk == MAX_UNSURE, "{walk}");
        }
        for still in 1..=MAX_BLIND {
            assert_eq!(doubt.settle(seen(0, false), FREE, Some(LIMIT)), still == MAX_BLIND, "{still}");
        }
        assert!(!doubt.settle(seen(0, true), FREE, Some(LIMIT)));
        assert_eq!((doubt.unsure, doubt.blind, doubt.certain), (0, 0, Some((0, FREE))));
    }

    #[test]
    fn what_surely_fits_is_not_measured() {
        assert!(!Room::default().has(1, LIMIT, FREE), "nothing is certain yet");
        let room = |written| Room { certain: Some((1000, FREE)), written };
        assert!(room(0).has(LIMIT - 1000, LIMIT, FREE) && !room(0).has(LIMIT - 999, LIMIT, FREE));
        assert!(room(400).has(LIMIT - 1400, LIMIT, FREE) && !room(400).has(LIMIT - 1399, LIMIT, FREE));
        // By commands: it is missing, once.
        assert!(room(400).has(LIMIT - 1500, LIMIT, FREE - 500));
        assert!(!room(400).has(LIMIT - 1499, LIMIT, FREE - 500));
    }

    #[test]
    fn a_layer_that_can_not_be_walked_counts_as_it_did() {
        // A pipe can't be walked.
        let layer = |bytes| Layer { bytes, ..Layer::new(rustix::pipe::pipe().unwrap().0) };
        let layers = Layers { live: Some(layer(500)), unmeasured: vec![layer(70)], sealed_bytes: 6 };
        let disk = Disk {
            layers: Mutex::new(layers),
            aside: Arc::default(),
            free_then: AtomicU64::new(0),
            limit: u64::MAX,
            room: Mutex::default(),
        };
        for _ in 0..2 {
            let total = disk.walk();
            assert_eq!((total.bytes, total.whole), (576, false));
        }
        assert_eq!(disk.layers().unmeasured.len(), 1, "it is measured when that can be done");
        let (path, upper) = empty("sealed");
        disk.layers().live = Some(Layer::new(upper));
        assert!(!disk.walk().whole, "the sealed one is still not known");
        disk.layers().unmeasured.clear();
        assert!(disk.walk().whole);
        std::fs::remove_dir(&path).unwrap();
    }
}
