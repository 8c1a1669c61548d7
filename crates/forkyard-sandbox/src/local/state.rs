//! The state folder: what survives the process.
//!
//! ```text
//! STATE/                 0700
//!   sandboxes/ID/        meta.json, ctl (socket), upN (live layer), workN (overlayfs' own) or disk.img (both)
//!   layers/LAYER/        fs (sealed, shared), refs/ (one empty file per user)
//!   snapshots/           ID.json, or ID.unsynced until all of it is known to be on the disk
//!   images/KEY.json      which layers an image became
//!   trash/               what is being removed
//!   skeleton/NAME/       the lowest layer of roots, by what it is made of
//!   spool/               files without names: what commands wrote, until their reader has it
//!   lock                 one byte of it, of which none is there, for each name that can be locked
//! ```
//!
//! A sandbox exists when its meta.json does. Files change places by rename, so that whoever is killed leaves the old or the new.
//! Of a machine that loses its power that is true for stopped sandboxes, for snapshots that were synced, and for what is older
//! than the kernel keeps it from the disk, like the files of sandboxes themselves.
//!
//! As few files as possible are made and removed: without a journal, ext4 looks at every one that was removed within the last
//! minutes before it makes another beside it.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use forkyard_core::{Attempt, SandboxId, SnapshotId, Timestamp};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use super::image::ImageConfig;
use super::zygote::unavailable;
use crate::error::FULL_HINT;
use crate::lock::Lock;
use crate::{Achieved, ErrorKind, Labels, Limits, Result, SandboxError, SandboxSpec, SnapshotInfo};

/// In the names of what is not finished, after its user: `USER.part…`.
pub const PART: &str = ".part";
/// What the name of a snapshot's record ends with.
const UNSYNCED: &str = ".unsynced";
const SYNCED: &str = ".json";
/// Raised when an older Forkyard could misread a newer state folder.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Meta {
    pub format: u32,
    pub id: SandboxId,
    pub attempt: Attempt,
    pub labels: Labels,
    pub limits: Limits,
    pub achieved: Achieved,
    pub created_at: Timestamp,
    pub deadline: Timestamp,
    pub spec: SandboxSpec,
    /// Its pid 1 and when that was born (clock ticks since boot), so that a reused number is not mistaken for it.
    pub pid: i32,
    pub born: u64,
    /// The machine's start that both are of.
    #[serde(default)]
    pub boot: Boot,
    pub cgroups: Vec<PathBuf>,
    /// Sealed layers below the live one, topmost first.
    pub lower: Vec<String>,
    /// Number of the live layer; grows with every snapshot.
    pub upper: u32,
    /// The highest number that a live layer ever had. What a killed owner began may be at work on its folders still, so that
    /// none is used twice.
    #[serde(default)]
    pub tried: u32,
    /// Set while the root is being replaced: what is there if that did not happen.
    pub sealing: Option<Sealing>,
    pub host_trees: bool,
    /// The name of its lowest layer.
    pub skeleton: String,
    /// Where the host's trees are mounted inside.
    pub binds: Vec<String>,
    /// The live layer lies on a disk of its own.
    pub disk: bool,
    /// The project that its layers belong to, where the kernel keeps quotas of such.
    #[serde(default)]
    pub project: Option<u32>,
    /// A directory of the host below all layers.
    pub directory: Option<String>,
    /// What its image says of the commands in it.
    pub image: ImageConfig,
    pub stopped: bool,
    pub paused: bool,
}

/// A layer on its way from live to sealed. Its folder has moved, the sandbox may not know yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealing {
    /// What the live layer, by its number, becomes.
    pub upper: u32,
    pub layer: String,
    pub lower: Vec<String>,
    /// What the new root's lowest layer is, by its name.
    #[serde(default)]
    pub skeleton: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SnapshotMeta {
    pub format: u32,
    pub info: SnapshotInfo,
    /// Topmost first.
    pub layers: Vec<String>,
    pub host_trees: bool,
    #[serde(default)]
    pub directory: Option<String>,
    #[serde(default)]
    pub image: ImageConfig,
    /// In which it was made: until it is synced, it counts in that one alone.
    #[serde(default)]
    pub boot: Boot,
}

/// One start of the machine. Without a name it is taken for the one that goes on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Boot(String);

impl Boot {
    pub fn now() -> Boot {
        static NOW: LazyLock<Boot> = LazyLock::new(|| {
            Boot(fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().into())
        });
        NOW.clone()
    }

    pub fn goes_on(&self) -> bool {
        let now = Boot::now();
        self.0.is_empty() || now.0.is_empty() || *self == now
    }
}

/// What is there under the name of a snapshot.
pub enum Kept {
    Nothing,
    Whole(Box<SnapshotMeta>),
    /// The machine stopped before all of it was on the disk.
    Torn,
}

#[derive(Debug, Clone)]
pub struct State {
    pub root: PathBuf,
    /// As root: whom everything belongs to.
    pub owner: Option<u32>,
    tag: String,
    /// The next sandbox is not written down, as if the disk were full.
    #[cfg(test)]
    pub full: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

pub fn io_error(what: &Path, e: &std::io::Error) -> SandboxError {
    use std::io::ErrorKind as Io;
    let shown = what.display();
    let error = |kind| SandboxError::new(kind, format!("{shown}: {e}"));
    match e.kind() {
        Io::PermissionDenied => {
            error(ErrorKind::Denied).hint(format!("this user may not use it: `ls -ld {shown}` says who may"))
        }
        Io::StorageFull | Io::QuotaExceeded => error(ErrorKind::TooLarge).hint(FULL_HINT),
        Io::ReadOnlyFilesystem => {
            error(ErrorKind::Denied).hint("it lies on a read-only disk: set FORKYARD_HOME to another folder")
        }
        _ => error(ErrorKind::Unavailable),
    }
}

/// What belongs to sandboxes is given to an id of their own, which root of a user namespace may not have.
fn not_owned(path: &Path, id: u32, e: &std::io::Error) -> SandboxError {
    if e.raw_os_error() != Some(libc::EINVAL) {
        return io_error(path, e);
    }
    let message = format!(
        "{}: there is no user id {id} here: this is root of a user namespace, as in a rootless container",
        path.display()
    );
    SandboxError::new(ErrorKind::Unsupported, message)
        .hint("run Forkyard as an ordinary user, there or outside of the container, or use --provider docker")
}

impl State {
    pub fn open(root: &Path, owner: Option<u32>) -> Result<State> {
        fs::create_dir_all(root).map_err(|e| io_error(root, &e))?;
        let root = root.canonicalize().map_err(|e| io_error(root, &e))?;
        let hash = <sha2::Sha256 as sha2::Digest>::digest(root.as_os_str().as_bytes());
        let tag = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        let state = State {
            root,
            owner,
            tag,
            #[cfg(test)]
            full: Default::default(),
        };
        let meta = fs::metadata(&state.root).map_err(|e| io_error(&state.root, &e))?;
        if meta.mode() & 0o7777 != 0o700 {
            fs::set_permissions(&state.root, fs::Permissions::from_mode(0o700))
                .map_err(|e| io_error(&state.root, &e))?;
        }
        state.own_again(&state.root)?;
        for dir in ["sandboxes", "layers", "snapshots", "images", "trash", "skeleton", "spool"] {
            state.make_dir(&state.root.join(dir))?;
        }
        for dir in ["sandboxes", "layers"] {
            spread(&state.root.join(dir));
        }
        Ok(state)
    }

    fn own(&self, path: &Path) -> Result<()> {
        match self.owner {
            Some(id) => {
                std::os::unix::fs::lchown(path, Some(id), Some(id)).map_err(|e| not_owned(path, id, &e))
            }
            None => Ok(()),
        }
    }

    /// Whoever made it may not have lived to give it to its owner; as a rule there is only to look.
    fn own_again(&self, path: &Path) -> Result<()> {
        match (self.owner, path.symlink_metadata()) {
            (Some(id), Ok(meta)) if (meta.uid(), meta.gid()) == (id, id) => Ok(()),
            _ => self.own(path),
        }
    }

    /// Ok if it exists.
    pub fn make_dir(&self, path: &Path) -> Result<()> {
        match fs::create_dir(path) {
            Ok(()) => self.own(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => self.own_again(path),
            Err(e) => Err(io_error(path, &e)),
        }
    }

    pub fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.root.join("sandboxes").join(id.as_str())
    }

    /// Where a snapshot is written down until it is synced, and from then on.
    pub fn snapshot(&self, id: &SnapshotId) -> [PathBuf; 2] {
        [UNSYNCED, SYNCED].map(|end| self.root.join("snapshots").join(format!("{id}{end}")))
    }

    pub fn layer(&self, name: &str) -> PathBuf {
        self.root.join("layers").join(name)
    }

    /// Held by one process and one task at a time, per sandbox, snapshot, image or layer.
    pub async fn lock(&self, name: &str) -> Result<Lock> {
        Lock::take(&self.root.join("lock"), name).await
    }

    /// None if somebody has it.
    pub fn try_lock(&self, name: &str) -> Result<Option<Lock>> {
        Lock::try_take(&self.root.join("lock"), name)
    }

    /// A word that tells what is this folder's from what is another's, where both have names in one place.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    pub fn load(&self, id: &SandboxId) -> Result<Option<Meta>> {
        let of = load(&self.sandbox(id).join("meta.json"));
        of.map_err(|e| e.or_hint(format!("`forkyard sandbox rm {id}` removes what is left of it")))
    }

    pub fn save(&self, meta: &Meta) -> Result<()> {
        #[cfg(test)]
        if self.full.swap(false, std::sync::atomic::Ordering::Relaxed) {
            return Err(unavailable("no space left on device"));
        }
        let path = self.sandbox(&meta.id).join("meta.json");
        save(&path, meta)?;
        if meta.stopped {
            // It may wait for long, and for another start of the machine.
            fs::File::open(&path).and_then(|file| file.sync_all()).map_err(|e| io_error(&path, &e))?;
        }
        Ok(())
    }

    pub fn find_snapshot(&self, id: &SnapshotId) -> Result<Kept> {
        // In the order in which it moves, so that it is seen wherever it is on its way.
        let [unsynced, synced] = self.snapshot(id);
        if let Some(text) = read(&unsynced)? {
            return match parse::<SnapshotMeta>(&unsynced, &text) {
                Ok(meta) if meta.boot.goes_on() => Ok(Kept::Whole(Box::new(meta))),
                Err(e) if e.kind == ErrorKind::Unsupported => Err(e),
                // Of one that lost its power not even this file need be whole.
                Ok(_) | Err(_) => Ok(Kept::Torn),
            };
        }
        let loaded = load(&synced).map_err(|e| {
            e.or_hint(format!("`forkyard sandbox snapshots --remove {id}` removes what is left of it"))
        });
        Ok(loaded?.map_or(Kept::Nothing, |meta| Kept::Whole(Box::new(meta))))
    }

    /// One that is torn is an error that says so.
    pub fn load_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotMeta>> {
        match self.find_snapshot(id)? {
            Kept::Nothing => Ok(None),
            Kept::Whole(meta) => Ok(Some(*meta)),
            Kept::Torn => {
                let message =
                    format!("snapshot {id} was not on the disk as a whole when the machine stopped");
                Err(SandboxError::new(ErrorKind::NotFound, message)
                    .hint("take it again; what is left of it goes with `forkyard cleanup`"))
            }
        }
    }

    pub fn save_snapshot(&self, meta: &SnapshotMeta) -> Result<()> {
        let [unsynced, _] = self.snapshot(&meta.info.id);
        save(&unsynced, meta)
    }

    /// Its layers stay, with it as a user of theirs that does not exist any more.
    pub fn forget_snapshot(&self, id: &SnapshotId) -> Result<()> {
        for path in self.snapshot(id) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io_error(&path, &e)),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    pub fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        Ok(names(&self.root.join("sandboxes"))?.into_iter().filter_map(|n| SandboxId::new(n).ok()).collect())
    }

    pub fn snapshots(&self) -> Result<Vec<SnapshotId>> {
        let mut ids = self.snapshots_with(UNSYNCED)?;
        ids.extend(self.snapshots_with(SYNCED)?);
        // One may have been synced between the two looks.
        ids.sort();
        ids.dedup();
        Ok(ids)
    }

    pub fn unsynced(&self) -> Result<Vec<SnapshotId>> {
        self.snapshots_with(UNSYNCED)
    }

    fn snapshots_with(&self, end: &str) -> Result<Vec<SnapshotId>> {
        let names = names(&self.root.join("snapshots"))?;
        Ok(names.iter().filter_map(|n| SnapshotId::new(n.strip_suffix(end)?).ok()).collect())
    }

    /// Moves something out of sight; returns its path in the state folder, for the zygote to remove. None if it is gone.
    pub fn trash(&self, path: &Path) -> Result<Option<String>> {
        let name = format!("trash/{:016x}", unique());
        match fs::rename(path, self.root.join(&name)) {
            Ok(()) => Ok(Some(name)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error(path, &e)),
        }
    }

    pub fn trashed(&self) -> Result<Vec<String>> {
        Ok(names(&self.root.join("trash"))?.into_iter().map(|name| format!("trash/{name}")).collect())
    }

    /// A user of a layer. False if the layer is gone.
    pub fn add_ref(&self, layer: &str, user: &str) -> Result<bool> {
        let path = self.layer(layer).join("refs").join(user);
        match fs::File::create(&path) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(io_error(&path, &e)),
        }
    }

    /// A user of several layers: one file, with a name in each. False if one of them is gone.
    pub fn add_refs(&self, layers: &[String], user: &str) -> Result<bool> {
        let place = |layer: &String| self.layer(layer).join("refs").join(user);
        let mut first = None;
        for layer in layers {
            let linked = first.as_ref().is_some_and(|first| fs::hard_link(first, place(layer)).is_ok());
            if !linked && !self.add_ref(layer, user)? {
                return Ok(false);
            }
            first.get_or_insert_with(|| place(layer));
        }
        Ok(true)
    }

    /// Drops a user; returns what is left to be removed if it was the last.
    pub fn drop_ref(&self, layer: &str, user: &str) -> Result<Option<String>> {
        let _ = fs::remove_file(self.layer(layer).join("refs").join(user));
        self.trash_unused(layer)
    }

    /// A layer that has no users. Removing the emptied folder of them decides: from then on nobody can become one.
    pub fn trash_unused(&self, layer: &str) -> Result<Option<String>> {
        match fs::remove_dir(self.layer(layer).join("refs")) {
            Ok(()) => self.trash(&self.layer(layer)),
            Err(_) => Ok(None),
        }
    }
}

/// Tells ext4 that the folders in this one have nothing to do with each other, so that it puts each somewhere else on the disk.
/// Without a journal it does not use the place of a file that was removed within the last minutes, and looks at every such place
/// around before it takes the next: many sandboxes that come and go would make the next ones slow. Elsewhere nothing is lost.
fn spread(dir: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::open(dir, flags, Mode::empty()) else { return };
    if let Ok(flags) = ioctl_getflags(&dir)
        && !flags.contains(IFlags::TOPDIR)
    {
        let _ = ioctl_setflags(&dir, flags | IFlags::TOPDIR);
    }
}

pub fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).map_err(|e| io_error(dir, &e))?;
    Ok(entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect())
}

fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(path, &e)),
    }
}

pub fn load<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    read(path)?.map(|text| parse(path, &text)).transpose()
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T> {
    #[derive(Deserialize)]
    struct Header {
        format: u32,
    }
    let broken = |e: serde_json::Error| unavailable(format!("{}: {e}", path.display()));
    let header: Header = serde_json::from_slice(text).map_err(broken)?;
    if header.format != FORMAT {
        let message =
            format!("{}: made by another version of Forkyard (format {})", path.display(), header.format);
        return Err(SandboxError::new(ErrorKind::Unsupported, message)
            .hint("use that version, or another state folder"));
    }
    serde_json::from_slice(text).map_err(broken)
}

pub fn save<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_vec(value).expect("state has string keys and no failing parts");
    let temporary = path.with_extension(format!("part{:x}", unique()));
    let write = || {
        let new = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary);
        new?.write_all(&text)?;
        // What takes the place of another by rename, ext4 writes to the disk first; what changes places with it, later.
        match renameat_with(CWD, &temporary, CWD, path, RenameFlags::EXCHANGE) {
            Ok(()) => fs::remove_file(&temporary),
            Err(_) => fs::rename(&temporary, path),
        }
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&temporary);
        io_error(path, &e)
    })
}

/// A number that no other process or call of this machine has.
pub fn unique() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut random = [0; 8];
    if rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).is_err() {
        random = u64::from(std::process::id()).to_le_bytes();
    }
    u64::from_le_bytes(random) ^ COUNT.fetch_add(1, Ordering::Relaxed)
}

pub const fn format() -> u32 {
    FORMAT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_disk_say_what_to_do() {
        let of = |errno: i32| {
            let e = io_error(Path::new("/state/meta.json"), &std::io::Error::from_raw_os_error(errno));
            (e.kind, e.hint.unwrap_or_default())
        };
        for full in [libc::ENOSPC, libc::EDQUOT] {
            let (kind, hint) = of(full);
            assert!(kind == ErrorKind::TooLarge && hint.contains("forkyard gc"), "{kind:?}: {hint}");
        }
        assert!(
            of(libc::EACCES).0 == ErrorKind::Denied && of(libc::EACCES).1.contains("ls -ld /state/meta.json")
        );
        assert!(of(libc::EROFS).1.contains("FORKYARD_HOME"));
        assert_eq!(of(libc::EIO), (ErrorKind::Unavailable, String::new()));
    }

    #[test]
    fn what_is_saved_takes_the_place_of_what_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for text in ["first", "second", "third"] {
            save(&path, &text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("\"{text}\""));
        }
        assert_eq!(names(dir.path()).unwrap(), ["a.json"]);
    }

    #[test]
    fn layers_are_kept_by_each_user_for_itself() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(dir.path(), None).unwrap();
        let layers = ["x".to_string(), "y".to_string()];
        for layer in &layers {
            fs::create_dir_all(state.layer(layer).join("refs")).unwrap();
        }
        assert!(state.add_refs(&layers, "sandbox.a").unwrap());
        assert!(state.add_refs(&layers, "sandbox.a").unwrap());
        assert!(state.add_refs(&layers[1..], "sandbox.b").unwrap());
        assert!(state.drop_ref("x", "sandbox.a").unwrap().is_some());
        assert!(state.drop_ref("y", "sandbox.a").unwrap().is_none());
        assert!(state.drop_ref("y", "sandbox.b").unwrap().is_some());
        assert!(!state.add_refs(&layers, "sandbox.c").unwrap());
    }

    #[test]
    fn root_of_a_user_namespace_is_told_what_it_is() {
        let e = not_owned(Path::new("/state"), 7, &std::io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(e.kind, ErrorKind::Unsupported);
        assert!(e.message.contains("user id 7") && e.message.contains("rootless container"), "{e}");
        assert!(e.hint.is_some_and(|hint| hint.contains("--provider docker")));
    }
}
