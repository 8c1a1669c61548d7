//! A fork's time that runs out while its agent waits for a model that says nothing more.

use std::sync::atomic::{AtomicUsize, Ordering};

use forkyard_core::Usd;
use forkyard_core::pricing::{PriceBook, Usage};
use serde_json::json;
use test_support::model_server::{Bill, Cut, Gate, Reply};

use super::in_sandbox::{Yard, start, told};
use super::serve::Server;
use super::until;

/// Enough for a first turn on a loaded machine, and waited for once.
const TIMEOUT_MS: u64 = 12_000;

fn usage(b: Bill) -> Usage {
    Usage {
        input: b.input,
        output: b.output,
        cache_write_5m: b.cache_write_5m,
        cache_write_1h: b.cache_write_1h,
        cache_read: b.cache_read,
    }
}

/// One fork hears the beginning of its second answer, the other nothing of it.
async fn time_runs_out_in_a_request(in_sandbox: bool) {
    let y = Yard::new("").await;
    let (stalled, never) = (AtomicUsize::new(0), Gate::default());
    y.model.brain(move |seen| match told(seen) {
        0 => Reply::tool("Write", json!({ "file_path": "a.txt", "content": "one\ntwo\n" })),
        _ if stalled.fetch_add(1, Ordering::SeqCst) == 0 => Reply::text("never heard").cut(Cut::HangAfter(2)),
        _ => Reply::text("never sent").gate(&never),
    });
    let s = Server::start(&y.w);
    let mut body = y.body();
    body["forks"] = 2.into();
    body["timeout_ms"] = TIMEOUT_MS.into();
    body["agent"]["in_sandbox"] = in_sandbox.into();
    let run = start(&s, body).await;
    let at = format!("/api/v1/runs/{run}");
    let ended = s.until(&at, |r| r["status"] == "ended").await;
    assert_eq!(ended["outcome"], "failed", "{ended}");

    // It was in the middle of a request, which nobody waits for any more, in a server that goes on.
    let seen = y.model.seen();
    assert_eq!(seen.len(), 4, "two turns of each fork, and nothing was asked again");
    until("the requests are ended", || y.model.open() == 0);

    let book = PriceBook::default();
    let facts = book.get("sonnet").unwrap();
    let mut sum = 0.0;
    for n in 0..2 {
        let fork = s.get(&format!("{at}/forks/{n}")).await;
        assert_eq!(fork["outcome"], "timeout", "{fork}");
        let error = fork["error"].as_str().unwrap();
        assert!(error.contains("used up its 12.0s"), "{error}");
        // What it did before is its result.
        assert_eq!((&fork["turns"], &fork["diff"]["files"]), (&json!(1), &json!(1)), "{fork}");
        let diff = s.get(&format!("{at}/forks/{n}/diff?path=a.txt")).await;
        assert!(diff["patch"].as_str().unwrap().contains("+two"), "{diff}");
        // Whatever the model still says may be billed: it counts with all that it could have said.
        let most = Usage { output: seen.iter().map(|r| r.max_tokens()).min().unwrap(), ..Usage::default() };
        let cost = fork["cost_usd"].as_f64().unwrap();
        assert!(cost >= facts.cost(&most).as_dollars(), "{fork}");
        sum += cost;
    }
    let billed: Usd = y.model.bills().into_iter().map(|b| facts.cost(&usage(b))).sum();
    assert!(sum >= billed.as_dollars(), "{sum} {billed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_done_and_spent_is_kept() {
    time_runs_out_in_a_request(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_done_and_spent_is_kept_of_an_agent_inside() {
    time_runs_out_in_a_request(true).await;
}
