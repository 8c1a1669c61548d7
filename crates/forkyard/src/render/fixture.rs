//! Views to render in tests.

use std::collections::BTreeMap;

use forkyard_core::budget::BudgetLimits;
use forkyard_core::view::{
    DiffStat, EngineKind, ForkOutcome, ForkView, Lifecycle, Progress, RunStatus, RunView,
};
use forkyard_core::{Attempt, Millis, RunId, Timestamp, Usd};

use super::board::Board;

pub(crate) fn board(forks: Vec<ForkView>) -> Board {
    let run = RunView {
        id: RunId::new("r1").unwrap(),
        engine: EngineKind::Embedded,
        status: RunStatus::Running,
        outcome: None,
        paused: false,
        detached: false,
        cancelling: false,
        repo: "https://example.com/r".into(),
        branch: None,
        prompt: "fix it".into(),
        limits: BudgetLimits { run: Some(Usd::dollars(5)), fork: None },
        created_at: Timestamp(0),
        updated_at: Timestamp(0),
        ended_at: None,
        progress: Progress::default(),
        error: None,
        ranking: vec![],
        winner: None,
    };
    Board { run, forks, doing: BTreeMap::new(), spent: Usd::cents(250), now: Timestamp(100_000) }
}

pub(crate) fn fork(n: u32, lifecycle: Lifecycle, outcome: Option<ForkOutcome>) -> ForkView {
    let started = lifecycle != Lifecycle::Pending;
    ForkView {
        run: RunId::new("r1").unwrap(),
        fork: n,
        attempt: Attempt(1),
        lifecycle,
        phase: String::new(),
        outcome,
        sandbox: None,
        name: None,
        model: "sonnet".into(),
        verified: None,
        score: None,
        turns: if started { 7 } else { 0 },
        tool_calls: 9,
        cost: if started { Usd::cents(125) } else { Usd::ZERO },
        tokens: 1234,
        diff: outcome.map(|_| DiffStat { files: 2, added: 10, removed: 3 }),
        driven: Millis::secs(62),
        created_at: Timestamp(0),
        updated_at: Timestamp(0),
        started_at: started.then_some(Timestamp(10_000)),
        ended_at: outcome.map(|_| Timestamp(72_000)),
        error: None,
    }
}
