//! Streams end with the token that opened them, not some time later.

use std::time::{Duration, Instant};

use forkyard_core::Timestamp;
use forkyard_server::access::{Made, make_token};
use forkyard_store::Scope;
use futures::{SinkExt, StreamExt};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);
/// Less than the time after which a stream would look by itself, and more than a slow machine takes.
const SOON: Duration = Duration::from_secs(10);

async fn reader(w: &World) -> Made {
    make_token(&*w.store, Timestamp(1), "reader", Scope::Read, None).await.unwrap()
}

async fn revoke(w: &World, made: &Made) -> Instant {
    let request = w.http.delete(format!("{}/api/v1/tokens/{}", w.url, made.token.id)).bearer_auth(&w.token);
    assert_eq!(request.timeout(PATIENCE).send().await.unwrap().status().as_u16(), 204);
    Instant::now()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_sent_events_end_with_their_token() {
    let w = World::new().await;
    let mut d = w.run("r1").await;
    let (gone, stays) = (reader(&w).await, reader(&w).await);
    let open = async |made: &Made, path: &str| {
        let request = w.http.get(format!("{}/api/v1/runs/{path}", w.url)).bearer_auth(&made.text);
        let mut stream = request.send().await.unwrap().bytes_stream().boxed();
        let first = tokio::time::timeout(PATIENCE, stream.next()).await.expect("it begins");
        assert!(first.unwrap().unwrap().starts_with(b"retry:"));
        stream
    };
    let mut watched = [open(&gone, "r1/events/stream").await, open(&gone, "stream").await];
    let mut other = open(&stays, "r1/events/stream?after=1").await;
    let since = revoke(&w, &gone).await;
    for stream in &mut watched {
        while let Some(piece) = tokio::time::timeout(PATIENCE, stream.next()).await.expect("it ends") {
            piece.unwrap();
        }
    }
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
    // Somebody else's goes on.
    d.write(1, "later").await;
    loop {
        let piece = tokio::time::timeout(PATIENCE, other.next()).await.expect("it goes on");
        if String::from_utf8_lossy(&piece.unwrap().unwrap()).contains("later") {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_ends_with_its_token() {
    let w = World::new().await;
    let _d = w.run("r1").await;
    let made = reader(&w).await;
    let at =
        format!("{}/api/v1/ws/events?entity_ids=r1&token={}", w.url.replace("http://", "ws://"), made.text);
    let (mut socket, _) = connect_async(at).await.unwrap();
    let since = revoke(&w, &made).await;
    while let Some(Ok(message)) = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it ends") {
        assert!(!matches!(message, Message::Binary(_)));
    }
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_ends_with_its_token_also_while_something_is_looked_for() {
    let w = World::with_mute_provider().await;
    let _d = w.run("r1").await;
    let made = reader(&w).await;
    let at = |ids: &str| {
        let url = w.url.replace("http://", "ws://");
        format!("{url}/api/v1/ws/events?entity_ids={ids}&token={}", made.text)
    };
    let opening = tokio::spawn(connect_async(at("nobody")));
    let (mut socket, _) = connect_async(at("r1")).await.unwrap();
    socket.send(Message::text("{\"subscribe\": {\"sandbox\": \"nobody\"}}")).await.unwrap();
    // Until both are at it.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let since = revoke(&w, &made).await;
    while let Some(Ok(message)) = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it ends") {
        assert!(!matches!(message, Message::Binary(_)));
    }
    match tokio::time::timeout(PATIENCE, opening).await.expect("it is answered").unwrap() {
        Err(Error::Http(answer)) => assert_eq!(answer.status().as_u16(), 401),
        other => panic!("{other:?}"),
    }
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
}
