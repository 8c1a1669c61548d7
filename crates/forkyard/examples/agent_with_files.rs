//! An agent whose files come back; its sandbox is gone afterwards.
//!
//! `cargo run --example agent_with_files`

mod common;

use forkyard::{AgentTask, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let agents = yard.agents();
    let task = AgentTask::new("Create a REST API.")
        .name("backend-dev")
        .model(common::model("files"))
        .system_prompt("You are a backend developer. You work in {{ workspace }}.")
        .sandbox(SandboxConfig::new().memory_mb(256).cpus(0.5).network(NetworkMode::None))
        .capture("**/*.js")
        .capture("**/*.json");
    let result = agents.execute(task).await?;
    println!("output: {}", result.output);
    for (path, data) in &result.files {
        println!("{path}: {}", String::from_utf8_lossy(data).trim());
    }
    println!("still active: {}", agents.active().len());
    Ok(())
}
