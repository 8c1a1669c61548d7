//! Forks in children of sandboxes that exist already; these stay as they are, and are yours to destroy.
//!
//! `cargo run --example sandbox_ids`

mod common;
#[path = "common/repository.rs"]
mod repository;

use forkyard::{Job, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, home) = common::open().await?;
    let repo = repository::make(home.path());

    let manager = yard.sandboxes().with_defaults(SandboxConfig::new().network(NetworkMode::None));
    let (one, two) =
        (manager.create(SandboxConfig::new()).await?, manager.create(SandboxConfig::new()).await?);

    // An empty one gets the repository.
    let job = Job::new(&repo, "The test fails. Find out why and correct it.")
        .forks(2)
        .sandbox(one.id())
        .sandbox(two.id())
        .model(common::model("sum"))
        .network(NetworkMode::None)
        .set("sandbox.memory", "512MiB");
    let result = yard.start(job).await?.wait().await?;
    for fork in &result.results {
        println!("fork {}: {}, {:?}", fork.fork_num, fork.status, fork.diff.as_ref().map(|diff| diff.files));
    }
    println!("the first still has {} files", one.list_files("/workspace").await?.len());
    println!("destroyed {}", manager.destroy_all().await?);
    Ok(())
}
