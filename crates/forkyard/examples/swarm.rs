//! Three agents with different tasks, at the same time, each in a sandbox of its own.
//!
//! `cargo run --example swarm`

mod common;

use forkyard::{AgentTask, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let agents = yard.agents();
    let tasks =
        [("backend-dev", "Create a REST API."), ("tester", "Write tests."), ("documenter", "Write docs.")];
    let results = agents
        .execute_parallel(tasks.map(|(name, prompt)| {
            AgentTask::new(prompt)
                .name(name)
                .model(common::model("files"))
                .sandbox(SandboxConfig::new().network(NetworkMode::None))
                .capture("*.js")
        }))
        .await;
    for result in results {
        let result = result?;
        println!("{}: {} ({} files)", result.name.unwrap_or_default(), result.output, result.files.len());
    }
    Ok(())
}
