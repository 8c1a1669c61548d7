//! What readers see of a fork.

use super::*;
use crate::view::{ForkView, Lifecycle, SandboxView, View};

impl Fork {
    pub fn outcome(&self) -> Option<ForkOutcome> {
        self.decided.or(self.reached)
    }

    pub fn result(&self) -> ForkResult {
        ForkResult {
            fork: self.plan.fork,
            outcome: self.outcome().unwrap_or(ForkOutcome::Failed),
            attempt: self.attempt,
            sandbox: self.work.clone(),
            report: self.report.clone(),
            collected: self.collected.clone(),
            verdict: self.verdict.clone(),
            driven: self.driven,
            error: self.error.clone(),
        }
    }

    /// When its time is up, as things are.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.since.map(|since| since + self.plan.timeout.saturating_sub(self.driven))
    }

    pub(super) fn timers(&self) -> BTreeMap<Timer, Timestamp> {
        let mut timers = self.pending.timers();
        if let (Some(at), None) = (self.deadline(), self.decided) {
            timers.insert(Timer::Deadline, at);
        }
        if let (Some(at), Phase::Linger) = (self.linger_until, self.phase) {
            timers.insert(Timer::Linger, at);
        }
        timers
    }

    pub fn lifecycle(&self) -> Lifecycle {
        match self.phase {
            Phase::Budget => Lifecycle::Pending,
            Phase::Create | Phase::Health => Lifecycle::Creating,
            Phase::Agent | Phase::Linger => Lifecycle::Running,
            Phase::Collect | Phase::Verify | Phase::Publish | Phase::Cleanup => Lifecycle::Completing,
            Phase::Ended => match self.outcome() {
                Some(ForkOutcome::Success | ForkOutcome::Cancelled) => Lifecycle::Completed,
                Some(ForkOutcome::Failed | ForkOutcome::Timeout | ForkOutcome::BudgetExceeded) | None => {
                    Lifecycle::Failed
                }
            },
        }
    }

    fn phase_name(&self) -> &'static str {
        match self.phase {
            Phase::Budget => "budget",
            Phase::Create => "creating",
            Phase::Health => "health",
            Phase::Agent => "agent",
            Phase::Linger => "lingering",
            Phase::Collect => "collecting",
            Phase::Verify => "verifying",
            Phase::Publish => "publishing",
            Phase::Cleanup => "cleanup",
            Phase::Ended => "ended",
        }
    }

    /// Rows to write with the events that led here.
    pub fn views(&self) -> Vec<View> {
        let sandboxes = self.sandboxes.iter().map(|(id, e)| {
            View::Sandbox(SandboxView {
                id: id.clone(),
                run: self.plan.run.clone(),
                fork: Some(self.plan.fork),
                role: e.role,
                provider: self.plan.provider,
                host: e.host.clone(),
                state: e.state,
                created_at: e.created_at,
                updated_at: e.updated_at,
            })
        });
        std::iter::once(View::Fork(self.view())).chain(sandboxes).collect()
    }

    pub fn view(&self) -> ForkView {
        let report = self.report.as_ref();
        ForkView {
            run: self.plan.run.clone(),
            fork: self.plan.fork,
            attempt: self.attempt,
            lifecycle: self.lifecycle(),
            phase: self.phase_name().into(),
            outcome: self.outcome().filter(|_| self.phase == Phase::Ended),
            sandbox: self.work.clone(),
            name: self.plan.spec.name.clone(),
            model: self.plan.spec.model.clone(),
            verified: self.verdict.as_ref().and_then(|v| v.passed),
            score: self.verdict.as_ref().and_then(|v| v.score),
            turns: report.map_or(0, |r| r.turns),
            tool_calls: report.map_or(0, |r| r.tool_calls),
            cost: report.map_or(crate::Usd::ZERO, |r| r.cost),
            tokens: report.map_or(0, |r| r.tokens.total()),
            diff: self.collected.as_ref().map(|c| c.diff),
            driven: self.driven,
            created_at: self.created_at,
            updated_at: self.updated_at,
            started_at: Some(self.created_at),
            ended_at: self.ended_at,
            error: self.error.clone(),
        }
    }
}
