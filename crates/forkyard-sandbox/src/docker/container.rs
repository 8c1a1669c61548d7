//! From a specification to the engine's terms: pure, so that what hardens a container can be read and tested in one place.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, ContainerSummary, HealthConfig, HostConfig, HostConfigLogConfig, Mount,
    MountTmpfsOptions, MountType, MountVolumeOptions, ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};
use forkyard_core::SandboxId;
use forkyard_guest::container::MountedFolder;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fstat, openat2};

use super::image::Prepared;
use super::limits;
use super::record::{Record, SOCKET_NAME};
use super::warm::WARM_LABEL;
use crate::{ErrorKind, Result, SandboxError, SandboxInfo, SandboxSpec, Volume, bounds, volumes};

pub const WORKSPACE: &str = "/workspace";
pub const HOME_DIR: &str = "/home/user";
pub const TMP_DIR: &str = "/tmp";
/// What a sandbox can write for good: a volume each, by its short name.
pub const VOLUMES: [(&str, &str); 3] = [(WORKSPACE, "workspace"), (HOME_DIR, "home"), (TMP_DIR, "tmp")];
/// Forkyard's own part of a sandbox's tree, and what is in it.
const CORNER: &str = "/.forkyard";
pub const GUEST_PATH: &str = "/.forkyard/guest";
const RUN_PATH: &str = "/.forkyard/run";
/// Which folders of the host it was given, see [`folders`].
const FOLDERS_PATH: &str = "/.forkyard/folders";
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

/// Mounted by the engine itself.
const ENGINES_FILES: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
const SCRATCH_DIRS: [&str; 2] = ["/run", "/var/tmp"];
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
/// What the guest itself may leave behind on its way down; commands write into pipes.
const LOG_BYTES: &str = "64k";

/// Files of the host that a sandbox sees, read-only.
pub struct Shared {
    pub guest: String,
    /// Host path, path inside.
    pub files: Vec<(String, String)>,
    pub run: String,
    pub folders: Option<String>,
    pub from: Option<String>,
}

pub fn name(owner: &str, id: &SandboxId) -> String {
    format!("forkyard-{owner}-{id}")
}

/// Of one that is only made to put a layer on an image. No id has a dash.
pub fn preparing(owner: &str, unique: &str) -> String {
    format!("{}{unique}", preparing_prefix(owner))
}

fn preparing_prefix(owner: &str) -> String {
    format!("forkyard-{owner}-prepare-")
}

/// An image's labels are its containers' too, and its maker's word: what is ours has one of our names.
pub fn is_ours(owner: &str, container: &ContainerSummary) -> bool {
    let label = container.labels.as_ref().and_then(|labels| labels.get(LABEL_ID)).map_or("", String::as_str);
    let named = |name: &str| match SandboxId::new(label) {
        Ok(id) => name == self::name(owner, &id),
        Err(_) => label.is_empty() && name.starts_with(&preparing_prefix(owner)),
    };
    let names = container.names.iter().flatten();
    names.into_iter().any(|name| named(name.trim_start_matches('/')))
}

/// A per-sandbox volume, by its short name.
pub fn volume(owner: &str, id: &SandboxId, short: &str) -> String {
    format!("forkyard-{owner}-{id}-{short}")
}

/// What can't be, said before anything is made.
pub fn check(spec: &SandboxSpec) -> Result<()> {
    bounds::check(spec, MIN_MEMORY_BYTES)?;
    if spec.labels.contains_key(WARM_LABEL) {
        return Err(SandboxError::new(ErrorKind::Invalid, format!("label {WARM_LABEL:?}"))
            .hint("that one is Forkyard's own: use another"));
    }
    if spec.strict {
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

/// The volumes of a specification as they will be mounted. `files`: what every sandbox sees, by its path inside.
pub fn volumes(spec: &SandboxSpec, private: &[PathBuf], files: &[(String, String)]) -> Result<Vec<Volume>> {
    let checked = volumes::check(&spec.volumes, private)?;
    // Nothing in these either: it would be a part of snapshots, and be unpacked over.
    let whole = || {
        files
            .iter()
            .map(|(_, inside)| inside.as_str())
            .chain(ENGINES_FILES)
            .chain(VOLUMES.map(|(dir, _)| dir))
    };
    for volume in &checked {
        let path = Path::new(&volume.path);
        let covered = whole().chain(SCRATCH_DIRS).find(|own| Path::new(own).starts_with(path));
        if let Some(own) = covered.or_else(|| whole().find(|own| path.starts_with(own))) {
            let message =
                format!("volumes: nothing can be put on {}: {own} is the sandbox's own", volume.path);
            return Err(
                SandboxError::new(ErrorKind::Invalid, message).hint("use a path beside it, like /data")
            );
        }
    }
    Ok(checked)
}

/// Where something is mounted in every sandbox, beside the volumes of its own, whose folders are the prepared image's.
pub fn targets(files: &[(String, String)]) -> Vec<String> {
    let files = files.iter().map(|(_, inside)| inside.clone());
    corner()
        .into_iter()
        .chain(ENGINES_FILES.map(String::from))
        .chain(SCRATCH_DIRS.map(String::from))
        .chain(files)
        .collect()
}

fn corner() -> Vec<String> {
    let volumes = VOLUMES.map(|(_, short)| format!("{VOLUMES_PATH}/{short}"));
    [GUEST_PATH, RUN_PATH, FROM_PATH].map(String::from).into_iter().chain(volumes).collect()
}

/// The engine makes what it mounts something on, as root and wherever links of the image lead. In a folder of the host that would
/// stay: for an ordinary user for good, and with it what it lies in. So nothing of an image's leads into one, nor into anything
/// where commands could put a link in the place of a folder before the next start.
pub fn check_image(image: &Prepared, volumes: &[Volume], files: &[(String, String)]) -> Result<()> {
    let refused = |what: String, fix: &str| Err(SandboxError::new(ErrorKind::Invalid, what).hint(fix));
    let corner = corner();
    let of_host =
        || files.iter().map(|(_, inside)| inside.as_str()).chain(volumes.iter().map(|v| v.path.as_str()));
    for (path, leads) in &image.leads {
        if volumes.iter().any(|volume| volume.path == *path) || VOLUMES.iter().any(|(dir, _)| dir == path) {
            continue;
        }
        if corner.contains(path) && !image.volumes.contains(path) {
            if leads != path {
                let what = format!("the image has a link in the way of {path}, which leads to {leads}");
                return refused(what, "use another image");
            }
            continue;
        }
        let leads = Path::new(leads);
        let deep = |dir: &&str| leads.strip_prefix(dir).is_ok_and(|below| below.components().count() > 1);
        // Beside a file of the host's itself, which lies where it is meant to.
        let others = of_host().filter(|own| own != path);
        let in_host = others.chain([CORNER]).find(|own| leads.starts_with(own));
        if let Some(own) = in_host.or(VOLUMES.map(|(dir, _)| dir).into_iter().find(deep)) {
            let what = format!("in this image {path} would lie in {own}, which is not the image's");
            let fix = match volumes.iter().any(|volume| volume.path == own) {
                true => "put that volume elsewhere, like /data",
                false => "use another image, or one without that volume",
            };
            return refused(what, fix);
        }
    }
    Ok(())
}

/// Ids are the same inside and outside of a container, so that whose a folder is decides who can write to it.
pub fn check_writable(volumes: &[Volume], (uid, gid): (u32, u32)) -> Result<()> {
    for volume in volumes.iter().filter(|volume| volume.writable) {
        let path = &volume.host_path;
        let meta = std::fs::metadata(path)
            .map_err(|e| SandboxError::new(ErrorKind::NotFound, format!("volumes: {path}: {e}")))?;
        let bits = match (meta.uid() == uid, meta.gid() == gid) {
            (true, _) => meta.mode() >> 6,
            (false, true) => meta.mode() >> 3,
            (false, false) => meta.mode(),
        };
        if bits & 0o3 != 0o3 {
            let message = format!(
                "volumes: {path} belongs to user {}, and a container's commands are user {uid}: they could not write there",
                meta.uid()
            );
            return Err(SandboxError::new(ErrorKind::Unsupported, message).hint(format!(
                "give it to them (chown {uid}:{gid} {path}), leave :rw out, or use the local provider, which shows it as theirs"
            )));
        }
    }
    Ok(())
}

/// What the guest finds in its environment.
#[derive(serde::Serialize)]
struct GuestConfig<'a> {
    token: &'a str,
    lifetime_ms: u64,
    /// None: it has one only from when it is a sandbox.
    deadline: Option<u64>,
    attempt: u32,
    env: &'a BTreeMap<String, String>,
    proxy_port: Option<u16>,
    disk: (&'a str, u64),
    shared: bool,
    memory_bytes: Option<u64>,
    cpus: Option<f64>,
    folders: Option<&'a str>,
}

/// The folders of the host that were checked, by where they will be mounted. The engine follows links when it mounts them, later,
/// and a sandbox that may write around one could have put one there: the guest looks whether it got the same. Of one start: a
/// device has another number after the next mount, and the user may put another folder in the place of one.
pub fn folders(volumes: &[Volume]) -> Result<Vec<MountedFolder>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let one = |volume: &Volume| {
        let path = &volume.host_path;
        openat2(CWD, path.as_str(), flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            .and_then(fstat)
            .map(|seen| MountedFolder { path: volume.path.clone(), device: seen.st_dev, inode: seen.st_ino })
            .map_err(|e| {
                let message = format!("volumes: {path} is no longer the folder that it was: {e}");
                SandboxError::new(ErrorKind::Denied, message).hint("put the folder back in its place")
            })
    };
    volumes.iter().map(one).collect()
}

/// `env`: for commands, complete.
pub fn body(
    owner: &str,
    record: &Record,
    info: &SandboxInfo,
    image: &Prepared,
    user: (u32, u32),
    env: &BTreeMap<String, String>,
    shared: &Shared,
) -> Result<ContainerCreateBody> {
    let spec = &record.spec;
    let (by_engine, by_guest) = limits::keepers(record);
    let config = GuestConfig {
        token: &record.token,
        lifetime_ms: spec.lifetime.0.0,
        deadline: (!spec.labels.contains_key(WARM_LABEL)).then_some(record.deadline.0),
        attempt: record.attempt.0,
        env,
        proxy_port: Some(crate::PROXY_ADDRESS.port()),
        disk: (VOLUMES_PATH, spec.limits.disk_bytes),
        shared: true,
        memory_bytes: by_guest.memory_bytes,
        cpus: by_guest.cpus,
        folders: shared.folders.as_ref().map(|_| FOLDERS_PATH),
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
        memory: by_engine.memory_bytes,
        // Equal: no swap on top.
        memory_swap: by_engine.memory_bytes,
        nano_cpus: by_engine.nano_cpus,
        tmpfs: Some(SCRATCH_DIRS.map(|dir| (dir.to_string(), format!("{SCRATCH},size={scratch}"))).into()),
        shm_size: i64::try_from(scratch).ok(),
        masked_paths: Some(MASKED.map(String::from).to_vec()),
        // Open files stay at the engine's own limit: a higher one may be refused by the host.
        ulimits: Some(vec![ulimit("core", 0)]),
        mounts: Some(mounts(owner, record, image, shared, scratch)),
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
        image: Some(image.id.clone()),
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

fn mounts(owner: &str, record: &Record, image: &Prepared, shared: &Shared, scratch: u64) -> Vec<Mount> {
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
    mounts.extend(shared.folders.iter().map(|folders| bind(folders, FOLDERS_PATH, true)));
    mounts.extend(shared.from.iter().map(|from| bind(from, FROM_PATH, true)));
    mounts.extend(shared.files.iter().map(|(source, target)| bind(source, target, true)));
    mounts.extend(record.spec.volumes.iter().map(|v| bind(&v.host_path, &v.path, !v.writable)));
    // What an image calls a volume would be a folder of the engine's disk that nobody measures.
    let covered: BTreeSet<_> = mounts.iter().filter_map(|mount| mount.target.clone()).collect();
    let free =
        image.volumes.iter().filter(|dir| !covered.contains(*dir) && !SCRATCH_DIRS.contains(&dir.as_str()));
    mounts.extend(free.map(|dir| Mount {
        typ: Some(MountType::TMPFS),
        target: Some(dir.clone()),
        tmpfs_options: Some(MountTmpfsOptions {
            size_bytes: i64::try_from(scratch).ok(),
            mode: Some(0o1777),
            ..Default::default()
        }),
        ..Default::default()
    }));
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
) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> =
        [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("LANG", "C.UTF-8")]
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .into();
    env.extend(image.iter().filter_map(|e| e.split_once('=')).map(|(k, v)| (k.to_string(), v.to_string())));
    for (key, value) in [("HOME", HOME_DIR), ("USER", "user"), ("LOGNAME", "user"), ("SHELL", "/bin/sh")] {
        env.insert(key.to_string(), value.to_string());
    }
    env.extend(proxy);
    env.extend(spec.env.clone());
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_sandbox_has_itself_is_not_covered() {
        let dir = tempfile::tempdir().unwrap();
        let files = [("/host/file".to_string(), "/etc/ssl/certs/ca.crt".to_string())];
        let at = |path: &str| {
            let host_path = dir.path().display().to_string();
            let volume = Volume { host_path, path: path.into(), writable: false };
            volumes(&SandboxSpec { volumes: vec![volume], ..SandboxSpec::default() }, &[], &files)
        };
        for taken in [
            "/workspace",
            "/home",
            "/home/user",
            "/tmp",
            "/run",
            "/var",
            "/etc",
            "/etc/ssl",
            "/etc/hosts/x",
            "/workspace/data",
        ] {
            let refused = at(taken).unwrap_err();
            assert_eq!((refused.kind, refused.hint.is_some()), (ErrorKind::Invalid, true), "{taken}");
        }
        for free in ["/data", "/home/other", "/run/x", "/etc/x", "/usr/share/x"] {
            assert_eq!(at(free).unwrap()[0].path, free);
        }
    }

    #[test]
    fn nothing_of_an_image_leads_into_a_folder_of_the_host() {
        let volume = |path: &str| Volume { host_path: "/host".into(), path: path.into(), writable: true };
        let files = [("/host/file".to_string(), "/etc/ssl/ca.crt".to_string())];
        let of = |volumes: &[&str], path: &str, leads: &str| Prepared {
            id: "image".into(),
            env: Vec::new(),
            volumes: volumes.iter().map(|path| path.to_string()).collect(),
            leads: [(path.to_string(), leads.to_string())].into(),
        };
        let mounted = [volume("/data"), volume("/srv/x")];
        let taken = [
            "/.forkyard",
            "/.forkyard/run",
            "/.forkyard/run/a/b",
            "/data/x",
            "/srv/x/y/z",
            "/etc/ssl/ca.crt/x",
            "/tmp/a/b",
        ];
        for leads in taken {
            for image in
                [of(&[leads], leads, leads), of(&["/l/x"], "/l/x", leads), of(&[], "/etc/hosts", leads)]
            {
                let refused = check_image(&image, &mounted, &files).unwrap_err();
                assert!(refused.kind == ErrorKind::Invalid && refused.hint.is_some(), "{refused}");
            }
        }
        // One folder of the host where another one is shown already.
        assert!(check_image(&of(&["/l"], "/l", "/data"), &mounted, &files).is_err());
        assert!(check_image(&of(&[], RUN_PATH, "/x/run"), &[], &files).is_err());
        for path in ["/data", "/srv", "/srv/y", "/.forkyarded", "/workspace", "/workspace/own", "/run/a/b"] {
            check_image(&of(&[path], path, path), &mounted, &files).unwrap();
        }
        check_image(&of(&["/data/x"], "/data/x", "/data/x"), &[], &files).unwrap();
        for path in targets(&files) {
            check_image(&of(&[], &path, &path), &mounted, &files).unwrap();
        }
        check_image(&of(&[], "/etc/ssl/ca.crt", "/etc/pki/ca.crt"), &mounted, &files).unwrap();
    }

    #[test]
    fn a_folder_is_writable_for_whom_it_belongs_to() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let meta = dir.path().metadata().unwrap();
        let (uid, gid) = (meta.uid(), meta.gid());
        let can = |mode: u32, user| {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            let host_path = dir.path().display().to_string();
            let one = |writable| [Volume { host_path: host_path.clone(), path: "/x".into(), writable }];
            assert!(check_writable(&one(false), user).is_ok());
            check_writable(&one(true), user).map_err(|e| (e.kind, e.hint.is_some()))
        };
        let no = Err((ErrorKind::Unsupported, true));
        assert_eq!(can(0o700, (uid, gid + 1)), Ok(()));
        assert_eq!(can(0o570, (uid, gid)), no);
        assert_eq!(can(0o570, (uid + 1, gid)), Ok(()));
        assert_eq!(can(0o755, (uid + 1, gid)), no);
        assert_eq!(can(0o1777, (uid + 1, gid + 1)), Ok(()));
        assert_eq!(can(0o776, (uid + 1, gid + 1)), no);
    }
}
