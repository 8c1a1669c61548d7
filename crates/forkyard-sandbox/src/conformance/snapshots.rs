//! Snapshots, children, archives.

use std::time::Duration;

use forkyard_core::{Attempt, SnapshotId};

use super::{Case, CaseResult, Ctx, case, ensure, ensure_eq, sh};
use crate::{ErrorKind, ExecRequest, ForkCost, Labels, Root, SandboxSpec, SnapshotMode};

pub fn cases() -> Vec<Case> {
    vec![
        case!(a_child_starts_from_the_snapshot, |c| c.snapshot),
        case!(a_background_writer_is_never_seen, |c| c.snapshot),
        case!(many_snapshots_of_one_sandbox, |c| c.snapshot),
        case!(export_and_import, |c| c.snapshot),
        case!(an_unknown_snapshot_is_refused, |c| c.snapshot),
    ]
}

fn name(ctx: &Ctx) -> SnapshotId {
    SnapshotId::new(ctx.id().as_str()).expect("the same letters")
}

fn child_of(ctx: &Ctx, snapshot: &SnapshotId) -> SandboxSpec {
    SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..ctx.spec.clone() }
}

async fn a_child_starts_from_the_snapshot(ctx: &Ctx) -> CaseResult {
    let parent = ctx.sandbox().await?;
    sh(&parent, "mkdir d; echo one > d/f; echo gone > g; rm g; mkdir r; echo x > r/y; rm -r r; mkdir r; chmod 000 d/f").await?;
    let (first, labels) = (name(ctx), Labels::from([("run".into(), "x".into())]));
    let info = parent.snapshot(&first, &labels).await?;
    ensure_eq!(parent.snapshot(&first, &Labels::new()).await?, info);
    ensure!(ctx.other.snapshots().await?.contains(&info), "not listed");
    sh(&parent, "chmod 644 d/f; echo two > d/f; echo new > n").await?;
    let child = ctx.sandbox_with(&child_of(ctx, &first)).await?;
    ensure_eq!(sh(&child, "chmod 644 d/f; cat d/f; ls r g n 2>/dev/null").await?.out, "one\nr:\n");
    sh(&child, "echo three > d/f").await?;
    let second = name(ctx);
    child.snapshot(&second, &Labels::new()).await?;
    let grandchild = ctx.sandbox_with(&child_of(ctx, &second)).await?;
    ensure_eq!(sh(&grandchild, "cat d/f").await?.out, "three\n");
    ensure_eq!(sh(&parent, "cat d/f").await?.out, "two\n");
    for snapshot in [&first, &first, &second] {
        ctx.provider.remove_snapshot(snapshot).await?;
    }
    ensure!(!ctx.provider.snapshots().await?.contains(&info), "still listed");
    ensure_eq!(sh(&grandchild, "cat d/f; echo more >> d/f; cat d/f").await?.out, "three\nthree\nmore\n");
    Ok(())
}

async fn a_background_writer_is_never_seen(ctx: &Ctx) -> CaseResult {
    let parent = ctx.sandbox().await?;
    let script = "exec 3>>log 4>>last; i=0; while :; do i=$((i+1)); echo $i >&3; echo $i >&4; done";
    let _writer = parent.exec(ExecRequest::shell(script)).await?;
    let grows_beyond = async |size| {
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while parent.stat("last").await.map_or(0, |info| info.size) <= size {
            ensure!(tokio::time::Instant::now() < limit, "the writer does not go on");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    };
    grows_beyond(1000).await?;
    let snapshot = name(ctx);
    let info = parent.snapshot(&snapshot, &Labels::new()).await?;
    ensure_eq!(info.mode, SnapshotMode::Copied);
    let child = ctx.sandbox_with(&child_of(ctx, &snapshot)).await?;
    let first = sh(&child, "wc -c < log").await?.out;
    // Both files are of one moment: between two lines of the writer, the first may be one ahead.
    let ends = sh(&child, "tail -n 1 log; tail -n 1 last").await?.out;
    let ends: Vec<u64> = ends.lines().filter_map(|line| line.parse().ok()).collect();
    let [log, last] = ends[..] else {
        return Err(super::Failed::new(format!("the copies end with {ends:?}")));
    };
    ensure!(log == last || log == last + 1, "copies of two moments: {log} and {last}");
    grows_beyond(parent.stat("last").await?.size).await?;
    ensure_eq!(sh(&child, "wc -c < log").await?.out, first);
    ctx.provider.remove_snapshot(&snapshot).await?;
    Ok(())
}

async fn many_snapshots_of_one_sandbox(ctx: &Ctx) -> CaseResult {
    // More than the depth at which layers are merged.
    const COUNT: usize = 30;
    let sandbox = ctx.sandbox().await?;
    let mut names = Vec::new();
    for i in 0..COUNT {
        sh(
            &sandbox,
            &format!(
                "echo {i} > f{i}; echo {i} > same; rm -f f{}; mkdir -p d; rm -rf d; mkdir d; touch d/{i}; rm -rf e",
                i.wrapping_sub(2)
            ),
        )
        .await?;
        let snapshot = name(ctx);
        sandbox.snapshot(&snapshot, &Labels::new()).await?;
        names.push(snapshot);
    }
    for i in [0, 10, 20, COUNT - 1] {
        let child = ctx.sandbox_with(&child_of(ctx, &names[i])).await?;
        let files: Vec<String> =
            [i.wrapping_sub(1), i].iter().filter(|n| **n < COUNT).map(|n| format!("f{n}")).collect();
        let output = sh(&child, "cat same; ls d; ls -d f* | sort -V").await?.out;
        ensure_eq!(output, format!("{i}\n{i}\n{}\n", files.join("\n")));
    }
    // What is not merged is refused as an archive.
    let dir = tempfile::tempdir()?;
    let (archive, again) = (dir.path().join("archive"), name(ctx));
    ctx.provider.export_snapshot(&names[COUNT - 1], &archive).await?;
    ctx.provider.import_snapshot(&again, &archive, None).await?;
    let child = ctx.sandbox_with(&child_of(ctx, &again)).await?;
    ensure_eq!(sh(&child, "cat same; ls d").await?.out, format!("{0}\n{0}\n", COUNT - 1));
    names.push(again);
    for snapshot in &names {
        ctx.provider.remove_snapshot(snapshot).await?;
    }
    ensure_eq!(sh(&sandbox, "cat same").await?.out, format!("{}\n", COUNT - 1));
    Ok(())
}

async fn export_and_import(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "mkdir -p d/e; printf 'b\\000\\377' > d/e/bin; ln -s /etc/passwd link; ln d/e/bin hard; truncate -s 1G sparse
        touch \"$(printf 'odd\\nname')\"; chmod 750 d; echo x > -dash; rm -rf /etc/fonts; touch -d '2001-02-03 04:05:06' d/e/bin";
    sh(&sandbox, script).await?;
    let (without, from, to) = (name(ctx), name(ctx), name(ctx));
    let dir = tempfile::tempdir().map_err(|e| super::Failed::new(e.to_string()))?;
    let archive = dir.path().join("archive");
    let bytes_of = |path: &std::path::Path| std::fs::metadata(path).map_or(u64::MAX, |m| m.len());
    // An archive holds what the sandbox started from too: only what these files add to it counts.
    let empty = ctx.sandbox().await?;
    empty.snapshot(&without, &Labels::new()).await?;
    ctx.provider.export_snapshot(&without, &archive).await?;
    ctx.provider.remove_snapshot(&without).await?;
    let before = bytes_of(&archive);
    std::fs::remove_file(&archive).map_err(|e| super::Failed::new(e.to_string()))?;
    sandbox.snapshot(&from, &Labels::new()).await?;
    ctx.provider.export_snapshot(&from, &archive).await?;
    let added = bytes_of(&archive).saturating_sub(before);
    // Whoever keeps layers writes only what they hold; others write whole files, and pack them.
    let bound = if ctx.provider.capabilities().fork == ForkCost::Constant { 64 << 10 } else { 256 << 20 };
    ensure!(added < bound, "holes were written out: {added} bytes for a few names");
    ctx.provider.import_snapshot(&to, &archive, None).await?;
    let child = ctx.sandbox_with(&child_of(ctx, &to)).await?;
    let look = "cd /workspace; ls -lA --time-style=+%s . d d/e; stat -c %h hard; od -c hard; ls /etc/fonts";
    let (want, got) = (sh(&sandbox, look).await?, sh(&child, look).await?);
    ensure_eq!(got.out.replace("total 4\n", ""), want.out.replace("total 4\n", ""));
    let bytes = std::fs::read(&archive).map_err(|e| super::Failed::new(e.to_string()))?;
    for broken in [&bytes[..bytes.len() / 2], b"", b"{}\n", &bytes[..bytes.len() - 1]] {
        let path = dir.path().join("broken");
        std::fs::write(&path, broken).map_err(|e| super::Failed::new(e.to_string()))?;
        let refused = ctx.provider.import_snapshot(&name(ctx), &path, None).await.err();
        ensure_eq!(refused.map(|e| e.kind), Some(ErrorKind::Invalid));
    }
    let missing = ctx.provider.import_snapshot(&name(ctx), &dir.path().join("missing"), None).await.err();
    ensure_eq!(missing.map(|e| e.kind), Some(ErrorKind::NotFound));
    for snapshot in [&from, &to] {
        ctx.provider.remove_snapshot(snapshot).await?;
    }
    Ok(())
}

async fn an_unknown_snapshot_is_refused(ctx: &Ctx) -> CaseResult {
    let spec = child_of(ctx, &name(ctx));
    let error = ctx.provider.create(&ctx.id(), Attempt(1), &spec).await.map(drop).err();
    ensure_eq!(error.map(|e| e.kind), Some(ErrorKind::NotFound));
    let exported = ctx.provider.export_snapshot(&name(ctx), std::path::Path::new("/nowhere")).await.err();
    ensure_eq!(exported.map(|e| e.kind), Some(ErrorKind::NotFound));
    Ok(())
}
