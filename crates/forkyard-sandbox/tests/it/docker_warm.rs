//! Containers that are kept ready on a real engine: what `create` makes of one is a sandbox like any other, exactly one gets it,
//! and images that were prepared go when nobody uses them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use bollard::query_parameters::ListImagesOptionsBuilder;
use forkyard_core::{Attempt, Millis, SnapshotId};
use forkyard_sandbox::conformance::conformance;
use forkyard_sandbox::docker::{DockerProvider, WARM_LABEL};
use forkyard_sandbox::{
    ErrorKind, ExecRequest, Labels, Lifetime, Provider, Root, Sandbox, SandboxSpec, SandboxStatus, Volume,
};
use tokio_util::sync::CancellationToken;

use crate::docker::{connect, connect_warm, left, suite};
use crate::docker_fixture::{Daemon, id, sh, spec};

const FIRST: Attempt = Attempt(1);
/// For the engine to start what is to be ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// What waits for its sandbox.
async fn ready(provider: &DockerProvider) -> BTreeSet<String> {
    let asked = Labels::from([(WARM_LABEL.to_string(), "ready".to_string())]);
    provider.list(&asked).await.unwrap().into_iter().map(|info| info.id.to_string()).collect()
}

pub async fn until_ready(provider: &DockerProvider, count: usize) -> BTreeSet<String> {
    let wait = async {
        loop {
            let found = ready(provider).await;
            if found.len() >= count {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(READY_WITHIN, wait).await.expect("containers are kept ready")
}

/// A provider with its keeper.
struct Kept {
    provider: DockerProvider,
    stop: CancellationToken,
    keeping: tokio::task::JoinHandle<()>,
}

impl Kept {
    async fn start(daemon: &Daemon, state: &std::path::Path, count: usize) -> Kept {
        let provider = connect_warm(daemon, state, None, count).await;
        let stop = CancellationToken::new();
        let keeping = tokio::spawn({
            let (provider, stop) = (provider.clone(), stop.clone());
            async move { provider.keep_ready(stop).await }
        });
        // The first of its kind says what is wanted.
        provider.create(&id("first"), FIRST, &spec()).await.unwrap();
        provider.destroy(&id("first")).await.unwrap();
        Kept { provider, stop, keeping }
    }

    async fn end(self) {
        self.stop.cancel();
        self.keeping.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_of_conformance_on_what_was_kept_ready() {
    let cases = conformance();
    let (count, taken) = (cases.len(), Mutex::new(BTreeSet::new()));
    let last = Mutex::new(BTreeSet::new());
    suite(Daemon::start().await, cases, 3, async |provider| {
        if last.lock().unwrap().is_empty() {
            provider.create(&id("first"), FIRST, &spec()).await.unwrap();
            provider.destroy(&id("first")).await.unwrap();
        }
        let now = until_ready(provider, 3).await;
        let before = std::mem::replace(&mut *last.lock().unwrap(), now.clone());
        taken.lock().unwrap().extend(before.difference(&now).cloned());
    })
    .await;
    let taken = taken.into_inner().unwrap().len();
    println!("{taken} sandboxes of {count} cases were ready before");
    // Without an engine nothing was tried.
    assert!(last.into_inner().unwrap().is_empty() || taken >= count / 2, "{taken} of {count} cases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_kept_ready_is_a_sandbox_like_any_other() {
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let kept = Kept::start(&daemon, state.path(), 2).await;
    let provider = &kept.provider;
    let waiting = until_ready(provider, 2).await;
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty(), "they are nobody's sandboxes");
    let mut labelled = spec();
    labelled.labels.insert(WARM_LABEL.into(), "ready".into());
    let refused = provider.create(&id("own"), FIRST, &labelled).await.err().unwrap();
    assert_eq!(refused.kind, ErrorKind::Invalid, "the label is Forkyard's: {refused}");

    // Another process of this install, which keeps none itself, takes one too.
    let other = connect(&daemon, state.path(), None).await;
    let mut wanted = spec();
    wanted.labels.insert("run".into(), "r1".into());
    wanted.env.insert("GREETING".into(), "hi there".into());
    wanted.lifetime = Lifetime(Millis::minutes(7));
    let begin = Instant::now();
    let one = other.create(&id("one"), Attempt(3), &wanted).await.unwrap();
    let taken_in = begin.elapsed();
    assert_eq!(ready(provider).await.intersection(&waiting).count(), 1, "one of them was taken");
    assert_eq!(
        sh(&one, "echo $GREETING $HOME; id -un; pwd").await,
        "hi there /home/user\nuser\n/workspace\n"
    );
    let info = provider.list(&wanted.labels).await.unwrap().pop().unwrap();
    assert_eq!((info.id, info.attempt, info.labels), (id("one"), Attempt(3), wanted.labels.clone()));
    assert_eq!(info.deadline.since(info.created_at), Millis::minutes(7));
    assert_eq!(provider.attach(&id("one"), Attempt(2)).await.err().unwrap().kind, ErrorKind::Stale);
    for name in &waiting {
        let attached = provider.attach(&id(name), Attempt(9)).await;
        assert_eq!(attached.err().unwrap().kind, ErrorKind::NotFound, "nobody gets in by the other name");
    }

    // Stopped and started it is still what it became.
    sh(&one, "echo kept > kept").await;
    provider.stop(&id("one")).await.unwrap();
    let one = provider.start(&id("one"), Attempt(4)).await.unwrap();
    assert_eq!(sh(&one, "cat kept; echo $GREETING").await, "kept\nhi there\n");
    assert_eq!(one.info().await.unwrap().status, SandboxStatus::Running);

    // A child starts from its snapshot, in what was ready.
    let snapshot = SnapshotId::new("snap").unwrap();
    one.snapshot(&snapshot, &Labels::new()).await.unwrap();
    let before = until_ready(provider, 2).await;
    let from = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..spec() };
    let child = provider.create(&id("child"), FIRST, &from).await.unwrap();
    assert_eq!(sh(&child, "cat kept; ls -A /.forkyard/from; echo $GREETING").await, "kept\n\n");
    assert!(ready(provider).await.intersection(&before).count() < 2, "the child was ready before");
    provider.remove_snapshot(&snapshot).await.unwrap();

    // What only a container of its own can have.
    let host = tempfile::tempdir().unwrap();
    let mut mounted = spec();
    let host_path = host.path().display().to_string();
    mounted.volumes.push(Volume { host_path, path: "/mnt/v".into(), writable: false });
    let before = until_ready(provider, 2).await;
    let begin = Instant::now();
    provider.create(&id("mounted"), FIRST, &mounted).await.unwrap();
    println!("taken in {taken_in:?}, made in {:?}", begin.elapsed());
    assert_eq!(ready(provider).await, before);

    for name in ["one", "child", "mounted", "one"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    assert_eq!(one.exec(ExecRequest::shell("true")).await.err().unwrap().kind, ErrorKind::NotFound);
    // A sweep leaves what waits alone as long as its keeper lives.
    let before = until_ready(provider, 2).await;
    other.sweep().await.unwrap();
    assert_eq!(ready(provider).await, before);
    kept.end().await;
    assert_eq!(left(&daemon).await, (0, 0), "a keeper takes with it what it kept");
    for part in ["sandboxes", "ready", "taken"] {
        assert_eq!(std::fs::read_dir(state.path().join(part)).unwrap().count(), 0, "{part}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_want_the_same_one_gets_it() {
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let kept = Kept::start(&daemon, state.path(), 3).await;
    until_ready(&kept.provider, 3).await;
    let other = connect(&daemon, state.path(), None).await;
    let creates = (0..6).map(|n| {
        let provider = if n % 2 == 0 { kept.provider.clone() } else { other.clone() };
        tokio::spawn(async move { provider.create(&id(&format!("many{n}")), FIRST, &spec()).await.unwrap() })
    });
    let all: Vec<Arc<dyn Sandbox>> =
        futures::future::join_all(creates).await.into_iter().map(|made| made.unwrap()).collect();
    for sandbox in &all {
        sh(sandbox, &format!("echo {} >> mark", sandbox.id())).await;
    }
    for sandbox in &all {
        assert_eq!(sh(sandbox, "cat mark").await, format!("{}\n", sandbox.id()), "each has one of its own");
        other.destroy(sandbox.id()).await.unwrap();
    }
    kept.end().await;
    assert_eq!(left(&daemon).await, (0, 0));
}

/// Images that were prepared.
async fn prepared(daemon: &Daemon) -> usize {
    let options = ListImagesOptionsBuilder::default().build();
    let all = daemon.docker().unwrap().list_images(Some(options)).await.unwrap();
    all.iter().flat_map(|i| &i.repo_tags).filter(|tag| tag.starts_with("forkyard-prepared:")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prepared_images_go_when_nobody_uses_them() {
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let provider = connect(&daemon, state.path(), None).await;
    let age = || {
        for used in std::fs::read_dir(state.path().join("images")).unwrap().flatten() {
            let long_ago = SystemTime::now() - Duration::from_secs(25 * 3600);
            std::fs::File::options().write(true).open(used.path()).unwrap().set_modified(long_ago).unwrap();
        }
    };
    let sandbox = provider.create(&id("one"), FIRST, &spec()).await.unwrap();
    let snapshot = SnapshotId::new("snap").unwrap();
    sandbox.snapshot(&snapshot, &Labels::new()).await.unwrap();
    assert_eq!(prepared(&daemon).await, 1);
    age();
    provider.sweep().await.unwrap();
    assert_eq!(prepared(&daemon).await, 1, "a sandbox stands on it");
    provider.destroy(&id("one")).await.unwrap();
    provider.create(&id("two"), FIRST, &spec()).await.unwrap();
    provider.destroy(&id("two")).await.unwrap();
    provider.sweep().await.unwrap();
    assert_eq!(prepared(&daemon).await, 1, "it was used a moment ago");
    age();
    provider.sweep().await.unwrap();
    assert_eq!(prepared(&daemon).await, 0);
    assert_eq!(std::fs::read_dir(state.path().join("images")).unwrap().count(), 0);
    // What started from it can start again, and what it was made from is still there.
    let from = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..spec() };
    let child = provider.create(&id("child"), FIRST, &from).await.unwrap();
    assert_eq!(sh(&child, "id -un").await, "user\n");
    provider.destroy(&id("child")).await.unwrap();
    provider.remove_snapshot(&snapshot).await.unwrap();
}
