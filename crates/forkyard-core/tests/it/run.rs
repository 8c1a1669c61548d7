use forkyard_core::Usd;
use forkyard_core::budget::{Balance, BudgetLimits, ForkBalance};
use forkyard_core::fork::ForkResult;
use forkyard_core::run::{Command, RunEvent, RunInput, RunPhase};
use forkyard_core::spec::{MAX_FORKS, RunSpec, UntilVerified};
use forkyard_core::task::*;
use forkyard_core::view::{ForkOutcome, RunOutcome};

use crate::harness::*;

fn spec(n: u32) -> RunSpec {
    let mut s = RunSpec::new("/repo", "p", "script", n);
    s.max_concurrent = 2;
    s
}
fn success(fork: u32) -> ForkResult {
    ForkResult { collected: Some(collected()), ..ForkResult::unstarted(fork, ForkOutcome::Success, None) }
}
fn verified(fork: u32, passed: bool) -> ForkResult {
    ForkResult { verdict: Some(Verdict { passed: Some(passed), ..Default::default() }), ..success(fork) }
}

#[test]
fn more_forks_than_slots_all_get_their_turn() {
    let mut rig = RunRig::new(spec(5));
    rig.answer_all();
    assert_eq!(rig.live(), [0, 1]);
    for n in 0..5 {
        rig.end_fork(n, success(n));
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Success));
    assert_eq!(rig.run.ranking().order.len(), 5);
    assert_eq!(rig.run.ranking().winner, None, "nobody judged");
}

#[test]
fn the_base_sandbox_is_destroyed_as_soon_as_the_base_is_there() {
    let mut rig = RunRig::new(spec(1));
    rig.answer(TaskKind::PrepareBase, Ok(Output::Base(base())));
    assert_eq!(rig.tasks.iter().map(|d| d.task.kind()).collect::<Vec<_>>(), [TaskKind::Destroy]);
    assert_eq!(rig.live(), [0]);
}

#[test]
fn a_base_that_fails_fails_the_run_and_every_fork() {
    let mut rig = RunRig::new(spec(3));
    rig.answer(TaskKind::PrepareBase, bad(ErrorClass::Permanent));
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Failed));
    assert!(rig.run.results().all(|r| r.outcome == ForkOutcome::Failed && r.error.is_some()));
}

#[test]
fn a_base_is_tried_three_times() {
    let mut rig = RunRig::new(spec(1));
    for left in [true, true, false] {
        rig.answer(TaskKind::PrepareBase, bad(ErrorClass::Transient));
        assert_eq!(rig.timers.len(), usize::from(left));
        if let Some((timer, at)) = rig.timers.pop() {
            rig.now = at;
            rig.input(RunInput::Timer(timer));
        }
    }
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Failed));
}

#[test]
fn pause_holds_everything_and_resume_goes_on() {
    let mut rig = RunRig::new(spec(3));
    rig.command(Command::Pause);
    rig.answer(TaskKind::PrepareBase, Ok(Output::Base(base())));
    rig.answer_all();
    assert!(rig.live().is_empty());
    rig.command(Command::Resume);
    assert_eq!(rig.live(), [0, 1]);
    rig.command(Command::Pause);
    assert!(rig.forks.iter().all(|f| f.1 == Wish { paused: true, cancelled: false }));
    rig.end_fork(0, success(0));
    assert_eq!(rig.live(), [1], "no new fork while paused");
    rig.command(Command::Resume);
    assert_eq!(rig.live(), [1, 2]);
}

#[test]
fn cancel_reaches_live_waiting_and_preparing() {
    let mut rig = RunRig::new(spec(4));
    rig.command(Command::Cancel);
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Cancelled));

    let mut rig = RunRig::new(spec(4));
    rig.answer_all();
    rig.command(Command::Cancel);
    assert!(rig.forks.iter().all(|f| f.1.cancelled));
    assert_eq!(rig.run.results().count(), 2, "those that waited are written off at once");
    rig.end_fork(0, ForkResult::unstarted(0, ForkOutcome::Cancelled, None));
    rig.end_fork(1, ForkResult::unstarted(1, ForkOutcome::Cancelled, None));
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Cancelled));
}

#[test]
fn a_cancelled_paused_run_ends_too() {
    let mut rig = RunRig::new(spec(4));
    rig.answer_all();
    rig.command(Command::Pause);
    rig.command(Command::Cancel);
    for n in [0, 1] {
        rig.end_fork(n, ForkResult::unstarted(n, ForkOutcome::Cancelled, None));
    }
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Cancelled));
}

#[test]
fn one_fork_can_be_cancelled_live_or_waiting() {
    let mut rig = RunRig::new(spec(4));
    rig.answer_all();
    rig.command(Command::CancelFork { fork: 1 });
    rig.command(Command::CancelFork { fork: 3 });
    assert_eq!(rig.forks.iter().find(|f| f.0 == 1).unwrap().1, Wish { paused: false, cancelled: true });
    assert_eq!(rig.run.results().map(|r| r.fork).collect::<Vec<_>>(), [3]);
    rig.command(Command::CancelFork { fork: 9 });
    rig.command(Command::CancelFork { fork: 3 });
    assert_eq!(rig.refusals().len(), 2);
}

#[test]
fn forks_are_added_to_a_live_run_only_and_within_bounds() {
    let mut rig = RunRig::new(spec(1));
    rig.answer_all();
    let more = vec![spec(1).forks[0].clone(); 2];
    rig.command(Command::AddForks { forks: more.clone() });
    assert_eq!(rig.live(), [0, 1]);
    rig.command(Command::AddForks { forks: vec![more[0].clone(); MAX_FORKS as usize] });
    rig.command(Command::AddForks { forks: vec![] });
    assert_eq!(rig.refusals().len(), 2);
    for n in 0..3 {
        rig.end_fork(n, success(n));
    }
    rig.answer_all();
    assert!(rig.run.is_ended());
    rig.command(Command::AddForks { forks: more });
    assert_eq!(rig.refusals().len(), 3);
}

#[test]
fn more_forks_are_spawned_until_enough_are_verified() {
    let mut s = spec(1);
    s.verify = Some("true".into());
    s.until_verified = Some(UntilVerified { verified: 2, max_forks: 5 });
    let mut rig = RunRig::new(s);
    rig.answer_all();
    assert_eq!(rig.live(), [0, 1], "two are wanted, so two start");
    rig.end_fork(0, verified(0, false));
    assert_eq!(rig.live(), [1, 2]);
    rig.end_fork(1, verified(1, true));
    rig.end_fork(2, verified(2, true));
    rig.answer_all();
    assert_eq!(rig.run.phase(), RunPhase::Ended);
    assert_eq!(rig.run.fork_count(), 3);
    assert_eq!(rig.run.ranking().winner, Some(1));
    assert_eq!(rig.run.ranking().base_passes, Some(false));
}

#[test]
fn spawning_stops_at_its_bound() {
    let mut s = spec(2);
    s.verify = Some("true".into());
    s.until_verified = Some(UntilVerified { verified: 1, max_forks: 4 });
    let mut rig = RunRig::new(s);
    rig.answer_all();
    while let Some(n) = rig.live().first().copied() {
        rig.end_fork(n, verified(n, false));
    }
    rig.answer_all();
    assert_eq!((rig.run.fork_count(), rig.run.outcome()), (4, Some(RunOutcome::Failed)));
}

#[test]
fn with_verify_only_verified_forks_make_a_success() {
    let mut s = spec(1);
    s.verify = Some("true".into());
    let mut rig = RunRig::new(s);
    rig.answer_all();
    rig.end_fork(0, verified(0, false));
    rig.answer_all();
    assert_eq!(rig.run.outcome(), Some(RunOutcome::Failed));
}

#[test]
fn a_new_driver_starts_again_what_was_lost_and_tells_the_forks() {
    let mut rig = RunRig::new(spec(2));
    let first = rig.tasks.remove(0);
    rig.input(RunInput::Takeover { commands: vec![] });
    assert_eq!(rig.tasks[0].task, first.task, "the same base sandbox: creating is idempotent");
    let log = rig.log.len();
    rig.input(RunInput::Outcome { serial: first.serial, result: good(&first.task) });
    assert_eq!(rig.log.len(), log, "an outcome of the old driver is stale");
    rig.answer_all();
    rig.forks.clear();
    rig.input(RunInput::Takeover { commands: vec![] });
    assert_eq!(rig.forks.len(), 2);
}

#[test]
fn a_detached_run_is_marked_until_somebody_comes_back() {
    let mut rig = RunRig::new(spec(1));
    rig.command(Command::Detach);
    assert!(rig.run.is_detached() && rig.run.view().detached);
    rig.command(Command::Resume);
    assert!(!rig.run.is_detached());
    rig.command(Command::Detach);
    rig.command(Command::Cancel);
    assert!(!rig.run.is_detached(), "a cancel has to be driven");
}

#[test]
fn views_carry_what_readers_need() {
    let mut s = spec(3);
    s.budget.run = Some(Usd::dollars(2));
    let mut rig = RunRig::new(s);
    rig.answer_all();
    rig.end_fork(0, success(0));
    let v = rig.run.view();
    assert_eq!(v.limits.run, Some(Usd::dollars(2)));
    assert_eq!((v.progress.total_forks, v.progress.completed, v.progress.in_progress), (3, 1, 2));
}

#[test]
fn a_limit_is_warned_of_once_whoever_drives() {
    let mut s = spec(2);
    s.budget = BudgetLimits { run: Some(Usd(100)), fork: Some(Usd(60)) };
    let mut rig = RunRig::new(s);
    rig.answer_all();
    let spent = |run: u64, of: &[(u32, u64)]| Balance {
        limits: BudgetLimits { run: Some(Usd(100)), fork: Some(Usd(60)) },
        spent: Usd(run),
        forks: of.iter().map(|(n, s)| (*n, ForkBalance { spent: Usd(*s), reserved: Usd::ZERO })).collect(),
        ..Balance::default()
    };
    let warnings = |rig: &RunRig| {
        let of =
            |e: &RunEvent| if let RunEvent::BudgetWarning(n) = e { Some((n.fork, n.spent.0)) } else { None };
        rig.log.iter().filter_map(|(_, e)| of(e)).collect::<Vec<_>>()
    };
    rig.input(RunInput::Spent(spent(79, &[(0, 40), (1, 39)])));
    assert_eq!(warnings(&rig), []);
    rig.input(RunInput::Spent(spent(88, &[(0, 49), (1, 39)])));
    assert_eq!(warnings(&rig), [(None, 88), (Some(0), 49)]);
    assert!(rig.run.minds_spending(), "the other fork's limit");
    // A new driver knows what was said.
    rig.input(RunInput::Takeover { commands: vec![] });
    rig.input(RunInput::Spent(spent(99, &[(0, 50), (1, 49)])));
    assert_eq!(warnings(&rig)[2..], [(Some(1), 49)]);
    assert!(!rig.run.minds_spending());
}
