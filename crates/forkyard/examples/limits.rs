//! Limits that hold, and what sandboxes use.
//!
//! `cargo run --example limits`

mod common;

use std::time::Duration;

use forkyard::{Command, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let manager = yard.sandboxes();
    let config = SandboxConfig::new().memory_mb(64).cpus(0.5).processes(32).network(NetworkMode::None);
    let sandbox = manager.create(config).await?;

    let fits = sandbox.execute(Command::shell("head -c 8m /dev/zero | tail -c 1 | wc -c")).await?;
    println!("within the limit: {}", fits.stdout.trim());
    // The shell keeps all of it in memory.
    let hog = Command::shell("x=$(head -c 512m /dev/zero | tr '\\0' a); echo ${#x}");
    let hog = sandbox.execute(hog.timeout(Duration::from_secs(60))).await?;
    println!("half a gigabyte in 64 MiB: killed: {}", hog.oom_killed || !hog.success());
    let bomb = sandbox.execute(
        Command::shell("for i in $(seq 100); do sleep 2 & done; wait").timeout(Duration::from_secs(20)),
    );
    println!("a hundred processes where 32 may be: worked: {}", bomb.await?.success());

    for (id, stats) in manager.stats_all().await? {
        let s = stats?;
        assert_eq!(id, sandbox.id());
        println!("memory under 64 MiB: {}, processes: {}", s.memory_bytes <= 64 << 20, s.processes < 32);
    }
    manager.destroy_all().await?;
    Ok(())
}
