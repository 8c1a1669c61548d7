//! Who keeps a sandbox's limits. An engine takes limits that it can't keep, says so in a warning at most, and keeps none: one
//! without rights to the machine's control groups, or on a kernel without them. What it can't keep is the guest's, or refused.

use bollard::models::SystemInfo;
use forkyard_guest::zygote::Watch;

use super::record::Record;
use crate::{Achieved, ErrorKind, LimitMeans, Result, SandboxError, SandboxSpec};

const DELEGATE: &str = "give the engine the machine's control groups (rootless: cgroup v2, and systemd's Delegate= with cpu, memory and pids), or use the local provider";

/// Which limits an engine can keep, by its own word. Of what it says nothing it keeps nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    memory: bool,
    cpu: bool,
    processes: bool,
}

impl Kept {
    pub fn by(engine: &SystemInfo) -> Kept {
        let says = |word: Option<bool>| word == Some(true);
        Kept {
            memory: says(engine.memory_limit),
            cpu: says(engine.cpu_cfs_period) && says(engine.cpu_cfs_quota),
            processes: says(engine.pids_limit),
        }
    }

    /// The guest can't count for the kernel: a crowd is there before it looks.
    pub fn check(self) -> Result<()> {
        if self.processes {
            return Ok(());
        }
        let message = "the Docker engine can't limit how many processes a container has";
        Err(SandboxError::new(ErrorKind::Unsupported, message).hint(DELEGATE))
    }

    pub fn achieved(self, spec: &SandboxSpec) -> Achieved {
        let means = |kernel| if kernel { LimitMeans::Kernel } else { LimitMeans::Watchdog };
        Achieved {
            memory: means(self.memory),
            cpu: means(self.cpu),
            disk: LimitMeans::Watchdog,
            processes: LimitMeans::Kernel,
            network: match spec.limits.network_bytes_per_s {
                Some(_) => LimitMeans::Watchdog,
                None => LimitMeans::None,
            },
            layers: [
                "namespaces",
                "read_only_root",
                "no_capabilities",
                "no_new_privileges",
                "seccomp",
                "network_none",
            ]
            .map(String::from)
            .to_vec(),
        }
    }
}

/// In the engine's terms.
#[derive(Debug, PartialEq)]
pub struct Engines {
    pub memory_bytes: Option<i64>,
    pub nano_cpus: Option<i64>,
}

/// Each limit has one who keeps it, as the record says.
pub fn keepers(record: &Record) -> (Engines, Watch) {
    let (limits, achieved) = (&record.spec.limits, &record.achieved);
    let (memory, cpu) = (achieved.memory == LimitMeans::Kernel, achieved.cpu == LimitMeans::Kernel);
    let engines = Engines {
        memory_bytes: i64::try_from(limits.memory_bytes).ok().filter(|_| memory),
        nano_cpus: cpu.then_some((limits.cpus * 1e9) as i64),
    };
    let watch = Watch {
        memory_bytes: (!memory).then_some(limits.memory_bytes),
        cpus: (!cpu).then_some(limits.cpus),
        disk_bytes: Some(limits.disk_bytes),
    };
    (engines, watch)
}

/// Of what an engine says about a container that it has made: a limit that it will not keep, though it said that it can.
pub fn check_warnings(warnings: &[String]) -> Result<()> {
    match warnings.iter().find(|warning| warning.to_ascii_lowercase().contains("discarded")) {
        Some(warning) => {
            let message = format!("the Docker engine says: {warning}");
            Err(SandboxError::new(ErrorKind::Unsupported, message).hint(DELEGATE))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_keeps_what_it_says_it_can() {
        let all = SystemInfo {
            memory_limit: Some(true),
            cpu_cfs_period: Some(true),
            cpu_cfs_quota: Some(true),
            pids_limit: Some(true),
            ..Default::default()
        };
        let kept = Kept::by(&all);
        assert_eq!(kept, Kept { memory: true, cpu: true, processes: true });
        assert!(kept.check().is_ok());
        let kept = Kept::by(&SystemInfo { cpu_cfs_quota: Some(false), memory_limit: None, ..all });
        let achieved = kept.achieved(&SandboxSpec::default());
        let means = (achieved.memory, achieved.cpu, achieved.processes);
        assert_eq!(means, (LimitMeans::Watchdog, LimitMeans::Watchdog, LimitMeans::Kernel));
        let refused = Kept::by(&SystemInfo::default()).check().unwrap_err();
        assert!(refused.kind == ErrorKind::Unsupported && refused.hint.is_some(), "{refused}");
    }

    #[test]
    fn a_limit_that_was_dropped_is_no_limit() {
        let said = |warning: &str| check_warnings(&[warning.to_string()]).is_ok();
        assert!(check_warnings(&[]).is_ok());
        assert!(said("Your kernel does not support swap limit capabilities. Memory limited without swap."));
        assert!(!said("Your kernel does not support PIDs limit capabilities. PIDs limit discarded."));
    }
}
