//! The dashboard: a page that was built from `web/` and is part of the program. It holds nothing of any run, so that it
//! needs no login; what it shows it asks the API for, with the session's cookie.
//!
//! Names below `/assets/` carry a hash of what is in them and are kept by browsers for ever. All else is asked for again
//! and answered with 304 while it is the same.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::LazyLock;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

use crate::routes;

/// Name and content, by `build.rs`.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/web.rs"));
const INDEX: &str = "/index.html";
const HASHED: &str = "/assets/";

/// Scripts, styles, fonts and connections of this server alone, and no script or style inside of the page. Text becomes
/// markup only where the page's own framework makes its templates.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; \
                      connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types svelte-trusted-html";

struct File {
    bytes: Bytes,
    /// Where it is smaller.
    gzip: Option<Bytes>,
    kind: &'static str,
    etag: HeaderValue,
}

static PAGE: LazyLock<BTreeMap<&'static str, File>> =
    LazyLock::new(|| FILES.iter().map(|(name, bytes)| (*name, File::new(name, bytes))).collect());

impl File {
    fn new(name: &str, bytes: &'static [u8]) -> File {
        let (kind, text) = match name.rsplit('.').next() {
            Some("html") => ("text/html; charset=utf-8", true),
            Some("js") => ("text/javascript; charset=utf-8", true),
            Some("css") => ("text/css; charset=utf-8", true),
            Some("svg") => ("image/svg+xml", true),
            Some("txt") => ("text/plain; charset=utf-8", true),
            Some("woff2") => ("font/woff2", false),
            Some(_) | None => ("application/octet-stream", false),
        };
        let hash: String = Sha256::digest(bytes).iter().take(8).map(|b| format!("{b:02x}")).collect();
        let etag = HeaderValue::from_str(&format!("W/\"{hash}\""));
        File {
            bytes: Bytes::from_static(bytes),
            gzip: text.then(|| gzip(bytes)).flatten(),
            kind,
            etag: etag.unwrap_or(HeaderValue::from_static("W/\"\"")),
        }
    }

    fn response(&self, name: &str, headers: &HeaderMap) -> Response {
        let keep = if name.starts_with(HASHED) { "public, max-age=31536000, immutable" } else { "no-cache" };
        let mut response = if known(headers, &self.etag) {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            match self.gzip.clone().filter(|_| takes_gzip(headers)) {
                Some(gzip) => {
                    ([(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))], gzip).into_response()
                }
                None => self.bytes.clone().into_response(),
            }
        };
        let out = response.headers_mut();
        out.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.kind));
        out.insert(header::ETAG, self.etag.clone());
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static(keep));
        out.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        if self.kind.starts_with("text/html") {
            out.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        }
        response
    }
}

fn gzip(bytes: &[u8]) -> Option<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).ok()?;
    encoder.finish().ok().filter(|small| small.len() < bytes.len()).map(Bytes::from)
}

fn takes_gzip(headers: &HeaderMap) -> bool {
    let given = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|v| v.to_str().ok());
    given.flat_map(|line| line.split(',')).any(|one| {
        let mut parts = one.split(';').map(str::trim);
        let named = parts.next().is_some_and(|n| n.eq_ignore_ascii_case("gzip"));
        named && !parts.any(|p| matches!(p, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}

fn known(headers: &HeaderMap, etag: &HeaderValue) -> bool {
    let given = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|v| v.to_str().ok());
    let etag = etag.to_str().unwrap_or_default();
    given.flat_map(|line| line.split(',')).any(|one| one.trim() == etag)
}

/// Addresses that the page knows: a link to one of them opens it there.
fn is_page(path: &str) -> bool {
    matches!(path, "/" | "/new" | "/health" | "/runs" | "/sandboxes")
        || path.starts_with("/runs/")
        || path.starts_with("/sandboxes/")
}

/// What is at an address that is none of the API's.
pub(crate) async fn page(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let name = if is_page(uri.path()) { INDEX } else { uri.path() };
    match PAGE.get(name).filter(|_| method == Method::GET || method == Method::HEAD) {
        Some(file) => file.response(name, &headers),
        None => routes::nowhere().await.into_response(),
    }
}

/// The page itself, where a browser came to an address that failed: it says what is wrong.
pub(crate) fn failed(status: StatusCode) -> Option<Response> {
    let mut response = PAGE.get(INDEX)?.response(INDEX, &HeaderMap::new());
    *response.status_mut() = status;
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn gzip_is_given_to_those_who_take_it() {
        for (given, takes) in [
            ("gzip", true),
            ("br, GZIP;q=0.5", true),
            ("gzip;q=0", false),
            ("identity", false),
            ("x-gzipped", false),
        ] {
            assert_eq!(takes_gzip(&headers(header::ACCEPT_ENCODING, given)), takes, "{given}");
        }
        assert!(!takes_gzip(&HeaderMap::new()));
    }

    #[tokio::test]
    async fn pages_have_addresses_and_nothing_else_does() {
        let get = async |path: &str, given: HeaderMap| page(Method::GET, path.parse().unwrap(), given).await;
        for path in ["/", "/new", "/runs/r1/forks/0", "/sandboxes/x"] {
            let response = get(path, HeaderMap::new()).await;
            assert_eq!(response.status(), 200, "{path}");
            let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
            assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
            let same = headers(header::IF_NONE_MATCH, response.headers()[header::ETAG].to_str().unwrap());
            assert_eq!(get(path, same).await.status(), 304, "{path}");
        }
        for path in ["/api/v1/nothing", "/nowhere", "/assets/../index.html", "/assets/", "/.env"] {
            assert_eq!(get(path, HeaderMap::new()).await.status(), 404, "{path}");
        }
        assert_eq!(page(Method::POST, Uri::from_static("/"), HeaderMap::new()).await.status(), 404);
    }

    #[test]
    fn what_the_page_loads_is_here_and_of_a_known_type() {
        let index = String::from_utf8_lossy(&PAGE[INDEX].bytes).into_owned();
        let named: Vec<&str> = index.split('"').filter(|part| part.starts_with(HASHED)).collect();
        assert!(!named.is_empty(), "{index}");
        assert!(named.iter().all(|name| PAGE.contains_key(name)), "{named:?}");
        for (name, file) in PAGE.iter() {
            assert_ne!(file.kind, "application/octet-stream", "{name}");
        }
        for inline in ["<style", " style=", "<script>", "http://", "https://"] {
            assert!(!index.contains(inline), "{inline}");
        }
    }
}
