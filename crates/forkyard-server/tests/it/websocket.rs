//! Events over a WebSocket, by a client of another making.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn connect(w: &World, query: &str, headers: &[(&str, &str)]) -> Result<Socket, u16> {
    let at = format!("{}/api/v1/ws/events{query}", w.url.replace("http://", "ws://"));
    let mut request = at.into_client_request().unwrap();
    for (name, value) in headers {
        let name: tokio_tungstenite::tungstenite::http::HeaderName = name.parse().unwrap();
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    match connect_async(request).await {
        Ok((socket, _)) => Ok(socket),
        Err(Error::Http(response)) => Err(response.status().as_u16()),
        Err(e) => panic!("{e}"),
    }
}

async fn next(socket: &mut Socket) -> Value {
    loop {
        match tokio::time::timeout(PATIENCE, socket.next()).await.expect("it goes on") {
            Some(Ok(Message::Text(text))) => return serde_json::from_str(&text).unwrap(),
            Some(Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

async fn say(socket: &mut Socket, what: Value) {
    socket.send(Message::text(what.to_string())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_subscribed_to_and_left() {
    let w = World::new().await;
    let (mut a, mut b) = (w.run("ra").await, w.run("rb").await);
    a.write(2, "x").await;
    let auth = format!("Bearer {}", w.token);
    let mut socket = connect(&w, "?entity_ids=ra&after=1", &[("authorization", &auth)]).await.unwrap();
    for position in [2, 3] {
        let told = next(&mut socket).await;
        assert_eq!((&told["event"]["run"], &told["event"]["position"]), (&json!("ra"), &json!(position)));
    }
    assert_eq!(next(&mut socket).await, json!({ "caught_up": { "run": "ra", "position": 3 } }));
    say(&mut socket, json!({ "subscribe": { "run": "rb", "after": 0, "types": ["run.*"] } })).await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.submitted");
    assert_eq!(next(&mut socket).await["caught_up"]["run"], "rb");
    b.write(1, "x").await;
    a.write(1, "x").await;
    assert_eq!(next(&mut socket).await["event"]["run"], "ra");
    say(&mut socket, json!({ "unsubscribe": { "run": "ra" } })).await;
    say(&mut socket, json!({ "subscribe": { "run": "nope" } })).await;
    assert_eq!(next(&mut socket).await["error"]["code"], "run_not_found");
    say(&mut socket, json!({ "dance": 1 })).await;
    assert_eq!(next(&mut socket).await["error"]["code"], "bad_request");
    a.write(1, "x").await;
    b.end().await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.ended");
    assert_eq!(next(&mut socket).await["end"]["run"], "rb");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_names_no_run_hears_of_all() {
    let w = World::new().await;
    let mut a = w.run("ra").await;
    a.write(3, "old").await;
    let mut socket = connect(&w, &format!("?token={}&event_types=test.*,run.*", w.token), &[]).await.unwrap();
    loop {
        let told = next(&mut socket).await;
        if told["caught_up"]["run"] == "ra" {
            break;
        }
        assert!(told["event"]["data"]["text"] != "old", "{told}");
    }
    let mut b = w.run("rb").await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.submitted");
    b.write(1, "new").await;
    loop {
        let told = next(&mut socket).await;
        if told["event"]["data"]["text"] == "new" {
            break;
        }
        assert!(told["event"]["data"]["text"] != "old", "{told}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_sites_and_strangers_get_no_socket() {
    let w = World::new().await;
    let auth = format!("Bearer {}", w.token);
    let status = async |query: &str, headers: &[(&str, &str)]| connect(&w, query, headers).await.err();
    assert_eq!(status("", &[]).await, Some(401));
    assert_eq!(status("?token=fy_x_y", &[]).await, Some(401));
    assert_eq!(status("", &[("authorization", &auth), ("origin", "https://evil.example")]).await, Some(403));
    assert_eq!(status("?entity_ids=nope", &[("authorization", &auth)]).await, Some(404));
    assert_eq!(status("?entity_types=planet", &[("authorization", &auth)]).await, Some(422));
    assert_eq!(status("", &[("authorization", &auth), ("origin", &w.url)]).await, None);
}
