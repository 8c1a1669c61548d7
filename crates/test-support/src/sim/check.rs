//! The invariants, checked against what is stored and what the world remembers.

use std::collections::{BTreeMap, BTreeSet};

use forkyard_core::fork::{Fork, ForkEvent};
use forkyard_core::pending::TaskEvent;
use forkyard_core::run::{Run, RunEvent};
use forkyard_core::task::{ErrorClass, TaskKind};
use forkyard_core::view::{ForkOutcome, SandboxState};
use forkyard_core::{Attempt, ForkNum, Millis, RunId, Timestamp, Usd, event};
use forkyard_store::*;

use super::activities::TURNS;
use super::scenario::Scenario;
use super::store::Shadow;
use super::world::World;
use crate::memstore::MemStore;

/// Leaks are looked for before the sweep: it would hide them.
pub fn check_leaks(states: &[forkyard_core::view::SandboxView], world: &World) {
    for s in states.iter().filter(|s| s.state == SandboxState::Destroyed) {
        let leaked = world.with(|w| w.sandboxes.get(&s.id).is_some_and(|b| b.alive && !b.zombie));
        if leaked {
            world.violation(format!("sandbox {} counts as destroyed and is alive", s.id));
        }
    }
}

/// The number of events of all runs.
pub async fn check(
    mem: &MemStore,
    world: &World,
    shadow: &Shadow,
    scenario: &Scenario,
    lasted: Millis,
    violations: &mut Vec<String>,
) -> u64 {
    let mut events = 0;
    for (id, spec) in &scenario.runs {
        let log = mem.read_run(id, &EventQuery::default()).await.unwrap_or_default();
        events += log.len() as u64;
        let mut bad = |what: String| violations.push(format!("{id}: {what}"));
        order(&log, &mut bad);
        let Some((run, forks)) = replay(id, &log, &mut bad) else { continue };
        if !run.is_ended() {
            bad(format!("did not end: {:?}", run.view()));
        }
        if mem.run(id).await.ok().flatten() != Some(run.view()) {
            bad("the stored view of the run is not that of its log".into());
        }
        let of_run = SandboxQuery { run: Some(id.clone()), ..Default::default() };
        for s in mem.sandboxes(&of_run).await.unwrap_or_default() {
            // Owed ones are the sweep's, which has been here already.
            if matches!(s.state, SandboxState::Requested | SandboxState::Live) {
                bad(format!("ended, and its sandbox {} counts as {}", s.id, s.state.as_str()));
            }
        }
        for (n, fork) in &forks {
            if mem.fork(id, *n).await.ok().flatten() != Some(fork.view()) {
                bad(format!("the stored view of fork {n} is not that of its log"));
            }
            finished_work(*n, fork, world, &mut bad);
            // Whatever the wall clocks of its drivers said.
            let driven = fork.view().driven;
            if driven > lasted {
                bad(format!("fork {n} was driven for {driven}, and all of it lasted {lasted}"));
            }
        }
        concurrency(&log, spec.max_concurrent as usize, &mut bad);
        retries(&log, &mut bad);
        fencing(&log, &mut bad);
        money(mem, id, spec.budget.run, world, &mut bad).await;
    }
    acknowledged(mem, shadow, scenario, violations).await;
    world.with(|w| violations.append(&mut w.violations));
    let known = mem.sandboxes(&SandboxQuery::default()).await.unwrap_or_default();
    let kept: BTreeSet<_> =
        known.iter().filter(|s| s.state == SandboxState::HandedOver).map(|s| s.id.clone()).collect();
    world.with(|w| {
        for (id, s) in &w.sandboxes {
            if s.alive && !kept.contains(id) {
                violations.push(format!("sandbox {id} is left over"));
            }
            for (call, n) in s.ran.iter().filter(|(_, n)| *n > 1) {
                violations.push(format!("{call} ran {n} times in sandbox {id}"));
            }
        }
    });
    events
}

fn order(log: &[Recorded], bad: &mut impl FnMut(String)) {
    let mut seqs: BTreeMap<&StreamId, u64> = BTreeMap::new();
    for (i, r) in log.iter().enumerate() {
        if r.position != i as u64 + 1 {
            bad(format!("position {} follows {i}", r.position));
        }
        let seq = seqs.entry(&r.stream).or_default();
        *seq += 1;
        if r.seq != *seq {
            bad(format!("{:?} has {} where {seq} is due", r.stream, r.seq));
        }
    }
}

fn run_events(log: &[Recorded]) -> Vec<(Timestamp, RunEvent)> {
    let of_run = log.iter().filter(|r| matches!(r.stream, StreamId::Run(_)));
    of_run
        .filter_map(|r| {
            let e = &r.event;
            Some((e.at, event::decode_run(&e.kind, e.version, e.data.clone()).ok()?))
        })
        .collect()
}

fn fork_events(log: &[Recorded], n: ForkNum) -> Vec<(u64, Timestamp, ForkEvent)> {
    let of_fork = log.iter().filter(|r| matches!(r.stream, StreamId::Fork(_, f) if f == n));
    of_fork
        .filter_map(|r| {
            let e = &r.event;
            Some((r.position, e.at, event::decode_fork(&e.kind, e.version, e.data.clone()).ok()?))
        })
        .collect()
}

fn fork_numbers(log: &[Recorded]) -> BTreeSet<ForkNum> {
    log.iter().filter(|r| matches!(r.stream, StreamId::Fork(..))).filter_map(|r| r.stream.fork()).collect()
}

fn replay(
    id: &RunId,
    log: &[Recorded],
    bad: &mut impl FnMut(String),
) -> Option<(Run, BTreeMap<ForkNum, Fork>)> {
    let events = run_events(log);
    let Some(run) = Run::replay(events.iter().map(|(at, e)| (*at, e))) else {
        bad(format!("{id} has no beginning"));
        return None;
    };
    let mut forks = BTreeMap::new();
    for n in fork_numbers(log) {
        let events = fork_events(log, n);
        match Fork::replay(events.iter().map(|(_, at, e)| (*at, e))) {
            Some(fork) => {
                if !fork.is_ended() && run.is_ended() {
                    bad(format!("fork {n} did not end, but its run did"));
                }
                forks.insert(n, fork);
            }
            None => bad(format!("fork {n} has no beginning")),
        }
    }
    Some((run, forks))
}

/// A fork that succeeded has done all of its commands, each once and in order.
fn finished_work(n: ForkNum, fork: &Fork, world: &World, bad: &mut impl FnMut(String)) {
    if fork.outcome() != Some(ForkOutcome::Success) {
        return;
    }
    let want: Vec<(String, u32)> = (0..TURNS).map(|t| (format!("call{t}"), 1)).collect();
    let sandbox = fork.result().sandbox;
    let done = world
        .with(|w| sandbox.and_then(|id| w.sandboxes.get(&id).map(|s| s.ran.clone())))
        .unwrap_or_default();
    if done != want {
        bad(format!("fork {n} succeeded with {done:?}"));
    }
}

fn concurrency(log: &[Recorded], max: usize, bad: &mut impl FnMut(String)) {
    let mut live = BTreeSet::new();
    for (_, e) in run_events(log) {
        match e {
            RunEvent::ForkStarted { fork } => {
                live.insert(fork);
            }
            RunEvent::ForkEnded { result } => {
                live.remove(&result.fork);
            }
            _ => {}
        }
        if live.len() > max {
            bad(format!("{} forks at once, at most {max} are allowed", live.len()));
            return;
        }
    }
}

/// Permanent errors end their task; transient ones are tried as often as the table says; nothing starts while paused.
fn retries(log: &[Recorded], bad: &mut impl FnMut(String)) {
    for n in fork_numbers(log) {
        let mut errors: BTreeMap<TaskKind, u32> = BTreeMap::new();
        let mut kinds: BTreeMap<u64, TaskKind> = BTreeMap::new();
        let mut over: BTreeSet<TaskKind> = BTreeSet::new();
        let mut paused = false;
        for (_, _, e) in fork_events(log, n) {
            match e {
                ForkEvent::Started { wish, .. } | ForkEvent::Wished { wish } => paused = wish.paused,
                ForkEvent::Task(TaskEvent::Started { serial, task, .. }) => {
                    let kind = task.kind();
                    kinds.insert(serial, kind);
                    if over.contains(&kind) {
                        bad(format!("fork {n}: {kind:?} started after a permanent error"));
                    }
                    let ending = matches!(kind, TaskKind::Collect | TaskKind::Publish | TaskKind::Destroy);
                    if paused && !ending {
                        bad(format!("fork {n}: {kind:?} started while paused"));
                    }
                }
                ForkEvent::Task(TaskEvent::Failed { serial, error, .. }) => {
                    let Some(kind) = kinds.get(&serial).copied() else { continue };
                    // Each sandbox is destroyed by a task of its own.
                    if kind == TaskKind::Destroy {
                        continue;
                    }
                    match error.class {
                        ErrorClass::Permanent => {
                            over.insert(kind);
                        }
                        ErrorClass::Transient => {
                            let n_errors = errors.entry(kind).or_default();
                            *n_errors += 1;
                            if *n_errors > kind.retry().attempts {
                                bad(format!("fork {n}: {kind:?} was tried after its last error"));
                            }
                        }
                        ErrorClass::SandboxLost | ErrorClass::BudgetExceeded | ErrorClass::Cancelled => {}
                    }
                }
                ForkEvent::Task(TaskEvent::Succeeded { serial, .. }) => {
                    if let Some(kind) = kinds.get(&serial) {
                        errors.remove(kind);
                    }
                }
                ForkEvent::SandboxLost { .. } => errors.clear(),
                ForkEvent::Task(TaskEvent::Stopping { .. })
                | ForkEvent::TimedOut
                | ForkEvent::PhaseEntered { .. }
                | ForkEvent::Lingering { .. }
                | ForkEvent::MessageNoticed
                | ForkEvent::TakenOver { .. }
                | ForkEvent::GaveUp { .. }
                | ForkEvent::HandedOver { .. }
                | ForkEvent::Ended { .. } => {}
            }
        }
    }
}

/// No journal entry of an attempt comes after a newer attempt began.
fn fencing(log: &[Recorded], bad: &mut impl FnMut(String)) {
    let mut current: BTreeMap<ForkNum, Attempt> = BTreeMap::new();
    for r in log {
        match &r.stream {
            StreamId::Fork(_, n) => {
                let e = &r.event;
                if let Ok(e) = event::decode_fork(&e.kind, e.version, e.data.clone()) {
                    let attempt = match e {
                        ForkEvent::TakenOver { attempt, .. } => attempt,
                        ForkEvent::Task(TaskEvent::Started { attempt, .. }) => attempt,
                        _ => continue,
                    };
                    let known = current.entry(*n).or_default();
                    *known = (*known).max(attempt);
                }
            }
            StreamId::Journal(_, n, attempt) => {
                if current.get(n).is_some_and(|c| c > attempt) {
                    bad(format!("fork {n}: attempt {attempt} wrote to its journal after a newer one began"));
                }
            }
            StreamId::Run(_) => {}
        }
    }
}

async fn money(mem: &MemStore, id: &RunId, budget: Option<Usd>, world: &World, bad: &mut impl FnMut(String)) {
    let billed = world.with(|w| w.billed.get(id).copied()).unwrap_or_default();
    let Ok(balance) = mem.balance(id).await else { return };
    // Reservations that the last attempts left open are closed by nobody: the run is over. They still count.
    if billed > balance.spent + balance.reserved {
        bad(format!(
            "billed {} but the ledger knows only of {}",
            billed.0,
            (balance.spent + balance.reserved).0
        ));
    }
    if let Some(budget) = budget
        && (balance.spent + balance.reserved > budget || billed > budget)
    {
        bad(format!(
            "the budget of {} is overspent: {} spent, {} billed",
            budget.0, balance.spent.0, billed.0
        ));
    }
}

/// What was acknowledged is there, where it was said to be.
async fn acknowledged(mem: &MemStore, shadow: &Shadow, scenario: &Scenario, violations: &mut Vec<String>) {
    let mut stored: BTreeMap<(StreamId, u64), String> = BTreeMap::new();
    for (id, _) in &scenario.runs {
        for r in mem.read_run(id, &EventQuery::default()).await.unwrap_or_default() {
            stored.insert((r.stream.clone(), r.seq), format!("{} {}", r.event.kind, r.event.data));
        }
    }
    let appended = shadow.appended.lock().unwrap_or_else(|e| e.into_inner());
    for (stream, seq, text) in appended.iter() {
        if stored.get(&(stream.clone(), *seq)) != Some(text) {
            violations.push(format!("event {seq} of {stream:?} was acknowledged and is not there"));
            return;
        }
    }
}
