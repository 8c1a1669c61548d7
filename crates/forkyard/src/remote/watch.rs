//! News of a run, by its stream of events. A stream that breaks is opened again where it was.

use std::time::Duration;

use forkyard_core::RunId;
use forkyard_store::Watch;
use futures::StreamExt;
use reqwest::{Method, StatusCode};
use tokio::sync::watch;

use super::client::{Client, Refused, coded};
use super::sse::Frames;

const PAUSE: Duration = Duration::from_millis(500);

/// Wakes for every piece of the stream, until nobody watches or the run has ended.
pub fn watch(client: &Client, run: &RunId) -> Watch {
    let (tell, told) = watch::channel(0);
    let (client, run) = (client.clone(), run.clone());
    tokio::spawn(async move {
        let mut last: Option<String> = None;
        while !tell.is_closed() {
            match listen(&client, &run, &mut last, &tell).await {
                End::Over => {
                    tell.send_modify(|n| *n += 1);
                    // The channel stays open: a watch that is gone would never wake.
                    return tell.closed().await;
                }
                End::Broken => tokio::time::sleep(PAUSE).await,
            }
            // Whatever happened while nobody listened is looked for.
            tell.send_modify(|n| *n += 1);
        }
    });
    Watch::new(told)
}

enum End {
    Over,
    Broken,
}

async fn listen(client: &Client, run: &RunId, last: &mut Option<String>, tell: &watch::Sender<u64>) -> End {
    let path = format!("/runs/{}/events/stream", coded(run.as_str()));
    let mut request = client.request(Method::GET, &path);
    if let Some(last) = last {
        request = request.header("Last-Event-ID", last.as_str());
    }
    let response = match client.send(request).await {
        Ok(response) if response.status() == StatusCode::NO_CONTENT => return End::Over,
        Ok(response) => response,
        // A run that is gone, a token that holds no longer: whoever asks next is told.
        Err(Refused::Said(_)) => return End::Over,
        Err(Refused::Away(_)) => return End::Broken,
    };
    let mut pieces = response.bytes_stream();
    let mut frames = Frames::default();
    loop {
        let piece = tokio::select! {
            () = tell.closed() => return End::Over,
            piece = pieces.next() => piece,
        };
        let Some(Ok(piece)) = piece else { return End::Broken };
        let mut over = false;
        let taken = frames.take(&piece, |frame| {
            over |= frame.name == "end";
            if frame.id.is_some() {
                *last = frame.id;
            }
        });
        if taken.is_err() {
            return End::Broken;
        }
        tell.send_modify(|n| *n += 1);
        if over {
            return End::Over;
        }
    }
}
