//! A store in memory, for the simulation: small enough to be read as the specification of the others, and it passes the
//! same conformance suite. Time for leases is tokio's, so that a paused runtime moves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{self, Ask, Balance, Verdict};
use forkyard_core::view::{EngineKind, ForkView, RunStatus, RunView, SandboxState, SandboxView, View};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};
use forkyard_store::*;
use tokio::sync::watch;
use tokio::time::Instant;

/// Bugs that can be planted, to see that the simulation finds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreBug {
    /// Now and then an event is acknowledged but not kept.
    LosesEvents,
    /// Reservations of others are not looked at.
    Overspends,
    /// Older attempts may write.
    AcceptsStaleAttempts,
    /// Older leases may write.
    AcceptsStaleLeases,
}

#[derive(Default)]
struct RunData {
    key: Option<String>,
    position: u64,
    events: Vec<Recorded>,
    seqs: BTreeMap<StreamId, u64>,
    view: Option<RunView>,
    forks: BTreeMap<ForkNum, ForkView>,
    ledger: budget::Ledger,
    lease: Option<LeaseData>,
    commands: BTreeMap<CommandId, StoredCommand>,
    messages: BTreeMap<MessageId, (ForkNum, StoredMessage)>,
    command_keys: BTreeMap<String, CommandId>,
    message_keys: BTreeMap<(ForkNum, String), MessageId>,
}

struct LeaseData {
    token: LeaseToken,
    owner: Option<String>,
    expires: Instant,
    renewed: Timestamp,
}

#[derive(Default)]
struct Data {
    runs: BTreeMap<RunId, RunData>,
    sandboxes: BTreeMap<SandboxId, SandboxView>,
    blobs: BTreeMap<String, Vec<u8>>,
    processes: BTreeMap<String, (Process, Instant)>,
    next_id: u64,
    appends: u64,
}

pub struct MemStore {
    data: Mutex<Data>,
    changes: watch::Sender<u64>,
    bugs: BTreeSet<u8>,
    /// What wall clock leases are stamped with.
    epoch: (Timestamp, Instant),
}

impl Default for MemStore {
    fn default() -> Self {
        MemStore::new(&[])
    }
}

impl MemStore {
    /// Needs a tokio runtime: leases expire by its clock.
    pub fn new(bugs: &[StoreBug]) -> MemStore {
        MemStore {
            data: Mutex::default(),
            changes: watch::Sender::new(0),
            bugs: bugs.iter().map(|b| *b as u8).collect(),
            epoch: (Timestamp(1_700_000_000_000), Instant::now()),
        }
    }
    fn has(&self, bug: StoreBug) -> bool {
        self.bugs.contains(&(bug as u8))
    }
    pub fn now(&self) -> Timestamp {
        Timestamp(self.epoch.0.0 + self.epoch.1.elapsed().as_millis() as u64)
    }
    fn with<T>(&self, f: impl FnOnce(&mut Data) -> Result<T>) -> Result<T> {
        f(&mut self.data.lock().unwrap_or_else(|e| e.into_inner()))
    }
    fn run_mut<T>(&self, run: &RunId, f: impl FnOnce(&mut RunData) -> Result<T>) -> Result<T> {
        self.with(|d| f(d.runs.get_mut(run).ok_or_else(|| not_found(run))?))
    }
    fn notify(&self) {
        self.changes.send_modify(|n| *n += 1);
    }
}

fn not_found(run: &RunId) -> StoreError {
    StoreError::NotFound { what: format!("run {run}") }
}

fn check_size(events: &[NewEvent]) -> Result<()> {
    for e in events {
        let bytes = serde_json::to_vec(&e.data).map(|v| v.len()).unwrap_or(0);
        if bytes > MAX_DATA_BYTES {
            return Err(StoreError::Invalid(format!(
                "{} is {bytes} bytes, more than {MAX_DATA_BYTES}",
                e.kind
            )));
        }
    }
    Ok(())
}

impl RunData {
    fn push(&mut self, stream: &StreamId, events: Vec<NewEvent>) -> Appended {
        let mut seq = self.seqs.get(stream).copied().unwrap_or(0);
        for event in events {
            seq += 1;
            self.position += 1;
            self.events.push(Recorded { stream: stream.clone(), seq, position: self.position, event });
        }
        self.seqs.insert(stream.clone(), seq);
        Appended { seq, position: self.position }
    }
    fn expect(&self, stream: &StreamId, expected: u64) -> Result<()> {
        let actual = self.seqs.get(stream).copied().unwrap_or(0);
        if actual == expected { Ok(()) } else { Err(StoreError::Conflict { expected, actual }) }
    }
    fn is_live(&self) -> bool {
        self.view.as_ref().is_some_and(|v| v.status != RunStatus::Ended)
    }
}

impl Data {
    fn write_views(&mut self, run: &RunId, views: Vec<View>) {
        for view in views {
            match view {
                View::Run(v) => {
                    let data = self.runs.entry(run.clone()).or_default();
                    data.ledger.limits = v.limits;
                    data.view = Some(v);
                }
                View::Fork(v) => {
                    let data = self.runs.entry(run.clone()).or_default();
                    data.ledger.close_attempts_before(v.fork, v.attempt);
                    data.forks.insert(v.fork, v);
                }
                View::Sandbox(v) => {
                    self.sandboxes.insert(v.id.clone(), v);
                }
            }
        }
    }
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

fn matches(q: &EventQuery, r: &Recorded) -> bool {
    r.position > q.after
        && q.before.is_none_or(|b| r.position < b)
        && q.fork.is_none_or(|f| r.stream.fork() == Some(f))
        && (q.kinds.is_empty()
            || q.kinds
                .iter()
                .any(|k| *k == r.event.kind || (k.ends_with('.') && r.event.kind.starts_with(k.as_str()))))
}

fn select<'a>(q: &EventQuery, events: impl Iterator<Item = &'a Recorded>) -> Vec<Recorded> {
    let mut found: Vec<Recorded> = events.filter(|r| matches(q, r)).cloned().collect();
    if q.newest_first {
        found.reverse();
    }
    if q.limit > 0 {
        found.truncate(q.limit);
    }
    found
}

#[async_trait]
impl EventLog for MemStore {
    async fn create_run(&self, new: CreateRun) -> Result<Created> {
        check_size(&new.events)?;
        let created = self.with(|d| {
            if let Some(key) = &new.key
                && let Some((id, _)) = d.runs.iter().find(|(_, r)| r.key.as_ref() == Some(key))
            {
                return Ok(Created::Existing(id.clone()));
            }
            if d.runs.contains_key(&new.run) {
                return Err(StoreError::Invalid(format!("run {} exists", new.run)));
            }
            let data = d.runs.entry(new.run.clone()).or_default();
            data.key = new.key;
            data.push(&StreamId::Run(new.run.clone()), new.events);
            d.write_views(&new.run, new.views);
            Ok(Created::New)
        })?;
        self.notify();
        Ok(created)
    }

    async fn append(&self, mut a: Append) -> Result<Appended> {
        check_size(&a.events)?;
        let run = a.stream.run().clone();
        let done = self.with(|d| {
            d.appends += 1;
            let lose = self.has(StoreBug::LosesEvents) && d.appends % 7 == 0;
            let r = d.runs.get_mut(&run).ok_or_else(|| not_found(&run))?;
            if !self.has(StoreBug::AcceptsStaleLeases) && r.lease.as_ref().map(|l| l.token) != Some(a.lease) {
                return Err(StoreError::LeaseLost);
            }
            if let StreamId::Journal(..) = a.stream {
                return Err(StoreError::Invalid("a journal is not written by a lease".into()));
            }
            r.expect(&a.stream, a.expected)?;
            for id in &a.consume {
                r.commands.remove(id);
            }
            if lose {
                a.events.pop();
            }
            let done = r.push(&a.stream, a.events);
            d.write_views(&run, a.views);
            Ok(done)
        })?;
        self.notify();
        Ok(done)
    }

    async fn append_journal(&self, a: AppendJournal) -> Result<Appended> {
        check_size(&a.events)?;
        let done = self.run_mut(&a.run, |r| {
            let current = r.forks.get(&a.fork).map(|f| f.attempt);
            match current {
                Some(current) if current != a.attempt && !self.has(StoreBug::AcceptsStaleAttempts) => {
                    return Err(StoreError::StaleAttempt { mine: a.attempt, current });
                }
                None => return Err(StoreError::NotFound { what: format!("fork {}/{}", a.run, a.fork) }),
                Some(_) => {}
            }
            let stream = StreamId::Journal(a.run.clone(), a.fork, a.attempt);
            r.expect(&stream, a.expected)?;
            for id in &a.deliver {
                r.messages.remove(id);
            }
            Ok(r.push(&stream, a.events))
        })?;
        self.notify();
        Ok(done)
    }

    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>> {
        self.with(|d| {
            let Some(r) = d.runs.get(stream.run()) else { return Ok(vec![]) };
            let found = r.events.iter().filter(|e| e.stream == *stream && e.seq > after).cloned();
            Ok(if limit == 0 { found.collect() } else { found.take(limit).collect() })
        })
    }

    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        self.with(|d| Ok(d.runs.get(run).map(|r| select(query, r.events.iter())).unwrap_or_default()))
    }

    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>> {
        self.with(|d| {
            let events = d.runs.values().flat_map(|r| r.events.iter());
            Ok(select(query, events.filter(|e| e.event.sandbox.as_ref() == Some(sandbox))))
        })
    }

    async fn read_journals(&self, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
        self.with(|d| {
            let Some(r) = d.runs.get(run) else { return Ok(vec![]) };
            let mut found: Vec<Recorded> = r
                .events
                .iter()
                .filter(|e| matches!(&e.stream, StreamId::Journal(_, f, _) if *f == fork))
                .cloned()
                .collect();
            found.sort_by(|a, b| (&a.stream, a.seq).cmp(&(&b.stream, b.seq)));
            Ok(found)
        })
    }

    async fn last_position(&self, run: &RunId) -> Result<u64> {
        self.with(|d| Ok(d.runs.get(run).map_or(0, |r| r.position)))
    }
}

#[async_trait]
impl Inbox for MemStore {
    async fn put_command(&self, run: &RunId, command: NewCommand) -> Result<CommandId> {
        let id = self.with(|d| {
            let next = d.id();
            let r = d.runs.get_mut(run).ok_or_else(|| not_found(run))?;
            if let Some(id) = command.key.as_ref().and_then(|k| r.command_keys.get(k)) {
                return Ok(*id);
            }
            if r.commands.len() >= MAX_PENDING {
                return Err(StoreError::Invalid(format!("{MAX_PENDING} commands wait already")));
            }
            r.command_keys.extend(command.key.map(|k| (k, next)));
            r.commands.insert(next, StoredCommand { id: next, data: command.data, at: command.at });
            Ok(next)
        })?;
        self.notify();
        Ok(id)
    }
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>> {
        self.with(|d| Ok(d.runs.get(run).map(|r| r.commands.values().cloned().collect()).unwrap_or_default()))
    }
    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId> {
        let id = self.with(|d| {
            let next = d.id();
            let r = d.runs.get_mut(run).ok_or_else(|| not_found(run))?;
            let key = message.key.map(|k| (fork, k));
            if let Some(id) = key.as_ref().and_then(|k| r.message_keys.get(k)) {
                return Ok(*id);
            }
            if r.messages.values().filter(|(f, _)| *f == fork).count() >= MAX_PENDING {
                return Err(StoreError::Invalid(format!("{MAX_PENDING} messages wait already")));
            }
            r.message_keys.extend(key.map(|k| (k, next)));
            r.messages.insert(next, (fork, StoredMessage { id: next, data: message.data, at: message.at }));
            Ok(next)
        })?;
        self.notify();
        Ok(id)
    }
    async fn pending_messages(&self, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>> {
        self.with(|d| {
            let Some(r) = d.runs.get(run) else { return Ok(vec![]) };
            Ok(r.messages.values().filter(|(f, _)| *f == fork).map(|(_, m)| m.clone()).collect())
        })
    }
}

#[async_trait]
impl Leases for MemStore {
    async fn acquire(&self, run: &RunId, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        let now = self.now();
        self.run_mut(run, |r| {
            let held = r.lease.as_ref().is_some_and(|l| l.owner.is_some() && l.expires > Instant::now());
            if held {
                return Ok(None);
            }
            let token = r.lease.as_ref().map_or(0, |l| l.token) + 1;
            let last_driven = r.lease.as_ref().map(|l| l.renewed);
            let expires = Instant::now() + ttl;
            r.lease = Some(LeaseData { token, owner: Some(owner.into()), expires, renewed: now });
            Ok(Some(Lease { run: run.clone(), token, last_driven }))
        })
    }
    async fn renew(&self, run: &RunId, token: LeaseToken, ttl: Duration) -> Result<()> {
        let now = self.now();
        self.run_mut(run, |r| match &mut r.lease {
            Some(l) if l.token == token && l.owner.is_some() => {
                l.expires = Instant::now() + ttl;
                l.renewed = now;
                Ok(())
            }
            Some(_) | None => Err(StoreError::LeaseLost),
        })
    }
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()> {
        let now = self.now();
        self.run_mut(run, |r| {
            if let Some(l) = r.lease.as_mut().filter(|l| l.token == token) {
                l.owner = None;
                l.renewed = now;
            }
            Ok(())
        })?;
        self.notify();
        Ok(())
    }
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>> {
        self.with(|d| {
            let free = |r: &RunData| {
                let held = r.lease.as_ref().is_some_and(|l| l.owner.is_some() && l.expires > Instant::now());
                let wanted = r.view.as_ref().is_some_and(|v| v.engine == EngineKind::Embedded && !v.detached)
                    || !r.commands.is_empty();
                r.is_live() && !held && wanted
            };
            Ok(d.runs.iter().filter(|(_, r)| free(r)).map(|(id, _)| id.clone()).take(limit).collect())
        })
    }
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()> {
        let until = Instant::now() + ttl;
        self.with(|d| {
            d.processes.insert(process.id.clone(), (process.clone(), until));
            Ok(())
        })
    }
    async fn processes(&self) -> Result<Vec<Process>> {
        self.with(|d| {
            Ok(d.processes
                .values()
                .filter(|(_, until)| *until > Instant::now())
                .map(|(p, _)| p.clone())
                .collect())
        })
    }
}

#[async_trait]
impl Ledger for MemStore {
    async fn reserve(&self, run: &RunId, ask: Ask) -> Result<Reserve> {
        let overspends = self.has(StoreBug::Overspends);
        self.run_mut(run, |r| {
            if r.view.as_ref().is_some_and(|v| v.paused) {
                return Ok(Reserve::Paused);
            }
            match r.forks.get(&ask.fork).map(|f| f.attempt) {
                Some(current) if current != ask.attempt && !self.has(StoreBug::AcceptsStaleAttempts) => {
                    return Ok(Reserve::Stale { current });
                }
                Some(_) | None => {}
            }
            let limits = r.ledger.limits;
            if overspends {
                // Looks at what is spent, but not at what others have set aside.
                let open = r.ledger.balance().reserved;
                r.ledger.limits.run = limits.run.map(|b| b + open);
            }
            let verdict = r.ledger.reserve(ask);
            r.ledger.limits = limits;
            Ok(match verdict {
                Verdict::Granted => Reserve::Granted,
                Verdict::Short { available, outstanding } => Reserve::Short { available, outstanding },
            })
        })
    }
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<()> {
        self.run_mut(run, |r| r.ledger.sent(request).map_err(ledger_error))
    }
    async fn shrink(&self, run: &RunId, request: &str, worst: Usd) -> Result<()> {
        self.run_mut(run, |r| r.ledger.shrink(request, worst).map_err(ledger_error))?;
        self.notify();
        Ok(())
    }
    async fn settle(&self, run: &RunId, request: &str, cost: Usd) -> Result<()> {
        self.run_mut(run, |r| r.ledger.settle(request, cost).map_err(ledger_error))?;
        self.notify();
        Ok(())
    }
    async fn release_reservation(&self, run: &RunId, request: &str) -> Result<()> {
        self.run_mut(run, |r| r.ledger.release(request).map_err(ledger_error))?;
        self.notify();
        Ok(())
    }
    async fn balance(&self, run: &RunId) -> Result<Balance> {
        self.run_mut(run, |r| Ok(r.ledger.balance()))
    }
}

fn ledger_error(e: budget::LedgerError) -> StoreError {
    match e {
        budget::LedgerError::Unknown(r) => StoreError::NotFound { what: format!("reservation {r}") },
        budget::LedgerError::Closed(r) => StoreError::Invalid(format!("reservation {r} is closed already")),
    }
}

#[async_trait]
impl Views for MemStore {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        self.with(|d| Ok(d.runs.get(run).and_then(|r| r.view.clone())))
    }
    async fn runs(&self, q: &RunQuery) -> Result<Vec<RunView>> {
        self.with(|d| {
            let mut found: Vec<RunView> =
                d.runs.values().filter(|r| !q.live || r.is_live()).filter_map(|r| r.view.clone()).collect();
            found.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
            found.retain(|v| q.before.as_ref().is_none_or(|(at, id)| (v.created_at, &v.id) < (*at, id)));
            if q.limit > 0 {
                found.truncate(q.limit);
            }
            Ok(found)
        })
    }
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        self.with(|d| Ok(d.runs.get(run).map(|r| r.forks.values().cloned().collect()).unwrap_or_default()))
    }
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        self.with(|d| Ok(d.runs.get(run).and_then(|r| r.forks.get(&fork).cloned())))
    }
    async fn sandboxes(&self, q: &SandboxQuery) -> Result<Vec<SandboxView>> {
        self.with(|d| {
            let mut found: Vec<SandboxView> = d
                .sandboxes
                .values()
                .filter(|s| q.run.as_ref().is_none_or(|r| *r == s.run))
                .filter(|s| q.states.is_empty() || q.states.contains(&s.state))
                .cloned()
                .collect();
            if q.limit > 0 {
                found.truncate(q.limit);
            }
            Ok(found)
        })
    }
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()> {
        self.with(|d| {
            if let Some(s) = d.sandboxes.get_mut(sandbox) {
                s.state = SandboxState::Destroyed;
            }
            Ok(())
        })
    }
    async fn journal_len(&self, run: &RunId, fork: ForkNum) -> Result<u64> {
        self.with(|d| {
            let Some(r) = d.runs.get(run) else { return Ok(0) };
            let of_fork = |s: &StreamId| matches!(s, StreamId::Journal(_, f, _) if *f == fork);
            Ok(r.seqs.iter().filter(|(s, _)| of_fork(s)).map(|(_, n)| n).sum())
        })
    }
    async fn attempt(&self, run: &RunId, fork: ForkNum) -> Result<Option<Attempt>> {
        Ok(self.fork(run, fork).await?.map(|f| f.attempt))
    }
    async fn delete_run(&self, run: &RunId) -> Result<()> {
        self.with(|d| {
            if d.runs.get(run).is_some_and(|r| r.is_live()) {
                return Err(StoreError::Invalid(format!("run {run} has not ended")));
            }
            d.runs.remove(run);
            d.sandboxes.retain(|_, s| s.run != *run);
            Ok(())
        })
    }
    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()> {
        if data.len() > MAX_BLOB_BYTES {
            return Err(StoreError::Invalid(format!("blob {key} is larger than {MAX_BLOB_BYTES} bytes")));
        }
        self.with(|d| {
            d.blobs.insert(key.into(), data.to_vec());
            Ok(())
        })
    }
    async fn blob(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.with(|d| Ok(d.blobs.get(key).cloned()))
    }
    async fn delete_blob(&self, key: &str) -> Result<()> {
        self.with(|d| {
            d.blobs.remove(key);
            Ok(())
        })
    }
    fn watch(&self, _: Option<&RunId>) -> Watch {
        Watch::new(self.changes.subscribe())
    }
    async fn identity(&self) -> Result<String> {
        Ok("memory".into())
    }
}
