//! The engine itself: reaching it, and what its errors mean to a caller.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bollard::errors::Error as Fault;
use bollard::{BollardRequest, ClientVersion, Docker};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::UnixStream;

use crate::{ErrorKind, Result, SandboxError};

/// Engine 20.10: the first with one-shot statistics, and what Debian's stable releases carry.
pub const MIN_API: (usize, usize) = (1, 41);
const DEFAULT_HOST: &str = "unix:///var/run/docker.sock";
/// From a request to the first word of its answer, and for no longer: what comes after that may take its time. Whatever is sent
/// before it counts.
const REQUEST_TIMEOUT_S: u64 = 120;
/// For its first word, which costs it nothing: one that hangs must not hold up commands that can do without it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// Connections kept for the next questions: as many as a burst of creations asks at the same time, few for the engine.
const IDLE_CONNECTIONS: usize = 8;
/// For how long they are kept. A burst's questions are milliseconds apart; a quiet process holds nothing open.
const IDLE_FOR: Duration = Duration::from_secs(15);

/// Connects, agrees on a version, and refuses an engine that is too old.
pub async fn connect(host: Option<&str>) -> Result<Docker> {
    let host = host.unwrap_or(DEFAULT_HOST);
    let Some(path) = host.strip_prefix("unix://") else {
        return Err(SandboxError::new(
            ErrorKind::Unsupported,
            format!("the Docker host {host:?} can't be used"),
        )
        .hint("only a local engine shares the guest's socket: use unix:///path/to/docker.sock"));
    };
    let newest = ClientVersion { major_version: 1, minor_version: 53 };
    let docker = keeping_connections(path, &newest).map_err(|e| translate(path, &e))?;
    let agreed = tokio::time::timeout(ANSWERS_WITHIN, docker.negotiate_version()).await;
    let docker = agreed.unwrap_or(Err(Fault::RequestTimeoutError)).map_err(|e| {
        translate(path, &e).or_hint("is that the socket of a Docker engine that works? try `docker version`")
    })?;
    let api = docker.client_version();
    check_version(api.major_version, api.minor_version)?;
    Ok(docker)
}

/// The library's own client opens a connection for every question.
fn keeping_connections(path: &str, newest: &ClientVersion) -> std::result::Result<Docker, Fault> {
    let path = PathBuf::from(path);
    let to_socket = tower::service_fn(move |_| {
        let path = path.clone();
        Box::pin(async move { UnixStream::connect(path).await.map(TokioIo::new) })
    });
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .pool_idle_timeout(IDLE_FOR)
        .build(to_socket);
    let transport = move |request: BollardRequest| {
        let answer = client.request(request);
        async move { answer.await.map_err(Fault::from) }
    };
    // The name is what a request's Host says; the socket is where it goes.
    Docker::connect_with_custom_transport(transport, Some("http://docker"), REQUEST_TIMEOUT_S, newest)
}

/// The socket of a host as settings name it; None if it is not a socket.
pub fn socket_path(host: Option<&str>) -> Option<&Path> {
    host.unwrap_or(DEFAULT_HOST).strip_prefix("unix://").map(Path::new)
}

/// Which engine answers there, in words.
pub async fn describe(host: Option<&str>) -> Result<String> {
    let docker = connect(host).await?;
    let version = docker.version().await.map_err(|e| translate("version", &e))?;
    let api = docker.client_version();
    let engine = version.version.unwrap_or_else(|| "unknown".into());
    Ok(format!(
        "{engine}, API {}.{} at {}",
        api.major_version,
        api.minor_version,
        host.unwrap_or(DEFAULT_HOST)
    ))
}

fn check_version(major: usize, minor: usize) -> Result<()> {
    if (major, minor) >= MIN_API {
        return Ok(());
    }
    let (want_major, want_minor) = MIN_API;
    Err(SandboxError::new(
        ErrorKind::Unsupported,
        format!("the Docker engine speaks API {major}.{minor}, {want_major}.{want_minor} is needed"),
    )
    .hint("upgrade Docker to 20.10 or newer"))
}

/// `what` names the subject: a socket, an image, a container.
pub fn translate(what: &str, fault: &Fault) -> SandboxError {
    match fault {
        Fault::SocketNotFoundError(path) => absent(path),
        Fault::DockerResponseServerError { status_code, message } => refused(what, *status_code, message),
        Fault::DockerStreamError { error } => refused(what, 0, error),
        Fault::RequestTimeoutError => {
            SandboxError::new(ErrorKind::Timeout, format!("{what}: the Docker engine did not answer in time"))
        }
        other => match io_kind(other) {
            Some(io::ErrorKind::PermissionDenied) => SandboxError::new(
                ErrorKind::Denied,
                format!("{what}: this user may not use the Docker engine"),
            )
            .hint("add the user to the group docker, or use the local provider, which needs no engine"),
            Some(io::ErrorKind::NotFound) => absent(what),
            Some(io::ErrorKind::ConnectionRefused) => {
                SandboxError::new(ErrorKind::Unavailable, format!("{what}: nobody listens there"))
                    .hint("start the Docker engine (systemctl start docker)")
            }
            Some(_) | None => {
                SandboxError::new(ErrorKind::Unavailable, format!("{what}: Docker engine: {other}"))
            }
        },
    }
}

fn absent(path: &str) -> SandboxError {
    SandboxError::new(ErrorKind::Unsupported, format!("no Docker engine at {path}"))
        .hint("install and start Docker, name its socket, or use the local provider, which needs no engine")
}

fn refused(what: &str, status: u16, message: &str) -> SandboxError {
    let lower = message.to_ascii_lowercase();
    let said = |words: &[&str]| words.iter().any(|w| lower.contains(w));
    let error = |kind| SandboxError::new(kind, format!("{what}: the Docker engine says: {message}"));
    if said(&["no space left"]) {
        return error(ErrorKind::TooLarge)
            .hint("free space in the engine's data directory (docker system prune)");
    }
    if said(&["unauthorized", "authentication required", "access denied", "denied: requested access"]) {
        return error(ErrorKind::Auth)
            .hint("get it with `docker pull`, which has your login: Forkyard passes none on");
    }
    if said(&["manifest unknown", "no such image", "not found: manifest", "invalid reference format"]) {
        return error(ErrorKind::Invalid).hint("check the image's name and tag");
    }
    match status {
        400 => error(ErrorKind::Invalid),
        401 | 403 => error(ErrorKind::Auth),
        404 => error(ErrorKind::NotFound),
        _ => error(ErrorKind::Unavailable),
    }
}

/// The operating system's word, wherever in the chain it is.
fn io_kind(fault: &Fault) -> Option<io::ErrorKind> {
    if let Fault::IOError { err } = fault {
        return Some(err.kind());
    }
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(fault);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}

pub fn is_missing(fault: &Fault) -> bool {
    matches!(fault, Fault::DockerResponseServerError { status_code: 404, .. })
}

/// Somebody else made or is removing the same thing.
pub fn is_conflict(fault: &Fault) -> bool {
    matches!(fault, Fault::DockerResponseServerError { status_code: 409, .. })
}

/// The engine's "nothing to do": started already, stopped already.
pub fn is_unchanged(fault: &Fault) -> bool {
    matches!(fault, Fault::DockerResponseServerError { status_code: 304, .. })
}

/// What is gone already needs no removing.
pub fn gone_is_ok(what: &str, done: std::result::Result<(), Fault>) -> Result<()> {
    match done {
        Ok(()) => Ok(()),
        Err(fault) if is_missing(&fault) || is_unchanged(&fault) => Ok(()),
        Err(fault) => Err(translate(what, &fault)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(status_code: u16, message: &str) -> Fault {
        Fault::DockerResponseServerError { status_code, message: message.into() }
    }

    #[test]
    fn errors_say_what_a_caller_can_do() {
        let table = [
            (server(404, "No such image: x:latest"), ErrorKind::Invalid, true),
            (server(500, "manifest unknown: manifest unknown"), ErrorKind::Invalid, true),
            (server(401, "unauthorized: authentication required"), ErrorKind::Auth, true),
            (server(404, "No such container: x"), ErrorKind::NotFound, false),
            (server(500, "write /x: no space left on device"), ErrorKind::TooLarge, true),
            (server(500, "boom"), ErrorKind::Unavailable, false),
            (server(400, "bad parameter"), ErrorKind::Invalid, false),
            (Fault::SocketNotFoundError("/x.sock".into()), ErrorKind::Unsupported, true),
            (Fault::RequestTimeoutError, ErrorKind::Timeout, false),
            (io::Error::from(io::ErrorKind::PermissionDenied).into(), ErrorKind::Denied, true),
            (io::Error::from(io::ErrorKind::ConnectionRefused).into(), ErrorKind::Unavailable, true),
        ];
        for (fault, kind, hint) in table {
            let error = translate("x", &fault);
            assert_eq!(error.kind, kind, "{fault:?}");
            assert_eq!(error.hint.is_some(), hint, "{fault:?}");
        }
    }

    #[tokio::test]
    async fn another_host_than_a_socket_is_refused_in_a_sentence() {
        let refused = connect(Some("tcp://1.2.3.4:2375")).await.unwrap_err();
        assert!(refused.message.contains("can't be used") && refused.hint.is_some(), "{refused}");
    }

    #[test]
    fn an_old_engine_is_refused() {
        let error = check_version(1, 40).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.message.contains("1.40") && error.hint.is_some());
        assert!(check_version(1, 41).is_ok() && check_version(2, 0).is_ok());
    }

    #[tokio::test]
    async fn an_absent_engine_is_named() {
        let error = connect(Some("unix:///nowhere/docker.sock")).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.hint.unwrap().contains("local provider"));
        let error = connect(Some("tcp://127.0.0.1:1")).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unsupported);
    }

    #[tokio::test]
    async fn a_socket_that_nobody_serves_is_unavailable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = connect(Some(&format!("unix://{}", path.display()))).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert!(error.is_retryable());
    }
}
