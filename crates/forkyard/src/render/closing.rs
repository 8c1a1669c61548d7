//! What a run came to: a table, best first, why the best is best, and what to type next.

use forkyard_core::rank::Ranking;
use forkyard_core::view::{ForkOutcome, ForkView, RunView};
use forkyard_core::{ForkNum, Usd};

use super::board::{diff_text, state};
use super::plain::{fit, plain};
use super::style::{Color, Style};
use super::table::{Cell, Table, left, right};

/// Sums over all forks of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    pub forks: usize,
    pub successful: usize,
    pub failed: usize,
    pub verified: usize,
    pub turns: u64,
    pub tool_calls: u64,
    pub tokens: u64,
    pub cost: Usd,
    pub seconds: f64,
}

impl Totals {
    pub fn of(forks: &[ForkView]) -> Totals {
        let mut t = Totals { forks: forks.len(), ..Totals::default() };
        for f in forks {
            t.successful += usize::from(f.outcome == Some(ForkOutcome::Success));
            t.failed += usize::from(f.outcome.is_some_and(|o| o != ForkOutcome::Success));
            t.verified += usize::from(f.verified == Some(true));
            t.turns += u64::from(f.turns);
            t.tool_calls += u64::from(f.tool_calls);
            t.tokens += f.tokens;
            t.cost += f.cost;
            t.seconds += f.driven.0 as f64 / 1000.0;
        }
        t
    }
    /// Of the forks that there are; 0 if there are none.
    pub fn success_rate(&self) -> f64 {
        self.mean(self.successful as f64)
    }
    pub fn mean(&self, sum: f64) -> f64 {
        if self.forks == 0 { 0.0 } else { sum / self.forks as f64 }
    }
}

/// The table in the order of the ranking; forks that it does not name come last.
pub fn table(forks: &[ForkView], order: &[ForkNum], winner: Option<ForkNum>) -> Table {
    let mut table = Table::new(vec![
        right("Fork"),
        left("Status"),
        left("Verified"),
        right("Score"),
        right("Turns"),
        right("Cost"),
        right("Duration"),
        left("Diff"),
        left("Error"),
    ]);
    let place = |f: &ForkView| order.iter().position(|n| *n == f.fork).unwrap_or(usize::MAX);
    let mut forks: Vec<&ForkView> = forks.iter().collect();
    forks.sort_by_key(|f| (place(f), f.fork));
    for f in forks {
        let (word, color) = state(f);
        // The column of its own says whether it is verified.
        let word = if f.outcome == Some(ForkOutcome::Success) { "success" } else { word };
        let number = if winner == Some(f.fork) { format!("★ {}", f.fork) } else { f.fork.to_string() };
        let verified = match f.verified {
            Some(true) => Cell::new("yes").color(Color::Green),
            Some(false) => Cell::new("no").color(Color::Red),
            None => Cell::default(),
        };
        let diff = match f.diff {
            Some(d) if d.is_empty() => "none".to_string(),
            Some(d) => diff_text(d),
            None => String::new(),
        };
        table.row(vec![
            number.into(),
            Cell::new(word).color(color),
            verified,
            f.score.map(|s| s.to_string()).unwrap_or_default().into(),
            f.turns.to_string().into(),
            f.cost.to_string().into(),
            f.driven.to_string().into(),
            diff.into(),
            f.error.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

/// All that is printed when a run has ended.
pub fn closing(run: &RunView, forks: &[ForkView], ranking: Option<&Ranking>, style: &Style) -> String {
    let mut out = table(forks, &run.ranking, run.winner).render(style);
    let t = Totals::of(forks);
    let line = |out: &mut String, text: String| {
        out.push_str(&fit(&text, style.width));
        out.push('\n');
    };
    out.push('\n');
    let verified = if forks.iter().any(|f| f.verified.is_some()) {
        format!(", {} verified", t.verified)
    } else {
        String::new()
    };
    line(&mut out, format!("{} of {} forks succeeded{verified}, {} in all", t.successful, t.forks, t.cost));
    if let Some(error) = &run.error {
        line(&mut out, style.paint(Color::Red, &plain(error)));
    }
    if let Some(r) = ranking {
        if r.base_passes == Some(true) {
            line(&mut out, "The base passes verify as it is: being verified says little here.".into());
        }
        if let Some(winner) = r.winner
            && let Some(best) = r.order.iter().find(|o| o.fork == winner)
        {
            line(&mut out, format!("★ {}/{winner}: {}", run.id, plain(&best.reason)));
        }
    }
    let best = run.winner.or_else(|| run.ranking.first().copied());
    let changed = |n: ForkNum| forks.iter().any(|f| f.fork == n && f.diff.is_some_and(|d| !d.is_empty()));
    if let Some(best) = best.filter(|n| changed(*n)) {
        out.push('\n');
        let id = &run.id;
        for command in [format!("forkyard diff {id}/{best}"), format!("forkyard apply {id}/{best}")] {
            line(&mut out, format!("  {}", style.paint(Color::Cyan, &command)));
        }
        if t.forks > 1 {
            line(&mut out, format!("  {}", style.paint(Color::Cyan, &format!("forkyard compare {id}"))));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use forkyard_core::rank::Ranked;
    use forkyard_core::view::{DiffStat, Lifecycle};

    use super::super::fixture::{board, fork};
    use super::*;

    fn ended() -> (RunView, Vec<ForkView>, Ranking) {
        let mut forks = vec![
            fork(0, Lifecycle::Failed, Some(ForkOutcome::Failed)),
            fork(1, Lifecycle::Completed, Some(ForkOutcome::Success)),
            fork(2, Lifecycle::Completed, Some(ForkOutcome::Cancelled)),
        ];
        forks[0].error = Some("max_turns: the agent took 100 turns\x1b[31m".into());
        forks[0].verified = Some(false);
        forks[1].verified = Some(true);
        forks[2].diff = Some(DiffStat::default());
        let mut run = board(vec![]).run;
        run.ranking = vec![1, 0, 2];
        run.winner = Some(1);
        let ranking = Ranking {
            order: vec![Ranked { fork: 1, reason: "verified".into() }],
            winner: Some(1),
            base_passes: Some(true),
        };
        (run, forks, ranking)
    }

    #[test]
    fn best_first_with_the_reason_and_what_to_type() {
        let (run, forks, ranking) = ended();
        assert_eq!(
            closing(&run, &forks, Some(&ranking), &Style::PIPE),
            "Fork  Status     Verified  Turns   Cost  Duration  Diff            Error\n\
             \x20★ 1  success    yes           7  $1.25     1m02s  2 files +10 -3\n\
             \x20  0  failed     no            7  $1.25     1m02s  2 files +10 -3  max_turns: the agent took 100 turns\\x1b[31m\n\
             \x20  2  cancelled                7  $1.25     1m02s  none\n\
             \n\
             1 of 3 forks succeeded, 1 verified, $3.75 in all\n\
             The base passes verify as it is: being verified says little here.\n\
             ★ r1/1: verified\n\
             \n\
             \x20 forkyard diff r1/1\n\
             \x20 forkyard apply r1/1\n\
             \x20 forkyard compare r1\n"
        );
    }

    #[test]
    fn a_narrow_terminal_gets_blocks_and_no_line_is_too_long() {
        let (run, forks, ranking) = ended();
        for columns in [20, 40, 60, 80, 100] {
            let style = Style { color: false, width: columns, height: Some(24) };
            for line in closing(&run, &forks, Some(&ranking), &style).lines() {
                assert!(super::super::width(line) <= columns, "{columns}: {line:?}");
            }
        }
    }

    #[test]
    fn no_change_means_nothing_to_apply() {
        let (mut run, mut forks, _) = ended();
        run.winner = None;
        for f in &mut forks {
            f.diff = Some(DiffStat::default());
        }
        assert!(!closing(&run, &forks, None, &Style::PIPE).contains("forkyard apply"));
        assert_eq!(Totals::of(&[]).success_rate(), 0.0);
    }
}
