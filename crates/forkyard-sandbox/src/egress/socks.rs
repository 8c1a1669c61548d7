//! SOCKS5 (RFC 1928), CONNECT without authentication: a listener has one user, its sandbox.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::decision::{Reason, Refusal};
use super::dial::Target;
use super::host::{BadHost, Host};

pub const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xff;
const CMD_CONNECT: u8 = 1;
const ADDRESS_V4: u8 = 1;
const ADDRESS_NAME: u8 = 3;
const ADDRESS_V6: u8 = 4;

/// What the tool inside is told.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Reply {
    Granted = 0,
    Failure = 1,
    NotAllowed = 2,
    HostUnreachable = 4,
    CommandUnknown = 7,
    AddressUnknown = 8,
}

async fn reply<S: AsyncWrite + Unpin>(stream: &mut S, reply: Reply) -> io::Result<()> {
    // The bound address is nobody's business inside.
    stream.write_all(&[VERSION, reply as u8, 0, ADDRESS_V4, 0, 0, 0, 0, 0, 0]).await
}

/// Reads greeting and request; the version byte of the greeting was read already. The outer error ends the connection, the
/// inner one was answered. The host as text goes with a refusal, for the record.
pub async fn accept<S>(stream: &mut S) -> io::Result<Result<Target, (String, Refusal)>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut methods = vec![0; usize::from(stream.read_u8().await?)];
    stream.read_exact(&mut methods).await?;
    if !methods.contains(&NO_AUTHENTICATION) {
        stream.write_all(&[VERSION, NO_METHOD]).await?;
        let refusal = Refusal::new(Reason::Malformed, "SOCKS5 without the method `no authentication`");
        return Ok(Err((String::new(), refusal)));
    }
    stream.write_all(&[VERSION, NO_AUTHENTICATION]).await?;

    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let [version, command, _, kind] = head;
    if version != VERSION {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not SOCKS5"));
    }
    let text;
    let host = match kind {
        ADDRESS_V4 => {
            let address = Ipv4Addr::from_bits(stream.read_u32().await?);
            text = address.to_string();
            Ok(Host::Address(address.into()))
        }
        ADDRESS_V6 => {
            let address = Ipv6Addr::from_bits(stream.read_u128().await?);
            text = address.to_string();
            Ok(Host::Address(address.into()))
        }
        ADDRESS_NAME => {
            let mut name = vec![0; usize::from(stream.read_u8().await?)];
            stream.read_exact(&mut name).await?;
            text = String::from_utf8_lossy(&name).into_owned();
            Host::parse(&text)
        }
        _ => {
            reply(stream, Reply::AddressUnknown).await?;
            return Ok(Err((
                String::new(),
                Refusal::new(Reason::Malformed, "SOCKS5 address of unknown kind"),
            )));
        }
    };
    let port = stream.read_u16().await?;
    if command != CMD_CONNECT {
        // BIND and UDP ASSOCIATE: nothing listens for a sandbox, and UDP (DNS, QUIC) has no way out.
        reply(stream, Reply::CommandUnknown).await?;
        return Ok(Err((text, Refusal::new(Reason::Malformed, "SOCKS5: only CONNECT is served, no UDP"))));
    }
    match host {
        Ok(host) => Ok(Ok(Target { host, port })),
        Err(bad) => {
            reply(stream, Reply::NotAllowed).await?;
            Ok(Err((text, bad_host(bad))))
        }
    }
}

pub fn bad_host(bad: BadHost) -> Refusal {
    match bad {
        BadHost::Syntax => Refusal::new(Reason::BadHost, "not a host name"),
        BadHost::OddAddress => {
            Refusal::new(Reason::OddAddress, "addresses are written as four decimal numbers")
        }
    }
}

pub async fn granted<S: AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    reply(stream, Reply::Granted).await
}

pub async fn refused<S: AsyncWrite + Unpin>(stream: &mut S, refusal: &Refusal) -> io::Result<()> {
    use super::decision::Decision;
    let code = match refusal.reason.decision() {
        Decision::Denied => Reply::NotAllowed,
        Decision::Failed => Reply::HostUnreachable,
        Decision::Allowed => Reply::Failure,
    };
    reply(stream, code).await
}
