//! Two hosts, each with sandboxes of its own. One is lost in the middle of a run: it is killed, stands still, or is cut off from
//! the network. Its forks go on on the other; when it comes back it can change nothing, pays its debts, and works again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forkyard_core::spec::RunSpec;
use forkyard_core::view::{RunOutcome, SandboxState};
use forkyard_core::{Attempt, HostId, Millis};
use forkyard_store::{SandboxQuery, Store, StreamId};
use temporalio_common::protos::temporal::api::history::v1::history_event::Attributes;
use test_support::engines::{Rig, Trial, Worker, until};
use test_support::net::Net;
use test_support::postgres::Postgres;

use super::child::{ABORTED, Plan};
use super::conformance::{OnTemporal, rig_on};

const FORKS: u32 = 3;
/// Enough to be at it still when the other host has come back.
const TURNS: usize = 200;

struct Hosts {
    rig: OnTemporal,
    plans: [Plan; 2],
    workers: Vec<Worker>,
}

/// On PostgreSQL, which both hosts reach as they reach Temporal.
async fn hosts(net: Option<&Net>) -> Option<Hosts> {
    let at = net.map(Net::address);
    let database =
        move || at.map_or_else(|| Postgres::shared().database(), |a| Postgres::start_at(a).database());
    let url = tokio::task::spawn_blocking(database).await.unwrap();
    let rig = rig_on(Some(url), at).await?;
    let plan = |name: &str, n: u8| Plan {
        host: HostId::new(name).unwrap(),
        folder: rig.plan.folder.join(name),
        // What a cut-off host still does is to be seen to its end.
        grace: Millis::secs(120),
        netns: net.map(|net| net.netns(n)),
        stubborn: true,
        ..rig.plan.clone()
    };
    let plans = [plan("one", 0), plan("two", 1)];
    Some(Hosts { rig, plans, workers: vec![] })
}

impl Hosts {
    fn store(&self) -> Arc<dyn Store> {
        self.rig.store()
    }

    async fn present(&self) -> BTreeSet<HostId> {
        self.store().processes().await.unwrap_or_default().into_iter().map(|p| p.host).collect()
    }

    /// A run whose agents are all at work on the first host, before there is a second; and their attempts there.
    async fn begin(&mut self) -> (Trial, BTreeMap<u32, Attempt>) {
        self.workers.push(Worker(self.plans[0].worker()));
        let mut spec = RunSpec::new("/repo", format!("turns={TURNS} pace=150 loses=9999"), "m", FORKS);
        spec.max_concurrent = FORKS;
        spec.verify = Some("true".into());
        let run = Trial::start(&self.rig, "moved", spec).await;
        let mut attempts = BTreeMap::new();
        for fork in 0..FORKS {
            let at_work = || async { self.store().journal_len(&run.id, fork).await.unwrap_or(0) >= 3 };
            until("all are at work", at_work).await;
            attempts.insert(fork, self.store().attempt(&run.id, fork).await.unwrap().unwrap());
        }
        self.workers.push(Worker(self.plans[1].worker()));
        until("the second host is there", || async { self.present().await.contains(&self.plans[1].host) })
            .await;
        (run, attempts)
    }

    /// Every fork has a newer attempt at work on the second host.
    async fn gone_on(&self, run: &Trial, attempts: &BTreeMap<u32, Attempt>) {
        for (fork, old) in attempts {
            until(&format!("fork {fork} goes on"), || async {
                let entries = self.store().read_journals(&run.id, *fork).await.unwrap_or_default();
                entries.iter().any(|e| attempt(&e.stream) > *old)
            })
            .await;
            let sandbox = self.store().fork(&run.id, *fork).await.unwrap().unwrap().sandbox;
            let all = SandboxQuery { run: Some(run.id.clone()), ..SandboxQuery::default() };
            let all = self.store().sandboxes(&all).await.unwrap();
            let home = all.into_iter().find(|s| Some(&s.id) == sandbox.as_ref()).and_then(|s| s.host);
            assert_eq!(home.as_ref(), Some(&self.plans[1].host), "fork {fork}");
        }
    }

    /// The agents that the first host had come to nothing: they are told that their forks are another's, whatever they try,
    /// unless their own worker broke them off before.
    async fn refused(&self, run: &Trial, attempts: &BTreeMap<u32, Attempt>) {
        for (fork, old) in attempts {
            let word = self.plans[0].word(&run.id, *fork, *old);
            until(&format!("the first host's agent of fork {fork} ends"), || async { word.exists() }).await;
            let said = std::fs::read_to_string(&word).unwrap();
            // By its attempt, or because its money was settled when its fork was taken over.
            let refused = ["stale", "was succeeded by", "is closed already"].iter().any(|w| said.contains(w));
            assert!(refused || said == ABORTED, "fork {fork}: {said}");
        }
    }

    /// It ends as it should, and nothing of it was done by the first host once it had lost it.
    async fn ended(&self, run: &Trial, attempts: &BTreeMap<u32, Attempt>) {
        let view = run.ended().await;
        assert_eq!(view.outcome, Some(RunOutcome::Success), "{:?}", view.error);
        let service = self.rig.plan.connect().await;
        for (fork, old) in attempts {
            let entries = self.store().read_journals(&run.id, *fork).await.unwrap();
            let (before, after): (Vec<_>, Vec<_>) = entries.iter().partition(|e| attempt(&e.stream) <= *old);
            let last = before.iter().map(|e| e.position).max();
            let first = after.iter().map(|e| e.position).min();
            assert!(last < first, "fork {fork}: {last:?} of the first host, {first:?} of the second");
            let turns = entries.iter().filter(|e| e.event.kind == "agent.assistant_message").count();
            assert_eq!(turns, TURNS, "fork {fork}: each turn once");
            // Its new sandbox has what was done there, each command once, in order, to the end.
            let path = self.plans[1].folder.join(format!("results/{}-{fork}", run.id));
            let result = std::fs::read_to_string(path).unwrap();
            let calls: Vec<usize> = result
                .split_whitespace()
                .map(|c| c.strip_prefix("call-").unwrap().parse().unwrap())
                .collect();
            let expected: Vec<usize> = (calls[0]..TURNS).collect();
            assert_eq!(calls, expected, "fork {fork}");
            // Nothing that came too late was begun.
            for late in std::fs::read_dir(self.plans[0].folder.join("words")).into_iter().flatten().flatten()
            {
                let name = late.file_name().into_string().unwrap();
                let Some(n) = name.strip_prefix(&format!("{}-{fork}-", run.id)) else { continue };
                assert!(n.parse::<u32>().unwrap() <= old.0, "{name} was begun");
            }
            // Temporal took no agent's result from it.
            let history = service.fork_handle(&run.id, *fork).fetch_history(Default::default());
            let mut agents = BTreeSet::new();
            for event in history.into_events().await.unwrap() {
                match event.attributes {
                    Some(Attributes::ActivityTaskScheduledEventAttributes(a))
                        if a.activity_type.as_ref().is_some_and(|t| t.name == "run_agent") =>
                    {
                        agents.insert(event.event_id);
                    }
                    Some(Attributes::ActivityTaskCompletedEventAttributes(a)) => {
                        let ours = a.identity.ends_with("@one") && agents.contains(&a.scheduled_event_id);
                        assert!(!ours, "fork {fork}: {a:?}");
                    }
                    _ => {}
                }
            }
            assert!(!agents.is_empty());
        }
        let balance = self.store().balance(&run.id).await.unwrap();
        assert_eq!(balance.reserved, forkyard_core::Usd::ZERO, "a run that has ended holds no money");
    }

    fn left(&self) -> usize {
        let count = |p: &Plan| std::fs::read_dir(p.folder.join("sandboxes")).into_iter().flatten().count();
        self.plans.iter().map(count).sum()
    }

    /// Its own sweep removes what the first host could not be told to remove; then it works as before.
    async fn paid(&mut self, run: &Trial) {
        until("its debts are paid", || async {
            let all = SandboxQuery { run: Some(run.id.clone()), ..SandboxQuery::default() };
            let all = self.store().sandboxes(&all).await.unwrap();
            self.left() == 0 && all.iter().all(|s| s.state == SandboxState::Destroyed)
        })
        .await;
        // There is nobody else now.
        self.workers[1].kill();
        let mut spec = RunSpec::new("/repo", "turns=2 pace=10", "m", 1);
        spec.verify = Some("true".into());
        let next = Trial::start(&self.rig, "next", spec).await;
        let view = next.ended().await;
        assert_eq!(view.outcome, Some(RunOutcome::Success), "{:?}", view.error);
        assert!(self.plans[0].folder.join("results/next-0").exists());
    }
}

fn attempt(stream: &StreamId) -> Attempt {
    match stream {
        StreamId::Journal(_, _, attempt) => *attempt,
        StreamId::Run(_) | StreamId::Fork(..) => panic!("not a journal"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_of_a_killed_host_go_on_elsewhere_and_it_pays_its_debts() {
    let Some(mut hosts) = hosts(None).await else { return };
    let (run, attempts) = hosts.begin().await;
    hosts.workers[0].kill();
    hosts.gone_on(&run, &attempts).await;
    hosts.ended(&run, &attempts).await;
    assert!(hosts.left() > 0, "what the lost host had is still there");
    hosts.workers[0] = Worker(hosts.plans[0].worker());
    hosts.paid(&run).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_stood_still_can_change_nothing() {
    let Some(mut hosts) = hosts(None).await else { return };
    let (run, attempts) = hosts.begin().await;
    signal(&hosts.workers[0], "STOP");
    hosts.gone_on(&run, &attempts).await;
    signal(&hosts.workers[0], "CONT");
    hosts.refused(&run, &attempts).await;
    hosts.ended(&run, &attempts).await;
    hosts.paid(&run).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_was_cut_off_can_change_nothing() {
    let Some(net) = Net::new() else { return };
    let Some(mut hosts) = hosts(Some(&net)).await else { return };
    let (run, attempts) = hosts.begin().await;
    net.pull(0);
    hosts.gone_on(&run, &attempts).await;
    net.plug(0);
    hosts.refused(&run, &attempts).await;
    hosts.ended(&run, &attempts).await;
    hosts.paid(&run).await;
}

fn signal(worker: &Worker, name: &str) {
    let pid = worker.0.id().to_string();
    let status = std::process::Command::new("kill").args(["-s", name, &pid]).status().unwrap();
    assert!(status.success());
}
