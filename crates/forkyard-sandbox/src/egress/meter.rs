//! Counting, slowing and watching of one sandbox's bytes.
//!
//! Everything that a sandbox sends or gets passes [`Metered`], whatever the protocol, so counters, bandwidth and idleness are
//! measured in one place.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::EgressCounters;

/// How much may go out at once after a pause, in seconds of the limit.
const BURST_S: f64 = 0.25;
/// At least one such piece per wait: below it, a small limit would wake up for single bytes.
const MIN_BURST_BYTES: f64 = 16.0 * 1024.0;

/// Bytes of one sandbox in one direction per second: a token bucket that may go into debt by one piece, so that no piece
/// has to be split, and that lets nobody pass until the debt is paid.
pub struct Bucket {
    bytes_per_s: f64,
    state: Mutex<(f64, Instant)>,
}

impl Bucket {
    pub fn new(bytes_per_s: u64) -> Bucket {
        // At least 1: a limit of 0 would divide by it, and `none` is the way to say no network.
        let bytes_per_s = bytes_per_s.max(1) as f64;
        Bucket { bytes_per_s, state: Mutex::new((burst(bytes_per_s), Instant::now())) }
    }

    /// Until when to wait before the next piece.
    fn ready_at(&self, now: Instant) -> Option<Instant> {
        let tokens = self.refill(now).0;
        (tokens < 0.0).then(|| now + Duration::from_secs_f64(-tokens / self.bytes_per_s))
    }

    fn spend(&self, bytes: usize) {
        self.refill(Instant::now()).0 -= bytes as f64;
    }

    fn refill(&self, now: Instant) -> std::sync::MutexGuard<'_, (f64, Instant)> {
        // A panic while the state was held leaves two plain numbers.
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let earned = now.saturating_duration_since(state.1).as_secs_f64() * self.bytes_per_s;
        state.0 = (state.0 + earned).min(burst(self.bytes_per_s));
        state.1 = now;
        state
    }

    /// The largest piece to take at once.
    fn piece(&self) -> usize {
        burst(self.bytes_per_s) as usize
    }
}

fn burst(bytes_per_s: f64) -> f64 {
    (bytes_per_s * BURST_S).max(MIN_BURST_BYTES)
}

/// What one sandbox moved, as it sees it: rx came in, tx went out.
#[derive(Default)]
pub struct Counters {
    rx: AtomicU64,
    tx: AtomicU64,
    /// Of these, what was written down.
    noted: Mutex<EgressCounters>,
}

impl Counters {
    pub fn all(&self) -> EgressCounters {
        EgressCounters {
            rx_bytes: self.rx.load(Ordering::Relaxed),
            tx_bytes: self.tx.load(Ordering::Relaxed),
        }
    }

    /// What is not written down yet.
    pub fn fresh(&self) -> EgressCounters {
        let (all, noted) = (self.all(), *self.noted());
        less(all, noted)
    }

    /// Writes down what is not yet.
    pub fn note(&self, write: impl FnOnce(EgressCounters)) {
        let mut noted = self.noted();
        let all = self.all();
        let fresh = less(all, *noted);
        if fresh != EgressCounters::default() {
            write(fresh);
            *noted = all;
        }
    }

    fn noted(&self) -> MutexGuard<'_, EgressCounters> {
        // A panic while it was held leaves two plain numbers.
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn less(all: EgressCounters, noted: EgressCounters) -> EgressCounters {
    EgressCounters {
        rx_bytes: all.rx_bytes.saturating_sub(noted.rx_bytes),
        tx_bytes: all.tx_bytes.saturating_sub(noted.tx_bytes),
    }
}

/// One sandbox's counters and limits, shared by its connections.
pub struct Meter {
    pub counters: Arc<Counters>,
    rx: Option<Bucket>,
    tx: Option<Bucket>,
}

impl Meter {
    pub fn new(bytes_per_s: Option<u64>, counters: Arc<Counters>) -> Meter {
        Meter { counters, rx: bytes_per_s.map(Bucket::new), tx: bytes_per_s.map(Bucket::new) }
    }
}

/// When one connection last moved a byte.
pub struct Activity {
    start: Instant,
    last_ms: AtomicU64,
    idle_ms: AtomicU64,
}

impl Activity {
    pub fn new(idle: Duration) -> Activity {
        let activity =
            Activity { start: Instant::now(), last_ms: AtomicU64::new(0), idle_ms: AtomicU64::new(0) };
        activity.allow_idle(idle);
        activity
    }

    pub fn allow_idle(&self, idle: Duration) {
        self.idle_ms.store(u64::try_from(idle.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn touch(&self) {
        self.last_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Comes back once nothing has moved for the allowed time.
    pub async fn idled(&self) {
        loop {
            let allowed =
                self.last_ms.load(Ordering::Relaxed).saturating_add(self.idle_ms.load(Ordering::Relaxed));
            let now = self.start.elapsed().as_millis() as u64;
            if now >= allowed {
                return;
            }
            // In steps, since the allowance may change meanwhile.
            let step = (allowed - now).clamp(1, 10_000);
            tokio::time::sleep(Duration::from_millis(step)).await;
        }
    }
}

/// The sandbox's side of a connection.
pub struct Metered<S> {
    inner: S,
    meter: Arc<Meter>,
    activity: Arc<Activity>,
    read_wait: Option<Pin<Box<Sleep>>>,
    write_wait: Option<Pin<Box<Sleep>>>,
}

impl<S> Metered<S> {
    pub fn new(inner: S, meter: Arc<Meter>, activity: Arc<Activity>) -> Metered<S> {
        Metered { inner, meter, activity, read_wait: None, write_wait: None }
    }
}

/// Waits until the bucket is out of debt.
fn poll_bucket(bucket: &Bucket, wait: &mut Option<Pin<Box<Sleep>>>, cx: &mut Context<'_>) -> Poll<()> {
    loop {
        if let Some(sleep) = wait {
            ready!(sleep.as_mut().poll(cx));
            *wait = None;
        }
        match bucket.ready_at(Instant::now()) {
            None => return Poll::Ready(()),
            Some(at) => *wait = Some(Box::pin(tokio::time::sleep_until(at))),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = match &this.meter.tx {
            None => {
                let before = buf.filled().len();
                ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
                buf.filled().len() - before
            }
            Some(bucket) => {
                ready!(poll_bucket(bucket, &mut this.read_wait, cx));
                let mut part = buf.take(bucket.piece());
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
                let read = part.filled().len();
                // SAFETY: `part` is the unfilled front of `buf`, and the reader initialised `read` bytes of it.
                unsafe { buf.assume_init(read) };
                buf.advance(read);
                bucket.spend(read);
                read
            }
        };
        if read > 0 {
            this.meter.counters.tx.fetch_add(read as u64, Ordering::Relaxed);
            this.activity.touch();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut data = data;
        if let Some(bucket) = &this.meter.rx {
            ready!(poll_bucket(bucket, &mut this.write_wait, cx));
            data = &data[..data.len().min(bucket.piece())];
        }
        let written = ready!(Pin::new(&mut this.inner).poll_write(cx, data))?;
        if let Some(bucket) = &this.meter.rx {
            bucket.spend(written);
        }
        this.meter.counters.rx.fetch_add(written as u64, Ordering::Relaxed);
        this.activity.touch();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

/// A stream whose first bytes were read already.
pub struct Prefixed<S> {
    prefix: Bytes,
    inner: S,
}

impl<S> Prefixed<S> {
    pub fn new(prefix: impl Into<Bytes>, inner: S) -> Prefixed<S> {
        Prefixed { prefix: prefix.into(), inner }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.prefix.is_empty() {
            return Pin::new(&mut this.inner).poll_read(cx, buf);
        }
        let n = this.prefix.len().min(buf.remaining());
        buf.put_slice(&this.prefix[..n]);
        this.prefix.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, data)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn metered<S>(inner: S, bytes_per_s: Option<u64>) -> (Metered<S>, Arc<Counters>) {
        let meter = Arc::new(Meter::new(bytes_per_s, Arc::default()));
        let counters = meter.counters.clone();
        (Metered::new(inner, meter, Arc::new(Activity::new(Duration::from_secs(60)))), counters)
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_holds_in_both_directions_and_nothing_is_lost() {
        const RATE: u64 = 1 << 20;
        const TOTAL: usize = 8 << 20;
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (mut near, counters) = metered(near, Some(RATE));
        let (mut far_read, mut far_write) = tokio::io::split(far);
        let sent: Vec<u8> = (0..TOTAL).map(|i| i as u8).collect();
        let begin = Instant::now();
        let inbound = tokio::spawn({
            let sent = sent.clone();
            async move { far_write.write_all(&sent).await.unwrap() }
        });
        let mut got = vec![0; TOTAL];
        near.read_exact(&mut got).await.unwrap();
        inbound.await.unwrap();
        assert!(got == sent);
        // Virtual time: the clock moves only by the waits themselves.
        let took = begin.elapsed().as_secs_f64();
        assert!((7.0..9.0).contains(&took), "{took}");

        let begin = Instant::now();
        let outbound = tokio::spawn(async move {
            let mut got = vec![0; TOTAL];
            far_read.read_exact(&mut got).await.unwrap();
            got
        });
        near.write_all(&sent).await.unwrap();
        assert!(outbound.await.unwrap() == sent);
        let took = begin.elapsed().as_secs_f64();
        assert!((7.0..9.0).contains(&took), "{took}");
        let all = EgressCounters { rx_bytes: TOTAL as u64, tx_bytes: TOTAL as u64 };
        assert_eq!((counters.all(), counters.fresh()), (all, all));
        counters.note(|fresh| assert_eq!(fresh, all));
        counters.note(|fresh| panic!("{fresh:?} twice"));
        assert_eq!((counters.all(), counters.fresh()), (all, EgressCounters::default()));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_one_sandbox_share_its_limit() {
        let meter = Arc::new(Meter::new(Some(1 << 20), Arc::default()));
        let begin = Instant::now();
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let activity = Arc::new(Activity::new(Duration::from_secs(600)));
                let mut stream = Metered::new(tokio::io::sink(), meter.clone(), activity);
                tokio::spawn(async move { stream.write_all(&vec![0; 1 << 20]).await.unwrap() })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let took = begin.elapsed().as_secs_f64();
        assert!((3.0..4.5).contains(&took), "{took}");
    }

    #[tokio::test(start_paused = true)]
    async fn idleness_is_measured_from_the_last_byte() {
        let activity = Activity::new(Duration::from_secs(60));
        tokio::time::sleep(Duration::from_secs(50)).await;
        activity.touch();
        let begin = Instant::now();
        activity.idled().await;
        assert!(begin.elapsed() >= Duration::from_secs(59));
    }

    #[tokio::test]
    async fn a_prefix_is_read_first() {
        let mut stream = Prefixed::new(&b"ab"[..], &b"cd"[..]);
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        assert_eq!(all, "abcd");
    }
}
