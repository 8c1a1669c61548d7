//! What a run came to: a table, best first, why the best is best, and what to type next.

use std::collections::BTreeMap;

use forkyard_core::view::{ForkOutcome, ForkView, RunView};
use forkyard_core::{ForkNum, Usd};

use super::board::{diff_text, state};
use super::plain::{plain, plain_block, wrap};
use super::style::{Color, Style};
use super::table::{Cell, Table, left, right};
use crate::results::RunResult;

/// How a run's error begins whose base could not be prepared.
const BASE_FAILED: &str = "prepare_base: ";

/// Which model a fork has is worth telling only then.
pub fn models_differ(forks: &[ForkView]) -> bool {
    forks.windows(2).any(|pair| pair[0].model != pair[1].model)
}

/// The table in the order of the ranking; forks that it does not name come last.
pub fn table(forks: &[ForkView], order: &[ForkNum], winner: Option<ForkNum>) -> Table {
    let mut table = Table::new(vec![
        right("Fork"),
        left("Name"),
        left("Model"),
        left("Status"),
        left("Verified"),
        right("Score"),
        right("Turns"),
        right("Cost"),
        right("Duration"),
        left("Diff"),
        left("Error"),
    ])
    .wraps();
    let models = models_differ(forks);
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
            Some(d) => diff_text(d),
            None => String::new(),
        };
        table.row(vec![
            number.into(),
            f.name.as_deref().unwrap_or_default().into(),
            if models { f.model.as_str() } else { "" }.into(),
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

/// Of the tests that a fork edited, these many are named.
const MAX_TESTS_NAMED: usize = 3;

/// A line for each fork that changed protected files, and for each that changed tests which nothing protects.
pub fn edited_tests(result: &RunResult) -> Vec<String> {
    let mut lines = vec![];
    for f in &result.results {
        for (what, files) in [("tests", &f.edited_tests), ("protected files (put back)", &f.put_back)] {
            if files.is_empty() {
                continue;
            }
            let names: Vec<String> = files.iter().take(MAX_TESTS_NAMED).map(|t| plain(t)).collect();
            let more = files.len().saturating_sub(MAX_TESTS_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            lines.push(format!("Fork {} edited {what}: {}{more}", f.fork_num, names.join(", ")));
        }
    }
    lines
}

/// `0-2,5` of numbers that grow.
pub fn ranges(forks: &[ForkNum]) -> String {
    let mut runs: Vec<(ForkNum, ForkNum)> = vec![];
    for n in forks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *n => *last = *n,
            Some(_) | None => runs.push((*n, *n)),
        }
    }
    let texts = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    texts.collect::<Vec<_>>().join(",")
}

/// A line for each way in which score commands failed.
pub fn scores_failed(result: &RunResult) -> Vec<String> {
    let mut failed: BTreeMap<&str, Vec<ForkNum>> = BTreeMap::new();
    for f in &result.results {
        if let Some(why) = &f.score_error {
            failed.entry(why).or_default().push(f.fork_num);
        }
    }
    let noun = |forks: &[ForkNum]| if forks.len() == 1 { "Fork" } else { "Forks" };
    failed
        .iter()
        .map(|(why, forks)| format!("{} {}: score failed: {}", noun(forks), ranges(forks), plain(why)))
        .collect()
}

/// All that is printed when a run has ended.
pub fn closing(run: &RunView, forks: &[ForkView], result: &RunResult, style: &Style) -> String {
    let mut out = String::new();
    if !forks.is_empty() {
        out = table(forks, &run.ranking, run.winner).render(style);
        out.push('\n');
    }
    // In as many lines as it takes: what is cut off here can't be found elsewhere at a glance.
    let say = |out: &mut String, label: Option<(Color, &str)>, indent: usize, text: &str| {
        let text = label.map_or(text.to_string(), |(_, word)| format!("{word} {text}"));
        for (i, line) in wrap(&text, style.width.saturating_sub(indent)).iter().enumerate() {
            let line = match label {
                _ if i > 0 => line.trim_start().to_string(),
                Some((color, word)) => line.replacen(word, &style.paint(color, word), 1),
                None => line.clone(),
            };
            out.push_str(&format!("{}{line}\n", " ".repeat(indent)));
        }
    };
    let line = |out: &mut String, text: &str| say(out, None, 0, text);
    let verified = if forks.iter().any(|f| f.verified.is_some()) {
        format!(", {} verified", forks.iter().filter(|f| f.verified == Some(true)).count())
    } else {
        String::new()
    };
    let cost: Usd = forks.iter().map(|f| f.cost).sum();
    let (good, all) = (result.successful, result.total_forks);
    let noun = if all == 1 { "fork" } else { "forks" };
    line(&mut out, &format!("{good} of {all} {noun} succeeded{verified}, {cost} in all"));
    if let Some(error) = &run.error {
        let (what, hint) = match error.strip_prefix(BASE_FAILED) {
            Some(why) => (format!("the base could not be prepared\n{why}"), true),
            None => (error.clone(), false),
        };
        for (i, text) in plain_block(what.trim_end()).lines().enumerate() {
            let (label, indent) = if i == 0 { (Some((Color::Red, "error:")), 0) } else { (None, 2) };
            say(&mut out, label, indent, text);
        }
        if hint {
            let text = format!(
                "correct --setup or the repository and start it again; the log is in: forkyard events {}",
                run.id
            );
            say(&mut out, Some((Color::Cyan, "hint:")), 0, &text);
        }
    }
    let changed = |n: ForkNum| forks.iter().any(|f| f.fork == n && f.diff.is_some_and(|d| !d.is_empty()));
    if let Some(r) = &result.ranking {
        if r.base_passes == Some(true) {
            line(&mut out, "The base passes verify as it is: being verified says little here.");
        }
        if let Some(winner) = r.winner
            && let Some(best) = r.order.iter().find(|o| o.fork == winner)
        {
            line(&mut out, &format!("★ {}/{winner}: {}", run.id, plain(&best.reason)));
        }
        // Nobody won, and still somebody is first of those with something to apply.
        if let (None, [first, _, ..]) = (r.winner, &r.order[..])
            && changed(first.fork)
        {
            line(&mut out, &format!("{}/{} is first: {}", run.id, first.fork, plain(&first.reason)));
        }
    }
    for warning in scores_failed(result).into_iter().chain(edited_tests(result)) {
        line(&mut out, &warning);
    }
    let best = run.winner.or_else(|| run.ranking.first().copied());
    if let Some(best) = best.filter(|n| changed(*n)) {
        out.push('\n');
        let id = &run.id;
        let mut commands = vec![format!("forkyard diff {id}/{best}"), format!("forkyard apply {id}/{best}")];
        if all > 1 {
            commands.push(format!("forkyard compare {id}"));
        }
        // To be copied: a terminal that is too narrow breaks them in its own way, and knows that it did.
        for command in commands {
            out.push_str(&format!("  {}\n", style.paint(Color::Cyan, &command)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use forkyard_core::rank::{Ranked, Ranking};
    use forkyard_core::view::{DiffStat, Lifecycle};

    use super::super::fixture::{board, fork};
    use super::*;

    fn result(run: &RunView, forks: &[ForkView], ranking: Option<Ranking>) -> RunResult {
        RunResult::new(run, forks, &BTreeMap::new(), ranking)
    }

    fn ended() -> (RunView, Vec<ForkView>, RunResult) {
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
        let result = result(&run, &forks, Some(ranking));
        (run, forks, result)
    }

    #[test]
    fn best_first_with_the_reason_and_what_to_type() {
        let (run, forks, result) = ended();
        assert_eq!(
            closing(&run, &forks, &result, &Style::PIPE),
            "Fork  Status     Verified  Turns   Cost  Duration  Diff            Error\n\
             \x20★ 1  success    yes           7  $1.25     1m02s  2 files +10 -3\n\
             \x20  0  failed     no            7  $1.25     1m02s  2 files +10 -3  max_turns: the agent took 100 turns\\x1b[31m\n\
             \x20  2  cancelled                7  $1.25     1m02s  no change\n\
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
    fn who_is_first_without_a_winner_and_scores_that_failed_are_told() {
        let (mut run, forks, mut result) = ended();
        run.winner = None;
        let order = vec![
            Ranked { fork: 1, reason: "+1 -0 lines (before fork 0: smaller diff)".into() },
            Ranked { fork: 0, reason: "+2 -0 lines".into() },
        ];
        result.ranking = Some(Ranking { order, ..Ranking::default() });
        for (fork, why) in [(0, "exit 3"), (1, "exit 3"), (2, "it printed nothing")] {
            result.results[fork].score_error = Some(why.into());
        }
        let text = closing(&run, &forks, &result, &Style::PIPE);
        let told = "r1/1 is first: +1 -0 lines (before fork 0: smaller diff)\n\
                    Forks 0-1: score failed: exit 3\n\
                    Fork 2: score failed: it printed nothing\n";
        assert!(text.contains(told), "{text}");
    }

    #[test]
    fn a_narrow_terminal_gets_blocks_and_no_line_is_too_long() {
        let (run, forks, result) = ended();
        for columns in [20, 40, 60, 80, 100] {
            let style = Style { color: false, width: columns, height: Some(24) };
            let text = closing(&run, &forks, &result, &style);
            for line in text.lines().filter(|l| !l.starts_with("  forkyard ")) {
                assert!(super::super::width(line) <= columns, "{columns}: {line:?}");
            }
            assert!(!text.contains('…'), "{columns}: {text}");
        }
    }

    #[test]
    fn at_40_columns_all_of_it_is_there() {
        let (mut run, forks, result) = ended();
        run.error = Some("prepare_base: cargo fetch could not reach the registry it was told to use".into());
        let style = Style { color: false, width: 40, height: Some(24) };
        assert_eq!(
            closing(&run, &forks, &result, &style),
            "Fork ★ 1\n\
             \x20 Status success\n\
             \x20 Verified yes\n\
             \x20 Turns 7\n\
             \x20 Cost $1.25\n\
             \x20 Duration 1m02s\n\
             \x20 Diff 2 files +10 -3\n\
             Fork 0\n\
             \x20 Status failed\n\
             \x20 Verified no\n\
             \x20 Turns 7\n\
             \x20 Cost $1.25\n\
             \x20 Duration 1m02s\n\
             \x20 Diff 2 files +10 -3\n\
             \x20 Error max_turns: the agent took 100\n\
             \x20       turns\\x1b[31m\n\
             Fork 2\n\
             \x20 Status cancelled\n\
             \x20 Turns 7\n\
             \x20 Cost $1.25\n\
             \x20 Duration 1m02s\n\
             \x20 Diff no change\n\
             \n\
             1 of 3 forks succeeded, 1 verified,\n\
             $3.75 in all\n\
             error: the base could not be prepared\n\
             \x20 cargo fetch could not reach the\n\
             \x20 registry it was told to use\n\
             hint: correct --setup or the repository\n\
             and start it again; the log is in:\n\
             forkyard events r1\n\
             The base passes verify as it is: being\n\
             verified says little here.\n\
             ★ r1/1: verified\n\
             \n\
             \x20 forkyard diff r1/1\n\
             \x20 forkyard apply r1/1\n\
             \x20 forkyard compare r1\n"
        );
    }

    #[test]
    fn forks_that_differ_have_their_names_and_models() {
        let (_, mut forks, _) = ended();
        forks[0].name = Some("careful".into());
        forks[0].model = "opus".into();
        let text = table(&forks, &[1, 0, 2], Some(1)).render(&Style::PIPE);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("Fork  Name     Model   Status"), "{text}");
        assert!(lines[1].starts_with(" ★ 1           sonnet  success"), "{text}");
        assert!(lines[2].starts_with("   0  careful  opus    failed"), "{text}");
    }

    #[test]
    fn a_base_that_failed_says_why_in_lines_and_what_to_do() {
        let mut run = board(vec![]).run;
        run.error = Some("prepare_base: setup ended with 1\nno such\x1b file\n".into());
        run.progress.total_forks = 3;
        let result = result(&run, &[], None);
        assert_eq!(
            closing(&run, &[], &result, &Style::PIPE),
            "0 of 3 forks succeeded, $0.00 in all\n\
             error: the base could not be prepared\n\
             \x20 setup ended with 1\n\
             \x20 no such\\x1b file\n\
             hint: correct --setup or the repository and start it again; the log is in: forkyard events r1\n"
        );
        let json = serde_json::to_string(&result).unwrap();
        assert_eq!((result.total_forks, result.failed), (3, 3));
        assert!(!json.contains("-0.0"), "{json}");
    }

    #[test]
    fn no_change_means_nothing_to_apply() {
        let (mut run, mut forks, _) = ended();
        run.winner = None;
        for f in &mut forks {
            f.diff = Some(DiffStat::default());
        }
        let none = result(&run, &forks, None);
        assert!(!closing(&run, &forks, &none, &Style::PIPE).contains("forkyard apply"));
        assert_eq!(result(&run, &[], None).totals.success_rate, 0.0);
    }
}
