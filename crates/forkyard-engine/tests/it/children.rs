//! Children of a sandbox: all of them, or none.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkyard_core::sandbox::{Lifetime, NetworkMode, NetworkSpec, ProviderKind, SandboxSpec};
use forkyard_core::{SandboxId, SnapshotId};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_sandbox::Provider;
use forkyard_sandbox::local::{LocalOptions, LocalProvider};

#[tokio::test(flavor = "multi_thread")]
async fn where_one_child_can_t_be_made_none_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Arc::new(LocalProvider::new(dir.path(), LocalOptions::default()).unwrap());
    let sandboxes =
        Sandboxes::new(BTreeMap::from([(ProviderKind::Local, provider.clone() as Arc<dyn Provider>)]));
    let id = |name: &str| SandboxId::new(name).unwrap();
    let network = NetworkSpec { mode: NetworkMode::None, ..NetworkSpec::default() };
    let spec = SandboxSpec { network, ..SandboxSpec::default() };
    for name in ["parent", "taken"] {
        sandboxes.create(ProviderKind::Local, &id(name), &spec).await.unwrap();
    }
    provider.stop(&id("taken")).await.unwrap();
    let names = async || {
        let all = sandboxes.list().await.unwrap();
        all.into_iter().map(|s| s.id.to_string()).collect::<std::collections::BTreeSet<_>>()
    };
    let fork = async |children: [&str; 3]| {
        let snapshot = SnapshotId::new("between").unwrap();
        sandboxes
            .fork(&id("parent"), &snapshot, &children.map(id), Lifetime::default(), Default::default())
            .await
    };
    fork(["one", "taken", "three"]).await.unwrap_err();
    assert_eq!(
        names().await,
        ["parent", "taken"].map(String::from).into(),
        "and what was there before stays"
    );
    assert!(sandboxes.snapshots().await.unwrap().is_empty());
    fork(["one", "two", "three"]).await.unwrap();
    assert_eq!(names().await.len(), 5);
    for name in names().await {
        provider.destroy(&id(&name)).await.unwrap();
    }
    provider.settle().await;
}
