//! Traffic kept in a file and played from it.

use std::sync::Arc;

use forkyard_agent::inference::{
    Anthropic, Block, Collect, HttpBackend, Inference, InferenceError, Live, Message, Model, Recorder,
    Replay, Silent, Transport, TurnRequest,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::Usd;
use forkyard_core::pricing::PriceBook;
use serde_json::json;
use test_support::model_server::{Cut, ModelServer, Part, Reply, Split};

use crate::inference_support::{ask, bash, session, settings, timeouts};

const KEY: &str = "sk-ant-very-secret";

fn layer(transport: Arc<dyn Transport>) -> Inference {
    let backend = HttpBackend::new(Anthropic::new(KEY), transport, timeouts());
    Inference::new(Arc::new(backend), PriceBook::default(), settings())
}

/// Two turns with a call, for several forks.
async fn work(inference: &Inference, fork: u32) -> (Vec<Block>, Collect, Usd) {
    let budget = MemoryBudget::of_run(Usd::dollars(5));
    let session = session(inference, &budget, fork);
    let mut seen = Collect::default();
    let mut request = TurnRequest { tools: vec![bash()], ..ask(&format!("fork {fork}")) };
    let mut all = Vec::new();
    for _ in 0..2 {
        let response = session.turn(&request, &mut seen).await.unwrap();
        let results: Vec<Block> = response
            .content
            .iter()
            .filter_map(|b| match b {
                Block::ToolUse { id, .. } => {
                    Some(Block::result(id, format!("{KEY} is in my environment"), false))
                }
                _ => None,
            })
            .collect();
        all.extend(response.content.clone());
        request.messages.push(Message::assistant(response.content));
        request.messages.push(Message::results(results));
    }
    (all, seen, budget.balance().spent)
}

#[tokio::test]
async fn a_recording_plays_the_same_without_a_server_or_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("traffic.jsonl");
    let server = ModelServer::start().await;
    server.push(Reply::error(529, "overloaded_error", "busy"));
    server.push(Reply::text("lost").cut(Cut::DropAfter(3)));
    server.brain(|seen| {
        if seen.messages().len() > 1 {
            return Reply::text("done 🦀").split(Split::EveryByte);
        }
        Reply::tool("Bash", json!({"command": "env"})).and(Part::Text("Grüße".into())).split(Split::Bytes(2))
    });
    let live = Arc::new(Live::new(server.url()).unwrap());
    let recorder = Recorder::create(live, &path, vec![KEY.into()]).unwrap();
    let recorded = layer(Arc::new(recorder));
    let first = [work(&recorded, 0).await, work(&recorded, 1).await];
    drop(server);

    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains(KEY) && !text.contains("x-api-key"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
    }

    // The key was cut out of the requests; what plays them back has to have it cut out too.
    let replay = layer(Arc::new(Replay::open(&path).unwrap()));
    let mut request = TurnRequest { tools: vec![bash()], ..ask("fork 0") };
    let budget = MemoryBudget::of_run(Usd::dollars(5));
    let again = session(&replay, &budget, 0);
    let mut seen = Collect::default();
    let response = again.turn(&request, &mut seen).await.unwrap();
    assert_eq!(response.content, first[0].0[..2]);
    assert_eq!(response.tries, 3, "also what went wrong is played");
    request.messages.push(Message::assistant(response.content));
    request.messages.push(Message::results(vec![Block::result(
        tool_id(&request),
        "[redacted] is in my environment",
        false,
    )]));
    let last = again.turn(&request, &mut seen).await.unwrap();
    assert_eq!(last.text(), "done 🦀");
    assert_eq!(budget.balance().spent, first[0].2);
}

fn tool_id(request: &TurnRequest) -> String {
    let blocks = request.messages.iter().flat_map(|m| &m.content);
    let mut ids = blocks.filter_map(|b| match b {
        Block::ToolUse { id, .. } => Some(id.clone()),
        _ => None,
    });
    ids.next().unwrap()
}

#[tokio::test]
async fn a_request_that_was_never_recorded_is_an_error_that_says_so() {
    let replay = layer(Arc::new(Replay::parse("", "empty.jsonl").unwrap()));
    let error =
        session(&replay, &MemoryBudget::unlimited(), 0).turn(&ask("go"), &mut Silent).await.unwrap_err();
    assert!(
        matches!(&error, InferenceError::Rejected { message, .. } if message.contains("empty.jsonl")),
        "{error}"
    );
}

#[test]
fn a_file_that_is_no_recording_is_named_with_its_line() {
    let request = r#"{"exchange":0,"path":"/v1/messages","request":{}}"#;
    for bad in ["nonsense", "{}", r#"{"exchange":0}"#, r#"{"exchange":5,"chunk":"x"}"#] {
        let error = Replay::parse(&format!("{request}\n{bad}\n"), "x.jsonl").err().unwrap().to_string();
        assert!(error.starts_with("x.jsonl, line 2:"), "{error}");
    }
    assert!(Replay::parse(&format!("{request}\n"), "x").is_ok(), "a recording may be cut");
}

#[tokio::test]
async fn an_existing_file_is_never_overwritten() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let live = Arc::new(Live::new("http://127.0.0.1:9").unwrap());
    assert!(Recorder::create(live, file.path(), vec![]).is_err());
}

#[test]
fn endpoints_are_checked() {
    for bad in ["", "not a url", "ftp://x", "file:///etc/passwd"] {
        assert!(Live::new(bad).is_err(), "{bad}");
    }
    let error = Live::new("https://user:secret@example.com").unwrap_err().to_string();
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn providers_are_opened_from_settings() {
    use forkyard_agent::inference::{ANTHROPIC_BASE_URL, BadProvider, Provider, Traffic};
    use forkyard_core::pricing::CacheTtl;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let open = |provider: &Provider, traffic: Traffic| provider.open(&traffic, timeouts()).map(|b| b.name());
    let anthropic = |key: &str| Provider::Anthropic {
        key: key.into(),
        base_url: ANTHROPIC_BASE_URL.into(),
        shared_ttl: CacheTtl::FiveMinutes,
    };
    assert_eq!(open(&anthropic(KEY), Traffic::Live).unwrap(), "anthropic");
    assert!(matches!(open(&anthropic(" "), Traffic::Live), Err(BadProvider::NoKey { .. })));
    assert_eq!(open(&anthropic(""), Traffic::Replay(file("empty.jsonl", ""))).unwrap(), "anthropic");
    assert!(matches!(
        open(&anthropic(KEY), Traffic::Record(file("there.jsonl", ""))),
        Err(BadProvider::Record { .. })
    ));
    let script = Provider::Script { path: file("s.toml", "[[turn]]\ntext = \"x\"") };
    assert_eq!(open(&script, Traffic::Live).unwrap(), "script");
    assert!(matches!(open(&script, Traffic::Record(dir.path().join("new"))), Err(BadProvider::NoTraffic)));
    let local = Provider::OpenAi { key: None, base_url: "http://localhost:11434/v1".into() };
    assert_eq!(open(&local, Traffic::Live).unwrap(), "openai");
    let bad = Provider::OpenAi { key: None, base_url: "localhost:11434".into() };
    assert!(matches!(open(&bad, Traffic::Live), Err(BadProvider::Endpoint(_))));
}
