use forkyard_core::{HostId, Timestamp};

use super::*;

/// A lease that ends while a case waits.
const SHORT: Duration = Duration::from_millis(50);

pub async fn one_holder_at_a_time<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, token) = start(&store, "a", 1).await;
    assert_eq!(store.acquire(&run, "other", LONG).await.unwrap(), None);
    store.renew(&run, token, LONG, None).await.unwrap();
    assert_eq!(store.acquire(&run, "other", LONG).await.unwrap(), None);
    // The same owner begins a new tenure.
    let again = store.acquire(&run, "driver", LONG).await.unwrap().unwrap();
    assert!(again.token > token);
    assert_eq!(store.renew(&run, token, LONG, None).await, Err(StoreError::LeaseLost));
}

pub async fn an_expired_lease_is_taken_over<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, token) = start(&store, "a", 1).await;
    store.renew(&run, token, SHORT, Some(Timestamp(7))).await.unwrap();
    let taken = until("the lease ends", || async { store.acquire(&run, "other", LONG).await.unwrap() }).await;
    assert!(taken.token > token);
    assert_eq!(
        taken.last_driven,
        Some(Timestamp(7)),
        "what its driver said, whatever the store's clock says"
    );
    assert_eq!(store.renew(&run, token, LONG, None).await, Err(StoreError::LeaseLost));
    let stale = store.append(step(&run, token, 1, events("run.a", 1), vec![])).await;
    assert_eq!(stale, Err(StoreError::LeaseLost));
    // Releasing what is not ours any more takes nothing from the new holder.
    store.release(&run, token).await.unwrap();
    store.append(step(&run, taken.token, 1, events("run.a", 1), vec![])).await.unwrap();
    assert_eq!(store.acquire(&run, "third", LONG).await.unwrap(), None);
}

pub async fn tokens_grow<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, mut last) = start(&store, "a", 1).await;
    store.release(&run, last).await.unwrap();
    for i in 0..5 {
        let lease = store.acquire(&run, &format!("owner-{i}"), LONG).await.unwrap().unwrap();
        assert!(lease.token > last);
        assert_eq!(lease.run, run);
        last = lease.token;
        store.release(&run, last).await.unwrap();
    }
}

pub async fn a_released_lease_is_free<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let run = run_id("a");
    let views = vec![View::Run(run_view(&run))];
    store.create_run(CreateRun { run: run.clone(), key: None, events: vec![], views }).await.unwrap();
    let first = store.acquire(&run, "one", LONG).await.unwrap().unwrap();
    assert_eq!(first.last_driven, None, "there was no tenure before");
    store.renew(&run, first.token, LONG, Some(Timestamp(5))).await.unwrap();
    store.renew(&run, first.token, LONG, None).await.unwrap();
    store.release(&run, first.token).await.unwrap();
    store.release(&run, first.token).await.unwrap();
    assert_eq!(store.renew(&run, first.token, LONG, None).await, Err(StoreError::LeaseLost));
    let second = store.acquire(&run, "two", LONG).await.unwrap().unwrap();
    assert_eq!(second.last_driven, Some(Timestamp(5)));
    store.release(&run, second.token).await.unwrap();
    let third = store.acquire(&run, "three", LONG).await.unwrap().unwrap();
    assert_eq!(third.last_driven, Some(Timestamp(5)), "the second has driven nothing");
}

pub async fn the_holder_is_known_while_its_lease_is_valid<F: Future<Output = Arc<dyn Store>>>(
    make: impl Fn() -> F,
) {
    let store = make().await;
    let (run, token) = start(&store, "a", 1).await;
    let holder = store.holder(&run).await.unwrap().unwrap();
    assert_eq!((holder.owner.as_str(), holder.token), ("driver", token));
    // Whoever knows that it is gone frees the run by that token, and takes nothing from the next one by it.
    store.release(&run, holder.token).await.unwrap();
    assert_eq!(store.holder(&run).await.unwrap(), None);
    let next = store.acquire(&run, "next", LONG).await.unwrap().unwrap();
    store.release(&run, holder.token).await.unwrap();
    assert_eq!(store.holder(&run).await.unwrap().map(|h| h.token), Some(next.token));
    store.renew(&run, next.token, SHORT, None).await.unwrap();
    until("the lease ends", || async { store.holder(&run).await.unwrap().is_none().then_some(()) }).await;
    assert_eq!(store.holder(&run_id("none")).await.unwrap(), None);
}

pub async fn renewing_needs_the_lease<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, token) = start(&store, "a", 1).await;
    for wrong in [0, token + 1, u64::MAX] {
        assert_eq!(store.renew(&run, wrong, LONG, None).await, Err(StoreError::LeaseLost));
    }
    // Late, but nobody came in between: still its holder.
    store.renew(&run, token, Duration::ZERO, None).await.unwrap();
    store.append(step(&run, token, 1, events("run.a", 1), vec![])).await.unwrap();
    store.renew(&run, token, LONG, None).await.unwrap();
    assert_eq!(store.acquire(&run, "other", LONG).await.unwrap(), None);
}

pub async fn rivals_get_one_lease<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, token) = start(&store, "a", 1).await;
    store.release(&run, token).await.unwrap();
    let mut rivals = tokio::task::JoinSet::new();
    for i in 0..8 {
        let (store, run) = (store.clone(), run.clone());
        rivals.spawn(async move { store.acquire(&run, &format!("rival-{i}"), LONG).await.unwrap() });
    }
    let won = rivals.join_all().await.into_iter().flatten().count();
    assert_eq!(won, 1);
}

pub async fn claimable_runs_are_those_that_need_a_driver<F: Future<Output = Arc<dyn Store>>>(
    make: impl Fn() -> F,
) {
    let store = make().await;
    let free = |name: &'static str, change: fn(&mut RunView)| {
        let store = store.clone();
        async move {
            let (run, token) = start_with(&store, name, 1, change).await;
            store.release(&run, token).await.unwrap();
        }
    };
    start(&store, "driven", 1).await;
    free("live", |_| ()).await;
    free("paused", |v| v.paused = true).await;
    free("detached", |v| v.detached = true).await;
    free("called", |v| v.detached = true).await;
    free("ended", |v| v.status = RunStatus::Ended).await;
    free("temporal", |v| v.engine = EngineKind::Temporal).await;
    for name in ["called", "ended", "driven"] {
        store.put_command(&run_id(name), command(None, json!("resume"))).await.unwrap();
    }
    let claimable = |limit| {
        let store = store.clone();
        async move {
            let mut found = store.claimable(limit).await.unwrap();
            found.sort();
            found
        }
    };
    assert_eq!(claimable(0).await, ["called", "live", "paused"].map(run_id));
    assert_eq!(claimable(2).await.len(), 2);
    let lease = store.acquire(&run_id("called"), "me", LONG).await.unwrap().unwrap();
    let waiting = store.pending_commands(&run_id("called")).await.unwrap();
    let answer =
        Append { consume: vec![waiting[0].id], ..step(&run_id("called"), lease.token, 1, vec![], vec![]) };
    store.append(answer).await.unwrap();
    store.release(&run_id("called"), lease.token).await.unwrap();
    assert_eq!(claimable(0).await, ["live", "paused"].map(run_id), "its command is answered");
    // A lease that ended makes its run claimable.
    let lease = store.acquire(&run_id("live"), "me", LONG).await.unwrap().unwrap();
    assert_eq!(claimable(0).await, ["paused"].map(run_id));
    store.renew(&run_id("live"), lease.token, SHORT, None).await.unwrap();
    until("the lease ends", || async { (claimable(0).await.len() == 2).then_some(()) }).await;
}

pub async fn processes_are_forgotten<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let process = |id: &str, kind| Process { id: id.into(), host: HostId::new("h1").unwrap(), kind };
    let (a, b) = (process("a", ProcessKind::Worker), process("b", ProcessKind::Cli));
    store.announce(&a, LONG).await.unwrap();
    store.announce(&b, LONG).await.unwrap();
    assert_eq!(store.processes().await.unwrap(), [a.clone(), b.clone()]);
    let b = process("b", ProcessKind::Server);
    store.announce(&b, LONG).await.unwrap();
    assert_eq!(store.processes().await.unwrap(), [a.clone(), b.clone()]);
    store.announce(&a, SHORT).await.unwrap();
    until("it is forgotten", || async { (store.processes().await.unwrap() == [b.clone()]).then_some(()) })
        .await;
    store.announce(&a, LONG).await.unwrap();
    assert_eq!(store.processes().await.unwrap(), [a, b]);
}
