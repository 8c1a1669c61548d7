//! A command's streams: output as it comes and for as long as somebody reads it, input as it is wanted, and signals that end it.

use std::future::pending;
use std::io::{self, IsTerminal, Read, Write};
use std::time::Duration;

use bytes::Bytes;
use forkyard_sandbox::{ErrorKind, ExecControl, ExecResult, Signal};
use rustix::fs::FileType;
use tokio::signal::unix::{Signal as Arrivals, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::exec::status;
use crate::error::Result;
use crate::exit::Exit;

/// One request to the guest holds it.
const PIECE: usize = 64 << 10;
/// Pieces between two of our threads.
const QUEUE: usize = 4;
/// How soon a command that has not read is offered its input again: at first, and at last.
const OFFER_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// A command that was told to end gets this long, then it is killed.
pub const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// A sandbox that does not answer is not waited for.
const KILLED_WITHIN: Duration = Duration::from_secs(1);

/// How a command in a sandbox came to its end.
pub enum Ended {
    Exited(ExecResult),
    /// Whoever read its output is gone.
    Unread,
    /// We were told to end.
    Told(Told),
}

impl Ended {
    /// As of any other program.
    pub fn exit(&self) -> Exit {
        match self {
            Ended::Exited(result) => status(result),
            Ended::Unread => Exit::Command(128 + 13),
            Ended::Told(told) => told.exit(),
        }
    }
}

/// A signal that ends a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    Int,
    Term,
    Hup,
}

impl Told {
    pub fn exit(self) -> Exit {
        match self {
            Told::Int => Exit::Interrupted,
            Told::Term => Exit::Command(128 + 15),
            Told::Hup => Exit::Command(128 + 1),
        }
    }

    pub fn signal(self) -> Signal {
        match self {
            Told::Int => Signal::Int,
            Told::Term => Signal::Term,
            Told::Hup => Signal::Hup,
        }
    }
}

/// Taken from the moment on at which it is made, so that what was begun is ended in order.
pub struct Signals {
    int: Option<Arrivals>,
    term: Option<Arrivals>,
    hup: Option<Arrivals>,
}

impl Signals {
    pub fn take() -> Result<Signals> {
        let ignored = ignored();
        let of = |number: u32, kind| {
            // Whoever started us with one ignored (nohup, a script's background) wants it to stay so.
            let taken = ignored & (1 << (number - 1)) == 0;
            taken.then(|| signal(kind)).transpose()
        };
        Ok(Signals {
            int: of(2, SignalKind::interrupt())?,
            term: of(15, SignalKind::terminate())?,
            hup: of(1, SignalKind::hangup())?,
        })
    }

    pub async fn recv(&mut self) -> Told {
        async fn next(arrivals: &mut Option<Arrivals>) {
            match arrivals {
                Some(arrivals) => drop(arrivals.recv().await),
                None => pending().await,
            }
        }
        tokio::select! {
            () = next(&mut self.int) => Told::Int,
            () = next(&mut self.term) => Told::Term,
            () = next(&mut self.hup) => Told::Hup,
        }
    }
}

/// One bit for each signal.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

pub async fn kill(control: &dyn ExecControl) {
    // It ends with our connection in any case.
    let _ = tokio::time::timeout(KILLED_WITHIN, control.signal(Signal::Kill)).await;
}

#[derive(Debug, Clone, Copy)]
pub enum Stream {
    Out,
    Err,
}

/// Writes in a thread of its own: a reader that stops reading stops the command, and not what else goes on here.
pub struct Writer {
    pieces: mpsc::Sender<(Stream, Bytes)>,
    end: oneshot::Receiver<io::Result<()>>,
}

impl Writer {
    pub fn start() -> Writer {
        let (pieces, mut taken) = mpsc::channel::<(Stream, Bytes)>(QUEUE);
        let (told, end) = oneshot::channel();
        std::thread::spawn(move || {
            let mut done = Ok(());
            while let Some((stream, bytes)) = taken.blocking_recv() {
                done = write(stream, &bytes);
                if done.is_err() {
                    break;
                }
            }
            drop(taken);
            // Nobody waits for it if we were told to end.
            let _ = told.send(done);
        });
        Writer { pieces, end }
    }

    pub async fn pass(&mut self, stream: Stream, bytes: Bytes) -> io::Result<()> {
        match self.pieces.send((stream, bytes)).await {
            Ok(()) => Ok(()),
            Err(_) => (&mut self.end).await.unwrap_or(Ok(())).and(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// All of it is written.
    pub async fn finish(self) -> io::Result<()> {
        drop(self.pieces);
        self.end.await.unwrap_or(Ok(()))
    }
}

fn write(stream: Stream, bytes: &[u8]) -> io::Result<()> {
    match stream {
        Stream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(bytes)?;
            out.flush()
        }
        Stream::Err => io::stderr().write_all(bytes),
    }
}

/// On the terminal that somebody types at, and not in its background.
pub fn is_foreground() -> bool {
    rustix::termios::tcgetpgrp(io::stdin()).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Whether there is anything that a command could read.
pub fn has_input() -> bool {
    if io::stdin().is_terminal() {
        return is_foreground();
    }
    let null = |stat: &rustix::fs::Stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && stat.st_rdev == rustix::fs::makedev(1, 3)
    };
    !rustix::fs::fstat(io::stdin()).is_ok_and(|stat| null(&stat))
}

/// Standard input, read in a thread of its own: such a read can't be taken back, and the program's end must not wait for it.
pub fn input() -> mpsc::Receiver<io::Result<Bytes>> {
    let (pieces, taken) = mpsc::channel(QUEUE);
    std::thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
        loop {
            let piece = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => Ok(Bytes::copy_from_slice(&buffer[..n])),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(OFFER_AGAIN.1);
                    continue;
                }
                Err(e) => Err(e),
            };
            let failed = piece.is_err();
            if pieces.blocking_send(piece).is_err() || failed {
                return;
            }
        }
    });
    taken
}

/// Hands standard input to a command, no faster than it reads, until either has had enough.
pub async fn feed(control: &dyn ExecControl) {
    let mut input = input();
    while let Some(piece) = input.recv().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(e) => {
                eprintln!("standard input: {e}");
                break;
            }
        };
        let mut again = OFFER_AGAIN.0;
        loop {
            match control.write_stdin(piece.clone()).await {
                Ok(()) => break,
                // What waits for it there is as much as may wait.
                Err(e) if e.kind == ErrorKind::TooLarge => {
                    tokio::time::sleep(again).await;
                    again = (again * 2).min(OFFER_AGAIN.1);
                }
                Err(e) if e.kind == ErrorKind::Unsupported => {
                    eprintln!("standard input is not passed on: {}", e.message);
                    return;
                }
                // It has ended, or reads no more: its events say what came of it.
                Err(_) => return,
            }
        }
    }
    let _ = control.close_stdin().await;
}
