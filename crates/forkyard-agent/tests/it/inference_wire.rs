//! What is sent and what is made of the answer.

use forkyard_agent::inference::{
    Block, Collect, Image, InferenceError, Message, Model, RawJson, ResultPart, Silent, StopReason,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::spec::Effort;
use proptest::prelude::*;
use serde_json::{Value, json};
use test_support::model_server::{ModelServer, Part, Reply, Split};

use crate::inference_support::{ask, bash, layer, session, usage};

/// Every kind of block, with characters of every length.
fn rich() -> Reply {
    Reply::message(vec![
        Part::Thinking("naïve 漢字 🦀 thought".into()),
        Part::RedactedThinking("b3BhcXVl".into()),
        Part::Text("Grüße 🦀, \"quoted\" \\ \n".into()),
        Part::Tool {
            id: Some("toolu_a".into()),
            name: "Bash".into(),
            input: r#"{"z": 1.50, "command":"echo \"é\"","a":[1e3]}"#.into(),
        },
        Part::Tool { id: Some("toolu_b".into()), name: "Read".into(), input: String::new() },
        Part::Raw(json!({"type": "new_kind", "x": [1, {"y": null}]})),
    ])
}

fn rich_content() -> Vec<Block> {
    vec![
        Block::Thinking {
            thinking: "naïve 漢字 🦀 thought".into(),
            signature: test_support::model_server::signature("naïve 漢字 🦀 thought"),
        },
        Block::RedactedThinking { data: "b3BhcXVl".into() },
        Block::text("Grüße 🦀, \"quoted\" \\ \n"),
        Block::ToolUse {
            id: "toolu_a".into(),
            name: "Bash".into(),
            input: RawJson::new(r#"{"z": 1.50, "command":"echo \"é\"","a":[1e3]}"#),
        },
        Block::ToolUse { id: "toolu_b".into(), name: "Read".into(), input: RawJson::new("{}") },
        Block::Other { json: RawJson::new(r#"{"type":"new_kind","x":[1,{"y":null}]}"#) },
    ]
}

#[tokio::test]
async fn every_block_arrives_whole_however_the_stream_is_cut() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let budget = MemoryBudget::unlimited();
    for split in [Split::PerEvent, Split::EveryByte, Split::Bytes(3), Split::Bytes(1000), Split::Whole] {
        server.push(rich().split(split).pings().unknown_events());
        let mut seen = Collect::default();
        let response = session(&inference, &budget, 0).turn(&ask("go"), &mut seen).await.unwrap();
        assert_eq!(response.content, rich_content(), "{split:?}");
        assert_eq!(response.stop_reason, StopReason::ToolUse);
        assert_eq!(response.usage, usage(server.bills().last().unwrap()));
        assert!(response.request_id.unwrap().starts_with("req_msg_"));
        assert_eq!(response.model, "claude-sonnet-5-5");
        assert_eq!(seen.text, "Grüße 🦀, \"quoted\" \\ \n");
        assert_eq!(seen.thinking, "naïve 漢字 🦀 thought");
        assert_eq!(seen.tool_input, r#"{"z": 1.50, "command":"echo \"é\"","a":[1e3]}"#);
    }
}

/// The server refuses a conversation whose thinking or tool input is not what it said, byte for byte.
#[tokio::test]
async fn what_the_model_said_goes_back_untouched() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    server.push(rich());
    let mut request = ask("go");
    request.tools = vec![bash()];
    let first = session.turn(&request, &mut Silent).await.unwrap();
    request.messages.push(Message::assistant(first.content));
    let image = Image { media_type: "image/png".into(), base64: "iVBORw0K".into() };
    request.messages.push(Message::results(vec![
        Block::ToolResult {
            tool_use_id: "toolu_a".into(),
            content: vec![ResultPart::Text { text: "é".into() }, ResultPart::Image(image)],
            is_error: false,
        },
        Block::result("toolu_b", "", true),
    ]));
    server.push(Reply::text("done"));
    let second = session.turn(&request, &mut Silent).await.unwrap();
    assert_eq!(second.text(), "done");

    let sent = server.seen().pop().unwrap();
    assert!(sent.raw.contains(r#""input":{"z": 1.50, "command":"echo \"é\"","a":[1e3]}"#));
    assert!(sent.raw.contains(r#"{"type":"new_kind","x":[1,{"y":null}]}"#));
    let results = &sent.messages()[2]["content"];
    assert_eq!(results[0]["content"][1]["source"]["data"], "iVBORw0K");
    assert_eq!((&results[1]["is_error"], &results[1]["content"]), (&json!(true), &json!([])));
}

#[tokio::test]
async fn the_request_says_what_the_model_needs_and_nothing_that_it_refuses() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    server.brain(|_| Reply::text("ok"));
    let mut request = ask("go");
    request.effort = Some(Effort::High);
    session.turn(&request, &mut Silent).await.unwrap();
    request.model = "claude-haiku-4-5".into();
    session.turn(&request, &mut Silent).await.unwrap();
    let [new, old]: [_; 2] = server.seen().try_into().unwrap();
    assert_eq!(new.headers["anthropic-version"], "2023-06-01");
    assert_eq!(new.headers["x-api-key"], "test-key");
    assert_eq!(new.body["model"], "claude-sonnet-5-5");
    assert_eq!(new.body["thinking"], json!({"type": "adaptive", "display": "summarized"}));
    assert_eq!(new.body["output_config"], json!({"effort": "high"}));
    assert_eq!((&old.body["thinking"], &old.body["output_config"]), (&Value::Null, &Value::Null));
    for body in [&new.body, &old.body] {
        assert!(["temperature", "top_p", "top_k", "tool_choice"].iter().all(|k| body[k].is_null()));
    }
}

#[tokio::test]
async fn odd_but_valid_answers_are_answers() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    let turn = async |reply: Reply| {
        server.push(reply);
        session.turn(&ask("go"), &mut Silent).await.unwrap()
    };

    let refusal = turn(Reply::refusal()).await;
    assert_eq!((refusal.stop_reason, refusal.content.len()), (StopReason::Refusal, 0));

    let many = turn(Reply::tools("Bash", &json!({"command": "true"}), 51)).await;
    assert_eq!(many.content.len(), 51);

    let unknown = turn(Reply::tool("NoSuchTool", json!({"x": 1}))).await;
    assert!(matches!(&unknown.content[0], Block::ToolUse { name, .. } if name == "NoSuchTool"));

    let tool = |input: &str| Part::Tool { id: None, name: "Bash".into(), input: input.into() };
    let malformed = turn(Reply::message(vec![tool(r#"{"command": oops}"#)])).await;
    let Block::ToolUse { input, .. } = &malformed.content[0] else { panic!("{malformed:?}") };
    assert_eq!(input.as_str(), r#"{"command": oops}"#);
    assert!(input.object().is_err());

    let cut = turn(Reply::message(vec![tool(r#"{"command": "echo "#)]).stop("max_tokens")).await;
    assert_eq!(cut.stop_reason, StopReason::MaxTokens);
    let Block::ToolUse { input, .. } = &cut.content[0] else { panic!("{cut:?}") };
    assert!(input.object().is_err());

    let new = turn(Reply::text("x").stop("something_new")).await;
    assert_eq!(new.stop_reason, StopReason::Other("something_new".into()));

    let empty = turn(Reply::message(vec![Part::Text(String::new()), Part::Text("x".into())])).await;
    assert_eq!(empty.content, vec![Block::text("x")]);
}

/// A call whose input is no object can't go back as it is: the API would refuse the whole conversation.
#[tokio::test]
async fn a_conversation_with_a_malformed_call_can_go_on() {
    let server = ModelServer::start().await;
    let inference = layer(&server);
    let session = session(&inference, &MemoryBudget::unlimited(), 0);
    server.push(Reply::message(vec![Part::Tool {
        id: Some("t1".into()),
        name: "Bash".into(),
        input: "{\"a".into(),
    }]));
    let mut request = ask("go");
    let first = session.turn(&request, &mut Silent).await.unwrap();
    request.messages.push(Message::assistant(first.content));
    request.messages.push(Message::results(vec![Block::result("t1", "the input is not valid JSON", true)]));
    server.push(Reply::text("sorry"));
    assert_eq!(session.turn(&request, &mut Silent).await.unwrap().text(), "sorry");
}

#[tokio::test]
async fn a_wrong_key_is_the_accounts_problem() {
    use forkyard_agent::inference::{Anthropic, HttpBackend, Inference, Live};
    use std::sync::Arc;
    let server = ModelServer::start().await;
    let live = Arc::new(Live::new(server.url()).unwrap());
    let backend = HttpBackend::new(Anthropic::new("wrong"), live, crate::inference_support::timeouts());
    let inference =
        Inference::new(Arc::new(backend), Default::default(), crate::inference_support::settings());
    let error =
        session(&inference, &MemoryBudget::unlimited(), 0).turn(&ask("go"), &mut Silent).await.unwrap_err();
    assert!(matches!(&error, InferenceError::Account { .. }), "{error}");
    assert!(!error.to_string().contains("wrong"));
    assert_eq!(server.seen().len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    /// Any text, any cut: the same answer, through the real server and client.
    #[test]
    fn any_text_and_any_chunk_size_give_the_same_answer(
        texts in prop::collection::vec("\\PC{1,40}", 1..4),
        input in "[\"\\\\a-z{}漢 \n]{0,30}",
        chunk in 1_usize..64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = ModelServer::start().await;
            let inference = layer(&server);
            let mut parts: Vec<Part> = texts.iter().cloned().map(Part::Text).collect();
            parts.push(Part::Tool { id: Some("t".into()), name: "Bash".into(), input: input.clone() });
            server.push(Reply::message(parts).split(Split::Bytes(chunk)));
            let response =
                session(&inference, &MemoryBudget::unlimited(), 0).turn(&ask("go"), &mut Silent).await.unwrap();
            let mut expected: Vec<Block> = texts.into_iter().map(Block::text).collect();
            let input = if input.is_empty() { "{}".to_string() } else { input };
            expected.push(Block::ToolUse { id: "t".into(), name: "Bash".into(), input: RawJson::new(input) });
            prop_assert_eq!(response.content, expected);
            Ok(())
        })?;
    }
}
