//! Who asks, and may they? Decided here for every route, by the scope that the route's own description names.
//!
//! In this order: the request names this server as its host (a rebound name does not); a page that asks is a page of this
//! server; the token or session is known, not expired and not revoked; its scope covers the route.

mod login;
mod tokens;

use std::collections::BTreeMap;
use std::net::IpAddr;

use axum::body::Body;
use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forkyard_store::Scope;

pub use login::{COOKIE, LoginCodes, SESSION_DAYS, session_cookie};
pub use tokens::{
    Made, Principal, Via, generated_token, make_token, open_session, random_id, stable_id, verify,
};

use crate::error::{ApiError, Code, Result};
use crate::{App, inside};

/// What a route asks of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Nothing,
    Scope(Scope),
    /// Or the token of the very sandbox that the address names.
    ScopeOrSandbox(Scope),
    /// A sandbox's token, and no user's.
    Sandbox,
}

/// What a route takes of a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// What is sent is dropped unread.
    Nothing,
    Whole,
    /// As it comes: the route itself keeps the time.
    Upload,
}

/// The needs of all routes, read from their description: what is not described is not served.
#[derive(Debug, Default)]
pub struct Needs(BTreeMap<String, BTreeMap<String, (Need, Takes)>>);

/// The name of the security scheme in the description.
pub const SCHEME: &str = "token";
/// That of sandboxes.
pub const SANDBOX_SCHEME: &str = "sandbox";
/// The type of a body that is uploaded.
const BYTES: &str = "application/octet-stream";

impl Needs {
    /// Err names an operation that does not say what it needs.
    pub fn read(openapi: &serde_json::Value) -> std::result::Result<Needs, String> {
        let mut needs = Needs::default();
        for (path, item) in openapi["paths"].as_object().into_iter().flatten() {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let named = || format!("{method} {path} does not say which scope it needs");
                let security = operation["security"].as_array().ok_or_else(named)?;
                let ways: Vec<_> =
                    security.iter().map(|s| s.as_object().ok_or_else(named)).collect::<Result<_, _>>()?;
                let scope = ways.iter().find_map(|w| w.get(SCHEME));
                let scope =
                    scope.map(|s| s[0].as_str().and_then(Scope::parse).ok_or_else(named)).transpose()?;
                let sandbox = ways.iter().any(|w| w.contains_key(SANDBOX_SCHEME));
                let known = ways.iter().all(|w| w.contains_key(SCHEME) || w.contains_key(SANDBOX_SCHEME));
                let need = match (scope, sandbox) {
                    (None, false) if ways.len() == 1 && ways[0].is_empty() => Need::Nothing,
                    (Some(scope), false) if known => Need::Scope(scope),
                    (Some(scope), true) if known => Need::ScopeOrSandbox(scope),
                    (None, true) if known => Need::Sandbox,
                    (_, _) => return Err(named()),
                };
                let takes = match &operation["requestBody"]["content"] {
                    serde_json::Value::Null => Takes::Nothing,
                    content if content.get(BYTES).is_some() => Takes::Upload,
                    _ => Takes::Whole,
                };
                let methods = needs.0.entry(path.clone()).or_default();
                methods.insert(method.to_ascii_uppercase(), (need, takes));
            }
        }
        Ok(needs)
    }

    fn of(&self, path: &str, method: &Method) -> Result<(Need, Takes)> {
        let methods = self.0.get(path);
        let method = if method == Method::HEAD { "GET" } else { method.as_str() };
        match methods.and_then(|m| m.get(method)) {
            Some(route) => Ok(*route),
            None => Err(ApiError::new(Code::MethodNotAllowed, format!("{method} is not offered here"))),
        }
    }

    fn allowed(&self, path: &str) -> String {
        self.0.get(path).map(|m| m.keys().cloned().collect::<Vec<_>>().join(", ")).unwrap_or_default()
    }
}

/// For all requests, known address or not.
pub async fn check_place(State(app): State<App>, request: Request, next: Next) -> Response {
    match place(app.hosts(), request.headers(), request.uri().authority()) {
        Ok(()) => next.run(request).await,
        Err(e) => e.into_response(),
    }
}

/// A name that somebody made resolve to this machine is not ours; a number is, since no name was resolved for it.
fn place(hosts: &[String], headers: &HeaderMap, authority: Option<&Authority>) -> Result<()> {
    let given = headers.get(header::HOST).and_then(|h| h.to_str().ok()).or(authority.map(Authority::as_str));
    let refused = |given: &str| {
        ApiError::new(Code::HostRefused, format!("this server is not {given:?}"))
            .hint("use localhost or a number, or add the name to `server.hosts`")
    };
    let given = given.ok_or_else(|| refused(""))?;
    let parsed: Authority = given.parse().map_err(|_| refused(given))?;
    let name = parsed.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let ours = name == "localhost" || name.parse::<IpAddr>().is_ok() || hosts.contains(&name);
    if !ours || given.contains('@') {
        return Err(refused(given));
    }
    match headers.get(header::ORIGIN) {
        Some(origin) if !same_origin(origin, &parsed) => {
            Err(ApiError::new(Code::OriginRefused, "a page of another site may not use this server"))
        }
        Some(_) | None => Ok(()),
    }
}

fn same_origin(origin: &HeaderValue, host: &Authority) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    rest.is_some_and(|o| o.eq_ignore_ascii_case(host.as_str()))
}

/// For all routes of the API.
pub async fn check_scope(
    State(app): State<App>,
    path: MatchedPath,
    params: RawPathParams,
    request: Request,
    next: Next,
) -> Response {
    let (need, takes) = match app.needs().of(path.as_str(), request.method()) {
        Ok(route) => route,
        Err(e) => {
            let mut response = e.into_response();
            if let Ok(allow) = HeaderValue::from_str(&app.needs().allowed(path.as_str())) {
                response.headers_mut().insert(header::ALLOW, allow);
            }
            return response;
        }
    };
    let (mut parts, sent) = request.into_parts();
    let body = if takes == Takes::Nothing { Body::empty() } else { sent };
    let from_inside = inside::shows_token(&parts.headers);
    let within = &app.parts().inside;
    let refusal = match (need, from_inside) {
        (Need::Nothing, _) => return pass(&app, takes, parts, body, next).await,
        (Need::Scope(scope), false) | (Need::ScopeOrSandbox(scope), false) => {
            match admit(&app, &parts, scope).await {
                Ok(principal) => {
                    parts.extensions.insert(principal);
                    return pass(&app, takes, parts, body, next).await;
                }
                Err(e) => e,
            }
        }
        (Need::Sandbox | Need::ScopeOrSandbox(_), true) => {
            match within.admit(&parts, inside::named(&params)).await {
                Ok(claims) => {
                    return inside::gate::pass(within, claims, path.as_str(), parts, body, next).await;
                }
                Err(e) => e,
            }
        }
        // A good token that is not for this is told so; a bad one is bad first.
        (Need::Scope(_), true) => match within.admit(&parts, None).await {
            Ok(_) => {
                ApiError::new(Code::WrongScope, "a sandbox's token opens only that sandbox's own routes")
            }
            Err(e) => e,
        },
        (Need::Sandbox, false) => match admit(&app, &parts, Scope::Read).await {
            Ok(_) => ApiError::new(Code::WrongScope, "only the token of the sandbox itself opens this"),
            Err(e) => e,
        },
    };
    inside::refused(path.as_str(), refusal)
}

/// On to the route, once what it takes of the body is there.
async fn pass(app: &App, takes: Takes, parts: Parts, body: Body, next: Next) -> Response {
    let body = match takes {
        Takes::Nothing | Takes::Upload => Ok(body),
        Takes::Whole => app.room().whole(body).await,
    };
    match body {
        Ok(body) => next.run(Request::from_parts(parts, body)).await,
        Err(e) => e.into_response(),
    }
}

async fn admit(app: &App, parts: &Parts, scope: Scope) -> Result<Principal> {
    let (secret, via) = credentials(parts)?;
    if via == Via::Cookie && !parts.method.is_safe() && !from_our_page(&parts.headers) {
        return Err(ApiError::new(
            Code::OriginRefused,
            "the request does not say that it is from our own page",
        )
        .hint("programs send `Authorization: Bearer TOKEN` instead of a cookie"));
    }
    let principal = verify(app.store(), app.now(), &secret, via).await?;
    if principal.scope < scope {
        return Err(ApiError::new(
            Code::WrongScope,
            format!(
                "this needs a token of scope {}; {:?} has {}",
                scope.as_str(),
                principal.name,
                principal.scope.as_str()
            ),
        )
        .hint(format!("make one with: forkyard token create --scope {}", scope.as_str())));
    }
    Ok(principal)
}

/// A cookie is sent by the browser whoever asked; these headers can't be set by a page, and only ours may pass.
fn from_our_page(headers: &HeaderMap) -> bool {
    // An Origin of others was refused before.
    headers.contains_key(header::ORIGIN)
        || headers.get("sec-fetch-site").is_some_and(|v| v.as_bytes() == b"same-origin")
}

fn credentials(parts: &Parts) -> Result<(String, Via)> {
    if let Some(given) = parts.headers.get(header::AUTHORIZATION) {
        let text = given.to_str().unwrap_or_default();
        let token = match text.split_once(' ') {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
            Some(_) | None => {
                return Err(ApiError::new(
                    Code::Unauthenticated,
                    "the Authorization header is not understood",
                )
                .hint("send `Authorization: Bearer TOKEN`"));
            }
        };
        return Ok((token.to_string(), Via::Header));
    }
    // A browser's WebSocket can't set headers. Elsewhere a token in an address would end up in logs.
    let upgrade =
        parts.headers.get(header::UPGRADE).is_some_and(|u| u.as_bytes().eq_ignore_ascii_case(b"websocket"));
    if upgrade && let Some(token) = query_token(parts.uri.query().unwrap_or_default()) {
        return Ok((token.to_string(), Via::Header));
    }
    if let Some(session) = login::cookie(&parts.headers) {
        return Ok((session, Via::Cookie));
    }
    Err(ApiError::new(Code::Unauthenticated, "there is no token")
        .hint("send `Authorization: Bearer TOKEN`; `forkyard token create` makes one"))
}

fn query_token(query: &str) -> Option<&str> {
    query.split('&').find_map(|pair| pair.strip_prefix("token="))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(host: &str, origin: Option<&str>) -> Option<Code> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        place(&["yard.example.org".into()], &headers, None).err().map(|e| e.code)
    }

    #[test]
    fn only_our_own_names_and_pages_pass() {
        for host in ["localhost", "localhost:4610", "127.0.0.1:1", "[::1]:8", "Yard.Example.org", "10.0.0.1"]
        {
            assert_eq!(check(host, None), None, "{host}");
        }
        for host in [
            "evil.example:4610",
            "localhost.evil.example",
            "a@localhost",
            "",
            "127.0.0.1.nip.io",
            "yard.example.org.evil",
        ] {
            assert_eq!(check(host, None), Some(Code::HostRefused), "{host}");
        }
        assert_eq!(check("localhost:1", Some("http://localhost:1")), None);
        assert_eq!(check("localhost:1", Some("https://LOCALHOST:1")), None);
        for origin in [
            "null",
            "http://localhost:2",
            "http://evil.example",
            "file://",
            "http://127.0.0.1:1",
            "ws://localhost:1",
        ] {
            assert_eq!(check("localhost:1", Some(origin)), Some(Code::OriginRefused), "{origin}");
        }
    }

    #[test]
    fn a_route_without_a_scope_is_not_served() {
        let described =
            |operation: serde_json::Value| serde_json::json!({ "paths": { "/x": { "get": operation } } });
        let needs =
            Needs::read(&described(serde_json::json!({ "security": [{ "token": ["steer"] }] }))).unwrap();
        let steer = (Need::Scope(Scope::Steer), Takes::Nothing);
        assert_eq!(needs.of("/x", &Method::GET).unwrap(), steer);
        assert_eq!(needs.of("/x", &Method::HEAD).unwrap(), steer);
        assert_eq!(needs.of("/x", &Method::POST).unwrap_err().code, Code::MethodNotAllowed);
        for bad in [
            serde_json::json!({}),
            serde_json::json!({ "security": [] }),
            serde_json::json!({ "security": [{ "token": [] }] }),
            serde_json::json!({ "security": [{ "other": ["read"] }] }),
        ] {
            assert!(Needs::read(&described(bad.clone())).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_body_is_taken_as_it_is_described() {
        let needs = Needs::read(&crate::routes::openapi()).unwrap();
        let takes = |method: Method, path: &str| needs.of(path, &method).unwrap().1;
        assert_eq!(takes(Method::GET, "/api/v1/health"), Takes::Nothing);
        assert_eq!(takes(Method::POST, "/api/v1/runs/{run}/pause"), Takes::Nothing);
        assert_eq!(takes(Method::POST, "/api/v1/runs"), Takes::Whole);
        let content = "/api/v1/sandboxes/{sandbox}/files/content";
        assert_eq!(takes(Method::GET, content), Takes::Nothing);
        assert_eq!(takes(Method::PUT, content), Takes::Upload);
        let all = needs.0.values().flat_map(BTreeMap::values);
        assert_eq!(all.filter(|(_, takes)| *takes == Takes::Upload).count(), 1);
    }
}
