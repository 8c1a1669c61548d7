//! Which result is best, and why.
//!
//! A change ranks above an empty diff; then verified, then the higher score, then an agent that finished, then the smaller
//! diff, then the lower cost, then the lower number. Without verify or score there is an order but no winner.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::fork::ForkResult;
use crate::task::Verdict;
use crate::view::ForkOutcome;
use crate::{ForkNum, Usd};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranking {
    /// Best first.
    pub order: Vec<Ranked>,
    pub winner: Option<ForkNum>,
    /// The base passes verify as it is: passing says little then. None: not asked, or not known.
    pub base_passes: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranked {
    pub fork: ForkNum,
    pub reason: String,
}

struct Key<'a> {
    result: &'a ForkResult,
    changed: bool,
    verified: bool,
    score: Option<f64>,
    finished: bool,
    lines: u64,
    cost: Usd,
}

impl<'a> Key<'a> {
    fn of(result: &'a ForkResult) -> Key<'a> {
        let diff = result.collected.as_ref().map(|c| c.diff).unwrap_or_default();
        Key {
            result,
            changed: !diff.is_empty(),
            verified: result.verified(),
            score: result.verdict.as_ref().and_then(|v| v.score).filter(|s| s.is_finite()),
            finished: result.outcome == ForkOutcome::Success,
            lines: diff.lines(),
            cost: result.report.as_ref().map_or(Usd::ZERO, |r| r.cost),
        }
    }

    fn compare(&self, other: &Key<'_>) -> Ordering {
        let better = |a: bool, b: bool| b.cmp(&a);
        better(self.changed, other.changed)
            .then(better(self.verified, other.verified))
            .then_with(|| match (self.score, other.score) {
                (Some(a), Some(b)) => b.total_cmp(&a),
                (a, b) => better(a.is_some(), b.is_some()),
            })
            .then(better(self.finished, other.finished))
            .then(self.lines.cmp(&other.lines))
            .then(self.cost.cmp(&other.cost))
            .then(self.result.fork.cmp(&other.result.fork))
    }

    /// What puts it before the next one, where their judgement is the same.
    fn tie_break(&self, next: &Key<'_>) -> Option<&'static str> {
        let same_score = match (self.score, next.score) {
            (Some(a), Some(b)) => a.total_cmp(&b).is_eq(),
            (a, b) => a.is_none() && b.is_none(),
        };
        if (self.changed, self.verified) != (next.changed, next.verified) || !same_score {
            return None;
        }
        Some(match () {
            () if self.finished != next.finished => "its agent finished",
            () if self.lines != next.lines => "smaller diff",
            () if self.cost != next.cost => "lower cost",
            () => "the same, and the lower number",
        })
    }

    /// `next` is the one that it ranks before.
    fn reason(&self, next: Option<&Key<'_>>) -> String {
        let mut parts = vec![];
        match self.result.verdict.as_ref().and_then(|v| v.passed) {
            Some(true) => parts.push("verified".to_string()),
            Some(false) => parts.push("not verified".to_string()),
            None => {}
        }
        if let Some(score) = self.score {
            parts.push(format!("score {score}"));
        }
        if let Some(why) = self.result.verdict.as_ref().and_then(|v| v.score_error.as_ref()) {
            parts.push(format!("score failed: {why}"));
        }
        if !self.finished {
            parts.push(self.result.outcome.as_str().to_string());
        }
        match &self.result.collected {
            Some(c) if c.diff.is_empty() => parts.push("no change".into()),
            Some(c) => parts.push(format!("+{} -{} lines", c.diff.added, c.diff.removed)),
            None => parts.push("no result".into()),
        }
        parts.push(self.cost.to_string());
        let mut reason = parts.join(", ");
        if let Some((next, why)) = next.and_then(|n| Some((n, self.tie_break(n)?))) {
            reason.push_str(&format!(" (before fork {}: {why})", next.result.fork));
        }
        reason
    }
}

pub fn rank(results: &[ForkResult], judges: bool, base: Option<&Verdict>) -> Ranking {
    let mut keys: Vec<Key<'_>> = results.iter().map(Key::of).collect();
    keys.sort_by(Key::compare);
    let winner = keys
        .first()
        .filter(|k| judges && k.changed)
        .filter(|k| match k.result.verdict.as_ref() {
            Some(v) => v.passed == Some(true) || (v.passed.is_none() && k.score.is_some()),
            None => false,
        })
        .map(|k| k.result.fork);
    Ranking {
        order: keys
            .iter()
            .enumerate()
            .map(|(i, k)| Ranked { fork: k.result.fork, reason: k.reason(keys.get(i + 1)) })
            .collect(),
        winner,
        base_passes: base.and_then(|v| v.passed),
    }
}

impl ForkOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            ForkOutcome::Success => "success",
            ForkOutcome::Failed => "failed",
            ForkOutcome::Timeout => "timeout",
            ForkOutcome::Cancelled => "cancelled",
            ForkOutcome::BudgetExceeded => "budget_exceeded",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::{AgentReport, Collected};
    use crate::view::DiffStat;

    fn result(fork: ForkNum, passed: Option<bool>, score: Option<f64>, lines: u64, cost: u64) -> ForkResult {
        let mut r = ForkResult::unstarted(fork, ForkOutcome::Success, None);
        r.verdict = Some(Verdict { passed, score, ..Default::default() });
        r.report = Some(AgentReport { cost: Usd(cost), ..Default::default() });
        r.collected = Some(Collected {
            commit: "c".into(),
            diff: DiffStat { files: lines.min(1), added: lines, removed: 0 },
            from_checkpoint: false,
            captured: vec![],
            edited_tests: vec![],
            ..Default::default()
        });
        r
    }
    fn order(results: &[ForkResult]) -> Vec<ForkNum> {
        rank(results, true, None).order.iter().map(|r| r.fork).collect()
    }

    #[test]
    fn verified_then_score_then_smaller_then_cheaper() {
        let results = [
            result(0, Some(false), Some(9.0), 1, 1),
            result(1, Some(true), Some(1.0), 1, 1),
            result(2, Some(true), Some(2.0), 9, 9),
            result(3, Some(true), Some(2.0), 8, 9),
            result(4, Some(true), Some(2.0), 8, 8),
            result(5, Some(true), Some(99.0), 0, 0),
        ];
        assert_eq!(order(&results), [4, 3, 2, 1, 0, 5]);
        assert_eq!(rank(&results, true, None).winner, Some(4));
    }

    #[test]
    fn no_winner_without_a_judge_or_without_a_pass() {
        let results = [result(0, None, None, 3, 1), result(1, None, None, 2, 1)];
        assert_eq!(rank(&results, false, None).winner, None);
        assert_eq!(rank(&[result(0, Some(false), None, 3, 1)], true, None).winner, None);
        assert_eq!(rank(&[result(0, None, Some(1.0), 3, 1)], true, None).winner, Some(0));
        assert_eq!(rank(&[], true, None).order, vec![]);
    }

    fn reasons(results: &[ForkResult]) -> Vec<String> {
        rank(results, true, None).order.into_iter().map(|r| r.reason).collect()
    }

    #[test]
    fn what_breaks_a_tie_is_said() {
        let mut results = vec![
            result(0, Some(true), Some(2.0), 3, 2),
            result(1, Some(true), Some(2.0), 3, 2),
            result(2, Some(true), Some(2.0), 3, 3),
            result(3, Some(true), Some(2.0), 4, 1),
            result(4, Some(true), Some(2.0), 1, 1),
            result(5, Some(true), Some(1.0), 1, 1),
            result(6, Some(false), None, 1, 1),
        ];
        results[4].outcome = ForkOutcome::Timeout;
        let whys: Vec<String> = reasons(&results)
            .iter()
            .map(|r| {
                r.split_once(" (").map_or(String::new(), |(_, why)| why.trim_end_matches(')').to_string())
            })
            .collect();
        assert_eq!(order(&results), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(
            whys,
            [
                "before fork 1: the same, and the lower number",
                "before fork 2: lower cost",
                "before fork 3: smaller diff",
                "before fork 4: its agent finished",
                // Scores and verify speak for themselves.
                "",
                "",
                "",
            ]
        );
    }

    #[test]
    fn a_score_that_failed_is_part_of_the_reason() {
        let mut failed = result(0, Some(true), None, 1, 0);
        failed.verdict.as_mut().unwrap().score_error = Some("exit 3".into());
        let reasons = reasons(&[failed, result(1, Some(true), Some(1.5), 1, 0)]);
        assert_eq!(
            reasons,
            ["verified, score 1.5, +1 -0 lines, $0.00", "verified, score failed: exit 3, +1 -0 lines, $0.00"]
        );
    }

    #[test]
    fn a_score_that_is_no_number_counts_as_none() {
        let results = [result(0, Some(true), Some(f64::NAN), 1, 1), result(1, Some(true), Some(-5.0), 9, 9)];
        assert_eq!(order(&results), [1, 0]);
    }
}
