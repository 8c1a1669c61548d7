//! A stream that has to say soon what it speaks. Until then nobody else keeps the time: which version of HTTP it is has to
//! be known first.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// For the first bytes.
const FIRST_BYTES: Duration = Duration::from_secs(5);
/// How HTTP/2 begins; anything else is known by its first byte that differs.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(super) struct Patient<S> {
    stream: S,
    /// Bytes of the preface that were read.
    seen: usize,
    /// None once it is known what is spoken.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(super) fn new(stream: S) -> Patient<S> {
        Patient { stream, seen: 0, until: Some(Box::pin(sleep(FIRST_BYTES))) }
    }

    fn heard(&mut self, bytes: &[u8]) {
        let rest = &PREFACE[self.seen..];
        let same = bytes.iter().zip(rest).take_while(|(a, b)| a == b).count();
        self.seen += same;
        if same < bytes.len() || self.seen == PREFACE.len() {
            self.until = None;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some(until) = self.until.as_mut() else { return read };
        match read {
            Poll::Ready(Ok(())) => {
                self.heard(&buffer.filled()[before..]);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => match until.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Whether it is still waited for after these bytes and a minute.
    async fn is_waited_for(bytes: &[u8]) -> bool {
        let (mut client, server) = duplex(1000);
        let mut server = Patient::new(server);
        let mut buffer = [0; 100];
        for part in bytes.chunks(7) {
            client.write_all(part).await.unwrap();
            let _ = server.read(&mut buffer).await.unwrap();
        }
        tokio::time::timeout(Duration::from_secs(60), server.read(&mut buffer)).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_say_what_it_speaks_is_not_waited_for() {
        for bytes in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n"] {
            assert!(!is_waited_for(bytes).await, "{bytes:?}");
        }
        for bytes in [&b"G"[..], b"PO", PREFACE, b"PRI * HTTP/2.1"] {
            assert!(is_waited_for(bytes).await, "{bytes:?}");
        }
    }
}
