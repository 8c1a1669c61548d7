//! The archive that the kernel unpacks at boot: the `newc` form of cpio, written here so that everything in it belongs to root
//! whoever makes it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
/// The format counts in 32 bits.
const MAX_FILE: usize = u32::MAX as usize;

enum Node {
    Dir,
    File { from: PathBuf, mode: u32 },
    Text { text: String, mode: u32 },
    Link { to: String },
}

/// A tree of files by path, without a leading slash. Folders on the way are made.
#[derive(Default)]
pub struct Archive {
    nodes: BTreeMap<String, Node>,
}

impl Archive {
    fn put(&mut self, path: &str, node: Node) {
        let path = path.trim_start_matches('/');
        let parents = path.match_indices('/').map(|(at, _)| &path[..at]);
        for parent in parents {
            self.nodes.entry(parent.to_string()).or_insert(Node::Dir);
        }
        self.nodes.insert(path.to_string(), node);
    }

    pub fn dir(&mut self, path: &str) {
        self.put(path, Node::Dir);
    }

    /// The file that `from` leads to, with its mode.
    pub fn file(&mut self, path: &str, from: &Path) -> io::Result<()> {
        let mode = fs::metadata(from)?.permissions().mode() & 0o7777;
        self.put(path, Node::File { from: from.into(), mode });
        Ok(())
    }

    pub fn text(&mut self, path: &str, mode: u32, text: &str) {
        self.put(path, Node::Text { text: text.into(), mode });
    }

    pub fn link(&mut self, path: &str, to: &str) {
        self.put(path, Node::Link { to: to.into() });
    }

    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        for (inode, (path, node)) in self.nodes.iter().enumerate() {
            let inode = inode as u32 + 1;
            match node {
                Node::Dir => entry(to, inode, DIR | 0o755, path, &[])?,
                Node::File { from, mode } => entry(to, inode, FILE | mode, path, &fs::read(from)?)?,
                Node::Text { text, mode } => entry(to, inode, FILE | mode, path, text.as_bytes())?,
                Node::Link { to: target } => entry(to, inode, LINK | 0o777, path, target.as_bytes())?,
            }
        }
        entry(to, 0, 0, "TRAILER!!!", &[])
    }
}

fn entry(to: &mut impl Write, inode: u32, mode: u32, path: &str, data: &[u8]) -> io::Result<()> {
    if data.len() > MAX_FILE {
        return Err(io::Error::other(format!("{path}: too large for the archive")));
    }
    let (uid, gid, links, time, device) = (0, 0, 1, 0, 0);
    let name = path.len() + 1;
    let fields = [
        inode,
        mode,
        uid,
        gid,
        links,
        time,
        data.len() as u32,
        device,
        device,
        device,
        device,
        name as u32,
        0,
    ];
    let mut head = String::from("070701");
    for field in fields {
        head.push_str(&format!("{field:08X}"));
    }
    to.write_all(head.as_bytes())?;
    to.write_all(path.as_bytes())?;
    to.write_all(&[0])?;
    pad(to, head.len() + name)?;
    to.write_all(data)?;
    pad(to, data.len())
}

/// Names and contents end at multiples of four.
fn pad(to: &mut impl Write, length: usize) -> io::Result<()> {
    to.write_all(&[0; 3][..length.wrapping_neg() % 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_folders_come_first() {
        let mut archive = Archive::default();
        archive.text("/a/b/c", 0o755, "hello");
        archive.link("a/l", "b/c");
        let mut bytes = Vec::new();
        archive.write(&mut bytes).unwrap();
        let (mut at, mut seen) = (0, Vec::new());
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701", "at {at}");
            let field = |i: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * i..at + 14 + 8 * i]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6), field(11));
            let path = std::str::from_utf8(&bytes[at + 110..at + 110 + name - 1]).unwrap();
            let data = (at + 110 + name).next_multiple_of(4);
            if path == "TRAILER!!!" {
                break;
            }
            seen.push((path.to_string(), mode, bytes[data..data + size].to_vec()));
            at = (data + size).next_multiple_of(4);
        }
        let want = [
            ("a", 0o040755, &b""[..]),
            ("a/b", 0o040755, b""),
            ("a/b/c", 0o100755, b"hello"),
            ("a/l", 0o120777, b"b/c"),
        ];
        assert_eq!(seen, want.map(|(p, m, d)| (p.to_string(), m, d.to_vec())));
    }
}
