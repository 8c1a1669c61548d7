//! Logs as releases wrote them, kept for ever: each replays to the views that were recorded with it.
//!
//! A folder under `tests/fixtures` is one version of the stored form. It is written once, by
//! `cargo test -p forkyard-core -- --ignored write_the_logs_of_this_version`, and never changed. A field that a view got
//! later is not looked at; one that was recorded has to be there and mean the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use forkyard_core::fork::{Fork, ForkInput, ForkPlan};
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::RunSpec;
use forkyard_core::task::*;
use forkyard_core::view::View;
use forkyard_core::{Millis, Timestamp, Usd, event};
use serde_json::{Map, Value, json};

use crate::harness::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Kinds that every fixture of version 1 has between them: no name may be lost.
const KINDS_OF_V1: &[&str] = &[
    "fork.ended",
    "fork.gave_up",
    "fork.lingering",
    "fork.message_noticed",
    "fork.phase_entered",
    "fork.sandbox_handed_over",
    "fork.sandbox_lost",
    "fork.started",
    "fork.taken_over",
    "fork.task_failed",
    "fork.task_started",
    "fork.task_stopping",
    "fork.task_succeeded",
    "fork.timed_out",
    "fork.wished",
    "run.cancelled",
    "run.command_refused",
    "run.detached",
    "run.ended",
    "run.fork_cancelled",
    "run.fork_ended",
    "run.fork_started",
    "run.forks_added",
    "run.gave_up",
    "run.paused",
    "run.phase_entered",
    "run.resumed",
    "run.submitted",
    "run.taken_over",
    "run.task_failed",
    "run.task_started",
    "run.task_succeeded",
];

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
    assert!(seen >= 10, "only {seen} logs: where are the others?");
}

#[test]
fn no_kind_of_event_is_lost() {
    let kinds: BTreeSet<String> = logs(&fixtures().join("v1"))
        .iter()
        .flat_map(|log| Line::read(log).into_iter().map(|l| l.kind))
        .collect();
    assert_eq!(kinds.iter().map(String::as_str).collect::<Vec<_>>(), KINDS_OF_V1);
}

// ---- how they were written

fn write<E: serde::Serialize>(name: &str, log: &[(Timestamp, E)], views: Vec<View>) {
    let folder = fixtures().join(format!("v{}", event::VERSION));
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
    let folder = fixtures().join(format!("v{}", event::VERSION));
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

    let mut rig = RunRig::new(spec);
    rig.answer(TaskKind::PrepareBase, bad(ErrorClass::Permanent));
    rig.answer_all();
    assert!(rig.run.is_ended());
    write("run-failed", &rig.log, rig.run.views());
}
