//! What this machine gives, what is missing, and how to get it.

use serde::Serialize;

use super::zygote::GUEST;
use super::{LocalProvider, kernel};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Ok,
    /// Works, by weaker means.
    Weak,
    /// Sandboxes can't be made.
    Missing,
}

#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub what: String,
    pub level: Level,
    pub detail: String,
    pub fix: Option<String>,
}

/// Looks at the machine by trying it: the helper is started as it is for a sandbox.
pub async fn doctor(provider: &LocalProvider) -> Vec<Finding> {
    let inner = &provider.inner;
    let finding = |what: &str, level, detail: String, fix: Option<&str>| Finding {
        what: what.into(),
        level,
        detail,
        fix: fix.map(String::from),
    };
    let mut found = Vec::new();
    let release = kernel::release();
    found.push(match kernel::check(&release) {
        Ok(()) => finding("kernel", Level::Ok, release, None),
        Err(e) => finding("kernel", Level::Missing, e.message.clone(), e.hint.as_deref()),
    });
    found.push(match inner.zygote().await {
        Ok(_) => finding(
            "isolation",
            Level::Ok,
            "user, mount, pid, ipc, uts, net and cgroup namespaces, seccomp".into(),
            None,
        ),
        Err(e) => finding("isolation", Level::Missing, e.message.clone(), e.hint.as_deref()),
    });
    let landlock =
        std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default().contains("landlock");
    found.push(finding(
        "landlock",
        if landlock { Level::Ok } else { Level::Weak },
        if landlock { "present" } else { "not seen; it is used where the kernel has it" }.into(),
        (!landlock).then_some("boot with lsm=landlock,… for one more layer"),
    ));
    let can = inner.cgroups.can();
    let delegate =
        "run as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes forkyard …";
    // systemd before 252 keeps the processor for itself.
    let more =
        "delegate it too: Delegate=cpu memory pids in /etc/systemd/system/user@.service.d/delegate.conf";
    let cpu_fix = if can.memory { more } else { delegate };
    for (what, kernel, delegate) in [("memory limit", can.memory, delegate), ("cpu limit", can.cpu, cpu_fix)]
    {
        let detail = if kernel { format!("cgroup {}", inner.cgroups.version()) } else { "watchdog".into() };
        let level = if kernel { Level::Ok } else { Level::Weak };
        found.push(finding(what, level, detail, (!kernel).then_some(delegate)));
    }
    let processes = if can.processes { "cgroup and rlimit" } else { "rlimit of the user namespace" };
    found.push(finding("process limit", Level::Ok, processes.into(), None));
    let (level, pause) = match inner.cgroups.version() {
        "v2" => (Level::Ok, "cgroup freezer"),
        _ => (Level::Weak, "signals, which a process can see"),
    };
    found.push(finding(
        "pause",
        level,
        pause.into(),
        (level == Level::Weak).then_some("use cgroup v2, as root or delegated"),
    ));
    found.push(match super::disk::check() {
        Ok(()) => {
            let detail = "watchdog; with --strict a disk of its own, whose limit the kernel keeps";
            finding("disk limit", Level::Ok, detail.into(), None)
        }
        Err((why, fix)) => finding("disk limit", Level::Weak, format!("watchdog: {why}"), Some(fix)),
    });
    let shown: Vec<String> =
        provider.shown().iter().map(|s| format!("{} ({})", s.path.display(), s.why)).collect();
    found.push(finding("host trees, read-only", Level::Ok, shown.join(", "), None));
    found.push(finding("guest", Level::Ok, format!("{} KiB, embedded", GUEST.len() / 1024), None));
    found
}
