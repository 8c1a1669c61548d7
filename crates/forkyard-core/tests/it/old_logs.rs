//! Logs as releases wrote them, kept for ever: each replays to the views that were recorded with it.
//!
//! A folder under `tests/fixtures` is one writing of the stored form. It is written once, by
//! `cargo nextest run --workspace --run-ignored only -E 'test(write_the_logs_of_this_version)'`, and never changed. A field that
//! a view got later is not looked at; one that was recorded has to be there and mean the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use forkyard_core::budget::{Balance, BudgetLimits, ForkBalance};
use forkyard_core::fork::{Fork, ForkEvent, ForkInput, ForkPlan};
use forkyard_core::pending::TaskEvent;
use forkyard_core::run::{Command, Run, RunEvent};
use forkyard_core::sandbox::{LimitsOverride, NetworkMode, ProviderKind, Root, Volume};
use forkyard_core::spec::*;
use forkyard_core::task::*;
use forkyard_core::view::{DiffStat, EngineKind, View};
use forkyard_core::{Millis, SandboxId, SnapshotId, Timestamp, Usd, event};
use serde_json::{Map, Value, json};

use crate::harness::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Where this release's logs are: the second writing of version 1, whose events got fields and company since the first.
const WRITING: &str = "v1-2";

/// The names of an enum's cases. A new case does not compile until it has a name here, and then a fixture has to hold it.
macro_rules! names {
    ($name_of:ident, $all:ident: $type:ty { $($case:pat => $name:literal),+ $(,)? }) => {
        const $all: &[&str] = &[$($name),+];
        fn $name_of(value: &$type) -> &'static str {
            match value { $($case => $name),+ }
        }
    };
}

names!(run_kind, RUN_KINDS: RunEvent {
    RunEvent::Submitted { .. } => "run.submitted",
    RunEvent::Task(TaskEvent::Started { .. }) => "run.task_started",
    RunEvent::Task(TaskEvent::Succeeded { .. }) => "run.task_succeeded",
    RunEvent::Task(TaskEvent::Failed { .. }) => "run.task_failed",
    RunEvent::Task(TaskEvent::Stopping { .. }) => "run.task_stopping",
    RunEvent::GaveUp { .. } => "run.gave_up",
    RunEvent::ForkStarted { .. } => "run.fork_started",
    RunEvent::ForkEnded { .. } => "run.fork_ended",
    RunEvent::ForksAdded { .. } => "run.forks_added",
    RunEvent::Paused => "run.paused",
    RunEvent::Resumed => "run.resumed",
    RunEvent::Detached => "run.detached",
    RunEvent::Cancelled => "run.cancelled",
    RunEvent::ForkCancelled { .. } => "run.fork_cancelled",
    RunEvent::Refused { .. } => "run.command_refused",
    RunEvent::BudgetWarning(_) => "run.budget_warning",
    RunEvent::PhaseEntered { .. } => "run.phase_entered",
    RunEvent::TakenOver { .. } => "run.taken_over",
    RunEvent::Ended { .. } => "run.ended",
});

names!(fork_kind, FORK_KINDS: ForkEvent {
    ForkEvent::Started { .. } => "fork.started",
    ForkEvent::Task(TaskEvent::Started { .. }) => "fork.task_started",
    ForkEvent::Task(TaskEvent::Succeeded { .. }) => "fork.task_succeeded",
    ForkEvent::Task(TaskEvent::Failed { .. }) => "fork.task_failed",
    ForkEvent::Task(TaskEvent::Stopping { .. }) => "fork.task_stopping",
    ForkEvent::Wished { .. } => "fork.wished",
    ForkEvent::TimedOut => "fork.timed_out",
    ForkEvent::PhaseEntered { .. } => "fork.phase_entered",
    ForkEvent::Lingering { .. } => "fork.lingering",
    ForkEvent::MessageNoticed => "fork.message_noticed",
    ForkEvent::SandboxLost { .. } => "fork.sandbox_lost",
    ForkEvent::TakenOver { let_go: false, .. } => "fork.taken_over",
    ForkEvent::TakenOver { let_go: true, .. } => "fork.taken_over, let go",
    ForkEvent::GaveUp { .. } => "fork.gave_up",
    ForkEvent::HandedOver { .. } => "fork.sandbox_handed_over",
    ForkEvent::Ended { .. } => "fork.ended",
});

names!(task_name, TASKS: Task {
    Task::PrepareBase { .. } => "prepare_base",
    Task::VerifyBase { .. } => "verify_base",
    Task::CheckBudget => "check_budget",
    Task::CreateSandbox { .. } => "create_sandbox",
    Task::HealthCheck { .. } => "health_check",
    Task::RunAgent { .. } => "run_agent",
    Task::Collect { .. } => "collect",
    Task::Verify { .. } => "verify",
    Task::Publish { .. } => "publish",
    Task::Destroy { .. } => "destroy",
});

names!(output_name, OUTPUTS: Output {
    Output::Base(_) => "base",
    Output::BaseVerified(_) => "base_verified",
    Output::BudgetOk => "budget_ok",
    Output::Created { .. } => "created",
    Output::Healthy => "healthy",
    Output::Agent(AgentReport { stop: AgentStop::Finished, .. }) => "agent, finished",
    Output::Agent(AgentReport { stop: AgentStop::MaxTurns, .. }) => "agent, max_turns",
    Output::Agent(AgentReport { stop: AgentStop::Refused, .. }) => "agent, refused",
    Output::Agent(AgentReport { stop: AgentStop::BudgetExceeded, .. }) => "agent, budget_exceeded",
    Output::Collected(_) => "collected",
    Output::Verified(_) => "verified",
    Output::Published { .. } => "published",
    Output::Destroyed => "destroyed",
});

names!(class_name, CLASSES: ErrorClass {
    ErrorClass::Transient => "transient",
    ErrorClass::Permanent => "permanent",
    ErrorClass::SandboxLost => "sandbox_lost",
    ErrorClass::BudgetExceeded => "budget_exceeded",
    ErrorClass::Cancelled => "cancelled",
});

/// What is inside of what happened to a task.
fn task_names(event: &TaskEvent) -> &'static str {
    match event {
        TaskEvent::Started { task, .. } => task_name(task),
        TaskEvent::Succeeded { output, .. } => output_name(output),
        TaskEvent::Failed { error, .. } => class_name(&error.class),
        TaskEvent::Stopping { .. } => "stopping",
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

struct Line {
    at: Timestamp,
    kind: String,
    version: u16,
    data: Value,
}

impl Line {
    fn read(path: &Path) -> Vec<Line> {
        let read = |mut v: Value| Line {
            at: Timestamp(v["at"].as_u64().unwrap()),
            kind: v["kind"].as_str().unwrap().into(),
            version: u16::try_from(v["version"].as_u64().unwrap()).unwrap(),
            data: v["data"].take(),
        };
        lines(path).into_iter().map(read).collect()
    }
}

/// By what they are of: `run`, `fork`, a sandbox's id.
fn as_json(views: Vec<View>) -> Value {
    let named = views.into_iter().map(|view| match view {
        View::Run(v) => ("run".to_string(), json!(v)),
        View::Fork(v) => ("fork".to_string(), json!(v)),
        View::Sandbox(v) => (v.id.to_string(), json!(v)),
    });
    Value::Object(named.collect::<Map<_, _>>())
}

fn replayed(log: &Path) -> Value {
    let log_lines = Line::read(log);
    if log.file_name().unwrap().to_str().unwrap().starts_with("run") {
        let events: Vec<_> = log_lines
            .into_iter()
            .map(|l| (l.at, event::decode_run(&l.kind, l.version, l.data).unwrap()))
            .collect();
        as_json(Run::replay(events.iter().map(|(at, e)| (*at, e))).unwrap().views())
    } else {
        let events: Vec<_> = log_lines
            .into_iter()
            .map(|l| (l.at, event::decode_fork(&l.kind, l.version, l.data).unwrap()))
            .collect();
        as_json(Fork::replay(events.iter().map(|(at, e)| (*at, e))).unwrap().views())
    }
}

/// Everything that was recorded is there.
fn assert_holds(recorded: &Value, now: &Value, at: &str) {
    match (recorded, now) {
        (Value::Object(recorded), Value::Object(now)) => {
            for (key, value) in recorded {
                assert_holds(value, now.get(key).unwrap_or(&Value::Null), &format!("{at}.{key}"));
            }
        }
        (Value::Array(recorded), Value::Array(now)) if recorded.len() == now.len() => {
            for (i, (recorded, now)) in recorded.iter().zip(now).enumerate() {
                assert_holds(recorded, now, &format!("{at}[{i}]"));
            }
        }
        (recorded, now) => assert_eq!(recorded, now, "{at}"),
    }
}

fn logs(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    found.sort();
    found
}

#[test]
fn old_logs_replay_to_what_they_meant() {
    let mut seen = 0;
    for version in fs::read_dir(fixtures()).unwrap() {
        for log in logs(&version.unwrap().path()) {
            let recorded = lines(&log.with_extension("views.json")).remove(0);
            assert_holds(&recorded, &replayed(&log), &log.display().to_string());
            seen += 1;
        }
    }
    assert!(seen >= 26, "only {seen} logs: where are the others?");
}

/// Whatever this release can write was written once, and is read again by every release after it.
#[test]
fn every_kind_of_event_has_a_fixture() {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for log in logs(&fixtures().join(WRITING)) {
        for line in Line::read(&log) {
            assert_eq!(line.version, event::VERSION, "a new version is a new writing");
            let kind = if line.kind.starts_with("run.") {
                let event = event::decode_run(&line.kind, line.version, line.data).unwrap();
                if let RunEvent::Task(task) = &event {
                    seen.insert(task_names(task));
                }
                run_kind(&event)
            } else {
                let event = event::decode_fork(&line.kind, line.version, line.data).unwrap();
                match &event {
                    ForkEvent::Task(task) => seen.insert(task_names(task)),
                    ForkEvent::SandboxLost { error, .. } => seen.insert(class_name(&error.class)),
                    _ => false,
                };
                fork_kind(&event)
            };
            assert!(kind.starts_with(&line.kind), "{kind} is stored as {}", line.kind);
            seen.insert(kind);
        }
    }
    for name in [RUN_KINDS, FORK_KINDS, TASKS, OUTPUTS, CLASSES].concat() {
        assert!(seen.contains(name), "no fixture has {name}: write the logs of this version");
    }
}

// ---- how they were written

fn write<E: serde::Serialize>(name: &str, log: &[(Timestamp, E)], views: Vec<View>) {
    let folder = fixtures().join(WRITING);
    fs::create_dir_all(&folder).unwrap();
    let text: String = log
        .iter()
        .map(|(at, e)| {
            let (kind, data) = event::encode(e);
            json!({ "at": at.0, "kind": kind, "version": event::VERSION, "data": data }).to_string() + "\n"
        })
        .collect();
    fs::write(folder.join(format!("{name}.jsonl")), text).unwrap();
    fs::write(folder.join(format!("{name}.views.json")), as_json(views).to_string() + "\n").unwrap();
}

#[test]
#[ignore = "writes the fixtures of a new version"]
fn write_the_logs_of_this_version() {
    let folder = fixtures().join(WRITING);
    assert!(!folder.exists(), "{} is there: logs that were released are never changed", folder.display());

    // A fork with every kind of trouble that still ends well.
    let mut rig = Rig::new(ForkPlan { linger: Millis::secs(5), ..plan() });
    rig.answer(bad(ErrorClass::Transient));
    rig.fire();
    rig.until(TaskKind::RunAgent);
    rig.wish(true, false);
    rig.pass(1000);
    rig.wish(false, false);
    rig.tasks.clear();
    let last_driven = Some(rig.now);
    rig.pass(2000);
    rig.input(ForkInput::Takeover { wish: None, journal_len: 3, last_driven, let_go: false });
    rig.until(TaskKind::RunAgent);
    rig.answer(bad(ErrorClass::SandboxLost));
    rig.until(TaskKind::RunAgent);
    rig.answer_good();
    rig.input(ForkInput::Message);
    rig.finish();
    write("fork-troubled", &rig.log, rig.fork.views());

    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    rig.fire();
    rig.finish();
    write("fork-timeout", &rig.log, rig.fork.views());

    let mut rig = Rig::new(plan());
    rig.until(TaskKind::CreateSandbox);
    rig.answer(bad(ErrorClass::Permanent));
    rig.finish();
    write("fork-failed", &rig.log, rig.fork.views());

    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    rig.wish(false, true);
    rig.answer(bad(ErrorClass::Cancelled));
    rig.finish();
    write("fork-cancelled", &rig.log, rig.fork.views());

    let mut rig = Rig::new(plan());
    for _ in 0..MAX_LOSSES {
        rig.tasks.clear();
        let last_driven = Some(rig.now);
        rig.input(ForkInput::Takeover { wish: None, journal_len: 0, last_driven, let_go: false });
    }
    rig.finish();
    write("fork-lost", &rig.log, rig.fork.views());

    let mut rig = Rig::new(ForkPlan { keep: true, ..plan() });
    rig.finish();
    write("fork-kept", &rig.log, rig.fork.views());

    // Everything that can be said of a fork is said of this one. Its user let go of it and came back.
    let mut rig = Rig::new(ForkPlan { spec: full_fork(), ..plan() });
    rig.until(TaskKind::RunAgent);
    rig.tasks.clear();
    let last_driven = Some(rig.now);
    rig.pass(60_000);
    rig.input(ForkInput::Takeover { wish: None, journal_len: 1, last_driven, let_go: true });
    let partial = Some(full_report(AgentStop::Finished));
    rig.answer(Err(TaskError { partial, ..TaskError::new(ErrorClass::Transient, "the model was away") }));
    rig.fire();
    rig.answer(Ok(Output::Agent(full_report(AgentStop::MaxTurns))));
    rig.answer(Ok(Output::Collected(full_collected())));
    rig.answer(Ok(Output::Verified(full_verdict())));
    rig.finish();
    write("fork-full", &rig.log, rig.fork.views());

    for (name, stop) in [("refused", AgentStop::Refused), ("spent", AgentStop::BudgetExceeded)] {
        let mut rig = Rig::new(plan());
        rig.until(TaskKind::RunAgent);
        rig.answer(Ok(Output::Agent(full_report(stop))));
        rig.finish();
        write(&format!("fork-{name}"), &rig.log, rig.fork.views());
    }

    let mut rig = Rig::new(plan());
    rig.answer(bad(ErrorClass::BudgetExceeded));
    rig.finish();
    write("fork-penniless", &rig.log, rig.fork.views());

    // A run of two forks and one that is added; it is paused, left, taken over, and told what it can't do.
    let mut spec = RunSpec::new("/repo", "p", "script", 2);
    spec.verify = Some("true".into());
    spec.budget.run = Some(Usd(5_000_000));
    let added = spec.forks[0].clone();
    let result = |fork| {
        let mut rig = Rig::new(ForkPlan { fork, ..plan() });
        rig.finish();
        rig.fork.result()
    };
    let mut rig = RunRig::new(spec.clone());
    rig.answer(TaskKind::PrepareBase, bad(ErrorClass::Transient));
    let (timer, at) = rig.timers.remove(0);
    rig.now = at;
    rig.input(forkyard_core::run::RunInput::Timer(timer));
    rig.answer_all();
    rig.command(Command::Pause);
    rig.now = rig.now + Millis(500);
    rig.command(Command::Resume);
    rig.command(Command::AddForks { forks: vec![added] });
    rig.command(Command::CancelFork { fork: 9 });
    rig.command(Command::CancelFork { fork: 1 });
    rig.command(Command::Detach);
    rig.command(Command::Resume);
    rig.input(forkyard_core::run::RunInput::Takeover { commands: vec![] });
    for fork in [0, 1, 2] {
        rig.end_fork(fork, result(fork));
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-troubled", &rig.log, rig.run.views());

    let mut rig = RunRig::new(spec.clone());
    rig.answer_all();
    rig.command(Command::Cancel);
    for fork in rig.live() {
        rig.end_fork(fork, result(fork));
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-cancelled", &rig.log, rig.run.views());

    let mut rig = RunRig::new(spec.clone());
    for _ in 0..MAX_LOSSES {
        rig.tasks.clear();
        rig.input(forkyard_core::run::RunInput::Takeover { commands: vec![] });
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-lost", &rig.log, rig.run.views());

    // Everything that can be said of a run; its limits are nearly used up.
    let mut rig = RunRig::new(full_run());
    rig.answer_all();
    let spent = ForkBalance { spent: Usd(900_000), ..ForkBalance::default() };
    rig.input(forkyard_core::run::RunInput::Spent(Balance {
        limits: full_run().budget,
        spent: Usd(4_900_000),
        reserved: Usd(1000),
        forks: BTreeMap::from([(0, spent)]),
    }));
    for fork in rig.live() {
        rig.end_fork(fork, result(fork));
    }
    for fork in rig.live() {
        rig.end_fork(fork, result(fork));
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-full", &rig.log, rig.run.views());

    let mut rig = RunRig::new(spec.clone());
    rig.command(Command::Cancel);
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-stopped", &rig.log, rig.run.views());

    let mut rig = RunRig::new(spec);
    rig.answer(TaskKind::PrepareBase, bad(ErrorClass::Permanent));
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-failed", &rig.log, rig.run.views());
}

// ---- with every field

fn full_report(stop: AgentStop) -> AgentReport {
    AgentReport {
        stop,
        final_response: "done, as far as it goes".into(),
        turns: 7,
        tool_calls: 12,
        errors: 2,
        tokens: Tokens { input: 1000, output: 200, cache_write: 300, cache_read: 4000 },
        cost: Usd(12_345),
    }
}

fn full_collected() -> Collected {
    Collected {
        commit: "0123456789abcdef0123456789abcdef01234567".into(),
        diff: DiffStat { files: 3, added: 20, removed: 4 },
        from_checkpoint: true,
        captured: vec!["report.html".into()],
        edited_tests: vec!["tests/a.rs".into()],
        commits: 2,
        commits_left_out: Some("a commit is not a descendant of the base".into()),
        // Releases before these have written none.
        put_back: vec![],
        done: None,
    }
}

fn full_verdict() -> Verdict {
    Verdict {
        passed: Some(false),
        score: Some(0.5),
        score_error: None,
        exit_code: Some(1),
        output: "1 test failed\n".into(),
    }
}

fn full_limits() -> LimitsOverride {
    LimitsOverride {
        memory_bytes: Some(1 << 30),
        cpus: Some(1.5),
        disk_bytes: Some(2 << 30),
        processes: Some(100),
        network_bytes_per_s: Some(1 << 20),
    }
}

fn full_fork() -> ForkSpec {
    ForkSpec {
        name: Some("careful".into()),
        prompt: "fix the tests".into(),
        model: "script".into(),
        system_prompt: Some("be brief".into()),
        root: Some(Root::Image("debian:12".into())),
        limits: full_limits(),
        capture: vec!["*.html".into()],
        parent: None,
    }
}

fn full_run() -> RunSpec {
    let child = ForkSpec { root: None, parent: Some(SandboxId::new("given").unwrap()), ..full_fork() };
    let frozen = ForkSpec { root: Some(Root::Snapshot(SnapshotId::new("s1").unwrap())), ..full_fork() };
    RunSpec {
        engine: EngineKind::Temporal,
        repo: RepoSpec { source: "/repo".into(), branch: Some("main".into()), dirty: true },
        forks: vec![full_fork(), child, frozen],
        max_concurrent: 3,
        fork_timeout: Millis::minutes(10),
        budget: BudgetLimits { run: Some(Usd(5_000_000)), fork: Some(Usd(1_000_000)) },
        sandbox: SandboxPlan {
            provider: ProviderKind::Docker,
            root: Root::Directory("/srv/root".into()),
            limits: full_limits(),
            network: NetworkPlan {
                mode: NetworkMode::Bridge,
                allow: vec!["example.com:ro".into()],
                no_default_allow: true,
                secrets: vec!["token".into()],
            },
            env: BTreeMap::from([("LANG".into(), "C".into())]),
            volumes: vec![Volume { host_path: "/srv/data".into(), path: "/data".into(), writable: true }],
            strict: true,
            disk_image: false,
        },
        setup: Some("make deps".into()),
        verify: Some("make test".into()),
        score: Some("make score".into()),
        protect: vec!["tests/**".into()],
        linger: Millis::secs(5),
        keep: true,
        until_verified: Some(UntilVerified { verified: 1, max_forks: 5 }),
        max_turns: 50,
        agent: AgentPlan {
            permission_mode: Some("plan".into()),
            allowed_tools: vec!["Bash".into()],
            disallowed_tools: vec!["Write".into()],
            prompt_template: Some("{prompt}".into()),
            max_tool_calls: Some(5),
            effort: Some(Effort::High),
            max_output_tokens: Some(4096),
            in_sandbox: true,
        },
    }
}
