//! Bodies of users' requests, which are waited for, but not for ever: who sends slowly must not hold what others need.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use futures::{Stream, StreamExt};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::MAX_BODY_BYTES;
use crate::error::{ApiError, Code, Result};

/// A body has to be there by then: the largest, over a slow line.
const WHOLE: Duration = Duration::from_secs(60);
/// An upload may take as long as it takes, but something of it has to come.
const SILENCE: Duration = Duration::from_secs(30);

fn too_slow(what: String) -> ApiError {
    ApiError::new(Code::TooSlow, what).hint("send it again, at once")
}

/// The body, once all of it is there.
pub(crate) async fn whole(body: Body) -> Result<Body> {
    if body.is_end_stream() {
        return Ok(body);
    }
    let too_large = || ApiError::new(Code::TooLarge, format!("a body may have {MAX_BODY_BYTES} bytes here"));
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_large());
    }
    let read = tokio::time::timeout(WHOLE, Limited::new(body, MAX_BODY_BYTES).collect()).await;
    let read = read.map_err(|_| too_slow(format!("the body was not there after {} s", WHOLE.as_secs())))?;
    match read {
        Ok(read) => Ok(Body::from(read.to_bytes())),
        Err(e) if e.is::<LengthLimitError>() => Err(too_large()),
        Err(e) => Err(ApiError::new(Code::BadRequest, e.to_string())),
    }
}

/// Whether an upload came to its end too late. Whoever reads it knows no more than that reading failed.
#[derive(Clone, Default)]
pub(crate) struct Late(Arc<AtomicBool>);

impl Late {
    /// What is wrong: that nothing came, or else this.
    pub(crate) fn or(&self, e: impl Into<ApiError>) -> ApiError {
        match self.0.load(Ordering::Relaxed) {
            true => too_slow(format!("nothing of the body came for {} s", SILENCE.as_secs())),
            false => e.into(),
        }
    }
}

/// An upload as it comes, of at most so many bytes.
pub(crate) fn upload(body: Body, max: usize) -> (impl Stream<Item = io::Result<Bytes>> + Send, Late) {
    let late = Late::default();
    let data = http_body_util::BodyDataStream::new(Limited::new(body, max)).boxed();
    let state = Some((data, late.clone()));
    let pieces = futures::stream::unfold(state, |state| async move {
        let (mut data, late) = state?;
        match tokio::time::timeout(SILENCE, data.next()).await {
            Ok(Some(Ok(piece))) => Some((Ok(piece), Some((data, late)))),
            Ok(Some(Err(e))) => Some((Err(io::Error::other(e)), None)),
            Ok(None) => None,
            Err(_) => {
                late.0.store(true, Ordering::Relaxed);
                Some((Err(io::ErrorKind::TimedOut.into()), None))
            }
        }
    });
    (pieces, late)
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

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let silent = || Body::from_stream(stream::pending::<io::Result<Bytes>>());
        assert_eq!(whole(silent()).await.unwrap_err().code, Code::TooSlow);
        assert_eq!(whole(trickle(Duration::from_secs(1), usize::MAX)).await.unwrap_err().code, Code::TooSlow);
        let there = whole(trickle(Duration::from_secs(1), 30)).await.unwrap();
        assert_eq!(there.collect().await.unwrap().to_bytes().len(), 30);
        assert!(whole(Body::empty()).await.unwrap().is_end_stream());
        let large = Body::from(vec![0; MAX_BODY_BYTES + 1]);
        assert_eq!(whole(large).await.unwrap_err().code, Code::TooLarge);
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_may_be_slow_but_not_silent() {
        let internal = || ApiError::new(Code::Internal, "reading failed");
        let (pieces, late) = upload(trickle(Duration::from_secs(29), 100), 1000);
        assert!(pieces.all(|p| async move { p.is_ok() }).await);
        assert_eq!(late.or(internal()).code, Code::Internal);
        let (pieces, late) = upload(trickle(Duration::from_secs(31), 100), 1000);
        let pieces: Vec<_> = pieces.collect().await;
        assert!(matches!(pieces[..], [Err(_)]), "{pieces:?}");
        assert_eq!(late.or(internal()).code, Code::TooSlow);
        let (pieces, late) = upload(Body::from(vec![0; 1001]), 1000);
        assert!(pieces.any(|p| async move { p.is_err() }).await);
        assert_eq!(late.or(internal()).code, Code::Internal);
    }
}
