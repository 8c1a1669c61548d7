//! Processes that do not stay stopped, and that do not look like what they are.

use std::time::Duration;

use super::attack;
use super::memory::unless_it_ended;
use super::stage::{PROBE, bring_probe};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run, sh};
use crate::{ExecRequest, Sandbox};

pub fn cases() -> Vec<Case> {
    vec![
        attack!(headless_processes_have_memory, [23], "All the memory there is, in a process whose first thread has ended",
            Harmless by local memory "cgroup" else "watchdog" docker "cgroup"),
        attack!(who_goes_on_does_not_survive_a_cancel, [24], "Processes that are woken by timers when they are stopped, and have no first thread",
            Harmless by "supervisor: kills until nobody is left"),
        attack!(who_goes_on_has_no_more_processors, [25], "Work for processors in processes that are woken by timers when they are stopped",
            Harmless by local cpu "cgroup" else "watchdog, which kills who does not rest" docker "cgroup"),
        attack!(who_goes_on_is_paused, [25], "Work while the sandbox is paused, in processes that are woken by timers",
            Harmless by local "freezer, else supervisor, which kills who does not rest" docker "freezer"),
    ]
}

async fn headless_processes_have_memory(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = 128 << 20;
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    let request = ExecRequest::new([PROBE, "probe", "headless", "600"]);
    let taking = async {
        let output = run(&sandbox, request.timeout(Duration::from_secs(120))).await?;
        ensure!(!output.result.timed_out, "nobody stopped it");
        ensure_eq!((output.result.exit_code, output.out.as_str()), (137, ""));
        ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
        Ok(())
    };
    unless_it_ended(ctx, &*sandbox, taking.await).await
}

async fn size(sandbox: &dyn Sandbox, file: &str) -> Result<u64, Failed> {
    Ok(sandbox.stat(file).await.map_or(0, |info| info.size))
}

async fn who_goes_on_does_not_survive_a_cancel(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let request = ExecRequest::new([PROBE, "probe", "restless", "/workspace/alive"]);
    let output = run(&sandbox, request.timeout(Duration::from_secs(2))).await?;
    ensure!(output.result.timed_out, "it ended by itself: {}", output.result.exit_code);
    let before = size(&*sandbox, "alive").await?;
    ensure!(before > 0, "it did nothing");
    sh(&sandbox, "sleep 0.5").await?;
    ensure_eq!(size(&*sandbox, "alive").await?, before);
    ensure_eq!(sandbox.stats().await?.processes, 0);
    Ok(())
}

async fn who_goes_on_has_no_more_processors(ctx: &Ctx) -> CaseResult {
    const CPUS: f64 = 0.2;
    let mut spec = ctx.spec.clone();
    spec.limits.cpus = CPUS;
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    sandbox.stats().await?; // from here on
    let begun = std::time::Instant::now();
    let script = format!("{PROBE} probe restless a & {PROBE} probe restless b & wait");
    let output = run(&sandbox, ExecRequest::shell(script).timeout(Duration::from_secs(20))).await?;
    let took = begun.elapsed().as_secs_f64();
    let spent = sandbox.stats().await?.cpu_percent / 100.0 * took;
    // Whoever does not rest is killed before its time is over.
    ensure!(
        !output.result.timed_out || spent <= 1.5 * CPUS * took + 0.6,
        "{spent} s in {took} s, and not stopped"
    );
    // What others use is still watched then.
    let begun = std::time::Instant::now();
    let busy = "end=$(($(date +%s)+5)); while [ $(date +%s) -lt $end ]; do i=0; while [ $i -lt 4000 ]; do i=$((i+1)); done; done";
    run(&sandbox, ExecRequest::shell(format!("({busy}) & {busy}; wait")).timeout(Duration::from_secs(60)))
        .await?;
    let took = begun.elapsed().as_secs_f64();
    let spent = sandbox.stats().await?.cpu_percent / 100.0 * took;
    ensure!(spent <= 1.5 * CPUS * took + 0.6, "afterwards: {spent} s in {took} s");
    Ok(())
}

async fn who_goes_on_is_paused(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let request = ExecRequest::new([PROBE, "probe", "restless", "/workspace/alive"]);
    let running = sandbox.exec(request.timeout(Duration::from_secs(100))).await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    while size(&*sandbox, "alive").await? == 0 {
        ensure!(tokio::time::Instant::now() < limit, "the attempt did not start");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sandbox.pause().await?;
    let (mut before, mut same) = (0, 0);
    while same < 10 {
        ensure!(tokio::time::Instant::now() < limit, "it goes on while the sandbox is paused");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = size(&*sandbox, "alive").await?;
        (before, same) = (now, if now == before { same + 1 } else { 0 });
    }
    sandbox.resume().await?;
    drop(running);
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}
