//! Made, found, attached to, stopped, ended.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::{Attempt, CallId, Millis, SandboxId};

use super::attacks::stage::{bring_probe, say, to_proxy};
use super::{Case, CaseResult, Ctx, Failed, case, ensure, ensure_eq, run, sh};
use crate::{
    ErrorKind, ExecRequest, Labels, Lifetime, LimitMeans, Limits, LimitsOverride, NetworkMode, Provider,
    SandboxError, SandboxSpec, SandboxStatus,
};

pub fn cases() -> Vec<Case> {
    vec![
        case!(create_is_idempotent),
        case!(of_several_creators_one_makes_it),
        case!(destroy_twice_and_use_after),
        case!(list_by_label),
        case!(a_newer_attempt_takes_over, |c| c.attach && c.fencing),
        case!(calls_are_handed_over, |c| c.attach),
        case!(stop_keeps_files, |c| c.start_stop),
        case!(a_start_does_not_move_the_deadline, |c| c.start_stop),
        case!(the_deadline_ends_it),
        case!(stats_and_health),
        case!(several_are_asked_and_ended_by_label),
        case!(stats_count_the_network, |c| c.network_modes.contains(&NetworkMode::Isolated)),
        case!(pause_and_resume, |c| c.pause),
        case!(limits_are_recorded),
        case!(own_limits_go_over_the_defaults),
    ]
}

async fn create_is_idempotent(ctx: &Ctx) -> CaseResult {
    let id = ctx.id();
    let first = ctx.provider.create(&id, Attempt(1), &ctx.spec).await?;
    sh(&first, "echo mine > mark").await?;
    let again = ctx.provider.create(&id, Attempt(1), &ctx.spec).await?;
    ensure_eq!(sh(&again, "cat mark").await?.out, "mine\n");
    ensure_eq!(sh(&first, "cat mark").await?.out, "mine\n");
    let mine = ctx.provider.list(&Labels::new()).await?.into_iter().filter(|i| i.id == id).count();
    ensure_eq!(mine, 1);
    Ok(())
}

async fn of_several_creators_one_makes_it(ctx: &Ctx) -> CaseResult {
    let id = ctx.id();
    let create = |provider: &Arc<dyn Provider>, attempt| {
        let (provider, id, spec) = (Arc::clone(provider), id.clone(), ctx.spec.clone());
        async move { provider.create(&id, Attempt(attempt), &spec).await }
    };
    let (one, two, three) =
        tokio::join!(create(&ctx.provider, 2), create(&ctx.other, 2), create(&ctx.provider, 2));
    for (number, sandbox) in [one?, two?, three?].iter().enumerate() {
        ensure_eq!(sh(sandbox, "echo x >> marks; wc -l < marks").await?.out.trim(), (number + 1).to_string());
    }
    let refused = create(&ctx.other, 1).await.err();
    ensure_eq!(refused.map(|e| e.kind), Some(ErrorKind::Stale));
    // Whoever is too late harms nobody.
    let sandbox = ctx.provider.attach(&id, Attempt(2)).await?;
    ensure_eq!(sh(&sandbox, "wc -l < marks").await?.out.trim(), "3");
    ensure_eq!(ctx.provider.list(&Labels::new()).await?.iter().filter(|i| i.id == id).count(), 1);
    Ok(())
}

async fn destroy_twice_and_use_after(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let id = sandbox.id().clone();
    ctx.provider.destroy(&id).await?;
    ctx.provider.destroy(&id).await?;
    ctx.provider.destroy(&SandboxId::new("neverwas").expect("an id")).await?;
    let kind = |r: Result<_, crate::SandboxError>| r.err().map(|e| e.kind);
    ensure_eq!(kind(sandbox.exec(ExecRequest::new(["true"])).await.map(drop)), Some(ErrorKind::NotFound));
    ensure_eq!(kind(ctx.provider.attach(&id, Attempt(9)).await.map(drop)), Some(ErrorKind::NotFound));
    ensure!(ctx.provider.list(&Labels::new()).await?.iter().all(|i| i.id != id), "it is still listed");
    Ok(())
}

async fn list_by_label(ctx: &Ctx) -> CaseResult {
    let label =
        |run: &str, fork: &str| Labels::from([("run".into(), run.into()), ("fork".into(), fork.into())]);
    for (run, fork) in [("a", "0"), ("a", "1"), ("b", "0")] {
        let spec = SandboxSpec { labels: label(run, fork), ..ctx.spec.clone() };
        ctx.sandbox_with(&spec).await?;
    }
    let count = async |labels: Labels| Ok::<_, super::Failed>(ctx.other.list(&labels).await?.len());
    ensure_eq!(count(Labels::from([("run".into(), "a".into())])).await?, 2);
    ensure_eq!(count(label("a", "1")).await?, 1);
    ensure_eq!(count(label("c", "1")).await?, 0);
    Ok(())
}

async fn a_newer_attempt_takes_over(ctx: &Ctx) -> CaseResult {
    let old = ctx.sandbox().await?;
    let new = ctx.other.attach(old.id(), Attempt(2)).await?;
    let stale = |what: &str, error: Option<SandboxError>| {
        ensure_eq!((what, error.as_ref().map(|e| e.kind)), (what, Some(ErrorKind::Stale)));
        ensure!(error.as_ref().is_some_and(|e| e.hint.is_some()), "{what}: no fix in {error:?}");
        Ok::<_, Failed>(())
    };
    stale("a command", old.exec(ExecRequest::new(["true"])).await.map(drop).err())?;
    stale("a file", old.read_file("/etc/passwd", 0, 1).await.err())?;
    stale("an attach", ctx.provider.attach(old.id(), Attempt(1)).await.map(drop).err())?;
    ensure_eq!(new.info().await?.attempt, Attempt(2));
    ensure_eq!(sh(&new, "echo works").await?.out, "works\n");
    Ok(())
}

async fn calls_are_handed_over(ctx: &Ctx) -> CaseResult {
    let old = ctx.sandbox().await?;
    let call = |name: &str| CallId::new(name).expect("a call id");
    let done = run(&old, ExecRequest::shell("echo out; echo err >&2; exit 7; ").call(call("done"))).await?;
    ensure_eq!(done.result.exit_code, 7);
    let script = "echo x >> count; echo begun; while [ ! -e go ]; do sleep 0.02; done; echo ended";
    let mut running = old.exec(ExecRequest::shell(script).call(call("running"))).await?;
    ensure!(running.events.recv().await.is_some(), "no output");
    // Its owner is gone, and with it the reader.
    drop(running);
    let new = ctx.other.attach(old.id(), Attempt(2)).await?;
    let mut calls = new.calls().await?;
    calls.sort();
    ensure_eq!(calls, vec![call("done"), call("running")]);
    let again = run(&new, ExecRequest::shell("echo never").call(call("done"))).await?;
    ensure_eq!((again.result, again.out, again.err), (done.result, "out\n".into(), "err\n".into()));
    new.write_file("go", "".into(), None).await?;
    let rest = run(&new, ExecRequest::shell("echo never").call(call("running"))).await?;
    ensure_eq!((rest.result.exit_code, rest.out), (0, "begun\nended\n".to_string()));
    ensure_eq!(sh(&new, "cat count").await?.out, "x\n");
    new.forget(&call("done")).await?;
    new.forget(&call("running")).await?;
    new.forget(&call("unknown")).await?;
    ensure!(new.calls().await?.is_empty(), "calls are kept after they were forgotten");
    Ok(())
}

async fn stop_keeps_files(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let id = sandbox.id().clone();
    sh(&sandbox, "echo kept > file; echo tmp > /tmp/file").await?;
    ctx.provider.stop(&id).await?;
    let older = ctx.other.start(&id, Attempt(0)).await.map(drop).err();
    ensure!(
        older.is_some_and(|e| e.kind == ErrorKind::Stale && e.hint.is_some()),
        "an older attempt starts it"
    );
    let listed = ctx.provider.list(&Labels::new()).await?.into_iter().find(|i| i.id == id);
    ensure_eq!(listed.map(|i| i.status), Some(SandboxStatus::Stopped));
    ensure_eq!(
        sandbox.exec(ExecRequest::new(["true"])).await.map(drop).err().map(|e| e.kind),
        Some(ErrorKind::NotFound)
    );
    let back = ctx.other.start(&id, Attempt(2)).await?;
    ensure_eq!(sh(&back, "cat file /tmp/file").await?.out, "kept\ntmp\n");
    ensure_eq!(back.info().await?.status, SandboxStatus::Running);
    Ok(())
}

async fn a_start_does_not_move_the_deadline(ctx: &Ctx) -> CaseResult {
    let refused = async |id: &SandboxId| {
        let error = ctx.other.start(id, Attempt(3)).await.map(drop).err();
        ensure_eq!(error.as_ref().map(|e| e.kind), Some(ErrorKind::NotFound));
        ensure!(error.as_ref().is_some_and(|e| e.hint.is_some()), "no fix in {error:?}");
        Ok::<_, Failed>(())
    };
    let lives = |ms| SandboxSpec { lifetime: Lifetime(Millis(ms)), ..ctx.spec.clone() };
    let long = ctx.sandbox().await?;
    let before = long.info().await?.deadline;
    ctx.provider.stop(long.id()).await?;
    let back = ctx.other.start(long.id(), Attempt(2)).await?;
    ensure_eq!(back.info().await?.deadline, before);
    // One that is stopped when its time is over, and one that ends by it.
    let (stopped, dead) = (ctx.sandbox_with(&lives(2000)).await?, ctx.sandbox_with(&lives(1500)).await?);
    let over = stopped.info().await?.deadline.max(dead.info().await?.deadline);
    ctx.provider.stop(stopped.id()).await?;
    while crate::now() <= over || dead.exec(ExecRequest::new(["true"])).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    refused(stopped.id()).await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        match ctx.provider.list(&Labels::new()).await?.into_iter().find(|i| i.id == *dead.id()) {
            Some(info) if info.status == SandboxStatus::Running => {
                ensure!(tokio::time::Instant::now() < limit, "it runs on");
            }
            Some(_) | None => break,
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    refused(dead.id()).await
}

async fn the_deadline_ends_it(ctx: &Ctx) -> CaseResult {
    let spec = SandboxSpec { lifetime: Lifetime(Millis(1500)), ..ctx.spec.clone() };
    let sandbox = ctx.sandbox_with(&spec).await?;
    let command = sandbox.exec(ExecRequest::new(["sleep", "600"])).await?;
    // Nobody helps: the sandbox ends its own commands.
    let ended = tokio::time::timeout(Duration::from_secs(60), command.output()).await;
    ensure!(ended.is_ok(), "a command outlived the deadline");
    let limit = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        match ctx.provider.list(&Labels::new()).await?.into_iter().find(|i| i.id == *sandbox.id()) {
            None => return Ok(()),
            Some(info) if info.status == SandboxStatus::Dead => return Ok(()),
            Some(info) => ensure!(tokio::time::Instant::now() < limit, "it is {:?}", info.status),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn stats_and_health(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    ensure!(sandbox.health().await?.healthy, "not healthy");
    sandbox.stats().await?;
    sh(
        &sandbox,
        "dd if=/dev/zero of=big bs=1M count=8 2>/dev/null; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done",
    )
    .await?;
    let stats = sandbox.stats().await?;
    ensure!(stats.disk_bytes >= 8 << 20, "disk is {}", stats.disk_bytes);
    ensure!(stats.cpu_percent > 0.0, "cpu is {}", stats.cpu_percent);
    // Files that were written and read are no memory in use: the kernel gives theirs back when somebody needs it.
    sh(&sandbox, "dd if=/dev/zero of=large bs=1M count=200 2>/dev/null; cat large > /dev/null").await?;
    let stats = sandbox.stats().await?;
    ensure!(stats.memory_bytes < 100 << 20, "memory is {} with nothing running", stats.memory_bytes);
    let holds = "(head -c 33554432 /dev/zero; echo up >&2; sleep 600) | tail -c 33554432";
    let mut holder = sandbox.exec(ExecRequest::shell(holds)).await?;
    ensure!(holder.events.recv().await.is_some(), "it did not start");
    let stats = sandbox.stats().await?;
    ensure!(stats.memory_bytes >= 24 << 20, "memory is {}", stats.memory_bytes);
    ensure!(stats.processes >= 2, "there are {} processes", stats.processes);
    drop(holder);
    ctx.provider.destroy(sandbox.id()).await?;
    ensure!(!sandbox.health().await?.healthy, "healthy after it was destroyed");
    Ok(())
}

async fn several_are_asked_and_ended_by_label(ctx: &Ctx) -> CaseResult {
    let labelled = |run: &str| {
        let labels = Labels::from([("run".into(), run.into())]);
        (SandboxSpec { labels: labels.clone(), ..ctx.spec.clone() }, labels)
    };
    let ((spec, mine), (other_spec, theirs)) = (labelled("mine"), labelled("theirs"));
    for bytes in [1, 2, 3] {
        let sandbox = ctx.sandbox_with(&spec).await?;
        sh(&sandbox, &format!("dd if=/dev/zero of=big bs=1M count={} 2>/dev/null", bytes * 4)).await?;
    }
    let kept = ctx.sandbox_with(&other_spec).await?;
    // By another process, which made none of them, and of all at once.
    let found = ctx.other.list(&mine).await?;
    ensure_eq!(found.len(), 3);
    let asked = found.iter().map(async |info| {
        let sandbox = ctx.other.observe(&info.id, info.attempt).await?;
        let (stats, health) = tokio::join!(sandbox.stats(), sandbox.health());
        ensure!(health?.healthy, "{} is not healthy", info.id);
        Ok::<_, Failed>(stats?.disk_bytes)
    });
    let mut disks = futures::future::join_all(asked).await.into_iter().collect::<Result<Vec<_>, Failed>>()?;
    disks.sort_unstable();
    for (disk, bytes) in disks.iter().zip([1u64, 2, 3]) {
        ensure!(*disk >= bytes * (4 << 20), "of three that hold 4, 8 and 12 MiB: {disks:?}");
    }
    let ended = found.iter().map(|info| ctx.other.destroy(&info.id));
    futures::future::join_all(ended).await.into_iter().collect::<crate::Result<Vec<()>>>()?;
    ensure_eq!(ctx.provider.list(&mine).await?.len(), 0);
    ensure_eq!(ctx.provider.list(&theirs).await?.len(), 1);
    ensure!(kept.health().await?.healthy, "one with another label went with them");
    Ok(())
}

async fn stats_count_the_network(ctx: &Ctx) -> CaseResult {
    const BODY: u64 = 32 << 10;
    let site = ctx.stage()?.origin("counted.test").await?;
    let sandbox = ctx.sandbox_with(&SandboxSpec { network: site.allowed(""), ..ctx.spec.clone() }).await?;
    bring_probe(&sandbox).await?;
    let before = sandbox.stats().await?;
    ensure_eq!((before.network_rx_bytes, before.network_tx_bytes), (0, 0));
    let host = site.authority();
    let post = format!(
        "POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{}\r\n\r\n",
        BODY + 4,
        "x".repeat(BODY as usize)
    );
    let mut last = before;
    for _ in 0..2 {
        let answer = say(to_proxy(&sandbox).await?, &post).await;
        ensure!(answer.ends_with("hello"), "not answered: {answer:?}");
        let now = sandbox.stats().await?;
        let (sent, got) = (now.network_tx_bytes, now.network_rx_bytes);
        ensure!(sent >= last.network_tx_bytes + BODY, "{sent} sent, {} before", last.network_tx_bytes);
        // What is sent is not what comes back.
        ensure!(
            got > last.network_rx_bytes && got < last.network_rx_bytes + BODY,
            "{got} received, {} before",
            last.network_rx_bytes
        );
        last = now;
    }
    Ok(())
}

async fn pause_and_resume(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "i=0; while :; do i=$((i+1)); echo $i > n.tmp; mv n.tmp n; done";
    let _counting = sandbox.exec(ExecRequest::shell(script)).await?;
    let count = async || -> Result<u64, super::Failed> {
        loop {
            match sandbox.read_file("n", 0, 100).await {
                Ok(text) if !text.is_empty() => {
                    return Ok(String::from_utf8_lossy(&text).trim().parse().unwrap_or(0));
                }
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    count().await?;
    sandbox.pause().await?;
    ensure_eq!(sandbox.info().await?.status, SandboxStatus::Paused);
    let (first, second) = (count().await?, {
        tokio::time::sleep(Duration::from_millis(100)).await;
        count().await?
    });
    ensure_eq!(first, second);
    sandbox.resume().await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(30);
    while count().await? == second {
        ensure!(tokio::time::Instant::now() < limit, "it does not go on");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ensure_eq!(sandbox.info().await?.status, SandboxStatus::Running);
    Ok(())
}

async fn limits_are_recorded(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = 256 << 20;
    let info = ctx.sandbox_with(&spec).await?.info().await?;
    ensure_eq!(info.limits, spec.limits);
    ensure!(info.achieved.memory != LimitMeans::None, "memory is not limited");
    ensure!(info.achieved.processes != LimitMeans::None, "processes are not limited");
    ensure!(info.achieved.disk != LimitMeans::None, "the disk is not limited");
    ensure!(info.deadline > info.created_at, "no deadline");
    Ok(())
}

async fn own_limits_go_over_the_defaults(ctx: &Ctx) -> CaseResult {
    let defaults = Limits { memory_bytes: 128 << 20, processes: 100, ..ctx.spec.limits };
    let own = LimitsOverride { memory_bytes: Some(400 << 20), ..LimitsOverride::default() };
    let plain = ctx.sandbox_with(&SandboxSpec { limits: defaults, ..ctx.spec.clone() }).await?;
    let differs = ctx.sandbox_with(&SandboxSpec { limits: defaults.with(own), ..ctx.spec.clone() }).await?;
    ensure_eq!(plain.info().await?.limits, defaults);
    ensure_eq!(differs.info().await?.limits, Limits { memory_bytes: 400 << 20, ..defaults });
    // It holds for each as it was said for each. It is held for as long as a watchdog needs to see it.
    let holds = "(head -c 200000000 /dev/zero; sleep 2) | tail -c 200000000 | wc -c";
    ensure!(sh(&plain, holds).await?.out.trim() != "200000000", "200 MB fit into 128 MiB");
    ensure_eq!(sh(&differs, holds).await?.out.trim(), "200000000");
    Ok(())
}
