//! Sockets of every kind, steered over standard input and output: the first line says `connected`, or `refused` and why.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::ExitCode;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// To connect, or to be answered by a datagram.
const PATIENCE: Duration = Duration::from_millis(500);
/// What one message can carry (SCM_MAX_FD).
const DESCRIPTORS: usize = 253;
/// More than any process may have open.
const MESSAGES: usize = 400;

fn refused(e: &io::Error) -> ExitCode {
    println!("refused {e}");
    ExitCode::FAILURE
}

fn say(word: &str) {
    println!("{word}");
    let _ = io::stdout().flush();
}

/// Carries bytes both ways until the other side ends.
pub fn tcp(address: &str, port: &str) -> ExitCode {
    let target = format!("{address}:{port}");
    let parsed: Result<std::net::SocketAddr, _> = target.parse();
    let Ok(target) = parsed else { return refused(&io::Error::other("not an address")) };
    match TcpStream::connect_timeout(&target, PATIENCE) {
        Ok(stream) => carry(stream.into()),
        Err(e) => refused(&e),
    }
}

/// A path, or `@name` of the abstract namespace.
fn open_unix(name: &str) -> io::Result<UnixStream> {
    match name.strip_prefix('@') {
        Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?),
        None => UnixStream::connect(name),
    }
}

pub fn unix(name: &str) -> ExitCode {
    match open_unix(name) {
        Ok(stream) => carry(stream.into()),
        Err(e) => refused(&e),
    }
}

fn carry(socket: OwnedFd) -> ExitCode {
    say("connected");
    let copied = socket.try_clone().map(|up| {
        std::thread::spawn(move || {
            let mut up = File::from(up);
            let _ = io::copy(&mut io::stdin(), &mut up);
            let _ = rustix::net::shutdown(&up, rustix::net::Shutdown::Write);
        })
    });
    if let Err(e) = copied {
        return refused(&e);
    }
    let (mut down, mut out) = (File::from(socket), io::stdout());
    let mut buffer = [0; 16 << 10];
    loop {
        match down.read(&mut buffer) {
            Ok(0) | Err(_) => return ExitCode::SUCCESS,
            Ok(n) => {
                if out.write_all(&buffer[..n]).and_then(|()| out.flush()).is_err() {
                    return ExitCode::SUCCESS;
                }
            }
        }
    }
}

/// Standard input as one datagram; what is answered, if anything is.
pub fn udp(address: &str, port: &str) -> ExitCode {
    let mut data = Vec::new();
    let _ = io::stdin().read_to_end(&mut data);
    let bind = if address.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
    let sent = UdpSocket::bind(bind).and_then(|socket| {
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.send_to(&data, format!("{address}:{port}"))?;
        Ok(socket)
    });
    match sent {
        Ok(socket) => {
            say("sent");
            let mut answer = [0; 1500];
            if let Ok((n, _)) = socket.recv_from(&mut answer) {
                println!("answered {n}");
            }
            ExitCode::SUCCESS
        }
        Err(e) => refused(&e),
    }
}

/// Passes descriptors to whoever listens, many more than it could keep.
pub fn rights(name: &str) -> ExitCode {
    let (stream, file) = match open_unix(name).and_then(|stream| Ok((stream, File::open("/")?))) {
        Ok(both) => both,
        Err(e) => return refused(&e),
    };
    say("connected");
    let fds = vec![file.as_fd(); DESCRIPTORS];
    for number in 0..MESSAGES {
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        if let Err(e) = sendmsg(&stream, &[io::IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL) {
            println!("refused after {number}: {}", io::Error::from(e));
            return ExitCode::FAILURE;
        }
    }
    println!("sent");
    ExitCode::SUCCESS
}

/// Listens by TCP on every address and by an abstract name, and answers with a word.
pub fn listen(port: &str, name: &str) -> ExitCode {
    let listening = TcpListener::bind(format!("0.0.0.0:{port}"))
        .and_then(|tcp| Ok((tcp, UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?)));
    let (tcp, unix) = match listening {
        Ok(both) => both,
        Err(e) => return refused(&e),
    };
    say("listening");
    std::thread::spawn(move || {
        for mut stream in unix.incoming().flatten() {
            let _ = stream.write_all(b"sibling\n");
        }
    });
    for mut stream in tcp.incoming().flatten() {
        let _ = stream.write_all(b"sibling\n");
    }
    ExitCode::SUCCESS
}
