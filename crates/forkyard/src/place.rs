//! Where runs and sandboxes are: on this machine, or behind the API of another Forkyard. Commands know no more of it than
//! this, so each of them works on both.

use async_trait::async_trait;
use forkyard_core::fork::Fork;
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{EngineKind, ForkView, RunView};
use forkyard_core::{ForkNum, Millis, RunId, Usd};
use forkyard_engine::activities::captured_key;
use forkyard_engine::clock::Clock;
use forkyard_engine::git::{CommitInfo, FileChange, Git, MAX_OUTPUT_BYTES, Repo};
use forkyard_engine::log;
use forkyard_engine::ports::StoredText;
use forkyard_engine::results::{self, Comparison, Outcome};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_server::access::make_token;
use forkyard_server::dto::chores::{Chore, Cleaned, CleanupStopped, Freed, StopCleanup};
use forkyard_server::dto::token::{CreateToken, NewToken, Token};
use forkyard_store::{EventQuery, Recorded, RunQuery, Watch};
use serde_json::{Value, json};

use crate::commands::add::{self, Like};
use crate::commands::fork::check;
use crate::commands::{cleanup, gc};
use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::follow::{engine_error, store_error};
use crate::settings::Settings;
use crate::temporal;
use crate::yard::Yard;

/// Commits of a result that are listed.
const MAX_COMMITS: usize = 100;

/// What a fork changed.
#[derive(Debug, Clone)]
pub struct Changes {
    pub base: String,
    pub commit: String,
    pub files: Vec<FileChange>,
}

#[async_trait]
pub trait Place: Send + Sync {
    fn settings(&self) -> &Settings;
    /// This machine, which can drive runs itself; None: whoever is behind the API does.
    fn here(&self) -> Option<&Yard>;
    /// Git on this machine, for its repositories.
    fn git(&self) -> &Git;
    fn sandboxes(&self) -> &Sandboxes;
    /// What agents do right now, as far as this process knows.
    fn doing(&self) -> &Doing;

    async fn run(&self, run: &RunId) -> Result<Option<RunView>>;
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>>;
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>>;
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>>;
    async fn spent(&self, run: &RunId) -> Result<Usd>;
    /// A page; only an empty one is the end.
    async fn events(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>>;
    /// Wakes when something of the run may have changed.
    fn watch(&self, run: &RunId) -> Watch;
    async fn run_log(&self, run: &RunId) -> Result<Option<Run>>;
    async fn fork_log(&self, run: &RunId, fork: ForkNum) -> Result<Option<Fork>>;

    /// What is wrong with it is told before anything is stored; what else its user should know, with its id.
    async fn submit(&self, spec: RunSpec) -> Result<(RunId, Option<String>)>;
    async fn command(&self, run: &RunId, command: Command) -> Result<()>;
    async fn message(&self, run: &RunId, fork: ForkNum, text: &StoredText) -> Result<()>;
    async fn add(&self, run: &RunId, count: u32, like: &Like) -> Result<()>;

    /// None: it has left no result, or not yet.
    async fn changes(&self, view: &RunView, fork: ForkNum) -> Result<Option<Changes>>;
    /// For people, of all files or of these.
    async fn patch(&self, view: &RunView, fork: ForkNum, paths: &[String]) -> Result<Vec<u8>>;
    /// For git, binary files included.
    async fn whole_patch(&self, view: &RunView, fork: ForkNum) -> Result<Vec<u8>>;
    async fn commits(&self, view: &RunView, fork: ForkNum) -> Result<Vec<CommitInfo>>;
    /// Those of `forks` that have left a result.
    async fn compare(&self, view: &RunView, forks: &[ForkNum]) -> Result<Comparison>;
    async fn captured(&self, run: &RunId, fork: ForkNum, path: &str) -> Result<Option<Vec<u8>>>;
    /// Removes orphaned sandboxes older than this, or says which it would.
    async fn cleanup(&self, max_age: Millis, dry_run: bool) -> Result<Cleaned>;
    /// Ends a cleanup that another process does.
    async fn stop_cleanup(&self, engine: EngineKind) -> Result<CleanupStopped>;
    async fn make_token(&self, request: CreateToken) -> Result<NewToken>;
    /// Oldest first, without the sessions that they opened.
    async fn tokens(&self) -> Result<Vec<Token>>;
    /// False if there is none of this id.
    async fn revoke_token(&self, id: &str) -> Result<bool>;
    /// Removes runs, snapshots and caches older than this, or says which it would.
    async fn gc(&self, older_than: Millis, dry_run: bool) -> Result<Freed>;
    /// What is about to be done to a sandbox or a snapshot goes into the audit trail; a server's own hand does it there.
    async fn record(&self, action: &str, target: &str, detail: Value) -> Result<()>;
    /// The same for what gives room back: a full disk, on which nothing can be recorded, must not stand in its way.
    async fn record_removal(&self, action: &str, target: &str, detail: Value) {
        if let Err(e) = self.record(action, target, detail).await {
            tracing::warn!(action, target, "this is not in the audit trail: {}", e.message);
        }
    }
    /// The result as a new branch of a repository of this machine.
    async fn branch(&self, view: &RunView, fork: ForkNum, into: &Repo, name: &str) -> Result<()>;
}

/// A result that has to be there.
fn none(view: &RunView, fork: ForkNum) -> CliError {
    CliError::failure(format!("fork {fork} of {} left no result", view.id))
        .hint(format!("`forkyard status {}/{fork}` says how far it came", view.id))
}

pub async fn the_changes(place: &dyn Place, view: &RunView, fork: ForkNum) -> Result<Changes> {
    place.changes(view, fork).await?.ok_or_else(|| none(view, fork))
}

impl Yard {
    pub async fn outcome(&self, view: &RunView, fork: ForkNum) -> Result<Outcome> {
        results::outcome(&self.git, &*self.store, view, fork).await?.ok_or_else(|| none(view, fork))
    }
}

#[async_trait]
impl Place for Yard {
    fn settings(&self) -> &Settings {
        &self.settings
    }
    fn here(&self) -> Option<&Yard> {
        Some(self)
    }
    fn git(&self) -> &Git {
        &self.git
    }
    fn sandboxes(&self) -> &Sandboxes {
        &self.sandboxes
    }
    fn doing(&self) -> &Doing {
        &self.doing
    }

    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        self.store.run(run).await.map_err(store_error)
    }
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>> {
        self.store.runs(query).await.map_err(store_error)
    }
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        self.store.forks(run).await.map_err(store_error)
    }
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        self.store.fork(run, fork).await.map_err(store_error)
    }
    async fn spent(&self, run: &RunId) -> Result<Usd> {
        Ok(self.store.balance(run).await.map_err(store_error)?.spent)
    }
    async fn events(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        self.store.read_run(run, query).await.map_err(store_error)
    }
    fn watch(&self, run: &RunId) -> Watch {
        self.store.watch(Some(run))
    }
    async fn run_log(&self, run: &RunId) -> Result<Option<Run>> {
        Ok(log::load_run(&*self.store, run).await.map_err(engine_error)?.map(|(run, _)| run))
    }
    async fn fork_log(&self, run: &RunId, fork: ForkNum) -> Result<Option<Fork>> {
        Ok(log::load_fork(&*self.store, run, fork).await.map_err(engine_error)?.map(|(fork, _)| fork))
    }

    async fn submit(&self, spec: RunSpec) -> Result<(RunId, Option<String>)> {
        check(self, &spec).await?;
        temporal::submit(self, spec).await
    }
    async fn command(&self, run: &RunId, command: Command) -> Result<()> {
        self.steering().command(&self.engine, run, command, None).await.map_err(engine_error)
    }
    async fn message(&self, run: &RunId, fork: ForkNum, text: &StoredText) -> Result<()> {
        let sent = self.steering().message(&self.engine, run, fork, text, None).await;
        sent.map(drop).map_err(engine_error)
    }
    async fn add(&self, run: &RunId, count: u32, like: &Like) -> Result<()> {
        add::add(self, run, count, like).await
    }

    async fn changes(&self, view: &RunView, fork: ForkNum) -> Result<Option<Changes>> {
        let Some(o) = results::outcome(&self.git, &*self.store, view, fork).await? else { return Ok(None) };
        let files = self.git.diff(&o.repo, &o.base, &o.commit).await?.files;
        Ok(Some(Changes { base: o.base.as_str().into(), commit: o.commit.as_str().into(), files }))
    }
    async fn patch(&self, view: &RunView, fork: ForkNum, paths: &[String]) -> Result<Vec<u8>> {
        let o = self.outcome(view, fork).await?;
        Ok(self.git.patch_of(&o.repo, &o.base, &o.commit, paths, MAX_OUTPUT_BYTES).await?)
    }
    async fn whole_patch(&self, view: &RunView, fork: ForkNum) -> Result<Vec<u8>> {
        let o = self.outcome(view, fork).await?;
        Ok(self.git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?)
    }
    async fn commits(&self, view: &RunView, fork: ForkNum) -> Result<Vec<CommitInfo>> {
        let o = self.outcome(view, fork).await?;
        Ok(self.git.log(&o.repo, &o.base, &o.commit, MAX_COMMITS).await?)
    }
    async fn compare(&self, view: &RunView, forks: &[ForkNum]) -> Result<Comparison> {
        Ok(results::compare(&self.git, &*self.store, view, forks).await?)
    }
    async fn captured(&self, run: &RunId, fork: ForkNum, path: &str) -> Result<Option<Vec<u8>>> {
        self.store.blob(&captured_key(run, fork, path)).await.map_err(store_error)
    }
    async fn cleanup(&self, max_age: Millis, dry_run: bool) -> Result<Cleaned> {
        let asked = Chore { older_than_ms: max_age.0, dry_run };
        if !dry_run {
            self.record_removal("server.cleanup", "server", json!(asked)).await;
        }
        cleanup::once(self, max_age, dry_run).await
    }
    async fn stop_cleanup(&self, engine: EngineKind) -> Result<CleanupStopped> {
        let asked = StopCleanup { engine: engine.into() };
        self.record("server.stop_cleanup", "server", json!(asked)).await?;
        cleanup::stop(self, engine).await
    }
    async fn make_token(&self, request: CreateToken) -> Result<NewToken> {
        let checked = request.checked().map_err(|e| CliError::usage(e.message))?;
        let CreateToken { name, scope, lifetime_ms } = checked;
        self.record("token.create", &name, json!({ "scope": scope, "lifetime_ms": lifetime_ms })).await?;
        let (now, lifetime) = (Clock::system().now(), lifetime_ms.map(Millis));
        let made = make_token(&*self.store, now, &name, scope.into(), lifetime).await.map_err(store_error)?;
        Ok(NewToken { about: made.token.into(), token: made.text })
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        let all = self.store.tokens().await.map_err(store_error)?;
        Ok(all.into_iter().filter(|t| t.parent.is_none()).map(Into::into).collect())
    }
    async fn revoke_token(&self, id: &str) -> Result<bool> {
        if self.store.token(id).await.map_err(store_error)?.is_none() {
            return Ok(false);
        }
        self.record("token.revoke", id, Value::Null).await?;
        self.store.revoke_token(id, Clock::system().now()).await.map_err(store_error)?;
        Ok(true)
    }
    async fn gc(&self, older_than: Millis, dry_run: bool) -> Result<Freed> {
        let asked = Chore { older_than_ms: older_than.0, dry_run };
        if !dry_run {
            self.record_removal("server.gc", "server", json!(asked)).await;
        }
        gc::collect(self, older_than, dry_run).await
    }
    async fn record(&self, action: &str, target: &str, detail: Value) -> Result<()> {
        self.steering().record(action, target, detail).await.map_err(store_error)
    }
    async fn branch(&self, view: &RunView, fork: ForkNum, into: &Repo, name: &str) -> Result<()> {
        let o = self.outcome(view, fork).await?;
        self.git.apply_branch(&o.repo, &o.base, &o.commit, into, name).await?;
        Ok(())
    }
}
