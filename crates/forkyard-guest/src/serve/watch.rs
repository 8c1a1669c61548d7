//! Limits that the machine can't keep: the guest looks, and stops an offender.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forkyard_guest::zygote::Watch;

use super::procs;

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
    looks: u32,
}

struct CpuSample {
    at: Instant,
    ticks: u64,
    stopped: bool,
}

/// Shared with the thread that measures.
pub struct Disk {
    upper: Option<OwnedFd>,
    measured: AtomicU64,
    free_then: AtomicU64,
    busy: AtomicBool,
}

impl Watchdog {
    pub fn new(limits: Watch, upper: Option<OwnedFd>) -> Watchdog {
        Watchdog {
            limits,
            page: rustix::param::page_size() as u64,
            ticks_per_second: rustix::param::clock_ticks_per_second(),
            cpu: None,
            disk: Arc::new(Disk {
                upper,
                measured: AtomicU64::new(0),
                free_then: AtomicU64::new(u64::MAX),
                busy: AtomicBool::new(false),
            }),
            looks: 0,
        }
    }

    pub fn is_needed(&self) -> bool {
        let Watch { memory_bytes, cpus, disk_bytes } = self.limits;
        memory_bytes.is_some() || cpus.is_some() || disk_bytes.is_some()
    }

    pub fn look(&mut self, paused: bool) -> Verdict {
        self.looks = self.looks.wrapping_add(1);
        let processes = procs::all();
        if let Some(limit) = self.limits.memory_bytes {
            let used: u64 = processes.iter().map(|p| p.resident_pages * self.page).sum();
            if used > limit {
                return Verdict::Memory;
            }
        }
        if let (Some(cpus), false) = (self.limits.cpus, paused) {
            self.throttle(cpus, processes.iter().map(|p| p.ticks).sum());
        }
        match self.limits.disk_bytes {
            Some(limit) if self.disk_used() > limit => Verdict::Disk,
            _ => Verdict::Fine,
        }
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

    /// What the layer held when it was last measured; starts a new measurement if the disk moved.
    fn disk_used(&self) -> u64 {
        let disk = &self.disk;
        let Some(upper) = &disk.upper else { return 0 };
        let free = rustix::fs::fstatvfs(upper.as_fd()).map_or(0, |s| s.f_bavail * s.f_frsize);
        let slack = self.limits.disk_bytes.unwrap_or(u64::MAX) / DISK_SLACK_DIVISOR;
        let moved = disk.free_then.load(Ordering::Relaxed).abs_diff(free) > slack;
        if (moved || self.looks.is_multiple_of(MEASURE_AT_LEAST_EVERY))
            && !disk.busy.swap(true, Ordering::Relaxed)
        {
            disk.free_then.store(free, Ordering::Relaxed);
            let shared = Arc::clone(disk);
            let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
                shared.measured.store(shared.measure(), Ordering::Relaxed);
                shared.busy.store(false, Ordering::Relaxed);
            });
            if thread.is_err() {
                disk.busy.store(false, Ordering::Relaxed);
            }
        }
        self.disk.measured.load(Ordering::Relaxed)
    }

    pub fn disk(&self) -> Arc<Disk> {
        Arc::clone(&self.disk)
    }
}

impl Disk {
    /// Walks the layer. Folders that their owner closed are read all the same: this thread alone raises that right.
    pub fn measure(&self) -> u64 {
        let Some(upper) = &self.upper else { return 0 };
        let raised = crate::sys::process::set_capabilities(true).is_ok();
        let size = crate::files::tree::measure_at(upper.as_fd()).map_or(0, |size| size.bytes);
        if raised {
            let _ = crate::sys::process::set_capabilities(false);
        }
        size
    }

    pub fn has_upper(&self) -> bool {
        self.upper.is_some()
    }
}
