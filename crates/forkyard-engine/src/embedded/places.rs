//! Places for forks that all processes of a host share: numbered files in a folder, each locked by the process that has a fork
//! there. The kernel drops the locks of a process that dies, so nobody has to notice it, and nothing is left over.
//!
//! A process that finds no place leaves a locked file that says so. Whoever gives a place back sees it and holds back
//! for a while before it asks again.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forkyard_core::{ForkNum, RunId};

use super::owner::is_gone;

/// Files of processes that wait begin with this.
const WAITS: &str = "waits-";

pub struct Places {
    folder: PathBuf,
    owner: String,
    count: usize,
    /// Those that this process has: looking at them would tell nothing.
    mine: Mutex<BTreeSet<usize>>,
    /// That the folder can't be used has been said, and it has not been usable since.
    said: AtomicBool,
}

/// Held while it lives; give it back by [`Places::leave`].
pub struct Place {
    number: usize,
    _locked: File,
}

/// Says that its process waits, while it lives.
pub struct Waits {
    path: PathBuf,
    _locked: File,
}

impl Drop for Waits {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// False if another has it.
fn lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

fn writable(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

impl Places {
    /// `owner` is this process's name, which no other has.
    pub fn open(folder: &Path, owner: &str, count: usize) -> io::Result<Places> {
        fs::create_dir_all(folder)?;
        Ok(Places {
            folder: folder.into(),
            owner: owner.into(),
            count,
            mine: Mutex::default(),
            said: AtomicBool::default(),
        })
    }

    /// What can't be had now is tried again, many times a second: a folder that can't be used is like a host without room, and is
    /// complained of once.
    pub fn found<T>(&self, taken: io::Result<Option<T>>) -> Option<T> {
        let failed = taken.is_err();
        let news = self.said.swap(failed, Ordering::Relaxed) != failed;
        taken.unwrap_or_else(|e| {
            if news {
                tracing::warn!("{}: {e}: forks wait until it can be used", self.folder.display());
            }
            None
        })
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.join(number.to_string())
    }

    fn mine(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.mine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place that nobody has, if there is one.
    pub fn take(&self, run: &RunId, fork: ForkNum) -> io::Result<Option<Place>> {
        let mut mine = self.mine();
        for number in 0..self.count {
            if mine.contains(&number) {
                continue;
            }
            let file = writable(&self.path(number))?;
            if lock(&file)? {
                // For `is_elsewhere`; a disk that is full costs no more than that.
                let text = format!("{}\n{run}/{fork}\n", self.owner);
                let _ = file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0));
                mine.insert(number);
                return Ok(Some(Place { number, _locked: file }));
            }
        }
        Ok(None)
    }

    pub fn leave(&self, place: Place) {
        let number = place.number;
        drop(place);
        self.mine().remove(&number);
    }

    /// Whether another process, one that may be alive, has a place for this fork: it is counted already. What a process wrote
    /// that is gone says nothing: the lock is that of whoever came after it and has not written yet.
    pub fn is_elsewhere(&self, run: &RunId, fork: ForkNum) -> bool {
        let (fork, mine) = (format!("{run}/{fork}"), self.mine());
        (0..self.count).filter(|number| !mine.contains(number)).any(|number| {
            let Ok(mut file) = File::open(self.path(number)) else { return false };
            if file.try_lock_shared().is_ok() {
                return false;
            }
            let mut text = String::new();
            let read = file.read_to_string(&mut text).is_ok();
            let mut lines = text.lines();
            read && lines.next().is_some_and(|owner| !is_gone(owner)) && lines.next() == Some(&fork)
        })
    }

    /// For others to see that this process waits.
    pub fn wait(&self) -> io::Result<Waits> {
        let mut name = DefaultHasher::new();
        self.owner.hash(&mut name);
        let name = format!("{WAITS}{:016x}", name.finish());
        let (draft, path) = (self.folder.join(format!(".{name}")), self.folder.join(name));
        let file = writable(&draft)?;
        lock(&file)?;
        // Locked before it can be seen: one that is not locked is of a process that is gone.
        fs::rename(draft, &path)?;
        Ok(Waits { path, _locked: file })
    }

    /// Whether another process waits.
    pub fn others_wait(&self, mine: Option<&Waits>) -> bool {
        let Ok(entries) = fs::read_dir(&self.folder) else { return false };
        entries.flatten().any(|entry| {
            let path = entry.path();
            if !entry.file_name().to_string_lossy().starts_with(WAITS) || mine.is_some_and(|m| m.path == path)
            {
                return false;
            }
            match File::open(&path).map(|file| lock(&file)) {
                Ok(Ok(true)) => {
                    let _ = fs::remove_file(&path);
                    false
                }
                Ok(Ok(false)) => true,
                Ok(Err(_)) | Err(_) => false,
            }
        })
    }
}
