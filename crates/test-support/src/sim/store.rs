//! A process's connection to the store: slow, failing before or after it wrote, and the place where processes die.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{Ask, Balance};
use forkyard_core::view::{ForkView, RunView, SandboxView};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};
use forkyard_store::*;

use super::process::Proc;
use super::world::World;
use crate::memstore::MemStore;

/// What was acknowledged, in order: none of it may be missing later.
#[derive(Default)]
pub struct Shadow {
    pub appended: Mutex<Vec<(StreamId, u64, String)>>,
    pub appends: AtomicU64,
}

pub struct SimStore {
    mem: Arc<MemStore>,
    world: Arc<World>,
    shadow: Arc<Shadow>,
    proc: Arc<Proc>,
    /// Die right after this many appends of all processes.
    crash_after: Option<u64>,
}

impl SimStore {
    pub fn new(
        mem: Arc<MemStore>,
        world: Arc<World>,
        shadow: Arc<Shadow>,
        proc: Arc<Proc>,
        crash_after: Option<u64>,
    ) -> SimStore {
        SimStore { mem, world, shadow, proc, crash_after }
    }

    /// Before every call: time passes, the process may stand still, the store may be away.
    async fn enter(&self) -> Result<()> {
        self.proc.gate().await;
        self.world.take_time(4).await;
        self.proc.gate().await;
        if self.world.chance(self.world.faults().store_before) {
            return Err(StoreError::Unavailable("simulated: nothing was written".into()));
        }
        Ok(())
    }

    /// After a write: the process may die before it hears of it, or be told that it failed.
    async fn leave(&self, appended: bool) -> Result<()> {
        if appended {
            let n = self.shadow.appends.fetch_add(1, Ordering::Relaxed) + 1;
            if self.crash_after == Some(n) || self.world.chance(self.world.faults().crash) {
                self.proc.die();
            }
        }
        self.proc.gate().await;
        if self.world.chance(self.world.faults().store_after) {
            return Err(StoreError::Unavailable("simulated: it was written".into()));
        }
        Ok(())
    }

    fn remember(&self, stream: &StreamId, expected: u64, events: &[NewEvent]) {
        let mut log = self.shadow.appended.lock().unwrap_or_else(|e| e.into_inner());
        for (i, e) in events.iter().enumerate() {
            log.push((stream.clone(), expected + 1 + i as u64, format!("{} {}", e.kind, e.data)));
        }
    }
}

#[async_trait]
impl EventLog for SimStore {
    async fn create_run(&self, run: CreateRun) -> Result<Created> {
        self.enter().await?;
        self.mem.create_run(run).await
    }
    async fn append(&self, append: Append) -> Result<Appended> {
        self.enter().await?;
        let (stream, expected, events) = (append.stream.clone(), append.expected, append.events.clone());
        let done = self.mem.append(append).await?;
        self.remember(&stream, expected, &events);
        self.leave(true).await?;
        Ok(done)
    }
    async fn append_journal(&self, append: AppendJournal) -> Result<Appended> {
        self.enter().await?;
        let stream = StreamId::Journal(append.run.clone(), append.fork, append.attempt);
        let (expected, events) = (append.expected, append.events.clone());
        let done = self.mem.append_journal(append).await?;
        self.remember(&stream, expected, &events);
        self.leave(true).await?;
        Ok(done)
    }
    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>> {
        self.enter().await?;
        self.mem.read_stream(stream, after, limit).await
    }
    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        self.enter().await?;
        self.mem.read_run(run, query).await
    }
    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>> {
        self.enter().await?;
        self.mem.read_sandbox(sandbox, query).await
    }
    async fn count_sandbox(&self, sandbox: &SandboxId, kinds: &[String]) -> Result<u64> {
        self.enter().await?;
        self.mem.count_sandbox(sandbox, kinds).await
    }
    async fn read_journals(&self, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
        self.enter().await?;
        self.mem.read_journals(run, fork).await
    }
    async fn last_position(&self, run: &RunId) -> Result<u64> {
        self.enter().await?;
        self.mem.last_position(run).await
    }
}

#[async_trait]
impl Inbox for SimStore {
    async fn put_command(&self, run: &RunId, command: NewCommand) -> Result<CommandId> {
        self.enter().await?;
        self.mem.put_command(run, command).await
    }
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>> {
        self.enter().await?;
        self.mem.pending_commands(run).await
    }
    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId> {
        self.enter().await?;
        self.mem.put_message(run, fork, message).await
    }
    async fn pending_messages(&self, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>> {
        self.enter().await?;
        self.mem.pending_messages(run, fork).await
    }
}

#[async_trait]
impl Leases for SimStore {
    async fn acquire(&self, run: &RunId, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        self.enter().await?;
        let lease = self.mem.acquire(run, owner, ttl).await?;
        self.leave(false).await?;
        Ok(lease)
    }
    async fn renew(
        &self,
        run: &RunId,
        token: LeaseToken,
        ttl: Duration,
        driven: Option<Timestamp>,
    ) -> Result<()> {
        self.enter().await?;
        self.mem.renew(run, token, ttl, driven).await
    }
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()> {
        self.enter().await?;
        self.mem.release(run, token).await
    }
    async fn holder(&self, run: &RunId) -> Result<Option<Holder>> {
        self.enter().await?;
        self.mem.holder(run).await
    }
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>> {
        self.enter().await?;
        self.mem.claimable(limit).await
    }
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()> {
        self.enter().await?;
        self.mem.announce(process, ttl).await
    }
    async fn processes(&self) -> Result<Vec<Process>> {
        self.enter().await?;
        self.mem.processes().await
    }
}

#[async_trait]
impl Ledger for SimStore {
    async fn reserve(&self, run: &RunId, ask: Ask) -> Result<Reserve> {
        self.enter().await?;
        self.mem.reserve(run, ask).await
    }
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<Sending> {
        self.enter().await?;
        let sending = self.mem.mark_sent(run, request).await?;
        if sending == Sending::Go && self.mem.run(run).await?.is_some_and(|v| v.paused) {
            self.world.violation(format!("request {request} of {run} was sent while paused"));
        }
        self.leave(false).await?;
        Ok(sending)
    }
    async fn shrink(&self, run: &RunId, request: &str, worst: Usd) -> Result<()> {
        self.enter().await?;
        self.mem.shrink(run, request, worst).await
    }
    async fn settle(&self, run: &RunId, request: &str, cost: Usd) -> Result<()> {
        self.enter().await?;
        self.mem.settle(run, request, cost).await
    }
    async fn release_reservation(&self, run: &RunId, request: &str) -> Result<()> {
        self.enter().await?;
        self.mem.release_reservation(run, request).await
    }
    async fn balance(&self, run: &RunId) -> Result<Balance> {
        self.enter().await?;
        self.mem.balance(run).await
    }
}

#[async_trait]
impl Views for SimStore {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        self.enter().await?;
        self.mem.run(run).await
    }
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>> {
        self.enter().await?;
        self.mem.runs(query).await
    }
    async fn count_runs(&self, words: &Words) -> Result<RunCounts> {
        self.enter().await?;
        self.mem.count_runs(words).await
    }
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        self.enter().await?;
        self.mem.forks(run).await
    }
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        self.enter().await?;
        self.mem.fork(run, fork).await
    }
    async fn sandboxes(&self, query: &SandboxQuery) -> Result<Vec<SandboxView>> {
        self.enter().await?;
        self.mem.sandboxes(query).await
    }
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()> {
        self.enter().await?;
        self.mem.sandbox_destroyed(sandbox).await
    }
    async fn journal_len(&self, run: &RunId, fork: ForkNum) -> Result<u64> {
        self.enter().await?;
        self.mem.journal_len(run, fork).await
    }
    async fn attempt(&self, run: &RunId, fork: ForkNum) -> Result<Option<Attempt>> {
        self.enter().await?;
        self.mem.attempt(run, fork).await
    }
    async fn delete_run(&self, run: &RunId) -> Result<()> {
        self.enter().await?;
        self.mem.delete_run(run).await
    }
    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()> {
        self.enter().await?;
        self.mem.put_blob(key, data).await
    }
    async fn blob(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.enter().await?;
        self.mem.blob(key).await
    }
    async fn delete_blob(&self, key: &str) -> Result<()> {
        self.enter().await?;
        self.mem.delete_blob(key).await
    }
    fn watch(&self, run: Option<&RunId>) -> Watch {
        self.mem.watch(run)
    }
    fn changes(&self) -> Changes {
        self.mem.changes()
    }
    async fn identity(&self) -> Result<String> {
        self.mem.identity().await
    }
}

#[async_trait]
impl Access for SimStore {
    async fn put_token(&self, token: Token) -> Result<()> {
        self.mem.put_token(token).await
    }
    async fn token(&self, id: &str) -> Result<Option<Token>> {
        self.mem.token(id).await
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        self.mem.tokens().await
    }
    async fn revoke_token(&self, id: &str, at: Timestamp) -> Result<()> {
        self.mem.revoke_token(id, at).await
    }
    async fn forget_tokens(&self, before: Timestamp) -> Result<u64> {
        self.mem.forget_tokens(before).await
    }
    async fn forget_deeds(&self, before: Timestamp) -> Result<u64> {
        self.mem.forget_deeds(before).await
    }
    async fn put_audit(&self, deed: Deed) -> Result<u64> {
        self.mem.put_audit(deed).await
    }
    async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
        self.mem.audit(query).await
    }
}
