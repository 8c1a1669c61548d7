//! One agent in one sandbox, and what it came to.
//!
//! `cargo run --example single_agent`, or with a key `cargo run --example single_agent -- sonnet`

mod common;

use std::time::Duration;

use forkyard::{AgentTask, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let task = AgentTask::new("Write a small web server in JavaScript.")
        .model(common::model("files"))
        .sandbox(SandboxConfig::new().network(NetworkMode::None))
        .max_turns(100)
        .timeout(Duration::from_secs(600))
        .budget(1.0);
    let result = yard.agents().execute(task).await?;
    println!("success: {}", result.success);
    println!("response: {}", result.output);
    println!("{} turns, {} tool calls, {} errors", result.turns, result.tool_calls, result.errors.len());
    println!("{} tokens, ${:.4}, {:.1} s", result.total_tokens, result.total_cost, result.execution_time);
    Ok(())
}
