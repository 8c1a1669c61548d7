//! Small tar archives, for preparing an image.

use std::io::{self, Read};

use tar::{Archive, Builder, EntryType, Header};

/// An archive of folders and small files, for preparing an image.
pub struct Parts(Builder<Vec<u8>>);

impl Parts {
    pub fn new() -> Parts {
        Parts(Builder::new(Vec::new()))
    }

    pub fn dir(&mut self, path: &str, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
        let mut header = Parts::header(EntryType::Directory, 0, uid, gid, mode);
        self.0.append_data(&mut header, path, io::empty())
    }

    pub fn file(&mut self, path: &str, data: &[u8], mode: u32) -> io::Result<()> {
        let mut header = Parts::header(EntryType::Regular, data.len() as u64, 0, 0, mode);
        self.0.append_data(&mut header, path, data)
    }

    fn header(kind: EntryType, size: u64, uid: u32, gid: u32, mode: u32) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_uid(uid.into());
        header.set_gid(gid.into());
        header.set_mode(mode);
        header
    }

    pub fn finish(self) -> io::Result<Vec<u8>> {
        self.0.into_inner()
    }
}

/// The only file of an archive, at most `max` bytes: what the engine answers when one file is asked for.
pub fn single_file(archive: &[u8], max: u64) -> io::Result<Vec<u8>> {
    let mut archive = Archive::new(archive);
    for entry in archive.entries()? {
        let entry = entry?;
        if entry.header().entry_type() == EntryType::Regular {
            let mut data = Vec::new();
            entry.take(max).read_to_end(&mut data)?;
            return Ok(data);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_is_found() {
        let mut parts = Parts::new();
        parts.dir("etc", 0, 0, 0o755).unwrap();
        parts.file("etc/passwd", b"root", 0o644).unwrap();
        assert_eq!(single_file(&parts.finish().unwrap(), 100).unwrap(), b"root");
    }
}
