//! Activities over plain files, for tests with real processes: a sandbox is a folder, its guest a lock and a log in it.
//!
//! The agent works in turns. Each sets money aside, "asks a model", runs one command by its call id, and writes its
//! journal; it continues from the journal, as the real one does. All of it goes through the real store.
//!
//! A fork's prompt may say how it behaves, in words: `turns=5`, `pace=100` (milliseconds), `fails=TASK:2` (so often, then not),
//! `refuses=TASK` (always), `loses=3` (its sandbox is gone after that turn, once),
//! `answers=1000` (bytes of its last words).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::Ask;
use forkyard_core::task::*;
use forkyard_core::view::DiffStat;
use forkyard_core::{Attempt, ForkNum, HostId, RunId, SandboxId, SnapshotId, Timestamp, Usd};
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::sweep::{Found, Yard};
use forkyard_store::{AppendJournal, NewEvent, Reserve, Result as StoreResult, Sending, Source, Store};

/// What one answer of the model costs.
pub const COST: Usd = Usd(10);
/// And at most, if nobody hears what it cost.
pub const WORST: Usd = Usd(100);
/// Between two tries of a store that is away, or of money that others hold.
const AGAIN: Duration = Duration::from_millis(50);

pub struct FileActivities {
    pub host: HostId,
    pub folder: PathBuf,
    pub store: Arc<dyn Store>,
    pub turns: usize,
    /// How long the model takes for an answer.
    pub pace: Duration,
}

/// What a prompt says of this.
fn word<'a>(job: &'a Job, name: &str) -> Option<&'a str> {
    let prompt = match &job.fork {
        Some((_, fork)) => &fork.prompt,
        None => &job.spec.forks.first()?.prompt,
    };
    prompt.split_whitespace().find_map(|w| w.strip_prefix(name)?.strip_prefix('='))
}

fn number<T: std::str::FromStr>(job: &Job, name: &str) -> Option<T> {
    word(job, name)?.parse().ok()
}

fn fail(class: ErrorClass, why: impl ToString) -> TaskError {
    TaskError::new(class, why.to_string())
}

pub fn host() -> HostId {
    HostId::new("files").expect("a valid id")
}

/// What a stored call that may pass is worth: another try.
async fn patiently<T, F: Future<Output = StoreResult<T>>>(
    mut ask: impl FnMut() -> F,
) -> Result<T, TaskError> {
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(e) if e.is_retryable() => tokio::time::sleep(AGAIN).await,
            Err(e) => return Err(fail(ErrorClass::Permanent, e)),
        }
    }
}

/// Held while it lives, also against other processes; the kernel frees it with its process.
struct Locked(File);

impl Locked {
    fn take(folder: &Path) -> io::Result<Locked> {
        let file = OpenOptions::new().read(true).write(true).open(folder.join("attempt"))?;
        // SAFETY: a plain system call on a file that is open.
        match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } {
            0 => Ok(Locked(file)),
            _ => Err(io::Error::last_os_error()),
        }
    }
    /// The newest attempt that came; an older one is refused. In one write of fixed length, so that no kill tears it.
    fn admit(&mut self, attempt: Attempt) -> io::Result<bool> {
        let mut text = String::new();
        self.0.read_to_string(&mut text)?;
        if text.trim().parse::<u32>().unwrap_or(0) > attempt.0 {
            return Ok(false);
        }
        std::os::unix::fs::FileExt::write_all_at(&self.0, format!("{:8}", attempt.0).as_bytes(), 0)?;
        Ok(true)
    }
}

impl FileActivities {
    fn path(&self, sandbox: &SandboxId) -> PathBuf {
        self.folder.join("sandboxes").join(sandbox.as_str())
    }

    /// Idempotent: what is there stays.
    fn create(&self, run: &RunId, sandbox: &SandboxId) -> Result<(), TaskError> {
        let make = || -> io::Result<()> {
            let path = self.path(sandbox);
            fs::create_dir_all(&path)?;
            fs::write(path.join("run"), run.as_str())?;
            OpenOptions::new().create(true).append(true).open(path.join("attempt"))?;
            Ok(())
        };
        make().map_err(|e| fail(ErrorClass::Transient, e))
    }

    fn attach(&self, sandbox: &SandboxId, attempt: Attempt) -> Result<Locked, TaskError> {
        let mut locked = Locked::take(&self.path(sandbox)).map_err(|e| fail(ErrorClass::SandboxLost, e))?;
        match locked.admit(attempt) {
            Ok(true) => Ok(locked),
            Ok(false) => Err(fail(ErrorClass::Permanent, "a newer attempt owns the sandbox")),
            Err(e) => Err(fail(ErrorClass::SandboxLost, e)),
        }
    }

    /// By call id: a command that ran is handed over, not run again.
    fn exec(&self, sandbox: &SandboxId, attempt: Attempt, call: &str) -> Result<(), TaskError> {
        let _locked = self.attach(sandbox, attempt)?;
        let run = || -> io::Result<()> {
            let log = self.path(sandbox).join("log");
            let ran = fs::read_to_string(&log).unwrap_or_default();
            if !ran.lines().any(|line| line == call) {
                let line = format!("{call}\n");
                OpenOptions::new().create(true).append(true).open(log)?.write_all(line.as_bytes())?;
            }
            Ok(())
        };
        run().map_err(|e| fail(ErrorClass::SandboxLost, e))
    }

    /// So often as the prompt says; counted in a file, whichever process does it.
    fn misbehave(&self, job: &Job) -> Result<(), TaskError> {
        let kind = job.task.kind().as_str();
        if word(job, "refuses") == Some(kind) {
            return Err(fail(ErrorClass::Permanent, "as it was told to"));
        }
        let Some((task, times)) = word(job, "fails").and_then(|w| w.split_once(':')) else { return Ok(()) };
        if task != kind || !self.once_more(job, kind, times.parse().unwrap_or(0)) {
            return Ok(());
        }
        Err(fail(ErrorClass::Transient, "as it was told to"))
    }

    /// True for the first `times` that it is asked.
    fn once_more(&self, job: &Job, what: &str, times: u64) -> bool {
        let folder = self.folder.join("counts");
        let name = format!("{}-{}-{what}", job.run, job.fork.as_ref().map_or(0, |f| f.0));
        let count = || -> io::Result<bool> {
            fs::create_dir_all(&folder)?;
            let mut file = OpenOptions::new().create(true).append(true).open(folder.join(name))?;
            let so_far = file.metadata()?.len();
            if so_far < times {
                file.write_all(b".")?;
            }
            Ok(so_far < times)
        };
        count().unwrap_or(false)
    }

    /// Messages that wait, taken in with one entry of the journal.
    async fn listen(
        &self,
        job: &Job,
        fork: ForkNum,
        sandbox: &SandboxId,
        seq: u64,
    ) -> Result<u64, TaskError> {
        let waiting = patiently(|| self.store.pending_messages(&job.run, fork)).await?;
        if waiting.is_empty() {
            return Ok(seq);
        }
        let event =
            entry("agent.message_injected", sandbox, serde_json::json!({ "messages": waiting.len() }));
        let deliver = waiting.iter().map(|m| m.id).collect();
        self.journal(&job.run, fork, job.attempt, seq, event, deliver).await
    }

    async fn agent(&self, job: &Job, fork: ForkNum, sandbox: &SandboxId) -> TaskResult {
        let (run, attempt) = (&job.run, job.attempt);
        drop(self.attach(sandbox, attempt)?);
        let entries = patiently(|| self.store.read_journals(run, fork)).await?;
        let mut turn = entries.iter().filter(|e| e.event.kind == TURN).count();
        let pace = number(job, "pace").map_or(self.pace, Duration::from_millis);
        let mut seq = self.listen(job, fork, sandbox, 0).await?;
        while turn < self.turns(job) {
            if number(job, "loses") == Some(turn) && self.once_more(job, "loses", 1) {
                let _ = fs::remove_dir_all(self.path(sandbox));
            }
            job.heartbeat.beat();
            let request = format!("{fork}/{attempt}/{turn}");
            self.send(job, fork, &request).await?;
            tokio::select! {
                biased;
                () = job.cancel.cancelled() => {
                    patiently(|| self.store.settle(run, &request, COST)).await?;
                    return Err(fail(ErrorClass::Cancelled, "stopped"));
                }
                () = tokio::time::sleep(pace) => {}
            }
            patiently(|| self.store.settle(run, &request, COST)).await?;
            self.exec(sandbox, attempt, &format!("call-{turn}"))?;
            let event = entry(TURN, sandbox, serde_json::json!({ "turn": turn }));
            seq = self.journal(run, fork, attempt, seq, event, vec![]).await?;
            seq = self.listen(job, fork, sandbox, seq).await?;
            turn += 1;
        }
        let turns = turn as u32;
        let final_response = "x".repeat(number(job, "answers").unwrap_or(0));
        Ok(Output::Agent(AgentReport {
            stop: AgentStop::Finished,
            turns,
            final_response,
            ..Default::default()
        }))
    }

    async fn send(&self, job: &Job, fork: ForkNum, request: &str) -> Result<(), TaskError> {
        let (run, attempt) = (&job.run, job.attempt);
        loop {
            job.heartbeat.beat();
            let ask = Ask { fork, attempt, request: request.into(), worst: WORST };
            match patiently(|| self.store.reserve(run, ask.clone())).await? {
                Reserve::Granted => match patiently(|| self.store.mark_sent(run, request)).await? {
                    Sending::Go => return Ok(()),
                    Sending::Stale { .. } => return Err(fail(ErrorClass::Permanent, "stale")),
                    Sending::Paused => patiently(|| self.store.release_reservation(run, request)).await?,
                },
                Reserve::Stale { .. } => return Err(fail(ErrorClass::Permanent, "stale")),
                Reserve::Short { outstanding: false, .. } => {
                    return Err(fail(ErrorClass::BudgetExceeded, "nothing is left"));
                }
                Reserve::Short { .. } | Reserve::Paused => {}
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// The journal's length. An answer that was lost is found out by the conflict that follows.
    async fn journal(
        &self,
        run: &RunId,
        fork: ForkNum,
        attempt: Attempt,
        expected: u64,
        event: NewEvent,
        deliver: Vec<u64>,
    ) -> Result<u64, TaskError> {
        use forkyard_store::StoreError;
        let append =
            AppendJournal { run: run.clone(), fork, attempt, expected, events: vec![event], deliver };
        let mut in_doubt = false;
        loop {
            match self.store.append_journal(append.clone()).await {
                Ok(done) => return Ok(done.seq),
                Err(StoreError::Conflict { actual, .. }) if in_doubt && actual == expected + 1 => {
                    return Ok(actual);
                }
                Err(e) if e.is_retryable() => {
                    in_doubt = true;
                    tokio::time::sleep(AGAIN).await;
                }
                Err(e) => return Err(fail(ErrorClass::Permanent, e)),
            }
        }
    }

    fn turns(&self, job: &Job) -> usize {
        number(job, "turns").unwrap_or(self.turns)
    }

    /// What a fork's commands left behind.
    fn result(&self, sandbox: &SandboxId) -> String {
        fs::read_to_string(self.path(sandbox).join("log")).unwrap_or_default()
    }
}

#[async_trait]
impl Activities for FileActivities {
    async fn perform(&self, job: Job) -> TaskResult {
        let fork = job.fork.as_ref().map_or(0, |f| f.0);
        self.misbehave(&job)?;
        match &job.task {
            Task::PrepareBase { sandbox } => {
                self.create(&job.run, sandbox)?;
                let snapshot = SnapshotId::new(format!("{}base", job.run)).expect("a valid id");
                Ok(Output::Base(Base {
                    commit: "c0".into(),
                    branch: "main".into(),
                    snapshot,
                    host: self.host.clone(),
                }))
            }
            Task::VerifyBase { sandbox, .. } => {
                self.create(&job.run, sandbox)?;
                Ok(Output::BaseVerified(Verdict { passed: Some(false), ..Default::default() }))
            }
            Task::CheckBudget => Ok(Output::BudgetOk),
            Task::CreateSandbox { sandbox, .. } => {
                self.create(&job.run, sandbox)?;
                Ok(Output::Created { host: self.host.clone() })
            }
            Task::HealthCheck { sandbox } => match self.path(sandbox).join("attempt").exists() {
                true => Ok(Output::Healthy),
                false => Err(fail(ErrorClass::SandboxLost, "it is gone")),
            },
            Task::RunAgent { sandbox, .. } => self.agent(&job, fork, sandbox).await,
            Task::Collect { sandbox, .. } => {
                let log = self.result(sandbox);
                let diff = DiffStat { files: 1, added: log.lines().count() as u64, removed: 0 };
                Ok(Output::Collected(Collected {
                    commit: log.replace('\n', " "),
                    diff,
                    from_checkpoint: false,
                    captured: vec![],
                    edited_tests: vec![],
                    ..Default::default()
                }))
            }
            Task::Verify { sandbox, commit, .. } => {
                self.create(&job.run, sandbox)?;
                // What a lost sandbox took with it is not asked for.
                let least = if word(&job, "loses").is_some() { 1 } else { self.turns(&job) };
                let passed = commit.split_whitespace().count() >= least;
                let score = Some(f64::from(fork));
                Ok(Output::Verified(Verdict { passed: Some(passed), score, ..Default::default() }))
            }
            Task::Publish { collected } => {
                let results = self.folder.join("results");
                let write = || {
                    fs::create_dir_all(&results)?;
                    fs::write(results.join(format!("{}-{fork}", job.run)), &collected.commit)
                };
                write().map_err(|e: io::Error| fail(ErrorClass::Transient, e))?;
                Ok(Output::Published { reference: format!("refs/forkyard/{}/{fork}", job.run) })
            }
            Task::Destroy { sandbox } => match fs::remove_dir_all(self.path(sandbox)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(fail(ErrorClass::Transient, e)),
                Ok(()) | Err(_) => Ok(Output::Destroyed),
            },
        }
    }
}

/// One turn of the agent.
const TURN: &str = "agent.assistant_message";

fn entry(kind: &str, sandbox: &SandboxId, data: serde_json::Value) -> NewEvent {
    NewEvent {
        kind: kind.into(),
        version: 1,
        at: Timestamp(1),
        source: Source::Agent,
        sandbox: Some(sandbox.clone()),
        data,
    }
}

/// All sandboxes under a folder, for the sweep and for tests that look for leaks.
pub struct FileYard(pub PathBuf);

#[async_trait]
impl Yard for FileYard {
    async fn list(&self) -> Result<Vec<Found>, String> {
        let entries = fs::read_dir(self.0.join("sandboxes")).into_iter().flatten().flatten();
        let found = entries.filter_map(|e| {
            let run = fs::read_to_string(e.path().join("run")).ok().and_then(|r| RunId::new(r).ok());
            Some(Found { id: SandboxId::new(e.file_name().to_str()?).ok()?, run, created_at: Timestamp(0) })
        });
        Ok(found.collect())
    }
    async fn destroy(&self, id: &SandboxId) -> Result<(), String> {
        match fs::remove_dir_all(self.0.join("sandboxes").join(id.as_str())) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.to_string()),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}
