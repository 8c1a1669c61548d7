use super::*;

const HOSTILE: &[&str] = &[
    "",
    "a\0b\0",
    "'; DROP TABLE events; --",
    "\" OR 1=1",
    "\\u0000 \\ud800 \\x00",
    "$1 ?1 :x @y %s {0}",
    "\u{202e}\u{feff}\u{fffd}\u{10ffff}",
    "🦀 ä ß \r\n\t\u{7f}\u{1b}[31m",
    "</script><!--",
];

pub async fn hostile_text_round_trips<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let long = "\0\"\\é".repeat(50_000);
    for (i, text) in HOSTILE.iter().copied().chain([long.as_str()]).enumerate() {
        let data = json!({ text: [text, { "k": text }] });
        let mut view = run_view(&run);
        view.prompt = text.into();
        view.error = Some(text.into());
        let list = vec![event("run.a", data.clone())];
        store.append(step(&run, lease, 1 + i as u64, list, vec![View::Run(view.clone())])).await.unwrap();
        assert_eq!(store.run(&run).await.unwrap(), Some(view));
        let read = store.read_stream(&StreamId::Run(run.clone()), 1 + i as u64, 1).await.unwrap();
        assert_eq!(read[0].event.data, data);
        store.put_message(&run, 0, message(None, data.clone())).await.unwrap();
        store.put_command(&run, command(None, data.clone())).await.unwrap();
        assert_eq!(store.pending_messages(&run, 0).await.unwrap()[i].data, data);
        assert_eq!(store.pending_commands(&run).await.unwrap()[i].data, data);
    }
}

pub async fn numbers_round_trip<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let data = json!([
        0,
        -1,
        u64::MAX,
        i64::MIN,
        0.1,
        1e-308,
        f64::MAX,
        5e-324,
        0.1 + 0.2,
        123456789.12345679,
        1e23
    ]);
    let new = NewEvent { version: u16::MAX, at: Timestamp(i64::MAX as u64), ..event("run.a", data) };
    store.append(step(&run, lease, 1, vec![new.clone()], vec![])).await.unwrap();
    assert_eq!(store.read_stream(&StreamId::Run(run.clone()), 1, 1).await.unwrap()[0].event, new);
    let late = NewEvent { at: Timestamp(u64::MAX), ..new };
    assert_invalid(store.append(step(&run, lease, 2, vec![late], vec![])).await, "time");
}

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, i| if i % 2 == 0 { json!([inner]) } else { json!({ "k": inner }) })
}

pub async fn too_much_is_refused<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let big = json!("x".repeat(MAX_DATA_BYTES));
    let put = |list: Vec<NewEvent>| store.append(step(&run, lease, 1, list, vec![]));
    assert_invalid(put(vec![event("run.a", json!(1)), event("run.big", big.clone())]).await, "run.big");
    assert_invalid(put(events("run.a", check::MAX_ITEMS as u64 + 1)).await, "events");
    assert_invalid(put(vec![event("run.deep", nested(check::MAX_DEPTH + 1))]).await, "nested");
    for kind in ["", "a\0b", "a\nb", &"x".repeat(check::MAX_KIND_BYTES + 1)] {
        assert_invalid(put(vec![event(kind, json!(1))]).await, "kind");
    }
    let many = AppendJournal { deliver: vec![1; check::MAX_ITEMS + 1], ..entry(&run, 0, 1, 0, vec![]) };
    assert_invalid(store.append_journal(many).await, "messages");
    assert_invalid(
        store.append_journal(entry(&run, 0, 1, 0, vec![event("agent.big", big.clone())])).await,
        "agent.big",
    );
    assert_invalid(store.put_command(&run, command(None, big.clone())).await, "command");
    assert_invalid(store.put_message(&run, 0, message(None, big.clone())).await, "message");
    let mut view = run_view(&run);
    view.prompt = "x".repeat(MAX_DATA_BYTES);
    assert_invalid(store.append(step(&run, lease, 1, vec![], vec![View::Run(view)])).await, "view");
    assert_eq!(store.last_position(&run).await.unwrap(), 1);
    assert_eq!(store.pending_commands(&run).await.unwrap(), vec![]);
    let deep = event("run.deep", nested(check::MAX_DEPTH));
    put(vec![deep.clone()]).await.unwrap();
    assert_eq!(store.read_stream(&StreamId::Run(run.clone()), 1, 1).await.unwrap()[0].event, deep);
}

pub async fn odd_names_are_kept_or_refused<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 1).await;
    let long = "k".repeat(check::MAX_KEY_BYTES + 1);
    for bad in ["", "a\0b", &long] {
        assert_invalid(store.put_command(&run, command(Some(bad), json!(1))).await, "key");
        assert_invalid(store.put_message(&run, 0, message(Some(bad), json!(1))).await, "key");
        assert_invalid(store.acquire(&run, bad, LONG).await, "owner");
        assert_invalid(store.put_blob(bad, b"x").await, "key");
        let new = CreateRun {
            run: run_id("b"),
            key: Some(bad.into()),
            events: vec![],
            views: vec![View::Run(run_view(&run_id("b")))],
        };
        assert_invalid(store.create_run(new).await, "key");
    }
    let mut ids = std::collections::BTreeSet::new();
    for odd in HOSTILE.iter().filter(|t| !t.is_empty() && !t.contains('\0')) {
        assert!(ids.insert(store.put_command(&run, command(Some(odd), json!(1))).await.unwrap()));
        assert!(!ids.insert(store.put_command(&run, command(Some(odd), json!(1))).await.unwrap()));
        store.put_blob(odd, odd.as_bytes()).await.unwrap();
        assert_eq!(store.blob(odd).await.unwrap().unwrap(), odd.as_bytes());
        let ask = forkyard_core::budget::Ask {
            fork: 0,
            attempt: Attempt(1),
            request: odd.to_string(),
            worst: Usd(1),
        };
        assert_eq!(store.reserve(&run, ask).await.unwrap(), Reserve::Granted);
        store.settle(&run, odd, Usd(1)).await.unwrap();
    }
    assert_eq!(store.balance(&run).await.unwrap().spent, Usd(ids.len() as u64));
}

pub async fn a_full_sized_event_is_stored<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    // Two quotes are part of the text.
    let data = json!("x".repeat(MAX_DATA_BYTES - 2));
    store.append(step(&run, lease, 1, vec![event("run.big", data.clone()); 3], vec![])).await.unwrap();
    // A page ends early rather than hold everything; following it gives all.
    let (mut after, mut seen) = (1, 0);
    loop {
        let page = store.read_run(&run, &EventQuery { after, ..Default::default() }).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.iter().all(|e| e.event.data == data));
        after = last.position;
        seen += page.len();
    }
    assert_eq!(seen, 3);
}
