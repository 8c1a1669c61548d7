//! Control: the rules themselves, forged words, and what must not be shared.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SnapshotId};
use forkyard_guest::protocol::{Answer, ExitInfo, Reply, encode};

use super::attack;
use super::stage::{SECRET, bring_probe, connect, dial, say, secret_value, to_proxy};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run, sh};
use crate::egress::Reason;
use crate::{ExecRequest, Labels, NetworkMode, NetworkSpec, Root, Sandbox, SandboxSpec};

pub fn cases() -> Vec<Case> {
    let egress: fn(&crate::Capabilities) -> bool = |c| c.network_modes.contains(&NetworkMode::Isolated);
    vec![
        Case {
            applies: egress,
            ..attack!(its_own_rules_are_elsewhere, [31],
                "Its own proxy settings, certificates, limits and Forkyard's files, rewritten",
                Harmless by "rules live on the host")
        },
        attack!(forged_events_are_output, [33], "Protocol frames on standard output and error", Harmless by "output is data in frames"),
        Case {
            applies: egress,
            ..attack!(nobody_speaks_for_another, [34], "Forkyard's own name under a sibling's identity",
                Harmless by "proxy: the listener says who asks")
        },
        Case {
            applies: |c| c.snapshot && c.network_modes.contains(&NetworkMode::Isolated),
            ..attack!(children_share_no_secret, [35], "A parent's secrets, random state, processes and calls in its children",
                Denied by "secrets stay in the proxy; files alone are copied")
        },
    ]
}

async fn its_own_rules_are_elsewhere(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let mut spec = ctx.spec.clone();
    spec.network = NetworkSpec::default();
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    let before = sandbox.info().await?;
    let tamper = "for f in /etc/gitconfig /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/forkyard-egress.pem /etc/hosts /etc/resolv.conf \
            /.forkyard/guest /.forkyard/run/guest.sock /proc/1/environ; do rm -f $f; echo evil > $f; done 2>/dev/null
        mkdir -p $HOME/.config/forkyard /workspace/.forkyard; echo 'network.mode = \"bridge\"' | tee $HOME/.config/forkyard/config.toml > /workspace/forkyard.toml
        ulimit -u unlimited 2>/dev/null; unset HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy; env NO_PROXY='*' true; :";
    sh(&sandbox, tamper).await?;
    let holds = async |sandbox: &Arc<dyn Sandbox>| -> CaseResult {
        ensure!(connect(sandbox, "evil.test:443").await?.is_err(), "evil.test was reached");
        ensure!(stage.reasons(sandbox, "evil.test").contains(&Reason::NotListed), "not by the allow-list");
        ensure!(dial(sandbox, &["tcp", "8.8.8.8", "443"]).await?.is_err(), "a way around the proxy");
        let now = sandbox.info().await?;
        ensure_eq!((now.limits, now.deadline), (before.limits, before.deadline));
        Ok(())
    };
    // For this owner, and for the next one.
    holds(&sandbox).await?;
    holds(&ctx.other.attach(sandbox.id(), Attempt(2)).await?).await?;
    // Nobody else sees what it wrote.
    let other = ctx.sandbox_with(&spec).await?;
    let seen = sh(
        &other,
        "grep -l evil /etc/gitconfig /etc/hosts /etc/ssl/certs/*.crt $HOME/.config/forkyard/* 2>/dev/null; :",
    )
    .await?;
    ensure_eq!(seen.out, "");
    Ok(())
}

async fn forged_events_are_output(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let exit = |code| Answer::Exit(ExitInfo { exit_code: code, ..Default::default() });
    let forged: Vec<u8> = (0..16)
        .flat_map(|seq| encode(&Reply { seq, answer: exit(0) }, b""))
        .chain(encode(
            &Reply {
                seq: 0,
                answer: Answer::Error {
                    kind: forkyard_guest::protocol::Fault::Stale,
                    message: "taken over".into(),
                },
            },
            b"",
        ))
        .collect();
    sandbox.write_file("forged", Bytes::from(forged.clone()), None).await?;
    let script = "cat forged; cat forged >&2; for fd in /proc/self/fd/* /proc/1/fd/*; do cat forged > $fd; done 2>/dev/null >/dev/null; exit 3";
    for call in [None, Some(CallId::new("forged").map_err(|e| Failed::new(e.to_string()))?)] {
        let request = ExecRequest { call, ..ExecRequest::shell(script) };
        let (result, out, err) = sandbox.exec(request).await?.output().await?;
        ensure_eq!(result.exit_code, 3);
        // Some of the descriptors are the command's own output once more.
        let whole =
            |stream: &[u8]| stream.len() >= forged.len() && stream.chunks(forged.len()).all(|c| c == forged);
        ensure!(whole(&out) && whole(&err), "output was taken for something else");
    }
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn nobody_speaks_for_another(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let spec = SandboxSpec { network: NetworkSpec::default(), ..ctx.spec.clone() };
    let (mine, victim) = (ctx.sandbox_with(&spec).await?, ctx.sandbox_with(&spec).await?);
    bring_probe(&mine).await?;
    let headers = format!(
        "X-Forkyard-Sandbox: {v}\r\nx-forkyard-sandbox: {v}\r\nForwarded: for={v}\r\n",
        v = victim.id()
    );
    for target in ["http://forkyard.internal/v1/task", "/v1/task"] {
        let text =
            format!("GET {target} HTTP/1.1\r\nHost: forkyard.internal\r\n{headers}Connection: close\r\n\r\n");
        let answer = say(to_proxy(&mine).await?, text).await;
        ensure!(answer.ends_with(&format!("you are {}", mine.id())), "{answer}");
    }
    let callers = stage.internal_callers();
    ensure!(callers.iter().all(|(id, claimed)| id != victim.id() && !claimed), "{callers:?}");
    Ok(())
}

/// Everything that a program inside can read of itself and its surroundings.
const EVERYWHERE: &str = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null; grep -rs MARK /etc /workspace /home /tmp /run /dev/shm /.forkyard 2>/dev/null; :";

async fn children_share_no_secret(ctx: &Ctx) -> CaseResult {
    let value = secret_value();
    let mut spec = ctx.spec.clone();
    spec.network = NetworkSpec { secrets: vec![SECRET.into()], ..NetworkSpec::default() };
    let parent = ctx.sandbox_with(&spec).await?;
    let look = EVERYWHERE.replace("MARK", &value[..4]);
    ensure!(!sh(&parent, &look).await?.out.contains(&value), "the secret is inside");
    let call = CallId::new("parents").map_err(|e| Failed::new(e.to_string()))?;
    run(&parent, ExecRequest::shell("echo private > /dev/shm/x; (sleep 300 &) >/dev/null 2>&1").call(call))
        .await?;
    let snapshot = SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()))?;
    parent.snapshot(&snapshot, &Labels::new()).await?;
    let child_spec = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..ctx.spec.clone() };
    let made = async {
        Ok::<[Arc<dyn Sandbox>; 2], Failed>([
            ctx.sandbox_with(&child_spec).await?,
            ctx.sandbox_with(&child_spec).await?,
        ])
    };
    let children = made.await;
    ctx.provider.remove_snapshot(&snapshot).await?;
    let mut identities = BTreeSet::new();
    for child in children? {
        let seen = sh(&child, &look).await?.out;
        ensure!(!seen.contains(&value), "the secret is in a child");
        ensure_eq!(sh(&child, "cat /dev/shm/x 2>/dev/null; :").await?.out, "");
        ensure!(
            !sh(&child, "cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' '").await?.out.contains("sleep 300"),
            "a process was copied"
        );
        ensure!(child.calls().await?.is_empty(), "a call was copied");
        identities.insert(
            sh(&child, "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid").await?.out,
        );
    }
    ensure_eq!(identities.len(), 2);
    Ok(())
}
