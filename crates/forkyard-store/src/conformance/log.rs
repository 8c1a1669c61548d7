use super::*;

pub async fn keys_make_runs_once<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let new = |name: &str, key: &str| CreateRun {
        run: run_id(name),
        key: Some(key.into()),
        events: events("run.created", 2),
        views: vec![View::Run(run_view(&run_id(name)))],
    };
    assert_eq!(store.create_run(new("a", "k")).await.unwrap(), Created::New);
    assert_eq!(store.create_run(new("b", "k")).await.unwrap(), Created::Existing(run_id("a")));
    assert_eq!(store.create_run(new("a", "k")).await.unwrap(), Created::Existing(run_id("a")));
    assert_eq!(store.run(&run_id("b")).await.unwrap(), None);
    assert_eq!(store.last_position(&run_id("a")).await.unwrap(), 2);
    assert_eq!(store.create_run(new("c", "K")).await.unwrap(), Created::New, "keys differ by case");

    // Of many rivals with one key, one makes the run and all learn of it.
    let mut rivals = tokio::task::JoinSet::new();
    for i in 0..8 {
        let (store, new) = (store.clone(), new(&format!("r{i}"), "race"));
        rivals.spawn(async move { (new.run.clone(), store.create_run(new).await.unwrap()) });
    }
    let answers = rivals.join_all().await;
    let made: Vec<&RunId> = answers.iter().filter(|(_, c)| *c == Created::New).map(|(run, _)| run).collect();
    assert_eq!(made.len(), 1, "{answers:?}");
    for (run, created) in &answers {
        assert!(run == made[0] || *created == Created::Existing(made[0].clone()));
    }
}

pub async fn runs_are_created_once<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    let again = |views| CreateRun { run: run.clone(), key: None, events: events("x.y", 3), views };
    let conflict = store.create_run(again(vec![View::Run(run_view(&run))])).await;
    assert_eq!(conflict, Err(StoreError::Conflict { expected: 0, actual: 1 }));
    assert_invalid(store.create_run(again(vec![])).await, "view of the run");
    assert_invalid(
        store.create_run(CreateRun { run: run_id("b"), ..again(vec![View::Run(run_view(&run))]) }).await,
        "run a",
    );
    assert_eq!(store.last_position(&run).await.unwrap(), 1);
}

pub async fn steps_need_the_expected_sequence<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let done = store.append(step(&run, lease, 1, events("run.a", 2), vec![])).await.unwrap();
    assert_eq!(done, Appended { seq: 3, position: 3 });
    for expected in [0, 2, 4, u64::MAX] {
        let refused = store.append(step(&run, lease, expected, events("run.b", 1), vec![])).await;
        assert_eq!(refused, Err(StoreError::Conflict { expected, actual: 3 }));
    }
    // Streams count for themselves, positions for the run.
    let of_fork = Append {
        stream: StreamId::Fork(run.clone(), 0),
        ..step(&run, lease, 0, events("fork.a", 1), vec![])
    };
    assert_eq!(store.append(of_fork).await.unwrap(), Appended { seq: 1, position: 4 });
    let journal = store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 2))).await.unwrap();
    assert_eq!(journal, Appended { seq: 2, position: 6 });
    let refused = store.append_journal(entry(&run, 0, 1, 1, events("agent.b", 1))).await;
    assert_eq!(refused, Err(StoreError::Conflict { expected: 1, actual: 2 }));
    let wrong = Append {
        stream: StreamId::Journal(run.clone(), 0, Attempt(1)),
        ..step(&run, lease, 2, events("agent.b", 1), vec![])
    };
    assert_invalid(store.append(wrong).await, "append_journal");
    assert_eq!(store.last_position(&run).await.unwrap(), 6);
}

pub async fn steps_need_the_lease<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, old) = start(&store, "a", 1).await;
    store.release(&run, old).await.unwrap();
    let try_step = |token| store.append(step(&run, token, 1, events("run.a", 1), vec![]));
    assert_eq!(try_step(old).await, Err(StoreError::LeaseLost), "released");
    let new = store.acquire(&run, "other", LONG).await.unwrap().unwrap().token;
    assert!(new > old);
    assert_eq!(try_step(old).await, Err(StoreError::LeaseLost));
    assert_eq!(try_step(0).await, Err(StoreError::LeaseLost));
    assert_eq!(try_step(u64::MAX).await, Err(StoreError::LeaseLost));
    // A lost lease is said first: reloading would not help.
    let both = store.append(step(&run, old, 99, events("run.a", 1), vec![])).await;
    assert_eq!(both, Err(StoreError::LeaseLost));
    try_step(new).await.unwrap();
}

pub async fn journals_need_the_attempt<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 1))).await.unwrap();
    store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, 2))])).await.unwrap();
    let stale = store.append_journal(entry(&run, 0, 1, 1, events("agent.b", 1))).await;
    assert_eq!(stale, Err(StoreError::StaleAttempt { mine: Attempt(1), current: Attempt(2) }));
    assert_invalid(store.append_journal(entry(&run, 0, 3, 0, events("agent.b", 1))).await, "attempt 3");
    let done = store.append_journal(entry(&run, 0, 2, 0, events("agent.b", 1))).await.unwrap();
    assert_eq!(done.seq, 1, "each attempt has a journal of its own");
    assert_eq!(store.attempt(&run, 0).await.unwrap(), Some(Attempt(2)));
}

/// A step that was lost on its way back is told from one that comes too late.
pub async fn a_repeated_step_is_known<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let first = || step(&run, lease, 1, events("run.a", 2), vec![View::Fork(fork_view(&run, 0, 1))]);
    store.append(first()).await.unwrap();
    assert_eq!(store.append(first()).await, Err(StoreError::Conflict { expected: 1, actual: 3 }));
    let next = vec![View::Fork(fork_view(&run, 0, 2))];
    store.append(step(&run, lease, 3, events("run.b", 1), next)).await.unwrap();
    let again = store.append(first()).await;
    assert_eq!(again, Err(StoreError::Conflict { expected: 1, actual: 4 }), "whichever attempt it was of");
    assert_eq!(store.attempt(&run, 0).await.unwrap(), Some(Attempt(2)));
}

pub async fn a_refused_step_leaves_no_trace<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, 5))])).await.unwrap();
    let id = store.put_command(&run, command(None, json!("pause"))).await.unwrap();
    let mut paused = run_view(&run);
    paused.paused = true;
    let sandbox = sandbox_view(&run, 0, SandboxState::Live);
    let full = |expected, attempt, token| Append {
        consume: vec![id],
        ..step(
            &run,
            token,
            expected,
            events("run.paused", 3),
            vec![
                View::Run(paused.clone()),
                View::Sandbox(sandbox.clone()),
                View::Fork(fork_view(&run, 1, 7)),
                // The last of all is what is refused.
                View::Fork(fork_view(&run, 0, attempt)),
            ],
        )
    };
    let stale = StoreError::StaleAttempt { mine: Attempt(4), current: Attempt(5) };
    assert_eq!(store.append(full(1, 4, lease)).await, Err(stale));
    assert_eq!(store.append(full(7, 5, lease)).await, Err(StoreError::Conflict { expected: 7, actual: 1 }));
    assert_eq!(store.append(full(1, 5, lease + 1)).await, Err(StoreError::LeaseLost));
    assert_eq!(store.run(&run).await.unwrap().unwrap(), run_view(&run));
    assert_eq!(store.attempt(&run, 1).await.unwrap(), Some(Attempt(1)));
    assert_eq!(store.pending_commands(&run).await.unwrap().len(), 1);
    assert_eq!(store.sandboxes(&SandboxQuery::default()).await.unwrap(), vec![]);
    assert_eq!(store.last_position(&run).await.unwrap(), 1);

    let done = store.append(full(1, 5, lease)).await.unwrap();
    assert_eq!(done, Appended { seq: 4, position: 4 });
    assert!(store.run(&run).await.unwrap().unwrap().paused);
    assert_eq!(store.pending_commands(&run).await.unwrap(), vec![]);
    assert_eq!(store.sandboxes(&SandboxQuery::default()).await.unwrap(), vec![sandbox]);
    assert_eq!(store.attempt(&run, 1).await.unwrap(), Some(Attempt(7)));
}

pub async fn a_refused_entry_leaves_no_trace<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    let id = store.put_message(&run, 0, message(None, json!("hi"))).await.unwrap();
    let with =
        |expected| AppendJournal { deliver: vec![id], ..entry(&run, 0, 1, expected, events("agent.a", 2)) };
    assert_eq!(store.append_journal(with(3)).await, Err(StoreError::Conflict { expected: 3, actual: 0 }));
    assert_eq!(store.pending_messages(&run, 0).await.unwrap().len(), 1);
    assert_eq!(store.journal_len(&run, 0).await.unwrap(), 0);
    store.append_journal(with(0)).await.unwrap();
    assert_eq!(store.pending_messages(&run, 0).await.unwrap(), vec![]);
    assert_eq!(store.journal_len(&run, 0).await.unwrap(), 2);
}

pub async fn views_stay_in_their_run<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (a, lease) = start(&store, "a", 1).await;
    let (b, _) = start(&store, "b", 1).await;
    for view in [
        View::Run(run_view(&b)),
        View::Fork(fork_view(&b, 0, 9)),
        View::Sandbox(sandbox_view(&b, 0, SandboxState::Live)),
    ] {
        assert_invalid(store.append(step(&a, lease, 1, events("run.a", 1), vec![view])).await, "run b");
    }
    assert_eq!(store.attempt(&b, 0).await.unwrap(), Some(Attempt(1)));
    assert_eq!(store.last_position(&a).await.unwrap(), 1);
}

pub async fn streams_are_read_in_pages<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    store.append(step(&run, lease, 1, events("run.a", 24), vec![])).await.unwrap();
    store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 5))).await.unwrap();
    let stream = StreamId::Run(run.clone());
    let (mut after, mut seen) = (0, Vec::new());
    loop {
        let page = store.read_stream(&stream, after, 7).await.unwrap();
        assert!(page.len() <= 7);
        let Some(last) = page.last() else { break };
        after = last.seq;
        seen.extend(page);
    }
    assert_eq!(seen.iter().map(|e| e.seq).collect::<Vec<_>>(), (1..=25).collect::<Vec<_>>());
    assert!(seen.iter().all(|e| e.stream == stream));
    assert_eq!(seen[0].event, event("run.created", json!({ "i": 0 })));
    assert_eq!(seen[24].event, event("run.a", json!({ "i": 23 })));
    assert_eq!(store.read_stream(&stream, 0, 0).await.unwrap(), seen, "0 is the store's own bound");
    assert_eq!(store.read_stream(&stream, u64::MAX, 0).await.unwrap(), vec![]);
    let journal = StreamId::Journal(run.clone(), 0, Attempt(1));
    assert_eq!(store.read_stream(&journal, 3, 0).await.unwrap().len(), 2);
    for none in
        [StreamId::Fork(run.clone(), 0), StreamId::Journal(run, 0, Attempt(2)), StreamId::Run(run_id("no"))]
    {
        assert_eq!(store.read_stream(&none, 0, 0).await.unwrap(), vec![]);
    }
}

pub async fn runs_are_read_by_position<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    let (other, _) = start(&store, "b", 1).await;
    for i in 0..10 {
        store.append_journal(entry(&run, (i % 2) as u32, 1, i / 2, events("agent.a", 1))).await.unwrap();
        store.append_journal(entry(&other, 0, 1, i, events("agent.a", 1))).await.unwrap();
    }
    store.append(step(&run, lease, 1, events("run.a", 1), vec![])).await.unwrap();
    let read = |query: EventQuery| {
        let (store, run) = (store.clone(), run.clone());
        async move {
            let found = store.read_run(&run, &query).await.unwrap();
            assert!(found.iter().all(|e| *e.stream.run() == run));
            found.iter().map(|e| e.position).collect::<Vec<_>>()
        }
    };
    let all: Vec<u64> = (1..=12).collect();
    assert_eq!(read(EventQuery::default()).await, all);
    assert_eq!(read(EventQuery { after: 9, ..Default::default() }).await, [10, 11, 12]);
    assert_eq!(read(EventQuery { after: 3, before: Some(6), ..Default::default() }).await, [4, 5]);
    assert_eq!(read(EventQuery { before: Some(0), ..Default::default() }).await, Vec::<u64>::new());
    assert_eq!(read(EventQuery { after: 5, limit: 2, ..Default::default() }).await, [6, 7]);
    assert_eq!(read(EventQuery { newest_first: true, limit: 3, ..Default::default() }).await, [12, 11, 10]);
    let back = EventQuery { newest_first: true, before: Some(10), limit: 2, ..Default::default() };
    assert_eq!(read(back).await, [9, 8]);
    for huge in [12, 1 << 32, u64::MAX] {
        assert_eq!(read(EventQuery { after: huge, ..Default::default() }).await, Vec::<u64>::new());
    }
    assert_eq!(read(EventQuery { before: Some(u64::MAX), ..Default::default() }).await, all);
}

pub async fn queries_filter_by_kind_and_fork<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    let kinds = ["agent.turn", "agent.tool", "agents.x", "agent", "tool.call", "agent_.y"];
    let list = kinds.iter().map(|k| event(k, json!(null))).collect();
    store.append(step(&run, lease, 1, list, vec![])).await.unwrap();
    store.append_journal(entry(&run, 1, 1, 0, events("agent.turn", 1))).await.unwrap();
    let of_fork = Append {
        stream: StreamId::Fork(run.clone(), 1),
        ..step(&run, lease, 0, events("fork.a", 1), vec![])
    };
    store.append(of_fork).await.unwrap();
    let read = |kinds: &[&str], fork| {
        let query =
            EventQuery { kinds: kinds.iter().map(|k| k.to_string()).collect(), fork, ..Default::default() };
        let (store, run) = (store.clone(), run.clone());
        async move {
            let found = store.read_run(&run, &query).await.unwrap();
            found.into_iter().map(|e| (e.position, e.event.kind)).collect::<Vec<_>>()
        }
    };
    let is = |list: &[(u64, &str)]| list.iter().map(|(p, k)| (*p, k.to_string())).collect::<Vec<_>>();
    assert_eq!(read(&["agent."], None).await, is(&[(2, "agent.turn"), (3, "agent.tool"), (8, "agent.turn")]));
    assert_eq!(read(&["agent"], None).await, is(&[(5, "agent")]));
    assert_eq!(read(&["tool.", "agents.x"], None).await, is(&[(4, "agents.x"), (6, "tool.call")]));
    assert_eq!(read(&["%", "' OR 1=1 --"], None).await, is(&[]));
    assert_eq!(read(&[], Some(1)).await, is(&[(8, "agent.turn"), (9, "fork.a")]));
    assert_eq!(read(&["fork."], Some(1)).await, is(&[(9, "fork.a")]));
    assert_eq!(read(&[], Some(0)).await, is(&[]));
    let many = EventQuery { kinds: vec!["a.b".into(); check::MAX_KINDS + 1], ..Default::default() };
    assert_invalid(store.read_run(&run, &many).await, "kinds");
}

pub async fn sandboxes_have_their_events<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let box1 = SandboxId::new("box1").unwrap();
    let about = |kind: &str, id: &str| NewEvent {
        sandbox: Some(SandboxId::new(id).unwrap()),
        source: Source::Worker,
        ..event(kind, json!({ "of": id }))
    };
    let list = vec![
        about("sandbox.a", "box1"),
        about("sandbox.b", "box2"),
        event("run.x", json!(1)),
        about("exec.c", "box1"),
    ];
    store.append(step(&run, lease, 1, list, vec![])).await.unwrap();
    let found = store.read_sandbox(&box1, &EventQuery::default()).await.unwrap();
    assert_eq!(found.iter().map(|e| e.position).collect::<Vec<_>>(), [2, 5]);
    assert_eq!(found[0].event, about("sandbox.a", "box1"));
    let newest = EventQuery { newest_first: true, limit: 1, ..Default::default() };
    assert_eq!(store.read_sandbox(&box1, &newest).await.unwrap()[0].position, 5);
    let after = EventQuery { after: 2, kinds: vec!["exec.".into()], ..Default::default() };
    assert_eq!(store.read_sandbox(&box1, &after).await.unwrap().len(), 1);
    let older = EventQuery { newest_first: true, skip: 1, ..Default::default() };
    assert_eq!(store.read_sandbox(&box1, &older).await.unwrap()[0].position, 2);
    let none = SandboxId::new("box9").unwrap();
    assert_eq!(store.read_sandbox(&none, &EventQuery::default()).await.unwrap(), vec![]);
    for (sandbox, kinds, count) in [
        (&box1, vec![], 2),
        (&box1, vec!["exec.".to_string()], 1),
        (&box1, vec!["exec.c".to_string(), "sandbox.a".to_string()], 2),
        (&box1, vec!["run.".to_string()], 0),
        (&none, vec![], 0),
    ] {
        assert_eq!(store.count_sandbox(sandbox, &kinds).await.unwrap(), count, "{sandbox} {kinds:?}");
    }
}

pub async fn journals_are_read_in_order<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 3))).await.unwrap();
    store.append_journal(entry(&run, 1, 1, 0, events("agent.other", 3))).await.unwrap();
    store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, 12))])).await.unwrap();
    store.append_journal(entry(&run, 0, 12, 0, events("agent.b", 2))).await.unwrap();
    let found = store.read_journals(&run, 0).await.unwrap();
    let order: Vec<(u64, &str)> = found.iter().map(|e| (e.seq, e.event.kind.as_str())).collect();
    assert_eq!(order, [(1, "agent.a"), (2, "agent.a"), (3, "agent.a"), (1, "agent.b"), (2, "agent.b")]);
    assert_eq!(found[4].stream, StreamId::Journal(run.clone(), 0, Attempt(12)));
    assert_eq!(store.read_journals(&run, 5).await.unwrap(), vec![]);
}

pub async fn what_is_missing_is_named<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    let no = run_id("no");
    assert_not_found(store.append(step(&no, 1, 0, events("run.a", 1), vec![])).await);
    assert_not_found(store.append_journal(entry(&no, 0, 1, 0, vec![])).await);
    assert_not_found(store.append_journal(entry(&run, 3, 1, 0, vec![])).await);
    assert_not_found(store.put_command(&no, command(None, json!(1))).await);
    assert_not_found(store.put_message(&no, 0, message(None, json!(1))).await);
    assert_not_found(store.put_message(&run, 3, message(None, json!(1))).await);
    assert_not_found(store.acquire(&no, "me", LONG).await);
    assert_not_found(store.renew(&no, 1, LONG, None).await);
    assert_not_found(store.delete_run(&no).await);
    assert_not_found(store.balance(&no).await);
    assert_not_found(store.sandbox_destroyed(&SandboxId::new("no").unwrap()).await);
    assert_eq!(store.run(&no).await.unwrap(), None);
    assert_eq!(store.fork(&run, 3).await.unwrap(), None);
    assert_eq!(store.attempt(&no, 0).await.unwrap(), None);
    assert_eq!(store.forks(&no).await.unwrap(), vec![]);
    assert_eq!(store.last_position(&no).await.unwrap(), 0);
    assert_eq!(store.journal_len(&no, 0).await.unwrap(), 0);
    assert_eq!(store.read_run(&no, &EventQuery::default()).await.unwrap(), vec![]);
    assert_eq!(store.pending_commands(&no).await.unwrap(), vec![]);
    assert_eq!(store.pending_messages(&no, 0).await.unwrap(), vec![]);
    store.release(&no, 1).await.unwrap();
}

pub async fn an_attempt_never_goes_back<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let put =
        |attempt| store.append(step(&run, lease, 1, vec![], vec![View::Fork(fork_view(&run, 0, attempt))]));
    put(3).await.unwrap();
    assert_eq!(put(2).await, Err(StoreError::StaleAttempt { mine: Attempt(2), current: Attempt(3) }));
    put(3).await.unwrap();
    assert_eq!(store.attempt(&run, 0).await.unwrap(), Some(Attempt(3)));
}

pub async fn empty_steps_write_views<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let mut view = run_view(&run);
    view.error = Some("x".into());
    let done = store.append(step(&run, lease, 1, vec![], vec![View::Run(view.clone())])).await.unwrap();
    assert_eq!(done, Appended { seq: 1, position: 1 });
    assert_eq!(store.run(&run).await.unwrap(), Some(view));
    let id = store.put_message(&run, 0, message(None, json!(1))).await.unwrap();
    let none = AppendJournal { deliver: vec![id], ..entry(&run, 0, 1, 0, vec![]) };
    assert_eq!(store.append_journal(none).await.unwrap().seq, 0);
    assert_eq!(store.pending_messages(&run, 0).await.unwrap(), vec![]);
}
