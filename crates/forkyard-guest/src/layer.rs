//! A folder as a stream of frames: what snapshots are kept and exported as. Holes stay holes.
//!
//! The stream is hostile input: names are single components, so that no entry can reach outside of where it is unpacked;
//! setuid bits, devices and overlayfs' own attributes do not exist in it.

use std::collections::HashSet;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::protocol::{MAX_CHUNK, PREFIX, decode_prefix, encode};
use crate::zygote::UnpackLimits;

/// One frame; the body is the name of the entry, or bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "k", rename_all = "snake_case", deny_unknown_fields)]
pub enum Entry {
    /// Enters a new directory.
    Dir {
        mode: u32,
        opaque: bool,
    },
    /// Back to its parent.
    Up {
        mtime_ns: i64,
    },
    File {
        mode: u32,
        size: u64,
        mtime_ns: i64,
        number: Option<u64>,
    },
    Data {
        at: u64,
    },
    /// Another name of the file with this number.
    Hard {
        number: u64,
    },
    /// The body is `name NUL target`.
    Symlink {
        mtime_ns: i64,
    },
    Fifo {
        mode: u32,
    },
    Whiteout,
    End,
}

/// Deeper trees are not what people build.
pub const MAX_DEPTH: usize = 2048;
pub const MAX_NAME: usize = 255;
pub const MAX_FRAME: usize = MAX_CHUNK + 8192;
/// What a directory or an empty file costs, counted as bytes so that a flood of them meets the bound.
pub const ENTRY_COST: u64 = 512;

/// Whether bytes can be the name of one entry of a directory.
pub fn is_name(name: &[u8]) -> bool {
    let long = name.is_empty() || name.len() > MAX_NAME;
    !long && name != b"." && name != b".." && !name.iter().any(|byte| [b'/', 0].contains(byte))
}

/// Reads one frame.
pub fn read_frame(from: &mut impl Read) -> io::Result<(Entry, Vec<u8>)> {
    let broken = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut prefix = [0; PREFIX];
    from.read_exact(&mut prefix)?;
    let (length, head) = decode_prefix(prefix, MAX_FRAME).map_err(|e| broken(e.to_string()))?;
    let mut frame = vec![0; length];
    from.read_exact(&mut frame)?;
    let entry = serde_json::from_slice(&frame[..head]).map_err(|e| broken(e.to_string()))?;
    Ok((entry, frame.split_off(head)))
}

/// Copies one stream, a folder's that no overlay was under, and refuses whatever could not be unpacked. Not a byte beyond its
/// end is read. Answers with the bytes of its files.
pub fn copy_checked(from: &mut impl Read, to: &mut impl Write, limits: UnpackLimits) -> io::Result<u64> {
    let broken = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
    let over = |what: &str| broken(&format!("it holds more than the bound on {what}"));
    let (mut depth, mut entries, mut spent, mut bytes) = (0usize, 0u64, 0u64, 0u64);
    let mut numbers = HashSet::new();
    let mut open_file: Option<u64> = None;
    loop {
        let (entry, body) = read_frame(from)?;
        if !matches!(entry, Entry::Data { .. } | Entry::Up { .. } | Entry::End) {
            entries += 1;
            spent += ENTRY_COST;
            let name = match entry {
                Entry::Symlink { .. } => body.split(|b| *b == 0).next().unwrap_or_default(),
                _ => &body[..],
            };
            if !is_name(name) {
                return Err(broken("a name is not one"));
            }
        }
        let file = match &entry {
            Entry::Data { at } => {
                let size = open_file.ok_or_else(|| broken("bytes without a file"))?;
                if at.saturating_add(body.len() as u64) > size {
                    return Err(broken("a file is longer than it says"));
                }
                (spent, bytes) = (spent + body.len() as u64, bytes + body.len() as u64);
                Some(size)
            }
            Entry::Dir { opaque: false, .. } if depth < MAX_DEPTH => {
                depth += 1;
                None
            }
            Entry::Up { .. } if depth > 0 => {
                depth -= 1;
                None
            }
            Entry::File { size, number, .. } => {
                numbers.extend(*number);
                Some(*size)
            }
            Entry::Hard { number } if numbers.contains(number) => None,
            Entry::Symlink { .. } if body.iter().filter(|b| **b == 0).count() == 1 => None,
            Entry::Fifo { .. } => None,
            Entry::End if depth == 0 => {
                to.write_all(&encode(&entry, &body))?;
                return Ok(bytes);
            }
            Entry::Dir { .. } => return Err(broken("a folder is too deep or hides what is below it")),
            Entry::Up { .. } => return Err(broken("it leaves its own root")),
            Entry::Hard { .. } => return Err(broken("a link to nothing")),
            Entry::Symlink { .. } => return Err(broken("a symlink to nothing")),
            Entry::Whiteout => return Err(broken("a whiteout")),
            Entry::End => return Err(broken("a directory is not closed")),
        };
        open_file = file;
        if spent > limits.bytes {
            return Err(over("bytes"));
        }
        if entries > limits.entries {
            return Err(over("entries"));
        }
        to.write_all(&encode(&entry, &body))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: UnpackLimits = UnpackLimits { bytes: 1 << 20, entries: 100 };

    fn check(frames: &[(Entry, &[u8])]) -> io::Result<u64> {
        let stream: Vec<u8> = frames.iter().flat_map(|(entry, body)| encode(entry, body)).collect();
        let mut copy = Vec::new();
        let bytes = copy_checked(&mut stream.as_slice(), &mut copy, LIMITS)?;
        assert_eq!(copy, stream);
        Ok(bytes)
    }

    fn file(size: u64) -> Entry {
        Entry::File { mode: 0o644, size, mtime_ns: 0, number: Some(1) }
    }

    #[test]
    fn a_sound_stream_passes_unchanged() {
        let frames: &[(Entry, &[u8])] = &[
            (Entry::Dir { mode: 0o755, opaque: false }, b"d"),
            (file(1 << 40), b"sparse"),
            (Entry::Data { at: 1 << 39 }, b"abc"),
            (Entry::Hard { number: 1 }, b"again"),
            (Entry::Up { mtime_ns: 0 }, b""),
            (Entry::Symlink { mtime_ns: 0 }, b"l\0/etc/passwd"),
            (Entry::Fifo { mode: 0o600 }, b"pipe"),
            (Entry::End, b""),
        ];
        assert_eq!(check(frames).unwrap(), 3);
    }

    #[test]
    fn hostile_streams_are_refused() {
        let dir = || Entry::Dir { mode: 0o755, opaque: false };
        let table: &[&[(Entry, &[u8])]] = &[
            &[(file(1), b"../x"), (Entry::End, b"")],
            &[(file(1), b"/etc/x"), (Entry::End, b"")],
            &[(file(1), b".."), (Entry::End, b"")],
            &[(file(1), b"a\0b"), (Entry::End, b"")],
            &[(file(1), &[b'x'; 256]), (Entry::End, b"")],
            &[(file(1), b"f"), (Entry::Data { at: 1 }, b"x"), (Entry::End, b"")],
            &[(file(1), b"f"), (Entry::Data { at: u64::MAX }, b"x"), (Entry::End, b"")],
            &[(Entry::Data { at: 0 }, b"x"), (Entry::End, b"")],
            &[(dir(), b"d"), (Entry::End, b"")],
            &[(Entry::Up { mtime_ns: 0 }, b""), (Entry::End, b"")],
            &[
                (Entry::Dir { mode: 0o755, opaque: true }, b"d"),
                (Entry::Up { mtime_ns: 0 }, b""),
                (Entry::End, b""),
            ],
            &[(Entry::Whiteout, b"w"), (Entry::End, b"")],
            &[(Entry::Hard { number: 7 }, b"h"), (Entry::End, b"")],
            &[(Entry::Symlink { mtime_ns: 0 }, b"l"), (Entry::End, b"")],
            &[(file(1), b"f")],
        ];
        for frames in table {
            assert!(check(frames).is_err(), "{frames:?}");
        }
        let many: Vec<(Entry, &[u8])> = (0..101).map(|_| (Entry::Fifo { mode: 0 }, &b"p"[..])).collect();
        assert!(check(&many).is_err());
        assert!(copy_checked(&mut &b"rubbish that is no frame"[..], &mut Vec::new(), LIMITS).is_err());
    }
}
