use forkyard_core::budget::Ask;

use super::*;

fn ask(fork: ForkNum, attempt: u32, request: &str, worst: u64) -> Ask {
    Ask { fork, attempt: Attempt(attempt), request: request.into(), worst: Usd(worst) }
}

/// (spent, reserved) of the run, which are the sums of its forks.
async fn sums(store: &Arc<dyn Store>, run: &RunId) -> (u64, u64) {
    let balance = store.balance(run).await.unwrap();
    let forks = balance.forks.values().fold((0, 0), |(s, r), f| (s + f.spent.0, r + f.reserved.0));
    assert_eq!(forks, (balance.spent.0, balance.reserved.0), "{balance:?}");
    forks
}

pub async fn money_is_set_aside_and_settled<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 2).await;
    assert_eq!(store.balance(&run).await.unwrap().limits.run, Some(Usd(1_000)));
    assert_eq!(store.reserve(&run, ask(0, 1, "a", 600)).await.unwrap(), Reserve::Granted);
    let short = Reserve::Short { available: Usd(400), outstanding: true };
    assert_eq!(store.reserve(&run, ask(1, 1, "b", 500)).await.unwrap(), short);
    assert_eq!(sums(&store, &run).await, (0, 600));
    store.mark_sent(&run, "a").await.unwrap();
    store.shrink(&run, "a", Usd(300)).await.unwrap();
    store.shrink(&run, "a", Usd(900)).await.unwrap();
    assert_eq!(sums(&store, &run).await, (0, 300), "a reservation never grows");
    assert_eq!(store.reserve(&run, ask(1, 1, "b", 500)).await.unwrap(), Reserve::Granted);
    store.settle(&run, "a", Usd(120)).await.unwrap();
    store.release_reservation(&run, "b").await.unwrap();
    assert_eq!(sums(&store, &run).await, (120, 0));
    let short = Reserve::Short { available: Usd(880), outstanding: false };
    assert_eq!(store.reserve(&run, ask(0, 1, "c", 881)).await.unwrap(), short);
    assert_eq!(store.reserve(&run, ask(0, 1, "c", 880)).await.unwrap(), Reserve::Granted);
    // Billed more than was set aside: it was spent all the same.
    store.settle(&run, "c", Usd(2_000)).await.unwrap();
    assert_eq!(sums(&store, &run).await, (2_120, 0));
    let short = Reserve::Short { available: Usd(0), outstanding: false };
    assert_eq!(store.reserve(&run, ask(0, 1, "d", 1)).await.unwrap(), short);
    for unknown in ["x", "", "a' OR '1'='1"] {
        assert_not_found(store.settle(&run, unknown, Usd(1)).await);
        assert_not_found(store.mark_sent(&run, unknown).await);
    }
}

pub async fn asking_twice_is_asking_once<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 2).await;
    let (other, _) = start(&store, "b", 1).await;
    for _ in 0..3 {
        assert_eq!(store.reserve(&run, ask(0, 1, "a", 600)).await.unwrap(), Reserve::Granted);
    }
    assert_eq!(sums(&store, &run).await, (0, 600));
    assert_invalid(store.reserve(&run, ask(1, 1, "a", 600)).await, "fork 0");
    // Requests are named in their run.
    assert_eq!(store.reserve(&other, ask(0, 1, "a", 900)).await.unwrap(), Reserve::Granted);
    assert_eq!(sums(&store, &other).await, (0, 900));
    // What was given back can be asked for again; what was paid for can't.
    store.release_reservation(&run, "a").await.unwrap();
    assert_eq!(store.reserve(&run, ask(0, 1, "a", 700)).await.unwrap(), Reserve::Granted);
    assert_eq!(sums(&store, &run).await, (0, 700));
    store.settle(&run, "a", Usd(5)).await.unwrap();
    assert_invalid(store.reserve(&run, ask(0, 1, "a", 5)).await, "closed");
}

pub async fn rivals_never_overshoot<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start_with(&store, "a", 8, |v| v.limits.fork = Some(Usd(300))).await;
    let mut rivals = tokio::task::JoinSet::new();
    for fork in 0..8 {
        let (store, run) = (store.clone(), run.clone());
        rivals.spawn(async move {
            let mut spent = 0;
            for i in 0..30_u64 {
                let (request, worst) = (format!("{fork}-{i}"), 20 + (i * 7 + u64::from(fork) * 13) % 60);
                match store.reserve(&run, ask(fork, 1, &request, worst)).await.unwrap() {
                    Reserve::Granted => {}
                    Reserve::Short { .. } => continue,
                    other => panic!("{other:?}"),
                }
                let balance = store.balance(&run).await.unwrap();
                assert!(balance.spent + balance.reserved <= Usd(1_000), "{balance:?}");
                match i % 3 {
                    0 => store.release_reservation(&run, &request).await.unwrap(),
                    1 => {
                        store.mark_sent(&run, &request).await.unwrap();
                        store.settle(&run, &request, Usd(worst / 2)).await.unwrap();
                        spent += worst / 2;
                    }
                    _ => {
                        store.mark_sent(&run, &request).await.unwrap();
                        store.release_reservation(&run, &request).await.unwrap();
                        spent += worst;
                    }
                }
            }
            spent
        });
    }
    let spent: u64 = rivals.join_all().await.into_iter().sum();
    assert_eq!(sums(&store, &run).await, (spent, 0));
    assert!(spent <= 1_000 && spent > 500, "{spent}");
    assert!(store.balance(&run).await.unwrap().forks.values().all(|f| f.spent <= Usd(300)));
}

pub async fn forks_have_limits_of_their_own<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start_with(&store, "a", 2, |v| v.limits.fork = Some(Usd(100))).await;
    assert_eq!(store.reserve(&run, ask(0, 1, "a", 80)).await.unwrap(), Reserve::Granted);
    let short = Reserve::Short { available: Usd(20), outstanding: true };
    assert_eq!(store.reserve(&run, ask(0, 1, "b", 21)).await.unwrap(), short);
    assert_eq!(store.reserve(&run, ask(1, 1, "b", 100)).await.unwrap(), Reserve::Granted);
}

pub async fn a_paused_run_reserves_nothing<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    refuses_while(make().await, |view, now| view.paused = now).await;
}

pub async fn a_detached_run_reserves_nothing<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    refuses_while(make().await, |view, now| view.detached = now).await;
}

async fn refuses_while(store: Arc<dyn Store>, set: impl Fn(&mut RunView, bool)) {
    let (run, lease) = start(&store, "a", 1).await;
    assert_eq!(store.reserve(&run, ask(0, 1, "a", 10)).await.unwrap(), Reserve::Granted);
    let mut view = run_view(&run);
    set(&mut view, true);
    store.append(step(&run, lease, 1, vec![], vec![View::Run(view.clone())])).await.unwrap();
    assert_eq!(store.reserve(&run, ask(0, 1, "b", 10)).await.unwrap(), Reserve::Paused);
    assert_eq!(
        store.reserve(&run, ask(0, 1, "a", 10)).await.unwrap(),
        Reserve::Paused,
        "nor what it asked before"
    );
    // What was sent is still settled.
    store.settle(&run, "a", Usd(3)).await.unwrap();
    set(&mut view, false);
    store.append(step(&run, lease, 1, vec![], vec![View::Run(view)])).await.unwrap();
    assert_eq!(store.reserve(&run, ask(0, 1, "b", 10)).await.unwrap(), Reserve::Granted);
}

pub async fn a_stale_attempt_reserves_nothing<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, 4))])).await.unwrap();
    let stale = Reserve::Stale { current: Attempt(4) };
    assert_eq!(store.reserve(&run, ask(0, 3, "a", 10)).await.unwrap(), stale);
    assert_invalid(store.reserve(&run, ask(0, 5, "a", 10)).await, "attempt 5");
    assert_not_found(store.reserve(&run, ask(7, 1, "a", 10)).await);
    assert_eq!(store.reserve(&run, ask(0, 4, "a", 10)).await.unwrap(), Reserve::Granted);
}

pub async fn a_new_attempt_closes_what_was_open<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    for (fork, request, worst) in [(0, "unsent", 100), (0, "sent", 200), (0, "done", 50), (1, "other", 30)] {
        assert_eq!(store.reserve(&run, ask(fork, 1, request, worst)).await.unwrap(), Reserve::Granted);
    }
    for request in ["sent", "done", "other"] {
        store.mark_sent(&run, request).await.unwrap();
    }
    store.settle(&run, "done", Usd(7)).await.unwrap();
    // A step that is refused closes nothing.
    let bump =
        |expected| store.append(step(&run, lease, expected, vec![], vec![View::Fork(fork_view(&run, 0, 2))]));
    bump(9).await.unwrap_err();
    assert_eq!(sums(&store, &run).await, (7, 330));
    bump(1).await.unwrap();
    assert_eq!(sums(&store, &run).await, (207, 30));
    assert_invalid(store.settle(&run, "sent", Usd(1)).await, "closed");
    assert_eq!(store.mark_sent(&run, "unsent").await.unwrap(), Sending::Stale { current: Attempt(2) });
    // The same attempt again closes nothing.
    assert_eq!(store.reserve(&run, ask(0, 2, "new", 40)).await.unwrap(), Reserve::Granted);
    bump(1).await.unwrap();
    assert_eq!(sums(&store, &run).await, (207, 70));
    store.settle(&run, "other", Usd(30)).await.unwrap();
    store.settle(&run, "new", Usd(40)).await.unwrap();
    assert_eq!(sums(&store, &run).await, (277, 0));
}

pub async fn closed_reservations_stay_closed<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    store.reserve(&run, ask(0, 1, "a", 100)).await.unwrap();
    store.settle(&run, "a", Usd(60)).await.unwrap();
    assert_invalid(store.settle(&run, "a", Usd(61)).await, "closed");
    assert_invalid(store.shrink(&run, "a", Usd(1)).await, "closed");
    assert_invalid(store.mark_sent(&run, "a").await, "closed");
    store.release_reservation(&run, "a").await.unwrap();
    assert_eq!(sums(&store, &run).await, (60, 0), "what was paid for is not given back");
    store.reserve(&run, ask(0, 1, "b", 100)).await.unwrap();
    store.release_reservation(&run, "b").await.unwrap();
    assert_invalid(store.settle(&run, "b", Usd(1)).await, "closed");
    assert_eq!(sums(&store, &run).await, (60, 0));
}

/// A caller whose answer was lost asks again.
pub async fn steps_can_be_repeated<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    store.reserve(&run, ask(0, 1, "a", 100)).await.unwrap();
    for _ in 0..2 {
        store.mark_sent(&run, "a").await.unwrap();
    }
    for _ in 0..2 {
        store.shrink(&run, "a", Usd(80)).await.unwrap();
    }
    for _ in 0..2 {
        store.settle(&run, "a", Usd(60)).await.unwrap();
    }
    store.reserve(&run, ask(0, 1, "b", 100)).await.unwrap();
    store.mark_sent(&run, "b").await.unwrap();
    for _ in 0..2 {
        store.release_reservation(&run, "b").await.unwrap();
    }
    assert_eq!(sums(&store, &run).await, (160, 0), "sent and given up costs its worst case, once");
}

pub async fn limits_follow_the_view<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    store.reserve(&run, ask(0, 1, "a", 1_000)).await.unwrap();
    let mut view = run_view(&run);
    for (limit, granted) in [(Some(1_500), true), (Some(0), false), (None, true)] {
        view.limits.run = limit.map(Usd);
        store.append(step(&run, lease, 1, vec![], vec![View::Run(view.clone())])).await.unwrap();
        let got = store.reserve(&run, ask(0, 1, &format!("{limit:?}"), 500)).await.unwrap();
        assert_eq!(got == Reserve::Granted, granted, "{limit:?}: {got:?}");
    }
    view.limits.run = Some(Usd(u64::MAX));
    assert_invalid(store.append(step(&run, lease, 1, vec![], vec![View::Run(view)])).await, "budget");
}

pub async fn no_budget_still_meters<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start_with(&store, "a", 1, |v| v.limits = BudgetLimits::default()).await;
    assert_eq!(store.reserve(&run, ask(0, 1, "a", Usd::MAX_LIMIT.0)).await.unwrap(), Reserve::Granted);
    store.settle(&run, "a", Usd(12)).await.unwrap();
    assert_eq!(sums(&store, &run).await, (12, 0));
    assert_invalid(store.reserve(&run, ask(0, 1, "b", u64::MAX)).await, "reservation");
    assert_invalid(store.reserve(&run, ask(0, 1, "", 1)).await, "request");
}

/// Reserved before, but not sent yet: the pause comes first.
pub async fn a_paused_run_sends_nothing<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    for request in ["before", "unsent"] {
        assert_eq!(store.reserve(&run, ask(0, 1, request, 10)).await.unwrap(), Reserve::Granted);
    }
    assert_eq!(store.mark_sent(&run, "before").await.unwrap(), Sending::Go);
    let mut view = run_view(&run);
    view.paused = true;
    store.append(step(&run, lease, 1, vec![], vec![View::Run(view.clone())])).await.unwrap();
    for request in ["before", "unsent"] {
        assert_eq!(store.mark_sent(&run, request).await.unwrap(), Sending::Paused);
    }
    // What has left is settled; what has not goes back whole.
    store.settle(&run, "before", Usd(3)).await.unwrap();
    store.release_reservation(&run, "unsent").await.unwrap();
    assert_eq!(sums(&store, &run).await, (3, 0));
    view.paused = false;
    store.append(step(&run, lease, 1, vec![], vec![View::Run(view)])).await.unwrap();
    assert_eq!(store.reserve(&run, ask(0, 1, "unsent", 10)).await.unwrap(), Reserve::Granted);
    assert_eq!(store.mark_sent(&run, "unsent").await.unwrap(), Sending::Go);
}

/// Others must not wait for money that nobody will give back.
pub async fn an_ended_fork_holds_no_money<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    use Lifecycle::{Completed, Failed};
    for (name, lifecycle) in [("completed", Completed), ("failed", Failed)] {
        let store = make().await;
        let (run, lease) = start(&store, name, 2).await;
        for (fork, request) in [(0, "unsent"), (0, "sent"), (1, "other")] {
            assert_eq!(store.reserve(&run, ask(fork, 1, request, 300)).await.unwrap(), Reserve::Granted);
        }
        store.mark_sent(&run, "sent").await.unwrap();
        let mut view = fork_view(&run, 0, 1);
        view.lifecycle = Lifecycle::Completing;
        store.append(step(&run, lease, 1, vec![], vec![View::Fork(view.clone())])).await.unwrap();
        assert_eq!(sums(&store, &run).await, (0, 900), "it has not ended yet");
        view.lifecycle = lifecycle;
        for _ in 0..2 {
            store.append(step(&run, lease, 1, vec![], vec![View::Fork(view.clone())])).await.unwrap();
            assert_eq!(sums(&store, &run).await, (300, 300));
        }
        // Whatever is left of it can't spend any more.
        let current = Attempt(1);
        assert_eq!(store.reserve(&run, ask(0, 1, "late", 1)).await.unwrap(), Reserve::Stale { current });
        assert_eq!(store.mark_sent(&run, "unsent").await.unwrap(), Sending::Stale { current });
        assert_eq!(store.mark_sent(&run, "other").await.unwrap(), Sending::Go);
    }
}
