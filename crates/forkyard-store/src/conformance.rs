//! What every [`crate::Store`] holds, as tests: run all of them on a store with [`crate::conformance!`].
//!
//! Each case takes a factory that gives a new, empty store.

pub mod access;
pub mod inbox;
pub mod leases;
pub mod ledger;
pub mod log;
pub mod positions;
pub mod values;
pub mod views;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::budget::BudgetLimits;
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::view::{
    EngineKind, ForkView, Lifecycle, Progress, RunStatus, RunView, SandboxState, SandboxView, View,
};
use forkyard_core::{Attempt, ForkNum, Millis, Role, RunId, SandboxId, Timestamp, Usd};
use serde_json::{Value, json};

use crate::*;

/// Long enough for the slowest machine; a failing case says so instead of hanging.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A lease that does not end while a case runs.
pub const LONG: Duration = Duration::from_secs(3600);

/// One `#[tokio::test]` for each case, in the module where it stands. `$factory` is an async fn without arguments that
/// gives an `Arc<dyn Store>`. With `in one test:` before it, all cases are one test, eight at a time: for stores that are
/// dear to start.
#[macro_export]
macro_rules! conformance {
    (in one test: $factory:path) => {
        $crate::conformance!(@list one $factory);
    };
    ($factory:path) => {
        $crate::conformance!(@list each $factory);
    };
    (@list $how:ident $factory:path) => {
        $crate::conformance!(@$how $factory;
            log: keys_make_runs_once, runs_are_created_once, steps_need_the_expected_sequence, steps_need_the_lease,
                journals_need_the_attempt, a_repeated_step_is_known, a_refused_step_leaves_no_trace, a_refused_entry_leaves_no_trace,
                views_stay_in_their_run, streams_are_read_in_pages, runs_are_read_by_position,
                queries_filter_by_kind_and_fork, sandboxes_have_their_events, journals_are_read_in_order,
                what_is_missing_is_named, an_attempt_never_goes_back, empty_steps_write_views;
            positions: a_tailing_reader_misses_nothing, one_of_many_rivals_wins_each_step;
            inbox: commands_wait_in_order, command_keys_are_used_once, messages_wait_for_their_fork,
                message_keys_are_used_once, inboxes_are_bounded;
            leases: one_holder_at_a_time, an_expired_lease_is_taken_over, tokens_grow, a_released_lease_is_free,
                the_holder_is_known_while_its_lease_is_valid,
                renewing_needs_the_lease, claimable_runs_are_those_that_need_a_driver, rivals_get_one_lease,
                processes_are_forgotten;
            ledger: money_is_set_aside_and_settled, asking_twice_is_asking_once, rivals_never_overshoot,
                forks_have_limits_of_their_own, a_paused_run_reserves_nothing, a_detached_run_reserves_nothing,
                a_stale_attempt_reserves_nothing,
                a_new_attempt_closes_what_was_open, closed_reservations_stay_closed, steps_can_be_repeated,
                limits_follow_the_view, no_budget_still_meters, a_paused_run_sends_nothing, an_ended_fork_holds_no_money;
            views: views_are_written_and_read, runs_are_listed_newest_first, runs_are_found_by_words,
                runs_are_found_by_how_they_ended, runs_are_counted, credentials_are_not_found,
                followers_hear_which_runs_changed, sandboxes_are_found_by_state,
                blobs_are_kept, only_ended_runs_are_deleted, deleting_takes_all_of_a_run, watchers_hear_of_everything,
                watchers_of_one_run_sleep_through_others, a_store_has_an_identity, journal_length_counts_all_attempts;
            access: tokens_are_kept_and_revoked, old_sessions_are_forgotten, what_is_over_is_forgotten_in_time, deeds_are_read_newest_first;
            values: hostile_text_round_trips, numbers_round_trip, too_much_is_refused, odd_names_are_kept_or_refused,
                a_full_sized_event_is_stored;
        );
    };
    (@each $factory:path; $($module:ident: $($case:ident),+;)+) => {
        $($(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::conformance::$module::$case($factory).await;
            }
        )+)+
    };
    (@one $factory:path; $($module:ident: $($case:ident),+;)+) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn all_cases() {
            let mut cases = $crate::conformance::Cases::default();
            $($(
                cases.run(stringify!($case), || Box::pin($crate::conformance::$module::$case($factory))).await;
            )+)+
            cases.finish().await;
        }
    };
}

/// Runs cases side by side in one test.
#[derive(Default)]
pub struct Cases {
    running: tokio::task::JoinSet<(&'static str, std::result::Result<(), tokio::task::JoinError>)>,
    failed: Vec<&'static str>,
}

impl Cases {
    const AT_ONCE: usize = 8;

    /// A case is made on the heap by a function of its own: all of them are too large for one stack.
    pub async fn run(&mut self, name: &'static str, case: fn() -> Pin<Box<dyn Future<Output = ()> + Send>>) {
        while self.running.len() >= Cases::AT_ONCE {
            self.reap().await;
        }
        self.running.spawn(async move { (name, tokio::spawn(case()).await) });
    }

    async fn reap(&mut self) {
        if let Some(Ok((name, Err(_)))) = self.running.join_next().await {
            self.failed.push(name);
        }
    }

    pub async fn finish(mut self) {
        while !self.running.is_empty() {
            self.reap().await;
        }
        assert!(self.failed.is_empty(), "failed (see above): {:?}", self.failed);
    }
}

pub fn run_id(name: &str) -> RunId {
    RunId::new(name).expect("a valid id")
}

pub fn event(kind: &str, data: Value) -> NewEvent {
    NewEvent {
        kind: kind.into(),
        version: 1,
        at: Timestamp(1_000),
        source: Source::System,
        sandbox: None,
        data,
    }
}

pub fn events(kind: &str, n: u64) -> Vec<NewEvent> {
    (0..n).map(|i| event(kind, json!({ "i": i }))).collect()
}

pub fn run_view(run: &RunId) -> RunView {
    RunView {
        id: run.clone(),
        engine: EngineKind::Embedded,
        status: RunStatus::Running,
        outcome: None,
        paused: false,
        detached: false,
        cancelling: false,
        repo: "https://example.com/r.git".into(),
        branch: None,
        prompt: "do it".into(),
        limits: BudgetLimits { run: Some(Usd(1_000)), fork: None },
        created_at: Timestamp(1_000),
        updated_at: Timestamp(1_000),
        ended_at: None,
        progress: Progress::default(),
        error: None,
        ranking: Vec::new(),
        winner: None,
    }
}

pub fn fork_view(run: &RunId, fork: ForkNum, attempt: u32) -> ForkView {
    ForkView {
        run: run.clone(),
        fork,
        attempt: Attempt(attempt),
        lifecycle: Lifecycle::Running,
        phase: "agent".into(),
        outcome: None,
        sandbox: None,
        name: None,
        model: "script".into(),
        verified: None,
        score: None,
        turns: 0,
        tool_calls: 0,
        cost: Usd::ZERO,
        tokens: 0,
        diff: None,
        driven: Millis::ZERO,
        created_at: Timestamp(1_000),
        updated_at: Timestamp(1_000),
        started_at: None,
        ended_at: None,
        error: None,
    }
}

pub fn sandbox_view(run: &RunId, fork: ForkNum, state: SandboxState) -> SandboxView {
    SandboxView {
        id: SandboxId::derive(run, Some(fork), Attempt(1), Role::Work),
        run: run.clone(),
        fork: Some(fork),
        role: Role::Work,
        provider: ProviderKind::Local,
        host: None,
        state,
        created_at: Timestamp(1_000),
        updated_at: Timestamp(1_000),
    }
}

/// A run with one event, `forks` forks at attempt 1, and its lease.
pub async fn start(store: &Arc<dyn Store>, name: &str, forks: u32) -> (RunId, LeaseToken) {
    start_with(store, name, forks, |_| ()).await
}

pub async fn start_with(
    store: &Arc<dyn Store>,
    name: &str,
    forks: u32,
    change: impl FnOnce(&mut RunView),
) -> (RunId, LeaseToken) {
    let run = run_id(name);
    let mut view = run_view(&run);
    change(&mut view);
    let mut views = vec![View::Run(view)];
    views.extend((0..forks).map(|n| View::Fork(fork_view(&run, n, 1))));
    let new = CreateRun { run: run.clone(), key: None, events: events("run.created", 1), views };
    assert_eq!(store.create_run(new).await.unwrap(), Created::New);
    let lease = store.acquire(&run, "driver", LONG).await.unwrap().expect("nobody else has it");
    (run, lease.token)
}

/// A step of the run's own machine.
pub fn step(
    run: &RunId,
    lease: LeaseToken,
    expected: u64,
    events: Vec<NewEvent>,
    views: Vec<View>,
) -> Append {
    Append { stream: StreamId::Run(run.clone()), lease, expected, events, views, consume: Vec::new() }
}

pub fn entry(
    run: &RunId,
    fork: ForkNum,
    attempt: u32,
    expected: u64,
    events: Vec<NewEvent>,
) -> AppendJournal {
    AppendJournal { run: run.clone(), fork, attempt: Attempt(attempt), expected, events, deliver: Vec::new() }
}

pub fn command(key: Option<&str>, data: Value) -> NewCommand {
    NewCommand { key: key.map(Into::into), data, at: Timestamp(5) }
}

pub fn message(key: Option<&str>, data: Value) -> NewMessage {
    NewMessage { key: key.map(Into::into), data, at: Timestamp(5) }
}

/// Fails the case instead of waiting for ever.
pub async fn patiently<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}

/// Asks again until the answer is there.
pub async fn until<T, Fut: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> Fut) -> T {
    patiently(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

#[track_caller]
pub fn assert_invalid<T: std::fmt::Debug>(result: Result<T>, names: &str) {
    match result {
        Err(StoreError::Invalid(text)) => assert!(text.contains(names), "{text:?} does not name {names:?}"),
        other => panic!("expected Invalid, got {other:?}"),
    }
}

#[track_caller]
pub fn assert_not_found<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(StoreError::NotFound { .. })), "{result:?}");
}
