//! From a specification to the engine's terms: pure, so that what hardens a container can be read and tested in one place.

use std::collections::{BTreeMap, HashMap};

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigLogConfig, Mount, MountType, MountVolumeOptions,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};
use forkyard_core::SandboxId;

use super::record::{Record, SOCKET_NAME};
use super::warm::WARM_LABEL;
use crate::{Achieved, ErrorKind, LimitMeans, Result, SandboxError, SandboxInfo, SandboxSpec};

pub const WORKSPACE: &str = "/workspace";
pub const HOME_DIR: &str = "/home/user";
pub const TMP_DIR: &str = "/tmp";
/// What a sandbox can write for good: a volume each, by its short name.
pub const VOLUMES: [(&str, &str); 3] = [(WORKSPACE, "workspace"), (HOME_DIR, "home"), (TMP_DIR, "tmp")];
/// Forkyard's own corner of a sandbox's tree.
pub const GUEST_PATH: &str = "/.forkyard/guest";
const RUN_PATH: &str = "/.forkyard/run";
/// The streams of the snapshot that a sandbox starts from.
pub const FROM_PATH: &str = "/.forkyard/from";
/// The volumes once more, side by side, where the guest measures them.
const VOLUMES_PATH: &str = "/.forkyard/volumes";

/// Whose sandboxes these are: several installs may share an engine.
pub const LABEL_OWNER: &str = "dev.forkyard.owner";
pub const LABEL_ID: &str = "dev.forkyard.sandbox";
/// Everything that a list shows, as JSON; no secrets.
pub const LABEL_INFO: &str = "dev.forkyard.info";
/// Who makes it: what is unfinished and whose maker is gone is nobody's.
pub const LABEL_MAKER: &str = "dev.forkyard.maker";
/// The caller's own labels, below this.
const LABEL_USER: &str = "dev.forkyard.label.";

/// Of each folder that is only there because programs expect to write to it; in memory and counted as such.
const SCRATCH: &str = "rw,noexec,nosuid,nodev,mode=1777";
const MAX_SCRATCH_BYTES: u64 = 64 << 20;
/// All of them together leave the guest and the commands most of the memory.
const SCRATCH_DIVISOR: u64 = 8;
/// What a container would show of the kernel and of the host's devices beyond its own. All of /sys: nothing needs it.
const MASKED: [&str; 11] = [
    "/sys",
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
];
/// Beside the commands: the guest's threads.
const GUEST_PROCESSES: u32 = 32;
/// Below it the kernel does not start a program.
const MIN_MEMORY_BYTES: u64 = 6 << 20;
const MIN_CPUS: f64 = 0.01;
/// What the guest itself may leave behind on its way down; commands write into pipes.
const LOG_BYTES: &str = "64k";

/// Files of the host that a sandbox sees, read-only.
pub struct Shared {
    pub guest: String,
    /// Host path, path inside.
    pub files: Vec<(String, String)>,
    pub run: String,
    pub from: Option<String>,
}

pub fn name(owner: &str, id: &SandboxId) -> String {
    format!("forkyard-{owner}-{id}")
}

/// A per-sandbox volume, by its short name.
pub fn volume(owner: &str, id: &SandboxId, short: &str) -> String {
    format!("forkyard-{owner}-{id}-{short}")
}

/// Limits that can't be, said before anything is made.
pub fn check(spec: &SandboxSpec) -> Result<()> {
    let invalid = |what: String, hint: &str| Err(SandboxError::new(ErrorKind::Invalid, what).hint(hint));
    let limits = &spec.limits;
    if limits.memory_bytes < MIN_MEMORY_BYTES || i64::try_from(limits.memory_bytes).is_err() {
        let what = format!("memory of {} bytes", limits.memory_bytes);
        return invalid(what, "Docker gives a container at least 6 MiB");
    }
    if !limits.cpus.is_finite() || limits.cpus < MIN_CPUS || limits.cpus > 4096.0 {
        return invalid(format!("{} CPUs", limits.cpus), "use a number from 0.01");
    }
    if limits.processes == 0 {
        return invalid("0 processes".into(), "a command is a process: at least 1");
    }
    if spec.lifetime.0.0 == 0 {
        return invalid(
            "a lifetime of 0".into(),
            "a sandbox ends by itself after its lifetime: at least 1 ms",
        );
    }
    for volume in &spec.volumes {
        for path in [&volume.host_path, &volume.path] {
            if !path.starts_with('/') || path.split('/').any(|part| part == "..") {
                return invalid(format!("volume path {path:?}"), "use absolute paths without ..");
            }
        }
        if volume.path.starts_with("/.forkyard") || volume.path == "/" {
            return invalid(format!("volume path {:?}", volume.path), "that place is taken");
        }
    }
    if spec.labels.contains_key(WARM_LABEL) {
        return invalid(format!("label {WARM_LABEL:?}"), "that one is Forkyard's own: use another");
    }
    if spec.strict && achieved(spec).disk != LimitMeans::Kernel {
        return Err(SandboxError::new(
            ErrorKind::Unsupported,
            "strict: Docker volumes have no disk limit of the kernel's",
        )
        .hint("leave --strict out, or use the local provider"));
    }
    if spec.disk_image {
        let message = "disk_image: Docker volumes are folders of the engine's own";
        return Err(SandboxError::new(ErrorKind::Unsupported, message)
            .hint("leave --disk-image out, or use the local provider"));
    }
    Ok(())
}

pub fn achieved(spec: &SandboxSpec) -> Achieved {
    Achieved {
        memory: LimitMeans::Kernel,
        cpu: LimitMeans::Kernel,
        disk: LimitMeans::Watchdog,
        processes: LimitMeans::Kernel,
        network: if spec.limits.network_bytes_per_s.is_some() {
            LimitMeans::Watchdog
        } else {
            LimitMeans::None
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

/// What the guest finds in its environment.
#[derive(serde::Serialize)]
struct GuestConfig<'a> {
    token: &'a str,
    lifetime_ms: u64,
    attempt: u32,
    env: &'a BTreeMap<String, String>,
    proxy_port: Option<u16>,
    disk: (&'a str, u64),
}

/// `env`: for commands, complete.
pub fn body(
    owner: &str,
    record: &Record,
    info: &SandboxInfo,
    image: &str,
    user: (u32, u32),
    env: &BTreeMap<String, String>,
    shared: &Shared,
) -> Result<ContainerCreateBody> {
    let spec = &record.spec;
    let config = GuestConfig {
        token: &record.token,
        lifetime_ms: spec.lifetime.0.0,
        attempt: record.attempt.0,
        env,
        proxy_port: Some(crate::PROXY_ADDRESS.port()),
        disk: (VOLUMES_PATH, spec.limits.disk_bytes),
    };
    let json = |value: serde_json::Result<String>| {
        value.map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("specification: {e}")))
    };
    let config = json(serde_json::to_string(&config))?;
    let mut labels = HashMap::from([
        (LABEL_OWNER.to_string(), owner.to_string()),
        (LABEL_ID.to_string(), record.id.to_string()),
        (LABEL_INFO.to_string(), json(serde_json::to_string(info))?),
        (LABEL_MAKER.to_string(), record.maker.clone()),
    ]);
    for (key, value) in &spec.labels {
        labels.insert(format!("{LABEL_USER}{key}"), value.clone());
    }
    let scratch = (spec.limits.memory_bytes / SCRATCH_DIVISOR).min(MAX_SCRATCH_BYTES);
    let host_config = HostConfig {
        // Loopback alone, in every mode: the proxy's listener inside is accepted from on the host.
        network_mode: Some("none".into()),
        readonly_rootfs: Some(true),
        cap_drop: Some(vec!["ALL".into()]),
        security_opt: Some(vec!["no-new-privileges:true".into()]),
        privileged: Some(false),
        ipc_mode: Some("private".into()),
        init: Some(false),
        pids_limit: Some(i64::from(spec.limits.processes) + i64::from(GUEST_PROCESSES)),
        memory: i64::try_from(spec.limits.memory_bytes).ok(),
        // Equal: no swap on top.
        memory_swap: i64::try_from(spec.limits.memory_bytes).ok(),
        nano_cpus: Some((spec.limits.cpus * 1e9) as i64),
        tmpfs: Some(
            ["/run", "/var/tmp"].map(|dir| (dir.to_string(), format!("{SCRATCH},size={scratch}"))).into(),
        ),
        shm_size: i64::try_from(scratch).ok(),
        masked_paths: Some(MASKED.map(String::from).to_vec()),
        // Open files stay at the engine's own limit: a higher one may be refused by the host.
        ulimits: Some(vec![ulimit("core", 0)]),
        mounts: Some(mounts(owner, record, shared)),
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".into()),
            config: Some(HashMap::from([
                ("max-size".to_string(), LOG_BYTES.to_string()),
                ("max-file".to_string(), "1".to_string()),
            ])),
        }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        ..Default::default()
    };
    Ok(ContainerCreateBody {
        image: Some(image.to_string()),
        user: Some(format!("{}:{}", user.0, user.1)),
        entrypoint: Some(vec![GUEST_PATH.into(), "serve".into(), format!("{RUN_PATH}/{SOCKET_NAME}")]),
        cmd: Some(Vec::new()),
        env: Some(vec![format!("FORKYARD_GUEST={config}")]),
        hostname: Some("sandbox".into()),
        working_dir: Some("/".into()),
        labels: Some(labels),
        network_disabled: Some(true),
        stop_signal: Some("SIGKILL".into()),
        // An image's own health check is a command of its own in our sandbox.
        healthcheck: Some(HealthConfig { test: Some(vec!["NONE".into()]), ..Default::default() }),
        host_config: Some(host_config),
        ..Default::default()
    })
}

fn ulimit(name: &str, value: i64) -> ResourcesUlimits {
    ResourcesUlimits { name: Some(name.into()), soft: Some(value), hard: Some(value) }
}

fn mounts(owner: &str, record: &Record, shared: &Shared) -> Vec<Mount> {
    let bind = |source: &str, target: &str, read_only: bool| Mount {
        typ: Some(MountType::BIND),
        source: Some(source.to_string()),
        target: Some(target.to_string()),
        read_only: Some(read_only),
        ..Default::default()
    };
    let labels = HashMap::from([
        (LABEL_OWNER.to_string(), owner.to_string()),
        (LABEL_ID.to_string(), record.id.to_string()),
    ]);
    // A fresh volume takes its owner from the folder that it covers; only one of the two places has the right one.
    let own = |short: &str, target: String, again: bool| Mount {
        typ: Some(MountType::VOLUME),
        source: Some(volume(owner, &record.id, short)),
        target: Some(target),
        volume_options: Some(MountVolumeOptions {
            labels: Some(labels.clone()),
            no_copy: Some(again),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut mounts = Vec::new();
    for (dir, short) in VOLUMES {
        mounts.push(own(short, dir.to_string(), false));
        mounts.push(own(short, format!("{VOLUMES_PATH}/{short}"), true));
    }
    mounts.push(bind(&shared.guest, GUEST_PATH, true));
    mounts.push(bind(&shared.run, RUN_PATH, false));
    mounts.extend(shared.from.iter().map(|from| bind(from, FROM_PATH, true)));
    mounts.extend(shared.files.iter().map(|(source, target)| bind(source, target, true)));
    mounts.extend(record.spec.volumes.iter().map(|v| bind(&v.host_path, &v.path, !v.writable)));
    mounts
}

/// Whose they must be.
pub fn owner_filter(owner: &str) -> HashMap<String, Vec<String>> {
    HashMap::from([("label".to_string(), vec![format!("{LABEL_OWNER}={owner}")])])
}

/// Where later ones win: the image's own, what every sandbox has, the proxy's, the user's.
pub fn environment(
    image: &[String],
    proxy: BTreeMap<String, String>,
    spec: &SandboxSpec,
) -> Result<BTreeMap<String, String>> {
    let mut env: BTreeMap<String, String> =
        [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("LANG", "C.UTF-8")]
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .into();
    env.extend(image.iter().filter_map(|e| e.split_once('=')).map(|(k, v)| (k.to_string(), v.to_string())));
    for (key, value) in [("HOME", HOME_DIR), ("USER", "user"), ("LOGNAME", "user"), ("SHELL", "/bin/sh")] {
        env.insert(key.to_string(), value.to_string());
    }
    env.extend(proxy);
    for (key, value) in &spec.env {
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            let what = format!("{key:?} can't be a variable");
            return Err(
                SandboxError::new(ErrorKind::Invalid, what).hint("no = in a name, no zero byte at all")
            );
        }
        env.insert(key.clone(), value.clone());
    }
    Ok(env)
}
