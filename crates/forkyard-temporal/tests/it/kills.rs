//! Workers killed at odd moments, a service that is killed and started again with its database: every run ends as if nothing had
//! happened, and every history replays.

use std::time::Duration;

use forkyard_core::spec::RunSpec;
use forkyard_core::view::RunOutcome;
use forkyard_core::{Millis, Usd};
use forkyard_store::EventQuery;
use forkyard_temporal::Service;
use forkyard_temporal::cleanup::{CleanupFlow, cleanup_workflow_id};
use forkyard_temporal::run::RunFlow;
use forkyard_temporal::wire::{LOGIC, Said};
use temporalio_client::{WorkflowExecutionInfo, WorkflowHandle};
use test_support::engines::{Rig, Trial, Worker, until};
use test_support::sim::files::{COST, WORST};

use super::conformance::{OnTemporal, rig};
use super::replay::{histories, replay};

struct Scale {
    kills: usize,
    restarts: usize,
    runs: u32,
    forks: u32,
    turns: usize,
    pace: u64,
}

fn scale() -> Scale {
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full");
    if full {
        Scale { kills: 50, restarts: 5, runs: 6, forks: 6, turns: 120, pace: 250 }
    } else {
        Scale { kills: 5, restarts: 1, runs: 2, forks: 3, turns: 50, pace: 200 }
    }
}

async fn start(rig: &OnTemporal, scale: &Scale) -> Vec<Trial> {
    let mut runs = vec![];
    for i in 0..scale.runs {
        let prompt = format!("turns={} pace={}", scale.turns, scale.pace);
        let mut spec = RunSpec::new("/repo", prompt, "m", scale.forks);
        spec.max_concurrent = 2;
        spec.verify = Some("true".into());
        spec.budget.run = Some(Usd(1_000_000));
        runs.push(Trial::start(rig, &format!("run{i}"), spec).await);
    }
    runs
}

/// The same as of a run that nobody disturbed, and nothing twice.
async fn check(rig: &OnTemporal, runs: &[Trial], scale: &Scale) {
    let calls: String = (0..scale.turns).map(|t| format!("call-{t} ")).collect();
    for run in runs {
        let view = run.ended().await;
        assert_eq!(view.outcome, Some(RunOutcome::Success), "{:?}", view.error);
        let best_first: Vec<u32> = (0..scale.forks).rev().collect();
        assert_eq!((view.ranking, view.winner), (best_first, Some(scale.forks - 1)));
        for fork in 0..scale.forks {
            assert_eq!(run.result(fork), calls, "{}/{fork}: each command once, in order", run.id);
        }
        let balance = rig.store().balance(&run.id).await.unwrap();
        // Each turn once; and of each attempt that was lost, one request that nobody heard the end of.
        let least = u64::from(scale.forks) * scale.turns as u64 * COST.0;
        let mut lost = 0;
        for fork in 0..scale.forks {
            let attempts = rig.store().attempt(&run.id, fork).await.unwrap().unwrap();
            lost += u64::from(attempts.0) - 1;
        }
        let most = least + lost * WORST.0;
        assert!((least..=most).contains(&balance.spent.0), "{lost} lost, {least} to {most}: {balance:?}");
        run.clean().await;
        for (name, history) in histories(&rig.plan.connect().await, &run.id, scale.forks).await {
            replay(history).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

async fn position(rig: &OnTemporal, runs: &[Trial]) -> u64 {
    let mut sum = 0;
    for run in runs {
        sum += rig.store().last_position(&run.id).await.unwrap_or(0);
    }
    sum
}

async fn live(runs: &[Trial]) -> usize {
    let mut live = 0;
    for run in runs {
        live += usize::from(run.view().await.outcome.is_none());
    }
    live
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_workers_change_nothing() {
    let Some(rig) = rig().await else { return };
    let scale = scale();
    let mut workers: Vec<Worker> = (0..2).map(|_| rig.worker()).collect();
    let runs = start(&rig, &scale).await;
    for kill in 0..scale.kills {
        let before = position(&rig, &runs).await;
        until("work goes on", || async { position(&rig, &runs).await > before + 3 }).await;
        // Odd moments, the same in every run of the test.
        let odd = (kill as u64 * 7919 + 331) % 800;
        tokio::time::sleep(Duration::from_millis(100 + odd)).await;
        assert!(live(&runs).await > 0, "all runs had ended before kill {kill}: they are too short");
        let victim = odd as usize % workers.len();
        workers[victim].kill();
        workers[victim] = rig.worker();
    }
    check(&rig, &runs, &scale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_is_killed_and_started_again_is_survived() {
    let Some(rig) = rig().await else { return };
    let scale = scale();
    let _worker = rig.worker();
    let runs = start(&rig, &scale).await;
    for _ in 0..scale.restarts {
        let before = position(&rig, &runs).await;
        until("work goes on", || async { position(&rig, &runs).await > before + 20 }).await;
        assert!(live(&runs).await > 0);
        tokio::task::block_in_place(|| rig.server.restart());
    }
    check(&rig, &runs, &scale).await;
}

/// Written anew only when a release changes what workflows do: `cargo nextest run --run-ignored only write_fixtures`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes fixtures"]
async fn write_fixtures() {
    use forkyard_core::run::Command;
    let Some(rig) = rig().await else { return };
    let mut worker = rig.worker();
    let spec = |prompt: &str, forks: u32| {
        let mut spec = RunSpec::new("/repo", prompt, "m", forks);
        spec.verify = Some("true".into());
        spec
    };
    let plain = Trial::start(&rig, "plain", spec("turns=3 pace=20", 2)).await;
    plain.ended().await;
    let engine = rig.engine();
    let stirred = Trial::start(&rig, "stirred", spec("turns=20 pace=100 fails=check_budget:1", 2)).await;
    until("it is at work", || async { rig.store().journal_len(&stirred.id, 0).await.unwrap_or(0) > 2 }).await;
    engine.command(&stirred.id, Command::Pause, None).await.unwrap();
    until("it is paused", || async { stirred.view().await.paused }).await;
    engine.command(&stirred.id, Command::Resume, None).await.unwrap();
    worker.kill();
    let _next = rig.worker();
    stirred.ended().await;
    let cancelled = Trial::start(&rig, "cancelled", spec("turns=1000 pace=100", 2)).await;
    until("it is at work", || async { rig.store().journal_len(&cancelled.id, 0).await.unwrap_or(0) > 2 })
        .await;
    engine.command(&cancelled.id, Command::Cancel, None).await.unwrap();
    cancelled.ended().await;
    let service = rig.plan.connect().await;
    let talked = talk(&rig, &service).await;
    service.start_cleanup(Millis::secs(1), Millis::minutes(60)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(service.tell_cleanup_to_stop().await.unwrap());
    service.cleanup_result().await.unwrap();
    let folder = super::replay::fixtures(LOGIC);
    assert!(!folder.exists(), "{} is there: what was released is never changed", folder.display());
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, json: &[u8]| std::fs::write(folder.join(format!("{name}.json")), json).unwrap();
    for run in [&plain, &stirred, &cancelled, &talked] {
        for (name, json) in histories(&service, &run.id, 2).await {
            write(&name, &json);
        }
    }
    let id = cleanup_workflow_id(service.task_queue());
    let info = WorkflowExecutionInfo::builder().namespace("default").workflow_id(id).build();
    let cleanup: WorkflowHandle<_, CleanupFlow> = WorkflowHandle::new(service.client().clone(), info);
    write("cleanup", &cleanup.fetch_history(Default::default()).to_json().await.unwrap());
}

/// A run of which everything is wanted that can be: its agent lingers, is talked to, let go of and brought back, gets company,
/// and passes a mark of its budget.
async fn talk(rig: &OnTemporal, service: &Service) -> Trial {
    use forkyard_core::run::Command;
    let turns = 40;
    let mut spec = RunSpec::new("/repo", format!("turns={turns} pace=25"), "m", 1);
    spec.budget.run = Some(Usd(turns * COST.0 * 100 / 81));
    spec.linger = Millis::minutes(10);
    let mut company = spec.forks[0].clone();
    company.prompt = "turns=1 pace=25".into();
    let run = Trial::start(rig, "talked", spec).await;
    let (store, engine) = (rig.store(), rig.engine());
    let lingers = || async { store.fork(&run.id, 0).await.unwrap().is_some_and(|f| f.phase == "lingering") };
    let noticed = || async {
        let kinds = vec!["fork.message_noticed".to_string()];
        let query = EventQuery { kinds, ..EventQuery::default() };
        !store.read_run(&run.id, &query).await.unwrap().is_empty()
    };
    until("it lingers", lingers).await;
    let handle = service.run_handle(&run.id);
    let said = Said { fork: 0, content: "one more thing".into() };
    handle.signal(RunFlow::message, said, Default::default()).await.unwrap();
    until("it hears", noticed).await;
    until("it lingers again", lingers).await;
    handle.signal(RunFlow::pause, (), Default::default()).await.unwrap();
    until("it is paused", || async { run.view().await.paused }).await;
    handle.signal(RunFlow::resume, (), Default::default()).await.unwrap();
    until("it goes on", || async { !run.view().await.paused }).await;
    engine.command(&run.id, Command::Detach, None).await.unwrap();
    until("it is let go of", || async { run.view().await.detached }).await;
    engine.command(&run.id, Command::Resume, None).await.unwrap();
    until("it is taken over", || async {
        store.fork(&run.id, 0).await.unwrap().is_some_and(|f| f.attempt.0 > 2 && f.phase == "lingering")
    })
    .await;
    let company = Command::AddForks { forks: vec![company] };
    handle.signal(RunFlow::command, company, Default::default()).await.unwrap();
    until("it has company", || async { store.fork(&run.id, 1).await.unwrap().is_some() }).await;
    handle.signal(RunFlow::cancel, (), Default::default()).await.unwrap();
    run.ended().await;
    run
}

/// However many turns an agent takes and however much it says, a fork's history stays small.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forks_history_is_small_whatever_its_turns() {
    const MAX_EVENTS: usize = 120;
    const MAX_BYTES: usize = 100_000;
    let Some(rig) = rig().await else { return };
    let _worker = rig.worker();
    for (name, prompt) in [
        ("short", "turns=1 pace=1".to_string()),
        ("long", "turns=200 pace=1".to_string()),
        ("talkative", format!("turns=1 pace=1 answers={}", 64 << 10)),
    ] {
        let mut spec = RunSpec::new("/repo", prompt, "m", 1);
        spec.verify = Some("true".into());
        let run = Trial::start(&rig, name, spec).await;
        run.ended().await;
        let service = rig.plan.connect().await;
        let fork = service.fork_handle(&run.id, 0).fetch_history(Default::default());
        let own = service.run_handle(&run.id).fetch_history(Default::default());
        for history in [fork, own] {
            let events = history.into_events().await.unwrap();
            let bytes: usize = events.iter().map(|e| serde_json::to_vec(e).unwrap().len()).sum();
            eprintln!("{name}: {} events, {bytes} bytes as JSON", events.len());
            assert!(
                events.len() < MAX_EVENTS && bytes < MAX_BYTES,
                "{name}: {} events, {bytes} bytes",
                events.len()
            );
        }
    }
}
