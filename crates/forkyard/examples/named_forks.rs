//! Forks of one repository that differ: names, prompts, system prompts, limits, captured files.
//!
//! `cargo run --example named_forks`

mod common;
#[path = "common/repository.rs"]
mod repository;

use forkyard::{ForkOptions, Job, NetworkMode, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, home) = common::open().await?;
    let repo = repository::make(home.path());
    let job = Job::new(&repo, "The test fails. Correct it.")
        .model(common::model("sum"))
        .network(NetworkMode::None)
        .verify("sh tests/run.sh")
        .fork(ForkOptions::new("careful").memory_mb(512).capture("add.sh"))
        .fork(ForkOptions::new("writer").prompt("Make the comments clear."));
    let mut run = yard.start(job).await?;
    let result = run.wait().await?;
    for fork in &result.results {
        println!("{}: {}", fork.name.as_deref().unwrap_or("?"), fork.final_response.as_deref().unwrap_or(""));
        for (path, data) in run.files(fork.fork_num).await? {
            println!("  captured {path}, {} bytes", data.len());
        }
    }
    Ok(())
}
