//! What readers see of a run.

use super::*;
use crate::view::{Progress, RunStatus, RunView, SandboxView, View};

impl Run {
    pub fn progress(&self) -> Progress {
        let mut p = Progress { total_forks: self.forks.len() as u32, ..Default::default() };
        for f in &self.forks {
            match &f.state {
                ForkState::Waiting => p.pending += 1,
                ForkState::Live => p.in_progress += 1,
                ForkState::Ended(r) if r.outcome == ForkOutcome::Success => p.completed += 1,
                ForkState::Ended(_) => p.failed += 1,
            }
        }
        p
    }

    pub fn status(&self) -> RunStatus {
        match self.phase {
            RunPhase::Prepare if self.tenure == Attempt(0) => RunStatus::Pending,
            RunPhase::Prepare => RunStatus::Preparing,
            RunPhase::Forks => RunStatus::Running,
            RunPhase::Finish => RunStatus::Finishing,
            RunPhase::Ended => RunStatus::Ended,
        }
    }

    /// Rows to write with the events that led here.
    pub fn views(&self) -> Vec<View> {
        let sandboxes = self.sandboxes.iter().map(|(id, e)| {
            View::Sandbox(SandboxView {
                id: id.clone(),
                run: self.id.clone(),
                fork: None,
                role: e.role,
                provider: self.spec.sandbox.provider,
                host: e.host.clone(),
                state: e.state,
                created_at: e.created_at,
                updated_at: e.updated_at,
            })
        });
        std::iter::once(View::Run(self.view())).chain(sandboxes).collect()
    }

    pub fn view(&self) -> RunView {
        RunView {
            id: self.id.clone(),
            engine: self.spec.engine,
            status: self.status(),
            outcome: self.outcome,
            paused: self.paused,
            detached: self.detached,
            cancelling: self.cancelling,
            repo: self.spec.repo.source.clone(),
            branch: self.spec.repo.branch.clone(),
            prompt: self.spec.forks.first().map(|f| f.prompt.clone()).unwrap_or_default(),
            limits: self.spec.budget,
            created_at: self.created_at,
            updated_at: self.updated_at,
            ended_at: self.ended_at,
            progress: self.progress(),
            error: self.error.clone(),
            ranking: self.ranking.order.iter().map(|r| r.fork).collect(),
            winner: self.ranking.winner,
        }
    }
}
