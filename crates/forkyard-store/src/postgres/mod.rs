//! One server for many hosts. Every write of a run locks the run's row first, so positions are in commit order; see
//! [`batch`] for how writes share a transaction, [`news`] for how processes learn of each other's.

mod access;
mod batch;
mod error;
mod inbox;
mod leases;
mod ledger;
mod log;
mod news;
mod patience;
mod schema;
mod views;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{Ask, Balance};
use forkyard_core::view::{ForkView, RunView, SandboxView};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgPool, Postgres, Transaction};

use patience::Patience;

use crate::hub::Hub;
use crate::reservation::Step;
use crate::*;

/// Connections of one process: a server has about a hundred for all of them.
const MAX_CONNECTIONS: u32 = 12;
/// How long a request waits for a connection, also while the server is away, before it fails as unavailable.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a call waits for its answer. Not less than a server that is there takes to give up a statement by itself.
const DEADLINE: Duration = Duration::from_secs(30);
/// A session's own limits, in ms: a statement, a lock, a transaction whose client is gone. And durable before Ok, whatever
/// the server's default is.
const SESSION: &str = "SET statement_timeout = 30000; SET lock_timeout = 10000;
    SET idle_in_transaction_session_timeout = 30000; SET synchronous_commit = on";

pub struct PostgresStore {
    pool: PgPool,
    patience: Patience,
    batches: batch::Batches,
    hub: Arc<Hub>,
    _tasks: news::Tasks,
}

impl PostgresStore {
    /// Connects, and brings the schema up to date.
    pub async fn open(url: &str) -> Result<PostgresStore> {
        PostgresStore::open_with(url, DEADLINE).await
    }

    /// With another deadline for calls.
    pub async fn open_with(url: &str, deadline: Duration) -> Result<PostgresStore> {
        let patience = Patience::new(deadline);
        patience.long(PostgresStore::connect(url, patience.clone())).await
    }

    async fn connect(url: &str, patience: Patience) -> Result<PostgresStore> {
        let options = PgConnectOptions::from_str(url)
            // The URL may hold a password: it is not repeated.
            .map_err(|e| StoreError::Invalid(format!("the store's PostgreSQL URL can't be read: {e}")))?
            .application_name("forkyard");
        let tested = patience.clone();
        let pool = PgPoolOptions::new()
            .max_connections(MAX_CONNECTIONS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .after_connect(|conn, _| {
                Box::pin(async move { sqlx::raw_sql(SESSION).execute(&mut *conn).await.map(drop) })
            })
            .after_release(move |conn, _| Box::pin(tested.clone().test(conn)))
            .connect_with(options)
            .await?;
        schema::migrate(&pool).await?;
        let hub = Arc::new(Hub::default());
        let instance: String =
            sqlx::query_scalar("SELECT replace(gen_random_uuid()::text, '-', '')").fetch_one(&pool).await?;
        let (news, tasks) = news::News::start(&pool, &patience, hub.clone(), instance).await?;
        let batches = batch::Batches::new(pool.clone(), patience.clone(), news);
        Ok(PostgresStore { batches, pool, patience, hub, _tasks: tasks })
    }

    /// For reads of several statements, which all see the same state.
    async fn snapshot(&self) -> Result<Transaction<'static, Postgres>> {
        Ok(self.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?)
    }

    async fn step(&self, run: &RunId, request: &str, step: Step) -> Result<()> {
        let (of, request) = (run.clone(), request.to_string());
        self.batches
            .write(run, move |tx| Box::pin(async move { ledger::step(tx, &of, &request, step).await }))
            .await
    }
}

#[async_trait]
impl EventLog for PostgresStore {
    async fn create_run(&self, new: CreateRun) -> Result<Created> {
        let view = check::create_run(&new)?.clone();
        let (events, views) = (check::events(&new.events)?, check::views(&new.run, &new.views)?);
        let run = new.run.clone();
        self.batches
            .write(&run, move |tx| {
                Box::pin(async move { log::create_run(tx, &new, &view, &events, &views).await })
            })
            .await
    }
    async fn append(&self, append: Append) -> Result<Appended> {
        check::append(&append)?;
        let events = check::events(&append.events)?;
        let views = check::views(append.stream.run(), &append.views)?;
        let run = append.stream.run().clone();
        self.batches
            .write(&run, move |tx| Box::pin(async move { log::append(tx, &append, &events, &views).await }))
            .await
    }
    async fn append_journal(&self, append: AppendJournal) -> Result<Appended> {
        check::append_journal(&append)?;
        let events = check::events(&append.events)?;
        let run = append.run.clone();
        self.batches
            .write(&run, move |tx| Box::pin(async move { log::append_journal(tx, &append, &events).await }))
            .await
    }
    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>> {
        self.patience
            .long(async { log::read_stream(&mut *self.snapshot().await?, stream, after, limit).await })
            .await
    }
    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        self.patience.long(async { log::read_run(&mut *self.snapshot().await?, run, query).await }).await
    }
    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>> {
        check::query(query)?;
        self.patience
            .long(async { log::read_sandbox(&mut *self.snapshot().await?, sandbox, query).await })
            .await
    }
    async fn count_sandbox(&self, sandbox: &SandboxId, kinds: &[String]) -> Result<u64> {
        let query = EventQuery { kinds: kinds.to_vec(), ..Default::default() };
        check::query(&query)?;
        self.patience
            .long(async { log::count_sandbox(&mut *self.snapshot().await?, sandbox, &query).await })
            .await
    }
    async fn read_journals(&self, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
        self.patience.long(async { log::read_journals(&mut *self.snapshot().await?, run, fork).await }).await
    }
    async fn last_position(&self, run: &RunId) -> Result<u64> {
        self.patience.call(async { log::last_position(&mut *self.pool.acquire().await?, run).await }).await
    }
}

#[async_trait]
impl Inbox for PostgresStore {
    async fn put_command(&self, run: &RunId, command: NewCommand) -> Result<CommandId> {
        check::optional_key("a command's key", command.key.as_deref())?;
        check::time("a command's time", command.at)?;
        let (of, text) = (run.clone(), check::data("a command", &command.data)?);
        self.batches
            .write(run, move |tx| Box::pin(async move { inbox::put_command(tx, &of, &command, &text).await }))
            .await
    }
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>> {
        self.patience
            .call(async { inbox::pending_commands(&mut *self.pool.acquire().await?, run).await })
            .await
    }
    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId> {
        check::optional_key("a message's key", message.key.as_deref())?;
        check::time("a message's time", message.at)?;
        let (of, text) = (run.clone(), check::data("a message", &message.data)?);
        self.batches
            .write(run, move |tx| {
                Box::pin(async move { inbox::put_message(tx, &of, fork, &message, &text).await })
            })
            .await
    }
    async fn pending_messages(&self, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>> {
        self.patience
            .call(async { inbox::pending_messages(&mut *self.pool.acquire().await?, run, fork).await })
            .await
    }
}

#[async_trait]
impl Leases for PostgresStore {
    async fn acquire(&self, run: &RunId, owner: &str, ttl: Duration) -> Result<Option<Lease>> {
        check::key("a lease's owner", owner)?;
        let (of, owner) = (run.clone(), owner.to_string());
        self.batches
            .write(run, move |tx| Box::pin(async move { leases::acquire(tx, &of, &owner, ttl).await }))
            .await
    }
    async fn renew(
        &self,
        run: &RunId,
        token: LeaseToken,
        ttl: Duration,
        driven: Option<Timestamp>,
    ) -> Result<()> {
        let of = run.clone();
        self.batches
            .write(run, move |tx| Box::pin(async move { leases::renew(tx, &of, token, ttl, driven).await }))
            .await
    }
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()> {
        let of = run.clone();
        self.batches
            .write(run, move |tx| Box::pin(async move { leases::release(tx, &of, token).await }))
            .await
    }
    async fn holder(&self, run: &RunId) -> Result<Option<Holder>> {
        self.patience.call(leases::holder(&self.pool, run)).await
    }
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>> {
        self.patience.call(leases::claimable(&self.pool, limit)).await
    }
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()> {
        check::key("a process's id", &process.id)?;
        self.patience.call(leases::announce(&self.pool, &process.id, &check::process(process)?, ttl)).await
    }
    async fn processes(&self) -> Result<Vec<Process>> {
        self.patience.call(leases::processes(&self.pool)).await
    }
}

#[async_trait]
impl Ledger for PostgresStore {
    async fn reserve(&self, run: &RunId, ask: Ask) -> Result<Reserve> {
        check::key("a request", &ask.request)?;
        check::amount("a reservation", ask.worst)?;
        let of = run.clone();
        self.batches.write(run, move |tx| Box::pin(async move { ledger::reserve(tx, &of, &ask).await })).await
    }
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<Sending> {
        let (of, request) = (run.clone(), request.to_string());
        self.batches
            .write(run, move |tx| Box::pin(async move { ledger::mark_sent(tx, &of, &request).await }))
            .await
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
        self.patience.call(async { ledger::balance(&mut *self.snapshot().await?, run).await }).await
    }
}

#[async_trait]
impl Views for PostgresStore {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>> {
        self.patience.call(views::run(&self.pool, run)).await
    }
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>> {
        self.patience.call(views::runs(&self.pool, query)).await
    }
    async fn count_runs(&self, words: &Words) -> Result<RunCounts> {
        self.patience.call(views::count_runs(&self.pool, words)).await
    }
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>> {
        self.patience.call(views::forks(&self.pool, run)).await
    }
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
        self.patience.call(views::fork(&self.pool, run, fork)).await
    }
    async fn sandboxes(&self, query: &SandboxQuery) -> Result<Vec<SandboxView>> {
        self.patience.call(views::sandboxes(&self.pool, query)).await
    }
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()> {
        let run = self.patience.call(views::run_of_sandbox(&self.pool, sandbox)).await?;
        let (of, sandbox) = (run.clone(), sandbox.clone());
        self.batches
            .write(&run, move |tx| Box::pin(async move { views::sandbox_destroyed(tx, &of, &sandbox).await }))
            .await
    }
    async fn journal_len(&self, run: &RunId, fork: ForkNum) -> Result<u64> {
        self.patience.call(views::journal_len(&self.pool, run, fork)).await
    }
    async fn attempt(&self, run: &RunId, fork: ForkNum) -> Result<Option<Attempt>> {
        let look = async {
            let mut conn = self.pool.acquire().await?;
            match log::run_number(&mut conn, run).await? {
                Some(n) => log::attempt(&mut conn, n, fork).await,
                None => Ok(None),
            }
        };
        self.patience.call(look).await
    }
    async fn delete_run(&self, run: &RunId) -> Result<()> {
        let of = run.clone();
        self.batches.write(run, move |tx| Box::pin(async move { views::delete_run(tx, &of).await })).await
    }
    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()> {
        check::blob(key, data)?;
        self.patience.long(views::put_blob(&self.pool, key, data)).await
    }
    async fn blob(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check::key("a blob's key", key)?;
        self.patience.long(views::blob(&self.pool, key)).await
    }
    async fn delete_blob(&self, key: &str) -> Result<()> {
        check::key("a blob's key", key)?;
        self.patience.call(views::delete_blob(&self.pool, key)).await
    }
    fn watch(&self, run: Option<&RunId>) -> Watch {
        self.hub.subscribe(run)
    }
    fn changes(&self) -> Changes {
        self.hub.follow()
    }
    async fn identity(&self) -> Result<String> {
        self.patience.call(views::identity(&self.pool)).await
    }
}

#[async_trait]
impl Access for PostgresStore {
    async fn put_token(&self, token: Token) -> Result<()> {
        crate::access::check_token(&token)?;
        self.patience.call(access::put_token(&self.pool, &token)).await
    }
    async fn token(&self, id: &str) -> Result<Option<Token>> {
        self.patience.call(access::token(&self.pool, id)).await
    }
    async fn tokens(&self) -> Result<Vec<Token>> {
        self.patience.call(access::tokens(&self.pool)).await
    }
    async fn revoke_token(&self, id: &str, at: Timestamp) -> Result<()> {
        self.patience.call(access::revoke_token(&self.pool, id, at)).await
    }
    async fn forget_tokens(&self, before: Timestamp) -> Result<u64> {
        self.patience.call(access::forget_tokens(&self.pool, before)).await
    }
    async fn forget_deeds(&self, before: Timestamp) -> Result<u64> {
        self.patience.call(access::forget_deeds(&self.pool, before)).await
    }
    async fn put_audit(&self, deed: Deed) -> Result<u64> {
        let detail = crate::access::check_deed(&deed)?;
        self.patience.call(access::put_audit(&self.pool, &deed, &detail)).await
    }
    async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
        self.patience.call(access::audit(&self.pool, query)).await
    }
}
