//! What is said to a guest: written at once if the stream takes it, else by a task, in the order in which it was said.

use std::pin::Pin;
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::io::AsyncWrite;
use tokio::sync::Notify;

/// Bytes that wait to be written; whoever can wait does so beyond it.
const MAX_BACKLOG: usize = 4 << 20;

/// Nothing can be written any more.
#[derive(Debug)]
pub struct Broken;

pub struct Out {
    state: Mutex<State>,
    /// Told when the backlog is shorter, or will never be.
    room: Notify,
}

struct State {
    stream: Pin<Box<dyn AsyncWrite + Send>>,
    backlog: BytesMut,
    /// All that was written has also left the stream.
    flushed: bool,
    broken: bool,
    /// Nobody will say anything more.
    closing: bool,
    writer: Option<Waker>,
}

impl Out {
    pub fn new(stream: impl AsyncWrite + Send + 'static) -> Out {
        let state = State {
            stream: Box::pin(stream),
            backlog: BytesMut::new(),
            flushed: true,
            broken: false,
            closing: false,
            writer: None,
        };
        Out { state: Mutex::new(state), room: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub async fn say(&self, frame: &[u8]) -> Result<(), Broken> {
        loop {
            let room = self.room.notified();
            {
                let mut state = self.lock();
                if state.broken || state.backlog.len() < MAX_BACKLOG {
                    return state.say(frame);
                }
            }
            room.await;
        }
    }

    /// For what is short and must not wait.
    pub fn say_now(&self, frame: &[u8]) -> Result<(), Broken> {
        self.lock().say(frame)
    }

    /// The stream ends after what was said.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        state.wake();
    }

    /// Writes what could not be written at once, until the stream is over.
    pub async fn write(&self) {
        std::future::poll_fn(|cx| {
            let mut state = self.lock();
            let written = state.write(cx);
            if state.broken || state.backlog.len() < MAX_BACKLOG {
                self.room.notify_waiters();
            }
            match written {
                Poll::Ready(Ok(())) if state.closing => state.stream.as_mut().poll_shutdown(cx).map(drop),
                Poll::Ready(Err(Broken)) => Poll::Ready(()),
                _ => {
                    state.writer = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
    }
}

impl State {
    fn say(&mut self, frame: &[u8]) -> Result<(), Broken> {
        if self.broken {
            return Err(Broken);
        }
        let mut rest = frame;
        // Nobody is told by this when the stream can be written: the writer asks again.
        let cx = &mut Context::from_waker(Waker::noop());
        if self.backlog.is_empty() && self.flushed {
            self.flushed = false;
            while !rest.is_empty() {
                match self.stream.as_mut().poll_write(cx, rest) {
                    Poll::Ready(Ok(n)) if n > 0 => rest = &rest[n..],
                    Poll::Pending => break,
                    Poll::Ready(_) => return Err(self.breaks()),
                }
            }
        }
        self.backlog.extend_from_slice(rest);
        match self.backlog.is_empty().then(|| self.write(cx)) {
            Some(Poll::Ready(done)) => done,
            Some(Poll::Pending) | None => {
                self.wake();
                Ok(())
            }
        }
    }

    fn write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        while !self.backlog.is_empty() {
            match self.stream.as_mut().poll_write(cx, &self.backlog) {
                Poll::Ready(Ok(n)) if n > 0 => self.backlog.advance(n),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(_) => return Poll::Ready(Err(self.breaks())),
            }
        }
        if !self.flushed {
            match self.stream.as_mut().poll_flush(cx) {
                Poll::Ready(Ok(())) => self.flushed = true,
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(_)) => return Poll::Ready(Err(self.breaks())),
            }
        }
        Poll::Ready(if self.broken { Err(Broken) } else { Ok(()) })
    }

    fn breaks(&mut self) -> Broken {
        self.broken = true;
        self.wake();
        Broken
    }

    fn wake(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }
}
