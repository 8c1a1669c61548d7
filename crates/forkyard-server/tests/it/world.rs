//! A server in this process, over a store in memory, with a run that the test itself writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{RunOutcome, RunStatus, View};
use forkyard_core::{ForkNum, RunId, Timestamp};
use forkyard_engine::clock::Clock;
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_engine::{Engine, EngineError, log};
use forkyard_server::access::make_token;
use forkyard_server::{App, Parts, serve};
use forkyard_store::{
    Append, CreateRun, EventLog, LeaseToken, Leases, MessageId, NewEvent, Scope, Source, StreamId, Views,
};
use serde_json::{Value, json};
use test_support::memstore::MemStore;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Nobody drives here: the test writes what a driver would.
struct NoDriver;

#[async_trait]
impl Engine for NoDriver {
    async fn submit(&self, _: RunId, _: RunSpec, _: Option<String>) -> Result<RunId, EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
    async fn command(&self, _: &RunId, _: Command, _: Option<String>) -> Result<(), EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
    async fn message(
        &self,
        _: &RunId,
        _: ForkNum,
        _: Value,
        _: Option<String>,
    ) -> Result<MessageId, EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
}

pub struct World {
    pub store: Arc<MemStore>,
    pub app: App,
    pub url: String,
    pub token: String,
    pub http: reqwest::Client,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl World {
    pub async fn new() -> World {
        // Fails only if another test of this process was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = Arc::new(MemStore::default());
        let stop = CancellationToken::new();
        let app = App::new(Parts {
            store: store.clone(),
            engine: Arc::new(NoDriver),
            git: Arc::new(Git::new(GitConfig {
                dir: "/nonexistent".into(),
                env: BTreeMap::new(),
                github_token: None,
                timeout: Duration::from_secs(1),
            })),
            models: Arc::new(Models::new(ModelsConfig::default())),
            sandboxes: Sandboxes::new(BTreeMap::new()),
            clock: Clock::system(),
            defaults: RunSpec::new("", "", "sonnet", 1),
            prompt_prefix: None,
            root: None,
            secrets: Default::default(),
            chores: None,
            hosts: vec![],
            secure: false,
            stop: stop.clone(),
        });
        let token = make_token(&*store, Timestamp(1), "test", Scope::Admin, None).await.unwrap().text;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(serve(listener, app.router(), None, stop.clone()));
        World { store, app, url, token, http: reqwest::Client::new(), stop }
    }

    pub async fn run(&self, name: &str) -> Driver {
        let id = RunId::new(name).unwrap();
        let spec = RunSpec::new("https://me:hunter2@example.org/r", "do it", "sonnet", 1);
        let (run, step) = Run::submit(Clock::system().now(), id.clone(), spec);
        let events = step.events.iter().map(|e| log::stored(Timestamp(1), e, None)).collect();
        let new = CreateRun { run: id.clone(), key: None, events, views: run.views() };
        self.store.create_run(new).await.unwrap();
        let lease = self.store.acquire(&id, "test", Duration::from_secs(3600)).await.unwrap().unwrap();
        Driver { store: self.store.clone(), id, lease: lease.token, length: 1 }
    }
}

/// Writes a run's events.
pub struct Driver {
    store: Arc<MemStore>,
    pub id: RunId,
    lease: LeaseToken,
    pub length: u64,
}

impl Driver {
    pub async fn write(&mut self, n: usize, text: &str) {
        for _ in 0..n {
            self.append("test.noted", json!({ "n": self.length + 1, "text": text }), vec![]).await;
        }
    }

    pub async fn end(&mut self) {
        let mut view = self.store.run(&self.id).await.unwrap().unwrap();
        view.status = RunStatus::Ended;
        view.outcome = Some(RunOutcome::Success);
        self.append("run.ended", Value::Null, vec![View::Run(view)]).await;
    }

    async fn append(&mut self, kind: &str, data: Value, views: Vec<View>) {
        let event = NewEvent {
            kind: kind.into(),
            version: 1,
            at: Timestamp(2),
            source: Source::System,
            sandbox: None,
            data,
        };
        let append = Append {
            stream: StreamId::Run(self.id.clone()),
            lease: self.lease,
            expected: self.length,
            events: vec![event],
            views,
            consume: vec![],
        };
        self.store.append(append).await.unwrap();
        self.length += 1;
    }
}
