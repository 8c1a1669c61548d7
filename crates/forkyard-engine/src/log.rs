//! A machine's log in the store: typed on this side, versioned JSON on the other.

use forkyard_core::fork::{Fork, ForkEvent};
use forkyard_core::run::{Run, RunEvent};
use forkyard_core::{ForkNum, RunId, SandboxId, Timestamp, event};
use forkyard_store::{EventQuery, NewEvent, Recorded, Source, Store, StoreError, StreamId};

use crate::EngineError;

/// Events that are read at once.
const PAGE: usize = 1000;

pub fn stored<E: serde::Serialize>(at: Timestamp, e: &E, sandbox: Option<&SandboxId>) -> NewEvent {
    let (kind, data) = event::encode(e);
    NewEvent { kind, version: event::VERSION, at, source: Source::System, sandbox: sandbox.cloned(), data }
}

async fn read_all(store: &dyn Store, stream: &StreamId) -> Result<Vec<Recorded>, EngineError> {
    let mut all: Vec<Recorded> = vec![];
    loop {
        // Large events make short pages: only an empty one is the end.
        let page = store.read_stream(stream, all.len() as u64, PAGE).await?;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page);
    }
}

/// An agent that writes one of these gets somewhere: losing its worker again and again is no loop.
const PROGRESS: [&str; 2] = ["agent.assistant_message", "agent.tool_completed"];

/// Where the agent's last progress stands in the run. That it was started or resumed is none.
pub async fn progress(store: &dyn Store, run: &RunId, fork: ForkNum) -> Result<u64, StoreError> {
    let query = EventQuery {
        fork: Some(fork),
        kinds: PROGRESS.map(String::from).to_vec(),
        newest_first: true,
        limit: 1,
        ..Default::default()
    };
    let last = store.read_run(run, &query).await?;
    Ok(last.first().map_or(0, |e| e.position))
}

/// A run as its log tells it, and the log's length; None if there is no such run.
pub async fn load_run(store: &dyn Store, run: &RunId) -> Result<Option<(Run, u64)>, EngineError> {
    let mut events: Vec<(Timestamp, RunEvent)> = vec![];
    for r in read_all(store, &StreamId::Run(run.clone())).await? {
        let e = event::decode_run(&r.event.kind, r.event.version, r.event.data)
            .map_err(|e| EngineError::unreadable(run, e))?;
        events.push((r.event.at, e));
    }
    if events.is_empty() {
        return Ok(None);
    }
    let state =
        Run::replay(events.iter().map(|(at, e)| (*at, e))).ok_or_else(|| EngineError::Unreadable {
            run: run.clone(),
            reason: "its log does not begin with a submission".into(),
        })?;
    Ok(Some((state, events.len() as u64)))
}

/// A fork as its log tells it, and the log's length; None if it has not started.
pub async fn load_fork(
    store: &dyn Store,
    run: &RunId,
    fork: ForkNum,
) -> Result<Option<(Fork, u64)>, EngineError> {
    let mut events: Vec<(Timestamp, ForkEvent)> = vec![];
    for r in read_all(store, &StreamId::Fork(run.clone(), fork)).await? {
        let e = event::decode_fork(&r.event.kind, r.event.version, r.event.data)
            .map_err(|e| EngineError::unreadable(run, e))?;
        events.push((r.event.at, e));
    }
    if events.is_empty() {
        return Ok(None);
    }
    let state =
        Fork::replay(events.iter().map(|(at, e)| (*at, e))).ok_or_else(|| EngineError::Unreadable {
            run: run.clone(),
            reason: format!("the log of fork {fork} does not begin with a start"),
        })?;
    Ok(Some((state, events.len() as u64)))
}
