//! Random histories: whatever happens, in whatever order, a fork ends, leaks nothing and replays to the same state.

use forkyard_core::Millis;
use forkyard_core::fork::{ForkEvent, ForkInput, ForkPlan};
use forkyard_core::pending::TaskEvent;
use forkyard_core::task::*;
use forkyard_core::view::{SandboxState, View};
use proptest::prelude::*;

use crate::harness::*;

#[derive(Debug, Clone)]
enum Move {
    Good,
    Bad(ErrorClass),
    Duplicate,
    Fire,
    Pass(u64),
    Pause(bool),
    Cancel,
    Takeover(u64),
    Message,
    Garbage(u64),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let class = prop_oneof![
        Just(ErrorClass::Transient),
        Just(ErrorClass::Permanent),
        Just(ErrorClass::SandboxLost),
        Just(ErrorClass::BudgetExceeded),
        Just(ErrorClass::Cancelled),
    ];
    let one = prop_oneof![
        6 => Just(Move::Good),
        3 => class.prop_map(Move::Bad),
        1 => Just(Move::Duplicate),
        3 => Just(Move::Fire),
        2 => (0u64..50_000).prop_map(Move::Pass),
        1 => any::<bool>().prop_map(Move::Pause),
        1 => Just(Move::Cancel),
        1 => (0u64..5).prop_map(Move::Takeover),
        1 => Just(Move::Message),
        1 => (0u64..40).prop_map(Move::Garbage),
    ];
    prop::collection::vec(one, 0..80)
}

fn ended(rig: &Rig) -> usize {
    let ended = |e: &ForkEvent| {
        matches!(
            e,
            ForkEvent::Task(TaskEvent::Succeeded { .. } | TaskEvent::Failed { .. })
                | ForkEvent::SandboxLost { .. }
        )
    };
    rig.log.iter().filter(|(_, e)| ended(e)).count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_history_ends_without_a_leak(moves in moves(), judges: bool, keep: bool, linger in 0u64..3) {
        let mut rig = Rig::new(ForkPlan { judges, keep, linger: Millis::secs(linger), ..plan() });
        let mut answered: Vec<Dispatch> = vec![];
        for m in moves {
            match m {
                Move::Good if !rig.tasks.is_empty() => { answered.push(rig.tasks[0].clone()); rig.answer_good() }
                Move::Bad(class) if !rig.tasks.is_empty() => { answered.push(rig.tasks[0].clone()); rig.answer(bad(class)) }
                Move::Duplicate => if let Some(d) = answered.last().cloned() {
                    let before = ended(&rig);
                    rig.input(ForkInput::Outcome { serial: d.serial, result: good(&d.task) });
                    prop_assert_eq!(before, ended(&rig), "no outcome is applied twice");
                },
                Move::Fire if !rig.timers.is_empty() => rig.fire(),
                Move::Pass(ms) => rig.pass(ms),
                Move::Pause(p) => rig.wish(p, false),
                Move::Cancel => rig.wish(false, true),
                Move::Takeover(journal_len) => {
                    rig.tasks.clear();
                    rig.timers.clear();
                    let last_driven = Some(rig.now);
                    rig.input(ForkInput::Takeover { wish: None, journal_len, last_driven, let_go: false });
                }
                Move::Message => rig.input(ForkInput::Message),
                Move::Garbage(n) => {
                    rig.input(ForkInput::Outcome { serial: 1000 + n, result: bad(ErrorClass::Permanent) });
                    rig.input(ForkInput::Timer(Timer::Retry(n)));
                }
                Move::Good | Move::Bad(_) | Move::Fire => {}
            }
        }
        rig.wish(false, false);
        let mut steps = 0;
        while !rig.fork.is_ended() {
            steps += 1;
            prop_assert!(steps < 200, "a fork that only gets good answers ends soon");
            if rig.tasks.is_empty() { rig.fire() } else { rig.answer_good() }
        }
        prop_assert!(rig.timers.is_empty());
        for view in rig.fork.views() {
            if let View::Sandbox(s) = view {
                prop_assert!(matches!(s.state, SandboxState::Destroyed | SandboxState::Owed | SandboxState::HandedOver));
            }
        }
    }
}
