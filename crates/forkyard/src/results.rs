//! What a run came to, as programs read it: the document of `--json` and the answer of the library are the same thing.

use std::collections::BTreeMap;

use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::fork;
use forkyard_core::rank::Ranking;
use forkyard_core::run::Run;
use forkyard_core::view::{
    DiffStat, EngineKind, ForkOutcome, ForkView, Lifecycle, RunOutcome, RunStatus, RunView,
};
use forkyard_core::{Attempt, ForkNum, Millis, Usd};
use forkyard_store::EventQuery;
use forkyard_temporal::wire::MAX_WORDS_BYTES;
use serde::Serialize;

use crate::error::Result;
use crate::place::Place;

/// What a run came to, or has come to so far. Serialized it is the document `forkyard.run/1` of docs/json.md.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct RunResult {
    pub schema: &'static str,
    /// The run's id.
    pub run: String,
    pub status: RunStatus,
    /// None while it works.
    pub outcome: Option<RunOutcome>,
    pub total_forks: usize,
    pub successful: usize,
    /// What has not succeeded (yet).
    pub failed: usize,
    pub total_cost_usd: f64,
    /// Sums and means over all forks.
    pub totals: Totals,
    /// The best fork; None if nothing judged or nothing passed.
    pub winner: Option<u32>,
    /// Best first, each with its reason.
    pub ranking: Option<Ranking>,
    /// Why the run as a whole failed.
    pub error: Option<String>,
    /// By fork number.
    pub results: Vec<ForkResult>,
}

/// What one fork came to.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ForkResult {
    pub fork_num: u32,
    pub name: Option<String>,
    pub model: String,
    pub sandbox_id: Option<String>,
    /// success, failed, timeout, cancelled or budget_exceeded; while it works, its phase.
    pub status: String,
    pub success: bool,
    /// None where nobody judged.
    pub verified: Option<bool>,
    pub score: Option<f64>,
    /// Why the score command gave none.
    pub score_error: Option<String>,
    /// The agent's last words.
    pub final_response: Option<String>,
    pub turns: u32,
    pub tool_calls: u32,
    /// Tool calls that failed or were refused.
    pub errors: u32,
    pub total_tokens: u64,
    /// In dollars.
    pub total_cost: f64,
    /// Seconds that counted against its limit.
    pub execution_time: f64,
    /// None without a result.
    pub diff: Option<DiffStat>,
    /// Files that were brought back beside the diff.
    pub captured: Vec<String>,
    /// Tests that it edited and that nothing protects.
    pub edited_tests: Vec<String>,
    /// Protected files that it changed: they are as in the base when it is judged.
    pub put_back: Vec<String>,
    /// The end of what verify printed.
    pub verify_output: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
}

/// Sums and means over the forks of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Totals {
    /// Share of forks that succeeded, 0 to 1.
    pub success_rate: f64,
    pub turns: u64,
    pub tool_calls: u64,
    pub tokens: u64,
    /// Seconds, added up.
    pub time: f64,
    pub average_turns: f64,
    pub average_tool_calls: f64,
    pub average_tokens: f64,
    pub average_cost: f64,
    pub average_time: f64,
}

impl RunResult {
    /// What the store and the run's log say now.
    pub(crate) async fn read(place: &dyn Place, view: &RunView) -> Result<RunResult> {
        Ok(RunResult::read_with_forks(place, view).await?.0)
    }

    /// The same, and the forks' rows: with what is known of those at work, and with those that wait.
    pub(crate) async fn read_with_forks(
        place: &dyn Place,
        view: &RunView,
    ) -> Result<(RunResult, Vec<ForkView>)> {
        let mut forks = place.forks(&view.id).await?;
        let Some(state) = place.run_log(&view.id).await? else {
            return Ok((RunResult::new(view, &forks, &BTreeMap::new(), None), forks));
        };
        if view.outcome.is_none() {
            place.doing().fill(&mut forks);
            forks.extend(waiting(view, &state, &forks));
            forks.sort_by_key(|f| f.fork);
        }
        let ended: BTreeMap<ForkNum, &fork::ForkResult> = state.results().map(|r| (r.fork, r)).collect();
        let mut result = RunResult::new(view, &forks, &ended, Some(state.ranking().clone()));
        for r in result.results.iter_mut().filter(|_| view.engine == EngineKind::Temporal) {
            if let Some(said) = r.final_response.as_mut().filter(|s| s.len() + 4 > MAX_WORDS_BYTES) {
                *said = whole_words(place, view, r.fork_num, said).await?;
            }
        }
        Ok((result, forks))
    }

    pub(crate) fn new(
        view: &RunView,
        forks: &[ForkView],
        ended: &BTreeMap<ForkNum, &fork::ForkResult>,
        ranking: Option<Ranking>,
    ) -> RunResult {
        let results: Vec<ForkResult> =
            forks.iter().map(|f| ForkResult::new(f, ended.get(&f.fork).copied())).collect();
        let successful = results.iter().filter(|r| r.success).count();
        // Where the base failed, no fork has a row.
        let total_forks = results.len().max(view.progress.total_forks as usize);
        RunResult {
            schema: "forkyard.run/1",
            run: view.id.to_string(),
            status: view.status,
            outcome: view.outcome,
            total_forks,
            successful,
            failed: total_forks - successful,
            total_cost_usd: sum(results.iter().map(|r| r.total_cost)),
            totals: Totals::of(&results),
            winner: view.winner,
            ranking,
            error: view.error.clone(),
            results,
        }
    }

    /// The best fork: the winner, or the first of the order where nothing judged.
    pub fn best(&self) -> Option<&ForkResult> {
        let first = || self.ranking.as_ref()?.order.first().map(|r| r.fork);
        let best = self.winner.or_else(first)?;
        self.results.iter().find(|r| r.fork_num == best)
    }
}

/// Temporal's histories carry the beginning of an agent's last words; its journal has all of them.
async fn whole_words(place: &dyn Place, view: &RunView, fork: ForkNum, beginning: &str) -> Result<String> {
    let kinds = vec!["agent.completed".into(), "agent.failed".into()];
    let query = EventQuery { fork: Some(fork), kinds, newest_first: true, ..EventQuery::default() };
    let said = place.events(&view.id, &query).await?.into_iter().find_map(|r| {
        let e = r.event;
        match JournalEntry::from_stored(&e.kind, e.version, e.at, e.data).ok()?.event {
            AgentEvent::Completed(done) | AgentEvent::Failed(done) => Some(done.final_output),
            _ => None,
        }
        .filter(|whole| whole.starts_with(beginning))
    });
    Ok(said.unwrap_or_else(|| beginning.to_string()))
}

impl ForkResult {
    pub(crate) fn new(view: &ForkView, ended: Option<&fork::ForkResult>) -> ForkResult {
        let report = ended.and_then(|r| r.report.as_ref());
        let collected = ended.and_then(|r| r.collected.as_ref());
        let verdict = ended.and_then(|r| r.verdict.as_ref());
        ForkResult {
            fork_num: view.fork,
            name: view.name.clone(),
            model: view.model.clone(),
            sandbox_id: view.sandbox.as_ref().map(ToString::to_string),
            status: view.outcome.map_or(view.phase.clone(), |o| o.as_str().to_string()),
            success: view.outcome == Some(ForkOutcome::Success),
            verified: view.verified,
            score: view.score,
            score_error: verdict.and_then(|v| v.score_error.clone()),
            final_response: report.map(|r| r.final_response.clone()),
            turns: view.turns,
            tool_calls: view.tool_calls,
            errors: report.map_or(0, |r| r.errors),
            total_tokens: view.tokens,
            total_cost: view.cost.as_dollars(),
            execution_time: view.driven.0 as f64 / 1000.0,
            diff: view.diff,
            captured: collected.map(|c| c.captured.clone()).unwrap_or_default(),
            edited_tests: collected.map(|c| c.edited_tests.clone()).unwrap_or_default(),
            put_back: collected.map(|c| c.put_back.clone()).unwrap_or_default(),
            verify_output: verdict.map(|v| v.output.clone()),
            error: view.error.clone(),
        }
    }
}

/// Of nothing it is 0.0; the standard library's is -0.0.
fn sum(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |a, b| a + b)
}

/// Rows of the forks that have not begun: the store has none of them.
fn waiting(view: &RunView, state: &Run, begun: &[ForkView]) -> Vec<ForkView> {
    (0..state.fork_count() as ForkNum)
        .filter(|n| begun.iter().all(|f| f.fork != *n))
        .filter_map(|n| Some((n, state.fork_spec(n)?)))
        .map(|(fork, spec)| ForkView {
            run: view.id.clone(),
            fork,
            attempt: Attempt(0),
            lifecycle: Lifecycle::Pending,
            phase: "pending".into(),
            outcome: None,
            sandbox: None,
            name: spec.name.clone(),
            model: spec.model.clone(),
            verified: None,
            score: None,
            turns: 0,
            tool_calls: 0,
            cost: Usd::ZERO,
            tokens: 0,
            diff: None,
            driven: Millis::ZERO,
            created_at: view.created_at,
            updated_at: view.updated_at,
            started_at: None,
            ended_at: None,
            error: None,
        })
        .collect()
}

impl Totals {
    fn of(results: &[ForkResult]) -> Totals {
        let mean = |sum: f64| if results.is_empty() { 0.0 } else { sum / results.len() as f64 };
        let turns: u64 = results.iter().map(|r| u64::from(r.turns)).sum();
        let tool_calls: u64 = results.iter().map(|r| u64::from(r.tool_calls)).sum();
        let tokens: u64 = results.iter().map(|r| r.total_tokens).sum();
        let time = sum(results.iter().map(|r| r.execution_time));
        Totals {
            success_rate: mean(results.iter().filter(|r| r.success).count() as f64),
            turns,
            tool_calls,
            tokens,
            time,
            average_turns: mean(turns as f64),
            average_tool_calls: mean(tool_calls as f64),
            average_tokens: mean(tokens as f64),
            average_cost: mean(sum(results.iter().map(|r| r.total_cost))),
            average_time: mean(time),
        }
    }
}
