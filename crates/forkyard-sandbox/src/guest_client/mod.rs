//! The host's side of the guest's protocol, over any byte stream. Every provider's `Sandbox` stands on it.

mod exec;
mod figures;
mod files;
mod out;
mod quiet;
mod socket;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::{Bytes, BytesMut};
use forkyard_core::Attempt;
use forkyard_guest::protocol::{
    Answer, Fault, MAX_FRAME_TO_HOST, OUTPUT_WINDOW, Op, PREFIX, Reply, Request, VERSION, decode_prefix,
    encode,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::mpsc;

pub(crate) use exec::Output;
pub(crate) use figures::{Meter, file_pages, health, network};
pub(crate) use quiet::{QUIET_WITHIN, Quieted};

use self::out::Out;
use crate::error::STALE_HINT;
use crate::{ErrorKind, Result, SandboxError};

/// Frames of one request that wait to be taken: the window of output and the few that need no credit.
const ANSWER_QUEUE: usize = OUTPUT_WINDOW as usize + 8;
/// The number under which a guest says why it ends a connection.
const FAREWELL: u32 = 0;

type Frame = (Answer, Bytes);

/// A connection to a guest. Clones share it.
#[derive(Clone)]
pub struct GuestClient {
    shared: Arc<Shared>,
}

struct Shared {
    out: Arc<Out>,
    pending: Mutex<Pending>,
    next: AtomicU32,
}

#[derive(Default)]
struct Pending {
    answers: HashMap<u32, mpsc::Sender<Frame>>,
    /// Set when the connection is over.
    ended: Option<SandboxError>,
}

fn lost() -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, "the connection to the sandbox was lost")
}

pub(crate) fn from_fault(kind: Fault, message: String) -> SandboxError {
    let kind = match kind {
        Fault::Invalid => ErrorKind::Invalid,
        Fault::NotFound => ErrorKind::NotFound,
        Fault::Denied => ErrorKind::Denied,
        Fault::Stale => ErrorKind::Stale,
        Fault::TooLarge => ErrorKind::TooLarge,
        Fault::Unavailable => ErrorKind::Unavailable,
    };
    let error = SandboxError::new(kind, message);
    if kind == ErrorKind::Stale { error.hint(STALE_HINT) } else { error }
}

fn unexpected(answer: &Answer) -> SandboxError {
    let text: String = format!("{answer:?}").chars().take(200).collect();
    SandboxError::new(ErrorKind::Unavailable, format!("the guest gave an answer that does not fit: {text}"))
}

/// What the guest says when nothing changes any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quiet {
    /// Processes are alive all the same.
    pub busy: bool,
    /// The number of the layer that its root writes to, where it has one.
    pub layer: Option<String>,
}

impl GuestClient {
    /// Greets the guest under an attempt. `Stale` if it knows a newer one.
    pub async fn connect(socket: UnixStream, attempt: Attempt, token: Option<String>) -> Result<GuestClient> {
        let (read, write) = socket::halves(socket)
            .map_err(|e| SandboxError::new(ErrorKind::Unavailable, format!("the guest's socket: {e}")))?;
        Self::connect_over(read, write, attempt, token).await
    }

    /// The same over any stream of bytes.
    pub async fn connect_over<R, W>(
        read: R,
        write: W,
        attempt: Attempt,
        token: Option<String>,
    ) -> Result<GuestClient>
    where
        R: AsyncRead + Send + 'static,
        W: AsyncWrite + Send + 'static,
    {
        let out = Arc::new(Out::new(write));
        let writer = Arc::clone(&out);
        tokio::spawn(async move { writer.write().await });
        let shared = Arc::new(Shared { out, pending: Mutex::default(), next: AtomicU32::new(FAREWELL + 1) });
        tokio::spawn(read_frames(read, Arc::downgrade(&shared)));
        let client = GuestClient { shared };
        let hello = Op::Hello { version: VERSION, attempt: attempt.0, token };
        match client.ask(hello, &[]).await? {
            (Answer::Welcome { .. }, _) => Ok(client),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Why the connection is over, if it is.
    pub fn ended(&self) -> Option<SandboxError> {
        self.shared.pending().ended.clone()
    }

    /// Sends a request; its answers come through what is returned.
    async fn send(&self, op: Op, body: &[u8]) -> Result<Answers> {
        let seq = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel(ANSWER_QUEUE);
        {
            let mut pending = self.shared.pending();
            if let Some(ended) = &pending.ended {
                return Err(ended.clone());
            }
            pending.answers.insert(seq, sender);
        }
        let answers = Answers { seq, receiver, shared: Arc::clone(&self.shared) };
        self.shared.write(&encode(&Request { seq, op }, body)).await;
        Ok(answers)
    }

    /// Sends a part of something long, which has no answer.
    async fn pass(&self, op: Op, body: &[u8]) {
        let seq = self.shared.next.fetch_add(1, Ordering::Relaxed);
        self.shared.write(&encode(&Request { seq, op }, body)).await;
    }

    /// Sends what has no answer, and never waits.
    fn tell(&self, op: Op) {
        let seq = self.shared.next.fetch_add(1, Ordering::Relaxed);
        // To one who is gone there is nothing to say.
        let _ = self.shared.out.say_now(&encode(&Request { seq, op }, &[]));
    }

    /// One request, one answer; an error that the guest answers is an error here.
    pub async fn ask(&self, op: Op, body: &[u8]) -> Result<(Answer, Bytes)> {
        self.send(op, body).await?.next().await
    }

    async fn ask_done(&self, op: Op, body: &[u8]) -> Result<()> {
        match self.ask(op, body).await? {
            (Answer::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// From now on the guest's commands have this environment, and the sandbox lasts this long.
    pub async fn adopt(&self, lifetime_ms: u64, env: &BTreeMap<String, String>) -> Result<()> {
        self.ask_done(Op::Adopt { lifetime_ms, env: env.clone() }, &[]).await
    }

    pub async fn pause(&self) -> Result<()> {
        self.ask_done(Op::Pause, &[]).await
    }

    pub async fn resume(&self) -> Result<()> {
        self.ask_done(Op::Resume, &[]).await
    }

    /// Nothing starts and nothing is written until [`GuestClient::thaw`].
    pub async fn quiesce(&self) -> Result<Quiet> {
        match self.ask(Op::Quiesce, &[]).await? {
            (Answer::Quiet { busy, layer }, _) => Ok(Quiet { busy, layer }),
            (other, _) => Err(unexpected(&other)),
        }
    }

    pub async fn thaw(&self) -> Result<()> {
        self.ask_done(Op::Thaw, &[]).await
    }

    /// Ends the sandbox; no answer comes.
    pub fn shutdown(&self) {
        self.tell(Op::Shutdown);
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    async fn write(&self, frame: &[u8]) {
        // A guest that is gone may have said why: whoever waits for an answer learns it from the reader.
        let _ = self.out.say(frame).await;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.out.close();
    }
}

/// The answers to one request.
struct Answers {
    seq: u32,
    receiver: mpsc::Receiver<Frame>,
    shared: Arc<Shared>,
}

impl Answers {
    async fn next(&mut self) -> Result<Frame> {
        match self.receiver.recv().await {
            Some((Answer::Error { kind, message }, _)) => Err(from_fault(kind, message)),
            Some(frame) => Ok(frame),
            None => Err(self.shared.pending().ended.clone().unwrap_or_else(lost)),
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.shared.pending().answers.remove(&self.seq);
    }
}

/// Hands frames to whoever asked, until the stream or the client ends.
async fn read_frames(read: impl AsyncRead, shared: std::sync::Weak<Shared>) {
    tokio::pin!(read);
    let mut input = BytesMut::with_capacity(16 << 10);
    let why = loop {
        match next_frame(&mut input) {
            Ok(Some((reply, body))) => {
                let Some(shared) = shared.upgrade() else { return };
                if let (FAREWELL, Answer::Error { kind, message }) = (reply.seq, &reply.answer) {
                    break from_fault(*kind, message.clone());
                }
                let sender = shared.pending().answers.get(&reply.seq).cloned();
                drop(shared);
                if let Some(sender) = sender {
                    // Output waits for credit in the guest, so this never waits for a slow reader of it.
                    let _ = sender.send((reply.answer, body)).await;
                }
            }
            Ok(None) => match read.read_buf(&mut input).await {
                Ok(0) | Err(_) => break lost(),
                Ok(_) => {}
            },
            Err(reason) => break SandboxError::new(ErrorKind::Unavailable, reason),
        }
    };
    if let Some(shared) = shared.upgrade() {
        let mut pending = shared.pending();
        pending.ended = Some(why);
        pending.answers.clear();
    }
}

fn next_frame(input: &mut BytesMut) -> std::result::Result<Option<(Reply, Bytes)>, String> {
    let Some(prefix) = input.get(..PREFIX).and_then(|p| <[u8; PREFIX]>::try_from(p).ok()) else {
        return Ok(None);
    };
    let (length, head) = decode_prefix(prefix, MAX_FRAME_TO_HOST).map_err(|e| e.to_string())?;
    if input.len() < PREFIX + length {
        input.reserve(PREFIX + length - input.len());
        return Ok(None);
    }
    let mut frame = input.split_to(PREFIX + length).freeze().slice(PREFIX..);
    let reply = serde_json::from_slice(&frame[..head])
        .map_err(|e| format!("the guest's answer is not readable: {e}"))?;
    let body = frame.split_off(head);
    Ok(Some((reply, body)))
}
