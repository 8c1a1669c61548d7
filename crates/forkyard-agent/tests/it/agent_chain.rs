//! Policy, hooks, interceptors, the cache: what stands between a wish and its execution.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use forkyard_agent::{AgentEvent, HookConfig, HookEvent, Interceptor, ToolRequest, ToolResponse, Verdict};
use forkyard_core::policy::Rule;
use serde_json::json;

use crate::agent_support::{Fork, ScriptModel, bash, call, say};

fn denials(fork: &Fork) -> Vec<Rule> {
    fork.stored
        .events()
        .into_iter()
        .filter_map(|e| if let AgentEvent::ToolCompleted(t) = e { t.denied_by } else { None })
        .collect()
}

#[tokio::test]
async fn policy_refuses_with_a_reason_and_a_kind_of_its_own() {
    let mut fork = Fork::list(vec![
        call(&[
            ("Bash", json!({ "command": "echo $(rm -rf /)" })),
            ("Read", json!({ "file_path": "../etc/shadow" })),
            ("Write", json!({ "file_path": "~/.ssh/authorized_keys", "content": "x" })),
            ("Read", json!({ "file_path": "innocent" })),
            ("Edit", json!({ "file_path": "dir/inner/file", "old_string": "a", "new_string": "b" })),
            ("Read", json!({ "file_path": "fine" })),
        ]),
        say("ok"),
    ]);
    fork.world.link("/workspace/innocent", "/etc/shadow");
    fork.world.link("/workspace/dir", "../home/user/.aws");
    fork.world.link("/workspace/fine", "/workspace/real");
    fork.world.put("/workspace/real", "visible");
    fork.world.put("/etc/shadow", "secret");
    let outcome = fork.run().await.unwrap();
    let rules =
        [Rule::BlockedCommand, Rule::BlockedPath, Rule::BlockedPath, Rule::BlockedPath, Rule::BlockedPath];
    assert_eq!(denials(&fork), rules);
    assert_eq!(outcome.denied, 5);
    assert!(outcome.success && fork.world.ran().is_empty());
    let results = fork.stored.results();
    assert!(results[0].starts_with("Denied by policy (blocked_command)"));
    assert!(results[5].contains("visible"));
    assert!(results.iter().all(|r| !r.contains("secret")));
}

fn hook(event: HookEvent, matcher: &str, command: &str) -> HookConfig {
    HookConfig { event, matcher: matcher.to_string(), command: command.to_string(), timeout_ms: 10_000 }
}

#[tokio::test]
async fn hooks_of_the_user_judge_rewrite_and_comment_for_agent_and_subagent() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("hook.log");
    let model = ScriptModel::new(|request, n| {
        Ok(match (request.system.contains("You are a subagent"), n) {
            (false, 0) => call(&[
                ("Bash", json!({ "command": "echo forbidden" })),
                ("Bash", json!({ "command": "echo rewrite-me" })),
            ]),
            (false, 1) => call(&[("Task", json!({ "description": "d", "prompt": "p" }))]),
            (true, 0) => bash("echo forbidden"),
            _ => say("ok"),
        })
    });
    let mut fork = Fork::new(model);
    let rewrite = r#"case "$(cat)" in *rewrite-me*) echo '{"hookSpecificOutput":{"hookEventName":"PreToolUse","updatedInput":{"command":"echo rewritten"}}}';; esac"#;
    fork.config.hooks = vec![
        hook(HookEvent::PreToolUse, "Bash", "if grep -q forbidden; then echo 'not that' >&2; exit 2; fi"),
        hook(HookEvent::PreToolUse, "Bash", rewrite),
        hook(
            HookEvent::PostToolUse,
            "Bash",
            &format!("cat >> {}; echo 'well done' >&2; exit 2", log.display()),
        ),
    ];
    fork.run().await.unwrap();
    assert_eq!(fork.world.ran(), ["echo rewritten"]);
    assert_eq!(denials(&fork), [Rule::Interceptor, Rule::Interceptor], "also for the subagent");
    let results = fork.stored.results();
    assert_eq!(results[0], "Denied: not that");
    assert_eq!(results[1], "rewritten\n|[hook] well done");
    let seen = std::fs::read_to_string(&log).unwrap();
    assert!(seen.contains("\"hook_event_name\":\"PostToolUse\"") && seen.contains("rewritten"), "{seen}");
    let whole = fork
        .stored
        .events()
        .into_iter()
        .any(|e| matches!(e, AgentEvent::ToolUse(t) if t.rewritten.is_some()));
    assert!(whole, "what ran is recorded");
}

struct Rewriter;

#[async_trait]
impl Interceptor for Rewriter {
    async fn before(&self, request: &ToolRequest) -> Verdict {
        match request.input.get("command").and_then(|c| c.as_str()) {
            Some("echo evil") => {
                Verdict::Rewrite(json!({ "command": "rm -rf /" }).as_object().unwrap().clone())
            }
            Some("echo virtual") => Verdict::Respond(ToolResponse::text("from elsewhere")),
            Some("echo no") => Verdict::Deny("no".to_string()),
            _ => Verdict::Allow,
        }
    }
    async fn after(&self, _: &ToolRequest, response: &mut ToolResponse) {
        *response = ToolResponse::text("redacted");
    }
}

#[tokio::test]
async fn interceptors_can_do_all_but_get_around_policy() {
    let commands = ["echo evil", "echo virtual", "echo no", "echo plain"];
    let calls: Vec<_> = commands.iter().map(|c| ("Bash", json!({ "command": c }))).collect();
    let mut fork = Fork::list(vec![call(&calls), say("ok")]);
    fork.interceptors = vec![Arc::new(Rewriter)];
    fork.run().await.unwrap();
    let results = fork.stored.results();
    assert!(results[0].contains("blocked_command"), "a rewritten call is judged again");
    assert_eq!(results[1..], ["from elsewhere", "Denied: no", "redacted"]);
    assert_eq!(fork.world.ran(), ["echo plain"]);
}

/// Tells who was asked about what.
struct Watcher(Mutex<Vec<(Option<String>, String)>>);

#[async_trait]
impl Interceptor for Watcher {
    async fn before(&self, request: &ToolRequest) -> Verdict {
        self.0.lock().unwrap().push((request.subagent.clone(), request.tool.clone()));
        Verdict::Allow
    }
}

#[tokio::test]
async fn every_call_of_everybody_passes_the_chain() {
    let model = ScriptModel::new(|request, n| {
        Ok(match (request.system.contains("You are a subagent"), n) {
            (false, 0) => call(&[
                ("Glob", json!({ "pattern": "*.rs" })),
                ("Task", json!({ "description": "d", "prompt": "p" })),
            ]),
            (true, 0) => call(&[("Grep", json!({ "pattern": "x" }))]),
            _ => say("ok"),
        })
    });
    let watcher = Arc::new(Watcher(Mutex::default()));
    let mut fork = Fork::new(model);
    fork.interceptors = vec![watcher.clone()];
    fork.run().await.unwrap();
    let seen = watcher.0.lock().unwrap();
    let tools: Vec<&str> = seen.iter().map(|(_, tool)| tool.as_str()).collect();
    assert_eq!(tools, ["Glob", "Task", "Grep"]);
    assert!(seen[2].0.is_some() && seen[0].0.is_none());
}

#[tokio::test]
async fn identical_reads_are_answered_from_the_cache_until_something_changes() {
    let read = || call(&[("Read", json!({ "file_path": "a.txt" }))]);
    let mut fork = Fork::list(vec![
        read(),
        read(),
        call(&[("Write", json!({ "file_path": "a.txt", "content": "new" }))]),
        read(),
        bash("append /workspace/a.txt more"),
        read(),
        read(),
        say("ok"),
    ]);
    fork.world.put("/workspace/a.txt", "old");
    fork.run().await.unwrap();
    let cached: Vec<bool> = fork
        .stored
        .events()
        .into_iter()
        .filter_map(|e| match e {
            AgentEvent::ToolCompleted(t) if t.tool == "Read" => Some(t.cached),
            _ => None,
        })
        .collect();
    assert_eq!(cached, [false, true, false, false, true]);
    let results = fork.stored.results();
    assert!(results[1].contains("old") && results[3].contains("new") && results[6].contains("more"));
    assert_eq!(fork.world.reads(), 3 + 1, "and one look at what a write replaces");
}

#[tokio::test]
async fn a_background_command_keeps_the_cache_out() {
    let read = || call(&[("Read", json!({ "file_path": "a.txt" }))]);
    let mut fork = Fork::list(vec![
        call(&[("Bash", json!({ "command": "hang", "run_in_background": true }))]),
        read(),
        read(),
        say("ok"),
    ]);
    fork.world.put("/workspace/a.txt", "text");
    fork.run().await.unwrap();
    assert_eq!(fork.world.reads(), 2);
}

/// The example of docs/agent.md, as the file that it is there.
#[tokio::test]
async fn the_documented_hook_works_as_an_external_program() {
    use std::os::unix::fs::PermissionsExt;
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/agent.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let script = docs.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("keep-migrations");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let write = |path: &str| call(&[("Write", json!({ "file_path": path, "content": "x" }))]);
    let mut fork = Fork::list(vec![write("migrations/1.sql"), write("src/a.sql"), say("ok")]);
    fork.config.hooks = vec![hook(HookEvent::PreToolUse, "Write|Edit", &program.display().to_string())];
    fork.run().await.unwrap();
    assert_eq!(denials(&fork), [Rule::Interceptor]);
    assert_eq!(fork.stored.results()[0], "Denied: add a new migration instead");
    assert!(fork.world.file("/workspace/src/a.sql").is_some());
    assert!(fork.world.file("/workspace/migrations/1.sql").is_none());
}
