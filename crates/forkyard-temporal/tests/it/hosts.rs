//! Two hosts, each with sandboxes of its own: one that is lost, and comes back.

use std::sync::Arc;

use forkyard_core::spec::RunSpec;
use forkyard_core::view::{RunOutcome, SandboxState};
use forkyard_core::{HostId, RunId};
use forkyard_store::{SandboxQuery, Store};
use test_support::engines::{Rig, Trial, Worker, until};
use test_support::postgres::Postgres;

use super::child::Plan;
use super::conformance::{OnTemporal, rig_on};

const TURNS: usize = 40;

/// A rig on PostgreSQL, and a worker of each of two hosts.
async fn two_hosts() -> Option<(OnTemporal, [Plan; 2])> {
    let url = tokio::task::spawn_blocking(|| Postgres::shared().database()).await.unwrap();
    let rig = rig_on(Some(url)).await?;
    let host = |name: &str| Plan {
        host: HostId::new(name).unwrap(),
        folder: rig.plan.folder.join(name),
        ..rig.plan.clone()
    };
    let hosts = [host("one"), host("two")];
    Some((rig, hosts))
}

fn spec() -> RunSpec {
    let mut spec = RunSpec::new("/repo", format!("turns={TURNS} pace=150 loses=9999"), "m", 4);
    spec.max_concurrent = 4;
    spec.verify = Some("true".into());
    spec
}

async fn host_of(store: &Arc<dyn Store>, run: &RunId, fork: u32) -> Option<HostId> {
    let sandbox = store.fork(run, fork).await.unwrap()?.sandbox?;
    let query = SandboxQuery { run: Some(run.clone()), ..SandboxQuery::default() };
    store.sandboxes(&query).await.unwrap().into_iter().find(|s| s.id == sandbox)?.host
}

/// Forks whose sandboxes are on this host by now.
async fn on(store: &Arc<dyn Store>, run: &RunId, host: &HostId) -> Vec<u32> {
    let mut forks = vec![];
    for fork in 0..4 {
        if host_of(store, run, fork).await.as_ref() == Some(host) {
            forks.push(fork);
        }
    }
    forks
}

/// Until every agent is at work, some of them on each host.
async fn spread(rig: &OnTemporal, run: &Trial, hosts: &[Plan; 2]) {
    until("all are at work", || async {
        let mut least = u64::MAX;
        for fork in 0..4 {
            least = least.min(rig.store().journal_len(&run.id, fork).await.unwrap_or(0));
        }
        least >= 2
    })
    .await;
    for host in hosts {
        assert!(!on(&rig.store(), &run.id, &host.host).await.is_empty(), "none on {}", host.host);
    }
}

fn left(plan: &Plan) -> usize {
    std::fs::read_dir(plan.folder.join("sandboxes")).into_iter().flatten().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_of_a_lost_host_go_on_elsewhere_and_it_pays_its_debts() {
    let Some((rig, hosts)) = two_hosts().await else { return };
    let mut workers = hosts.clone().map(|h| Worker(h.worker()));
    let run = Trial::start(&rig, "lost", spec()).await;
    spread(&rig, &run, &hosts).await;
    let moved = on(&rig.store(), &run.id, &hosts[0].host).await;
    workers[0].kill();
    let view = run.ended().await;
    assert_eq!(view.outcome, Some(RunOutcome::Success), "{:?}", view.error);
    for fork in &moved {
        assert_eq!(host_of(&rig.store(), &run.id, *fork).await.as_ref(), Some(&hosts[1].host), "fork {fork}");
    }
    let owed = || async {
        let query = SandboxQuery { states: vec![SandboxState::Owed], ..SandboxQuery::default() };
        rig.store().sandboxes(&query).await.unwrap().len()
    };
    assert!(owed().await >= moved.len() && left(&hosts[0]) > 0 && left(&hosts[1]) == 0);
    // It comes back, and its own sweep does what it was asked for.
    let _back = Worker(hosts[0].worker());
    until("its debts are paid", || async { owed().await == 0 && left(&hosts[0]) == 0 }).await;
}
