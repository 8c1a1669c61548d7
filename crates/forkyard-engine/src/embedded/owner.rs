//! Who holds a lease: a process by its number, its start and the place where that number means it. A holder of this machine
//! that is gone need not be waited for.

use std::fs;

/// Words of an owner that were written by [`Owner::me`].
const MARK: &str = "process";

/// A process that cannot be mistaken for another one: numbers are used again, so its start counts too, in clock ticks since
/// boot; and they mean something only in one namespace of one boot of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pid: u32,
    started: u64,
    namespace: u64,
    boot: String,
}

/// What /proc says of a process.
struct Seen {
    state: char,
    threads: u64,
    started: u64,
}

impl Owner {
    /// None where /proc does not tell.
    pub fn me() -> Option<Owner> {
        let pid = std::process::id();
        Some(Owner { pid, started: look(pid)?.started, namespace: namespace()?, boot: boot()? })
    }

    /// As it stands in a lease, with something that makes it unique within the process.
    pub fn name(&self, unique: &str) -> String {
        format!("{MARK}.{}.{}.{}.{}.{unique}", self.pid, self.started, self.namespace, self.boot)
    }

    pub fn parse(name: &str) -> Option<Owner> {
        let mut parts = name.split('.');
        if parts.next()? != MARK {
            return None;
        }
        Some(Owner {
            pid: parts.next()?.parse().ok()?,
            started: parts.next()?.parse().ok()?,
            namespace: parts.next()?.parse().ok()?,
            boot: parts.next()?.to_string(),
        })
    }

    /// Nothing of it can act any more. False wherever that can't be told from here.
    pub fn is_gone(&self) -> bool {
        if namespace() != Some(self.namespace) || boot().as_ref() != Some(&self.boot) {
            return false;
        }
        match look(self.pid) {
            Some(seen) if seen.started != self.started => true,
            // Killed, and nobody has asked for its end yet. A main thread alone may be over while others go on.
            Some(seen) => matches!(seen.state, 'Z' | 'X') && seen.threads <= 1,
            None => !fs::exists(format!("/proc/{}", self.pid)).unwrap_or(true),
        }
    }
}

/// Whether the holder of that name is known to be gone.
pub fn is_gone(name: &str) -> bool {
    Owner::parse(name).is_some_and(|owner| owner.is_gone())
}

fn boot() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_string())
}

/// `pid:[4026531836]`.
fn namespace() -> Option<u64> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

fn look(pid: u32) -> Option<Seen> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name in parentheses may hold anything, so what follows it is counted from its end: state is field 3, threads 20,
/// start 22.
fn parse_stat(text: &str) -> Option<Seen> {
    let rest = text.rsplit_once(')')?.1;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Seen {
        state: fields.first()?.chars().next()?,
        threads: fields.get(17)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn of(pid: u32) -> Owner {
        Owner { pid, started: look(pid).unwrap().started, ..Owner::me().unwrap() }
    }

    #[test]
    fn names_are_read_back_and_others_say_nothing() {
        let me = Owner::me().unwrap();
        assert_eq!(Owner::parse(&me.name("x")), Some(me.clone()));
        assert!(!me.is_gone());
        for other in ["", "driver", "process", "process.1", "process.a.b.c.d", "123xabc"] {
            assert!(!is_gone(other), "{other:?}");
        }
    }

    #[test]
    fn a_process_is_gone_when_it_was_killed_even_before_anybody_asks() {
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let owner = of(child.id());
        assert!(!owner.is_gone());
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        assert!(!owner.is_gone(), "one that stands still may go on");
        child.kill().unwrap();
        while look(owner.pid).is_some_and(|seen| seen.state != 'Z') {
            std::thread::yield_now();
        }
        assert!(owner.is_gone(), "nobody has waited for it yet");
        child.wait().unwrap();
        assert!(owner.is_gone());
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process() {
        let me = Owner::me().unwrap();
        assert!(Owner { started: me.started + 1, ..me.clone() }.is_gone());
        assert!(!Owner { boot: "elsewhere".into(), pid: u32::MAX, ..me.clone() }.is_gone());
        assert!(!Owner { namespace: 1, pid: u32::MAX, ..me }.is_gone());
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let text = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 3 0 12345 1 1";
        let seen = parse_stat(text).unwrap();
        assert_eq!((seen.state, seen.threads, seen.started), ('S', 3, 12345));
        assert!(parse_stat("").is_none());
    }
}
