//! How things stand: asked of the store, the engine and the models when somebody looks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkyard_core::Usd;
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::view::{RunStatus, SandboxState};
use forkyard_engine::embedded::Embedded;
use forkyard_engine::models::Models;
use forkyard_store::{RunQuery, SandboxQuery, Store};
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Gauge, Histogram, Meter};
use tokio::sync::Mutex;

use crate::yard::Yard;

/// Live runs and sandboxes that are looked at.
const LOOK: usize = 10_000;
/// Whoever asks more often gets the same answer: every look reads the store.
const FRESH: Duration = Duration::from_millis(500);

pub struct Gauges {
    store: Arc<dyn Store>,
    engine: Embedded,
    models: Arc<Models>,
    /// SQLite's own files.
    files: Vec<PathBuf>,
    last: Mutex<Option<Instant>>,
    sandboxes: Gauge<u64>,
    runs: Gauge<u64>,
    forks: Gauge<u64>,
    queued_runs: Gauge<u64>,
    slots: Gauge<u64>,
    budget: Gauge<f64>,
    store_up: Gauge<u64>,
    store_bytes: Gauge<u64>,
    store_seconds: Histogram<f64>,
    in_flight: Gauge<u64>,
    window: Gauge<u64>,
    closed: Gauge<f64>,
}

const RUN_STATES: [RunStatus; 4] =
    [RunStatus::Pending, RunStatus::Preparing, RunStatus::Running, RunStatus::Finishing];
const SANDBOX_STATES: [SandboxState; 4] =
    [SandboxState::Requested, SandboxState::Live, SandboxState::HandedOver, SandboxState::Owed];
const READ_SECONDS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5];

impl Gauges {
    pub fn new(meter: &Meter, yard: &Yard) -> Gauges {
        let number =
            |name: &'static str, what: &'static str| meter.u64_gauge(name).with_description(what).build();
        let amount =
            |name: &'static str, what: &'static str| meter.f64_gauge(name).with_description(what).build();
        let sqlite = ["forkyard.db", "forkyard.db-wal"].map(|f| yard.settings.home.join(f));
        let files = if yard.settings.store_url.is_none() { sqlite.to_vec() } else { vec![] };
        Gauges {
            store: yard.store.clone(),
            engine: yard.engine.clone(),
            models: yard.models.clone(),
            files,
            last: Mutex::default(),
            sandboxes: number("forkyard_sandboxes", "Sandboxes of runs that are there or may be"),
            runs: number("forkyard_runs", "Runs that have not ended"),
            forks: number("forkyard_forks", "Forks of runs that have not ended"),
            queued_runs: number("forkyard_queue_runs", "Runs that wait for somebody to drive them"),
            slots: number("forkyard_host_slots", "Room for forks on this host: limit, used, waiting"),
            budget: amount(
                "forkyard_budget_usd",
                "Of runs with a budget that have not ended: limit, spent, reserved",
            ),
            store_up: number("forkyard_store_up", "Whether the store answers"),
            store_bytes: number("forkyard_store_bytes", "Size of the store's files, where it is SQLite"),
            store_seconds: meter
                .f64_histogram("forkyard_store_read_seconds")
                .with_description("Time that the store took to list live runs")
                .with_unit("s")
                .with_boundaries(READ_SECONDS.to_vec())
                .build(),
            in_flight: number("forkyard_limiter_in_flight", "Requests to a model's provider under way"),
            window: number("forkyard_limiter_window", "Requests that may be under way at once"),
            closed: amount("forkyard_limiter_closed_seconds", "For how long no request is sent"),
        }
    }

    pub async fn read(&self) {
        let mut last = self.last.lock().await;
        if last.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        *last = Some(Instant::now());
        let up = self.read_store().await;
        if let Err(e) = &up {
            tracing::debug!("gauges: {e}");
        }
        self.store_up.record(u64::from(up.is_ok()), &[]);
        if !self.files.is_empty() {
            let bytes = self.files.iter().filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
            self.store_bytes.record(bytes, &[]);
        }
        let room = self.engine.room();
        for (kind, n) in [("limit", room.limit), ("used", room.used), ("waiting", room.waiting)] {
            self.slots.record(n as u64, &[KeyValue::new("kind", kind)]);
        }
        for (provider, p) in self.models.pressure() {
            let of = [KeyValue::new("provider", provider)];
            self.in_flight.record(p.in_flight as u64, &of);
            self.window.record(p.window as u64, &of);
            self.closed.record(p.closed_for.as_secs_f64(), &of);
        }
    }

    async fn read_store(&self) -> forkyard_store::Result<()> {
        let since = Instant::now();
        let live = self.store.runs(&RunQuery { live: true, limit: LOOK, ..RunQuery::default() }).await?;
        self.store_seconds.record(since.elapsed().as_secs_f64(), &[]);
        for status in RUN_STATES {
            let n = live.iter().filter(|r| r.status == status).count();
            self.runs.record(n as u64, &[KeyValue::new("status", status.as_str())]);
        }
        let sum = |of: fn(&forkyard_core::view::Progress) -> u32| -> u64 {
            live.iter().map(|r| u64::from(of(&r.progress))).sum()
        };
        self.forks.record(sum(|p| p.pending), &[KeyValue::new("state", "pending")]);
        self.forks.record(sum(|p| p.in_progress), &[KeyValue::new("state", "in_progress")]);
        let (mut limit, mut spent, mut reserved) = (Usd::ZERO, Usd::ZERO, Usd::ZERO);
        for run in live.iter().filter(|r| r.limits.run.is_some()) {
            let balance = self.store.balance(&run.id).await?;
            limit += run.limits.run.unwrap_or_default();
            spent += balance.spent;
            reserved += balance.reserved;
        }
        for (kind, amount) in [("limit", limit), ("spent", spent), ("reserved", reserved)] {
            self.budget.record(amount.as_dollars(), &[KeyValue::new("kind", kind)]);
        }
        let waiting = self.store.claimable(LOOK).await?;
        self.queued_runs.record(waiting.len() as u64, &[]);
        let query = SandboxQuery { run: None, states: SANDBOX_STATES.to_vec(), limit: LOOK };
        let mut by: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for kind in [ProviderKind::Local, ProviderKind::Docker] {
            for state in SANDBOX_STATES {
                by.insert((name(kind), state.as_str()), 0);
            }
        }
        for s in self.store.sandboxes(&query).await? {
            *by.entry((name(s.provider), s.state.as_str())).or_default() += 1;
        }
        for ((provider, state), n) in by {
            self.sandboxes.record(
                n,
                &[KeyValue::new("provider", provider.to_string()), KeyValue::new("state", state.to_string())],
            );
        }
        Ok(())
    }
}

fn name(provider: ProviderKind) -> &'static str {
    match provider {
        ProviderKind::Local => "local",
        ProviderKind::Docker => "docker",
        ProviderKind::E2b => "e2b",
        ProviderKind::Daytona => "daytona",
    }
}
