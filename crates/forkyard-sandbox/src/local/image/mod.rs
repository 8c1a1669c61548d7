//! Images as roots: unpacked once into layers that all sandboxes share, no daemon involved.
//!
//! Everything in an image belongs to one unprivileged id, so its root is root over nothing but these files. What needs a second
//! id does not work inside: chown to others, setuid programs, package managers that drop privileges, services that insist on
//! a user of their own.

mod registry;
pub(crate) mod source;
mod user;
mod zstd;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use forkyard_core::SnapshotId;
use forkyard_guest::zygote::{UnpackLimits, Work};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use self::registry::Reference;
use self::source::{Blob, Digest, Image};
use super::Inner;
use super::snapshot::worked;
use super::state::{self, io_error};
use super::sync::sync_file_system;
use super::zygote::unavailable;
use crate::bounds::MAX_ENV_BYTES;
use crate::{ErrorKind, Result, SandboxError, UnusedImage, bytes_in};

/// Of an image as a whole, unpacked.
pub(crate) const LIMITS: UnpackLimits = UnpackLimits { bytes: 64 << 30, entries: 10_000_000 };
/// Sandboxes' own layers come on top, and lookups cost by depth: more than this become one.
const MAX_DEPTH: usize = 8;
const MAX_VARIABLES: usize = 256;
/// Of a name and its value.
const MAX_VARIABLE_BYTES: usize = 32 << 10;

/// An image that is unpacked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageMeta {
    format: u32,
    /// As the user wrote it.
    pub reference: String,
    /// Topmost first.
    pub layers: Vec<String>,
    pub config: ImageConfig,
}

/// What an image says of the commands in it. Its working directory and entry point are not used: commands are named, and start
/// in /workspace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    pub env: BTreeMap<String, String>,
    /// None: the image's root, in whose place is Forkyard's own user.
    pub user: Option<ImageUser>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageUser {
    pub id: u32,
    pub name: String,
    pub home: String,
}

fn is_variable(name: &str, value: &str) -> bool {
    !name.is_empty()
        && !name.contains(['=', '\0'])
        && !value.contains('\0')
        && name.len() + value.len() < MAX_VARIABLE_BYTES
}

impl ImageConfig {
    /// Whoever made the image or the archive wrote all of it: only what can be the environment and the user of a command passes.
    pub fn checked(self) -> std::result::Result<ImageConfig, String> {
        if self.env.len() > MAX_VARIABLES {
            return Err(format!("it has more than {MAX_VARIABLES} variables"));
        }
        if self.env.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > MAX_ENV_BYTES {
            return Err(format!("its variables have more than {} KiB", MAX_ENV_BYTES >> 10));
        }
        if let Some((name, _)) = self.env.iter().find(|(name, value)| !is_variable(name, value)) {
            let shown: String = name.chars().take(100).collect();
            return Err(format!("{shown:?} is not a variable that a command can have"));
        }
        if let Some(user) = &self.user {
            user.check()?;
        }
        Ok(self)
    }
}

fn refused(why: String) -> SandboxError {
    SandboxError::new(ErrorKind::Invalid, format!("the image is refused: {why}"))
}

fn hash(data: &[u8]) -> Digest {
    Digest::of_hash(&Sha256::digest(data))
}

enum Source {
    Layout(String),
    Archive(String),
    Registry(Reference),
}

impl Source {
    fn parse(reference: &str) -> Result<Source> {
        match reference.split_once(':') {
            Some(("oci", path)) => Ok(Source::Layout(path.into())),
            Some(("archive", path)) => Ok(Source::Archive(path.into())),
            _ => Reference::parse(reference).map(Source::Registry),
        }
    }

    /// What has to be the same for the image to be the same. A registry's tag is looked up once, as other tools do.
    fn key(&self, reference: &str) -> Result<String> {
        let version = match self {
            Source::Layout(path) => source::layout_digest(Path::new(path))?.hex().to_string(),
            Source::Archive(path) => {
                use std::os::unix::fs::MetadataExt;
                let meta = Path::new(path).metadata().map_err(|e| match e.kind() {
                    std::io::ErrorKind::NotFound => {
                        SandboxError::new(ErrorKind::NotFound, format!("image: {path}: {e}"))
                    }
                    _ => io_error(Path::new(path), &e),
                })?;
                format!("{}.{}.{}.{}", meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
            }
            Source::Registry(_) => String::new(),
        };
        Ok(hash(format!("{reference}\0{version}").as_bytes()).hex()[..40].to_string())
    }
}

impl Inner {
    /// The image's layers, unpacked now if they are not there.
    pub(super) async fn image(self: &Arc<Self>, reference: &str) -> Result<ImageMeta> {
        let from = Source::parse(reference)?;
        let key = from.key(reference)?;
        let path = self.state.root.join("images").join(format!("{key}.json"));
        let _lock = self.state.lock(&format!("image.{key}")).await?;
        if let Some(known) = state::load::<ImageMeta>(&path)? {
            // For `unused_images`, which takes one away too early at worst.
            let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            return Ok(known);
        }
        // Downloads live as long as the unpacking.
        let downloads = tempfile::Builder::new()
            .prefix(&format!("{key}{}", state::PART))
            .tempdir_in(self.state.root.join("images"))
            .map_err(|e| io_error(&self.state.root, &e))?;
        let image = match from {
            Source::Layout(path) => blocking(move || source::layout(Path::new(&path))).await?,
            Source::Archive(path) => blocking(move || source::archive(Path::new(&path))).await?,
            Source::Registry(reference) => registry::fetch(&reference, downloads.path()).await?,
        };
        let user = format!("image.{key}");
        let mut layers = Vec::new();
        let unpacked = self.unpack_all(&image, &user, &mut layers).await;
        layers.reverse();
        let config = image.config.config.unwrap_or_default();
        let inside = unpacked.and_then(|()| match config.user.as_deref().unwrap_or_default() {
            "" => Ok(None),
            named => user::resolve(named, &self.passwd(&layers)),
        });
        let checked = inside.and_then(|inside| {
            let env = config.env.unwrap_or_default();
            let pair = |text: &String| {
                text.split_once('=').map(|(name, value)| (name.to_string(), value.to_string()))
            };
            let usable = |(name, value): &(String, String)| is_variable(name, value);
            // Builders write what they like: variables that nothing can use are left out.
            let env = env.iter().filter_map(pair).filter(usable).take(MAX_VARIABLES).collect();
            ImageConfig { env, user: inside }.checked().map_err(refused)
        });
        if checked.is_err() {
            for layer in &layers {
                self.drop_layer(layer, &user)?;
            }
        }
        let config = checked?;
        let meta = ImageMeta { format: state::format(), reference: reference.into(), layers, config };
        // Once for each image, and after seconds of unpacking: a machine that stops leaves all of it or no record.
        let all = self.state.root.join("layers");
        blocking(move || sync_file_system(&all)).await?;
        state::save(&path, &meta)?;
        let records = self.state.root.join("images");
        blocking(move || sync_file_system(&records)).await?;
        Ok(meta)
    }

    /// Puts the names of the layers into `layers`, lowest first; each has `user` as a user then.
    async fn unpack_all(self: &Arc<Self>, image: &Image, user: &str, layers: &mut Vec<String>) -> Result<()> {
        let mut left = LIMITS;
        for (blob, id) in image.layers.iter().zip(&image.config.rootfs.diff_ids) {
            let name = format!("image{}", &id.hex()[..40]);
            let _lock = self.state.lock(&format!("layer.{name}")).await?;
            if layers.contains(&name) || self.state.add_ref(&name, user)? {
                layers.push(name);
                continue;
            }
            let temporary = self.new_layer(user)?;
            let unpacked = self.unpack(blob, id, &temporary, left).await;
            let renamed = unpacked.and_then(|(bytes, entries)| {
                left.bytes = left.bytes.saturating_sub(bytes);
                left.entries = left.entries.saturating_sub(entries);
                let (from, to) = (self.state.layer(&temporary), self.state.layer(&name));
                std::fs::rename(&from, &to).map_err(|e| io_error(&to, &e))
            });
            if let Err(e) = renamed {
                self.drop_layer(&temporary, user)?;
                return Err(e);
            }
            layers.push(name);
        }
        if layers.len() > MAX_DEPTH {
            let merged = self.new_layer(user)?;
            let from = layers.iter().rev().map(|layer| format!("layers/{layer}/fs")).collect();
            let old = std::mem::replace(layers, vec![merged.clone()]);
            let work = Work::Merge { layers: from, to: format!("layers/{merged}/fs") };
            let done = self.zygote().await?.work(work, Vec::new()).await.and_then(worked);
            for layer in &old {
                self.drop_layer(layer, user)?;
            }
            done?;
        }
        Ok(())
    }

    async fn unpack(
        &self,
        blob: &Blob,
        id: &Digest,
        layer: &str,
        limits: UnpackLimits,
    ) -> Result<(u64, u64)> {
        let (reader, writer) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(unavailable)?;
        let (blob, want) = (blob.clone(), id.clone());
        let feeding = tokio::task::spawn_blocking(move || feed(&blob, &want, writer, limits.bytes));
        let work = Work::UnpackImage { layer: format!("layers/{layer}/fs"), limits };
        let done = self.zygote().await?.work(work, vec![reader]).await.and_then(worked);
        let fed = feeding.await.map_err(unavailable)?;
        // Whoever refuses the stream stops reading it: that is the reason then, not the broken pipe.
        let done = done?;
        fed.map(|()| done)
    }

    pub(super) fn images(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in state::names(&self.state.root.join("images"))? {
            if name.ends_with(".json") {
                let meta: Option<ImageMeta> = state::load(&self.state.root.join("images").join(name))?;
                found.extend(meta.map(|meta| meta.reference));
            }
        }
        found.sort();
        found.dedup();
        Ok(found)
    }

    /// Sandboxes and snapshots that use it keep its layers.
    pub(super) async fn remove_image(self: &Arc<Self>, reference: &str) -> Result<()> {
        for name in state::names(&self.state.root.join("images"))? {
            let Some(key) = name.strip_suffix(".json") else { continue };
            let _lock = self.state.lock(&format!("image.{key}")).await?;
            let path = self.state.root.join("images").join(&name);
            let Some(meta) = state::load::<ImageMeta>(&path)?.filter(|meta| meta.reference == reference)
            else {
                continue;
            };
            self.forget_image(key, &meta)?;
        }
        Ok(())
    }

    /// The caller holds the lock of this image.
    fn forget_image(self: &Arc<Self>, key: &str, meta: &ImageMeta) -> Result<()> {
        let path = self.state.root.join("images").join(format!("{key}.json"));
        std::fs::remove_file(&path).map_err(|e| io_error(&path, &e))?;
        for layer in &meta.layers {
            self.drop_layer(layer, &format!("image.{key}"))?;
        }
        Ok(())
    }

    /// Those that no sandbox and no snapshot stands on; layers that another image has too stay with that one.
    pub(super) async fn unused_images(
        self: &Arc<Self>,
        age: Duration,
        without: &[SnapshotId],
        remove: bool,
    ) -> Result<Vec<UnusedImage>> {
        let mut without: Vec<String> = without.iter().map(|id| format!("snapshot.{id}")).collect();
        let mut unused = Vec::new();
        for name in state::names(&self.state.root.join("images"))? {
            let Some(key) = name.strip_suffix(".json") else { continue };
            let user = format!("image.{key}");
            // Somebody is about to use one whose lock is held.
            let Some(_lock) = self.state.try_lock(&user)? else { continue };
            let path = self.state.root.join("images").join(&name);
            let used = std::fs::metadata(&path).and_then(|file| file.modified());
            if !used.is_ok_and(|used| used.elapsed().is_ok_and(|since| since >= age)) {
                continue;
            }
            let Some(meta) = state::load::<ImageMeta>(&path)? else { continue };
            let mut own = Vec::new();
            let mut stood_on = false;
            for layer in &meta.layers {
                let mut users = state::names(&self.state.layer(layer).join("refs")).unwrap_or_default();
                users.retain(|user| !without.contains(user));
                stood_on |= users.iter().any(|user| !user.starts_with("image."));
                if users == [user.as_str()] {
                    own.push(self.state.layer(layer));
                }
            }
            if stood_on {
                continue;
            }
            let bytes = blocking(move || Ok(own.iter().map(|layer| bytes_in(layer)).sum())).await?;
            if remove {
                self.forget_image(key, &meta)?;
            }
            unused.push(UnusedImage { name: meta.reference, bytes });
            // For the next one it is gone, whether it went or would go.
            without.push(user);
        }
        Ok(unused)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(unavailable)?
}

/// Hashes what passes.
struct Hashed<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}

/// Uncompresses a layer into `to`, and says whether it was what it claimed to be.
fn feed(blob: &Blob, id: &Digest, to: OwnedFd, max: u64) -> Result<()> {
    let broken = |e: std::io::Error| refused(format!("a layer can't be read: {e}"));
    let mut magic = Vec::new();
    blob.open().and_then(|file| file.take(4).read_to_end(&mut magic)).map_err(broken)?;
    let raw = Hashed { inner: blob.open().map_err(broken)?, hash: Sha256::new() };
    let (raw, hash) = match magic.as_slice() {
        [0x1f, 0x8b, ..] => {
            let mut plain = Hashed { inner: flate2::read::MultiGzDecoder::new(raw), hash: Sha256::new() };
            pass(&mut plain, to, max)?;
            (plain.inner.into_inner(), plain.hash)
        }
        magic if zstd::is_zstd(magic) => {
            let frames = zstd::Frames::new(BufReader::new(raw));
            let mut plain = Hashed { inner: frames, hash: Sha256::new() };
            pass(&mut plain, to, max)?;
            (plain.inner.into_inner().into_inner(), plain.hash)
        }
        _ => {
            let mut plain = raw;
            pass(&mut plain, to, max)?;
            let hash = plain.hash.clone();
            (plain, hash)
        }
    };
    let mut raw = raw;
    std::io::copy(&mut raw, &mut std::io::sink()).map_err(broken)?;
    let is = |hash: Sha256, want: &Digest| Digest::of_hash(&hash.finalize()) == *want;
    if blob.digest.as_ref().is_some_and(|want| !is(raw.hash, want)) || !is(hash, id) {
        return Err(refused("a layer does not have its digest".into()));
    }
    Ok(())
}

fn pass(from: &mut impl Read, to: OwnedFd, max: u64) -> Result<()> {
    let (mut to, mut buffer, mut passed) = (File::from(to), vec![0; 128 << 10], 0_u64);
    loop {
        let n = from.read(&mut buffer).map_err(|e| refused(format!("a layer is damaged: {e}")))?;
        passed += n as u64;
        if n == 0 {
            return Ok(());
        }
        if passed > max {
            return Err(refused("it holds more than the bound on bytes".into()));
        }
        to.write_all(&buffer[..n]).map_err(|e| refused(format!("a layer was not taken: {e}")))?;
    }
}
