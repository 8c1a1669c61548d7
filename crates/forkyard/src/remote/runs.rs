//! Runs behind the API, as commands know them.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use forkyard_core::budget::BudgetLimits;
use forkyard_core::fork::{Fork, ForkEvent};
use forkyard_core::run::{Command, Run, RunEvent};
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{DiffStat, EngineKind, ForkView, Progress, RunView};
use forkyard_core::{Attempt, ForkNum, Millis, RunId, SandboxId, Timestamp, Usd, event};
use forkyard_engine::git::{CommitId, CommitInfo, FileChange, Git, GitConfig, Lines, Repo};
use forkyard_engine::ports::StoredText;
use forkyard_engine::results::Comparison;
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_sandbox::Provider;
use forkyard_server::dto::chores::{Chore, Cleaned, CleanupStopped, Freed, StopCleanup};
use forkyard_server::dto::event::{Event, EventPage};
use forkyard_server::dto::fork::{Commits, Message};
use forkyard_server::dto::result::{ChangedFile, Diff};
use forkyard_server::dto::run::{AddForks, RunDetail, RunPage};
use forkyard_server::dto::token::{CreateToken, NewToken, Token, Tokens};
use forkyard_server::dto::{fork, result, run};
use forkyard_server::error::Code;
use forkyard_store::{EventQuery, NewEvent, Recorded, RunQuery, StreamId, Watch};
use reqwest::Method;
use serde_json::Value;

use super::client::{Client, Refused, coded, segment};
use super::request;
use super::sandbox::RemoteProvider;
use crate::commands::add::Like;
use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::place::{Changes, Place};
use crate::settings::{Settings, environment};
use crate::yard::Yard;

/// The API's largest page.
const PAGE: usize = 500;

pub struct Remote {
    settings: Settings,
    client: Client,
    git: Git,
    sandboxes: Sandboxes,
    doing: Doing,
}

impl Remote {
    /// Nothing is sent yet.
    pub fn open(settings: Settings, url: &str) -> Result<Remote> {
        let client = Client::new(&settings, url)?;
        let git = Git::new(GitConfig {
            dir: settings.home.join("git"),
            env: environment(),
            github_token: None,
            timeout: settings.git_timeout.as_duration(),
        });
        let provider = |kind| -> Arc<dyn Provider> { Arc::new(RemoteProvider::new(client.clone(), kind)) };
        let kinds = [ProviderKind::Local, ProviderKind::Docker, ProviderKind::E2b, ProviderKind::Daytona];
        let sandboxes = Sandboxes::new(kinds.into_iter().map(|kind| (kind, provider(kind))).collect());
        Ok(Remote { settings, client, git, sandboxes, doing: Doing::default() })
    }

    /// Every event of one machine, oldest first.
    async fn log(&self, run: &RunId, fork: Option<ForkNum>, kind: &str) -> Result<Vec<Recorded>> {
        let mut query = EventQuery { fork, kinds: vec![kind.into()], ..EventQuery::default() };
        let mut all = vec![];
        loop {
            let page = self.events(run, &query).await?;
            let Some(last) = page.last() else { return Ok(all) };
            query.after = last.position;
            all.extend(page);
        }
    }
}

fn run_path(run: &RunId) -> String {
    format!("/runs/{run}")
}

fn fork_path(run: &RunId, fork: ForkNum) -> String {
    format!("/runs/{run}/forks/{fork}")
}

fn unreadable(e: impl std::fmt::Display) -> CliError {
    CliError::failure(format!("the server's answer can't be read: {e}")).hint("use the newest forkyard")
}

#[async_trait]
impl Place for Remote {
    fn settings(&self) -> &Settings {
        &self.settings
    }
    fn here(&self) -> Option<&Yard> {
        None
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
        let found: Option<RunDetail> = self.client.find(&run_path(run), &[Code::RunNotFound]).await?;
        found.map(|d| run_view(d.run)).transpose()
    }

    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>> {
        let mut all = vec![];
        let mut cursor: Option<String> = None;
        while all.len() < query.limit {
            let limit = (query.limit - all.len()).min(PAGE);
            let after = cursor.map(|c| format!("&cursor={}", coded(&c))).unwrap_or_default();
            let page: RunPage =
                self.client.get(&format!("/runs?live={}&limit={limit}{after}", query.live)).await?;
            for run in page.runs {
                all.push(run_view(run)?);
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        Ok(all)
    }

    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        let found: Option<fork::ForkList> =
            self.client.find(&format!("{}/forks", run_path(run)), &[Code::RunNotFound]).await?;
        found.map(|l| l.forks).unwrap_or_default().into_iter().map(fork_view).collect()
    }

    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        let missing = [Code::RunNotFound, Code::ForkNotFound];
        let found: Option<fork::Fork> = self.client.find(&fork_path(run, fork), &missing).await?;
        found.map(fork_view).transpose()
    }

    async fn spent(&self, run: &RunId) -> Result<Usd> {
        let found: RunDetail = self.client.get(&run_path(run)).await?;
        dollars(found.spent_usd)
    }

    async fn events(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        let limit = if query.limit == 0 { PAGE } else { query.limit.min(PAGE) };
        let mut path = format!("{}/events?after={}&limit={limit}", run_path(run), query.after);
        if let Some(fork) = query.fork {
            path.push_str(&format!("&fork={fork}"));
        }
        if !query.kinds.is_empty() {
            // The API writes a category as `agent.*`.
            let star = |k: &String| if k.ends_with('.') { format!("{k}*") } else { k.clone() };
            let kinds: Vec<String> = query.kinds.iter().map(star).collect();
            path.push_str(&format!("&types={}", coded(&kinds.join(","))));
        }
        let page: EventPage = self.client.get(&path).await?;
        page.events.into_iter().map(recorded).collect()
    }

    fn watch(&self, run: &RunId) -> Watch {
        super::watch::watch(&self.client, run)
    }

    async fn run_log(&self, run: &RunId) -> Result<Option<Run>> {
        let mut events: Vec<(Timestamp, RunEvent)> = vec![];
        for r in self.log(run, None, "run.").await? {
            let e = event::decode_run(&r.event.kind, r.event.version, r.event.data).map_err(unreadable)?;
            events.push((r.event.at, e));
        }
        Ok(Run::replay(events.iter().map(|(at, e)| (*at, e))))
    }

    async fn fork_log(&self, run: &RunId, fork: ForkNum) -> Result<Option<Fork>> {
        let mut events: Vec<(Timestamp, ForkEvent)> = vec![];
        for r in self.log(run, Some(fork), "fork.").await? {
            let e = event::decode_fork(&r.event.kind, r.event.version, r.event.data).map_err(unreadable)?;
            events.push((r.event.at, e));
        }
        Ok(Fork::replay(events.iter().map(|(at, e)| (*at, e))))
    }

    async fn submit(&self, spec: RunSpec) -> Result<(RunId, Option<String>)> {
        let made: run::Run = self.client.post("/runs", &request::create(&spec)?).await?;
        Ok((RunId::new(made.id)?, None))
    }

    async fn command(&self, run: &RunId, command: Command) -> Result<()> {
        let at = run_path(run);
        let path = match &command {
            Command::Pause => format!("{at}/pause"),
            Command::Resume => format!("{at}/resume"),
            Command::Cancel => format!("{at}/cancel"),
            Command::CancelFork { fork } => format!("{}/cancel", fork_path(run, *fork)),
            Command::Detach | Command::AddForks { .. } => {
                return Err(CliError::failure(format!("{} can't be asked of a server", command.name())));
            }
        };
        self.client.post::<Value>(&path, &Value::Null).await.map(drop)
    }

    async fn message(&self, run: &RunId, fork: ForkNum, text: &StoredText) -> Result<()> {
        let message = Message { content: text.content.clone(), kind: text.kind.into() };
        self.client.post::<Value>(&format!("{}/messages", fork_path(run, fork)), &message).await.map(drop)
    }

    async fn add(&self, run: &RunId, count: u32, like: &Like) -> Result<()> {
        let body = AddForks { forks: Some(count), prompt: like.prompt.clone(), model: like.model.clone() };
        self.client.post::<Value>(&format!("{}/forks", run_path(run)), &body).await.map(drop)
    }

    async fn changes(&self, view: &RunView, fork: ForkNum) -> Result<Option<Changes>> {
        let path = format!("{}/diff", fork_path(&view.id, fork));
        let found: Option<Diff> = self.client.find(&path, &[Code::NoResult]).await?;
        let Some(d) = found else { return Ok(None) };
        let files = d.files.iter().map(file_change).collect::<Result<_>>()?;
        Ok(Some(Changes { base: d.base, commit: d.commit, files }))
    }

    async fn patch(&self, view: &RunView, fork: ForkNum, paths: &[String]) -> Result<Vec<u8>> {
        let at = format!("{}/patch?text=true", fork_path(&view.id, fork));
        let wanted: Vec<String> = match paths {
            [] => vec![at],
            paths => paths.iter().map(|p| format!("{at}&path={}", coded(p))).collect(),
        };
        let mut patch = vec![];
        for path in wanted {
            patch.extend_from_slice(&self.client.bytes(&path, &[]).await?.unwrap_or_default());
        }
        Ok(patch)
    }

    async fn whole_patch(&self, view: &RunView, fork: ForkNum) -> Result<Vec<u8>> {
        let path = format!("{}/patch", fork_path(&view.id, fork));
        Ok(self.client.bytes(&path, &[]).await?.unwrap_or_default().into())
    }

    async fn commits(&self, view: &RunView, fork: ForkNum) -> Result<Vec<CommitInfo>> {
        let found: Commits = self.client.get(&format!("{}/commits", fork_path(&view.id, fork))).await?;
        let info = |c: fork::Commit| CommitInfo {
            id: c.id,
            author: c.author,
            at: Timestamp(c.at),
            subject: c.subject,
        };
        Ok(found.commits.into_iter().map(info).collect())
    }

    async fn compare(&self, view: &RunView, forks: &[ForkNum]) -> Result<Comparison> {
        let list: Vec<String> = forks.iter().map(ToString::to_string).collect();
        let path = format!("{}/compare?forks={}", run_path(&view.id), list.join(","));
        if forks.is_empty() {
            return Ok(Comparison::default());
        }
        let found: Option<result::Comparison> = self.client.find(&path, &[Code::NoResult]).await?;
        let Some(found) = found else { return Ok(Comparison::default()) };
        let mut comparison = Comparison {
            changes: found.forks.iter().map(|n| (*n, BTreeMap::new())).collect(),
            files: BTreeMap::new(),
        };
        for file in found.files {
            for c in &file.changes {
                let letter = c.variant.chars().next().unwrap_or('?');
                comparison.files.entry(file.path.clone()).or_default().insert(c.fork, letter);
                let changes = comparison.changes.entry(c.fork).or_default();
                changes.insert(file.path.clone(), file_change(&c.change)?);
            }
        }
        Ok(comparison)
    }

    async fn captured(&self, run: &RunId, fork: ForkNum, path: &str) -> Result<Option<Vec<u8>>> {
        let at = format!("{}/captured/content?path={}", fork_path(run, fork), coded(path));
        Ok(self.client.bytes(&at, &[Code::FileNotFound]).await?.map(Into::into))
    }

    async fn cleanup(&self, max_age: Millis, dry_run: bool) -> Result<Cleaned> {
        self.client.post("/cleanup", &Chore { older_than_ms: max_age.0, dry_run }).await
    }
    async fn stop_cleanup(&self, engine: EngineKind) -> Result<CleanupStopped> {
        self.client.post("/cleanup/stop", &StopCleanup { engine: engine.into() }).await
    }
    async fn make_token(&self, request: CreateToken) -> Result<NewToken> {
        self.client.post("/tokens", &request).await
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        Ok(self.client.get::<Tokens>("/tokens").await?.tokens)
    }
    async fn revoke_token(&self, id: &str) -> Result<bool> {
        let request = self.client.request(Method::DELETE, &format!("/tokens/{}", segment(id)));
        match self.client.send(request).await {
            Ok(_) => Ok(true),
            Err(Refused::Said(e)) if e.code == Code::TokenNotFound => Ok(false),
            Err(e) => Err(self.client.error(e)),
        }
    }
    async fn gc(&self, older_than: Millis, dry_run: bool) -> Result<Freed> {
        self.client.post("/gc", &Chore { older_than_ms: older_than.0, dry_run }).await
    }

    async fn record(&self, _: &str, _: &str, _: Value) -> Result<()> {
        Ok(())
    }

    async fn branch(&self, view: &RunView, fork: ForkNum, into: &Repo, name: &str) -> Result<()> {
        let changes = crate::place::the_changes(self, view, fork).await?;
        let (base, commit) = (CommitId::new(&changes.base)?, CommitId::new(&changes.commit)?);
        let path = format!("{}/pack", fork_path(&view.id, fork));
        let pack = self.client.bytes(&path, &[]).await?.unwrap_or_default();
        self.git.apply_pack(pack.into(), &base, &commit, into, name).await?;
        Ok(())
    }
}

fn dollars(d: f64) -> Result<Usd> {
    Usd::from_dollars(d).ok_or_else(|| unreadable(format!("{d} is not an amount")))
}

fn run_view(r: run::Run) -> Result<RunView> {
    let limit = |d: Option<f64>| d.map(dollars).transpose();
    Ok(RunView {
        id: RunId::new(r.id)?,
        engine: r.engine.into(),
        status: r.status.into(),
        outcome: r.outcome.map(Into::into),
        paused: r.paused,
        detached: r.detached,
        cancelling: r.cancelling,
        repo: r.repo,
        branch: r.branch,
        prompt: r.prompt,
        limits: BudgetLimits { run: limit(r.budget_usd)?, fork: limit(r.fork_budget_usd)? },
        created_at: Timestamp(r.created_at),
        updated_at: Timestamp(r.updated_at),
        ended_at: r.ended_at.map(Timestamp),
        progress: Progress {
            total_forks: r.progress.total_forks,
            pending: r.progress.pending,
            in_progress: r.progress.in_progress,
            completed: r.progress.completed,
            failed: r.progress.failed,
        },
        error: r.error,
        ranking: r.ranking,
        winner: r.winner,
    })
}

fn fork_view(f: fork::Fork) -> Result<ForkView> {
    Ok(ForkView {
        run: RunId::new(f.run)?,
        fork: f.fork,
        attempt: Attempt(f.attempt),
        lifecycle: f.lifecycle.into(),
        phase: f.phase,
        outcome: f.outcome.map(Into::into),
        sandbox: f.sandbox_id.map(SandboxId::new).transpose()?,
        name: f.name,
        model: f.model,
        verified: f.verified,
        score: f.score,
        turns: f.turns,
        tool_calls: f.tool_calls,
        cost: dollars(f.cost_usd)?,
        tokens: f.tokens,
        diff: f.diff.map(|d| DiffStat { files: d.files, added: d.added, removed: d.removed }),
        driven: Millis(f.driven_ms),
        created_at: Timestamp(f.created_at),
        updated_at: Timestamp(f.updated_at),
        started_at: f.started_at.map(Timestamp),
        ended_at: f.ended_at.map(Timestamp),
        error: f.error,
    })
}

/// Which of a fork's two streams it is of, its kind tells; the attempt is not among what the API says.
fn recorded(e: Event) -> Result<Recorded> {
    let run = RunId::new(e.run)?;
    let stream = match e.fork {
        None => StreamId::Run(run),
        Some(fork) if e.kind.starts_with("fork.") => StreamId::Fork(run, fork),
        Some(fork) => StreamId::Journal(run, fork, Attempt(0)),
    };
    let event = NewEvent {
        kind: e.kind,
        version: e.version,
        at: Timestamp(e.at),
        source: e.source.into(),
        sandbox: e.sandbox_id.map(SandboxId::new).transpose()?,
        data: e.data,
    };
    Ok(Recorded { stream, seq: e.seq, position: e.position, event })
}

fn file_change(f: &ChangedFile) -> Result<FileChange> {
    let mode = |text: &str| u32::from_str_radix(text, 8).map_err(unreadable);
    Ok(FileChange {
        path: f.path.clone(),
        kind: f.kind.into(),
        lines: f.added.zip(f.removed).map(|(added, removed)| Lines { added, removed }),
        old_mode: mode(&f.old_mode)?,
        new_mode: mode(&f.new_mode)?,
    })
}
