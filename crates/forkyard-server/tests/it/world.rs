//! A server in this process, over a store in memory, with a run that the test itself writes.

use std::collections::BTreeMap;
use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::run::{Command, Run};
use forkyard_core::sandbox::Capabilities;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkView, Lifecycle, RunOutcome, RunStatus, View};
use forkyard_core::{Attempt, ForkNum, HostId, Millis, RunId, SandboxId, SnapshotId, Timestamp, Usd};
use forkyard_engine::clock::Clock;
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::inside::Tokens;
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_engine::sandboxes::types::{
    Labels, Provider, ProviderKind, Sandbox, SandboxError, SandboxInfo, SandboxSpec, SnapshotInfo,
};
use forkyard_engine::{Engine, EngineError, log};
use forkyard_server::access::make_token;
use forkyard_server::inside::Inside;
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

/// A machine of sandboxes that does not answer.
struct Mute;

type Answer<T> = Result<T, SandboxError>;

#[async_trait]
impl Provider for Mute {
    fn capabilities(&self) -> Capabilities {
        unreachable!("nobody asks what it could do")
    }
    async fn create(&self, _: &SandboxId, _: Attempt, _: &SandboxSpec) -> Answer<Arc<dyn Sandbox>> {
        pending().await
    }
    async fn attach(&self, _: &SandboxId, _: Attempt) -> Answer<Arc<dyn Sandbox>> {
        pending().await
    }
    async fn list(&self, _: &Labels) -> Answer<Vec<SandboxInfo>> {
        pending().await
    }
    async fn destroy(&self, _: &SandboxId) -> Answer<()> {
        pending().await
    }
    async fn stop(&self, _: &SandboxId) -> Answer<()> {
        pending().await
    }
    async fn start(&self, _: &SandboxId, _: Attempt) -> Answer<Arc<dyn Sandbox>> {
        pending().await
    }
    async fn snapshots(&self) -> Answer<Vec<SnapshotInfo>> {
        pending().await
    }
    async fn remove_snapshot(&self, _: &SnapshotId) -> Answer<()> {
        pending().await
    }
    async fn export_snapshot(&self, _: &SnapshotId, _: &Path) -> Answer<()> {
        pending().await
    }
    async fn import_snapshot(&self, _: &SnapshotId, _: &Path, _: Option<&str>) -> Answer<SnapshotInfo> {
        pending().await
    }
    async fn sweep(&self) -> Answer<()> {
        pending().await
    }
}

pub struct World {
    pub store: Arc<MemStore>,
    pub app: App,
    pub url: String,
    pub token: String,
    pub http: reqwest::Client,
    pub tokens: Tokens,
    pub inside: Inside,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl World {
    pub async fn new() -> World {
        World::with(ModelsConfig::default()).await
    }

    pub async fn with(models: ModelsConfig) -> World {
        World::over(models, BTreeMap::new()).await
    }

    /// Whoever asks for a sandbox that the store does not know waits for ever.
    pub async fn with_mute_provider() -> World {
        let mute: Arc<dyn Provider> = Arc::new(Mute);
        World::over(ModelsConfig::default(), BTreeMap::from([(ProviderKind::Local, mute)])).await
    }

    async fn over(models: ModelsConfig, providers: BTreeMap<ProviderKind, Arc<dyn Provider>>) -> World {
        // Fails only if another test of this process was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = Arc::new(MemStore::default());
        let stop = CancellationToken::new();
        let home = tempfile::tempdir().unwrap();
        let models = Arc::new(Models::new(models));
        let tokens = Tokens::open(store.clone(), HostId::new("h1").unwrap(), home.path()).unwrap();
        let inside =
            Inside::new(store.clone(), models.clone(), tokens.clone(), Clock::system(), stop.clone());
        let app = App::new(Parts {
            store: store.clone(),
            engine: Arc::new(NoDriver),
            git: Arc::new(Git::new(GitConfig {
                dir: "/nonexistent".into(),
                env: BTreeMap::new(),
                github_token: None,
                timeout: Duration::from_secs(1),
            })),
            models,
            sandboxes: Sandboxes::new(providers),
            inside: inside.clone(),
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
        World { store, app, url, token, http: reqwest::Client::new(), tokens, inside, stop }
    }

    pub async fn run(&self, name: &str) -> Driver {
        self.run_with(name, None).await
    }

    pub async fn run_with(&self, name: &str, budget: Option<Usd>) -> Driver {
        let mut spec = RunSpec::new("https://me:hunter2@example.org/r", "do it", "sonnet", 1);
        spec.budget.run = budget;
        self.submit(name, spec).await
    }

    pub async fn run_of(&self, name: &str, prompt: &str) -> Driver {
        self.submit(name, RunSpec::new("https://me:hunter2@example.org/r", prompt, "sonnet", 1)).await
    }

    async fn submit(&self, name: &str, spec: RunSpec) -> Driver {
        let id = RunId::new(name).unwrap();
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

    /// One event that names a sandbox.
    pub async fn write_of(&mut self, sandbox: &str) {
        let sandbox = Some(SandboxId::new(sandbox).unwrap());
        self.append_of("test.noted", sandbox, Value::Null, vec![]).await;
    }

    pub async fn end(&mut self) {
        let mut view = self.store.run(&self.id).await.unwrap().unwrap();
        view.status = RunStatus::Ended;
        view.outcome = Some(RunOutcome::Success);
        self.append("run.ended", Value::Null, vec![View::Run(view)]).await;
    }

    async fn append(&mut self, kind: &str, data: Value, views: Vec<View>) {
        self.append_of(kind, None, data, views).await;
    }

    async fn append_of(&mut self, kind: &str, sandbox: Option<SandboxId>, data: Value, views: Vec<View>) {
        let event = NewEvent {
            kind: kind.into(),
            version: 1,
            at: Timestamp(2),
            source: Source::System,
            sandbox,
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

impl Driver {
    /// Fork 0 under this attempt, at work in this sandbox.
    pub async fn fork(&mut self, attempt: u32, sandbox: &str) {
        let at = Timestamp(2);
        let view = ForkView {
            run: self.id.clone(),
            fork: 0,
            attempt: Attempt(attempt),
            lifecycle: Lifecycle::Creating,
            phase: "health".into(),
            outcome: None,
            sandbox: Some(SandboxId::new(sandbox).unwrap()),
            name: None,
            model: "sonnet".into(),
            verified: None,
            score: None,
            turns: 0,
            tool_calls: 0,
            cost: Usd::ZERO,
            tokens: 0,
            diff: None,
            driven: Millis::ZERO,
            created_at: at,
            updated_at: at,
            started_at: None,
            ended_at: None,
            error: None,
        };
        self.append("test.forked", Value::Null, vec![View::Fork(view)]).await;
    }
}
