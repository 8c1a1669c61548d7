//! The simulation in CI's measure; `cargo xtask soak` runs a hundred times as many seeds.

use test_support::sim::{Bug, Report, crash_after, run_seed};

/// Seeds of one test; several tests share the work among the cores.
const SEEDS_PER_TEST: u64 = 2500;

fn hold(from: u64) {
    for seed in from..from + SEEDS_PER_TEST {
        let report = run_seed(seed, None);
        assert!(report.violations.is_empty(), "{:#?}\nagain: {}", report.violations, report.reproduction());
    }
}

#[test]
fn all_invariants_hold_0() {
    hold(0);
}
#[test]
fn all_invariants_hold_1() {
    hold(SEEDS_PER_TEST);
}
#[test]
fn all_invariants_hold_2() {
    hold(2 * SEEDS_PER_TEST);
}
#[test]
fn all_invariants_hold_3() {
    hold(3 * SEEDS_PER_TEST);
}

/// A crash after every single append of a run: each time it ends as if nothing had happened.
#[test]
fn a_crash_after_any_append_changes_nothing() {
    let undisturbed = crash_after(u64::MAX);
    assert!(undisturbed.violations.is_empty() && undisturbed.crashes == 0, "{undisturbed:?}");
    let mut k = 1;
    loop {
        let report = crash_after(k);
        assert!(report.violations.is_empty(), "after append {k}: {:#?}", report.violations);
        assert_eq!(report.outcomes, undisturbed.outcomes, "after append {k}");
        if report.crashes == 0 {
            break;
        }
        k += 1;
    }
    assert!(k > 20, "the run makes more than 20 appends, so {k} crashes are too few");
}

#[test]
fn the_same_seed_does_the_same() {
    for seed in [3, 77, 1234] {
        let (a, b) = (run_seed(seed, None), run_seed(seed, None));
        let figures = |r: &Report| (r.events, r.crashes, r.virtual_ms, r.outcomes.clone());
        assert_eq!(figures(&a), figures(&b));
    }
}

/// What would be the use of a simulation that finds nothing?
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let found = (0..10_000).find(|seed| !run_seed(*seed, Some(bug)).violations.is_empty());
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
