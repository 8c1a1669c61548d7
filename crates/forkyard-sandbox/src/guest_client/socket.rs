//! A guest's socket. The runtime is told of it only what somebody waits for: as a rule that there is something to read. It would
//! else be woken by every request that the guest has taken in, for nothing.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::runtime::Handle;

pub struct ReadHalf(AsyncFd<Arc<UnixStream>>);

pub struct WriteHalf {
    socket: Arc<UnixStream>,
    /// Another descriptor of it, since it was found full: one can be waited for by one side alone.
    room: Option<AsyncFd<OwnedFd>>,
    /// Whoever drops a command says so, wherever that is.
    runtime: Handle,
}

pub fn halves(socket: UnixStream) -> io::Result<(ReadHalf, WriteHalf)> {
    socket.set_nonblocking(true)?;
    let socket = Arc::new(socket);
    // SAFETY: the socket names the same open file until it is dropped, which is after the AsyncFd has let go of it.
    let read = unsafe { AsyncFd::register_with_interest(Arc::clone(&socket), Interest::READABLE) }?;
    Ok((ReadHalf(read), WriteHalf { socket, room: None, runtime: Handle::current() }))
}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let free = buffer.initialize_unfilled();
            let length = free.len();
            match guard.try_io(|socket| (&**socket.get_ref()).read(free)) {
                Ok(Ok(n)) => {
                    if n > 0 && n < length {
                        guard.clear_ready(); // that was all: what comes later is told
                    }
                    buffer.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Poll::Ready(Err(e)),
                Err(_) => {} // nothing there after all
            }
        }
    }
}

impl WriteHalf {
    fn poll(&mut self, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match (&*self.socket).write(data) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let room = match &mut self.room {
                        Some(room) => room,
                        None => {
                            let socket = OwnedFd::from(self.socket.try_clone()?);
                            let _inside = self.runtime.enter();
                            // SAFETY: as above, and nobody else has this descriptor.
                            let room =
                                unsafe { AsyncFd::register_with_interest(socket, Interest::WRITABLE) }?;
                            self.room.insert(room)
                        }
                    };
                    // What is known of it may be from before it was full: then it is tried once more, and waited for.
                    ready!(room.poll_write_ready(cx))?.clear_ready();
                }
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = this.poll(cx, data);
        if let Poll::Ready(Err(_)) = &written {
            // What is half said can't be taken back: whoever reads learns that it is over, after what is there still.
            let _ = this.socket.shutdown(Shutdown::Both);
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// More than any socket holds, in both directions at once.
    #[tokio::test]
    async fn all_that_is_written_is_read_however_slow_the_other_side_is() {
        const SIZE: usize = 8 << 20;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut read, mut write) = halves(ours).unwrap();
        let echo = std::thread::spawn(move || {
            let (mut from, mut to) = (theirs.try_clone().unwrap(), theirs);
            std::io::copy(&mut from, &mut to).unwrap()
        });
        let sent: Vec<u8> = (0..SIZE).map(|i| (i / 7) as u8).collect();
        let mut got = Vec::new();
        let (wrote, all) = tokio::join!(
            async {
                write.write_all(&sent).await?;
                write.shutdown().await
            },
            read.read_to_end(&mut got)
        );
        wrote.unwrap();
        assert_eq!(all.unwrap(), SIZE);
        assert!(got == sent);
        assert_eq!(echo.join().unwrap(), SIZE as u64);
    }
}
