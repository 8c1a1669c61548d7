//! Images from archives, which are hostile: one may say that it is an image that somebody relies on, and an engine that is given
//! it as it stands takes its word. So the engine gets another archive, which holds the same image and no name.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use bollard::Docker;
use bollard::query_parameters::ImportImageOptionsBuilder;
use futures::StreamExt;
use serde_json::json;
use tar::{Builder, Header};
use tokio_util::io::{ReaderStream, SyncIoBridge};

use super::engine::translate;
use crate::local::image::source::{self, Archive};
use crate::{ErrorKind, Result, SandboxError};

/// What the engine says before the id of an image that has no name.
const LOADED: &str = "Loaded image ID: ";
/// Between the reader of the archive and the engine.
const BUFFER: usize = 256 << 10;

/// Has the engine load it; returns the image's id.
pub async fn archive(docker: &Docker, path: &Path) -> Result<String> {
    let what = format!("image archive {}", path.display());
    let invalid = |e: String| SandboxError::new(ErrorKind::Invalid, format!("{what}: {e}"));
    let from = path.to_path_buf();
    let ended = |e: tokio::task::JoinError| SandboxError::new(ErrorKind::Unavailable, e.to_string());
    let archive = tokio::task::spawn_blocking(move || source::members(&from)).await.map_err(ended)??;
    let (near, far) = tokio::io::duplex(BUFFER);
    let writing = tokio::task::spawn_blocking(move || {
        write(&archive, BufWriter::with_capacity(BUFFER, SyncIoBridge::new(near)))
    });
    let options = ImportImageOptionsBuilder::default().quiet(true).build();
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

/// As `docker save` makes one of an image that has no name.
fn write(archive: &Archive, to: impl Write) -> io::Result<()> {
    let mut tar = Builder::new(to);
    let mut add = |name: &str, size: u64, data: &mut dyn io::Read| {
        let mut header = Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, data)
    };
    let mut layers = Vec::new();
    for (number, layer) in archive.layers.iter().enumerate() {
        let name = format!("{number}.tar");
        add(&name, layer.length, &mut layer.open()?)?;
        layers.push(name);
    }
    let manifest = json!([{ "Config": "config.json", "RepoTags": null, "Layers": layers }]).to_string();
    for (name, data) in [("config.json", archive.config.as_slice()), ("manifest.json", manifest.as_bytes())] {
        add(name, data.len() as u64, &mut &*data)?;
    }
    tar.into_inner()?.flush()
}
