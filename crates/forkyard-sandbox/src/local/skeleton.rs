//! The lowest layer of every root, made once for all sandboxes that would get the same: it is kept under a name that says what it
//! is made of.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkyard_guest::zygote::{ETC, SkeletonFile};
use rustix::fs::FlockOperation;

use super::state::{self, io_error};
use super::{Inner, Shown, zygote};
use crate::{InsideFile, Result};

/// One that nobody uses stays this long, for whoever comes back.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Changes whenever what it would be made of does: the program that makes it, the host's trees, the provider's files, and what
/// is copied of the host's /etc.
pub fn name(shown: &[Shown], files: &[InsideFile]) -> String {
    let mut hash = DefaultHasher::new();
    (env!("CARGO_PKG_VERSION"), zygote::GUEST.len()).hash(&mut hash);
    for shown in shown {
        shown.path.hash(&mut hash);
    }
    for file in files {
        (&file.path, file.mode, &file.data).hash(&mut hash);
        if let Some(host) = &file.begins_with {
            stamp(host, &mut hash);
            // It may be a link.
            stamp(&host.canonicalize().unwrap_or_default(), &mut hash);
        }
    }
    for entry in ETC {
        stamp(&Path::new("/etc").join(entry), &mut hash);
    }
    format!("{:016x}", hash.finish())
}

/// Files that are replaced, added or removed show in their folder's time; those at the top in their own.
fn stamp(path: &Path, hash: &mut DefaultHasher) {
    let Ok(meta) = path.symlink_metadata() else { return };
    (path, meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()).hash(hash);
    // Each folder below has a link to this one. Two links are its own; one is said where links are not counted.
    if meta.is_dir() && meta.nlink() != 2 {
        let entries = path.read_dir().into_iter().flatten().flatten();
        let below: BTreeSet<_> =
            entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect();
        for dir in below {
            stamp(&dir, hash);
        }
    }
}

impl Inner {
    /// The provider's files, where the helper that makes the skeleton finds them. Nothing to do if it is there.
    pub(super) fn offer_files(&self) -> Result<Vec<SkeletonFile>> {
        let dir = self.state.root.join("skeleton");
        let there = dir.join(&self.skeleton).exists();
        let offered = dir.join(format!("{}.files", self.skeleton));
        if !there {
            self.state.make_dir(&offered)?;
        }
        let offer = |(index, file): (usize, &InsideFile)| {
            if !there {
                let (path, part) =
                    (offered.join(index.to_string()), offered.join(format!("{index}.{:x}", state::unique())));
                file.content()
                    .and_then(|content| std::fs::write(&part, content))
                    .and_then(|()| std::fs::rename(&part, &path))
                    .map_err(|e| io_error(&path, &e))?;
            }
            Ok(SkeletonFile { path: file.path.clone(), index, mode: file.mode })
        };
        self.files.iter().enumerate().map(offer).collect()
    }

    /// Removes those that no sandbox and no helper uses. `used`: by sandboxes, which do not lock it.
    pub(super) fn sweep_skeletons(self: &Arc<Self>, used: &BTreeSet<String>) -> Result<()> {
        let dir = self.state.root.join("skeleton");
        for entry in state::names(&dir)? {
            let name = entry.split('.').next().unwrap_or_default();
            let path = dir.join(&entry);
            let old = path.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
            if name == self.skeleton || used.contains(name) || old.is_none_or(|age| age < KEEP) {
                continue;
            }
            let Ok(held) = std::fs::File::open(&path) else { continue };
            if rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).is_ok() {
                self.discard(&path)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_follows_what_it_is_made_of() {
        let shown = |path: &str| Shown { path: path.into(), why: "test" };
        let after = |host: Option<&Path>, data: &[u8]| InsideFile {
            path: "/etc/x".into(),
            begins_with: host.map(Into::into),
            data: data.to_vec().into(),
            mode: 0o644,
        };
        let file = |data: &[u8]| after(None, data);
        let first = name(&[shown("/usr")], &[file(b"a")]);
        assert_eq!(first, name(&[shown("/usr")], &[file(b"a")]));
        assert_ne!(first, name(&[shown("/usr")], &[file(b"b")]));
        assert_ne!(first, name(&[shown("/opt")], &[file(b"a")]));
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        std::fs::write(&host, "one").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&host, &link).unwrap();
        let begun = |host: &Path| name(&[], &[after(Some(host), b"a")]);
        let (by_name, by_link) = (begun(&host), begun(&link));
        assert_eq!((&by_name, &by_link), (&begun(&host), &begun(&link)));
        std::fs::write(&host, "three").unwrap();
        assert_ne!(by_name, begun(&host));
        assert_ne!(by_link, begun(&link));
        let of = || {
            let mut hash = DefaultHasher::new();
            stamp(dir.path(), &mut hash);
            hash.finish()
        };
        // The kernel's clock may stand still between two steps of a test.
        let is_old = |folder: &str| {
            let folder = std::fs::File::open(dir.path().join(folder)).unwrap();
            folder.set_modified(std::time::UNIX_EPOCH).unwrap();
        };
        std::fs::create_dir(dir.path().join("deep")).unwrap();
        is_old("deep");
        let before = of();
        assert_eq!(before, of());
        std::fs::write(dir.path().join("deep/file"), "").unwrap();
        let with_file = of();
        assert_ne!(before, with_file);
        std::fs::create_dir_all(dir.path().join("deep/deeper/deepest")).unwrap();
        is_old("deep/deeper/deepest");
        let deeper = of();
        assert_ne!(with_file, deeper);
        std::fs::write(dir.path().join("deep/deeper/deepest/file"), "").unwrap();
        assert_ne!(deeper, of());
    }
}
