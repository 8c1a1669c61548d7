//! Processes of the sandbox, as /proc shows them.

use std::collections::HashSet;

use crate::sys::process::kill;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Proc {
    pub pid: i32,
    pub parent: i32,
    pub state: u8,
    /// User and system time, in clock ticks; with that of children that it waited for.
    pub ticks: u64,
    /// In clock ticks since boot: with it, a number is used once.
    pub born: u64,
    pub virtual_bytes: u64,
    pub resident_pages: u64,
    /// The thread that tells of its memory: of those that are left.
    pub teller: i32,
}

/// Every process but the guest. Threads of the kernel do not show in a pid namespace.
pub fn all() -> Vec<Proc> {
    look().0
}

/// The same, and the numbers of those that went while they were looked at: others may have come in their place, and not be here.
fn look() -> (Vec<Proc>, Vec<i32>) {
    let me = std::process::id() as i32;
    let (mut found, mut gone) = (Vec::new(), Vec::new());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
        match Proc::read(pid) {
            _ if pid == me => {}
            Some(process) => found.push(process),
            None => gone.push(pid),
        }
    }
    (found, gone)
}

impl Proc {
    fn read(pid: i32) -> Option<Proc> {
        let mut process = parse(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?)?;
        if process.state == b'Z' {
            // Its first thread may have ended alone: then another one tells what it does and holds.
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
            let living = threads.flatten().find_map(|thread| {
                let stat = std::fs::read(thread.path().join("stat")).ok()?;
                let id = thread.file_name().to_str()?.parse().ok()?;
                parse(id, &stat).filter(|thread| !matches!(thread.state, b'Z' | b'X'))
            });
            if let Some(living) = living {
                process =
                    Proc { pid, parent: process.parent, ticks: process.ticks, born: process.born, ..living };
            }
        }
        Some(process)
    }

    /// A file of /proc that tells of its memory.
    pub fn tells(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(format!("/proc/{}/task/{}/{file}", self.pid, self.teller)).ok()
    }
}

/// The name in parentheses may hold anything, so fields are counted from its last closing one.
fn fields(stat: &[u8]) -> Option<Vec<&str>> {
    let after = stat.iter().rposition(|b| *b == b')')? + 2;
    Some(std::str::from_utf8(stat.get(after..)?).ok()?.split_ascii_whitespace().collect())
}

fn parse(pid: i32, stat: &[u8]) -> Option<Proc> {
    let fields = fields(stat)?;
    let number = |i: usize| fields.get(i)?.parse::<u64>().ok();
    Some(Proc {
        pid,
        state: *fields.first()?.as_bytes().first()?,
        parent: fields.get(1)?.parse().ok()?,
        ticks: number(11)? + number(12)? + number(13)? + number(14)?,
        born: number(19)?,
        virtual_bytes: number(20)?,
        resident_pages: number(21)?,
        teller: pid,
    })
}

/// The time that these have used, and all that ended before them: whoever ends leaves its time to the one that waits for it, in
/// the end to the guest.
pub fn ticks(processes: &[Proc]) -> u64 {
    let ended = std::fs::read("/proc/self/stat").ok().and_then(|stat| {
        let fields = fields(&stat)?;
        Some(fields.get(13)?.parse::<u64>().ok()? + fields.get(14)?.parse::<u64>().ok()?)
    });
    processes.iter().map(|p| p.ticks).sum::<u64>() + ended.unwrap_or(0)
}

/// The process, and all of them that descend from it. A command is the reaper of its own orphans, so a double fork stays below it.
fn tree(root: i32, all: &[Proc]) -> HashSet<i32> {
    let mut members = HashSet::from([root]);
    loop {
        let before = members.len();
        members.extend(all.iter().filter(|p| members.contains(&p.parent)).map(|p| p.pid).collect::<Vec<_>>());
        if members.len() == before {
            return members;
        }
    }
}

/// Rounds of looking for new members: each one stops all it finds, so only what was being forked just then is left.
const ROUNDS: usize = 16;

/// A pause between two of them, for whoever is in the middle of something.
const STOPS_WITHIN: std::time::Duration = std::time::Duration::from_millis(1);

/// A signal to every process but the guest, at one moment: nobody gets away by forking. Only pid 1 can say "everybody"; a guest
/// that shares its processes with others must not.
fn everybody(signal: i32) -> bool {
    std::process::id() == 1 && kill(-1, signal).is_ok()
}

/// Kills the process and all that descend from it, while nobody can fork. A process can have a timer that lets it go on while it
/// is stopped, and fork then: if there are new ones however often one looks, all others of the sandbox go with them.
pub fn kill_tree(root: i32) {
    let me = std::process::id() as i32;
    let own =
        |all: &[Proc]| -> HashSet<i32> { all.iter().filter(|p| p.parent == me).map(|p| p.pid).collect() };
    let held = hold();
    // What becomes an orphan from now on was a part of it: nobody else goes on.
    let before = own(&all());
    let mut killed = HashSet::new();
    let caught = (0..ROUNDS).any(|_| {
        let (all, gone) = look();
        let mut members = tree(root, &all);
        members.extend(own(&all).difference(&before));
        let fresh = all.iter().filter(|p| members.contains(&p.pid) && !killed.contains(&(p.pid, p.born)));
        let fresh: Vec<(i32, u64)> = fresh.map(|p| (p.pid, p.born)).collect();
        for (pid, _) in &fresh {
            let _ = kill(*pid, libc::SIGKILL);
        }
        killed.extend(&fresh);
        fresh.is_empty() && gone.iter().all(|gone| killed.iter().any(|(pid, _)| pid == gone))
    });
    let _ = kill(-root, libc::SIGKILL);
    if !caught {
        everybody(libc::SIGKILL);
    }
    drop(held);
}

/// Stops every process but the guest. Processes that are stopped can't continue each other.
fn stop_all() {
    if !everybody(libc::SIGSTOP) {
        stop_until_still(|| all().iter().filter(|p| p.state != b'Z').map(|p| p.pid).collect());
    }
}

fn stop_until_still(members: impl Fn() -> Vec<i32>) {
    let mut stopped = HashSet::new();
    for _ in 0..ROUNDS {
        let fresh: Vec<i32> = members().into_iter().filter(|pid| !stopped.contains(pid)).collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            let _ = kill(pid, libc::SIGSTOP);
            stopped.insert(pid);
        }
    }
}

/// Whoever was made to stand still goes on when this is dropped, and nobody else.
#[derive(Default)]
pub enum Held {
    #[default]
    Nobody,
    /// Whoever is there but those, which stood before. A fork that is under way when all are stopped gives one more that is, which
    /// no list of that moment has.
    AllBut(HashSet<(i32, u64)>),
    These(Vec<(i32, u64)>),
}

impl Drop for Held {
    fn drop(&mut self) {
        let held = &*self;
        if matches!(held, Held::Nobody) {
            return;
        }
        let is_held = |process: &(i32, u64)| match held {
            Held::Nobody => false,
            Held::AllBut(others) => !others.contains(process),
            Held::These(list) => list.contains(process),
        };
        // Children first: a shell that finds one of them stopped would take its terminal back.
        for process in all().iter().rev().filter(|p| is_held(&(p.pid, p.born))) {
            let _ = kill(process.pid, libc::SIGCONT);
        }
    }
}

impl Held {
    /// The same for whoever runs by now.
    pub fn renew(&mut self) {
        match self {
            Held::Nobody => *self = hold(),
            Held::AllBut(_) => _ = everybody(libc::SIGSTOP),
            Held::These(list) => {
                let mut fresh = hold();
                if let Held::These(fresh) = &mut fresh {
                    fresh.retain(|process| !list.contains(process));
                    list.append(fresh);
                }
            }
        }
    }
}

/// Makes every process that runs stand still. Those that do already are left as they are, so that a pause, or what stopped itself,
/// outlasts this.
pub fn hold() -> Held {
    // Without others whose processes these are not, in one go. What is left is to wait until each has left the kernel.
    let before: HashSet<(i32, u64)> = all().iter().filter(|p| stands(p)).map(|p| (p.pid, p.born)).collect();
    if !everybody(libc::SIGSTOP) {
        return hold_among(all);
    }
    for _ in 0..ROUNDS {
        if all().iter().all(stands) {
            break;
        }
        std::thread::sleep(STOPS_WITHIN);
    }
    Held::AllBut(before)
}

fn stands(process: &Proc) -> bool {
    matches!(process.state, b'T' | b't' | b'Z' | b'X')
}

fn hold_among(members: impl Fn() -> Vec<Proc>) -> Held {
    let mut held = Vec::new();
    for _ in 0..ROUNDS {
        let running: Vec<Proc> = members().into_iter().filter(|p| !stands(p)).collect();
        if running.is_empty() {
            break;
        }
        let before = held.len();
        for process in running {
            if !held.contains(&(process.pid, process.born)) {
                let _ = kill(process.pid, libc::SIGSTOP);
                held.push((process.pid, process.born));
            }
        }
        if held.len() == before {
            // It stops when it leaves the kernel.
            std::thread::sleep(STOPS_WITHIN);
        }
    }
    Held::These(held)
}

pub fn kill_all() {
    if everybody(libc::SIGKILL) {
        return;
    }
    stop_all();
    for process in all() {
        let _ = kill(process.pid, libc::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_name_full_of_parentheses_does_not_shift_the_fields() {
        let stat = b"12 (a) R 1 (x) S 7 12 12 0 -1 4 0 0 0 0 3 4 10 20 20 0 1 0 5 1000 55 0";
        let parsed = parse(12, stat).unwrap();
        let expected = Proc {
            pid: 12,
            parent: 7,
            state: b'S',
            ticks: 37,
            born: 5,
            virtual_bytes: 1000,
            resident_pages: 55,
            teller: 12,
        };
        assert_eq!(parsed, expected);
    }

    fn of(child: &Child) -> Vec<Proc> {
        let pid = child.id() as i32;
        all().into_iter().filter(|p| p.pid == pid).collect()
    }

    fn until(what: &str, mut is: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < end, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn time_of_short_lived_children_counts_with_who_waits_for_them() {
        const BUSY: &str = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done";
        let script = format!("n=0; while [ $n -lt 300 ]; do ({BUSY}); n=$((n+1)); done; echo done; read end");
        let mut shell = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 5];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut line).unwrap();
        let own = |pid: u32| {
            let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
            let fields = fields(&stat).unwrap();
            [11, 12, 13, 14].map(|i| fields[i].parse::<u64>().unwrap())
        };
        let [user, system, ..] = own(shell.id());
        let (seen, all) = (of(&shell)[0].ticks, own(shell.id()).iter().sum::<u64>());
        assert!(seen == all && seen > 2 * (user + system), "{seen} of {all}");
        let before = ticks(&[]);
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(ticks(&[]) >= before + all, "what the guest waited for is lost");
    }

    #[test]
    fn a_hold_wakes_only_whom_it_stopped() {
        let mut children: Vec<Child> =
            (0..2).map(|_| Command::new("sleep").arg("600").spawn().unwrap()).collect();
        let state = |child: &Child| of(child)[0].state;
        kill(children[0].id() as i32, libc::SIGSTOP).unwrap();
        until("the first stands still", || state(&children[0]) == b'T');
        let held = hold_among(|| children.iter().flat_map(of).collect());
        assert!(children.iter().all(|child| state(child) == b'T'));
        drop(held);
        until("the second goes on", || state(&children[1]) != b'T');
        assert_eq!(state(&children[0]), b'T');
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
