use forkyard_core::view::{ForkOutcome, RunOutcome};

use super::*;

pub async fn views_are_written_and_read<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 3).await;
    let mut view = run_view(&run);
    view.outcome = Some(RunOutcome::Success);
    view.ranking = vec![2, 0, 1];
    view.winner = Some(2);
    view.branch = Some("main".into());
    let mut fork = fork_view(&run, 1, 2);
    fork.outcome = Some(ForkOutcome::BudgetExceeded);
    fork.score = Some(0.1 + 0.2);
    fork.cost = Usd(123_456_789);
    fork.tokens = u64::MAX;
    let sandbox = sandbox_view(&run, 1, SandboxState::HandedOver);
    let views = vec![View::Run(view.clone()), View::Fork(fork.clone()), View::Sandbox(sandbox.clone())];
    store.append(step(&run, lease, 1, vec![], views)).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap(), Some(view));
    assert_eq!(store.fork(&run, 1).await.unwrap(), Some(fork.clone()));
    assert_eq!(store.forks(&run).await.unwrap(), [fork_view(&run, 0, 1), fork, fork_view(&run, 2, 1)]);
    assert_eq!(store.sandboxes(&SandboxQuery::default()).await.unwrap(), [sandbox]);
}

pub async fn runs_are_listed_newest_first<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    // Two of the same age: ids decide.
    for (name, age) in [("c", 30), ("a", 10), ("d", 20), ("b", 20), ("e", 5)] {
        start_with(&store, name, 0, |v| {
            v.created_at = Timestamp(age);
            v.status = if name == "c" { RunStatus::Ended } else { RunStatus::Pending };
        })
        .await;
    }
    let list = |query: RunQuery| {
        let store = store.clone();
        async move { store.runs(&query).await.unwrap().into_iter().map(|v| v.id.to_string()).collect::<Vec<_>>() }
    };
    assert_eq!(list(RunQuery::default()).await, ["c", "d", "b", "a", "e"]);
    assert_eq!(list(RunQuery { live: true, ..Default::default() }).await, ["d", "b", "a", "e"]);
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page =
            store.runs(&RunQuery { before: before.clone(), limit: 2, ..Default::default() }).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some((last.created_at, last.id.clone()));
        seen.extend(page.iter().map(|v| v.id.to_string()));
    }
    assert_eq!(seen, ["c", "d", "b", "a", "e"]);
    let before = Some((Timestamp(u64::MAX), run_id("z")));
    assert_eq!(list(RunQuery { before, live: true, limit: 1, ..Default::default() }).await, ["d"]);
}

/// Every page of a query, one run at a time.
async fn found(store: &Arc<dyn Store>, query: RunQuery) -> Vec<String> {
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page = store.runs(&RunQuery { before, limit: 1, ..query.clone() }).await.unwrap();
        let Some(last) = page.last() else { return seen };
        seen.push(last.id.to_string());
        before = Some((last.created_at, last.id.clone()));
    }
}

async fn search(store: &Arc<dyn Store>, words: &str) -> Vec<String> {
    found(store, RunQuery { words: Words::parse(words).unwrap(), ..Default::default() }).await
}

pub async fn runs_are_found_by_words<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let runs = [
        ("a1", "Fix the parser: it\tdrops 100% of \"quoted\" _names_", None),
        ("b2", "ÄNDERE die Größe\nund prüfe \\u0041", Some("feature/Parser-2")),
        ("c3", "null\0byte \u{1f980} İstanbul", None),
    ];
    for (i, (name, prompt, branch)) in runs.into_iter().enumerate() {
        start_with(&store, name, 0, |v| {
            v.prompt = prompt.into();
            v.branch = branch.map(Into::into);
            v.created_at = Timestamp(10 + i as u64);
        })
        .await;
    }
    // Long before the end of a long prompt.
    start_with(&store, "d4", 0, |v| {
        v.prompt = format!("{} needle {}", "x ".repeat(2000), "ß".repeat(60_000))
    })
    .await;
    for (words, wanted) in [
        ("", &["d4", "c3", "b2", "a1"] as &[_]),
        ("  \n", &["d4", "c3", "b2", "a1"]),
        ("PARSER", &["b2", "a1"]),
        // All of them, in any order, also parts of words.
        ("names quot fix", &["a1"]),
        ("fix größe", &[]),
        ("größe ändere", &["b2"]),
        ("GRÖSSE", &[]),
        ("feature/parser-2", &["b2"]),
        // Nothing in a search means anything but itself.
        ("100%", &["a1"]),
        ("1%0", &[]),
        ("%", &["a1"]),
        ("_names_", &["a1"]),
        ("f_x", &[]),
        ("\"quoted\"", &["a1"]),
        ("\\u0041", &["b2"]),
        ("\\", &["b2"]),
        ("' OR 1", &[]),
        ("null\0byte", &["c3"]),
        ("nullbyte", &[]),
        ("\u{1f980}", &["c3"]),
        ("İSTANBUL", &["c3"]),
        ("example.com/r.git c3", &["c3"]),
        ("needle", &["d4"]),
        ("a1", &["a1"]),
    ] {
        assert_eq!(search(&store, words).await, wanted, "{words:?}");
    }
    // What a run is may be written anew, and is found as it is then.
    let (run, lease) = start_with(&store, "e5", 0, |v| v.prompt = "before".into()).await;
    let view = RunView { prompt: "after".into(), ..run_view(&run) };
    store.append(step(&run, lease, 1, vec![], vec![View::Run(view)])).await.unwrap();
    assert_eq!(search(&store, "before").await, Vec::<String>::new());
    assert_eq!(search(&store, "after").await, ["e5"]);
    end(&store, &run, lease).await;
    store.delete_run(&run).await.unwrap();
    assert_eq!(search(&store, "e5").await, Vec::<String>::new());
}

/// Nobody who may search can guess a password letter by letter.
pub async fn credentials_are_not_found<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    start_with(&store, "a", 0, |v| v.repo = "https://me:hunter2@example.org/r".into()).await;
    assert_eq!(search(&store, "example.org/r").await, ["a"]);
    for word in ["hunter2", "hun", "me:"] {
        assert_eq!(search(&store, word).await, Vec::<String>::new(), "{word}");
    }
}

/// Ten runs, three of them live, under prompts that take turns.
async fn of_every_kind(store: &Arc<dyn Store>) {
    let outcomes = [None, Some(RunOutcome::Success), Some(RunOutcome::Failed), Some(RunOutcome::Cancelled)];
    for i in 0..10_u64 {
        start_with(store, &format!("r{i}"), 0, |v| {
            v.created_at = Timestamp(100 + i);
            v.outcome = outcomes[i as usize % 4];
            v.status = if v.outcome.is_some() { RunStatus::Ended } else { RunStatus::Running };
            v.prompt = if i % 2 == 0 { "even" } else { "odd" }.into();
        })
        .await;
    }
    // It is known how it will end, and it has not yet.
    start_with(store, "s", 0, |v| {
        v.created_at = Timestamp(1);
        v.outcome = Some(RunOutcome::Success);
        v.status = RunStatus::Finishing;
    })
    .await;
}

pub async fn runs_are_found_by_how_they_ended<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    of_every_kind(&store).await;
    let words = |text| Words::parse(text).unwrap();
    for (live, outcomes, search, wanted) in [
        (true, vec![], "", &["r8", "r4", "r0", "s"] as &[_]),
        (false, vec![RunOutcome::Success], "", &["r9", "r5", "r1"]),
        (false, vec![RunOutcome::Failed, RunOutcome::Cancelled], "", &["r7", "r6", "r3", "r2"]),
        (false, vec![RunOutcome::Failed, RunOutcome::Cancelled], "even", &["r6", "r2"]),
        (true, vec![], "odd", &[]),
        (true, vec![RunOutcome::Success], "", &[]),
    ] {
        let query = RunQuery { live, outcomes, words: words(search), ..Default::default() };
        assert_eq!(found(&store, query.clone()).await, wanted, "{query:?}");
    }
    // A run that ends goes over.
    let run = run_id("r0");
    let token = store.holder(&run).await.unwrap().unwrap().token;
    let view = RunView {
        status: RunStatus::Ended,
        outcome: Some(RunOutcome::Failed),
        created_at: Timestamp(100),
        ..run_view(&run)
    };
    store.append(step(&run, token, 1, vec![], vec![View::Run(view)])).await.unwrap();
    let live = found(&store, RunQuery { live: true, ..Default::default() }).await;
    assert_eq!(live, ["r8", "r4", "s"]);
    let failed = RunQuery { outcomes: vec![RunOutcome::Failed], ..Default::default() };
    assert_eq!(found(&store, failed).await, ["r6", "r2", "r0"]);
}

async fn count(store: &Arc<dyn Store>, words: &str) -> RunCounts {
    store.count_runs(&Words::parse(words).unwrap()).await.unwrap()
}

pub async fn runs_are_counted<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    assert_eq!(store.count_runs(&Words::default()).await.unwrap(), RunCounts::default());
    of_every_kind(&store).await;
    assert_eq!(count(&store, "").await, RunCounts { all: 11, live: 4, success: 3, failed: 2, cancelled: 2 });
    assert_eq!(
        count(&store, "ODD r").await,
        RunCounts { all: 5, live: 0, success: 3, failed: 0, cancelled: 2 }
    );
    assert_eq!(count(&store, "nothing").await, RunCounts::default());
    // Ended, and nobody said how: one of all.
    start_with(&store, "t", 0, |v| v.status = RunStatus::Ended).await;
    assert_eq!(count(&store, "").await, RunCounts { all: 12, live: 4, success: 3, failed: 2, cancelled: 2 });
}

/// They may be told of others, too.
async fn until_told(changes: &mut Changes, what: &str, runs: &[&RunId]) {
    let mut left: Vec<&RunId> = runs.to_vec();
    while !left.is_empty() {
        match patiently(what, changes.next()).await {
            Changed::Runs(told) => left.retain(|run| !told.contains(*run)),
            Changed::Any => panic!("{what}: it is known which"),
        }
    }
}

pub async fn followers_hear_which_runs_changed<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (a, _) = start(&store, "a", 1).await;
    let (b, lease) = start(&store, "b", 1).await;
    let mut changes = store.changes();
    store.append_journal(entry(&a, 0, 1, 0, events("agent.a", 1))).await.unwrap();
    until_told(&mut changes, "an entry", &[&a]).await;
    let ask = forkyard_core::budget::Ask { fork: 0, attempt: Attempt(1), request: "r".into(), worst: Usd(9) };
    store.reserve(&b, ask).await.unwrap();
    store.settle(&b, "r", Usd(1)).await.unwrap();
    until_told(&mut changes, "money", &[&b]).await;
    end(&store, &b, lease).await;
    until_told(&mut changes, "the end", &[&b]).await;
    // While nobody listens, all of it is kept.
    let ((c, _), (d, _)) = (start(&store, "c", 1).await, start(&store, "d", 1).await);
    until_told(&mut changes, "new ones", &[&c, &d]).await;
    store.delete_run(&b).await.unwrap();
    // Who is gone can't be asked, so that anything may have changed is an answer.
    patiently("gone", async {
        while let Changed::Runs(told) = changes.next().await {
            if told.contains(&b) {
                break;
            }
        }
    })
    .await;
}

pub async fn sandboxes_are_found_by_state<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (a, lease) = start(&store, "a", 3).await;
    let (b, lease_b) = start(&store, "b", 1).await;
    let of = |run: &RunId, states: &[SandboxState]| -> Vec<View> {
        states.iter().enumerate().map(|(i, s)| View::Sandbox(sandbox_view(run, i as u32, *s))).collect()
    };
    let states = [SandboxState::Live, SandboxState::Owed, SandboxState::Destroyed];
    store.append(step(&a, lease, 1, vec![], of(&a, &states))).await.unwrap();
    store.append(step(&b, lease_b, 1, vec![], of(&b, &[SandboxState::Owed]))).await.unwrap();
    let count = |run: Option<&RunId>, states: &[SandboxState]| {
        let query = SandboxQuery { run: run.cloned(), states: states.to_vec(), limit: 0 };
        let store = store.clone();
        async move { store.sandboxes(&query).await.unwrap().len() }
    };
    assert_eq!(count(None, &[]).await, 4);
    assert_eq!(count(Some(&a), &[]).await, 3);
    assert_eq!(count(None, &[SandboxState::Owed]).await, 2);
    assert_eq!(count(Some(&a), &[SandboxState::Owed, SandboxState::Live]).await, 2);
    assert_eq!(count(Some(&run_id("no")), &[]).await, 0);
    assert_eq!(store.sandboxes(&SandboxQuery { limit: 3, ..Default::default() }).await.unwrap().len(), 3);
    let owed = sandbox_view(&b, 0, SandboxState::Owed);
    for _ in 0..2 {
        store.sandbox_destroyed(&owed.id).await.unwrap();
    }
    assert_eq!(count(Some(&b), &[SandboxState::Owed]).await, 0);
    let found = store.sandboxes(&SandboxQuery { run: Some(b), ..Default::default() }).await.unwrap();
    assert_eq!(found[0].state, SandboxState::Destroyed);
    assert_eq!(found[0].id, owed.id);
}

pub async fn blobs_are_kept<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i * 7 % 256) as u8).collect();
    assert_eq!(store.blob("k").await.unwrap(), None);
    store.put_blob("k", &bytes).await.unwrap();
    store.put_blob("K", b"").await.unwrap();
    assert_eq!(store.blob("k").await.unwrap(), Some(bytes));
    assert_eq!(store.blob("K").await.unwrap(), Some(vec![]));
    store.put_blob("k", b"new").await.unwrap();
    assert_eq!(store.blob("k").await.unwrap(), Some(b"new".to_vec()));
    for _ in 0..2 {
        store.delete_blob("k").await.unwrap();
    }
    assert_eq!(store.blob("k").await.unwrap(), None);
    assert_invalid(store.put_blob("big", &vec![0; MAX_BLOB_BYTES + 1]).await, "big");
    assert_invalid(store.put_blob("", b"x").await, "key");
}

async fn end(store: &Arc<dyn Store>, run: &RunId, lease: LeaseToken) {
    let mut view = run_view(run);
    view.status = RunStatus::Ended;
    store.append(step(run, lease, 1, vec![], vec![View::Run(view)])).await.unwrap();
}

pub async fn only_ended_runs_are_deleted<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    assert_invalid(store.delete_run(&run).await, "has not ended");
    let owed = sandbox_view(&run, 0, SandboxState::Owed);
    store.append(step(&run, lease, 1, vec![], vec![View::Sandbox(owed.clone())])).await.unwrap();
    end(&store, &run, lease).await;
    assert_invalid(store.delete_run(&run).await, owed.id.as_str());
    store.sandbox_destroyed(&owed.id).await.unwrap();
    store.delete_run(&run).await.unwrap();
    assert_not_found(store.delete_run(&run).await);
}

pub async fn deleting_takes_all_of_a_run<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let mut kept = None;
    for name in ["a", "a0", "ab"] {
        let (run, lease) = start(&store, name, 1).await;
        store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 3))).await.unwrap();
        store.put_command(&run, command(Some("k"), json!(1))).await.unwrap();
        store.put_message(&run, 0, message(Some("k"), json!(1))).await.unwrap();
        let ask =
            forkyard_core::budget::Ask { fork: 0, attempt: Attempt(1), request: "r".into(), worst: Usd(9) };
        store.reserve(&run, ask).await.unwrap();
        let gone = sandbox_view(&run, 0, SandboxState::Destroyed);
        store.append(step(&run, lease, 1, vec![], vec![View::Sandbox(gone)])).await.unwrap();
        store.put_blob(&format!("{name}/checkpoint"), b"x").await.unwrap();
        end(&store, &run, lease).await;
        kept = Some(run);
    }
    store.put_blob("a", b"a name that is not under the run's").await.unwrap();
    let run = run_id("a");
    store.delete_run(&run).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap(), None);
    assert_eq!(store.forks(&run).await.unwrap(), vec![]);
    assert_eq!(store.last_position(&run).await.unwrap(), 0);
    assert_eq!(store.read_run(&run, &EventQuery::default()).await.unwrap(), vec![]);
    assert_eq!(store.sandboxes(&SandboxQuery::default()).await.unwrap().len(), 2);
    assert_eq!(store.blob("a/checkpoint").await.unwrap(), None);
    assert!(store.blob("a").await.unwrap().is_some());
    for other in ["a0", "ab"] {
        assert!(store.blob(&format!("{other}/checkpoint")).await.unwrap().is_some(), "{other}");
        assert_eq!(store.last_position(&run_id(other)).await.unwrap(), 4);
    }
    assert_eq!(store.runs(&RunQuery::default()).await.unwrap().len(), 2);
    assert_eq!(store.balance(&kept.unwrap()).await.unwrap().reserved, Usd(9));
    // The same name begins anew.
    let (run, _) = start(&store, "a", 1).await;
    assert_eq!(store.last_position(&run).await.unwrap(), 1);
    assert_eq!(store.balance(&run).await.unwrap().reserved, Usd(0));
    assert_eq!(store.pending_commands(&run).await.unwrap(), vec![]);
    assert_eq!(store.journal_len(&run, 0).await.unwrap(), 0);
}

pub async fn watchers_hear_of_everything<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let ask = forkyard_core::budget::Ask { fork: 0, attempt: Attempt(1), request: "r".into(), worst: Usd(9) };
    store.reserve(&run, ask).await.unwrap();
    let sandbox = sandbox_view(&run, 0, SandboxState::Owed);
    store.append(step(&run, lease, 1, vec![], vec![View::Sandbox(sandbox.clone())])).await.unwrap();
    for change in ["append", "journal", "command", "message", "settle", "sandbox"] {
        let mut watches = [store.watch(Some(&run)), store.watch(None)];
        match change {
            "append" => {
                store.append(step(&run, lease, 1, events("run.a", 1), vec![])).await.unwrap();
            }
            "journal" => {
                store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 1))).await.unwrap();
            }
            "command" => {
                store.put_command(&run, command(None, json!(1))).await.unwrap();
            }
            "message" => {
                store.put_message(&run, 0, message(None, json!(1))).await.unwrap();
            }
            "settle" => store.settle(&run, "r", Usd(1)).await.unwrap(),
            _ => store.sandbox_destroyed(&sandbox.id).await.unwrap(),
        }
        for watch in &mut watches {
            patiently(change, watch.changed()).await;
        }
    }
    let mut any = store.watch(None);
    start(&store, "b", 1).await;
    patiently("a new run", any.changed()).await;
}

/// Not a promise to the letter (a watch may wake for nothing), but ten thousand watchers rely on it.
pub async fn watchers_of_one_run_sleep_through_others<F: Future<Output = Arc<dyn Store>>>(
    make: impl Fn() -> F,
) {
    let store = make().await;
    let (a, _) = start(&store, "a", 1).await;
    let (b, _) = start(&store, "b", 1).await;
    let (mut of_a, mut of_b) = (store.watch(Some(&a)), store.watch(Some(&b)));
    let mut woken = 0;
    for i in 0..50 {
        store.append_journal(entry(&b, 0, 1, i, events("agent.a", 1))).await.unwrap();
        patiently("its own run", of_b.changed()).await;
        woken += usize::from(tokio::time::timeout(Duration::ZERO, of_a.changed()).await.is_ok());
    }
    assert!(woken <= 5, "woken {woken} times by another run");
}

pub async fn a_store_has_an_identity<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let (one, two) = (make().await, make().await);
    let identity = one.identity().await.unwrap();
    assert!(identity.len() >= 16, "{identity:?}");
    assert_eq!(one.identity().await.unwrap(), identity);
    assert_ne!(two.identity().await.unwrap(), identity);
}

pub async fn journal_length_counts_all_attempts<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 3))).await.unwrap();
    store.append_journal(entry(&run, 1, 1, 0, events("agent.a", 9))).await.unwrap();
    let machine = Append {
        stream: StreamId::Fork(run.clone(), 0),
        ..step(&run, lease, 0, events("fork.a", 7), vec![])
    };
    store.append(machine).await.unwrap();
    store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, 2))])).await.unwrap();
    assert_eq!(store.journal_len(&run, 0).await.unwrap(), 3);
    store.append_journal(entry(&run, 0, 2, 0, events("agent.b", 2))).await.unwrap();
    assert_eq!(store.journal_len(&run, 0).await.unwrap(), 5);
}
