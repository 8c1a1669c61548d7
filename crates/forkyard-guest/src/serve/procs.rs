//! Processes of the sandbox, as /proc shows them.

use std::collections::HashSet;

use crate::sys::process::kill;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Proc {
    pub pid: i32,
    pub parent: i32,
    pub state: u8,
    /// User and system time, in clock ticks.
    pub ticks: u64,
    /// In clock ticks since boot: with it, a number is used once.
    pub born: u64,
    pub resident_pages: u64,
}

/// Every process but the guest. Threads of the kernel do not show in a pid namespace.
pub fn all() -> Vec<Proc> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let me = std::process::id() as i32;
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != me)
        .filter_map(|pid| parse(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// The name in parentheses may hold anything, so fields are counted from its last closing one.
fn parse(pid: i32, stat: &[u8]) -> Option<Proc> {
    let after = stat.iter().rposition(|b| *b == b')')? + 2;
    let fields: Vec<&str> = std::str::from_utf8(stat.get(after..)?).ok()?.split_ascii_whitespace().collect();
    let number = |i: usize| fields.get(i)?.parse::<u64>().ok();
    Some(Proc {
        pid,
        state: *fields.first()?.as_bytes().first()?,
        parent: fields.get(1)?.parse().ok()?,
        ticks: number(11)? + number(12)?,
        born: number(19)?,
        resident_pages: number(21)?,
    })
}

/// The process, and all that descend from it. A command is the reaper of its own orphans, so a double fork stays below it.
fn tree(root: i32) -> Vec<i32> {
    let all = all();
    let mut members = HashSet::from([root]);
    loop {
        let before = members.len();
        members.extend(all.iter().filter(|p| members.contains(&p.parent)).map(|p| p.pid).collect::<Vec<_>>());
        if members.len() == before {
            break;
        }
    }
    all.iter().filter(|p| members.contains(&p.pid) && p.state != b'Z').map(|p| p.pid).collect()
}

/// Rounds of looking for new members: each one stops all it finds, so only what was being forked just then is left.
const ROUNDS: usize = 16;

/// Stops the whole tree until no new member appears, then kills it.
pub fn kill_tree(root: i32) {
    stop_until_still(|| tree(root));
    for pid in tree(root) {
        let _ = kill(pid, libc::SIGKILL);
    }
    let _ = kill(-root, libc::SIGKILL);
}

/// Stops every process but the guest. Processes that are stopped can't continue each other.
pub fn stop_all() {
    stop_until_still(|| all().iter().filter(|p| p.state != b'Z').map(|p| p.pid).collect());
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

pub fn continue_all() {
    for process in all() {
        let _ = kill(process.pid, libc::SIGCONT);
    }
}

pub fn kill_all() {
    stop_all();
    for process in all() {
        let _ = kill(process.pid, libc::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_full_of_parentheses_does_not_shift_the_fields() {
        let stat = b"12 (a) R 1 (x) S 7 12 12 0 -1 4 0 0 0 0 3 4 0 0 20 0 1 0 5 1000 55 0";
        let parsed = parse(12, stat).unwrap();
        assert_eq!(parsed, Proc { pid: 12, parent: 7, state: b'S', ticks: 7, born: 5, resident_pages: 55 });
    }
}
