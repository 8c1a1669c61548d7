//! A sandbox by hand: commands, files, a snapshot and a copy-on-write child.
//!
//! `cargo run --example sandbox`

mod common;

use std::time::Duration;

use forkyard::{Command, NetworkMode, Result, SandboxConfig};

#[tokio::main]
async fn main() -> Result<()> {
    let (yard, _home) = common::open().await?;
    let manager = yard.sandboxes().with_defaults(
        SandboxConfig::new()
            .memory_mb(512)
            .cpus(1.0)
            .timeout(Duration::from_secs(60))
            .network(NetworkMode::None),
    );
    // With Docker: SandboxConfig::new().provider(ProviderKind::Docker).image("node:20-alpine")
    let sandbox = manager.create(SandboxConfig::new().env("GREETING", "hello")).await?;

    let uname = sandbox.run("uname", ["-s"]).await?;
    println!("runs on {}", uname.stdout.trim());
    sandbox.write_file("/workspace/app.sh", "echo $GREETING from inside; exit 3\n").await?;
    let app = sandbox.run("sh", ["app.sh"]).await?;
    println!("said {:?} and ended with {}", app.stdout.trim(), app.exit_code);
    let slow = sandbox.execute(Command::shell("sleep 60").timeout(Duration::from_millis(200))).await?;
    println!("the slow one: exit code {}, timed out: {}", slow.exit_code, slow.timed_out);
    for file in sandbox.list_files("/workspace").await? {
        println!("{} ({} bytes)", file.name, file.size);
    }

    // A child has the files, and a life of its own.
    let snapshot = sandbox.snapshot().await?;
    let child = manager.create(SandboxConfig::new().snapshot(snapshot)?).await?;
    child.delete_file("/workspace/app.sh").await?;
    println!("the parent still has {} bytes of app.sh", sandbox.read_file("/workspace/app.sh").await?.len());

    for (id, health) in manager.health_all().await? {
        println!(
            "{} is well: {}",
            if id == child.id() { "the child" } else { "the parent" },
            health?.healthy
        );
    }
    println!("destroyed {}", manager.destroy_all().await?);
    Ok(())
}
