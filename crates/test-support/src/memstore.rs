//! A store in memory, for the simulation: small enough to be read as the specification of the others, and it passes the
//! same conformance suite. Time for leases is tokio's, so that a paused runtime moves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{self, Ask, Balance, ReservationState, Verdict};
use forkyard_core::view::{EngineKind, ForkView, RunStatus, RunView, SandboxState, SandboxView, View};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};
use forkyard_store::*;
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
    /// A request that was reserved before a pause leaves after it.
    SendsWhilePaused,
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
    driven: Option<Timestamp>,
}

#[derive(Default)]
struct Data {
    runs: BTreeMap<RunId, RunData>,
    sandboxes: BTreeMap<SandboxId, SandboxView>,
    blobs: BTreeMap<String, Vec<u8>>,
    processes: BTreeMap<String, (Process, Instant)>,
    tokens: BTreeMap<String, Token>,
    audit: Vec<AuditEntry>,
    deeds: u64,
    next_id: u64,
    appends: u64,
}

#[derive(Default)]
struct Watchers {
    any: Arc<Bell>,
    runs: BTreeMap<RunId, Arc<Bell>>,
    followers: Followers,
}

pub struct MemStore {
    identity: String,
    data: Mutex<Data>,
    watchers: Mutex<Watchers>,
    bugs: BTreeSet<u8>,
    /// A wall clock.
    epoch: (Timestamp, Instant),
}

impl Default for MemStore {
    fn default() -> Self {
        MemStore::new(&[])
    }
}

impl MemStore {
    /// All that is kept under a name.
    pub fn blobs(&self) -> Vec<Vec<u8>> {
        let all = self.with(|d| Ok(d.blobs.values().cloned().collect()));
        all.unwrap_or_default()
    }

    /// Needs a tokio runtime: leases expire by its clock.
    pub fn new(bugs: &[StoreBug]) -> MemStore {
        static MADE: AtomicU64 = AtomicU64::new(0);
        MemStore {
            identity: format!("memory{:016x}", MADE.fetch_add(1, Ordering::Relaxed)),
            data: Mutex::default(),
            watchers: Mutex::default(),
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
        f(&mut lock(&self.data))
    }
    fn run_mut<T>(&self, run: &RunId, f: impl FnOnce(&mut RunData) -> Result<T>) -> Result<T> {
        self.with(|d| f(d.runs.get_mut(run).ok_or_else(|| not_found(run))?))
    }
    fn notify(&self, run: &RunId) {
        let watchers = lock(&self.watchers);
        for bell in watchers.runs.get(run).into_iter().chain([&watchers.any]) {
            bell.ring();
        }
        watchers.followers.tell(run);
    }
    /// Is `mine` the attempt that may write?
    fn fence(&self, mine: Attempt, current: Attempt) -> Result<()> {
        if mine > current {
            Err(StoreError::Invalid(format!("attempt {mine} has not begun: the fork is at {current}")))
        } else if mine < current && !self.has(StoreBug::AcceptsStaleAttempts) {
            Err(StoreError::StaleAttempt { mine, current })
        } else {
            Ok(())
        }
    }
    /// The attempt that owns the fork, if it is not this one; an ended fork is nobody's.
    fn owner(&self, fork: &ForkView, mine: Attempt) -> Result<Option<Attempt>> {
        if fork.lifecycle.is_ended() && !self.has(StoreBug::AcceptsStaleAttempts) {
            return Ok(Some(fork.attempt));
        }
        match self.fence(mine, fork.attempt) {
            Ok(()) => Ok(None),
            Err(StoreError::StaleAttempt { current, .. }) => Ok(Some(current)),
            Err(other) => Err(other),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn no_fork(run: &RunId, fork: ForkNum) -> StoreError {
    StoreError::NotFound { what: format!("fork {run}/{fork}") }
}

fn closed(request: &str) -> StoreError {
    StoreError::Invalid(format!("reservation {request:?} is closed already"))
}

fn bound(limit: usize) -> usize {
    if limit == 0 { usize::MAX } else { limit }
}

fn not_found(run: &RunId) -> StoreError {
    StoreError::NotFound { what: format!("run {run}") }
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
    /// No view lowers an attempt.
    fn admit(&self, views: &[View]) -> Result<()> {
        for view in views {
            if let View::Fork(v) = view
                && let Some(current) = self.forks.get(&v.fork).map(|f| f.attempt)
                && v.attempt < current
            {
                return Err(StoreError::StaleAttempt { mine: v.attempt, current });
            }
        }
        Ok(())
    }
    fn is_held(&self) -> bool {
        self.lease.as_ref().is_some_and(|l| l.owner.is_some() && l.expires > Instant::now())
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
                    let over = if v.lifecycle.is_ended() { v.attempt.next() } else { v.attempt };
                    data.ledger.close_attempts_before(v.fork, over);
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
    found.drain(..q.skip.min(found.len()));
    found.truncate(bound(q.limit));
    found
}

#[async_trait]
impl EventLog for MemStore {
    async fn create_run(&self, new: CreateRun) -> Result<Created> {
        check::create_run(&new)?;
        check::events(&new.events)?;
        check::views(&new.run, &new.views)?;
        let run = new.run.clone();
        let created = self.with(|d| {
            if let Some(key) = &new.key
                && let Some((id, _)) = d.runs.iter().find(|(_, r)| r.key.as_ref() == Some(key))
            {
                return Ok(Created::Existing(id.clone()));
            }
            if let Some(r) = d.runs.get(&new.run) {
                let actual = r.seqs.get(&StreamId::Run(new.run.clone())).copied().unwrap_or(0);
                return Err(StoreError::Conflict { expected: 0, actual });
            }
            let data = d.runs.entry(new.run.clone()).or_default();
            data.key = new.key;
            data.push(&StreamId::Run(new.run.clone()), new.events);
            d.write_views(&new.run, new.views);
            Ok(Created::New)
        })?;
        self.notify(&run);
        Ok(created)
    }

    async fn append(&self, mut a: Append) -> Result<Appended> {
        let run = a.stream.run().clone();
        check::append(&a)?;
        check::events(&a.events)?;
        check::views(&run, &a.views)?;
        let done = self.with(|d| {
            d.appends += 1;
            let lose = self.has(StoreBug::LosesEvents) && d.appends % 7 == 0;
            let r = d.runs.get_mut(&run).ok_or_else(|| not_found(&run))?;
            let holds = r.lease.as_ref().is_some_and(|l| l.owner.is_some() && l.token == a.lease);
            if !holds && !self.has(StoreBug::AcceptsStaleLeases) {
                return Err(StoreError::LeaseLost);
            }
            r.expect(&a.stream, a.expected)?;
            r.admit(&a.views)?;
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
        self.notify(&run);
        Ok(done)
    }

    async fn append_journal(&self, a: AppendJournal) -> Result<Appended> {
        check::append_journal(&a)?;
        check::events(&a.events)?;
        let run = a.run.clone();
        let done = self.run_mut(&run, |r| {
            let current = r.forks.get(&a.fork).ok_or_else(|| no_fork(&a.run, a.fork))?.attempt;
            self.fence(a.attempt, current)?;
            let stream = StreamId::Journal(a.run.clone(), a.fork, a.attempt);
            r.expect(&stream, a.expected)?;
            r.messages.retain(|id, (fork, _)| *fork != a.fork || !a.deliver.contains(id));
            Ok(r.push(&stream, a.events))
        })?;
        self.notify(&run);
        Ok(done)
    }

    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>> {
        self.with(|d| {
            let Some(r) = d.runs.get(stream.run()) else { return Ok(vec![]) };
            let found = r.events.iter().filter(|e| e.stream == *stream && e.seq > after).cloned();
            Ok(found.take(bound(limit)).collect())
        })
    }

    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        self.with(|d| Ok(d.runs.get(run).map(|r| select(query, r.events.iter())).unwrap_or_default()))
    }

    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        self.with(|d| {
            let events = d.runs.values().flat_map(|r| r.events.iter());
            Ok(select(query, events.filter(|e| e.event.sandbox.as_ref() == Some(sandbox))))
        })
    }

    async fn count_sandbox(&self, sandbox: &SandboxId, kinds: &[String]) -> Result<u64> {
        let query = EventQuery { kinds: kinds.to_vec(), ..Default::default() };
        check::query(&query)?;
        self.with(|d| {
            let events = d.runs.values().flat_map(|r| r.events.iter());
            let about = events.filter(|e| e.event.sandbox.as_ref() == Some(sandbox));
            Ok(about.filter(|e| matches(&query, e)).count() as u64)
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
        check::optional_key("a command's key", command.key.as_deref())?;
        check::time("a command's time", command.at)?;
        check::data("a command", &command.data)?;
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
        self.notify(run);
        Ok(id)
    }
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>> {
        self.with(|d| Ok(d.runs.get(run).map(|r| r.commands.values().cloned().collect()).unwrap_or_default()))
    }
    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId> {
        check::optional_key("a message's key", message.key.as_deref())?;
        check::time("a message's time", message.at)?;
        check::data("a message", &message.data)?;
        let id = self.with(|d| {
            let next = d.id();
            let r = d.runs.get_mut(run).ok_or_else(|| not_found(run))?;
            r.forks.get(&fork).ok_or_else(|| no_fork(run, fork))?;
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
        self.notify(run);
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
        check::key("a lease's owner", owner)?;
        self.run_mut(run, |r| {
            let own = r.lease.as_ref().is_some_and(|l| l.owner.as_deref() == Some(owner));
            if r.is_held() && !own {
                return Ok(None);
            }
            let token = r.lease.as_ref().map_or(0, |l| l.token) + 1;
            let last_driven = r.lease.as_ref().and_then(|l| l.driven);
            let expires = Instant::now() + ttl;
            r.lease = Some(LeaseData { token, owner: Some(owner.into()), expires, driven: last_driven });
            Ok(Some(Lease { run: run.clone(), token, last_driven }))
        })
    }
    async fn renew(
        &self,
        run: &RunId,
        token: LeaseToken,
        ttl: Duration,
        driven: Option<Timestamp>,
    ) -> Result<()> {
        self.run_mut(run, |r| match &mut r.lease {
            Some(l) if l.token == token && l.owner.is_some() => {
                l.expires = Instant::now() + ttl;
                l.driven = driven.or(l.driven);
                Ok(())
            }
            Some(_) | None => Err(StoreError::LeaseLost),
        })
    }
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()> {
        let given = self.with(|d| {
            let lease = d.runs.get_mut(run).and_then(|r| r.lease.as_mut());
            Ok(lease.filter(|l| l.token == token && l.owner.is_some()).map(|l| l.owner = None))
        })?;
        if given.is_some() {
            self.notify(run);
        }
        Ok(())
    }
    async fn holder(&self, run: &RunId) -> Result<Option<Holder>> {
        self.with(|d| {
            let lease = d.runs.get(run).filter(|r| r.is_held()).and_then(|r| r.lease.as_ref());
            Ok(lease.and_then(|l| Some(Holder { owner: l.owner.clone()?, token: l.token })))
        })
    }
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>> {
        self.with(|d| {
            let free = |r: &RunData| {
                let wanted = r.view.as_ref().is_some_and(|v| {
                    v.engine == EngineKind::Embedded && (!v.detached || !r.commands.is_empty())
                });
                r.is_live() && !r.is_held() && wanted
            };
            let found = d.runs.iter().filter(|(_, r)| free(r)).map(|(id, _)| id.clone());
            Ok(found.take(bound(limit)).collect())
        })
    }
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()> {
        check::key("a process's id", &process.id)?;
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
        check::key("a request", &ask.request)?;
        check::amount("a reservation", ask.worst)?;
        let overspends = self.has(StoreBug::Overspends);
        let answer = self.run_mut(run, |r| {
            let fork = r.forks.get(&ask.fork).ok_or_else(|| no_fork(run, ask.fork))?;
            if let Some(current) = self.owner(fork, ask.attempt)? {
                return Ok(Reserve::Stale { current });
            }
            if r.view.as_ref().is_some_and(|v| v.paused || v.detached) {
                return Ok(Reserve::Paused);
            }
            if let Some(before) = r.ledger.reservations.get(&ask.request) {
                match before.state {
                    ReservationState::Reserved | ReservationState::Sent if before.fork == ask.fork => {
                        return Ok(Reserve::Granted);
                    }
                    ReservationState::Reserved | ReservationState::Sent => {
                        let of = before.fork;
                        return Err(StoreError::Invalid(format!("the request belongs to fork {of}")));
                    }
                    ReservationState::Settled => return Err(closed(&ask.request)),
                    // It was given back: a new ask.
                    ReservationState::Released => {
                        r.ledger.reservations.remove(&ask.request);
                    }
                }
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
        })?;
        if answer == Reserve::Granted {
            self.notify(run);
        }
        Ok(answer)
    }
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<Sending> {
        self.run_mut(run, |r| {
            let unknown = || ledger_error(budget::LedgerError::Unknown(request.into()));
            let held = r.ledger.reservations.get(request).ok_or_else(unknown)?;
            let fork = r.forks.get(&held.fork).ok_or_else(|| no_fork(run, held.fork))?;
            if let Some(current) = self.owner(fork, held.attempt)? {
                return Ok(Sending::Stale { current });
            }
            if r.view.as_ref().is_some_and(|v| v.paused || v.detached)
                && !self.has(StoreBug::SendsWhilePaused)
            {
                return Ok(Sending::Paused);
            }
            r.ledger.sent(request).map_err(ledger_error)?;
            Ok(Sending::Go)
        })
    }
    async fn shrink(&self, run: &RunId, request: &str, worst: Usd) -> Result<()> {
        self.run_mut(run, |r| r.ledger.shrink(request, worst).map_err(ledger_error))?;
        self.notify(run);
        Ok(())
    }
    async fn settle(&self, run: &RunId, request: &str, cost: Usd) -> Result<()> {
        check::amount("a cost", cost)?;
        self.run_mut(run, |r| match r.ledger.reservations.get(request) {
            Some(held) if held.state == ReservationState::Settled && held.amount == cost => Ok(()),
            Some(_) | None => r.ledger.settle(request, cost).map_err(ledger_error),
        })?;
        self.notify(run);
        Ok(())
    }
    async fn release_reservation(&self, run: &RunId, request: &str) -> Result<()> {
        self.run_mut(run, |r| match r.ledger.release(request) {
            Ok(()) | Err(budget::LedgerError::Closed(_)) => Ok(()),
            Err(e @ budget::LedgerError::Unknown(_)) => Err(ledger_error(e)),
        })?;
        self.notify(run);
        Ok(())
    }
    async fn balance(&self, run: &RunId) -> Result<Balance> {
        self.run_mut(run, |r| Ok(r.ledger.balance()))
    }
}

fn ledger_error(e: budget::LedgerError) -> StoreError {
    match e {
        budget::LedgerError::Unknown(r) => StoreError::NotFound { what: format!("reservation {r}") },
        budget::LedgerError::Closed(r) => closed(&r),
    }
}

#[async_trait]
impl Views for MemStore {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        self.with(|d| Ok(d.runs.get(run).and_then(|r| r.view.clone())))
    }
    async fn runs(&self, q: &RunQuery) -> Result<Vec<RunView>> {
        self.with(|d| {
            let views = d.runs.values().filter_map(|r| r.view.as_ref());
            let mut found: Vec<RunView> = views.filter(|v| q.wants(v)).cloned().collect();
            found.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
            found.retain(|v| q.before.as_ref().is_none_or(|(at, id)| (v.created_at, &v.id) < (*at, id)));
            found.truncate(bound(q.limit));
            Ok(found)
        })
    }
    async fn count_runs(&self, words: &Words) -> Result<RunCounts> {
        self.with(|d| {
            let mut counts = RunCounts::default();
            let views = d.runs.values().filter_map(|r| r.view.as_ref());
            views.filter(|v| words.occur_in(v)).for_each(|v| counts.add_run(v));
            Ok(counts)
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
            found.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
            found.truncate(bound(q.limit));
            Ok(found)
        })
    }
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()> {
        let now = self.now();
        let run = self.with(|d| {
            let missing = || StoreError::NotFound { what: format!("sandbox {sandbox}") };
            let s = d.sandboxes.get_mut(sandbox).ok_or_else(missing)?;
            if s.state != SandboxState::Destroyed {
                s.state = SandboxState::Destroyed;
                s.updated_at = now;
            }
            Ok(s.run.clone())
        })?;
        self.notify(&run);
        Ok(())
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
            if d.runs.get(run).ok_or_else(|| not_found(run))?.is_live() {
                return Err(StoreError::Invalid(format!("run {run} has not ended")));
            }
            let owed = |s: &&SandboxView| match s.state {
                SandboxState::Requested | SandboxState::Live | SandboxState::Owed => s.run == *run,
                SandboxState::Destroyed | SandboxState::HandedOver => false,
            };
            if let Some(s) = d.sandboxes.values().find(owed) {
                return Err(StoreError::Invalid(format!("sandbox {} still has to be destroyed", s.id)));
            }
            d.runs.remove(run);
            d.sandboxes.retain(|_, s| s.run != *run);
            let of_run = format!("{run}/");
            d.blobs.retain(|key, _| !key.starts_with(&of_run));
            Ok(())
        })?;
        self.notify(run);
        Ok(())
    }
    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()> {
        check::blob(key, data)?;
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
    fn watch(&self, run: Option<&RunId>) -> Watch {
        let mut watchers = lock(&self.watchers);
        match run {
            None => watchers.any.watch(),
            Some(run) => watchers.runs.entry(run.clone()).or_default().watch(),
        }
    }
    fn changes(&self) -> Changes {
        lock(&self.watchers).followers.follow()
    }
    async fn identity(&self) -> Result<String> {
        Ok(self.identity.clone())
    }
}

#[async_trait]
impl Access for MemStore {
    async fn put_token(&self, token: Token) -> Result<()> {
        access::check_token(&token)?;
        self.with(|d| {
            d.tokens.retain(|_, t| t.parent.is_none() || t.expires_at.is_none_or(|e| e >= token.created_at));
            if d.tokens.len() >= access::MAX_TOKENS {
                return Err(access::too_many_tokens());
            }
            if d.tokens.contains_key(&token.id) {
                return Err(StoreError::Invalid(format!("there is a token {} already", token.id)));
            }
            d.tokens.insert(token.id.clone(), token);
            Ok(())
        })
    }
    async fn token(&self, id: &str) -> Result<Option<Token>> {
        self.with(|d| Ok(d.tokens.get(id).cloned()))
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        self.with(|d| {
            let mut all: Vec<Token> = d.tokens.values().cloned().collect();
            all.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
            Ok(all)
        })
    }
    async fn revoke_token(&self, id: &str, at: Timestamp) -> Result<()> {
        self.with(|d| {
            if !d.tokens.contains_key(id) {
                return Err(StoreError::NotFound { what: format!("token {id}") });
            }
            for t in d.tokens.values_mut().filter(|t| t.id == id || t.parent.as_deref() == Some(id)) {
                t.revoked_at.get_or_insert(at);
            }
            Ok(())
        })
    }
    async fn forget_tokens(&self, before: Timestamp) -> Result<u64> {
        self.with(|d| {
            let n = d.tokens.len();
            d.tokens.retain(|_, t| ![t.revoked_at, t.expires_at].into_iter().flatten().any(|at| at < before));
            let left: Vec<String> = d.tokens.keys().cloned().collect();
            d.tokens.retain(|_, t| t.parent.as_ref().is_none_or(|p| left.contains(p)));
            Ok((n - d.tokens.len()) as u64)
        })
    }
    async fn forget_deeds(&self, before: Timestamp) -> Result<u64> {
        self.with(|d| {
            let old = d.audit.iter().take(access::FORGET_AT_ONCE).take_while(|e| e.deed.at < before).count();
            Ok(d.audit.drain(..old).count() as u64)
        })
    }
    async fn put_audit(&self, deed: Deed) -> Result<u64> {
        access::check_deed(&deed)?;
        self.with(|d| {
            d.deeds += 1;
            let id = d.deeds;
            d.audit.push(AuditEntry { id, deed });
            Ok(id)
        })
    }
    async fn audit(&self, q: &AuditQuery) -> Result<Vec<AuditEntry>> {
        self.with(|d| {
            let under = |target: &str, of: &str| {
                target.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            let wanted = |e: &&AuditEntry| {
                q.before.is_none_or(|b| e.id < b)
                    && q.target.as_ref().is_none_or(|t| under(&e.deed.target, t))
            };
            Ok(d.audit.iter().rev().filter(wanted).take(bound(q.limit)).cloned().collect())
        })
    }
}
