//! The agent with real parts: a local sandbox, a model's API over HTTP, the inference layer with a budget.

use std::sync::Arc;

use forkyard_agent::inference::{InferenceError, SessionSpec};
use forkyard_agent::ports::{MemoryBudget, MessageKind, NoSink};
use forkyard_agent::{Agent, AgentConfig, AgentError, AgentEvent, Continuity, Stop, checkpoints};
use forkyard_core::budget::BudgetLimits;
use forkyard_core::policy::PolicyConfig;
use forkyard_core::sandbox::Root;
use forkyard_core::{Attempt, RunId, SandboxId, Usd};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{NetworkMode, Provider, Sandbox, SandboxSpec};
use serde_json::json;
use test_support::model_server::{Cut, Gate, ModelServer, Part, Reply, Split};
use tokio_util::sync::CancellationToken;

use crate::agent_support::{AttemptJournal, Crash, Snapshots, Stored, StoredInbox};
use crate::inference_support::{MODEL, billed, layer};

struct Real {
    provider: LocalProvider,
    id: SandboxId,
    server: Arc<ModelServer>,
    stored: Arc<Stored>,
    budget: MemoryBudget,
    attempt: u32,
    continuity: Continuity,
    _dir: tempfile::TempDir,
}

impl Real {
    async fn new() -> Real {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
        let id = SandboxId::new("agent1").unwrap();
        provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
        Real {
            provider,
            id,
            server: Arc::new(ModelServer::start().await),
            stored: Arc::default(),
            budget: MemoryBudget::new(BudgetLimits {
                run: Some(Usd::dollars(10)),
                ..BudgetLimits::default()
            }),
            attempt: 0,
            continuity: Continuity::Same,
            _dir: dir,
        }
    }

    async fn attach(&self) -> Arc<dyn Sandbox> {
        self.provider.attach(&self.id, Attempt(self.attempt)).await.unwrap()
    }

    async fn run(
        &mut self,
        crash: Option<(usize, Crash)>,
    ) -> Result<forkyard_agent::AgentOutcome, AgentError> {
        self.attempt += 1;
        let sandbox = self.attach().await;
        let mut config = AgentConfig::new(
            RunId::new("run1").unwrap(),
            0,
            Attempt(self.attempt),
            MODEL,
            "Build the thing.",
        );
        config.continuity = std::mem::take(&mut self.continuity);
        config.max_tokens = 4000;
        let model = layer(&self.server).session(SessionSpec {
            key: format!("run1/0/a{}", self.attempt),
            fork: Some(0),
            ledger: Arc::new(self.budget.ledger(0, Attempt(self.attempt))),
            cancel: CancellationToken::new(),
        });
        let agent = Agent {
            model: Arc::new(model),
            journal: Arc::new(AttemptJournal {
                stored: self.stored.clone(),
                crash: std::sync::Mutex::new(crash),
            }),
            inbox: Arc::new(StoredInbox(self.stored.clone())),
            checkpoints: Some(Arc::new(Snapshots { sandbox: sandbox.clone(), removed: Arc::default() })),
            sandbox,
            events: Arc::new(NoSink),
            policy: PolicyConfig::default(),
            interceptors: Vec::new(),
            config,
        };
        agent.run(CancellationToken::new()).await
    }

    async fn file(&self, path: &str) -> String {
        let data = self.attach().await.read_file(path, 0, 1 << 20).await.unwrap();
        String::from_utf8_lossy(&data).into_owned()
    }

    /// Answers by how many answers the conversation has.
    fn script(&self, replies: impl Fn(usize) -> Reply + Send + Sync + 'static) {
        self.server
            .brain(move |seen| replies(seen.messages().iter().filter(|m| m["role"] == "assistant").count()));
    }
}

fn offline(root: Root) -> SandboxSpec {
    let mut spec = SandboxSpec { root, ..SandboxSpec::default() };
    spec.network.mode = NetworkMode::None;
    spec
}

fn bash(command: &str) -> Reply {
    Reply::tool("Bash", json!({ "command": command }))
}

#[tokio::test]
async fn tools_work_in_a_real_sandbox_over_a_real_wire() {
    let mut real = Real::new().await;
    real.script(|n| match n {
        0 => Reply::message(vec![Part::Thinking("Let me see.".into())])
            .and(Part::Tool {
                id: None,
                name: "Write".into(),
                input: json!({ "file_path": "src/a.txt", "content": "häl\u{1F600}o\nworld\n" }).to_string(),
            })
            .split(Split::EveryByte)
            .pings(),
        1 => Reply::tool(
            "Edit",
            json!({ "file_path": "src/a.txt", "old_string": "world", "new_string": "Welt" }),
        ),
        2 => bash("cat src/a.txt; echo oops >&2; exit 4"),
        3 => Reply::tool("Grep", json!({ "pattern": "Wel." }))
            .and(Part::Tool {
                id: None,
                name: "Glob".into(),
                input: json!({ "pattern": "**/*.txt" }).to_string(),
            })
            .and(Part::Tool {
                id: None,
                name: "Read".into(),
                input: json!({ "file_path": "src/a.txt" }).to_string(),
            }),
        4 => bash("ln -s /etc/passwd link; ln -s /etc dir"),
        5 => Reply::tool("Read", json!({ "file_path": "link" })).and(Part::Tool {
            id: None,
            name: "Read".into(),
            input: json!({ "file_path": "dir/passwd" }).to_string(),
        }),
        6 => bash("head -c 3000000 /dev/zero | tr '\\0' x"),
        _ => Reply::text("Done."),
    });
    let outcome = real.run(None).await.unwrap();
    assert_eq!((outcome.stop, outcome.turns, outcome.final_response.as_str()), (Stop::EndTurn, 8, "Done."));
    assert_eq!(real.file("/workspace/src/a.txt").await, "häl\u{1F600}o\nWelt\n");
    let results = real.stored.results();
    assert_eq!(results[2], "häl\u{1F600}o\nWelt\noops\n[exit code 4]");
    assert!(results[3].contains("src/a.txt:2:Welt"), "{}", results[3]);
    assert_eq!(results[4], "src/a.txt");
    assert!(results[5].contains("     2\tWelt"));
    assert!(results[7].contains("blocked_path") && results[8].contains("blocked_path"), "{results:?}");
    assert!(results[9].len() < 32_000 && results[9].contains("bytes left out"));
    assert_eq!(outcome.cost, billed(&real.server), "what the server billed is what the journal says");
    assert!(real.attach().await.calls().await.unwrap().is_empty(), "finished calls are forgotten");
    real.provider.destroy(&real.id).await.unwrap();
}

#[tokio::test]
async fn crashes_and_a_bad_line_leave_every_command_run_once() {
    let mut real = Real::new().await;
    real.script(|n| match n {
        0 => bash("echo one >> log; sleep 0.2; echo slow >> log"),
        1 => Reply::tool("Write", json!({ "file_path": "a", "content": "x = 1\n" })).and(Part::Tool {
            id: None,
            name: "Bash".into(),
            input: json!({ "command": "echo two >> log" }).to_string(),
        }),
        2 => Reply::tool(
            "Edit",
            json!({ "file_path": "a", "old_string": "x = 1", "new_string": "x = 1\nx = 2" }),
        ),
        3 => bash("echo three >> log"),
        _ => Reply::text("Done."),
    });
    let mut attempts = 0;
    loop {
        // Some answers break off, too.
        if attempts % 3 == 1 {
            real.server.push(Reply::text("cut").cut(Cut::DropAfter(2)));
        }
        let how = if attempts % 2 == 0 { Crash::BeforeWrite } else { Crash::AfterWrite };
        match real.run(Some((2, how))).await {
            Ok(outcome) => {
                assert_eq!((outcome.stop, outcome.turns), (Stop::EndTurn, 5));
                break;
            }
            Err(e) => assert!(matches!(e, AgentError::Journal(_)), "{e}"),
        }
        attempts += 1;
        assert!(attempts < 60, "no progress");
    }
    assert!(attempts >= 3, "{attempts}");
    assert_eq!(real.file("log").await, "one\nslow\ntwo\nthree\n");
    assert_eq!(real.file("a").await, "x = 1\nx = 2\n");
    real.provider.destroy(&real.id).await.unwrap();
}

#[tokio::test]
async fn a_destroyed_sandbox_is_replaced_from_its_last_checkpoint() {
    let mut real = Real::new().await;
    real.server.brain(|seen| {
        let told = seen.raw.contains("The sandbox was lost");
        match (seen.messages().iter().filter(|m| m["role"] == "assistant").count(), told) {
            (0, _) => bash("echo one >> log"),
            (1, false) => bash("echo two >> log"),
            (1, true) => bash("echo two again >> log"),
            _ => Reply::text("Done."),
        }
    });
    // Appends: the opening; the first call; its result; the second call (with the first checkpoint). Then the process is gone.
    assert!(real.run(Some((4, Crash::BeforeWrite))).await.is_err());
    assert_eq!(real.file("log").await, "one\ntwo\n");
    real.provider.destroy(&real.id).await.unwrap();
    let entries = real.stored.entries();
    let (position, checkpoint) = *checkpoints(&entries).last().unwrap();
    real.id = SandboxId::new("agent2").unwrap();
    let root = Root::Snapshot(checkpoint.snapshot.clone().unwrap());
    real.provider.create(&real.id, Attempt(1), &offline(root)).await.unwrap();
    real.continuity = Continuity::Replaced { position, reason: "destroyed".to_string() };
    let outcome = real.run(None).await.unwrap();
    assert!(outcome.success);
    assert_eq!(real.file("log").await, "one\ntwo again\n");
    real.provider.destroy(&real.id).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_that_goes_away_is_noticed_by_every_tool() {
    for call in [
        bash("echo x"),
        Reply::tool("Read", json!({ "file_path": "a" })),
        Reply::tool("Write", json!({ "file_path": "a", "content": "x" })),
        Reply::tool("Glob", json!({ "pattern": "*" })),
    ] {
        let mut real = Real::new().await;
        let (provider, id) = (real.provider.clone(), real.id.clone());
        let runtime = tokio::runtime::Handle::current();
        let call = std::sync::Mutex::new(Some(call));
        real.server.brain(move |_| {
            let (provider, id) = (provider.clone(), id.clone());
            runtime.spawn(async move { provider.destroy(&id).await });
            // The answer comes when it is gone.
            std::thread::sleep(std::time::Duration::from_millis(300));
            call.lock().unwrap().take().unwrap_or_else(|| Reply::text("Did not notice."))
        });
        let error = real.run(None).await.unwrap_err();
        assert!(matches!(error, AgentError::SandboxLost(_)), "{error}");
    }
}

#[tokio::test]
async fn errors_of_the_provider_end_the_attempt_and_money_ends_the_agent() {
    let mut real = Real::new().await;
    real.server.brain(|_| Reply::error(400, "invalid_request_error", "no"));
    let error = real.run(None).await.unwrap_err();
    assert!(
        matches!(error, AgentError::Model(InferenceError::Rejected { .. })) && !error.is_retryable(),
        "{error}"
    );
    real.budget = MemoryBudget::new(BudgetLimits { run: Some(Usd::nanos(10)), ..BudgetLimits::default() });
    assert_eq!(real.run(None).await.unwrap().stop, Stop::BudgetExceeded);
    real.provider.destroy(&real.id).await.unwrap();
}

#[tokio::test]
async fn a_misbehaving_model_is_answered_within_the_rules_of_its_api() {
    let mut real = Real::new().await;
    real.script(|n| match n {
        0 => Reply::tools("Bash", &json!({ "command": "echo x >> log" }), 51),
        1 => Reply::tool("Nonsense", json!({ "a": 1 })),
        2 => Reply::message(vec![
            Part::Text("Now a long file.".into()),
            Part::Tool {
                id: None,
                name: "Write".into(),
                input: "{\"file_path\": \"b\", \"content\": \"unfin".into(),
            },
        ])
        .stop("max_tokens"),
        3 => Reply::tool("Write", json!(["not an object"])),
        4 => Reply::text("half of an ans").stop("max_tokens"),
        _ => Reply::refusal(),
    });
    let outcome = real.run(None).await.unwrap();
    // The server holds every request to the API's rules: each of these answers was taken back by it.
    assert_eq!((outcome.stop, outcome.turns, outcome.success), (Stop::Refusal, 6, false));
    assert_eq!((outcome.denied, outcome.tool_calls), (1, 54));
    assert_eq!(real.file("log").await.lines().count(), 50);
    let results = real.stored.results();
    assert!(results[50].contains("calls_per_turn") && results[51].contains("there is no tool"));
    assert!(results[52].contains("not valid JSON") && results[53].contains("not valid JSON"));
    assert_eq!(outcome.cost, billed(&real.server));
    real.provider.destroy(&real.id).await.unwrap();
}

/// Before the first byte the worst case is all that is known; after message_start the input is.
#[tokio::test]
async fn an_interrupt_breaks_off_a_request_and_pays_for_what_it_may_have_cost() {
    let mut known = Vec::new();
    for begun in [false, true] {
        let mut real = Real::new().await;
        let gate = Gate::default();
        let hung = Reply::text("a long answer").output(7);
        real.server.push(if begun { hung.cut(Cut::HangAfter(2)) } else { hung.gate(&gate) });
        real.server.brain(|seen| Reply::text(seen.last_text()));
        let (stored, budget, server) = (real.stored.clone(), real.budget.clone(), real.server.clone());
        let worst = known.first().copied();
        let interrupt = async {
            // With message_start the reservation shrinks.
            let there = || match worst {
                None => !server.seen().is_empty(),
                Some(worst) => !server.seen().is_empty() && budget.balance().reserved < worst,
            };
            while !there() {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            stored.say(MessageKind::Interrupt, "Stop. Do the other thing.");
        };
        let (outcome, ()) = tokio::join!(real.run(None), interrupt);
        let outcome = outcome.unwrap();
        assert!(outcome.final_response.contains("Do the other thing."), "{}", outcome.final_response);
        assert_eq!(outcome.turns, 1, "what was broken off is no turn");
        let lost: Vec<Usd> = real
            .stored
            .events()
            .iter()
            .filter_map(|e| if let AgentEvent::Interrupted { cost, .. } = e { Some(*cost) } else { None })
            .collect();
        assert_eq!(lost.len(), 1);
        // It is closed in the background.
        while real.budget.balance().reserved > Usd::ZERO {
            tokio::task::yield_now().await;
        }
        assert_eq!(outcome.cost, real.budget.balance().spent, "the journal and the ledger agree");
        assert!(billed(&real.server) <= outcome.cost);
        known.push(lost[0]);
        real.provider.destroy(&real.id).await.unwrap();
    }
    assert!(Usd::ZERO < known[1] && known[1] < known[0], "{known:?}");
}
