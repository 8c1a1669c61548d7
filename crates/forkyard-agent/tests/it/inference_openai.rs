//! Chat completions against the stand-in server.

use std::sync::Arc;

use forkyard_agent::inference::{
    Block, Collect, HttpBackend, Image, Inference, InferenceError, Live, Message, Model, OpenAi, RawJson,
    ResultPart, Silent, StopReason,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::Usd;
use forkyard_core::pricing::PriceBook;
use serde_json::json;
use test_support::model_server::{Cut, ModelServer, Part, Reply, Split};

use crate::inference_support::{ask, bash, billed, session, settings, timeouts};

fn layer(server: &ModelServer) -> Inference {
    let base = format!("{}/v1", server.url());
    let live = Arc::new(Live::new(&base).unwrap());
    let wire = OpenAi::new(Some("open-key".into()), &base);
    Inference::new(Arc::new(HttpBackend::new(wire, live, timeouts())), PriceBook::default(), settings())
}

#[tokio::test]
async fn a_conversation_with_calls_and_images() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let session = session(&inference, &budget, 0);
    server.push(
        Reply::message(vec![
            Part::Thinking("hm 🦀".into()),
            Part::Text("Let me see. ".into()),
            Part::Tool { id: Some("c1".into()), name: "Bash".into(), input: r#"{"command": "ls"}"#.into() },
            Part::Tool { id: Some("c2".into()), name: "Read".into(), input: "{\"cut".into() },
        ])
        .split(Split::EveryByte),
    );
    let mut request = ask("go");
    request.tools = vec![bash()];
    let mut seen = Collect::default();
    let first = session.turn(&request, &mut seen).await.unwrap();
    assert_eq!((seen.text.as_str(), seen.thinking.as_str()), ("Let me see. ", "hm 🦀"));
    assert_eq!(first.stop_reason, StopReason::ToolUse);
    assert_eq!(
        first.content,
        vec![
            Block::text("Let me see. "),
            Block::ToolUse {
                id: "c1".into(),
                name: "Bash".into(),
                input: RawJson::new(r#"{"command": "ls"}"#)
            },
            Block::ToolUse { id: "c2".into(), name: "Read".into(), input: RawJson::new("{\"cut") },
        ]
    );
    request.messages.push(Message::assistant(first.content));
    let image = Image { media_type: "image/png".into(), base64: "QUJD".into() };
    request.messages.push(Message::results(vec![
        Block::ToolResult {
            tool_use_id: "c1".into(),
            content: vec![ResultPart::Text { text: "a.txt ".into() }, ResultPart::Image(image)],
            is_error: false,
        },
        Block::result("c2", "not JSON", true),
        Block::text("Go on."),
    ]));
    server.push(Reply::text("done"));
    let second = session.turn(&request, &mut Silent).await.unwrap();
    assert_eq!((second.text().as_str(), second.stop_reason), ("done", StopReason::EndTurn));
    assert_eq!(budget.balance().spent, billed(&server));

    let sent = server.seen().pop().unwrap();
    assert_eq!(sent.headers["authorization"], "Bearer open-key");
    assert_eq!(sent.max_tokens(), 4096);
    assert_eq!(sent.body["tools"][0]["function"]["name"], "Bash");
    let roles: Vec<&str> = sent.messages().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "user"]);
    assert_eq!(sent.messages()[2]["tool_calls"][0]["function"]["arguments"], r#"{"command": "ls"}"#);
    assert_eq!(sent.messages()[3]["content"], "a.txt [the image follows]");
    assert_eq!(
        sent.messages()[4],
        json!({"role": "tool", "tool_call_id": "c2", "content": "Error: not JSON"})
    );
    assert_eq!(sent.messages()[5]["content"][0]["image_url"]["url"], "data:image/png;base64,QUJD");
}

#[tokio::test]
async fn stop_reasons_faults_and_retries() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let session = session(&inference, &budget, 0);
    let turn = async |reply: Reply| {
        server.push(reply);
        session.turn(&ask("go"), &mut Silent).await
    };
    assert_eq!(turn(Reply::text("x").stop("max_tokens")).await.unwrap().stop_reason, StopReason::MaxTokens);
    assert_eq!(turn(Reply::refusal()).await.unwrap().stop_reason, StopReason::Refusal);
    let quota = r#"{"error":{"message":"You exceeded your current quota","code":"insufficient_quota"}}"#;
    assert!(matches!(turn(Reply::raw_error(429, quota)).await, Err(InferenceError::Account { .. })));
    assert_eq!(budget.balance().spent, billed(&server));

    server.push(Reply::text("lost").cut(Cut::EndAfter(2)));
    server.push(Reply::raw_error(503, ""));
    assert_eq!(turn(Reply::text("whole")).await.unwrap().tries, 3);
    assert!(budget.balance().spent > billed(&server), "the lost one counts at its most");

    // Without usage the worst case is what it cost.
    let before = budget.balance().spent;
    let silent = turn(Reply::text("x").without_usage()).await.unwrap();
    assert!(silent.cost >= Usd::nanos(4096 * 10_000));
    assert_eq!(budget.balance().spent, before + silent.cost);
}
