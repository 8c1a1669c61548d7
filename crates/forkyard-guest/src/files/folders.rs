//! Folders that were made and may be needed again: a descriptor each would be too many, and a path each too long for the kernel
//! and too much memory, since who built the tree chose its depth.

use std::ffi::{CStr, CString};
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode};
use rustix::io::Result as IoResult;

use super::tree::OPEN_DIR;

/// The number of the folder that all others are in.
pub const ROOT: usize = usize::MAX;

/// Each by the number of its parent and its name there.
#[derive(Default)]
pub struct Folders {
    known: Vec<(usize, CString)>,
    /// The one that was gone back to last: the next is likely the same.
    again: Option<(usize, OwnedFd)>,
}

/// Where a file lies.
pub type Place = (usize, CString);

impl Folders {
    /// Answers with its number.
    pub fn add(&mut self, parent: usize, name: CString) -> usize {
        self.known.push((parent, name));
        self.known.len() - 1
    }

    /// Name by name: whatever took its place meanwhile is not followed.
    pub fn open(&self, root: BorrowedFd<'_>, folder: usize) -> IoResult<OwnedFd> {
        let (mut names, mut at) = (Vec::new(), folder);
        while let Some((parent, name)) = self.known.get(at) {
            names.push(name);
            at = *parent;
        }
        let mut dir = rustix::io::fcntl_dupfd_cloexec(root, 3)?;
        for name in names.into_iter().rev() {
            dir = rustix::fs::openat(&dir, name, OPEN_DIR, Mode::empty())?;
        }
        Ok(dir)
    }

    /// Gives a file another name.
    pub fn link(
        &mut self,
        root: BorrowedFd<'_>,
        (folder, first): &Place,
        to: BorrowedFd<'_>,
        name: &CStr,
    ) -> IoResult<()> {
        let dir = match self.again.take() {
            Some((known, dir)) if known == *folder => dir,
            _ => self.open(root, *folder)?,
        };
        rustix::fs::linkat(&dir, first, to, name, AtFlags::empty())?;
        self.again = Some((*folder, dir));
        Ok(())
    }
}
