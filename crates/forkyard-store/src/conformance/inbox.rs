use super::*;

pub async fn commands_wait_in_order<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let (other, other_lease) = start(&store, "b", 1).await;
    let mut ids = Vec::new();
    for i in 0..5 {
        ids.push(store.put_command(&run, command(None, json!({ "i": i }))).await.unwrap());
    }
    assert!(ids.is_sorted_by(|a, b| a < b));
    let waiting = store.pending_commands(&run).await.unwrap();
    assert_eq!(waiting.iter().map(|c| c.id).collect::<Vec<_>>(), ids);
    assert_eq!(waiting[3], StoredCommand { id: ids[3], data: json!({ "i": 3 }), at: Timestamp(5) });
    assert_eq!(store.pending_commands(&other).await.unwrap(), vec![]);

    // Another run's step can't answer them.
    let foreign = Append { consume: ids.clone(), ..step(&other, other_lease, 1, vec![], vec![]) };
    store.append(foreign).await.unwrap();
    assert_eq!(store.pending_commands(&run).await.unwrap().len(), 5);
    let some = Append { consume: vec![ids[0], ids[2]], ..step(&run, lease, 1, events("run.a", 1), vec![]) };
    store.append(some).await.unwrap();
    let left: Vec<_> = store.pending_commands(&run).await.unwrap().iter().map(|c| c.id).collect();
    assert_eq!(left, [ids[1], ids[3], ids[4]]);
    // What was answered before stays answered.
    let again = Append { consume: vec![ids[0], ids[1]], ..step(&run, lease, 2, vec![], vec![]) };
    store.append(again).await.unwrap();
    assert_eq!(store.pending_commands(&run).await.unwrap().len(), 2);
}

pub async fn command_keys_are_used_once<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    let (other, _) = start(&store, "b", 1).await;
    let first = store.put_command(&run, command(Some("k"), json!(1))).await.unwrap();
    assert_eq!(store.put_command(&run, command(Some("k"), json!(2))).await.unwrap(), first);
    assert_ne!(store.put_command(&other, command(Some("k"), json!(3))).await.unwrap(), first);
    assert_eq!(store.pending_commands(&run).await.unwrap()[0].data, json!(1));
    store.append(Append { consume: vec![first], ..step(&run, lease, 1, vec![], vec![]) }).await.unwrap();
    // Answered, but not forgotten.
    assert_eq!(store.put_command(&run, command(Some("k"), json!(4))).await.unwrap(), first);
    assert_eq!(store.pending_commands(&run).await.unwrap(), vec![]);
}

pub async fn messages_wait_for_their_fork<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 2).await;
    let mut ids = Vec::new();
    for i in 0..3 {
        ids.push(store.put_message(&run, 0, message(None, json!(i))).await.unwrap());
    }
    let of_other = store.put_message(&run, 1, message(None, json!("other"))).await.unwrap();
    let waiting = store.pending_messages(&run, 0).await.unwrap();
    assert_eq!(waiting.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
    assert_eq!(waiting[1], StoredMessage { id: ids[1], data: json!(1), at: Timestamp(5) });
    let deliver =
        AppendJournal { deliver: vec![ids[0], of_other], ..entry(&run, 0, 1, 0, events("agent.a", 1)) };
    store.append_journal(deliver).await.unwrap();
    assert_eq!(store.pending_messages(&run, 0).await.unwrap().len(), 2);
    assert_eq!(store.pending_messages(&run, 1).await.unwrap().len(), 1, "another fork's is not delivered");
}

pub async fn message_keys_are_used_once<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, _) = start(&store, "a", 2).await;
    let first = store.put_message(&run, 0, message(Some("k"), json!(1))).await.unwrap();
    assert_eq!(store.put_message(&run, 0, message(Some("k"), json!(2))).await.unwrap(), first);
    assert_ne!(store.put_message(&run, 1, message(Some("k"), json!(3))).await.unwrap(), first);
    let deliver = AppendJournal { deliver: vec![first], ..entry(&run, 0, 1, 0, vec![]) };
    store.append_journal(deliver).await.unwrap();
    assert_eq!(store.put_message(&run, 0, message(Some("k"), json!(4))).await.unwrap(), first);
    assert_eq!(store.pending_messages(&run, 0).await.unwrap(), vec![]);
}

pub async fn inboxes_are_bounded<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 2).await;
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..MAX_PENDING {
        let (store, run) = (store.clone(), run.clone());
        tasks.spawn(async move {
            store.put_message(&run, 0, message(None, json!(i))).await.unwrap();
            store.put_command(&run, command(None, json!(i))).await.unwrap()
        });
    }
    let ids = tasks.join_all().await;
    assert_invalid(store.put_command(&run, command(None, json!(0))).await, "wait");
    assert_invalid(store.put_message(&run, 0, message(None, json!(0))).await, "wait");
    store.put_message(&run, 1, message(None, json!(0))).await.unwrap();
    store.append(Append { consume: vec![ids[0]], ..step(&run, lease, 1, vec![], vec![]) }).await.unwrap();
    store.put_command(&run, command(None, json!(0))).await.unwrap();
    assert_invalid(store.put_command(&run, command(None, json!(0))).await, "wait");
    assert_eq!(store.pending_commands(&run).await.unwrap().len(), MAX_PENDING);
}
