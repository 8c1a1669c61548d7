//! What this machine gives, what is missing, and how to get it.

use std::path::Path;
use std::time::Duration;

use forkyard_core::{Attempt, Millis, SandboxId};
use serde::Serialize;

use super::state::{self, Meta};
use super::zygote::{GUEST, unavailable};
use super::{LocalProvider, kernel};
use crate::{
    ExecRequest, Lifetime, LimitMeans, NetworkMode, Provider, Result, Sandbox, SandboxError, SandboxSpec,
};

/// The sandbox that is made to see what it is like ends by itself after this, whatever becomes of its maker.
const LIFETIME: Lifetime = Lifetime(Millis(60_000));
/// What is asked of it takes milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// How the kernel keeps the disk limit where it has no quotas.
const OWN_DISK: &str = "with --strict or --disk-image a disk of its own, whose limit the kernel keeps";
/// Less than any machine has, or there would be nothing to keep; enough not to be waited for.
const CPUS: f64 = 0.9;
/// The namespaces of a sandbox, by the kernel's names and for people.
const NAMESPACES: [(&str, &str); 7] = [
    ("user", "user"),
    ("mnt", "mount"),
    ("pid", "pid"),
    ("ipc", "ipc"),
    ("uts", "uts"),
    ("net", "net"),
    ("cgroup", "cgroup"),
];

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

fn finding(what: &str, level: Level, detail: impl Into<String>, fix: Option<&str>) -> Finding {
    Finding { what: what.into(), level, detail: detail.into(), fix: fix.map(String::from) }
}

fn missing(what: &str, e: &SandboxError) -> Finding {
    finding(what, Level::Missing, &e.message, e.hint.as_deref().or(Some("use --provider docker")))
}

/// What a sandbox was seen to be.
struct Seen {
    meta: Meta,
    /// Those that are not the host's.
    namespaces: Vec<&'static str>,
    seccomp: bool,
    no_capabilities: bool,
    frozen: bool,
}

/// Looks at the machine by trying it: one sandbox is made, looked at from inside, and removed.
pub async fn doctor(provider: &LocalProvider) -> Vec<Finding> {
    let inner = &provider.inner;
    let mut found = Vec::new();
    let release = kernel::release();
    found.push(match kernel::check(&release) {
        Ok(()) => finding("kernel", Level::Ok, release, None),
        Err(e) => missing("kernel", &e),
    });
    let seen = match tried(provider).await {
        Ok(seen) => {
            found.push(isolation(&seen));
            let landlock = seen.meta.achieved.layers.iter().any(|layer| layer == "landlock");
            found.push(match landlock {
                true => finding("landlock", Level::Ok, "in force", None),
                false => finding(
                    "landlock",
                    Level::Weak,
                    "the kernel does not offer it",
                    Some("boot with lsm=landlock,… for one more layer"),
                ),
            });
            Some(seen)
        }
        Err(e) => {
            found.push(missing("isolation", &e));
            None
        }
    };
    let kept = |means: fn(&Meta) -> LimitMeans, can| {
        seen.as_ref().map_or(can, |seen| means(&seen.meta) == LimitMeans::Kernel)
    };
    let can = inner.cgroups.can();
    let memory = kept(|meta| meta.achieved.memory, can.memory);
    let cpu = kept(|meta| meta.achieved.cpu, can.cpu);
    let delegate =
        "run as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes forkyard …";
    // systemd before 252 keeps the processor for itself.
    let more =
        "delegate it too: Delegate=cpu memory pids in /etc/systemd/system/user@.service.d/delegate.conf";
    let cpu_fix = if memory { more } else { delegate };
    for (what, kernel, fix) in [("memory limit", memory, delegate), ("cpu limit", cpu, cpu_fix)] {
        found.push(match kernel {
            true => finding(what, Level::Ok, format!("cgroup {}", inner.cgroups.version()), None),
            false => finding(what, Level::Weak, "watchdog", Some(fix)),
        });
    }
    let processes = if can.processes { "cgroup and rlimit" } else { "rlimit of the user namespace" };
    found.push(finding("process limit", Level::Ok, processes, None));
    found.extend(seen.as_ref().map(|seen| match seen.frozen {
        true => finding("pause", Level::Ok, "cgroup freezer", None),
        false => finding(
            "pause",
            Level::Weak,
            "signals, which a process can see",
            Some("use cgroup v2, as root or delegated"),
        ),
    }));
    let by_quota = seen.as_ref().is_none_or(|seen| seen.meta.achieved.disk == LimitMeans::Kernel);
    found.push(match (inner.quotas(), super::disk::check()) {
        (Ok(_), _) if by_quota => finding("disk limit", Level::Ok, "project quota", None),
        (Ok(_), Ok(())) => finding("disk limit", Level::Weak, "watchdog", Some(OWN_DISK)),
        (Err(missing), Ok(())) => {
            let detail = format!("watchdog: {}; {OWN_DISK}", missing.why);
            finding("disk limit", Level::Weak, detail, Some(missing.fix))
        }
        (_, Err((why, fix))) => finding("disk limit", Level::Weak, format!("watchdog: {why}"), Some(fix)),
    });
    found.push(finding(
        "network rate",
        Level::Weak,
        "the proxy, where a rate is asked for",
        Some("no machine's kernel keeps it: leave the rate out where --strict is wanted"),
    ));
    let shown: Vec<String> =
        provider.shown().iter().map(|s| format!("{} ({})", s.path.display(), s.why)).collect();
    found.push(finding("host trees, read-only", Level::Ok, shown.join(", "), None));
    found.push(finding("guest", Level::Ok, format!("{} KiB, embedded", GUEST.len() / 1024), None));
    found
}

fn isolation(seen: &Seen) -> Finding {
    let shared: Vec<&str> =
        NAMESPACES.iter().map(|(_, name)| *name).filter(|name| !seen.namespaces.contains(name)).collect();
    let mut lacks = Vec::new();
    if !shared.is_empty() {
        lacks.push(format!("the host's own {} namespace", shared.join(", ")));
    }
    if !seen.seccomp {
        lacks.push("no seccomp".into());
    }
    if !seen.no_capabilities {
        lacks.push("capabilities".into());
    }
    if lacks.is_empty() {
        let detail = format!("{} namespaces, overlay, no capabilities, seccomp", seen.namespaces.join(", "));
        return finding("isolation", Level::Ok, detail, None);
    }
    let detail = format!("a command in a sandbox has {}", lacks.join(" and "));
    finding(
        "isolation",
        Level::Missing,
        detail,
        Some("use --provider docker, and report this with `uname -a`"),
    )
}

/// Makes a sandbox, looks, and leaves nothing of it.
async fn tried(provider: &LocalProvider) -> Result<Seen> {
    let mut spec = SandboxSpec { lifetime: LIFETIME, ..SandboxSpec::default() };
    spec.network.mode = NetworkMode::None;
    spec.limits.cpus = CPUS;
    let id = SandboxId::new(format!("doctor{:016x}", state::unique())).map_err(unavailable)?;
    let seen = async {
        let sandbox = provider.inner.create(&id, Attempt(1), &spec).await.map_err(|e| e.of_create(&spec))?;
        look(&*sandbox, provider.inner.meta(&id)?).await
    };
    let late = |_| unavailable("a sandbox was made, but does not answer");
    let seen = tokio::time::timeout(ANSWER_WITHIN, seen).await.map_err(late).flatten();
    let gone = provider.destroy(&id).await;
    provider.settle().await;
    let seen = seen?;
    gone?;
    Ok(seen)
}

async fn look(sandbox: &dyn Sandbox, meta: Meta) -> Result<Seen> {
    let names: Vec<&str> = NAMESPACES.iter().map(|(name, _)| *name).collect();
    let script = format!(
        "cat /proc/self/status; cd /proc/self/ns; for n in {}; do echo \"ns $n $(readlink $n)\"; done",
        names.join(" ")
    );
    let (result, out, err) = sandbox.exec(ExecRequest::shell(script)).await?.output().await?;
    if result.exit_code != 0 {
        let said: String = String::from_utf8_lossy(&err).chars().take(200).collect();
        return Err(unavailable(format!("a command in a sandbox ended with {}: {said}", result.exit_code)));
    }
    let out = String::from_utf8_lossy(&out).into_owned();
    let field = |name: &str| {
        out.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_string())
    };
    let is_own = |name: &str| {
        let here = std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
        let inside = field(&format!("ns {name} ")).filter(|inside| inside.starts_with(name));
        inside.is_some_and(|inside| here.is_some_and(|here| here != Path::new(&inside)))
    };
    let namespaces = NAMESPACES.iter().filter(|(name, _)| is_own(name)).map(|(_, name)| *name).collect();
    sandbox.pause().await?;
    let frozen = meta.cgroups.iter().any(|dir| is_frozen(dir));
    sandbox.resume().await?;
    Ok(Seen {
        namespaces,
        seccomp: field("Seccomp:").as_deref() == Some("2"),
        no_capabilities: field("CapEff:").is_some_and(|set| set.bytes().all(|digit| digit == b'0')),
        frozen,
        meta,
    })
}

/// Whether the kernel holds a group below this one still.
fn is_frozen(dir: &Path) -> bool {
    let below = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    below
        .filter_map(|dir| std::fs::read_to_string(dir.join("cgroup.events")).ok())
        .any(|events| events.lines().any(|line| line == "frozen 1"))
}
