//! What the host remembers of a Docker sandbox, so that another process can attach to it: one folder each.
//!
//! The engine is the truth about what exists; these files hold what must not stand in a label (the guest's token).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::SystemTime;

use forkyard_core::{Attempt, SandboxId, SnapshotId, Timestamp};
use forkyard_guest::container::MountedFolder;
use serde::{Deserialize, Serialize};

use crate::error::FULL_HINT;
use crate::local::GUEST;
use crate::lock::Lock;
use crate::{Achieved, ErrorKind, InsideFile, Result, SandboxError, SandboxSpec, SnapshotInfo, birth};

/// The guest's socket, inside the sandbox's run folder.
pub const SOCKET_NAME: &str = "guest.sock";
const RECORD_NAME: &str = "sandbox.json";
const RUN_NAME: &str = "run";
/// Which folders of the host the sandbox was given at its last start.
const FOLDERS_NAME: &str = "folders.json";
/// What folders in the making are called, before their maker. The dot keeps them out of lists: ids have none.
const STAGING: &str = ".new-";
/// Where folders come into sight as a whole, or not at all.
const STAGED: [&str; 2] = ["sandboxes", "snapshots"];
/// Containers that wait for their sandbox, and those that somebody is taking: see [`Ready`].
const FREE: &str = "ready";
const TAKEN: &str = "taken";
/// Present while a sandbox is stopped on purpose; without it, one that does not run is dead.
const STOPPED_NAME: &str = "stopped";

#[derive(Clone, Serialize, Deserialize)]
pub struct Record {
    pub id: SandboxId,
    /// The newest that was connected from this host.
    pub attempt: Attempt,
    pub spec: SandboxSpec,
    /// Who shows it to the guest is an owner.
    pub token: String,
    /// As the user named it; a snapshot's children start from it again.
    pub image: String,
    pub achieved: Achieved,
    pub created_at: Timestamp,
    pub deadline: Timestamp,
    /// Its processes are stopped by the guest.
    #[serde(default)]
    pub paused: bool,
    /// Who makes it, see [`maker`].
    #[serde(default)]
    pub maker: String,
    /// What commands find in their environment, where the container was made before anybody knew for whom.
    #[serde(default)]
    pub adopted: Option<BTreeMap<String, String>>,
}

/// In a name: nobody could see when it was born. Nothing but the first process of the machine is as old as that.
const UNSEEN: u64 = 0;

/// This process, by a name that no other one gets before the machine starts again: its number, when it was born, and the
/// namespace in which that number counts.
pub fn maker() -> String {
    let id = std::process::id();
    format!("{id}.{}.{}", birth(id).ok().flatten().unwrap_or(UNSEEN), namespace())
}

/// Whether the process of that name is at work. A name that says nothing here counts as one that is, and so does one that
/// nobody can look at just now: only who is gone loses what it had.
pub fn is_at_work(maker: &str) -> bool {
    let parts: Vec<u64> = maker.split('.').filter_map(|part| part.parse().ok()).collect();
    match parts[..] {
        [id, then, space] if space == namespace() => match u32::try_from(id).map(birth) {
            Ok(Ok(seen)) => seen.is_some_and(|seen| then == UNSEEN || then == seen),
            Ok(Err(_)) | Err(_) => true,
        },
        _ => true,
    }
}

fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
}

/// A snapshot: the image's name, and two archives beside this.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRecord {
    pub info: SnapshotInfo,
    pub image: String,
}

/// An image that we made of another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MadeImage {
    /// Which of the engine's it is: a tag can be moved by whoever loads an archive.
    pub id: String,
    /// Where it has something mounted, and where each of these paths leads in it.
    pub leads: BTreeMap<String, String>,
}

/// A container that was started before anybody knew for whom. The name of an empty file says all of it, and that file is moved
/// by one rename: of two who want it, one gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// Which sandboxes it can become.
    pub kind: String,
    /// Who keeps it ready, or is taking it.
    pub maker: String,
    pub id: SandboxId,
}

impl Ready {
    fn name(&self) -> String {
        format!("{}-{}-{}", self.kind, self.maker, self.id)
    }

    fn parse(name: &str) -> Option<Ready> {
        let (kind, rest) = name.split_once('-')?;
        let (maker, id) = rest.split_once('-')?;
        Some(Ready { kind: kind.into(), maker: maker.into(), id: SandboxId::new(id).ok()? })
    }
}

/// The provider's folder.
#[derive(Clone)]
pub struct Home(PathBuf);

fn failed(what: &Path) -> impl FnOnce(io::Error) -> SandboxError {
    move |e| {
        let kind = match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::TooLarge,
            _ => ErrorKind::Unavailable,
        };
        let error = SandboxError::new(kind, format!("{}: {e}", what.display()));
        if kind == ErrorKind::TooLarge { error.hint(FULL_HINT) } else { error }
    }
}

impl Home {
    pub fn open(root: &Path) -> Result<Home> {
        for name in ["", "sandboxes", "snapshots", "shared", "images", FREE, TAKEN] {
            let dir = root.join(name);
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed(&dir))?;
        }
        let root = fs::canonicalize(root).map_err(failed(root))?;
        Ok(Home(root))
    }

    pub fn root(&self) -> &Path {
        &self.0
    }

    /// Held by whoever makes the sandbox, or finds that it is made: one process and one task at a time.
    pub async fn lock(&self, id: &SandboxId) -> Result<Lock> {
        Lock::take(&self.0.join("lock"), id.as_str()).await
    }

    fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.0.join("sandboxes").join(id.as_str())
    }

    /// The id that the container, its volumes and its folder are named by: the sandbox's own, unless the container was there
    /// before it. Then its folder is a link to the container's.
    pub fn made_as(&self, id: &SandboxId) -> SandboxId {
        let target = fs::read_link(self.sandbox(id)).ok();
        let name = target.as_deref().and_then(Path::to_str).and_then(|name| SandboxId::new(name).ok());
        name.unwrap_or_else(|| id.clone())
    }

    /// Whether anything of it is here, whole or not.
    pub fn knows(&self, id: &SandboxId) -> bool {
        fs::symlink_metadata(self.sandbox(id)).is_ok()
    }

    /// From now on the sandbox is that container.
    pub fn link(&self, id: &SandboxId, made_as: &SandboxId) -> Result<()> {
        let link = self.sandbox(id);
        std::os::unix::fs::symlink(made_as.as_str(), &link).map_err(failed(&link))
    }

    /// Mounted into the sandbox, for the guest's socket.
    pub fn run(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join(RUN_NAME)
    }

    /// Mounted into a sandbox that starts from a snapshot: its streams, until they are unpacked.
    pub fn from(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("from")
    }

    pub fn make_from(&self, id: &SandboxId) -> Result<PathBuf> {
        let dir = self.from(id);
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir).map_err(failed(&dir))?;
        // The umask may have taken bits that the sandbox needs.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).map_err(failed(&dir))?;
        Ok(dir)
    }

    /// For the guest, which can only read it. None: no folder of the host.
    pub fn put_folders(&self, id: &SandboxId, folders: &[MountedFolder]) -> Result<Option<PathBuf>> {
        if folders.is_empty() {
            return Ok(None);
        }
        let path = self.sandbox(id).join(FOLDERS_NAME);
        self.put(&path, &json(&folders)?, 0o644)?;
        Ok(Some(path))
    }

    /// Its maker did not live to unpack all of what it starts from.
    pub fn is_unfinished(&self, id: &SandboxId) -> bool {
        fs::read_dir(self.from(id)).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Links, so that the snapshot may go meanwhile.
    pub fn offer(&self, id: &SandboxId, snapshot: &SnapshotId, names: &[String]) -> Result<PathBuf> {
        let dir = self.make_from(id)?;
        let link = || -> io::Result<()> {
            for name in names {
                let (from, to) = (self.snapshot(snapshot).join(name), dir.join(name));
                // The user inside reads it, and nobody else gets as far as this folder.
                fs::set_permissions(&from, fs::Permissions::from_mode(0o644))?;
                match fs::hard_link(&from, &to) {
                    Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                    Ok(()) | Err(_) => {}
                }
            }
            Ok(())
        };
        link().map_err(failed(&dir))?;
        Ok(dir)
    }

    pub fn snapshot(&self, id: &SnapshotId) -> PathBuf {
        self.0.join("snapshots").join(id.as_str())
    }

    /// The guest program, once for all sandboxes; its name changes with its content.
    pub fn guest(&self) -> Result<PathBuf> {
        static DIGEST: LazyLock<String> = LazyLock::new(|| digest(GUEST));
        let path = self.0.join("shared").join(format!("guest-{}", *DIGEST));
        if !path.exists() {
            self.put(&path, GUEST, 0o755)?;
        }
        Ok(path)
    }

    /// Files that every sandbox sees: pairs of host path and path inside.
    pub fn inside_files(&self, files: &[InsideFile]) -> Result<Vec<(PathBuf, String)>> {
        files
            .iter()
            .map(|file| {
                let content = file.content().map_err(failed(Path::new(&file.path)))?;
                let path = self.0.join("shared").join(format!("file-{}", digest(&content)));
                if !path.exists() {
                    self.put(&path, &content, file.mode)?;
                }
                Ok((path, file.path.clone()))
            })
            .collect()
    }

    /// A folder beside `target` that is to become it. One whose maker is gone is swept away.
    pub fn stage(&self, target: &Path) -> io::Result<tempfile::TempDir> {
        let prefix = format!("{STAGING}{}-", maker());
        tempfile::Builder::new().prefix(&prefix).tempdir_in(target.parent().unwrap_or(&self.0))
    }

    /// A sandbox's folders, with its record in them from when they can be seen: a sweep takes what has none for a leftover. The
    /// run folder belongs to the user inside.
    pub fn make(&self, record: &Record, uid: u32, gid: u32) -> Result<()> {
        let target = self.sandbox(&record.id);
        let staging = self.stage(&target).map_err(failed(&target))?;
        let run = staging.path().join(RUN_NAME);
        fs::DirBuilder::new().mode(0o700).create(&run).map_err(failed(&run))?;
        own(&run, uid, gid, 0o700)?;
        self.put_record(staging.path(), record)?;
        fs::rename(staging.path(), &target).map_err(failed(&target))?;
        // It has its new name; there is nothing left to remove.
        let _ = staging.keep();
        Ok(())
    }

    pub fn own_run(&self, id: &SandboxId, uid: u32, gid: u32, mode: u32) -> Result<()> {
        own(&self.run(id), uid, gid, mode)
    }

    pub fn write(&self, record: &Record) -> Result<()> {
        self.write_as(&record.id, record)
    }

    /// Into the folder of another id.
    pub fn write_as(&self, made_as: &SandboxId, record: &Record) -> Result<()> {
        self.put_record(&self.sandbox(made_as), record)
    }

    fn put_record(&self, dir: &Path, record: &Record) -> Result<()> {
        self.put(&dir.join(RECORD_NAME), &json(record)?, 0o600)
    }

    pub fn read(&self, id: &SandboxId) -> Result<Option<Record>> {
        read_json(&self.sandbox(id).join(RECORD_NAME))
    }

    /// Ok if it is gone already. A link goes last: it leads to what is left of the rest.
    pub fn remove(&self, id: &SandboxId) -> Result<()> {
        let made_as = self.made_as(id);
        self.remove_folder(&self.sandbox(&made_as))?;
        if made_as == *id { Ok(()) } else { gone(&self.sandbox(id)) }
    }

    /// Ok if it is gone already.
    fn remove_folder(&self, path: &Path) -> Result<()> {
        let shared = path.join(RUN_NAME);
        if fs::symlink_metadata(&shared).is_ok_and(|meta| meta.is_dir()) {
            // Where commands are the same user they may have written there: closed folders, or deeper ones than a call of
            // functions within each other goes.
            let guest = self.guest()?;
            let done = Command::new(&guest).arg("remove").arg(&shared).stdin(Stdio::null()).output();
            let done = done.map_err(failed(&guest))?;
            if !done.status.success() {
                let said = String::from_utf8_lossy(&done.stderr).trim().to_string();
                return Err(failed(&shared)(io::Error::other(said)));
            }
        }
        match fs::remove_dir_all(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path)(e)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Every sandbox that has a folder, whether the engine knows it or not.
    pub fn known(&self) -> Result<Vec<SandboxId>> {
        names(&self.0.join("sandboxes"), |name| SandboxId::new(name).ok())
    }

    pub fn set_stopped(&self, id: &SandboxId, stopped: bool) -> Result<()> {
        let path = self.sandbox(id).join(STOPPED_NAME);
        if stopped {
            return self.put(&path, b"", 0o600);
        }
        gone(&path)
    }

    pub fn is_stopped(&self, id: &SandboxId) -> bool {
        self.sandbox(id).join(STOPPED_NAME).exists()
    }

    pub fn read_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotRecord>> {
        read_json(&self.snapshot(id).join("snapshot.json"))
    }

    pub fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let ids = names(&self.0.join("snapshots"), |name| SnapshotId::new(name).ok())?;
        let mut all = Vec::new();
        for id in ids {
            if let Some(record) = self.read_snapshot(&id)? {
                all.push(record.info);
            }
        }
        all.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(all)
    }

    /// Images that sandboxes and, apart from some, snapshots start from, as the engine knows them. All of them or an error: a
    /// record that can't be read may name any.
    pub fn stand_on(&self, without: &[SnapshotId]) -> Result<Vec<String>> {
        let mut images = Vec::new();
        let snapshots = names(&self.0.join("snapshots"), |name| SnapshotId::new(name).ok())?;
        for id in snapshots.iter().filter(|id| !without.contains(id)) {
            images.extend(self.read_snapshot(id)?.map(|record| record.image));
        }
        for id in self.known()? {
            images.extend(self.read(&id)?.map(|record| record.image));
        }
        Ok(images)
    }

    /// From now on anybody may take it.
    pub fn offer_ready(&self, ready: &Ready) -> Result<()> {
        self.put(&self.0.join(FREE).join(ready.name()), b"", 0o600)
    }

    pub fn ready(&self) -> Result<Vec<Ready>> {
        names(&self.0.join(FREE), |name| Ready::parse(&name))
    }

    pub fn taken(&self) -> Result<Vec<Ready>> {
        names(&self.0.join(TAKEN), |name| Ready::parse(&name))
    }

    /// None: somebody else was first. What is taken is said under the taker's name.
    pub fn take(&self, ready: &Ready) -> Result<Option<Ready>> {
        let taken = Ready { maker: maker(), ..ready.clone() };
        let from = self.0.join(FREE).join(ready.name());
        match fs::rename(&from, self.0.join(TAKEN).join(taken.name())) {
            Ok(()) => Ok(Some(taken)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(&from)(e)),
        }
    }

    /// It has become a sandbox, or is gone.
    pub fn settle_taken(&self, taken: &Ready) -> Result<()> {
        gone(&self.0.join(TAKEN).join(taken.name()))
    }

    /// Removes what makers left that did not finish.
    pub fn sweep_staged(&self) -> Result<()> {
        for dir in STAGED.map(|name| self.0.join(name)) {
            for name in names(&dir, Some)? {
                let maker = name.strip_prefix(STAGING).and_then(|rest| rest.split_once('-'));
                if maker.is_some_and(|(maker, _)| !is_at_work(maker)) {
                    self.remove_folder(&dir.join(name))?;
                }
            }
        }
        Ok(())
    }

    /// Held by whoever makes the image, gives it its name or takes that away, of all processes.
    pub async fn lock_image(&self, digest: &str) -> Result<Lock> {
        // No sandbox has a dot in its id.
        Lock::take(&self.0.join("lock"), &format!("image.{digest}")).await
    }

    /// None if somebody has it.
    pub fn try_lock_image(&self, digest: &str) -> Result<Option<Lock>> {
        Lock::try_take(&self.0.join("lock"), &format!("image.{digest}"))
    }

    /// It is used now. None: not one that we made, or one of an older version.
    pub fn use_image(&self, digest: &str) -> Result<Option<MadeImage>> {
        let path = self.image(digest);
        let made = match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(failed(&path))?,
        };
        self.put(&path, &made, 0o600)?;
        Ok(serde_json::from_slice(&made).ok())
    }

    pub fn made_image(&self, digest: &str, made: &MadeImage) -> Result<()> {
        let text = serde_json::to_vec(made)
            .map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("image: {e}")))?;
        self.put(&self.image(digest), &text, 0o600)
    }

    /// When it was last used from here; None if it never was.
    pub fn image_used(&self, digest: &str) -> Option<SystemTime> {
        fs::metadata(self.image(digest)).and_then(|meta| meta.modified()).ok()
    }

    pub fn forget_image(&self, digest: &str) -> Result<()> {
        gone(&self.image(digest))
    }

    fn image(&self, digest: &str) -> PathBuf {
        self.0.join("images").join(digest)
    }

    /// Whole or not at all, and never through a link that somebody left there.
    fn put(&self, path: &Path, data: &[u8], mode: u32) -> Result<()> {
        let write = || -> io::Result<()> {
            let dir = path.parent().unwrap_or(&self.0);
            let mut file = tempfile::Builder::new()
                .permissions(fs::Permissions::from_mode(mode))
                .make_in(dir, |p| fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(p))?;
            file.write_all(data)?;
            // The umask may have taken bits that the sandbox needs.
            file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
            file.persist(path).map_err(|e| e.error)?;
            Ok(())
        };
        write().map_err(failed(path))
    }
}

/// As root: who owns a run folder. As an ordinary user it is ours, and the user inside is us.
fn own(run: &Path, uid: u32, gid: u32, mode: u32) -> Result<()> {
    if is_root() {
        std::os::unix::fs::lchown(run, Some(uid), Some(gid)).map_err(failed(run))?;
        fs::set_permissions(run, fs::Permissions::from_mode(mode)).map_err(failed(run))?;
    }
    Ok(())
}

/// Ok if it is gone already.
fn gone(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path)(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn names<T>(dir: &Path, parse: impl Fn(String) -> Option<T>) -> Result<Vec<T>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed(dir))? {
        let name = entry.map_err(failed(dir))?.file_name();
        names.extend(name.into_string().ok().and_then(&parse));
    }
    Ok(names)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("specification: {e}")))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("{}: {e}", path.display()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed(path)(e)),
    }
}

pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and can't fail.
    unsafe { libc::geteuid() == 0 }
}

/// Enough of a SHA-256 to tell contents apart, in characters that fit a name.
pub fn digest(data: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(data).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use bollard::models::SystemInfo;

    use super::*;
    use crate::docker::limits::Kept;

    fn record(name: &str) -> Record {
        Record {
            id: SandboxId::new(name).unwrap(),
            attempt: Attempt(1),
            spec: SandboxSpec::default(),
            token: "token".into(),
            image: "image".into(),
            achieved: Kept::by(&SystemInfo::default()).achieved(&SandboxSpec::default()),
            created_at: Timestamp(1),
            deadline: Timestamp(2),
            paused: false,
            maker: maker(),
            adopted: None,
        }
    }

    /// Or the sweep of another process would take it for a leftover.
    #[test]
    fn a_sandbox_that_can_be_seen_has_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::open(dir.path()).unwrap();
        let ids = || (0..500).map(|n| format!("s{n}"));
        std::thread::scope(|scope| {
            let makes = scope.spawn(|| ids().for_each(|id| home.make(&record(&id), 0, 0).unwrap()));
            while !makes.is_finished() {
                for id in home.known().unwrap() {
                    assert!(home.read(&id).unwrap().is_some() && home.run(&id).exists(), "{id}");
                }
            }
        });
        assert_eq!(home.known().unwrap().len(), ids().count());
    }

    #[test]
    fn what_stands_on_an_image_is_known_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::open(dir.path()).unwrap();
        home.make(&record("box"), 0, 0).unwrap();
        let [snapshot, being_made] = ["snap", "new"].map(|name| SnapshotId::new(name).unwrap());
        fs::create_dir(home.snapshot(&being_made)).unwrap();
        assert_eq!(home.stand_on(&[]).unwrap(), ["image"]);
        fs::create_dir(home.snapshot(&snapshot)).unwrap();
        for damaged in ["", r#"{"version": 2}"#] {
            fs::write(home.snapshot(&snapshot).join("snapshot.json"), damaged).unwrap();
            assert!(home.stand_on(&[]).is_err());
            assert_eq!(home.stand_on(std::slice::from_ref(&snapshot)).unwrap(), ["image"]);
        }
        fs::write(home.sandbox(&SandboxId::new("box").unwrap()).join(RECORD_NAME), "{").unwrap();
        assert!(home.stand_on(&[snapshot]).is_err());
    }

    #[test]
    fn what_a_dead_maker_left_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::open(dir.path()).unwrap();
        let dead = format!("{STAGING}{}.1.{}-x", std::process::id(), namespace());
        for parent in STAGED {
            fs::create_dir(home.root().join(parent).join(&dead)).unwrap();
        }
        let mine = home.stage(&home.sandbox(&SandboxId::new("a").unwrap())).unwrap();
        home.sweep_staged().unwrap();
        assert!(mine.path().exists(), "its maker is at work");
        assert!(STAGED.iter().all(|parent| !home.root().join(parent).join(&dead).exists()));
    }

    /// Whoever has no descriptor left can look at nobody, itself included.
    #[test]
    fn who_cant_be_looked_at_is_at_work() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let (mine, before) = (maker(), getrlimit(Resource::Nofile));
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
        let (seen, unseen) = (is_at_work(&mine), maker());
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(seen && unseen != mine);
        assert!(is_at_work(&unseen), "it did not know when it was born");
    }

    #[test]
    fn a_maker_is_known_while_it_lives() {
        assert!(is_at_work(&maker()));
        assert!(is_at_work(""), "made by an older version");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let born = birth(child.id()).unwrap().unwrap();
        let name = format!("{}.{born}.{}", child.id(), namespace());
        assert!(is_at_work(&name));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_at_work(&name));
        assert!(!is_at_work(&format!("{}.{UNSEEN}.{}", child.id(), namespace())));
        assert!(!is_at_work(&format!("{}.1.{}", std::process::id(), namespace())), "the number of another");
        assert!(is_at_work("1.1.1"), "of another namespace");
    }
}
