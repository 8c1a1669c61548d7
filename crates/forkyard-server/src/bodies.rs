//! Bodies of requests, which are waited for, but not for ever, and only as many as there is room for: who sends slowly must
//! not hold what others need.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use futures::{Stream, StreamExt};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::MAX_BODY_BYTES;
use crate::error::{ApiError, Code, Result};

/// A body has to be there by then, its turn included: the largest, over a slow line.
const WHOLE: Duration = Duration::from_secs(60);
/// An upload may take as long as it takes, but something of it has to come.
const SILENCE: Duration = Duration::from_secs(30);
/// Of all users' bodies that are read at once: the largest, for more than a few.
const MAX_BYTES_AT_ONCE: usize = 32 * MAX_BODY_BYTES;
/// Bodies are counted in these, so that a semaphore's count suffices.
const UNIT: usize = 1 << 10;

/// What a body takes of the room that it shares with others, if anything.
pub(crate) type Held = Option<OwnedSemaphorePermit>;

/// Room for so many bytes of bodies.
pub(crate) fn room(bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(bytes / UNIT))
}

/// Whether nobody has anything of a room of so many bytes.
pub(crate) fn is_free(room: &Semaphore, bytes: usize) -> bool {
    room.available_permits() == bytes / UNIT
}

fn too_slow(what: String) -> ApiError {
    ApiError::new(Code::TooSlow, what).hint("send it again, at once")
}

fn too_large(max: usize) -> ApiError {
    ApiError::new(Code::TooLarge, format!("a body may have {max} bytes here"))
}

/// Room for all bodies of users.
#[derive(Clone)]
pub(crate) struct Room(Arc<Semaphore>);

impl Default for Room {
    fn default() -> Room {
        Room(room(MAX_BYTES_AT_ONCE))
    }
}

impl Room {
    /// The body, once all of it is there.
    pub(crate) async fn whole(&self, body: Body) -> Result<Body> {
        if body.is_end_stream() {
            return Ok(body);
        }
        // What is read is the route's own; others may be read meanwhile.
        let (bytes, _held) = whole(self.0.clone(), body, MAX_BODY_BYTES, 0).await?;
        Ok(Body::from(bytes))
    }
}

/// A body of at most `max` bytes, once there is room for it and all of it is there. One that says to have at most `free` bytes
/// takes no room, and so waits for nobody.
pub(crate) async fn whole(
    room: Arc<Semaphore>,
    body: Body,
    max: usize,
    free: usize,
) -> Result<(Bytes, Held)> {
    let read = tokio::time::timeout(WHOLE, read(room, body, max, free)).await;
    read.map_err(|_| too_slow(format!("the body was not there after {} s", WHOLE.as_secs())))?
}

/// As [`whole`], however long it takes.
pub(crate) async fn read(room: Arc<Semaphore>, body: Body, max: usize, free: usize) -> Result<(Bytes, Held)> {
    let size = body.size_hint();
    if size.lower() > max as u64 {
        return Err(too_large(max));
    }
    // Whoever does not say how much it sends may send all that is taken.
    let most = size.upper().map_or(max, |upper| upper.min(max as u64) as usize);
    let mut held = None;
    if most > free {
        let permit = room.acquire_many_owned(most.div_ceil(UNIT) as u32).await;
        held = Some(permit.map_err(|e| ApiError::new(Code::Internal, e.to_string()))?);
    }
    let read = Limited::new(body, max).collect().await.map_err(|e| {
        if e.is::<LengthLimitError>() {
            too_large(max)
        } else {
            ApiError::new(Code::BadRequest, e.to_string())
        }
    })?;
    let read = read.to_bytes();
    if let Some(held) = &mut held {
        drop(held.split(held.num_permits().saturating_sub(read.len().div_ceil(UNIT))));
    }
    Ok((read, held))
}

/// Why an upload did not come to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unfinished {
    /// Nothing came for too long.
    Late,
    TooLarge,
    /// The client ended it, or what it sent is no body.
    Broken,
}

/// What became of an upload of at most so many bytes. Whoever reads it knows no more than that reading failed.
#[derive(Clone)]
pub(crate) struct Fate {
    unfinished: Arc<OnceLock<Unfinished>>,
    max: usize,
}

impl Fate {
    /// What is wrong: the upload itself, or else this.
    pub(crate) fn or(&self, e: impl Into<ApiError>) -> ApiError {
        match self.unfinished.get() {
            Some(Unfinished::Late) => {
                too_slow(format!("nothing of the body came for {} s", SILENCE.as_secs()))
            }
            Some(Unfinished::TooLarge) => too_large(self.max),
            Some(Unfinished::Broken) => ApiError::new(Code::BadRequest, "the body broke off"),
            None => e.into(),
        }
    }
}

/// An upload as it comes, of at most so many bytes. One that says to be larger is refused before anything of it is read.
pub(crate) fn upload(body: Body, max: usize) -> Result<(impl Stream<Item = io::Result<Bytes>> + Send, Fate)> {
    if body.size_hint().lower() > max as u64 {
        return Err(too_large(max));
    }
    let fate = Fate { unfinished: Arc::default(), max };
    let data = http_body_util::BodyDataStream::new(Limited::new(body, max)).boxed();
    let state = Some((data, fate.unfinished.clone()));
    let pieces = futures::stream::unfold(state, |state| async move {
        let (mut data, unfinished) = state?;
        let (why, e) = match tokio::time::timeout(SILENCE, data.next()).await {
            Ok(Some(Ok(piece))) => return Some((Ok(piece), Some((data, unfinished)))),
            Ok(None) => return None,
            Ok(Some(Err(e))) if e.is::<LengthLimitError>() => (Unfinished::TooLarge, io::Error::other(e)),
            Ok(Some(Err(e))) => (Unfinished::Broken, io::Error::other(e)),
            Err(late) => (Unfinished::Late, late.into()),
        };
        // It ends once: nothing is there before.
        let _ = unfinished.set(why);
        Some((Err(e), None))
    });
    Ok((pieces, fate))
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use tokio::time::sleep;

    use super::*;

    /// A byte every so often: so many, or for ever.
    fn trickle(every: Duration, n: usize) -> Body {
        let pieces = stream::iter(0..n).then(move |_| async move {
            sleep(every).await;
            Ok::<_, io::Error>(Bytes::from_static(b"x"))
        });
        Body::from_stream(pieces)
    }

    fn silent() -> Body {
        Body::from_stream(stream::pending::<io::Result<Bytes>>())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let room = Room::default();
        let refused = async |body| room.whole(body).await.unwrap_err().code;
        assert_eq!(refused(silent()).await, Code::TooSlow);
        assert_eq!(refused(trickle(Duration::from_secs(1), usize::MAX)).await, Code::TooSlow);
        let there = room.whole(trickle(Duration::from_secs(1), 30)).await.unwrap();
        assert_eq!(there.collect().await.unwrap().to_bytes().len(), 30);
        assert!(room.whole(Body::empty()).await.unwrap().is_end_stream());
        assert_eq!(refused(Body::from(vec![0; MAX_BODY_BYTES + 1])).await, Code::TooLarge);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_of_users_are_read_only_as_far_as_there_is_room() {
        let room = Room::default();
        let reading: Vec<_> = (0..MAX_BYTES_AT_ONCE / MAX_BODY_BYTES)
            .map(|_| {
                let room = room.clone();
                tokio::spawn(async move { room.whole(silent()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        // Even a small one waits: nobody counts how many there are.
        let small = tokio::time::timeout(WHOLE / 2, room.whole(Body::from("x")));
        assert!(small.await.is_err());
        for task in reading {
            assert_eq!(task.await.unwrap().unwrap_err().code, Code::TooSlow);
        }
        let small = tokio::time::timeout(WHOLE / 2, room.whole(Body::from("x"))).await;
        assert_eq!(small.unwrap().unwrap().collect().await.unwrap().to_bytes(), "x");
        assert!(is_free(&room.0, MAX_BYTES_AT_ONCE));
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_says_why_it_did_not_come_to_its_end() {
        let other = || ApiError::new(Code::Unavailable, "the sandbox is away");
        let (pieces, fate) = upload(trickle(Duration::from_secs(29), 100), 1000).unwrap();
        assert!(pieces.all(|p| async move { p.is_ok() }).await);
        assert_eq!(fate.or(other()).code, Code::Unavailable);
        let unsaid = |n: usize| Body::from_stream(stream::iter([Ok::<_, io::Error>(vec![0; n])]));
        let broken =
            stream::iter([Ok(Bytes::from_static(b"x")), Err(io::Error::from(io::ErrorKind::BrokenPipe))]);
        for (body, code) in [
            (trickle(Duration::from_secs(31), 100), Code::TooSlow),
            (unsaid(1001), Code::TooLarge),
            (Body::from_stream(broken), Code::BadRequest),
        ] {
            let (pieces, fate) = upload(body, 1000).unwrap();
            let pieces: Vec<_> = pieces.collect().await;
            assert!(matches!(pieces.last(), Some(Err(_))), "{pieces:?}");
            assert_eq!(fate.or(other()).code, code);
        }
        // What says how large it is does not have to come.
        let said = upload(Body::from(vec![0; 1001]), 1000).map(drop);
        assert_eq!(said.unwrap_err().code, Code::TooLarge);
    }
}
