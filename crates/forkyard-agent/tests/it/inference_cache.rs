//! Forks of one run read their common prefix from the provider's cache.

use forkyard_agent::inference::{Block, Message, Model, Role, Silent, TurnRequest};
use forkyard_agent::ports::MemoryBudget;
use serde_json::json;
use test_support::model_server::{Bill, ModelServer, Reply, Seen, count_tokens};

use crate::inference_support::{bash, layer, session};

fn first_request(fork: u32) -> TurnRequest {
    let task = format!("The task, as all forks have it. {}", "Many words. ".repeat(200));
    let own = format!("You are fork {fork}, in sandbox s{fork}.");
    let message = Message { role: Role::User, content: vec![Block::text(task), Block::text(own)] };
    TurnRequest {
        system: "You write code. ".repeat(100),
        tools: vec![bash()],
        shared_blocks: 1,
        ..TurnRequest::new("sonnet", vec![message], 4096)
    }
}

fn answer(seen: &Seen) -> Reply {
    match seen.messages().len() {
        n if n < 11 => Reply::tool("Bash", json!({"command": format!("echo {n}")})),
        _ => Reply::text("done"),
    }
}

#[tokio::test]
async fn forks_that_start_together_share_the_prefix() {
    let server = ModelServer::start().await;
    server.brain(answer);
    let inference = layer(&server);
    let budget = MemoryBudget::unlimited();
    let forks = (0..8).map(|fork| {
        let session = session(&inference, &budget, fork);
        tokio::spawn(async move {
            let mut request = first_request(fork);
            loop {
                let response = session.turn(&request, &mut Silent).await.unwrap();
                let calls: Vec<Block> = response
                    .content
                    .iter()
                    .filter_map(|b| match b {
                        Block::ToolUse { id, .. } => {
                            Some(Block::result(id, format!("output of {fork}"), false))
                        }
                        _ => None,
                    })
                    .collect();
                request.messages.push(Message::assistant(response.content));
                if calls.is_empty() {
                    return;
                }
                request.messages.push(Message::results(calls));
            }
        })
    });
    for fork in forks.collect::<Vec<_>>() {
        fork.await.unwrap();
    }

    let seen = server.seen();
    let bills = server.bills();
    assert_eq!((seen.len(), bills.len()), (8 * 6, 8 * 6));
    // What the forks have in common: everything but their own block, in the first request of each.
    let mut common = seen[0].body.clone();
    common["messages"][0]["content"].as_array_mut().unwrap().truncate(1);
    let common = count_tokens(&common);
    let firsts: Vec<Bill> =
        seen.iter().zip(&bills).filter(|(s, _)| s.messages().len() == 1).map(|(_, b)| *b).collect();
    let read: u64 = firsts.iter().map(|b| b.cache_read).sum();
    let wanted = common * 7;
    assert!(read * 100 >= wanted * 80, "{read} of {wanted} shared tokens were read from the cache");
    assert_eq!(firsts.iter().filter(|b| b.cache_read == 0).count(), 1, "only the first one writes it");

    // Later requests read all that the one before them wrote.
    let later: Vec<&Bill> =
        seen.iter().zip(&bills).filter(|(s, _)| s.messages().len() > 1).map(|(_, b)| b).collect();
    let (read, all) = later.iter().fold((0, 0), |(r, a), b| (r + b.cache_read, a + b.prompt()));
    assert!(read * 100 >= all * 80, "{read} of {all}");
}

/// More blocks than the API looks back lie between two turns.
#[tokio::test]
async fn fifty_calls_in_a_turn_do_not_lose_the_cache() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    let mut request = first_request(0);
    for calls in [50, 50, 0] {
        server.push(if calls == 0 {
            Reply::text("done")
        } else {
            Reply::tools("Bash", &json!({"command": "true"}), calls)
        });
        let response = session.turn(&request, &mut Silent).await.unwrap();
        let results = response.content.iter().filter_map(|b| match b {
            Block::ToolUse { id, .. } => Some(Block::result(id, "ok", false)),
            _ => None,
        });
        let results: Vec<Block> = results.collect();
        request.messages.push(Message::assistant(response.content));
        request.messages.push(Message::results(results));
    }
    let bills = server.bills();
    assert!(bills[2].cache_read >= bills[1].prompt() * 95 / 100, "{bills:?}");
}

/// The shared part may be kept for an hour; what only one conversation reads again is not.
#[tokio::test]
async fn the_shared_part_can_live_longer() {
    use forkyard_agent::inference::{Anthropic, HttpBackend, Inference, Live};
    use forkyard_core::pricing::CacheTtl;
    use std::sync::Arc;
    let server = ModelServer::start().await;
    server.brain(answer);
    let wire = Anthropic::new("test-key").shared_ttl(CacheTtl::OneHour);
    let live = Arc::new(Live::new(server.url()).unwrap());
    let backend = HttpBackend::new(wire, live, crate::inference_support::timeouts());
    let inference =
        Inference::new(Arc::new(backend), Default::default(), crate::inference_support::settings());
    let budget = MemoryBudget::of_run(forkyard_core::Usd::dollars(1));
    let response = session(&inference, &budget, 0).turn(&first_request(0), &mut Silent).await.unwrap();
    let bill = server.bills()[0];
    assert!(bill.cache_write_1h > 500 && (1..100).contains(&bill.cache_write_5m), "{bill:?}");
    assert_eq!(response.usage, crate::inference_support::usage(&bill));
    assert_eq!(budget.balance().spent, crate::inference_support::billed(&server));
}
