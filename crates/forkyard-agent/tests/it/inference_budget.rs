//! Money: what the server bills never exceeds the budget, and nobody gives up while there is money to use.

use std::sync::Arc;

use forkyard_agent::inference::{
    Block, Collect, InferenceError, Message, Model, Notice, Silent, TurnRequest,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::budget::BudgetLimits;
use forkyard_core::pricing::{CacheTtl, InputKind, PriceBook};
use forkyard_core::{Attempt, Usd};
use serde_json::json;
use test_support::model_server::{Cut, Gate, ModelServer, Reply};

use crate::inference_support::{MODEL, Tell, ask, billed, layer, session};

fn worst(input: u64, output: u64) -> Usd {
    PriceBook::default().get(MODEL).unwrap().worst_case(
        InputKind::Cached(CacheTtl::FiveMinutes),
        input,
        output,
    )
}

#[tokio::test]
async fn the_worst_case_is_reserved_by_the_count_and_shrinks_when_the_input_is_known() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(10));
    let (gate, session) = (Gate::default(), session(&inference, &budget, 0));
    server.push(Reply::text("ok").gate(&gate));
    let text = "x".repeat(20_000);
    let turn = tokio::spawn(async move { session.turn(&ask(&text), &mut Silent).await });
    while server.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    // 20,000 bytes are some 5,000 tokens here, and the count says so.
    let reserved = budget.balance().reserved;
    assert!(reserved >= worst(5_000, 4096) && reserved < worst(6_000, 4096), "{reserved}");
    gate.open(1);
    let response = turn.await.unwrap().unwrap();
    assert_eq!((budget.balance().spent, budget.balance().reserved), (response.cost, Usd::ZERO));
    assert_eq!(response.cost, billed(&server));
    assert_eq!(budget.usage(), response.usage);
}

#[tokio::test]
async fn without_a_count_bytes_are_the_bound_and_later_the_last_report() {
    let server = ModelServer::start().await;
    server.offer_counting(false);
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(10));
    let session = Arc::new(session(&inference, &budget, 0));
    let gate = Gate::default();
    server.brain({
        let gate = gate.clone();
        move |_| Reply::text("ok").gate(&gate)
    });
    let reserve = async |request: TurnRequest, before: usize| {
        let session = Arc::clone(&session);
        let turn = tokio::spawn(async move { session.turn(&request, &mut Silent).await });
        while server.seen().len() == before {
            tokio::task::yield_now().await;
        }
        let reserved = budget.balance().reserved;
        gate.open(1);
        (reserved, turn.await.unwrap().unwrap())
    };
    let mut request = ask(&"x".repeat(20_000));
    let (first, response) = reserve(request.clone(), 0).await;
    assert!(first >= worst(20_000, 4096) && first < worst(25_000, 4096), "{first}");
    request.messages.extend([Message::assistant(response.content), Message::user("y".repeat(1000))]);
    let (second, _) = reserve(request, 1).await;
    assert!(second >= worst(6_000, 4096) && second < worst(7_500, 4096), "{second}");
}

#[tokio::test]
async fn when_money_is_short_less_is_asked_for_and_then_nothing() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    server.brain(|_| Reply::text("ok").output(10));
    // Some hundred tokens of input, and output for about 2,000 tokens.
    let budget = MemoryBudget::of_run(worst(700, 2000));
    let session = session(&inference, &budget, 0);
    let mut seen = Collect::default();
    session.turn(&ask("go"), &mut seen).await.unwrap();
    let lowered = seen.notices.iter().find_map(|n| match n {
        Notice::LoweredMaxTokens { from: 4096, to } => Some(u64::from(*to)),
        _ => None,
    });
    assert_eq!(server.seen()[0].max_tokens(), lowered.expect("it said so"));
    assert!((1024..4096).contains(&server.seen()[0].max_tokens()));

    let small = MemoryBudget::of_run(worst(200, 1000));
    let error = crate::inference_support::session(&inference, &small, 0)
        .turn(&ask("go"), &mut Silent)
        .await
        .unwrap_err();
    let InferenceError::BudgetExceeded { needed, available } = error else { panic!("{error}") };
    assert!(needed > available && available == worst(200, 1000));
    assert_eq!(server.seen().len(), 1, "nothing was sent");
    assert_eq!(small.balance().spent, Usd::ZERO);
}

#[tokio::test]
async fn one_who_is_short_waits_for_what_others_hold() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(worst(1500, 4096));
    let gate = Gate::default();
    server.push(Reply::text("first").output(1).gate(&gate));
    server.push(Reply::text("second").output(1));
    let holder = session(&inference, &budget, 0);
    let first = tokio::spawn(async move { holder.turn(&ask("a"), &mut Silent).await });
    while server.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    let waiter = session(&inference, &budget, 1);
    let (mut tell, mut waiting) = Tell::new();
    let second = tokio::spawn(async move { waiter.turn(&ask("b"), &mut tell).await });
    assert!(matches!(waiting.recv().await, Some(Notice::WaitingForBudget { .. })));
    assert_eq!(server.seen().len(), 1, "nothing is sent while it waits");
    gate.open(1);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(server.seen()[1].max_tokens(), 4096, "what came back was enough");
    assert_eq!(budget.balance().spent, billed(&server));
}

#[tokio::test]
async fn nothing_is_sent_while_paused_or_stale_or_cancelled() {
    let server = ModelServer::start().await;
    server.brain(|_| Reply::text("ok"));
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let paused = session(&inference, &budget, 0);
    budget.set_paused(true);
    let turn = tokio::spawn(async move { paused.turn(&ask("go"), &mut Silent).await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(server.all_seen().is_empty(), "not even a count");
    budget.set_paused(false);
    turn.await.unwrap().unwrap();
    assert_eq!(server.seen().len(), 1);

    budget.cancel();
    let cancelled = session(&inference, &budget, 1).turn(&ask("go"), &mut Silent).await;
    assert_eq!(cancelled.unwrap_err(), InferenceError::Cancelled);
    assert_eq!(server.seen().len(), 1);
}

/// Paused after the money was granted and before the request left: while another's pushback keeps the limiter closed.
#[tokio::test]
async fn a_pause_between_reservation_and_sending_holds() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    server.push(Reply::error(429, "rate_limit_error", "slow").header("retry-after-ms", 1000));
    server.brain(|_| Reply::text("ok"));
    let (limited, waiting) = (session(&inference, &budget, 0), session(&inference, &budget, 1));
    let (mut tell, mut limited_says) = Tell::new();
    let first = tokio::spawn(async move { limited.turn(&ask("a"), &mut tell).await });
    assert!(matches!(limited_says.recv().await, Some(Notice::Retrying { .. })));
    let (mut tell, mut waiting_says) = Tell::new();
    let second = tokio::spawn(async move { waiting.turn(&ask("b"), &mut tell).await });
    assert!(matches!(waiting_says.recv().await, Some(Notice::RateLimited { .. })));
    assert!(budget.balance().reserved > Usd::ZERO);
    budget.set_paused(true);
    assert_eq!(waiting_says.recv().await, Some(Notice::WaitingWhilePaused));
    assert_eq!(limited_says.recv().await, Some(Notice::WaitingWhilePaused));
    assert_eq!(server.seen().len(), 1);
    assert_eq!(budget.balance().reserved, Usd::ZERO, "what waits for the end of a pause holds no money");
    budget.set_paused(false);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(budget.balance().spent, billed(&server));
}

#[tokio::test]
async fn a_model_without_a_price_runs_only_without_a_budget() {
    let server = ModelServer::start().await;
    server.brain(|_| Reply::text("ok"));
    let inference = layer(&server);
    let request = TurnRequest { model: "llama-9".into(), ..ask("go") };
    let limited = session(&inference, &MemoryBudget::of_run(Usd::dollars(1)), 0);
    let error = limited.turn(&request, &mut Silent).await.unwrap_err();
    assert!(error.to_string().contains("[prices.\"llama-9\"]"), "{error}");
    assert_eq!(inference.check_price("llama-9").unwrap_err(), error);
    assert!(server.all_seen().is_empty());
    let free = session(&inference, &MemoryBudget::unlimited(), 0);
    assert_eq!(free.turn(&request, &mut Silent).await.unwrap().cost, Usd::ZERO);
}

#[tokio::test]
async fn a_forks_own_limit_binds_too() {
    let server = ModelServer::start().await;
    server.brain(|_| Reply::text("ok").output(1));
    let inference = layer(&server);
    let budget = MemoryBudget::new(BudgetLimits { run: Some(Usd::dollars(9)), fork: Some(worst(100, 500)) });
    let error = session(&inference, &budget, 0).turn(&ask("go"), &mut Silent).await.unwrap_err();
    assert!(matches!(error, InferenceError::BudgetExceeded { .. }), "{error}");
}

#[tokio::test]
async fn an_attempt_that_was_taken_over_sends_nothing_more() {
    let server = ModelServer::start().await;
    server.offer_counting(false);
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    server.push(Reply::error(429, "rate_limit_error", "slow").header("retry-after-ms", 100));
    server.brain(|_| Reply::text("ok"));
    let session = session(&inference, &budget, 0);
    let turn = tokio::spawn(async move { session.turn(&ask("go"), &mut Silent).await });
    while server.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    budget.take_over(0, Attempt(2));
    match turn.await.unwrap() {
        Err(InferenceError::Stale) => assert_eq!(server.seen().len(), 1),
        other => panic!("{other:?}"),
    }
}

/// Fifty forks spend at once against one budget, with answers cut off and refused, until nobody can go on.
async fn spend(
    forks: u32,
    budget_usd: Usd,
    server: &ModelServer,
) -> (MemoryBudget, Vec<InferenceError>, u32) {
    server.brain(|seen| {
        let n = seen.raw.bytes().map(u32::from).sum::<u32>();
        let output = u64::from(n % 900 + 50);
        let call = Reply::tool("Bash", json!({"command": "x".repeat(n as usize % 200)})).output(output);
        match n % 13 {
            0 => call.cut(Cut::DropAfter(3)),
            1 => call.cut(Cut::EndAfter(0)),
            2 => Reply::error(529, "overloaded_error", "busy"),
            3 => call.stream_error(4, "api_error", "broken"),
            _ => call,
        }
    });
    let inference = layer(server);
    let budget = MemoryBudget::of_run(budget_usd);
    let tasks: Vec<_> = (0..forks)
        .map(|fork| {
            let session = session(&inference, &budget, fork);
            tokio::spawn(async move {
                let mut request = ask(&format!("fork {fork} {}", "word ".repeat(fork as usize * 7)));
                let mut turns = 0;
                loop {
                    match session.turn(&request, &mut Silent).await {
                        Ok(response) => {
                            turns += 1;
                            let id = response.content.iter().find_map(|b| match b {
                                Block::ToolUse { id, .. } => Some(id.clone()),
                                _ => None,
                            });
                            request.messages.push(Message::assistant(response.content));
                            let result = Block::result(
                                id.unwrap(),
                                format!("{turns} {}", "out ".repeat(turns as usize * 20)),
                                false,
                            );
                            request.messages.push(Message::results(vec![result]));
                        }
                        // A try that is lost too often: the same turn again.
                        Err(InferenceError::Exhausted { .. }) => {
                            request.messages.push(Message::user(format!("again {turns}")))
                        }
                        Err(end) => return (end, turns),
                    }
                }
            })
        })
        .collect();
    let mut ends = Vec::new();
    let mut turns = 0;
    for task in tasks {
        let (end, n) = task.await.unwrap();
        ends.push(end);
        turns += n;
    }
    (budget, ends, turns)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_forks_at_once_never_overshoot_and_use_what_there_is() {
    let server = ModelServer::start().await;
    let limit = Usd::dollars(3);
    let (budget, ends, turns) = spend(50, limit, &server).await;
    let balance = budget.balance();
    let billed = billed(&server);
    assert!(turns > 50, "{turns}");
    assert_eq!(balance.reserved, Usd::ZERO);
    assert!(billed <= balance.spent && balance.spent <= limit, "{billed} {} {limit}", balance.spent);
    for end in ends {
        let InferenceError::BudgetExceeded { needed, available } = end else { panic!("{end}") };
        assert!(needed > available);
        // What was left then is left now or less: money was never given back after somebody gave up for want of it.
        assert!(needed > limit.saturating_sub(balance.spent), "{needed} would have fitted");
    }
}
