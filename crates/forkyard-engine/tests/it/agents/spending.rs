//! Fifty forks spend at once against one budget, in two processes that are killed, with answers that break off: what the server
//! bills never exceeds the budget, and nobody gives up while there is money to use.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forkyard_agent::inference::{
    Anthropic, Block, HttpBackend, Inference, InferenceError, InferenceSettings, Live, Message, Model,
    RetrySettings, SessionSpec, Silent, Timeouts, TurnRequest,
};
use forkyard_core::fork::{Fork, ForkInput, ForkPlan};
use forkyard_core::pricing::PriceBook;
use forkyard_core::run::Run;
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::spec::RunSpec;
use forkyard_core::task::{Base, Wish};
use forkyard_core::{Attempt, ForkNum, HostId, Millis, RunId, SandboxId, SnapshotId, Timestamp, Usd};
use forkyard_engine::log::stored;
use forkyard_engine::ports::{StoreLedger, Tenure};
use forkyard_store::{Append, CreateRun, Lease, Store, StreamId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use test_support::model_server::{Cut, ModelServer, Reply};
use test_support::postgres::Postgres;
use tokio_util::sync::CancellationToken;

use super::{MODEL, Process, billed, is_full_scale, say, sqlite_url, until};

const FORKS: u32 = 50;
const MAX_TOKENS: u32 = 1000;
/// Small, so that there is much to do when little is left.
const LEAST_TOKENS: u32 = 200;

#[derive(Serialize, Deserialize)]
pub struct Plan {
    store: String,
    server: String,
    run: RunId,
    forks: Vec<(ForkNum, Attempt)>,
}

fn layer(url: &str) -> Inference {
    let timeout = Duration::from_secs(60);
    let timeouts = Timeouts { first_byte: timeout, idle: timeout, total: timeout };
    let live = Arc::new(Live::new(url).unwrap());
    let backend = HttpBackend::new(Anthropic::new("k"), live, timeouts);
    let retry = RetrySettings {
        first_delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(5),
        ..RetrySettings::default()
    };
    let settings = InferenceSettings { retry, min_output_tokens: LEAST_TOKENS };
    Inference::new(Arc::new(backend), PriceBook::default(), settings)
}

/// One process: its forks spend until each of them can't any more, and say so.
pub async fn spend(plan: Plan) {
    let store = forkyard_store::open(&plan.store).await.unwrap();
    let inference = layer(&plan.server);
    let tasks: Vec<_> = plan
        .forks
        .iter()
        .map(|(fork, attempt)| {
            let tenure = Tenure {
                store: store.clone(),
                run: plan.run.clone(),
                fork: *fork,
                attempt: *attempt,
                sandbox: SandboxId::new("none").unwrap(),
            };
            let session = inference.session(SessionSpec {
                key: format!("{}/{fork}/a{attempt}", plan.run),
                fork: Some(*fork),
                ledger: Arc::new(StoreLedger::new(tenure, true)),
                cancel: CancellationToken::new(),
            });
            tokio::spawn(spend_all(session, *fork))
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

async fn spend_all(session: impl Model, fork: ForkNum) {
    let start = Message::user(format!("fork {fork} {}", "word ".repeat(fork as usize)));
    let mut request = TurnRequest::new(MODEL, vec![start.clone()], MAX_TOKENS);
    request.system = "You write code.".into();
    let mut turns = 0;
    loop {
        match session.turn(&request, &mut Silent).await {
            Ok(response) => {
                turns += 1;
                let id = response.content.iter().find_map(|b| match b {
                    Block::ToolUse { id, .. } => Some(id.clone()),
                    _ => None,
                });
                request.messages.push(Message::assistant(response.content));
                let result = Block::result(id.unwrap(), format!("{turns} {}", "out ".repeat(turns)), false);
                request.messages.push(Message::results(vec![result]));
                // Long ones cost more for their input than they say anything new.
                if turns % 8 == 0 {
                    request.messages = vec![start.clone()];
                }
            }
            Err(InferenceError::Exhausted { .. }) => {}
            Err(InferenceError::BudgetExceeded { needed, available }) => {
                return say(format!("{fork} {} {}", needed.0, available.0));
            }
            // Taken over: somebody else goes on with it.
            Err(InferenceError::Stale) => return,
            Err(e) => panic!("fork {fork}: {e}"),
        }
    }
}

/// The driver's part, as far as money is concerned: it holds the lease and raises attempts.
struct Yard {
    store: Arc<dyn Store>,
    run: RunId,
    lease: Lease,
    forks: BTreeMap<ForkNum, (Fork, u64)>,
    now: u64,
}

impl Yard {
    async fn new(url: &str, limit: Usd) -> Yard {
        let store = forkyard_store::open(url).await.unwrap();
        let run = RunId::new("run1").unwrap();
        let mut spec = RunSpec::new("/repo", "p", MODEL, FORKS);
        spec.budget.run = Some(limit);
        let (machine, step) = Run::submit(Timestamp(1), run.clone(), spec.clone());
        let events = step.events.iter().map(|e| stored(Timestamp(1), e, None)).collect();
        let create = CreateRun { run: run.clone(), key: None, events, views: machine.views() };
        store.create_run(create).await.unwrap();
        let lease = store.acquire(&run, "test", Duration::from_secs(3600)).await.unwrap().unwrap();
        let mut yard = Yard { store, run: run.clone(), lease, forks: BTreeMap::new(), now: 1 };
        for fork in 0..FORKS {
            let plan = ForkPlan {
                run: run.clone(),
                fork,
                spec: spec.forks[fork as usize].clone(),
                base: Base {
                    commit: "c".into(),
                    branch: "main".into(),
                    snapshot: SnapshotId::new("base").unwrap(),
                    host: HostId::new("host").unwrap(),
                },
                provider: ProviderKind::Local,
                timeout: Millis::minutes(600),
                linger: Millis::ZERO,
                keep: false,
                judges: false,
            };
            let (machine, step) = Fork::start(Timestamp(1), plan, Wish { paused: false, cancelled: false });
            yard.append(fork, machine, 0, step.events).await;
        }
        yard
    }

    async fn append(
        &mut self,
        fork: ForkNum,
        machine: Fork,
        expected: u64,
        events: Vec<forkyard_core::fork::ForkEvent>,
    ) {
        let at = Timestamp(self.now);
        let append = Append {
            stream: StreamId::Fork(self.run.clone(), fork),
            lease: self.lease.token,
            expected,
            events: events.iter().map(|e| stored(at, e, None)).collect(),
            views: machine.views(),
            consume: vec![],
        };
        let seq = self.store.append(append).await.unwrap().seq;
        self.forks.insert(fork, (machine, seq));
    }

    /// What the next process needs to know; each fork under its next attempt.
    async fn take_over(&mut self, forks: &[ForkNum]) -> Vec<(ForkNum, Attempt)> {
        let mut taken = vec![];
        for fork in forks {
            let (mut machine, seq) = self.forks.remove(fork).unwrap();
            self.now += 1;
            let takeover =
                ForkInput::Takeover { wish: None, journal_len: self.now, last_driven: None, let_go: false };
            let step = machine.handle(Timestamp(self.now), takeover);
            taken.push((*fork, machine.attempt()));
            self.append(*fork, machine, seq, step.events).await;
        }
        taken
    }
}

/// What ended forks said: what they needed, and what was there.
type Ends = Arc<Mutex<BTreeMap<ForkNum, (Usd, Usd)>>>;

fn listen(process: &mut Process, ends: &Ends) -> std::thread::JoinHandle<()> {
    let (lines, ends) = (process.lines(), ends.clone());
    std::thread::spawn(move || {
        for line in lines {
            let words: Vec<u64> = line.split(' ').map(|w| w.parse().unwrap()).collect();
            let [fork, needed, available] = words[..] else { panic!("{line:?}") };
            ends.lock().unwrap().insert(fork as ForkNum, (Usd(needed), Usd(available)));
        }
    })
}

async fn budget_holds(url: String) {
    let (kills, limit) = if is_full_scale() { (30, Usd::dollars(80)) } else { (3, Usd::dollars(8)) };
    let server = ModelServer::start().await;
    server.brain(|seen| {
        let n = seen.raw.bytes().map(u32::from).sum::<u32>();
        let call = Reply::tool("Bash", json!({"command": "x".repeat(n as usize % 90)}));
        let call = call.output(u64::from(n % 900 + 50));
        match n % 13 {
            0 => call.cut(Cut::DropAfter(3)),
            1 => call.cut(Cut::EndAfter(0)),
            2 => Reply::error(529, "overloaded_error", "busy"),
            3 => call.stream_error(4, "api_error", "broken"),
            _ => call,
        }
    });
    let mut yard = Yard::new(&url, limit).await;
    let ends = Ends::default();
    let mut rng = fastrand::Rng::with_seed(3);
    let halves = [(0..FORKS / 2).collect::<Vec<_>>(), (FORKS / 2..FORKS).collect()];
    let mut processes: Vec<(Process, std::thread::JoinHandle<()>)> = vec![];
    let start = |forks, run: &RunId| {
        let plan = Plan { store: url.clone(), server: server.url().into(), run: run.clone(), forks };
        let mut process = Process::start("spend", &plan);
        let listener = listen(&mut process, &ends);
        (process, listener)
    };
    for half in &halves {
        let forks = yard.take_over(half).await;
        processes.push(start(forks, &yard.run));
    }
    for kill in 0..kills {
        let before = server.bills().len();
        let wanted = before + rng.usize(20..60);
        until("money is spent", || async {
            let balance = yard.store.balance(&yard.run).await.unwrap();
            assert!(balance.spent + balance.reserved <= limit, "{balance:?}");
            server.bills().len() >= wanted || ends.lock().unwrap().len() == FORKS as usize
        })
        .await;
        assert!(ends.lock().unwrap().len() < FORKS as usize, "all ended before kill {kill}");
        let half = rng.usize(0..2);
        let (mut process, listener) = processes.remove(half);
        process.kill();
        listener.join().unwrap();
        let left: Vec<ForkNum> =
            halves[half].iter().copied().filter(|f| !ends.lock().unwrap().contains_key(f)).collect();
        let forks = yard.take_over(&left).await;
        processes.insert(half, start(forks, &yard.run));
    }
    until("all forks end", || async { ends.lock().unwrap().len() == FORKS as usize }).await;
    for (process, listener) in processes {
        tokio::task::block_in_place(|| listener.join().unwrap());
        drop(process);
    }
    let balance = yard.store.balance(&yard.run).await.unwrap();
    let billed = billed(&server);
    assert_eq!(balance.reserved, Usd::ZERO);
    assert!(billed <= balance.spent && balance.spent <= limit, "{billed} {} {limit}", balance.spent);
    let left = limit.saturating_sub(balance.spent);
    for (fork, (needed, available)) in ends.lock().unwrap().iter() {
        assert!(needed > available, "fork {fork}");
        // What was left then is left now, or less: nothing came back after somebody gave up for want of it.
        assert!(*needed > left, "fork {fork}: {needed} would have fitted into {left}");
    }
    println!(
        "{} requests, {kills} kills: billed {billed}, spent {} of {limit}",
        server.bills().len(),
        balance.spent
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_never_overshoot_and_use_what_there_is_on_sqlite() {
    budget_holds(sqlite_url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_never_overshoot_and_use_what_there_is_on_postgres() {
    let url = tokio::task::spawn_blocking(|| Postgres::shared().database()).await.unwrap();
    budget_holds(url).await;
}
