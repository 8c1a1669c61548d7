//! What an agent wants to do is judged, changed or answered by the program that runs it.
//!
//! `cargo run --example interceptors`

mod common;

use forkyard::{AgentTask, NetworkMode, Result, SandboxConfig, ToolResponse, Verdict};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let task = AgentTask::new("Deploy, and write down when.")
        .model(common::model("careless"))
        .sandbox(SandboxConfig::new().network(NetworkMode::None))
        // Refused: the model gets the reason.
        .intercept("Bash", |request, _sandbox| async move {
            let command = request.input.get("command").and_then(|c| c.as_str()).unwrap_or_default();
            if command.contains("deploy") {
                Verdict::Deny("nobody deploys on a Friday".into())
            } else {
                Verdict::Allow
            }
        })
        // Changed: files go to another folder, which is made first.
        .intercept("Write", |request, sandbox| async move {
            if let Err(e) = sandbox.run("mkdir", ["-p", "/workspace/out"]).await {
                return Verdict::Deny(e.to_string());
            }
            let mut input = request.input;
            let path = input.get("file_path").and_then(|p| p.as_str()).unwrap_or_default().to_string();
            input.insert("file_path".into(), format!("out/{path}").into());
            Verdict::Rewrite(input)
        })
        // Answered: a file that does not exist.
        .intercept(
            "Read",
            |_request, _sandbox| async move { Verdict::Respond(ToolResponse::text("KEY=none")) },
        )
        .capture("out/**");
    let result = yard.agents().execute(task).await?;
    println!("refused: {}", result.denied);
    for error in &result.errors {
        println!("told the model: {error}");
    }
    for (path, data) in &result.files {
        println!("{path}: {}", String::from_utf8_lossy(data).trim());
    }
    Ok(())
}
