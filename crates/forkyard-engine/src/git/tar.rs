//! Just enough of the tar format: files and links, with pax headers where a name is long.

/// Longest link target that Linux takes.
pub(crate) const MAX_LINK_BYTES: u64 = 4095;

const BLOCK: usize = 512;
/// Two blocks of zeros end an archive.
pub const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];
static ZEROS: [u8; BLOCK] = [0; BLOCK];

pub(crate) fn padding(size: u64) -> &'static [u8] {
    let over = (size % BLOCK as u64) as usize;
    if over == 0 { &[] } else { &ZEROS[over..] }
}

/// The header of a file; its content and [`padding`] follow.
pub(crate) fn file(path: &str, mode: u32, size: u64, mtime_s: u64) -> Vec<u8> {
    let mut out = extended(path.as_bytes(), &[], size, mtime_s);
    out.extend(header(path.as_bytes(), b'0', mode & 0o777, size, mtime_s, &[]));
    out
}

pub fn link(path: &str, target: &[u8], mtime_s: u64) -> Vec<u8> {
    let mut out = extended(path.as_bytes(), target, 0, mtime_s);
    out.extend(header(path.as_bytes(), b'2', 0o777, 0, mtime_s, target));
    out
}

/// A pax header for what does not fit into the plain one.
fn extended(path: &[u8], target: &[u8], size: u64, mtime_s: u64) -> Vec<u8> {
    let mut records = Vec::new();
    let mut add = |key: &str, value: &[u8]| {
        // `LENGTH KEY=VALUE\n`, where the length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        records.extend(format!("{length} {key}=").into_bytes());
        records.extend(value);
        records.push(b'\n');
    };
    if path.len() > 100 {
        add("path", path);
    }
    if target.len() > 100 {
        add("linkpath", target);
    }
    if size > 0o77_777_777_777 {
        add("size", size.to_string().as_bytes());
    }
    if records.is_empty() {
        return records;
    }
    let mut out = header(b"pax", b'x', 0o644, records.len() as u64, mtime_s, &[]).to_vec();
    let pad = padding(records.len() as u64);
    out.append(&mut records);
    out.extend(pad);
    out
}

fn header(path: &[u8], kind: u8, mode: u32, size: u64, mtime_s: u64, target: &[u8]) -> [u8; BLOCK] {
    let mut h = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8], max: usize| {
        let n = bytes.len().min(max);
        h[at..at + n].copy_from_slice(&bytes[..n]);
    };
    put(0, path, 100);
    put(100, format!("{mode:07o}").as_bytes(), 7);
    put(108, b"0000000", 7);
    put(116, b"0000000", 7);
    put(124, format!("{:011o}", size.min(0o77_777_777_777)).as_bytes(), 11);
    put(136, format!("{:011o}", mtime_s.min(0o77_777_777_777)).as_bytes(), 11);
    put(148, b"        ", 8);
    put(156, &[kind], 1);
    put(157, target, 100);
    put(257, b"ustar\x0000", 8);
    let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
    h[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    h
}
