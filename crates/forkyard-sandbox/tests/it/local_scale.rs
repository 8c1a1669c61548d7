//! Many sandboxes at once, and many that live side by side. How fast and how large they are is for `forkyard bench sandbox`.

use std::collections::BTreeSet;

use forkyard_core::{Attempt, SandboxId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{Labels, Provider, Root, SandboxStatus};
use tokio::task::JoinSet;

use crate::local::{as_ordinary_user, assert_empty, scaled};
use crate::local_roots::{offline, sh};

fn id(name: &str, number: u32) -> SandboxId {
    SandboxId::new(format!("{name}{number}")).unwrap()
}

/// Made and used, all at the same time.
async fn made(provider: &LocalProvider, ids: impl Iterator<Item = SandboxId>) {
    let mut all = JoinSet::new();
    for id in ids {
        let provider = provider.clone();
        all.spawn(async move {
            let sandbox = provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
            assert_eq!(sh(&sandbox, &format!("echo {id} > name; cat name")).await, (0, format!("{id}\n")));
        });
    }
    all.join_all().await;
}

async fn destroyed(provider: &LocalProvider, ids: impl Iterator<Item = SandboxId>) {
    let mut all = JoinSet::new();
    for id in ids {
        let provider = provider.clone();
        all.spawn(async move { provider.destroy(&id).await.unwrap() });
    }
    all.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_and_many_alive() {
    /// Asked for at the same time, of those that are to live.
    const STRIDE: u32 = 16;
    let dir = tempfile::tempdir().unwrap();
    let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
    let at_once = scaled(10, 100);
    made(&provider, (0..at_once).map(|n| id("burst", n))).await;
    destroyed(&provider, (0..at_once).map(|n| id("burst", n))).await;
    provider.settle().await;
    assert_empty(dir.path());

    let alive = scaled(100, 1000);
    for first in (0..alive).step_by(STRIDE as usize) {
        made(&provider, (first..alive.min(first + STRIDE)).map(|n| id("alive", n))).await;
    }
    // Every second one goes; the others are all there, each with its own files, also for another process.
    destroyed(&provider, (0..alive).filter(|n| n % 2 == 0).map(|n| id("alive", n))).await;
    let other = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
    let left: BTreeSet<_> = (0..alive).filter(|n| n % 2 == 1).map(|n| id("alive", n)).collect();
    let listed = other.list(&Labels::new()).await.unwrap();
    assert!(listed.iter().all(|info| info.status == SandboxStatus::Running), "{listed:?}");
    assert_eq!(listed.into_iter().map(|info| info.id).collect::<BTreeSet<_>>(), left);
    for id in &left {
        let sandbox = other.attach(id, Attempt(2)).await.unwrap();
        assert_eq!(sh(&sandbox, "cat name").await, (0, format!("{id}\n")));
    }
    destroyed(&other, left.into_iter()).await;
    other.settle().await;
    provider.settle().await;
    assert_empty(dir.path());
}

#[test]
fn many_as_an_ordinary_user() {
    as_ordinary_user("local_scale::many_at_once_and_many_alive");
}
