//! The limit of memory where no group of the kernel keeps it. What is mapped the kernel tells of each process. The rest is counted
//! where it can be seen: files in memory by who has them open, what System V keeps, tables of pages, what was swapped out. What
//! can't be seen (a file in memory that is on its way through a socket, what waits in sockets and pipes) is missing from what this
//! machine has available; so as long as that leaves room, nobody is killed for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::aside::Aside;
use super::procs::Proc;
use super::unlinked::{self, Held};
use crate::sys::ipc;
use crate::sys::process::seeing_all;

/// Of the limit: less is not worth a closer look.
const SLACK_DIVISOR: u64 = 64;
/// The longest that descriptors are not looked at while something runs, in looks.
const LOOK_AT_LEAST_EVERY: u32 = 25;
/// Looks in a row at which too much may be held, until it counts as held: others take and give back memory too.
const MAX_DOUBTS: u32 = 3;
/// Of the time, at most one part in so many is spent looking at descriptors.
const LOOK_SHARE: u32 = 20;
/// What may wait in a socket: twice what one sends ahead by default, which is also the most that may be asked for.
const SOCKET_BYTES: u64 = 512 << 10;
/// The same for any descriptor. Of pipes, the kernel lets a user's be larger up to 64 MiB together.
const DESCRIPTOR_BYTES: u64 = 8 << 10;
/// A table of pages takes so much less than what it maps, at the least.
const TABLE_DIVISOR: u64 = 512;

pub struct Memory {
    limit: u64,
    page: u64,
    begun: Option<Begun>,
    /// Which stretch of work this is: what was found in another does not count.
    stretch: u32,
    aside: Arc<Aside<Found>>,
    held: Held,
    /// The machine, when descriptors were last looked at.
    looked: Machine,
    rest_until: Option<Instant>,
    looks: u32,
    doubts: u32,
}

/// At the first look at a stretch of work.
#[derive(Clone, Copy)]
struct Begun {
    machine: Machine,
    used: u64,
    files: u64,
}

struct Found {
    stretch: u32,
    held: Held,
    took: Duration,
}

/// What this machine says of its memory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Machine {
    /// What could be had, swap included.
    available: u64,
    swapped: u64,
    /// In files without a disk.
    shared: u64,
}

impl Machine {
    fn read() -> Machine {
        parse(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }
}

fn parse(meminfo: &str) -> Machine {
    let of = |name: &str| kib(meminfo, name);
    Machine {
        available: of("MemAvailable:") + of("SwapFree:"),
        swapped: of("SwapTotal:").saturating_sub(of("SwapFree:")),
        shared: of("Shmem:"),
    }
}

/// `Name:   12 kB`, in bytes.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Sockets of this network namespace, those that nobody has open and that still hold something included.
fn sockets() -> u64 {
    let text = std::fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("sockets: used ")?.trim().parse().ok()).unwrap_or(0)
}

/// What processes have mapped.
struct Mapped {
    bytes: u64,
    /// Of that, files, those in memory included.
    shared: u64,
}

impl Mapped {
    /// With `files` in memory, which count once however often they are mapped. Nothing else is mapped and shared that would not
    /// count as mapped.
    fn with(&self, files: u64) -> u64 {
        self.bytes.saturating_add(files.saturating_sub(self.shared))
    }
}

/// What is known of a moment.
struct Seen {
    mapped: Mapped,
    /// In files in memory and what System V keeps.
    files: u64,
    machine: Machine,
    /// Other files in memory may be held.
    unseen: bool,
    /// What may wait in sockets, pipes and the like. None: nobody has looked since the machine's memory moved.
    waiting: Option<u64>,
}

impl Begun {
    /// The most that may be held, by what this machine is missing since.
    fn could_hold(&self, seen: &Seen) -> u64 {
        let Seen { mapped, files, machine, unseen, waiting } = seen;
        let grown = machine.shared.saturating_sub(self.machine.shared);
        let files = if *unseen { (*files).max(self.files.saturating_add(grown)) } else { *files };
        let could = waiting.map_or(u64::MAX, |waiting| mapped.with(files).saturating_add(waiting));
        let missing = self.machine.available.saturating_sub(machine.available);
        could.min(self.used.saturating_add(missing))
    }
}

impl Memory {
    pub fn new(limit: u64) -> Memory {
        Memory {
            limit,
            page: rustix::param::page_size() as u64,
            begun: None,
            stretch: 0,
            aside: Arc::default(),
            held: Held::default(),
            looked: Machine::default(),
            rest_until: None,
            looks: 0,
            doubts: 0,
        }
    }

    /// Nothing ran before, or all was killed just now.
    pub fn begin(&mut self) {
        self.stretch = self.stretch.wrapping_add(1);
        (self.begun, self.held, self.doubts) = (None, Held::default(), 0);
    }

    /// Whether these hold more than they may.
    pub fn is_over(&mut self, processes: &[Proc]) -> bool {
        let machine = Machine::read();
        self.look_aside(machine);
        let files = self.held.bytes.saturating_add(ipc::bytes());
        let stale = self.has_moved(machine);
        let shares = files.max(if self.held.unseen { machine.shared } else { 0 });
        let seen = Seen {
            mapped: self.mapped(processes, shares, machine),
            files,
            machine,
            unseen: self.held.unseen,
            waiting: (!stale).then(|| sockets() * SOCKET_BYTES + self.held.descriptors * DESCRIPTOR_BYTES),
        };
        let used = seen.mapped.with(files);
        if used > self.limit {
            return true;
        }
        let begun = self.begun.get_or_insert(Begun { machine, used, files });
        let doubted = begun.could_hold(&seen) > self.limit;
        self.doubts = if doubted { self.doubts + 1 } else { 0 };
        self.doubts >= MAX_DOUBTS
    }

    fn slack(&self) -> u64 {
        self.limit / SLACK_DIVISOR
    }

    /// Since descriptors were looked at.
    fn has_moved(&self, now: Machine) -> bool {
        let by = |then: u64, now: u64| then.abs_diff(now) > self.slack();
        self.begun.is_some()
            && (by(self.looked.available, now.available) || by(self.looked.shared, now.shared))
    }

    fn look_aside(&mut self, now: Machine) {
        self.looks = self.looks.wrapping_add(1);
        if let Some(found) = self.aside.take() {
            self.take(found);
        }
        if self.begun.is_none() {
            self.looked = now;
        }
        let due =
            self.begun.is_none() || self.has_moved(now) || self.looks.is_multiple_of(LOOK_AT_LEAST_EVERY);
        if !due || self.rest_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        let stretch = self.stretch;
        let look = move || {
            let begun = Instant::now();
            let held = seeing_all(unlinked::in_memory);
            Found { stretch, held, took: begun.elapsed() }
        };
        if let Ok(found) = self.aside.start(look) {
            self.looked = now;
            if let Some(found) = found {
                self.take(found);
            }
        }
    }

    fn take(&mut self, found: Found) {
        self.rest_until = Some(Instant::now() + found.took * LOOK_SHARE);
        if found.stretch == self.stretch {
            self.held = found.held;
        }
    }

    /// Each of the dearer looks only where it could find something: `files` in memory, swap, large address spaces.
    fn mapped(&self, processes: &[Proc], files: u64, machine: Machine) -> Mapped {
        let tables = processes.iter().map(|p| p.virtual_bytes).sum::<u64>() / TABLE_DIVISOR;
        let asks = machine.swapped.max(tables) > self.slack();
        let mut mapped = Mapped { bytes: 0, shared: 0 };
        for process in processes {
            mapped.bytes += process.resident_pages * self.page;
            if asks && let Some(status) = process.tells("status") {
                mapped.bytes += kib(&status, "VmPTE:") + kib(&status, "VmSwap:");
            }
            if files > self.slack()
                && let Some(statm) = process.tells("statm")
            {
                let shared =
                    statm.split_ascii_whitespace().nth(2).and_then(|pages| pages.parse::<u64>().ok());
                mapped.shared += shared.unwrap_or(0) * self.page;
            }
        }
        mapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BEGUN: Begun = Begun {
        machine: Machine { available: 1000 * MIB, swapped: 0, shared: 50 * MIB },
        used: 5 * MIB,
        files: 0,
    };

    /// So many MiB are mapped, the machine misses `missing`, and has `grown` by that much in files in memory.
    fn seen(mapped: u64, missing: u64, grown: u64) -> Seen {
        Seen {
            mapped: Mapped { bytes: mapped * MIB, shared: 0 },
            files: 0,
            machine: Machine {
                available: BEGUN.machine.available - missing * MIB,
                swapped: 0,
                shared: BEGUN.machine.shared + grown * MIB,
            },
            unseen: false,
            waiting: Some(0),
        }
    }

    fn could_hold(seen: Seen) -> u64 {
        BEGUN.could_hold(&seen) / MIB
    }

    #[test]
    fn what_others_take_is_nobodys_here() {
        assert_eq!(could_hold(seen(20, 900, 900)), 20);
    }

    #[test]
    fn what_can_not_be_seen_is_no_more_than_is_missing_and_no_more_than_its_place_could_hold() {
        for (missing, waiting, held) in [(900, 70, 90), (30, 70, 35), (0, 70, 5)] {
            assert_eq!(could_hold(Seen { waiting: Some(waiting * MIB), ..seen(20, missing, 0) }), held);
        }
        for (missing, grown, held) in [(900, 70, 90), (30, 70, 35)] {
            assert_eq!(could_hold(Seen { unseen: true, ..seen(20, missing, grown) }), held);
        }
        assert_eq!(could_hold(Seen { waiting: None, ..seen(20, 900, 0) }), 905, "nobody has looked");
    }

    #[test]
    fn a_file_that_is_mapped_counts_once() {
        let mapped = Mapped { bytes: 100, shared: 60 };
        assert_eq!([0, 40, 60, 90].map(|files| mapped.with(files)), [100, 100, 100, 130]);
    }

    #[test]
    fn what_the_machine_says_is_read() {
        let text =
            "MemTotal: 9 kB\nMemAvailable:   100 kB\nShmem:  7 kB\nSwapTotal: 50 kB\nSwapFree:  30 kB\n";
        let expected = Machine { available: 130 * 1024, swapped: 20 * 1024, shared: 7 * 1024 };
        assert_eq!(parse(text), expected);
        assert_eq!(parse("nothing of it"), Machine::default());
    }
}
