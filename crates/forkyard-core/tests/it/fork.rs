use forkyard_core::fork::{ForkInput, ForkPlan, Phase};
use forkyard_core::task::*;
use forkyard_core::view::{ForkOutcome, Lifecycle, SandboxState, View};
use forkyard_core::{Attempt, Millis, Timestamp, Usd};

use crate::harness::*;

fn sandboxes(rig: &Rig) -> Vec<SandboxState> {
    rig.fork
        .views()
        .into_iter()
        .filter_map(|v| match v {
            View::Sandbox(s) => Some(s.state),
            View::Run(_) | View::Fork(_) => None,
        })
        .collect()
}

#[test]
fn a_good_fork_goes_through_every_phase_and_leaves_nothing() {
    let mut rig = Rig::new(plan());
    rig.finish();
    use TaskKind::*;
    assert_eq!(
        rig.kinds,
        [CheckBudget, CreateSandbox, HealthCheck, RunAgent, Collect, Verify, Publish, Destroy, Destroy]
    );
    let r = rig.fork.result();
    assert_eq!(
        (r.outcome, r.verified(), rig.fork.lifecycle()),
        (ForkOutcome::Success, true, Lifecycle::Completed)
    );
    assert_eq!(sandboxes(&rig), [SandboxState::Destroyed, SandboxState::Destroyed]);
    assert!(rig.timers.is_empty());
}

#[test]
fn transient_errors_are_retried_exactly_as_the_table_says() {
    for (kind, tries) in [
        (TaskKind::CreateSandbox, 3),
        (TaskKind::RunAgent, 2),
        (TaskKind::HealthCheck, 1),
        (TaskKind::Collect, 3),
        (TaskKind::Verify, 2),
        (TaskKind::Publish, 3),
    ] {
        let mut rig = Rig::new(plan());
        rig.until(kind);
        let before = rig.kinds.iter().filter(|k| **k == kind).count();
        assert_eq!(before, 1);
        while rig.tasks.first().is_some_and(|d| d.task.kind() == kind) {
            rig.answer(bad(ErrorClass::Transient));
            if rig.tasks.is_empty() && rig.timers.iter().any(|t| matches!(t.0, Timer::Retry(_))) {
                rig.fire();
            }
        }
        assert_eq!(rig.kinds.iter().filter(|k| **k == kind).count(), tries, "{kind:?}");
        rig.finish();
        let verify = kind == TaskKind::Verify;
        let expected = if verify { ForkOutcome::Success } else { ForkOutcome::Failed };
        assert_eq!(rig.fork.result().outcome, expected, "{kind:?}");
    }
}

#[test]
fn permanent_errors_are_never_retried() {
    for kind in [TaskKind::CheckBudget, TaskKind::CreateSandbox, TaskKind::RunAgent, TaskKind::Collect] {
        let mut rig = Rig::new(plan());
        rig.until(kind);
        rig.answer(bad(ErrorClass::Permanent));
        assert_eq!(rig.kinds.iter().filter(|k| **k == kind).count(), 1, "{kind:?}");
        rig.finish();
        assert_eq!(rig.fork.result().outcome, ForkOutcome::Failed);
        assert!(sandboxes(&rig).iter().all(|s| *s == SandboxState::Destroyed));
    }
}

#[test]
fn a_create_that_failed_is_cleaned_up_all_the_same() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::CreateSandbox);
    rig.answer(bad(ErrorClass::Permanent));
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::Destroy);
}

#[test]
fn no_money_ends_a_fork_before_it_has_a_sandbox() {
    let mut rig = Rig::new(plan());
    rig.answer(bad(ErrorClass::BudgetExceeded));
    assert!(rig.fork.is_ended());
    assert_eq!(rig.fork.result().outcome, ForkOutcome::BudgetExceeded);
}

#[test]
fn the_work_of_an_agent_that_ran_out_of_money_or_turns_is_collected() {
    for (stop, outcome) in
        [(AgentStop::BudgetExceeded, ForkOutcome::BudgetExceeded), (AgentStop::MaxTurns, ForkOutcome::Failed)]
    {
        let mut rig = Rig::new(plan());
        rig.until(TaskKind::RunAgent);
        rig.answer(Ok(Output::Agent(report(stop, 9))));
        rig.finish();
        let r = rig.fork.result();
        assert_eq!((r.outcome, r.collected.is_some(), r.verified()), (outcome, true, true));
    }
}

#[test]
fn cancel_in_any_phase_ends_in_cancelled_and_cleans_up() {
    for kind in [
        TaskKind::CheckBudget,
        TaskKind::CreateSandbox,
        TaskKind::HealthCheck,
        TaskKind::RunAgent,
        TaskKind::Collect,
        TaskKind::Verify,
    ] {
        let mut rig = Rig::new(plan());
        rig.until(kind);
        rig.wish(false, true);
        let stopped = rig.cancels.contains(&rig.tasks[0].serial);
        assert_eq!(stopped, kind != TaskKind::Collect, "{kind:?}");
        if stopped {
            rig.answer(bad(ErrorClass::Cancelled));
        }
        rig.finish();
        assert_eq!(rig.fork.result().outcome, ForkOutcome::Cancelled, "{kind:?}");
        assert_eq!(rig.fork.lifecycle(), Lifecycle::Completed);
        assert!(sandboxes(&rig).iter().all(|s| *s == SandboxState::Destroyed), "{kind:?}");
        let ran = rig.kinds.contains(&TaskKind::RunAgent);
        assert_eq!(rig.kinds.contains(&TaskKind::Collect), ran, "work is collected if there may be some");
        assert_eq!(rig.kinds.contains(&TaskKind::Verify), kind == TaskKind::Verify);
    }
}

#[test]
fn cancel_while_waiting_for_a_retry_does_not_wait() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::CreateSandbox);
    rig.answer(bad(ErrorClass::Transient));
    rig.wish(false, true);
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::Destroy);
    assert!(rig.timers.is_empty());
}

#[test]
fn a_cancel_can_not_be_taken_back() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    rig.wish(false, true);
    rig.wish(false, false);
    rig.answer_good();
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Cancelled);
}

#[test]
fn the_timeout_counts_driven_unpaused_time() {
    let mut rig = Rig::new(plan()); // 100 s
    rig.until(TaskKind::RunAgent);
    rig.pass(60_000);
    rig.wish(true, false);
    assert!(rig.timers.is_empty(), "no deadline while paused");
    rig.pass(3_600_000);
    rig.wish(false, false);
    rig.pass(39_000);
    rig.input(ForkInput::Timer(Timer::Deadline));
    assert!(rig.cancels.is_empty(), "an early timer changes nothing");
    rig.fire();
    assert_eq!(rig.cancels, [rig.tasks[0].serial]);
    rig.answer(bad(ErrorClass::Cancelled));
    rig.finish();
    let r = rig.fork.result();
    assert_eq!((r.outcome, r.driven), (ForkOutcome::Timeout, Millis::secs(100)));
    assert!(r.collected.is_some());
}

#[test]
fn time_without_a_driver_does_not_count() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    rig.pass(30_000);
    let last = rig.now;
    rig.pass(1_000_000);
    rig.tasks.clear();
    rig.timers.clear();
    rig.input(ForkInput::Takeover { wish: None, journal_len: 1, last_driven: Some(last), let_go: false });
    rig.finish();
    assert_eq!(rig.fork.result().driven, Millis::secs(30));
}

/// The new driver's clock is hours behind that of the one before.
#[test]
fn nothing_waits_longer_by_a_clock_that_is_behind() {
    let hours = Millis::minutes(300);
    let taken = |rig: &mut Rig| {
        let last_driven = Some(rig.now);
        rig.now = rig.now - hours;
        (rig.tasks, rig.timers) = (vec![], vec![]);
        rig.input(ForkInput::Takeover { wish: None, journal_len: 1, last_driven, let_go: false });
    };
    let due = |rig: &Rig, timer: Timer| {
        let found = rig.timers.iter().find(|t| t.0 == timer).expect("it is set");
        found.1.since(rig.now)
    };
    let noon = Timestamp(1_700_000_000_000);
    let mut rig = Rig::at(noon, plan());
    rig.until(TaskKind::CreateSandbox);
    let serial = rig.tasks[0].serial;
    rig.answer(bad(ErrorClass::Transient));
    taken(&mut rig);
    assert_eq!(due(&rig, Timer::Retry(serial)), Millis::secs(5));
    assert_eq!(due(&rig, Timer::Deadline), plan().timeout);
    rig.fire();
    rig.until(TaskKind::RunAgent);

    let linger = Millis::secs(60);
    let mut rig = Rig::at(noon, ForkPlan { linger, ..plan() });
    rig.until(TaskKind::RunAgent);
    rig.answer_good();
    taken(&mut rig);
    assert_eq!(due(&rig, Timer::Linger), linger);
    rig.finish();
}

#[test]
fn nothing_new_starts_while_paused() {
    let mut rig = Rig::new(plan());
    rig.wish(true, false);
    rig.answer_good();
    assert!(rig.tasks.is_empty(), "{:?}", rig.tasks);
    rig.wish(false, false);
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::CreateSandbox);
    rig.wish(true, false);
    rig.answer(bad(ErrorClass::Transient));
    rig.fire();
    assert!(rig.tasks.is_empty(), "a retry waits too");
    rig.wish(false, false);
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::CreateSandbox);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Success);
}

#[test]
fn a_paused_fork_can_be_cancelled() {
    let mut rig = Rig::new(plan());
    rig.wish(true, false);
    rig.answer_good();
    rig.wish(true, true);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Cancelled);
}

#[test]
fn a_takeover_is_a_new_attempt_and_the_old_outcome_is_ignored() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    let old = rig.tasks.remove(0);
    rig.input(ForkInput::Takeover { wish: None, journal_len: 4, last_driven: None, let_go: false });
    let new = rig.tasks[0].clone();
    assert_eq!(old.task, new.task, "the same sandbox is re-attached");
    assert_eq!((old.attempt, new.attempt), (Attempt(1), Attempt(2)));
    let log = rig.log.len();
    rig.input(ForkInput::Outcome { serial: old.serial, result: good(&old.task) });
    assert_eq!(rig.log.len(), log);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Success);
}

#[test]
fn losses_are_uncounted_until_the_fifth_without_progress() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    for i in 1..=4 {
        rig.tasks.clear();
        rig.input(ForkInput::Takeover { wish: None, journal_len: 7, last_driven: None, let_go: false });
        // The first finds new entries in the journal, so it starts the count.
        assert_eq!(rig.tasks.len(), 1, "loss {i}");
    }
    rig.tasks.clear();
    rig.input(ForkInput::Takeover { wish: None, journal_len: 8, last_driven: None, let_go: false });
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::RunAgent, "progress starts the count again");
    for _ in 0..4 {
        rig.tasks.clear();
        rig.input(ForkInput::Takeover { wish: None, journal_len: 8, last_driven: None, let_go: false });
    }
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::Collect);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Failed);
}

#[test]
fn a_lost_sandbox_is_replaced_under_a_new_attempt() {
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    let first = rig.fork.view().sandbox;
    rig.answer(bad(ErrorClass::SandboxLost));
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::CreateSandbox);
    rig.until(TaskKind::RunAgent);
    assert_ne!(rig.fork.view().sandbox, first);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Success);
    assert_eq!(sandboxes(&rig).len(), 3);
    assert!(sandboxes(&rig).iter().all(|s| *s == SandboxState::Destroyed));
}

#[test]
fn sandboxes_that_keep_dying_fail_the_fork_and_what_is_left_is_collected() {
    let mut rig = Rig::new(plan());
    let mut creates = 0;
    while !rig.fork.is_ended() {
        match rig.tasks[0].task.kind() {
            TaskKind::RunAgent => rig.answer(bad(ErrorClass::SandboxLost)),
            kind => {
                creates += usize::from(kind == TaskKind::CreateSandbox);
                rig.answer_good();
            }
        }
    }
    assert_eq!(creates, MAX_LOSSES as usize);
    assert!(rig.kinds.contains(&TaskKind::Collect));
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Failed);
}

#[test]
fn a_destroy_that_never_works_is_owed_to_the_sweep() {
    let mut rig = Rig::new(ForkPlan { judges: false, ..plan() });
    rig.until(TaskKind::Destroy);
    while !rig.fork.is_ended() {
        match rig.tasks.is_empty() {
            true => rig.fire(),
            false => rig.answer(bad(ErrorClass::Transient)),
        }
    }
    assert_eq!(rig.kinds.iter().filter(|k| **k == TaskKind::Destroy).count(), 3);
    assert_eq!(sandboxes(&rig), [SandboxState::Owed]);
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Success);
}

#[test]
fn a_kept_sandbox_is_handed_over() {
    let mut rig = Rig::new(ForkPlan { keep: true, ..plan() });
    rig.finish();
    let mut states = sandboxes(&rig);
    states.sort();
    assert_eq!(states, [SandboxState::HandedOver, SandboxState::Destroyed]);
}

#[test]
fn a_lingering_agent_goes_on_for_a_message_and_ends_without_one() {
    let mut rig = Rig::new(ForkPlan { linger: Millis::secs(10), ..plan() });
    rig.until(TaskKind::RunAgent);
    rig.answer_good();
    assert_eq!(rig.fork.phase(), Phase::Linger);
    rig.pass(5000);
    rig.input(ForkInput::Message);
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::RunAgent);
    assert_eq!(rig.tasks[0].attempt, Attempt(2));
    rig.answer_good();
    assert!(rig.fork.is_lingering());
    rig.fire();
    assert_eq!(rig.tasks[0].task.kind(), TaskKind::Collect);
    rig.finish();
    assert_eq!(rig.fork.result().outcome, ForkOutcome::Success);
}

#[test]
fn an_input_after_the_end_changes_nothing() {
    let mut rig = Rig::new(plan());
    rig.finish();
    let log = rig.log.len();
    rig.wish(true, true);
    rig.input(ForkInput::Takeover { wish: None, journal_len: 0, last_driven: None, let_go: false });
    rig.input(ForkInput::Message);
    rig.input(ForkInput::Timer(Timer::Deadline));
    assert_eq!(rig.log.len(), log);
}

#[test]
fn what_was_spent_is_told_of_an_agent_that_could_not_report() {
    let done = AgentReport { turns: 2, tool_calls: 3, cost: Usd(700), ..Default::default() };
    let answer = || Ok(Output::Collected(Collected { done: Some(done.clone()), ..collected() }));
    // Stopped without a word.
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::RunAgent);
    rig.answer(bad(ErrorClass::Permanent));
    assert_eq!(rig.fork.result().report, None);
    rig.answer(answer());
    rig.finish();
    let r = rig.fork.result();
    assert_eq!((r.outcome, r.report.as_ref()), (ForkOutcome::Failed, Some(&done)));
    assert_eq!(r.collected.unwrap().done, None, "it is told once");
    // Its own word stays where it says more.
    let mut rig = Rig::new(plan());
    rig.until(TaskKind::Collect);
    rig.answer(answer());
    rig.finish();
    let r = rig.fork.result().report.unwrap();
    assert_eq!((r.turns, r.tool_calls, r.cost), (3, 3, Usd(700)));
}
