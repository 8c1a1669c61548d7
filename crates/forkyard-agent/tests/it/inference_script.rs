//! The offline model.

use std::path::Path;
use std::sync::Arc;

use forkyard_agent::inference::{
    Block, Collect, Inference, Message, Model, RawJson, Script, ScriptBackend, StopReason, ToolDef,
    TurnRequest,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::Usd;
use forkyard_core::pricing::PriceBook;

use crate::inference_support::{bash, session, settings};

fn layer(script: Script) -> Inference {
    Inference::new(Arc::new(ScriptBackend::new(script)), PriceBook::default(), settings())
}

fn parse(text: &str) -> Inference {
    layer(Script::parse(text, "test.toml").unwrap())
}

fn request(text: &str) -> TurnRequest {
    TurnRequest { tools: vec![bash()], ..TurnRequest::new("script", vec![Message::user(text)], 4096) }
}

/// Plays a conversation: each call is answered by `results`, until there is none.
async fn play(
    inference: &Inference,
    fork: u32,
    mut request: TurnRequest,
    mut results: impl FnMut(&str, &RawJson) -> (String, bool),
) -> Vec<String> {
    let mut said = Vec::new();
    for _ in 0..20 {
        // A new session each time, as after a crash: the conversation alone decides.
        let session = session(inference, &MemoryBudget::unlimited(), fork);
        let mut seen = Collect::default();
        let response = session.turn(&request, &mut seen).await.unwrap();
        assert_eq!(response.text(), seen.text);
        said.push(response.text());
        let answers: Vec<Block> = response
            .content
            .iter()
            .filter_map(|b| match b {
                Block::ToolUse { id, name, input } => {
                    let (text, is_error) = results(name, input);
                    Some(Block::result(id, text, is_error))
                }
                _ => None,
            })
            .collect();
        request.messages.push(Message::assistant(response.content));
        if answers.is_empty() {
            assert_eq!(response.stop_reason, StopReason::EndTurn);
            return said;
        }
        request.messages.push(Message::results(answers));
    }
    panic!("it never ends: {said:?}");
}

#[tokio::test]
async fn the_example_plays_by_results_and_by_fork() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/fix-the-greeting.toml");
    let inference = layer(Script::open(&path).unwrap());
    let run = async |fork: u32| {
        let mut file = String::from("echo Hello world\n");
        play(&inference, fork, request("fix it"), |name, input| {
            let input = input.object().unwrap();
            match name {
                "Write" => file = input["content"].as_str().unwrap().to_string(),
                "Bash" if input["command"].as_str().unwrap().contains("sed") => {
                    file = file.replace("wrld", "world")
                }
                _ => {}
            }
            let passes = file.contains("Hello, world");
            (if passes { "PASS" } else { "FAIL" }.to_string(), false)
        })
        .await
    };
    let (good, bad) = (run(0).await, run(2).await);
    assert_eq!((good.len(), bad.len()), (4, 5));
    assert!(bad[3].contains("correct the spelling") && bad[4].contains("fixed"));
    assert_eq!(good[3], bad[4]);

    let missing = play(&inference, 0, request("fix it"), |_, _| ("no such file".into(), true)).await;
    assert_eq!(missing[1], "This repository has no greeting to fix.");
}

#[tokio::test]
async fn texts_and_inputs_are_filled_and_calls_have_ids_of_their_own() {
    let inference = parse(
        r#"
        [[turn]]
        repeat = true
        when = { no_result = "enough" }
        text = "fork {{fork}}, turn {{turn}}"
        tools = [{ name = "Bash", input = { command = "echo {{fork}}" } }, { name = "Bash", raw_input = "{oops" }]
        [[turn]]
        text = "done"
        "#,
    );
    let mut calls = Vec::new();
    let mut results = 0;
    let said = play(&inference, 7, request("go"), |_, input| {
        calls.push(input.as_str().to_string());
        results += 1;
        (if results > 5 { "enough" } else { "more" }.to_string(), false)
    })
    .await;
    assert_eq!(said, ["fork 7, turn 1", "fork 7, turn 2", "fork 7, turn 3", "done"]);
    assert_eq!(calls[..2], [r#"{"command":"echo 7"}"#, "{oops"]);
}

#[tokio::test]
async fn messages_subagents_compaction_and_the_end() {
    let inference = parse(
        r#"
        [[turn]]
        tools = [{ name = "Bash", input = { command = "one" } }]
        [[turn]]
        tools = [{ name = "Bash", input = { command = "two" } }]
        [[turn]]
        text = "finished"
        [[turn]]
        when = { message = "again" }
        text = "as you wish"
        [[subagent]]
        text = "I am a subagent"
        "#,
    );
    let budget = MemoryBudget::unlimited();
    let turn = async |request: &TurnRequest| {
        let session = session(&inference, &budget, 0);
        session.turn(request, &mut Collect::default()).await.unwrap()
    };
    let sub = TurnRequest { conversation: "t1".into(), ..request("help") };
    assert_eq!(turn(&sub).await.text(), "I am a subagent");

    // Only the last call is left of what was said before.
    let call = Block::ToolUse { id: "script_1_1_0".into(), name: "Bash".into(), input: RawJson::new("{}") };
    let mut compacted = request("go");
    compacted.messages.push(Message::assistant(vec![call]));
    compacted.messages.push(Message::results(vec![Block::result("script_1_1_0", "ok", false)]));
    let end = turn(&compacted).await;
    assert_eq!(end.text(), "finished");
    compacted.messages.push(Message::assistant(end.content));
    compacted.messages.push(Message::user("once again, please"));
    let more = turn(&compacted).await;
    assert_eq!(more.text(), "as you wish");
    compacted.messages.push(Message::assistant(more.content));
    compacted.messages.push(Message::user("again"));
    assert!(turn(&compacted).await.text().contains("no further turn"));
}

#[tokio::test]
async fn a_script_is_free_unless_it_names_a_price() {
    let budget = MemoryBudget::of_run(Usd::cents(1));
    let free = parse("[[turn]]\ntext = \"x\"");
    let go = request("go");
    let response = session(&free, &budget, 0).turn(&go, &mut Collect::default()).await.unwrap();
    assert_eq!((response.cost, budget.balance().spent), (Usd::ZERO, Usd::ZERO));
    let _: &ToolDef = &go.tools[0];

    let priced = parse(
        "price_as = \"opus\"\n[[turn]]\ntext = \"x\"\nusage = { input = 100, output = 50, cache_read = 40 }",
    );
    let budget = MemoryBudget::of_run(Usd::dollars(1));
    let response = session(&priced, &budget, 0).turn(&go, &mut Collect::default()).await.unwrap();
    assert_eq!(response.cost, Usd::nanos(60 * 4_000 + 50 * 20_000 + 40 * 200));
    assert_eq!(budget.balance().spent, response.cost);
}

/// The loop replaces a conversation by its first message and a summary.
#[tokio::test]
async fn a_summary_carries_the_place_on() {
    let inference = parse(
        r#"
        [[turn]]
        tools = [{ name = "Bash", input = { command = "one" } }]
        [[turn]]
        tools = [{ name = "Bash", input = { command = "two" } }]
        [[turn]]
        text = "finished"
        "#,
    );
    let session = session(&inference, &MemoryBudget::unlimited(), 3);
    let mut main = TurnRequest { conversation: "main".into(), ..request("go") };
    let first = session.turn(&main, &mut Collect::default()).await.unwrap();
    let Block::ToolUse { id, .. } = &first.content[0] else { panic!("{first:?}") };
    let result = Block::result(id, "ok", false);
    main.messages.extend([Message::assistant(first.content.clone()), Message::results(vec![result])]);
    session.turn(&main, &mut Collect::default()).await.unwrap();

    let ask = TurnRequest { tools: vec![], conversation: "mainsummary2t1".into(), ..request("sum it up") };
    let summary = session.turn(&ask, &mut Collect::default()).await.unwrap().text();
    main.messages.truncate(1);
    main.messages[0].content.push(Block::text(format!("So far:\n\n{summary}")));
    assert_eq!(session.turn(&main, &mut Collect::default()).await.unwrap().text(), "finished");
}
