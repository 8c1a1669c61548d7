//! A secret of the host is put into requests that leave a sandbox, whoever serves its proxy, and never enters it.

use std::sync::Arc;

use forkyard_core::Attempt;

use super::attacks::stage::{Origin, SECRET, Stage, bring_probe, connect, say, secret_value};
use super::{Case, CaseResult, Ctx, case, ensure, ensure_eq, sh};
use crate::{ErrorKind, NetworkSpec, Sandbox, SandboxSpec};

pub fn cases() -> Vec<Case> {
    vec![
        case!(a_secret_is_put_in_by_its_maker_and_by_whoever_comes_later, |c| c.attach && c.start_stop),
        case!(a_secret_that_nobody_has_is_refused),
    ]
}

/// What the host that the secret is for gets to see.
async fn seen(stage: &Stage, vault: &Origin, sandbox: &Arc<dyn Sandbox>) -> Result<String, super::Failed> {
    let before = vault.received().len();
    let stream = connect(sandbox, &vault.authority()).await?.map_err(super::Failed::new)?;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: {}\r\nAuthorization: fake\r\nConnection: close\r\n\r\n",
        vault.authority()
    );
    say(stage.tls(stream, &vault.name).await?, request).await;
    Ok(vault.received().split_off(before))
}

async fn a_secret_is_put_in_by_its_maker_and_by_whoever_comes_later(ctx: &Ctx) -> CaseResult {
    let (stage, value) = (ctx.stage()?, secret_value());
    let vault = stage.vault()?;
    let with = |secrets| {
        let network = NetworkSpec { secrets, ..vault.allowed(":ro") };
        SandboxSpec { network, ..ctx.spec.clone() }
    };
    // Whoever does not name it goes without.
    let other = ctx.sandbox_with(&with(vec![])).await?;
    bring_probe(&other).await?;
    let got = seen(stage, &vault, &other).await?;
    ensure!(got.contains("fake") && !got.contains(&value), "{got}");

    let made = ctx.sandbox_with(&with(vec![SECRET.into()])).await?;
    let id = made.id().clone();
    bring_probe(&made).await?;
    let put_in = |when: &str, got: String| {
        ensure!(got.contains(&value) && !got.contains("fake"), "{when}: {got}");
        Ok(())
    };
    put_in("made", seen(stage, &vault, &made).await?)?;
    drop(made);
    let attached = ctx.other.attach(&id, Attempt(2)).await?;
    put_in("attached", seen(stage, &vault, &attached).await?)?;
    drop(attached);
    let beside = ctx.provider.attach_beside(&id, Attempt(2)).await?;
    put_in("attached beside", seen(stage, &vault, &beside).await?)?;
    drop(beside);
    ctx.provider.stop(&id).await?;
    let started = ctx.other.start(&id, Attempt(3)).await?;
    // What lies in /tmp may be gone.
    bring_probe(&started).await?;
    put_in("started", seen(stage, &vault, &started).await?)?;
    let inside = sh(&started, "cat /proc/*/environ 2>/dev/null; :").await?.out;
    ensure!(!inside.contains(&value), "the secret is inside");
    Ok(())
}

async fn a_secret_that_nobody_has_is_refused(ctx: &Ctx) -> CaseResult {
    let network = NetworkSpec { secrets: vec!["nonesuch".into()], ..NetworkSpec::default() };
    let id = ctx.id();
    let made = ctx.provider.create(&id, Attempt(1), &SandboxSpec { network, ..ctx.spec.clone() }).await;
    ensure_eq!(made.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    let gone = ctx.provider.attach(&id, Attempt(1)).await;
    ensure_eq!(gone.err().map(|e| e.kind), Some(ErrorKind::NotFound));
    Ok(())
}
