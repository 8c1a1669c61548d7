//! An agent that runs inside its sandbox, seen from outside: its program is placed there, started under a call id that
//! outlives this process, listened to through the store, and asked to stop.
//!
//! Who comes after a crash finds it at work, hands it a token of the new attempt, and goes on listening. What it says of
//! itself is testimony: turns and words are the journal's, money is the ledger's, and files are collected from outside.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkyard_agent::event::Completed;
use forkyard_agent::{AgentEvent, AgentOutcome, JournalEntry};
use forkyard_core::spec::ForkSpec;
use forkyard_core::task::{Base, ErrorClass, TaskError, TaskResult};
use forkyard_core::{CallId, Millis, SandboxId};
use forkyard_sandbox::{ErrorKind, Exec, ExecEvent, ExecRequest, ExecResult, Sandbox, Signal};
use forkyard_store::{EventQuery, Recorded, Source};

use super::agent::finished;
use super::checkpoint::read;
use super::{Hands, Job, now, sandbox_error, sandbox_gone, store_error, tail};
use crate::inside::{
    CALLBACK_URL, Claims, HEARTBEAT, TASK_COMPLETED, TOKEN_LIFETIME, TaskData, Tokens, WORKER_DIR,
};
use crate::log::load_fork;
use crate::models::{OPENAI, SCRIPT};
use crate::ports::Tenure;

/// The call that the worker runs as, in every attempt.
const CALL: &str = "forkyardworker";
/// It comes to a safe point and goes, or is ended.
const STOP_GRACE: Duration = Duration::from_secs(8);
/// A worker that said that it is done has this long to end by itself.
const END_GRACE: Duration = Duration::from_secs(10);
/// What it printed last, for people.
const MAX_WORDS: usize = 8 << 10;
/// Messages, answers and news wake it; this is for a store that can't tell.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A worker that has not been heard of for this long is ended, however short its heartbeat is: a loaded machine is slow.
const LEAST_SILENCE: Duration = Duration::from_secs(20);

/// What a host needs to let agents work inside.
pub struct Inside {
    tokens: Tokens,
    /// Placed in the sandbox and started there.
    program: PathBuf,
    /// Sandboxes between the health check that started a worker and the task that listens to it: the worker's way out is
    /// theirs, and a request that is under way must not lose it.
    held: Mutex<BTreeMap<SandboxId, Arc<dyn Sandbox>>>,
}

impl Inside {
    pub fn new(tokens: Tokens, program: PathBuf) -> Inside {
        Inside { tokens, program, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Arc<dyn Sandbox>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn let_go(&self, id: &SandboxId) -> Option<Arc<dyn Sandbox>> {
        self.held().remove(id)
    }
}

/// How a worker came to its end.
enum End {
    Exited(ExecResult),
    /// It has said that it is done; the exit did not follow in time, or the line to it broke.
    Done,
    Cancelled,
}

impl Hands {
    fn inside(&self) -> Result<&Arc<Inside>, TaskError> {
        self.config.inside.as_ref().ok_or_else(|| {
            TaskError::new(ErrorClass::Permanent, "this host does not let agents work inside sandboxes")
        })
    }

    /// Before anything is made: can the run's agents work inside at all?
    pub(super) fn check_inside(&self, job: &Job) -> Result<(), TaskError> {
        if !job.spec.agent.in_sandbox {
            return Ok(());
        }
        self.inside()?;
        let other = |f: &&ForkSpec| f.model.starts_with(SCRIPT) || f.model.starts_with(OPENAI);
        match job.spec.forks.iter().find(other) {
            Some(fork) => Err(TaskError::new(
                ErrorClass::Permanent,
                format!(
                    "agent.in_sandbox: {} is not served inside sandboxes; use a model of Anthropic's API, or run the agent outside",
                    fork.model
                ),
            )),
            None => Ok(()),
        }
    }

    fn home(&self) -> String {
        format!("{}/{WORKER_DIR}", self.config.policy.home)
    }

    /// Puts the program where all forks of a base find it. Named by its size and time: another build is another file.
    pub(super) async fn place_worker(&self, sandbox: &dyn Sandbox) -> Result<String, TaskError> {
        let inside = self.inside()?;
        let host = |e: std::io::Error| {
            TaskError::new(ErrorClass::Permanent, format!("{}: {e}", inside.program.display()))
        };
        let meta = tokio::fs::metadata(&inside.program).await.map_err(host)?;
        let built = meta.modified().map_err(host)?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let path = format!("{}/worker-{:x}-{:x}", self.home(), meta.len(), built.as_millis());
        match sandbox.stat(&path).await {
            Ok(there) if there.size == meta.len() => return Ok(path),
            Ok(_) => {}
            Err(e) if e.kind == ErrorKind::NotFound => {}
            Err(e) => return Err(sandbox_gone(e)),
        }
        let mut file = tokio::fs::File::open(&inside.program).await.map_err(host)?;
        sandbox.write_file_from(&path, &mut file, Some(0o755)).await.map_err(sandbox_error)?;
        Ok(path)
    }

    /// A fork whose agent works inside is well once its worker has shown a sign of life.
    pub(super) async fn start_worker(&self, job: &Job, sandbox: Arc<dyn Sandbox>) -> Result<(), TaskError> {
        let fork = load_fork(&*self.store, &job.run, Self::fork(job)).await;
        let fork = fork.map_err(|e| TaskError::new(ErrorClass::Transient, e.to_string()))?;
        let Some((fork, _)) = fork else {
            return Err(TaskError::new(ErrorClass::Permanent, "an agent needs a fork"));
        };
        let mut listener = self.listener(job, sandbox.id()).await?;
        let (mut exec, _) = self.worker(job, &sandbox, &fork.plan().base).await?;
        let mut words = Words::default();
        let mut watch = self.store.watch(Some(&job.run));
        loop {
            if listener.news(&*self.store).await?.alive {
                self.inside()?.held().insert(sandbox.id().clone(), sandbox);
                return Ok(());
            }
            tokio::select! {
                () = watch.changed() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                event = exec.events.recv() => match event {
                    Some(Ok(ExecEvent::Exit(result))) => {
                        // Whoever is quick may have begun and ended in the meantime.
                        if listener.news(&*self.store).await?.alive {
                            return Ok(());
                        }
                        let _ = sandbox.forget(&call()).await;
                        let why = format!("the worker did not start inside: {}", words.diagnosis(&result));
                        return Err(TaskError::new(ErrorClass::Permanent, why));
                    }
                    Some(Ok(event)) => words.add(event),
                    Some(Err(e)) => return Err(sandbox_gone(e)),
                    None => return Err(lost_line()),
                },
            }
        }
    }

    /// One attempt of an agent inside: started if it does not run, listened to until it ends.
    pub(super) async fn run_inside(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        let Some((fork, _)) = job.fork.clone() else {
            return Err(TaskError::new(ErrorClass::Permanent, "an agent needs a fork"));
        };
        let tenure = Tenure {
            store: self.store.clone(),
            run: job.run.clone(),
            fork,
            attempt: job.attempt,
            sandbox: id.clone(),
        };
        let held = self.inside()?.let_go(id).filter(|s| s.attempt() == job.attempt);
        let attached = match held {
            Some(sandbox) => Ok(sandbox),
            None => self.provider(job)?.attach(id, job.attempt).await,
        };
        let sandbox = match attached {
            Ok(sandbox) => sandbox,
            Err(e) => return Err(self.with_report(&tenure, sandbox_gone(e)).await),
        };
        let ended = self.listen(job, id, &sandbox, base).await;
        let (end, words, token) = match ended {
            Ok(ended) => ended,
            Err(e) => return Err(self.with_report(&tenure, e).await),
        };
        // The next attempt starts another.
        let _ = sandbox.forget(&call()).await;
        self.inside()?.tokens.revoke(&token).await.map_err(store_error)?;
        let entries = read(&*self.store, &job.run, fork).await?;
        let spent = self.spent(&tenure.run, tenure.fork).await;
        let error = match (&end, completed(&entries)) {
            (End::Cancelled, _) => TaskError::new(ErrorClass::Cancelled, "was stopped"),
            (End::Exited(_) | End::Done, Some(done)) => {
                let outcome = outcome(done, &entries);
                return finished(AgentOutcome { cost: outcome.cost.max(spent), ..outcome });
            }
            (End::Done, None) => match self.reported(id).await? {
                Some(outcome) => return finished(AgentOutcome { cost: spent, ..outcome }),
                None => TaskError::new(ErrorClass::Transient, "the worker said that it is done, and not how"),
            },
            (End::Exited(result), None) => {
                let why = format!("the worker ended without a result: {}", words.diagnosis(result));
                TaskError::new(ErrorClass::Transient, why)
            }
        };
        Err(self.with_report(&tenure, error).await)
    }

    /// Until it ends, by itself or because somebody wants it to.
    async fn listen(
        &self,
        job: &Job,
        id: &SandboxId,
        sandbox: &Arc<dyn Sandbox>,
        base: &Base,
    ) -> Result<(End, Words, String), TaskError> {
        let mut listener = self.listener(job, id).await?;
        let (mut exec, token) = self.worker(job, sandbox, base).await?;
        let mut watch = self.store.watch(Some(&job.run));
        let mut words = Words::default();
        let mut done_at: Option<tokio::time::Instant> = None;
        // Before the third heartbeat in a row is missed, when the engine would take the whole task for lost.
        let patience = (self.config.agent.heartbeat * 5 / 2).max(LEAST_SILENCE);
        let mut heard_at = tokio::time::Instant::now();
        loop {
            let news = listener.news(&*self.store).await?;
            if news.any {
                job.heartbeat.beat();
                heard_at = tokio::time::Instant::now();
            }
            if let Some(onlooker) = self.onlooker.as_ref().filter(|_| !news.entries.is_empty()) {
                onlooker.recorded(&job.run, Self::fork(job), &news.entries);
            }
            if news.done && done_at.is_none() {
                done_at = Some(tokio::time::Instant::now() + END_GRACE);
            }
            let overdue = async {
                match done_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = job.cancel.cancelled() => {
                    stop(&mut exec).await;
                    return Ok((End::Cancelled, words, token));
                }
                event = exec.events.recv() => match event {
                    Some(Ok(ExecEvent::Exit(result))) => return Ok((End::Exited(result), words, token)),
                    Some(Ok(event)) => words.add(event),
                    Some(Err(e)) if e.kind == ErrorKind::Stale => return Err(sandbox_error(e)),
                    Some(Err(e)) => return Err(sandbox_gone(e)),
                    None => return Err(lost_line()),
                },
                () = overdue => {
                    stop(&mut exec).await;
                    return Ok((End::Done, words, token));
                }
                () = tokio::time::sleep_until(heard_at + patience) => {
                    stop(&mut exec).await;
                    let _ = sandbox.forget(&call()).await;
                    let why = format!("nothing was heard of the worker for {} s", patience.as_secs());
                    return Err(TaskError::new(ErrorClass::Transient, why));
                }
                () = watch.changed() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    /// The worker's command, running since now or since an earlier attempt, with a token of this one.
    async fn worker(
        &self,
        job: &Job,
        sandbox: &Arc<dyn Sandbox>,
        base: &Base,
    ) -> Result<(Exec, String), TaskError> {
        let inside = self.inside()?;
        let Some((fork, spec)) = job.fork.clone() else {
            return Err(TaskError::new(ErrorClass::Permanent, "an agent needs a fork"));
        };
        let claims = Claims {
            sandbox: sandbox.id().clone(),
            run: job.run.clone(),
            fork,
            attempt: job.attempt,
            expires_at: now() + TOKEN_LIFETIME,
        };
        let token = inside.tokens.issue(&claims).await.map_err(store_error)?;
        let home = self.home();
        let token_file = format!("{home}/token");
        sandbox
            .write_file(&token_file, token.clone().into_bytes().into(), Some(0o600))
            .await
            .map_err(sandbox_gone)?;
        let program = self.place_worker(&**sandbox).await?;
        let entries = read(&*self.store, &job.run, fork).await?;
        let (config, policy) = self.agent_config(job, fork, &spec, base, &entries, &**sandbox).await?;
        let task = TaskData::new(sandbox.id().clone(), &config, policy);
        let task_file = format!("{home}/task.json");
        let json =
            serde_json::to_vec(&task).map_err(|e| TaskError::new(ErrorClass::Permanent, e.to_string()))?;
        sandbox.write_file(&task_file, json.into(), Some(0o600)).await.map_err(sandbox_gone)?;
        let mut request = ExecRequest::new([program.as_str(), "worker", "--in-sandbox"]).call(call());
        request.env = task.variables(&job.spec, !entries.is_empty());
        for (name, value) in [
            ("CALLBACK_URL", CALLBACK_URL),
            ("ANTHROPIC_BASE_URL", CALLBACK_URL),
            ("FORKYARD_TOKEN_FILE", token_file.as_str()),
            ("FORKYARD_TASK_FILE", task_file.as_str()),
            ("FORKYARD_WORKER_DIR", home.as_str()),
        ] {
            request.env.insert(name.to_string(), value.to_string());
        }
        let exec = sandbox.exec(request).await.map_err(sandbox_gone)?;
        Ok((exec, token))
    }

    async fn listener(&self, job: &Job, id: &SandboxId) -> Result<Listener, TaskError> {
        let after = self.store.last_position(&job.run).await.map_err(store_error)?;
        Ok(Listener { sandbox: id.clone(), after })
    }

    /// What a worker that keeps no journal of ours said of its end.
    async fn reported(&self, id: &SandboxId) -> Result<Option<AgentOutcome>, TaskError> {
        let query = EventQuery {
            kinds: vec![TASK_COMPLETED.into()],
            newest_first: true,
            limit: 1,
            ..Default::default()
        };
        let found = self.store.read_sandbox(id, &query).await.map_err(store_error)?;
        let done =
            found.into_iter().next().and_then(|r| serde_json::from_value::<Completed>(r.event.data).ok());
        Ok(done.map(|done| outcome(&done, &[])))
    }
}

fn call() -> CallId {
    CallId::from_text(CALL)
}

fn lost_line() -> TaskError {
    TaskError::new(ErrorClass::SandboxLost, "the line to the sandbox was lost")
}

/// Asks it to come to a safe point, and waits for that; whoever does not is ended.
async fn stop(exec: &mut Exec) {
    let gone = async |exec: &mut Exec, within: Duration| {
        let wait = async {
            while let Some(Ok(event)) = exec.events.recv().await {
                if matches!(event, ExecEvent::Exit(_)) {
                    return;
                }
            }
        };
        tokio::time::timeout(within, wait).await.is_ok()
    };
    if exec.control.signal(Signal::Term).await.is_err() || gone(exec, STOP_GRACE).await {
        return;
    }
    if let Err(e) = exec.control.signal(Signal::Kill).await {
        tracing::debug!("the worker could not be ended: {e}");
    }
    gone(exec, STOP_GRACE).await;
}

/// What was recorded of a sandbox since the last look.
struct Listener {
    sandbox: SandboxId,
    after: u64,
}

#[derive(Default)]
struct News {
    any: bool,
    /// From inside: a heartbeat, a word, an entry.
    alive: bool,
    done: bool,
    entries: Vec<JournalEntry>,
}

impl Listener {
    async fn news(&mut self, store: &dyn forkyard_store::Store) -> Result<News, TaskError> {
        let mut news = News::default();
        loop {
            let query = EventQuery { after: self.after, ..Default::default() };
            let found = store.read_sandbox(&self.sandbox, &query).await.map_err(store_error)?;
            let Some(last) = found.last() else { return Ok(news) };
            self.after = last.position;
            for r in found {
                let Recorded { event, .. } = r;
                if event.source == Source::System {
                    continue;
                }
                news.any = true;
                news.alive = true;
                news.done |= event.kind == TASK_COMPLETED;
                if event.source == Source::Agent && event.kind != HEARTBEAT {
                    news.entries.extend(
                        JournalEntry::from_stored(&event.kind, event.version, event.at, event.data).ok(),
                    );
                }
            }
        }
    }
}

/// The end of what a worker printed.
#[derive(Default)]
struct Words(String);

impl Words {
    fn add(&mut self, event: ExecEvent) {
        let (ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes)) = event else { return };
        self.0.push_str(&String::from_utf8_lossy(&bytes));
        if self.0.len() > 2 * MAX_WORDS {
            let mut from = self.0.len() - MAX_WORDS;
            while !self.0.is_char_boundary(from) {
                from += 1;
            }
            self.0.drain(..from);
        }
    }

    fn diagnosis(&self, result: &ExecResult) -> String {
        let how = match (result.oom_killed, result.signal) {
            (true, _) => "it was killed for its memory: give the sandbox more".to_string(),
            (false, Some(9)) => "it was killed (SIGKILL); out of memory?".to_string(),
            (false, Some(n)) => format!("it was ended by signal {n}"),
            (false, None) => format!("exit status {}", result.exit_code),
        };
        format!("{how}\n{}", tail(self.0.trim()))
    }
}

/// The end that a journal tells of, if nothing came after it.
fn completed(entries: &[JournalEntry]) -> Option<&Completed> {
    let own = entries.iter().rev().filter(|e| e.subagent.is_none());
    own.map(|e| &e.event).find(|e| !matches!(e, AgentEvent::Waiting { .. })).and_then(|e| match e {
        AgentEvent::Completed(done) | AgentEvent::Failed(done) => Some(done),
        _ => None,
    })
}

fn outcome(done: &Completed, entries: &[JournalEntry]) -> AgentOutcome {
    let denied =
        |e: &&JournalEntry| matches!(&e.event, AgentEvent::ToolCompleted(t) if t.denied_by.is_some());
    AgentOutcome {
        success: done.success,
        stop: done.stop_reason,
        final_response: done.final_output.clone(),
        turns: done.turns,
        tool_calls: done.tool_calls,
        errors: done.errors.clone(),
        denied: entries.iter().filter(denied).count() as u32,
        usage: done.usage,
        // Money is the ledger's to tell.
        cost: forkyard_core::Usd::ZERO,
        duration: Millis(done.duration_ms),
    }
}
