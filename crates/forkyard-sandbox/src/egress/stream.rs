//! What follows a CONNECT or a SOCKS5 request: TLS to look into, TLS to let through, or something else.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;

use super::connection::{Connection, Opened, Stream, serve_requests};
use super::decision::{Reason, Refusal};
use super::dial::Target;
use super::host::Host;
use super::meter::Prefixed;
use super::policy::Access;

/// The first byte of a TLS handshake record.
const TLS_HANDSHAKE: u8 = 0x16;
/// A ClientHello with post-quantum keys is about 2 KiB; TLS itself allows one of 64 KiB in records of 16.
const MAX_CLIENT_HELLO_BYTES: usize = 32 * 1024;
/// Per direction of a tunnel.
const TUNNEL_BUFFER_BYTES: usize = 64 * 1024;
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

pub(super) async fn serve<S: Stream>(
    connection: Connection,
    target: Target,
    opened: Opened,
    mut io: S,
) -> io::Result<()> {
    let head_timeout = connection.site.limits().head_timeout;
    let (terminated, open_tunnel) = match &opened {
        Opened::Internal => (true, false),
        Opened::Site { grant, .. } => {
            (grant.terminated(), grant.access == Access::Open && grant.reason == Reason::Bridge)
        }
    };
    if terminated {
        let first = first_byte(&mut io, head_timeout).await?;
        let io = Prefixed::new(vec![first], io);
        if first != TLS_HANDSHAKE {
            return serve_requests(connection, target, opened, false, io).await;
        }
        return terminate(connection, target, opened, io).await;
    }
    let Opened::Site { grant, pinned, first: upstream } = opened else {
        return Ok(());
    };
    if open_tunnel {
        // Any public host may be reached under bridge, so a name in the handshake tells nothing.
        connection.record(&target, grant.reason);
        return tunnel(io, Vec::new(), upstream).await;
    }
    match judge_tunnel(&target, &mut io, &upstream, head_timeout).await? {
        Err(refusal) => {
            connection.refuse_target(&target, &refusal);
            Ok(())
        }
        Ok(Tunnel::Raw(sent)) => {
            connection.record(&target, grant.reason);
            tunnel(io, sent, upstream).await
        }
        Ok(Tunnel::Http(sent)) => {
            let opened = Opened::Site { grant, pinned, first: upstream };
            serve_requests(connection, target, opened, false, Prefixed::new(sent, io)).await
        }
    }
}

async fn first_byte<S: Stream>(io: &mut S, timeout: Duration) -> io::Result<u8> {
    tokio::time::timeout(timeout, io.read_u8()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Does the name in a handshake fit the host that was asked for? An address has no name to send.
fn sni_fits(sni: Option<&str>, host: &Host) -> bool {
    match (sni.map(Host::parse), host) {
        (Some(Ok(named)), _) => named == *host,
        (Some(Err(_)), _) => false,
        (None, Host::Address(_)) => true,
        (None, Host::Name(_)) => false,
    }
}

fn sni_refusal(sni: Option<&str>, target: &Target) -> Refusal {
    let said = sni.map_or_else(|| "no name".to_string(), super::record::shown);
    Refusal::new(
        Reason::SniMismatch,
        format!("the TLS handshake names {said}, the connection is to {}", target.host),
    )
}

/// TLS ends here, with a certificate of our own for that very host.
async fn terminate<S: Stream>(
    connection: Connection,
    target: Target,
    opened: Opened,
    io: S,
) -> io::Result<()> {
    let timed_out = |_| io::Error::from(io::ErrorKind::TimedOut);
    let head_timeout = connection.site.limits().head_timeout;
    let start = tokio::time::timeout(head_timeout, LazyConfigAcceptor::new(Acceptor::default(), io))
        .await
        .map_err(timed_out)??;
    let hello = start.client_hello();
    let sni = hello.server_name().map(str::to_string);
    if !sni_fits(sni.as_deref(), &target.host) {
        connection.refuse_target(&target, &sni_refusal(sni.as_deref(), &target));
        return Ok(());
    }
    let config = connection.site.server_config(&target.host).map_err(io::Error::other)?;
    let stream = tokio::time::timeout(head_timeout, start.into_stream(Arc::clone(&config)))
        .await
        .map_err(timed_out)??;
    serve_requests(connection, target, opened, true, stream).await
}

/// What a tunnel turned out to carry; with the bytes that were read to find out.
enum Tunnel {
    Raw(Vec<u8>),
    Http(Vec<u8>),
}

/// On the web's ports only the web's protocols are let through, with the right name in them. On a port that the user named,
/// TLS still has to carry the right name; what is not TLS is the user's to know.
async fn judge_tunnel<S: Stream>(
    target: &Target,
    io: &mut S,
    upstream: &TcpStream,
    timeout: Duration,
) -> io::Result<Result<Tunnel, Refusal>> {
    let web = target.port == HTTP_PORT || target.port == HTTPS_PORT;
    let mut sent = vec![0; 1];
    if web {
        sent[0] = first_byte(io, timeout).await?;
    } else {
        // Some protocols let the server speak first (SSH, SMTP, MySQL); TLS and HTTP never do.
        tokio::select! {
            read = io.read_exact(&mut sent) => { read?; }
            ready = upstream.readable() => {
                ready?;
                return Ok(Ok(Tunnel::Raw(Vec::new())));
            }
        }
    }
    if sent[0] != TLS_HANDSHAKE {
        return Ok(match target.port {
            HTTP_PORT => Ok(Tunnel::Http(sent)),
            HTTPS_PORT => Err(Refusal::new(
                Reason::NotTls,
                format!("{target}: only TLS is let through on port {HTTPS_PORT}"),
            )),
            _ => Ok(Tunnel::Raw(sent)),
        });
    }
    let sni = tokio::time::timeout(timeout, read_client_hello(io, &mut sent))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(match sni {
        Err(why) => Err(Refusal::new(Reason::NotTls, format!("{target}: {why}"))),
        Ok(sni) if sni_fits(sni.as_deref(), &target.host) => Ok(Tunnel::Raw(sent)),
        Ok(sni) => Err(sni_refusal(sni.as_deref(), target)),
    })
}

/// Reads on until the ClientHello is whole; `sent` keeps every byte, to be passed on as it came.
async fn read_client_hello<S: Stream>(
    io: &mut S,
    sent: &mut Vec<u8>,
) -> io::Result<Result<Option<String>, String>> {
    let mut acceptor = Acceptor::default();
    acceptor.read_tls(&mut sent.as_slice())?;
    loop {
        match acceptor.accept() {
            Ok(Some(accepted)) => return Ok(Ok(accepted.client_hello().server_name().map(str::to_string))),
            Ok(None) => {}
            Err((e, _)) => return Ok(Err(format!("not a TLS handshake: {e}"))),
        }
        if sent.len() >= MAX_CLIENT_HELLO_BYTES {
            return Ok(Err("the TLS handshake is too long".into()));
        }
        let mut piece = [0; 4096];
        let n = io.read(&mut piece).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut rest = &piece[..n];
        while !rest.is_empty() {
            if acceptor.read_tls(&mut rest)? == 0 {
                return Ok(Err("the TLS handshake is too long".into()));
            }
        }
        sent.extend_from_slice(&piece[..n]);
    }
}

async fn tunnel<S: Stream>(mut io: S, sent: Vec<u8>, mut upstream: TcpStream) -> io::Result<()> {
    upstream.write_all(&sent).await?;
    tokio::io::copy_bidirectional_with_sizes(
        &mut io,
        &mut upstream,
        TUNNEL_BUFFER_BYTES,
        TUNNEL_BUFFER_BYTES,
    )
    .await?;
    Ok(())
}
