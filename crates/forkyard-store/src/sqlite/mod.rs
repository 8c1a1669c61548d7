//! One file on one host, shared by any number of processes. See [`writer`] for how it writes, [`poller`] for how it learns
//! of others' writes, [`clock`] for how it judges leases.

mod access;
mod clock;
mod error;
mod heads;
mod inbox;
mod leases;
mod ledger;
mod log;
mod poller;
mod readers;
mod schema;
mod views;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{Ask, Balance};
use forkyard_core::view::{ForkView, RunView, SandboxView};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};

use crate::hub::Hub;
use crate::reservation::Step;
use crate::*;

pub struct SqliteStore {
    writer: writer::Writer,
    readers: readers::Readers,
    hub: Arc<Hub>,
    clock: clock::Clock,
}

impl SqliteStore {
    /// Makes the file and its folder if they are missing, and brings the schema up to date.
    pub async fn open(path: impl Into<PathBuf>) -> Result<SqliteStore> {
        let path = path.into();
        tokio::task::spawn_blocking(move || SqliteStore::start(&path))
            .await
            .map_err(|e| StoreError::Unavailable(format!("opening was stopped: {e}")))?
    }

    fn start(path: &Path) -> Result<SqliteStore> {
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let failed = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::StorageFull => StoreError::Full(format!("{}: {e}", folder.display())),
            _ => StoreError::Unavailable(format!("{} can't be used: {e}", folder.display())),
        };
        std::fs::create_dir_all(folder).map_err(failed)?;
        schema::make_private(path).map_err(failed)?;
        let mut conn = schema::connect(path)?;
        schema::migrate(&mut conn)?;
        // The file's name is durable too.
        std::fs::File::open(folder).and_then(|f| f.sync_all()).map_err(failed)?;
        let hub = Arc::new(Hub::default());
        poller::start(schema::connect(path)?, hub.clone())?;
        let writer = writer::Writer::start(conn, hub.clone())?;
        let readers = readers::Readers::new(path.to_path_buf());
        Ok(SqliteStore { writer, readers, hub, clock: clock::Clock::new()? })
    }
}

#[async_trait]
impl EventLog for SqliteStore {
    async fn create_run(&self, run: CreateRun) -> Result<Created> {
        let view = check::create_run(&run)?.clone();
        let (events, views) = (check::events(&run.events)?, check::views(&run.run, &run.views)?);
        self.writer.write(move |tx| log::create_run(tx, &run, &view, &events, &views)).await
    }
    async fn append(&self, append: Append) -> Result<Appended> {
        check::append(&append)?;
        let events = check::events(&append.events)?;
        let views = check::views(append.stream.run(), &append.views)?;
        self.writer.write(move |tx| log::append(tx, &append, &events, &views)).await
    }
    async fn append_journal(&self, append: AppendJournal) -> Result<Appended> {
        check::append_journal(&append)?;
        let events = check::events(&append.events)?;
        self.writer.write_checked(move |tx| log::append_journal(tx, &append, &events)).await
    }
    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>> {
        let stream = stream.clone();
        self.readers.read(move |conn| log::read_stream(conn, &stream, after, limit)).await
    }
    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        let (run, query) = (run.clone(), query.clone());
        self.readers.read(move |conn| log::read_run(conn, &run, &query)).await
    }
    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        let (sandbox, query) = (sandbox.clone(), query.clone());
        self.readers.read(move |conn| log::read_sandbox(conn, &sandbox, &query)).await
    }
    async fn count_sandbox(&self, sandbox: &SandboxId, kinds: &[String]) -> Result<u64> {
        let query = EventQuery { kinds: kinds.to_vec(), ..Default::default() };
        check::query(&query)?;
        let sandbox = sandbox.clone();
        self.readers.read(move |conn| log::count_sandbox(conn, &sandbox, &query)).await
    }
    async fn read_journals(&self, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
        let run = run.clone();
        self.readers.read(move |conn| log::read_journals(conn, &run, fork)).await
    }
    async fn last_position(&self, run: &RunId) -> Result<u64> {
        let run = run.clone();
        self.readers.read(move |conn| log::last_position(conn, &run)).await
    }
}

#[async_trait]
impl Inbox for SqliteStore {
    async fn put_command(&self, run: &RunId, command: NewCommand) -> Result<CommandId> {
        check::optional_key("a command's key", command.key.as_deref())?;
        check::time("a command's time", command.at)?;
        let (run, text) = (run.clone(), check::data("a command", &command.data)?);
        self.writer.write(move |tx| inbox::put_command(tx, &run, &command, &text)).await
    }
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>> {
        let run = run.clone();
        self.readers.read(move |conn| inbox::pending_commands(conn, &run)).await
    }
    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId> {
        check::optional_key("a message's key", message.key.as_deref())?;
        check::time("a message's time", message.at)?;
        let (run, text) = (run.clone(), check::data("a message", &message.data)?);
        self.writer.write(move |tx| inbox::put_message(tx, &run, fork, &message, &text)).await
    }
    async fn pending_messages(&self, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>> {
        let run = run.clone();
        self.readers.read(move |conn| inbox::pending_messages(conn, &run, fork)).await
    }
}

#[async_trait]
impl Leases for SqliteStore {
    async fn acquire(&self, run: &RunId, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        check::key("a lease's owner", owner)?;
        let (run, owner, clock) = (run.clone(), owner.to_string(), self.clock.clone());
        self.writer.write(move |tx| leases::acquire(tx, &clock, &run, &owner, ttl)).await
    }
    async fn renew(
        &self,
        run: &RunId,
        token: LeaseToken,
        ttl: Duration,
        driven: Option<Timestamp>,
    ) -> Result<()> {
        let (run, clock) = (run.clone(), self.clock.clone());
        self.writer.write(move |tx| leases::renew(tx, &clock, &run, token, ttl, driven)).await
    }
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()> {
        let run = run.clone();
        self.writer.write(move |tx| leases::release(tx, &run, token)).await
    }
    async fn holder(&self, run: &RunId) -> Result<Option<Holder>> {
        let (run, clock) = (run.clone(), self.clock.clone());
        self.readers.read(move |conn| leases::holder(conn, &clock, &run)).await
    }
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>> {
        let clock = self.clock.clone();
        self.readers.read(move |conn| leases::claimable(conn, &clock, limit)).await
    }
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()> {
        check::key("a process's id", &process.id)?;
        let (id, text, clock) = (process.id.clone(), check::process(process)?, self.clock.clone());
        self.writer.write(move |tx| leases::announce(tx, &clock, &id, &text, ttl)).await
    }
    async fn processes(&self) -> Result<Vec<Process>> {
        let clock = self.clock.clone();
        self.readers.read(move |conn| leases::processes(conn, &clock)).await
    }
}

impl SqliteStore {
    async fn step(&self, run: &RunId, request: &str, step: Step) -> Result<()> {
        let (run, request) = (run.clone(), request.to_string());
        self.writer.write(move |tx| ledger::step(tx, &run, &request, step)).await
    }
}

#[async_trait]
impl Ledger for SqliteStore {
    async fn reserve(&self, run: &RunId, ask: Ask) -> Result<Reserve> {
        check::key("a request", &ask.request)?;
        check::amount("a reservation", ask.worst)?;
        let run = run.clone();
        self.writer.write(move |tx| ledger::reserve(tx, &run, &ask)).await
    }
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<Sending> {
        let (run, request) = (run.clone(), request.to_string());
        self.writer.write(move |tx| ledger::mark_sent(tx, &run, &request)).await
    }
    async fn shrink(&self, run: &RunId, request: &str, worst: Usd) -> Result<()> {
        self.step(run, request, Step::Shrink(worst)).await
    }
    async fn settle(&self, run: &RunId, request: &str, cost: Usd) -> Result<()> {
        check::amount("a cost", cost)?;
        self.step(run, request, Step::Settle(cost)).await
    }
    async fn release_reservation(&self, run: &RunId, request: &str) -> Result<()> {
        self.step(run, request, Step::Release).await
    }
    async fn balance(&self, run: &RunId) -> Result<Balance> {
        let run = run.clone();
        self.readers.read(move |conn| ledger::balance(conn, &run)).await
    }
}

#[async_trait]
impl Views for SqliteStore {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        let run = run.clone();
        self.readers.read(move |conn| views::run(conn, &run)).await
    }
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>> {
        let query = query.clone();
        self.readers.read(move |conn| views::runs(conn, &query)).await
    }
    async fn count_runs(&self, words: &Words) -> Result<RunCounts> {
        let words = words.clone();
        self.readers.read(move |conn| views::count_runs(conn, &words)).await
    }
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        let run = run.clone();
        self.readers.read(move |conn| views::forks(conn, &run)).await
    }
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        let run = run.clone();
        self.readers.read(move |conn| views::fork(conn, &run, fork)).await
    }
    async fn sandboxes(&self, query: &SandboxQuery) -> Result<Vec<SandboxView>> {
        let query = query.clone();
        self.readers.read(move |conn| views::sandboxes(conn, &query)).await
    }
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()> {
        let sandbox = sandbox.clone();
        self.writer.write(move |tx| views::sandbox_destroyed(tx, &sandbox)).await
    }
    async fn journal_len(&self, run: &RunId, fork: ForkNum) -> Result<u64> {
        let run = run.clone();
        self.readers.read(move |conn| views::journal_len(conn, &run, fork)).await
    }
    async fn attempt(&self, run: &RunId, fork: ForkNum) -> Result<Option<Attempt>> {
        let run = run.clone();
        self.readers
            .read(move |conn| match log::run_number(conn, &run)? {
                Some(n) => log::attempt(conn, n, fork),
                None => Ok(None),
            })
            .await
    }
    async fn delete_run(&self, run: &RunId) -> Result<()> {
        let run = run.clone();
        self.writer.write(move |tx| views::delete_run(tx, &run)).await
    }
    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()> {
        check::blob(key, data)?;
        let (key, data) = (key.to_string(), data.to_vec());
        self.writer.write(move |tx| views::put_blob(tx, &key, &data)).await
    }
    async fn blob(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check::key("a blob's key", key)?;
        let key = key.to_string();
        self.readers.read(move |conn| views::blob(conn, &key)).await
    }
    async fn delete_blob(&self, key: &str) -> Result<()> {
        check::key("a blob's key", key)?;
        let key = key.to_string();
        self.writer.write(move |tx| views::delete_blob(tx, &key)).await
    }
    fn watch(&self, run: Option<&RunId>) -> Watch {
        self.hub.subscribe(run)
    }
    fn changes(&self) -> Changes {
        self.hub.follow()
    }
    async fn identity(&self) -> Result<String> {
        self.readers.read(views::identity).await
    }
}

#[async_trait]
impl Access for SqliteStore {
    async fn put_token(&self, token: Token) -> Result<()> {
        crate::access::check_token(&token)?;
        self.writer.write(move |tx| access::put_token(tx, &token)).await
    }
    async fn token(&self, id: &str) -> Result<Option<Token>> {
        let id = id.to_string();
        self.readers.read(move |conn| access::token(conn, &id)).await
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        self.readers.read(access::tokens).await
    }
    async fn revoke_token(&self, id: &str, at: Timestamp) -> Result<()> {
        let id = id.to_string();
        self.writer.write(move |tx| access::revoke_token(tx, &id, at)).await
    }
    async fn forget_tokens(&self, before: Timestamp) -> Result<u64> {
        self.writer.write(move |tx| access::forget_tokens(tx, before)).await
    }
    async fn forget_deeds(&self, before: Timestamp) -> Result<u64> {
        self.writer.write(move |tx| access::forget_deeds(tx, before)).await
    }
    async fn put_audit(&self, deed: Deed) -> Result<u64> {
        let detail = crate::access::check_deed(&deed)?;
        self.writer.write(move |tx| access::put_audit(tx, &deed, &detail)).await
    }
    async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
        let query = query.clone();
        self.readers.read(move |conn| access::audit(conn, &query)).await
    }
}
