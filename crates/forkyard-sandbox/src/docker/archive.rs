//! Archives of a sandbox's files: made and read without ever unpacking them on the host.
//!
//! Every archive is hostile, also our own (a sandbox filled it): [`sanitise`] copies it entry by entry and lets through only
//! plain files, folders, symlinks and hard links below the root, without set-id bits, owned by the sandbox's user.

use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Builder, EntryType, Header};

/// Entries of one archive; a node_modules has about 100,000.
const MAX_ENTRIES: u64 = 5_000_000;

/// What came through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    pub entries: u64,
    pub bytes: u64,
}

fn refuse(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// A path below the root, or None for the root itself. Absolute paths and `..` are refused, not repaired.
fn inside(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) => clean.push(name),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(refuse(format!("archive entry {path:?} points outside")));
            }
        }
    }
    Ok(if clean.as_os_str().is_empty() { None } else { Some(clean) })
}

/// Copies an archive, cleaned; devices, FIFOs and sockets are left out. At most `max_bytes` of content.
pub fn sanitise(from: impl Read, to: impl Write, uid: u32, gid: u32, max_bytes: u64) -> io::Result<Copied> {
    let mut archive = Archive::new(from);
    let mut builder = Builder::new(to);
    let mut copied = Copied::default();
    for entry in archive.entries()? {
        let mut entry = entry?;
        copied.entries += 1;
        if copied.entries > MAX_ENTRIES {
            return Err(refuse(format!("more than {MAX_ENTRIES} entries")));
        }
        let Some(path) = inside(&entry.path()?)? else { continue };
        let kind = entry.header().entry_type();
        let mut header = Header::new_gnu();
        // Of all bits only the permissions: a set-id program gains nothing inside and must not exist outside.
        header.set_mode(entry.header().mode()? & 0o777);
        header.set_mtime(entry.header().mtime()?);
        header.set_uid(uid.into());
        header.set_gid(gid.into());
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let size = entry.size();
                copied.bytes = copied.bytes.saturating_add(size);
                if copied.bytes > max_bytes {
                    return Err(refuse(format!("more than {max_bytes} bytes")));
                }
                header.set_entry_type(EntryType::Regular);
                header.set_size(size);
                builder.append_data(&mut header, &path, &mut entry)?;
            }
            EntryType::Directory => {
                header.set_entry_type(EntryType::Directory);
                header.set_size(0);
                builder.append_data(&mut header, &path, io::empty())?;
            }
            EntryType::Symlink => {
                // Where it points is resolved inside, by whoever follows it.
                let target = entry.link_name()?.ok_or_else(|| refuse("a symlink without a target"))?;
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, &path, &target)?;
            }
            EntryType::Link => {
                let target = entry.link_name()?.ok_or_else(|| refuse("a link without a target"))?;
                let target = inside(&target)?.ok_or_else(|| refuse("a link to the root"))?;
                header.set_entry_type(EntryType::Link);
                header.set_size(0);
                builder.append_link(&mut header, &path, &target)?;
            }
            // Nothing that a fork needs, and nothing that the engine should unpack as root.
            _ => {}
        }
    }
    builder.into_inner()?.flush()?;
    Ok(copied)
}

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

    fn entry(
        builder: &mut Builder<Vec<u8>>,
        kind: EntryType,
        name: &[u8],
        link: Option<&str>,
        mode: u32,
        data: &[u8],
    ) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(data.len() as u64);
        header.set_uid(0);
        // Written into the raw field: the library would refuse such names.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name);
        if let Some(link) = link {
            header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        }
        header.set_cksum();
        builder.append(&header, data).unwrap();
    }

    type Found = (String, EntryType, u32, Vec<u8>);

    fn clean(archive: Vec<u8>) -> io::Result<Vec<Found>> {
        let mut out = Vec::new();
        sanitise(archive.as_slice(), &mut out, 1000, 1001, 1 << 20)?;
        let mut found = Vec::new();
        for e in Archive::new(out.as_slice()).entries()? {
            let mut e = e?;
            assert_eq!((e.header().uid()?, e.header().gid()?), (1000, 1001));
            let name = e.path()?.display().to_string();
            let (kind, mode) = (e.header().entry_type(), e.header().mode()?);
            let mut data = Vec::new();
            e.read_to_end(&mut data)?;
            found.push((name, kind, mode, data));
        }
        Ok(found)
    }

    #[test]
    fn only_harmless_entries_come_through() {
        let mut b = Builder::new(Vec::new());
        entry(&mut b, EntryType::Directory, b"./", None, 0o755, b"");
        entry(&mut b, EntryType::Directory, b"./d", None, 0o2755, b"");
        entry(&mut b, EntryType::Regular, b"./d/suid", None, 0o6755, b"x");
        entry(&mut b, EntryType::Char, b"./null", None, 0o666, b"");
        entry(&mut b, EntryType::Block, b"./sda", None, 0o666, b"");
        entry(&mut b, EntryType::Fifo, b"./fifo", None, 0o666, b"");
        entry(&mut b, EntryType::Symlink, b"./link", Some("/etc/shadow"), 0o777, b"");
        entry(&mut b, EntryType::Link, b"./hard", Some("./d/suid"), 0o644, b"");
        let found = clean(b.into_inner().unwrap()).unwrap();
        let names: Vec<_> = found.iter().map(|(n, k, m, ..)| (n.as_str(), *k, *m)).collect();
        assert_eq!(
            names,
            [
                ("d", EntryType::Directory, 0o755),
                ("d/suid", EntryType::Regular, 0o755),
                ("link", EntryType::Symlink, 0o777),
                ("hard", EntryType::Link, 0o644),
            ]
        );
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        for (kind, name, link) in [
            (EntryType::Regular, &b"../x"[..], None),
            (EntryType::Regular, b"/etc/x", None),
            (EntryType::Regular, b"a/../../x", None),
            (EntryType::Link, b"hard", Some("/etc/shadow")),
            (EntryType::Link, b"hard", Some("../x")),
            (EntryType::Link, b"hard", Some(".")),
        ] {
            let mut b = Builder::new(Vec::new());
            entry(&mut b, kind, name, link, 0o644, b"");
            assert!(clean(b.into_inner().unwrap()).is_err(), "{name:?} {link:?}");
        }
    }

    #[test]
    fn size_is_bounded_and_rubbish_refused() {
        let mut b = Builder::new(Vec::new());
        entry(&mut b, EntryType::Regular, b"big", None, 0o644, &vec![0; (1 << 20) + 1]);
        assert!(clean(b.into_inner().unwrap()).is_err());
        assert!(clean(vec![7; 4096]).is_err());
        let mut b = Builder::new(Vec::new());
        entry(&mut b, EntryType::Regular, b"a", None, 0o644, &[1; 600]);
        let whole = b.into_inner().unwrap();
        assert!(clean(whole[..700].to_vec()).is_err(), "cut off in the middle");
    }

    #[test]
    fn long_and_odd_names_survive() {
        let long = format!("{}/{}", "d".repeat(200), "ä\n-x".repeat(40));
        let mut b = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_size(2);
        header.set_mode(0o600);
        header.set_entry_type(EntryType::Regular);
        b.append_data(&mut header, &long, &b"hi"[..]).unwrap();
        let found = clean(b.into_inner().unwrap()).unwrap();
        assert_eq!(found[0].0, long);
        assert_eq!(found[0].3, b"hi");
    }

    #[test]
    fn one_file_is_found() {
        let mut parts = Parts::new();
        parts.dir("etc", 0, 0, 0o755).unwrap();
        parts.file("etc/passwd", b"root", 0o644).unwrap();
        assert_eq!(single_file(&parts.finish().unwrap(), 100).unwrap(), b"root");
    }
}
