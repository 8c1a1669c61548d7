//! What the agent itself costs, without model and commands. Memory is held to its bound; times are only shown
//! (`cargo nextest run overhead --no-capture`).

use std::time::Instant;

use crate::agent_support::{Fork, ScriptModel, bash, call, say};
use serde_json::json;

const AGENTS: usize = 50;
const TURNS: usize = 30;
/// Of all agents together.
const MAX_BYTES: u64 = 60 << 20;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Commands with output, edits and reads; the last one waits, so that the agent is there to be measured.
fn fork() -> Fork {
    Fork::new(ScriptModel::new(|_, n| {
        Ok(match n {
            n if n == TURNS => bash("gate g"),
            n if n > TURNS => say("done"),
            n if n % 3 == 0 => bash("flood 4000"),
            n if n % 3 == 1 => {
                call(&[("Write", json!({ "file_path": format!("f{n}"), "content": "line\n".repeat(200) }))])
            }
            n => call(&[("Read", json!({ "file_path": format!("f{}", n - 1) }))]),
        })
    }))
}

#[tokio::test]
async fn fifty_agents_are_small() {
    let mut forks: Vec<Fork> = (0..AGENTS).map(|_| fork()).collect();
    for fork in &mut forks {
        // What a test remembers is not the agent's.
        fork.model.forget_requests();
        fork.config.keep_checkpoints = 0;
    }
    let before = resident_bytes();
    let started = Instant::now();
    let runs: Vec<_> =
        forks.iter_mut().map(|fork| tokio::spawn(fork.agent(None).run(fork.cancel.clone()))).collect();
    for fork in &forks {
        fork.world.until(|w| w.ran().iter().any(|c| c == "gate g")).await;
    }
    let per_turn = started.elapsed() / u32::try_from(AGENTS * TURNS).unwrap();
    let stored: u64 = forks.iter().map(|f| f.stored.bytes()).sum();
    let grown = resident_bytes().saturating_sub(before).saturating_sub(stored);
    println!("{AGENTS} agents after {TURNS} turns: {} KiB in all, {per_turn:?} a turn", grown >> 10);
    for fork in &forks {
        fork.world.open("g");
    }
    for run in runs {
        assert!(run.await.unwrap().unwrap().success);
    }
    assert!(grown < MAX_BYTES, "{grown} bytes");
}
