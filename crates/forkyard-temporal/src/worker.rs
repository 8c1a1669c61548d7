//! A worker process: polls for workflows and for what has to be done, on any host and on this one, and carries the store's news
//! to the service.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::HostId;
use forkyard_engine::activity::Activities;
use forkyard_engine::embedded::Embedded;
use forkyard_engine::sweep::{SweepConfig, Yard};
use forkyard_store::{Process, ProcessKind, Store};
use temporalio_common::worker::WorkerDeploymentOptions;
use temporalio_sdk::runtime::worker_tuner::{FixedSizeSlotSupplier, TunerHolder};
use temporalio_sdk::runtime::{PollerBehavior, RuntimeOptions};
use temporalio_sdk::{Runtime, Worker, WorkerOptions};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::cleanup::CleanupFlow;
use crate::courier::Courier;
use crate::fork::ForkFlow;
use crate::hand::{Counted, Hand, HandConfig};
use crate::run::RunFlow;
use crate::service::{Service, ServiceError};
use crate::wire::{host_queue, making_queue};

/// Tasks of the making queue that one host takes at once. Small: what waits for room here could have had it elsewhere.
const MAKERS: usize = 8;
/// Tasks of a host's own queue beyond its forks: cleanup never waits for agents.
const SPARE: usize = 64;
/// Questions to the store at once.
const SMALL_TASKS: usize = 64;
const WORKFLOW_TASKS: usize = 100;
const POLLERS: usize = 10;
/// A workflow whose worker is gone goes on elsewhere after this.
const STICKY: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct WorkerConfig {
    pub host: HostId,
    /// Unique for each process.
    pub owner: String,
    pub host_limit: usize,
    /// Ends the runs that Temporal has let go of. Its room for forks is this worker's.
    pub heir: Embedded,
    /// To be filled with the runs whose events this process counts; None: nobody counts.
    pub counted: Option<Counted>,
    /// How often work that goes on says so.
    pub beat: Duration,
    /// How long what is under way may take to come to a safe point when the worker is stopped.
    pub grace: Duration,
    /// How often this host looks for what it owes, besides when the worker starts.
    pub sweep: SweepConfig,
}

/// What a queue's worker does.
enum Part {
    /// Workflows, and what concerns the store alone.
    Main,
    Make,
    Host,
}

/// Works until `stop`; then what is under way comes to a safe point and is handed back.
pub async fn work(
    service: Service,
    store: Arc<dyn Store>,
    activities: Arc<dyn Activities>,
    yard: Arc<dyn Yard>,
    config: WorkerConfig,
    stop: CancellationToken,
) -> Result<(), ServiceError> {
    let (host, slots, counted) = (config.host.clone(), config.heir.slots(), config.counted.clone());
    let hand_config = HandConfig { host, beat: config.beat, slots, counted, yard };
    let hand = Hand::new(store.clone(), activities, hand_config, stop.clone()).await?;
    let invalid = |e: &dyn std::fmt::Display| ServiceError::Refused(e.to_string());
    let telemetry = service.telemetry();
    let runtime_options =
        RuntimeOptions::builder().telemetry_options(telemetry).build().map_err(|e| invalid(&e))?;
    let runtime = Runtime::from_current_tokio(runtime_options).map_err(|e| invalid(&e))?;
    let queue = service.task_queue();
    let parts = [
        (Part::Main, queue.to_string()),
        (Part::Make, making_queue(queue)),
        (Part::Host, host_queue(queue, &config.host)),
    ];
    let mut ends = vec![];
    for (part, queue) in parts {
        let options = options(part, queue, &hand, &config)?;
        let worker = Worker::new(&runtime, service.client().clone(), options).map_err(|e| invalid(&e))?;
        ends.push(spawn(worker, stop.clone()));
    }
    let process =
        Process { id: config.owner.clone(), host: config.host.clone(), kind: ProcessKind::Temporal };
    let courier = Courier { store, service: service.clone(), process, heir: config.heir.clone() };
    // If one of them can't go on, none does: a process that only looks alive would keep runs waiting.
    let failed = stop.child_token();
    let sweeping = async {
        loop {
            // A host that was lost owes what it could not be told to destroy.
            match hand.look_for_orphans(config.sweep.max_age).await {
                Ok(swept) if swept.cleaned > 0 => {
                    tracing::info!("removed {} orphaned sandboxes", swept.cleaned)
                }
                Ok(_) => {}
                Err(e) => tracing::warn!("orphans could not be looked for: {e}"),
            }
            tokio::time::sleep(config.sweep.interval).await;
        }
    };
    let carrying = async {
        tokio::select! {
            () = courier.carry(failed.clone()) => {}
            () = sweeping => {}
        }
    };
    let watching = async {
        let mut result = Ok(());
        for end in ends {
            let ended = end.await.unwrap_or_else(|_| Err("a worker's thread broke off".into()));
            if let (Err(why), true) = (&ended, result.is_ok()) {
                result = Err(ServiceError::Refused(why.clone()));
                stop.cancel();
            }
        }
        failed.cancel();
        result
    };
    let ((), result) = tokio::join!(carrying, watching);
    result
}

fn options(
    part: Part,
    queue: String,
    hand: &Hand,
    config: &WorkerConfig,
) -> Result<WorkerOptions, ServiceError> {
    let slots = |workflows: usize, activities: usize| {
        let fixed = FixedSizeSlotSupplier::new;
        TunerHolder::builder()
            .workflow_task_slot_supplier(fixed(workflows))
            .activity_task_slot_supplier(fixed(activities))
            .local_activity_task_slot_supplier(fixed(1))
            .nexus_task_slot_supplier(fixed(1))
            .build()
    };
    let tuner = match part {
        Part::Main => slots(WORKFLOW_TASKS, SMALL_TASKS),
        Part::Make => slots(1, MAKERS),
        Part::Host => slots(1, config.host_limit + SPARE),
    };
    let build = format!("forkyard-{}", env!("CARGO_PKG_VERSION"));
    let mut options = WorkerOptions::new(queue)
        .deployment_options(WorkerDeploymentOptions::from_build_id(build))
        .client_identity_override(format!("{}@{}", config.owner, config.host))
        .tuner(tuner)
        .activity_task_poller_behavior(PollerBehavior::SimpleMaximum(POLLERS))
        .workflow_task_poller_behavior(PollerBehavior::SimpleMaximum(POLLERS))
        .sticky_queue_schedule_to_start_timeout(STICKY)
        .max_heartbeat_throttle_interval(config.beat)
        .default_heartbeat_throttle_interval(config.beat)
        .graceful_shutdown_period(config.grace)
        .build();
    if let Part::Main = part {
        let twice = |e: temporalio_sdk::WorkflowRegistrationError| ServiceError::Refused(e.to_string());
        options.register_workflow::<RunFlow>().map_err(twice)?;
        options.register_workflow::<ForkFlow>().map_err(twice)?;
        options.register_workflow::<CleanupFlow>().map_err(twice)?;
    }
    options.register_activities(hand.clone());
    Ok(options)
}

/// The SDK's worker is not `Send`: a thread of its own, whose activities run on everybody's runtime.
fn spawn(mut worker: Worker, stop: CancellationToken) -> oneshot::Receiver<Result<(), String>> {
    let (tell, ended) = oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    let shut_down = worker.shutdown_handle();
    runtime.spawn(async move {
        stop.cancelled().await;
        shut_down();
    });
    std::thread::spawn(move || {
        let local = tokio::task::LocalSet::new();
        let result = runtime.block_on(local.run_until(worker.run()));
        let _ = tell.send(result.map_err(|e| crate::wheel::said(&e)));
    });
    ended
}
