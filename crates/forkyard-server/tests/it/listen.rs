//! Connections of those who say nothing.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

/// Few enough for a process that may open a thousand files; the bounds themselves are counted where they stand.
const SILENT: usize = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_silent_do_not_keep_others_out_and_are_let_go_of() {
    let w = World::new().await;
    let at = w.url.trim_start_matches("http://").to_string();
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(&at).await.unwrap());
    }
    // The beginning of what every version of HTTP could be says as little as nothing.
    for stream in silent.iter_mut().step_by(2) {
        stream.write_all(b"P").await.unwrap();
    }
    let health = async || {
        let request = w.http.get(format!("{}/api/v1/health", w.url)).timeout(PATIENCE);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(health().await, 200);
    for stream in &mut silent {
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut [0])).await.expect("it is closed");
        // An end, or a reset where a byte was not read.
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    }
    assert_eq!(health().await, 200);
}
