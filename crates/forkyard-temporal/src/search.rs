//! What a Temporal user can list and filter by. Workflows set these only where the service knows them.

use forkyard_core::view::{ForkOutcome, RunStatus};
use temporalio_common::search_attributes::{SearchAttributeKey, SearchAttributes};
use temporalio_sdk::WorkflowContext;

/// The run's id, on its own workflow and on those of its forks.
pub const RUN: SearchAttributeKey<String> = SearchAttributeKey::keyword("ForkyardRun");
/// How far a run or a fork has come, in the words of `forkyard list`.
pub const STATUS: SearchAttributeKey<String> = SearchAttributeKey::keyword("ForkyardStatus");

pub fn at_start(run: &forkyard_core::RunId) -> SearchAttributes {
    SearchAttributes::new([RUN.value_set(run.to_string())])
}

pub fn status<W>(ctx: &WorkflowContext<W>, status: RunStatus) {
    ctx.upsert_search_attributes([STATUS.value_set(status.as_str().to_string())]);
}

pub fn phase<W>(ctx: &WorkflowContext<W>, phase: &str) {
    ctx.upsert_search_attributes([STATUS.value_set(phase.to_string())]);
}

pub fn outcome<W>(ctx: &WorkflowContext<W>, outcome: ForkOutcome) {
    let text = match outcome {
        ForkOutcome::Success => "success",
        ForkOutcome::Failed => "failed",
        ForkOutcome::Timeout => "timeout",
        ForkOutcome::Cancelled => "cancelled",
        ForkOutcome::BudgetExceeded => "budget_exceeded",
    };
    ctx.upsert_search_attributes([STATUS.value_set(text.to_string())]);
}
