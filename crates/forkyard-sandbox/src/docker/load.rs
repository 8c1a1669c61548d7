//! Images from archives, which are hostile: one may say that it is an image that somebody relies on, and an engine that is given
//! it as it stands takes its word. So the engine gets another archive, which holds the same image and no name.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::time::Duration;

use bollard::Docker;
use bollard::query_parameters::ImportImageOptionsBuilder;
use futures::StreamExt;
use serde_json::json;
use tar::Header;
use tokio_util::io::{ReaderStream, SyncIoBridge};

use super::engine::translate;
use crate::local::image::LIMITS;
use crate::local::image::source::{self, Archive};
use crate::{ErrorKind, Result, SandboxError};

/// What the engine says before the id of an image that has no name.
const LOADED: &str = "Loaded image ID: ";
/// Between the reader of the archive and the engine.
const BUFFER: usize = 256 << 10;
/// Of the whole load: the engine says its first word after the last byte. It writes all of it twice, which at 20 MB a second is
/// this long for the largest image that is taken.
const LOAD_WITHIN: Duration = Duration::from_secs(2 * 3600);
/// Of an archive's members and their padding.
const BLOCK: u64 = 512;

/// Has the engine load it; returns the image's id.
pub async fn archive(docker: &Docker, path: &Path) -> Result<String> {
    let what = format!("image archive {}", path.display());
    let invalid = |e: String| SandboxError::new(ErrorKind::Invalid, format!("{what}: {e}"));
    let from = path.to_path_buf();
    let ended = |e: tokio::task::JoinError| SandboxError::new(ErrorKind::Unavailable, e.to_string());
    let archive = tokio::task::spawn_blocking(move || source::members(&from)).await.map_err(ended)??;
    if unpacked_at_least(&archive) > LIMITS.bytes {
        return Err(invalid(format!("its layers have more than {} GiB", LIMITS.bytes >> 30))
            .hint("use a smaller image: what is data can be shown with --volume"));
    }
    let (near, far) = tokio::io::duplex(BUFFER);
    let writing = tokio::task::spawn_blocking(move || {
        write(&archive, BufWriter::with_capacity(BUFFER, SyncIoBridge::new(near)))
    });
    let options = ImportImageOptionsBuilder::default().quiet(true).build();
    let docker = docker.clone().with_timeout(LOAD_WITHIN);
    let mut answers = Box::pin(docker.import_image_stream(options, ReaderStream::new(far), None));
    let (mut id, mut failed) = (None, None);
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(answer) => {
                let said = answer.stream.unwrap_or_default();
                id = said.lines().find_map(|line| line.strip_prefix(LOADED)).map(str::to_string).or(id);
            }
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    // Its end is known by now: whoever read it has read all of it, or is gone.
    drop(answers);
    match (writing.await.map_err(ended)?, failed, id) {
        // What the engine says of half an archive is not the reason.
        (Err(e), _, _) if e.kind() != io::ErrorKind::BrokenPipe => Err(invalid(e.to_string())),
        // An engine that had enough of it breaks the line, and says why.
        (Err(e), None, _) => Err(invalid(e.to_string())),
        (_, Some(e @ bollard::errors::Error::DockerResponseServerError { .. }), _) => {
            Err(invalid(e.to_string()))
        }
        (_, Some(e @ bollard::errors::Error::DockerStreamError { .. }), _) => Err(invalid(e.to_string())),
        (_, Some(e), _) => Err(translate(&what, &e)),
        (Ok(()), None, Some(id)) => Ok(id),
        (Ok(()), None, None) => Err(invalid("the engine found no image in it".into())),
    }
}

/// The engine unpacks a layer as often as it is named.
fn unpacked_at_least(archive: &Archive) -> u64 {
    archive.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.length))
}

/// As `docker save` makes one of an image that has no name. Nothing ends it that did not come to its end: what writes it is no
/// builder, which does that when it is dropped.
fn write(archive: &Archive, mut to: impl Write) -> io::Result<()> {
    let mut written: BTreeMap<(u64, u64), String> = BTreeMap::new();
    let mut layers = Vec::new();
    for layer in &archive.layers {
        let place = (layer.offset, layer.length);
        let name = match written.get(&place) {
            Some(name) => name.clone(),
            None => {
                let name = format!("{}.tar", written.len());
                add(&mut to, &name, layer.length, layer.open()?)?;
                written.insert(place, name.clone());
                name
            }
        };
        layers.push(name);
    }
    let manifest = json!([{ "Config": "config.json", "RepoTags": null, "Layers": layers }]).to_string();
    for (name, data) in [("config.json", archive.config.as_slice()), ("manifest.json", manifest.as_bytes())] {
        add(&mut to, name, data.len() as u64, data)?;
    }
    to.write_all(&[0; 2 * BLOCK as usize])?;
    to.flush()
}

/// With as many bytes as it says or none after them: what came next would be taken for the rest, and the content of what comes
/// after that for members of its own.
fn add(to: &mut impl Write, name: &str, length: u64, data: impl Read) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_path(name)?;
    header.set_size(length);
    header.set_mode(0o644);
    header.set_cksum();
    to.write_all(header.as_bytes())?;
    if io::copy(&mut data.take(length), to)? != length {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a layer ends before it should"));
    }
    to.write_all(&[0; BLOCK as usize][..(length.next_multiple_of(BLOCK) - length) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::image::source::Blob;

    fn of(path: &Path, layers: &[(u64, u64)]) -> Archive {
        let blob = |&(offset, length)| Blob { path: path.into(), offset, length, digest: None };
        Archive { config: b"{}".to_vec(), layers: layers.iter().map(blob).collect() }
    }

    #[test]
    fn a_layer_is_written_once_and_listed_as_often_as_it_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "onetwo").unwrap();
        let archive = of(file.path(), &[(3, 3), (0, 3), (3, 3)]);
        assert_eq!(unpacked_at_least(&archive), 9);
        assert_eq!(unpacked_at_least(&of(file.path(), &[(0, u64::MAX), (0, u64::MAX)])), u64::MAX);
        let mut made = Vec::new();
        write(&archive, &mut made).unwrap();
        let mut read = tar::Archive::new(made.as_slice());
        let members: Vec<(String, String)> = read
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let name = entry.path().unwrap().display().to_string();
                (name, io::read_to_string(&mut entry).unwrap())
            })
            .collect();
        let manifest = r#"[{"Config":"config.json","Layers":["0.tar","1.tar","0.tar"],"RepoTags":null}]"#;
        let expected =
            [("0.tar", "two"), ("1.tar", "one"), ("config.json", "{}"), ("manifest.json", manifest)];
        assert_eq!(members, expected.map(|(name, data)| (name.to_string(), data.to_string())));
    }

    /// It may shrink while it is read.
    #[test]
    fn nothing_follows_a_layer_that_ends_too_early() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "short").unwrap();
        let mut made = Vec::new();
        let refused = write(&of(file.path(), &[(0, 512), (0, 5)]), &mut made).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(made.len() as u64, BLOCK + 5);
    }
}
