//! Memory that no process has mapped.

use std::time::Duration;

use super::attack;
use super::stage::{PROBE, bring_probe};
use crate::conformance::{Case, CaseResult, Ctx, ensure, ensure_eq, run, sh};
use crate::{ExecRequest, LimitMeans, Sandbox, SandboxStatus};

pub fn cases() -> Vec<Case> {
    vec![
        attack!(files_in_memory_are_contained, [23], "All the memory there is, as files that are open, only mapped, or on their way through a socket",
            Harmless by local memory "cgroup" else "watchdog: what it can't see holds what is missing" docker "cgroup"),
        attack!(kept_memory_is_contained, [23], "All the memory there is, as segments and semaphores of System V, in sockets, as tables of pages",
            Harmless by local memory "cgroup" else "watchdog: what it can't see holds what is missing" docker "cgroup"),
    ]
}

const MEMORY: u64 = 96 << 20;
/// What may be taken until somebody stops it, for machines that are slow to look and where others give memory back meanwhile.
const TAKEN: u64 = 16 * MEMORY;

async fn files_in_memory_are_contained(ctx: &Ctx) -> CaseResult {
    are_contained(ctx, &["file", "mapped", "passed", "shared"]).await
}

async fn kept_memory_is_contained(ctx: &Ctx) -> CaseResult {
    are_contained(ctx, &["segments", "semaphores", "sockets", "tables"]).await
}

async fn are_contained(ctx: &Ctx, ways: &[&str]) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = MEMORY;
    for way in ways {
        let sandbox = ctx.sandbox_with(&spec).await?;
        bring_probe(&sandbox).await?;
        let keep = ExecRequest::new([PROBE, "probe", "keep", way]).timeout(Duration::from_secs(60));
        let taking = async {
            let output = run(&sandbox, keep).await?;
            ensure!(!output.result.timed_out, "{way}: nobody stopped it");
            let taken = output.out.lines().count() as u64 * (1 << 20);
            ensure!((MEMORY / 4..TAKEN).contains(&taken), "{way}: {taken} bytes were taken");
            // Nothing of it is left that would stop the next one.
            let next = sh(&sandbox, "sleep 0.5; echo alive").await?;
            ensure_eq!((next.out.as_str(), next.result.oom_killed), ("alive\n", false));
            Ok(())
        };
        unless_it_ended(ctx, &*sandbox, taking.await).await?;
    }
    Ok(())
}

/// Where the kernel keeps the limit it takes whom it finds. While what it has killed gives its memory back that may be the guest
/// alone, and all of the sandbox has ended: which is what a program can do to its own sandbox, and to nothing else.
pub(super) async fn unless_it_ended(ctx: &Ctx, sandbox: &dyn Sandbox, result: CaseResult) -> CaseResult {
    if result.is_ok() {
        return result;
    }
    let listed = ctx.provider.list(&Default::default()).await?;
    let ended = listed.iter().any(|info| {
        info.id == *sandbox.id()
            && info.status == SandboxStatus::Dead
            && info.achieved.memory == LimitMeans::Kernel
    });
    if ended { Ok(()) } else { result }
}
