//! Images from a registry, by the distribution protocol; without an account.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use reqwest::header::{ACCEPT, AUTHORIZATION, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt;

use super::source::{Blob, Descriptor, Digest, Image, MAX_INDEX_DEPTH, MAX_JSON, MAX_LAYERS, Manifest};
use super::source::{checked, choose, parse};
use super::{LIMITS, hash, refused};
use crate::local::state::io_error;
use crate::{ErrorKind, Result, SandboxError};

const DEFAULT_REGISTRY: &str = "registry-1.docker.io";
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two pieces of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Of a layer as it travels.
const MAX_BLOB: u64 = 16 << 30;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    registry: String,
    repository: String,
    /// A tag, or a digest with its `sha256:`.
    version: String,
}

impl Reference {
    pub fn parse(text: &str) -> Result<Reference> {
        let bad = |why: &str| {
            SandboxError::new(ErrorKind::Invalid, format!("{text:?} is not an image: {why}"))
                .hint("write NAME, NAME:TAG, HOST/NAME:TAG, NAME@sha256:…, oci:PATH or archive:PATH")
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                Digest::try_from(digest.to_string()).map_err(|e| bad(&e))?;
                (rest, Some(digest.to_string()))
            }
            None => (text, None),
        };
        let (registry, rest) = match rest.split_once('/') {
            Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => (host, rest),
            _ => ("docker.io", rest),
        };
        let (name, tag) = rest.rsplit_once(':').unwrap_or((rest, "latest"));
        let part = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
                && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        };
        if name.len() > 255 || !name.split('/').all(part) {
            return Err(bad("its name is of lowercase letters, digits, `.`, `_` and `-`"));
        }
        let word = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if !(1..=128).contains(&tag.len()) || !tag.bytes().all(word) {
            return Err(bad("its tag is of letters, digits, `.`, `_` and `-`"));
        }
        let port_is_one = match registry.rsplit_once(':') {
            Some((_, port)) if !port.ends_with(']') => port.parse::<u16>().is_ok(),
            Some(_) | None => true,
        };
        if !port_is_one || !registry.bytes().all(|b| word(b) || matches!(b, b':' | b'[' | b']')) {
            return Err(bad("its host is not one"));
        }
        let hub = matches!(registry, "docker.io" | "index.docker.io");
        Ok(Reference {
            registry: if hub { DEFAULT_REGISTRY } else { registry }.into(),
            repository: if hub && !name.contains('/') { format!("library/{name}") } else { name.into() },
            version: digest.unwrap_or_else(|| tag.into()),
        })
    }

    /// Only a registry of this machine may do without encryption.
    fn is_local(&self) -> bool {
        let host = self.registry.rsplit_once(':').map_or(self.registry.as_str(), |(host, _)| host);
        matches!(host, "localhost" | "127.0.0.1" | "[::1]")
    }
}

struct Registry<'a> {
    client: Client,
    reference: &'a Reference,
    token: Option<String>,
}

fn failed(e: &reqwest::Error) -> SandboxError {
    use std::error::Error;
    let reason = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
    SandboxError::new(ErrorKind::Unavailable, format!("image: the registry can't be reached: {reason}"))
}

impl Registry<'_> {
    async fn get(&mut self, path: &str) -> Result<Response> {
        let scheme = if self.reference.is_local() { "http" } else { "https" };
        let Reference { registry, repository, .. } = self.reference;
        let url = format!("{scheme}://{registry}/v2/{repository}/{path}");
        for last in [false, true] {
            let mut request = self.client.get(&url).header(ACCEPT, MANIFESTS);
            if let Some(token) = &self.token {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let answer = request.send().await.map_err(|e| failed(&e))?;
            let status = answer.status();
            match status {
                StatusCode::UNAUTHORIZED if !last => {
                    let challenge =
                        answer.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
                    self.token = Some(self.ask_token(challenge.unwrap_or_default()).await?);
                }
                status if status.is_success() => return Ok(answer),
                StatusCode::NOT_FOUND => {
                    let message =
                        format!("there is no image {registry}/{repository}:{}", self.reference.version);
                    return Err(SandboxError::new(ErrorKind::NotFound, message));
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(self.denied()),
                status => {
                    let message = format!("image: {registry} answers {status}");
                    return Err(SandboxError::new(ErrorKind::Unavailable, message));
                }
            }
        }
        Err(self.denied())
    }

    fn denied(&self) -> SandboxError {
        let message = format!(
            "image: {} gives {} to nobody without an account",
            self.reference.registry, self.reference.repository
        );
        SandboxError::new(ErrorKind::Denied, message)
            .hint("fetch it with another tool and use archive:PATH or oci:PATH")
    }

    /// `challenge`: `Bearer realm="…",service="…",scope="…"`.
    async fn ask_token(&self, challenge: &str) -> Result<String> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let field = |name: &str| {
            let (_, rest) = challenge.split_once(&format!("{name}=\""))?;
            Some(rest.split_once('"')?.0)
        };
        let (true, Some(realm)) = (challenge.starts_with("Bearer "), field("realm")) else {
            return Err(self.denied());
        };
        if !realm.starts_with("https://") && !self.reference.is_local() {
            return Err(refused("its registry asks for a token over an open line".into()));
        }
        let scope = format!("repository:{}:pull", self.reference.repository);
        let mut url =
            reqwest::Url::parse(realm).map_err(|e| refused(format!("its registry's realm: {e}")))?;
        url.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = field("service") {
            url.query_pairs_mut().append_pair("service", service);
        }
        let answer = self.client.get(url).send().await.map_err(|e| failed(&e))?;
        if !answer.status().is_success() {
            return Err(self.denied());
        }
        let answer: Answer = parse("token", &small(answer).await?)?;
        answer.token.or(answer.access_token).ok_or_else(|| self.denied())
    }

    async fn manifest(&mut self, version: &str) -> Result<Manifest> {
        let answer = self.get(&format!("manifests/{version}")).await?;
        let data = small(answer).await?;
        if let Ok(want) = Digest::try_from(version.to_string())
            && hash(&data) != want
        {
            return Err(refused("a manifest does not have its digest".into()));
        }
        parse("manifest", &data)
    }

    /// To a file, checked on the way.
    async fn blob(&mut self, layer: &Descriptor, dir: &Path) -> Result<Blob> {
        let path = dir.join(layer.digest.hex());
        let mut file = tokio::fs::File::create(&path).await.map_err(|e| io_error(&path, &e))?;
        let answer = self.get(&format!("blobs/sha256:{}", layer.digest.hex())).await?;
        let (mut stream, mut hash, mut length) = (answer.bytes_stream(), Sha256::new(), 0_u64);
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|e| failed(&e))?;
            length += piece.len() as u64;
            if length > layer.size.min(MAX_BLOB) {
                return Err(refused("a layer is longer than it says".into()));
            }
            hash.update(&piece);
            file.write_all(&piece).await.map_err(|e| io_error(&path, &e))?;
        }
        file.flush().await.map_err(|e| io_error(&path, &e))?;
        if Digest::of_hash(&hash.finalize()) != layer.digest {
            return Err(refused("a layer does not have its digest".into()));
        }
        Ok(Blob { path, offset: 0, length, digest: None })
    }
}

async fn small(answer: Response) -> Result<Vec<u8>> {
    let (mut stream, mut data) = (answer.bytes_stream(), Vec::new());
    while let Some(piece) = stream.next().await {
        data.extend_from_slice(&piece.map_err(|e| failed(&e))?);
        if data.len() as u64 > MAX_JSON {
            return Err(refused("an answer of its registry is too large".into()));
        }
    }
    Ok(data)
}

/// Downloads the layers into `dir`.
pub async fn fetch(reference: &Reference, dir: &Path) -> Result<Image> {
    // Whoever installed one before keeps it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut client = Client::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(READ_TIMEOUT);
    // Wherever it sends us, encrypted.
    client = if reference.is_local() { client.no_proxy() } else { client.https_only(true) };
    let client = client.build().map_err(|e| failed(&e))?;
    let mut registry = Registry { client, reference, token: None };
    let mut manifest = registry.manifest(&reference.version).await?;
    for _ in 0..MAX_INDEX_DEPTH {
        if manifest.config.is_some() {
            break;
        }
        let digest = choose(&manifest)?.digest.clone();
        manifest = registry.manifest(&format!("sha256:{}", digest.hex())).await?;
    }
    let config = manifest.config.ok_or_else(|| refused("it has no configuration".into()))?;
    let answer = registry.get(&format!("blobs/sha256:{}", config.digest.hex())).await?;
    let data = small(answer).await?;
    if hash(&data) != config.digest {
        return Err(refused("its configuration does not have its digest".into()));
    }
    if manifest.layers.len() > MAX_LAYERS {
        return Err(refused("it has too many layers".into()));
    }
    // What does not fit unpacked is not fetched either: all of it lies on the disk at once.
    if manifest.layers.iter().fold(0, |sum: u64, layer| sum.saturating_add(layer.size)) > LIMITS.bytes {
        return Err(refused("its layers are longer than the bound on bytes".into()));
    }
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        layers.push(registry.blob(layer, dir).await?);
    }
    checked(Image { layers, config: parse("configuration", &data)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_as_other_tools_read_them() {
        let read = |text: &str| {
            let Reference { registry, repository, version } = Reference::parse(text).unwrap();
            format!("{registry} {repository} {version}")
        };
        assert_eq!(read("alpine"), "registry-1.docker.io library/alpine latest");
        assert_eq!(read("docker.io/rust:1.95-slim"), "registry-1.docker.io library/rust 1.95-slim");
        assert_eq!(read("ghcr.io/a/b/c:v1"), "ghcr.io a/b/c v1");
        assert_eq!(read("localhost:5000/x"), "localhost:5000 x latest");
        let digest = format!("sha256:{}", "a".repeat(64));
        assert_eq!(read(&format!("a/b:tag@{digest}")), format!("registry-1.docker.io a/b {digest}"));
        for bad in
            ["", "UPPER", "a b", "a/../b", "x:", "x@sha256:12", "host.io/", "a:tag/with", "-x", "http://x/y"]
        {
            assert_eq!(Reference::parse(bad).unwrap_err().kind, ErrorKind::Invalid, "{bad:?}");
        }
    }
}
