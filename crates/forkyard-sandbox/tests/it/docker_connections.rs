//! How the Docker provider uses connections to its engine: a relay between them counts.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forkyard_core::Attempt;
use forkyard_sandbox::docker::{DockerOptions, DockerProvider};
use forkyard_sandbox::{Labels, Provider};
use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinHandle};

use crate::docker_fixture::{Daemon, IMAGE, id, sh, spec};

const FIRST: Attempt = Attempt(1);
const QUESTIONS: usize = 40;
/// An answer may be read before its connection is back among the idle ones, and a process's first sandbox starts a sweep.
const FEW: usize = 6;

struct Relay {
    path: PathBuf,
    accepted: Arc<AtomicUsize>,
    open: Arc<Mutex<Vec<AbortHandle>>>,
    server: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.server.abort();
        self.cut();
    }
}

impl Relay {
    fn start(dir: &Path, engine: PathBuf) -> Relay {
        let path = dir.join("relay.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (accepted, open) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (count, handles) = (accepted.clone(), open.clone());
        let server = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let engine = engine.clone();
                let relayed = tokio::spawn(async move {
                    let mut far = UnixStream::connect(engine).await.unwrap();
                    let _ = copy_bidirectional(&mut near, &mut far).await;
                });
                handles.lock().unwrap().push(relayed.abort_handle());
            }
        });
        Relay { path, accepted, open, server }
    }

    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// As an engine does that restarts.
    fn cut(&self) {
        for open in self.open.lock().unwrap().drain(..) {
            open.abort();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_engine_are_used_again() {
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let relay = Relay::start(state.path(), daemon.host().trim_start_matches("unix://").into());
    let host = Some(format!("unix://{}", relay.path.display()));
    let options = DockerOptions { host, image: Some(IMAGE.into()), ..DockerOptions::default() };
    let provider = DockerProvider::connect(&state.path().join("state"), options).await.unwrap();
    for _ in 0..QUESTIONS {
        provider.list(&Labels::new()).await.unwrap();
    }
    assert!(relay.accepted() <= FEW, "{} connections", relay.accepted());
    for n in 0..3 {
        let name = id(&format!("box{n}"));
        let sandbox = provider.create(&name, FIRST, &spec()).await.unwrap();
        assert_eq!(sh(&sandbox, "echo hello").await, "hello\n");
        provider.destroy(&name).await.unwrap();
    }
    assert!(relay.accepted() <= FEW, "{} connections", relay.accepted());

    // Connections that ended meanwhile are replaced: each costs one question at most, which says that it may be asked again.
    relay.cut();
    let before = relay.accepted();
    let mut lost = 0;
    while let Err(error) = provider.list(&Labels::new()).await {
        lost += 1;
        assert!(error.is_retryable() && lost <= FEW, "{lost} lost: {error}");
    }
    assert!((before + 1..=before + FEW).contains(&relay.accepted()), "{} connections", relay.accepted());
}
