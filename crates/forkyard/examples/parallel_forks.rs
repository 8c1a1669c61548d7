//! The same task in three forks of a repository: progress while they work, a ranking, the best one as a branch.
//!
//! `cargo run --example parallel_forks`

mod common;
#[path = "common/repository.rs"]
mod repository;

use forkyard::{Job, NetworkMode, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, home) = common::open().await?;
    let repo = repository::make(home.path());

    let job = Job::new(&repo, "The test fails. Find out why and correct it.")
        .forks(3)
        .model(common::model("sum"))
        .network(NetworkMode::None)
        .verify("sh tests/run.sh")
        .protect("tests/**")
        .budget(5.0);
    let mut run = yard.start(job).await?;
    while let Some(p) = run.next().await? {
        println!("{} pending, {} at work, {} ended", p.pending, p.in_progress, p.completed + p.failed);
    }

    let result = run.wait().await?;
    for fork in &result.results {
        let verified = if fork.verified == Some(true) { "verified" } else { "not verified" };
        println!("fork {}: {}, {verified}, ${:.4}", fork.fork_num, fork.status, fork.total_cost);
    }
    println!(
        "{:.0} % succeeded, {:.1} turns on average",
        result.totals.success_rate * 100.0,
        result.totals.average_turns
    );
    if let Some(best) = result.best() {
        println!("the best is fork {}", best.fork_num);
        print!("{}", String::from_utf8_lossy(&run.patch(best.fork_num).await?));
        run.apply_as_branch(best.fork_num, "forkyard/best").await?;
    }
    Ok(())
}
