//! Runs that Temporal does not take: they are refused before they are stored, or fail, and keep nothing from others.

use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{EngineKind, RunOutcome, RunStatus};
use forkyard_engine::{Engine, EngineError};
use test_support::engines::{Rig, Trial, until};

use super::conformance::rig;

/// Larger than a payload may be.
fn too_large() -> RunSpec {
    let mut spec = RunSpec::new("/repo", format!("turns=1 {}", "x".repeat(250 << 10)), "m", 10);
    spec.engine = EngineKind::Temporal;
    spec
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_too_large_is_not_stored() {
    let Some(rig) = rig().await else { return };
    let id = RunId::new("large").unwrap();
    let refused = rig.engine().submit(id.clone(), too_large(), None).await.unwrap_err();
    assert!(matches!(&refused, EngineError::Refused(why) if why.contains("1984 KB")), "{refused}");
    assert!(rig.store().run(&id).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_the_service_refuses_fails_and_holds_up_nobody() {
    let Some(rig) = rig().await else { return };
    let _worker = rig.worker();
    let older = Trial::start(&rig, "older", RunSpec::new("/repo", "turns=10000 pace=50", "m", 1)).await;
    until("it is at work", || async { rig.store().journal_len(&older.id, 0).await.unwrap_or(0) > 2 }).await;
    // As one that was stored by something else: what is stored here is carried to Temporal by the worker alone.
    let desk = rig.plan.desk(rig.store());
    let large = desk.submit(RunId::new("large").unwrap(), too_large(), None).await.unwrap();
    desk.command(&older.id, Command::Pause, None).await.unwrap();
    until("the older one hears", || async { older.view().await.paused }).await;
    let view = || async { rig.store().run(&large).await.unwrap().unwrap() };
    until("the refused one ends", || async { view().await.status == RunStatus::Ended }).await;
    let view = view().await;
    assert_eq!(view.outcome, Some(RunOutcome::Failed));
    assert!(view.error.as_ref().is_some_and(|e| e.contains("Temporal refused to start it")), "{view:?}");
    desk.command(&older.id, Command::Cancel, None).await.unwrap();
    assert_eq!(older.ended().await.outcome, Some(RunOutcome::Cancelled));
    older.clean().await;
}
