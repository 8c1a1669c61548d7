//! Server-sent events. A recorded event has its position as `id`, so a client that comes back names where it was.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, Stream, StreamExt};
use tokio::time::{Instant, Interval, interval_at};
use tokio_util::sync::CancellationToken;

use super::{Tail, Told};
use crate::App;
use crate::access::Principal;

/// How often a stream says that it is there.
const PING: Duration = Duration::from_secs(15);
/// How long a browser waits before it comes back.
const RETRY_MS: u32 = 1000;
/// Events that are ready go out together, up to about this much.
const BATCH_BYTES: usize = 64 << 10;

struct Sse {
    /// Comes back when the token does not hold any more.
    void: BoxFuture<'static, ()>,
    messages: BoxStream<'static, Bytes>,
    ping: Interval,
    stop: CancellationToken,
    begun: bool,
}

/// Answers with these messages, for as long as the token holds and the server runs.
pub fn response(app: &App, by: Principal, messages: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let state = Sse {
        void: by.until_void(app.clone()).boxed(),
        messages: messages.boxed(),
        ping: interval_at(Instant::now() + PING, PING),
        stop: app.parts().stop.clone(),
        begun: false,
    };
    let body = stream::unfold(state, |mut s| async move {
        let piece = s.next().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), s))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    // A proxy that collects answers would hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Sse {
    async fn next(&mut self) -> Option<Bytes> {
        if !self.begun {
            self.begun = true;
            return Some(Bytes::from(format!("retry: {RETRY_MS}\n\n")));
        }
        tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            () = &mut self.void => None,
            message = self.messages.next() => message,
            _ = self.ping.tick() => Some(Bytes::from_static(b": ping\n\n")),
        }
    }
}

/// What a watcher of a run is told.
pub fn frames(tail: Tail) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold(tail, |mut tail| async move {
        let mut out = BytesMut::new();
        write(tail.next().await?, &mut out);
        while out.len() < BATCH_BYTES {
            let Some(told) = tail.ready() else { break };
            write(told, &mut out);
        }
        Some((out.freeze(), tail))
    })
}

fn write(told: Told, out: &mut BytesMut) {
    let (name, position) = match told {
        Told::Event(line) => {
            out.put_slice(format!("id: {}\ndata: ", line.position).as_bytes());
            out.put_slice(line.json.as_deref().unwrap_or_default());
            out.put_slice(b"\n\n");
            return;
        }
        Told::Live { json, .. } => {
            out.put_slice(b"event: live\ndata: ");
            out.put_slice(&json);
            out.put_slice(b"\n\n");
            return;
        }
        Told::CaughtUp { position } => ("caught_up", position),
        Told::CatchUp { position } => ("catch_up", position),
        // The last: the watcher has nothing after it.
        Told::End { position } => ("end", position),
    };
    out.put_slice(format!("event: {name}\ndata: {{\"position\":{position}}}\n\n").as_bytes());
}
