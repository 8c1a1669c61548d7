//! A provider that is slow, overloaded, silent, cut off or wrong.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use forkyard_agent::inference::{
    Collect, Inference, InferenceError, Model, Notice, RetrySettings, SessionSpec, Silent, Timeouts,
};
use forkyard_agent::ports::{Ask, Grant, Ledger, LedgerError, MemoryBudget, ReservationId, Sent};
use forkyard_core::pricing::{PriceBook, Usage};
use forkyard_core::{Attempt, Usd};
use futures::future::BoxFuture;
use test_support::model_server::{Cut, Gate, ModelServer, Reply};
use tokio_util::sync::CancellationToken;

use crate::inference_support::{
    Tell, ask, backend, billed, layer, session, session_with, settings, timeouts,
};

#[tokio::test]
async fn transient_errors_are_retried_and_cost_nothing() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let inference = layer(&server);
    let session = session(&inference, &budget, 0);
    for (status, kind) in
        [(429, "rate_limit_error"), (529, "overloaded_error"), (500, "api_error"), (409, "conflict_error")]
    {
        server.push(Reply::error(status, kind, "later"));
    }
    server.push(Reply::text("hello"));
    let mut seen = Collect::default();
    let response = session.turn(&ask("go"), &mut seen).await.unwrap();
    assert_eq!((response.text().as_str(), response.tries), ("hello", 5));
    assert_eq!(seen.notices.iter().filter(|n| matches!(n, Notice::Retrying { .. })).count(), 4);
    assert_eq!(response.cost, billed(&server));
    let balance = budget.balance();
    assert_eq!((balance.spent, balance.reserved), (billed(&server), Usd::ZERO));
}

#[tokio::test]
async fn retry_after_holds_every_fork_back() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::unlimited();
    server.push(Reply::error(429, "rate_limit_error", "slow down").header("retry-after-ms", 1000));
    server.brain(|_| Reply::text("ok"));
    let start = Instant::now();
    let (first, second) = (session(&inference, &budget, 0), session(&inference, &budget, 1));
    let (mut tell, mut says) = Tell::new();
    let limited = tokio::spawn(async move { first.turn(&ask("a"), &mut tell).await });
    assert!(matches!(says.recv().await, Some(Notice::Retrying { .. })));
    // The other fork was told nothing by the provider.
    let mut seen = Collect::default();
    second.turn(&ask("b"), &mut seen).await.unwrap();
    assert!(matches!(seen.notices[..], [Notice::RateLimited { .. }]), "{:?}", seen.notices);
    assert!(start.elapsed() >= Duration::from_millis(1000), "never earlier than asked");
    assert_eq!(limited.await.unwrap().unwrap().tries, 2);
}

#[tokio::test]
async fn what_can_never_work_is_sent_once() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    let turn = async |reply: Reply| {
        let before = server.seen().len();
        server.push(reply);
        let error = session.turn(&ask("go"), &mut Silent).await.unwrap_err();
        assert_eq!(server.seen().len(), before + 1, "{error}");
        error
    };
    let rejected = turn(Reply::error(400, "invalid_request_error", "tools.0: bad schema")).await;
    assert!(
        matches!(&rejected, InferenceError::Rejected { status: Some(400), message } if message.contains("bad schema"))
    );
    let long = turn(Reply::error(
        400,
        "invalid_request_error",
        "prompt is too long: 210000 tokens > 200000 maximum",
    ))
    .await;
    assert!(matches!(long, InferenceError::ContextTooLong { .. }));
    let spend = r#"{"type":"error","error":{"type":"rate_limit_error","message":"limit","details":{"error_code":"enforced_spend_limit_reached"}}}"#;
    assert!(matches!(turn(Reply::raw_error(429, spend)).await, InferenceError::Account { .. }));
    let hours = turn(Reply::error(429, "rate_limit_error", "tomorrow").header("retry-after", 86_400)).await;
    assert!(matches!(hours, InferenceError::Exhausted { .. }));
    assert!(hours.is_retryable() && !rejected.is_retryable());
}

#[tokio::test]
async fn retries_are_bounded() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    server.brain(|_| Reply::error(500, "api_error", "broken"));
    let inference = layer(&server);
    let error = session(&inference, &budget, 0).turn(&ask("go"), &mut Silent).await.unwrap_err();
    let tries = RetrySettings::default().max_retries + 1;
    assert!(matches!(error, InferenceError::Exhausted { tries: t, .. } if t == tries), "{error}");
    assert_eq!(server.seen().len(), tries as usize);
    assert_eq!(budget.balance().spent, Usd::ZERO);
}

/// A stream may end at any event, by a reset, by an early end or by an error event: the turn starts over, and what the lost
/// answer may have cost is accounted for.
#[tokio::test]
async fn a_lost_answer_is_a_retried_turn_settled_at_its_worst_case() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    for after in 0..6 {
        // A reset may overtake what was sent before it.
        for (broken, all_arrives) in [
            (Reply::text("a long enough text").cut(Cut::DropAfter(after)), false),
            (Reply::text("a long enough text").cut(Cut::EndAfter(after)), true),
            (
                Reply::text("a long enough text").stream_error(
                    after.max(1),
                    "overloaded_error",
                    "Overloaded",
                ),
                true,
            ),
        ] {
            let budget = MemoryBudget::of_run(Usd::dollars(1));
            let billed_before = billed(&server);
            let session = session(&inference, &budget, 0);
            server.push(broken);
            server.push(Reply::text("whole"));
            let mut seen = Collect::default();
            let response = session.turn(&ask("go"), &mut seen).await.unwrap();
            assert_eq!((response.text().as_str(), seen.text.as_str(), response.tries), ("whole", "whole", 2));
            assert_eq!(seen.resets, 1);
            let billed = Usd(billed(&server).0 - billed_before.0);
            let balance = budget.balance();
            assert_eq!(balance.reserved, Usd::ZERO);
            assert_eq!((response.cost, session.spent().0), (balance.spent, balance.spent));
            assert!(billed <= balance.spent, "after {after}: {billed} > {}", balance.spent);
            // Once the input was reported, only the output is taken at its most.
            if after >= 1 && all_arrives {
                let output = Usd::nanos(4096 * 10_000);
                assert!(
                    balance.spent <= billed + output,
                    "after {after}: {} > {billed} + {output}",
                    balance.spent
                );
            }
        }
    }
}

#[tokio::test]
async fn a_gateways_error_counts_at_its_worst_case() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let inference = layer(&server);
    server.push(Reply::raw_error(502, "<html>Bad gateway</html>"));
    server.push(Reply::text("ok"));
    let response = session(&inference, &budget, 0).turn(&ask("go"), &mut Silent).await.unwrap();
    assert!(response.cost > billed(&server) + Usd::nanos(4096 * 10_000 - 1), "{}", response.cost);
    assert_eq!(budget.balance().spent, response.cost);
}

#[tokio::test]
async fn an_answer_without_usage_counts_at_its_worst_case() {
    let server = ModelServer::start().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    server.push(Reply::text("ok").without_usage());
    let inference = layer(&server);
    let response = session(&inference, &budget, 0).turn(&ask("go"), &mut Silent).await.unwrap();
    assert!(response.cost >= Usd::nanos(4096 * 10_000), "{}", response.cost);
    assert_eq!(budget.balance().spent, response.cost);
}

#[tokio::test]
async fn a_server_that_is_not_there_costs_nothing() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    drop(server);
    tokio::task::yield_now().await;
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let error = session(&inference, &budget, 0).turn(&ask("go"), &mut Silent).await.unwrap_err();
    assert!(matches!(error, InferenceError::Exhausted { .. }), "{error}");
    assert_eq!((budget.balance().spent, budget.balance().reserved), (Usd::ZERO, Usd::ZERO));
}

#[tokio::test]
async fn silence_is_cut_off_before_the_first_byte_and_after() {
    let server = ModelServer::start().await;
    let short = Duration::from_millis(50);
    let gate = Gate::default();
    let cases = [
        (Timeouts { first_byte: short, ..timeouts() }, Reply::text("x").gate(&gate), "no answer within"),
        (
            Timeouts { first_byte: short, ..timeouts() },
            Reply::text("x").cut(Cut::HangAfter(0)),
            "no answer within",
        ),
        (Timeouts { idle: short, ..timeouts() }, Reply::text("x").cut(Cut::HangAfter(3)), "silent for"),
        (
            Timeouts { total: short, ..timeouts() },
            Reply::text("x").cut(Cut::HangAfter(3)),
            "no whole answer within",
        ),
    ];
    for (timeouts, reply, message) in cases {
        let inference = Inference::new(backend(&server, timeouts), PriceBook::default(), settings());
        server.brain(move |_| reply.clone());
        let mut seen = Collect::default();
        let error =
            session(&inference, &MemoryBudget::unlimited(), 0).turn(&ask("go"), &mut seen).await.unwrap_err();
        assert!(
            matches!(&error, InferenceError::Exhausted { message: m, .. } if m.contains(message)),
            "{error}"
        );
    }
}

#[tokio::test]
async fn cancelling_ends_a_request_at_once_wherever_it_is() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let gate = Gate::default();
    for reply in [Reply::text("x").gate(&gate), Reply::text("x").cut(Cut::HangAfter(2))] {
        let budget = MemoryBudget::of_run(Usd::dollars(1));
        let cancel = CancellationToken::new();
        let session = session_with(&inference, &budget, 0, cancel.clone());
        let before = server.seen().len();
        server.push(reply);
        let turn = tokio::spawn(async move { session.turn(&ask("go"), &mut Silent).await });
        while server.seen().len() == before {
            tokio::task::yield_now().await;
        }
        cancel.cancel();
        assert_eq!(turn.await.unwrap().unwrap_err(), InferenceError::Cancelled);
        settled(&budget).await;
        assert!(budget.balance().spent > Usd::ZERO, "it may have been answered");
    }
    // Nothing is sent for one that was cancelled before.
    let cancel = CancellationToken::new();
    cancel.cancel();
    let before = server.seen().len();
    let session = session_with(&inference, &MemoryBudget::unlimited(), 0, cancel);
    assert_eq!(session.turn(&ask("go"), &mut Silent).await.unwrap_err(), InferenceError::Cancelled);
    assert_eq!(server.seen().len(), before);
}

/// Somebody cancels as soon as the answer is paid for, and the payment takes a while.
struct CancelsWhenPaid(Arc<dyn Ledger>, CancellationToken);

#[async_trait]
impl Ledger for CancelsWhenPaid {
    fn limited(&self) -> bool {
        self.0.limited()
    }
    async fn reserve(&self, ask: Ask) -> Result<Grant, LedgerError> {
        self.0.reserve(ask).await
    }
    async fn sent(&self, id: &ReservationId) -> Result<Sent, LedgerError> {
        self.0.sent(id).await
    }
    async fn shrink(&self, id: &ReservationId, worst: Usd) -> Result<(), LedgerError> {
        self.0.shrink(id, worst).await
    }
    async fn settle(&self, id: &ReservationId, cost: Usd, usage: &Usage) -> Result<(), LedgerError> {
        self.1.cancel();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        self.0.settle(id, cost, usage).await
    }
    async fn release(&self, id: &ReservationId) -> Result<(), LedgerError> {
        self.0.release(id).await
    }
    fn changed(&self) -> BoxFuture<'static, ()> {
        self.0.changed()
    }
}

#[tokio::test]
async fn an_answer_that_is_being_paid_for_is_given_whoever_cancels() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let cancel = CancellationToken::new();
    let session = inference.session(SessionSpec {
        key: "run/0/a1".into(),
        fork: Some(0),
        ledger: Arc::new(CancelsWhenPaid(Arc::new(budget.ledger(0, Attempt(1))), cancel.clone())),
        cancel: cancel.clone(),
    });
    server.push(Reply::text("hello"));
    let response = session.turn(&ask("go"), &mut Silent).await.unwrap();
    assert!(cancel.is_cancelled());
    assert_eq!((response.text().as_str(), response.cost), ("hello", billed(&server)));
}

#[tokio::test]
async fn dropping_a_turn_settles_it() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let session = Arc::new(session(&inference, &budget, 0));
    server.push(Reply::text("x").cut(Cut::HangAfter(2)));
    let task = tokio::spawn({
        let session = Arc::clone(&session);
        async move { session.turn(&ask("go"), &mut Silent).await }
    });
    while server.bills().is_empty() {
        tokio::task::yield_now().await;
    }
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    settled(&budget).await;
    assert!(budget.balance().spent >= billed(&server));
    assert_eq!(session.spent().0, budget.balance().spent);
}

async fn settled(budget: &MemoryBudget) {
    let start = Instant::now();
    while budget.balance().reserved > Usd::ZERO {
        assert!(start.elapsed() < Duration::from_secs(20), "a reservation stays open");
        tokio::task::yield_now().await;
    }
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[tokio::test]
async fn a_response_of_100_mb_is_refused_and_not_kept() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    server.brain(|_| Reply::text("x").huge(100 << 20));
    let before = resident_bytes();
    let error = session.turn(&ask("go"), &mut Silent).await.unwrap_err();
    let grown = resident_bytes().saturating_sub(before);
    assert!(
        matches!(&error, InferenceError::Rejected { message, .. } if message.contains("larger than")),
        "{error}"
    );
    assert_eq!(server.seen().len(), 1, "it would be as large again");
    assert!(grown < 40 << 20, "{grown} bytes more");
}
