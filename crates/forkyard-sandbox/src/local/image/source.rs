//! Where an image lies on this machine: an OCI layout, or an archive as `docker save` makes it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Take};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, de::DeserializeOwned};

use super::{refused, zstd};
use crate::local::state::io_error;
use crate::{ErrorKind, Result, SandboxError};

/// Of a manifest, index or configuration.
pub const MAX_JSON: u64 = 4 << 20;
pub const MAX_LAYERS: usize = 256;
/// An index may lead to another one; more than this is no image that anybody built.
pub const MAX_INDEX_DEPTH: usize = 4;
/// Members of an archive, which are few large files.
const MAX_MEMBERS: usize = 100_000;

/// Bytes of a layer, compressed or not.
#[derive(Debug, Clone)]
pub struct Blob {
    pub path: PathBuf,
    pub offset: u64,
    pub length: u64,
    /// Of these bytes, where their source names it.
    pub digest: Option<Digest>,
}

impl Blob {
    pub fn open(&self) -> std::io::Result<Take<File>> {
        let mut file = open_file(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        Ok(file.take(self.length))
    }
}

#[derive(Debug)]
pub struct Image {
    /// Lowest first, like `config.rootfs.diff_ids`.
    pub layers: Vec<Blob>,
    pub config: Config,
}

/// `sha256:` and 64 lowercase hexadecimal digits: safe as a file name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

impl Digest {
    pub fn hex(&self) -> &str {
        &self.0
    }

    pub fn of_hash(hash: &[u8]) -> Digest {
        Digest(hash.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl TryFrom<String> for Digest {
    type Error = String;
    fn try_from(text: String) -> std::result::Result<Digest, String> {
        match text.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) => {
                Ok(Digest(hex.into()))
            }
            _ => Err("not a sha256 digest".into()),
        }
    }
}

#[derive(Debug, Deserialize)]
pub struct Config {
    #[serde(default)]
    pub config: Option<Process>,
    pub rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Process {
    #[serde(default)]
    pub env: Option<Vec<String>>,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct RootFs {
    pub diff_ids: Vec<Digest>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Descriptor {
    pub digest: Digest,
    #[serde(default)]
    pub size: u64,
    #[serde(default)]
    pub platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
}

/// An index or a manifest: which of them is said by what it holds.
#[derive(Debug, Deserialize)]
pub struct Manifest {
    #[serde(default)]
    pub manifests: Vec<Descriptor>,
    #[serde(default)]
    pub config: Option<Descriptor>,
    #[serde(default)]
    pub layers: Vec<Descriptor>,
}

/// As images spell it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The manifest of an index that fits this machine.
pub fn choose(index: &Manifest) -> Result<&Descriptor> {
    let fits = |d: &&Descriptor| {
        d.platform.as_ref().is_some_and(|p| p.os == "linux" && p.architecture == architecture())
    };
    let bare = |d: &&Descriptor| d.platform.is_none();
    index.manifests.iter().find(fits).or_else(|| index.manifests.iter().find(bare)).ok_or_else(|| {
        SandboxError::new(
            ErrorKind::Unsupported,
            format!("image: none of it is for linux/{}", architecture()),
        )
    })
}

pub fn parse<T: DeserializeOwned>(what: &str, data: &[u8]) -> Result<T> {
    serde_json::from_slice(data).map_err(|e| refused(format!("{what}: {e}")))
}

pub fn checked(image: Image) -> Result<Image> {
    let (layers, ids) = (image.layers.len(), image.config.rootfs.diff_ids.len());
    if layers != ids || !(1..=MAX_LAYERS).contains(&layers) {
        return Err(refused(format!("{layers} layers, of which its configuration knows {ids}")));
    }
    Ok(image)
}

fn read_small(path: &Path) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    let file = open_file(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            SandboxError::new(ErrorKind::NotFound, format!("image: {}: {e}", path.display()))
        }
        _ => io_error(path, &e),
    })?;
    file.take(MAX_JSON + 1).read_to_end(&mut data).map_err(|e| io_error(path, &e))?;
    if data.len() as u64 > MAX_JSON {
        return Err(refused(format!("{} is too large", path.display())));
    }
    Ok(data)
}

/// The manifest that an OCI layout leads to, which is what a second look at the same image has to find again.
pub fn layout_digest(dir: &Path) -> Result<Digest> {
    let mut index: Manifest = parse("index.json", &read_small(&dir.join("index.json"))?)?;
    for _ in 0..MAX_INDEX_DEPTH {
        let digest = choose(&index)?.digest.clone();
        let next: Manifest = parse("manifest", &verified(dir, &digest)?)?;
        if next.config.is_some() {
            return Ok(digest);
        }
        index = next;
    }
    Err(refused("its index leads nowhere".into()))
}

fn verified(dir: &Path, digest: &Digest) -> Result<Vec<u8>> {
    let data = read_small(&dir.join("blobs/sha256").join(digest.hex()))?;
    match super::hash(&data) == *digest {
        true => Ok(data),
        false => Err(refused(format!("{} does not have its digest", digest.hex()))),
    }
}

pub fn layout(dir: &Path) -> Result<Image> {
    let manifest: Manifest = parse("manifest", &verified(dir, &layout_digest(dir)?)?)?;
    let config = manifest.config.ok_or_else(|| refused("it has no configuration".into()))?;
    let blob = |layer: &Descriptor| {
        let path = dir.join("blobs/sha256").join(layer.digest.hex());
        let length = path.metadata().map_err(|e| refused(format!("a layer is missing: {e}")))?.len();
        Ok(Blob { path, offset: 0, length, digest: Some(layer.digest.clone()) })
    };
    let layers = manifest.layers.iter().map(blob).collect::<Result<_>>()?;
    checked(Image { layers, config: parse("configuration", &verified(dir, &config.digest)?)? })
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    layers: Vec<String>,
}

/// Somebody else may have made it: anything but a file could keep who opens or reads it waiting for ever.
fn open_file(path: &Path) -> std::io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::Error::other("it is not a file")),
    }
}

/// Enough of a file to tell how it is compressed.
const MAGIC: u64 = 4;

/// The program for what begins so.
fn undone_by(first: &[u8]) -> Option<&'static str> {
    match first {
        [0x1f, 0x8b, ..] => Some("gunzip"),
        [b'B', b'Z', b'h', ..] => Some("bunzip2"),
        [0xfd, b'7', b'z', b'X'] => Some("unxz"),
        first if zstd::is_zstd(first) => Some("unzstd"),
        _ => None,
    }
}

/// What `docker save` wrote of one image.
pub struct Archive {
    /// As it stands there.
    pub config: Vec<u8>,
    /// Lowest first.
    pub layers: Vec<Blob>,
}

pub fn archive(path: &Path) -> Result<Image> {
    let Archive { config, layers } = members(path)?;
    checked(Image { layers, config: parse("configuration", &config)? })
}

pub fn members(path: &Path) -> Result<Archive> {
    let file = open_file(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            SandboxError::new(ErrorKind::NotFound, format!("image: {}: {e}", path.display()))
        }
        _ => io_error(path, &e),
    })?;
    let in_all = file.metadata().map_err(|e| io_error(path, &e))?.len();
    let mut first = Vec::new();
    (&file)
        .take(MAGIC)
        .read_to_end(&mut first)
        .and_then(|_| (&file).rewind())
        .map_err(|e| io_error(path, &e))?;
    // What is no archive is told without what is in it: an error of its reader holds parts of that.
    let damaged = || match undone_by(&first) {
        Some(program) => refused(format!("{} is compressed", path.display()))
            .hint(format!("uncompress it first: {program} < FILE > image.tar")),
        None => refused(format!("{} is no archive, or not all of one", path.display()))
            .hint("make it with docker save"),
    };
    let broken = |e: std::io::Error| match e.raw_os_error() {
        Some(_) => io_error(path, &e),
        None => damaged(),
    };
    // Where each member lies; links stand for what they name.
    let (mut members, mut links) = (BTreeMap::new(), BTreeMap::new());
    let mut tar = tar::Archive::new(file);
    // As they stand: what extends the next one's name could be as long as memory.
    for entry in tar.entries_with_seek().map_err(broken)?.raw(true) {
        let entry = entry.map_err(broken)?;
        // Going on to the next one may lead beyond the end, where there is none: the last may claim what is not there.
        if entry.raw_file_position().checked_add(entry.size()).is_none_or(|end| end > in_all) {
            return Err(damaged());
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_string();
        if entry.header().entry_type().is_file() {
            members.insert(name, (entry.raw_file_position(), entry.size()));
        } else if let Some(target) = entry.link_name_bytes() {
            // Older versions link a layer that two images share as `../ID/layer.tar`.
            let target = String::from_utf8_lossy(&target).trim_start_matches("../").to_string();
            links.insert(name, target);
        }
        if members.len() + links.len() > MAX_MEMBERS {
            return Err(refused("it has too many members".into()));
        }
    }
    let find = |name: &str| {
        let place = members.get(name).or_else(|| members.get(links.get(name)?));
        place.copied().ok_or_else(|| refused(format!("{name} is not in it")).hint("make it with docker save"))
    };
    let read = |name: &str| -> Result<Vec<u8>> {
        let (offset, length) = find(name)?;
        if length > MAX_JSON {
            return Err(refused(format!("{name} is too large")));
        }
        let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
        let file = open_file(path).map_err(broken)?;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut data, offset).map_err(broken)?;
        Ok(data)
    };
    let saved: Vec<Saved> = parse("manifest.json", &read("manifest.json")?)?;
    let [saved] = saved.as_slice() else {
        return Err(refused(format!("{} images are in it", saved.len())).hint("save one image by itself"));
    };
    let blob = |name: &String| {
        let (offset, length) = find(name)?;
        Ok(Blob { path: path.into(), offset, length, digest: None })
    };
    if saved.layers.len() > MAX_LAYERS {
        return Err(refused(format!("it has {} layers, at most {MAX_LAYERS} are taken", saved.layers.len())));
    }
    let layers = saved.layers.iter().map(blob).collect::<Result<_>>()?;
    Ok(Archive { config: read(&saved.config)?, layers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_and_names_without_end_are_refused_at_once() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("index.json");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(archive(&fifo).is_err());
        assert!(layout_digest(dir.path()).is_err());

        // What would be the next member's name is larger than memory, and a hole.
        let path = dir.path().join("image.tar");
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_path("././@LongLink").unwrap();
        header.set_size(1 << 40);
        header.set_cksum();
        std::fs::write(&path, header.as_bytes()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len((1 << 40) + (1 << 20)).unwrap();
        assert!(archive(&path).unwrap_err().message.contains("manifest.json"));
    }

    #[test]
    fn what_is_not_there_is_no_part_of_a_member() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        let mut header = tar::Header::new_gnu();
        header.set_path("layer.tar").unwrap();
        header.set_size(512);
        header.set_cksum();
        let mut data = header.as_bytes().to_vec();
        data.extend([0; 511]);
        std::fs::write(&path, &data).unwrap();
        assert!(archive(&path).unwrap_err().message.contains("not all of one"));
        data.push(0);
        std::fs::write(&path, &data).unwrap();
        assert!(archive(&path).unwrap_err().message.contains("manifest.json"));
        header.set_size(u64::MAX);
        header.set_cksum();
        std::fs::write(&path, header.as_bytes()).unwrap();
        assert!(archive(&path).unwrap_err().message.contains("not all of one"));
    }

    #[test]
    fn a_compressed_archive_is_known_by_its_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        for (first, program) in [
            (b"\x1f\x8b\x08\0".as_slice(), Some("gunzip")),
            (b"BZh9", Some("bunzip2")),
            (b"\xfd7zX", Some("unxz")),
            (b"\x28\xb5\x2f\xfd", Some("unzstd")),
            (b"none", None),
        ] {
            std::fs::write(&path, [first, &[7; 2000]].concat()).unwrap();
            let error = archive(&path).unwrap_err();
            assert!(error.hint.unwrap().contains(program.unwrap_or("docker save")), "{first:?}");
        }
    }
}
