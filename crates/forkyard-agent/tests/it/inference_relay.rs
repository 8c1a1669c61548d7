//! Requests of an agent inside a sandbox, passed on under the run's budget.

use bytes::Bytes;
use forkyard_agent::inference::{InferenceError, Relay, Relayed, Session};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::Usd;
use futures::StreamExt;
use serde_json::{Value, json};
use test_support::model_server::{Cut, Gate, ModelServer, Part, Reply, Split};

use crate::inference_support::{billed, layer, session};

fn body(extra: Value) -> Relay {
    let mut body = json!({
        "model": "sonnet", "max_tokens": 4096, "stream": true,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    Relay { body: Bytes::from(body.to_string()), beta: Some("some-beta".into()), version: None }
}

async fn read(relayed: Relayed) -> (u16, Result<String, String>) {
    let mut text = Vec::new();
    let mut stream = relayed.body;
    while let Some(chunk) = stream.next().await {
        match chunk {
            Ok(bytes) => text.extend_from_slice(&bytes),
            Err(e) => return (relayed.status, Err(e.message)),
        }
    }
    (relayed.status, Ok(String::from_utf8(text).unwrap()))
}

async fn pass(session: &Session, relay: Relay) -> (u16, Result<String, String>) {
    read(session.relay(relay).await.unwrap()).await
}

#[tokio::test]
async fn an_answer_passes_byte_for_byte_and_is_paid_for() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let inference = layer(&server);
    let session = session(&inference, &budget, 0);
    server.push(
        Reply::message(vec![Part::Thinking("hm 🦀".into()), Part::Text("hello".into())])
            .split(Split::Bytes(3))
            .pings(),
    );
    let (status, text) = pass(&session, body(json!({}))).await;
    let text = text.unwrap();
    assert_eq!(status, 200);
    assert!(text.starts_with("event: message_start") && text.contains("hm 🦀") && text.ends_with("\n\n"));
    assert_eq!((budget.balance().spent, budget.balance().reserved), (billed(&server), Usd::ZERO));
    assert_eq!(session.spent().0, billed(&server));
    let sent = &server.seen()[0];
    assert_eq!(
        (&sent.headers["x-api-key"], &sent.headers["anthropic-beta"]),
        (&"test-key".into(), &"some-beta".into())
    );
    assert_eq!(sent.body["model"], "claude-sonnet-5-5");
}

#[tokio::test]
async fn errors_pass_too_and_cost_nothing() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let inference = layer(&server);
    let session = session(&inference, &budget, 0);
    server.push(Reply::error(429, "rate_limit_error", "slow").header("retry-after-ms", 1));
    let (status, text) = pass(&session, body(json!({}))).await;
    assert!(status == 429 && text.unwrap().contains("rate_limit_error"));
    assert_eq!((budget.balance().spent, budget.balance().reserved), (Usd::ZERO, Usd::ZERO));
    // A gateway's may have cost something.
    server.push(Reply::raw_error(502, "bad gateway"));
    assert_eq!(pass(&session, body(json!({}))).await.0, 502);
    assert!(budget.balance().spent > Usd::ZERO);
}

#[tokio::test]
async fn an_answer_that_is_cut_or_not_read_is_settled_at_its_worst_case() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    for cut in [Cut::DropAfter(3), Cut::EndAfter(3), Cut::HangAfter(3)] {
        let budget = MemoryBudget::of_run(Usd::dollars(1));
        let session = session(&inference, &budget, 0);
        let before = billed(&server);
        server.push(Reply::text("some text").cut(cut));
        let relayed = session.relay(body(json!({}))).await.unwrap();
        match cut {
            // The asker goes away.
            Cut::HangAfter(_) => drop(relayed),
            Cut::DropAfter(_) | Cut::EndAfter(_) => drop(read(relayed).await),
        }
        while budget.balance().reserved > Usd::ZERO {
            tokio::task::yield_now().await;
        }
        let billed = Usd(billed(&server).0 - before.0);
        assert!(budget.balance().spent >= billed + Usd::nanos(4000 * 10_000), "{cut:?}");
    }
}

#[tokio::test]
async fn the_budget_binds_and_so_does_a_cancel() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    // Some hundred tokens and output for less than was asked for.
    let budget = MemoryBudget::of_run(Usd::nanos(400 * 2_500 + 2_000 * 10_000));
    let poor = session(&inference, &budget, 0);
    server.push(Reply::text("ok"));
    assert_eq!(pass(&poor, body(json!({}))).await.0, 200);
    assert!((1024..4096).contains(&server.seen()[0].max_tokens()), "{}", server.seen()[0].max_tokens());
    let long = body(json!({"system": "x".repeat(100_000)}));
    let error = poor.relay(long).await.err().unwrap();
    assert!(matches!(error, InferenceError::BudgetExceeded { .. }), "{error}");
    assert_eq!(server.seen().len(), 1);

    let cancel = tokio_util::sync::CancellationToken::new();
    let unlimited = MemoryBudget::unlimited();
    let session = crate::inference_support::session_with(&inference, &unlimited, 0, cancel.clone());
    server.push(Reply::text("x").cut(Cut::HangAfter(2)));
    let relayed = session.relay(body(json!({}))).await.unwrap();
    cancel.cancel();
    assert_eq!(read(relayed).await.1, Err("cancelled".to_string()));
}

#[tokio::test]
async fn what_could_cost_more_than_tokens_is_not_passed_on() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(100));
    let session = session(&inference, &budget, 0);
    for extra in [
        json!({"service_tier": "priority"}),
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        json!({"mcp_servers": []}),
        json!({"max_tokens": "many"}),
    ] {
        let error = session.relay(body(extra)).await.err().unwrap();
        assert!(matches!(error, InferenceError::Rejected { status: Some(400), .. }), "{error}");
    }
    let unpriced = session.relay(body(json!({"model": "llama-9"}))).await.err().unwrap();
    assert!(matches!(unpriced, InferenceError::NoPrice { .. }));
    assert!(server.all_seen().is_empty());

    // A document's bytes say nothing of its pages: the count decides, and without one the largest context there is.
    let document = json!({"messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}]}]});
    server.offer_counting(false);
    let gate = Gate::default();
    server.push(Reply::text("ok").gate(&gate));
    let (relayed, reserved) = tokio::join!(session.relay(body(document)), async {
        while server.seen().is_empty() {
            tokio::task::yield_now().await;
        }
        let reserved = budget.balance().reserved;
        gate.open(1);
        reserved
    });
    assert!(reserved > Usd::nanos(2_000_000 * 2_500), "{reserved}");
    read(relayed.unwrap()).await.1.unwrap();
    assert_eq!(budget.balance().spent, billed(&server));
}
