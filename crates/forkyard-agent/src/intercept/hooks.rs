//! The user's hooks: external commands on the host, in the shape of Claude Code's PreToolUse and PostToolUse.
//!
//! A hook gets JSON on stdin. Exit 0 lets the call go on, unless its stdout is JSON that says otherwise; exit 2 refuses, with
//! stderr as the reason; any other code is a failure of the hook and is shown without stopping the call. A hook that takes too
//! long refuses: one that guards must not be passed by making it slow.

use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::{Interceptor, ToolRequest, ToolResponse, Verdict};
use crate::config::{HookConfig, HookEvent};
use crate::inference::ResultPart;

/// Of a hook's stdout and stderr, each.
const MAX_HOOK_OUTPUT_BYTES: u64 = 1 << 20;
/// Of a result that a hook is shown.
const MAX_SHOWN_RESULT_BYTES: usize = 256 << 10;

pub struct Hook {
    pub config: HookConfig,
    pub session_id: String,
    pub cwd: String,
}

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Hook {
    fn applies(&self, event: HookEvent, tool: &str) -> bool {
        let matcher = self.config.matcher.trim();
        self.config.event == event
            && (matcher.is_empty()
                || matcher.split('|').map(str::trim).any(|name| match name.split_once('*') {
                    None => name == tool,
                    Some((start, end)) => {
                        let (start, end) = (start.trim_end_matches('.'), end.trim_start_matches('*'));
                        tool.len() >= start.len() + end.len()
                            && tool.starts_with(start)
                            && tool.ends_with(end)
                    }
                }))
    }

    fn input(&self, request: &ToolRequest, event: &str) -> Map<String, Value> {
        Map::from_iter([
            ("session_id".to_string(), json!(self.session_id)),
            ("transcript_path".to_string(), json!("")),
            ("cwd".to_string(), json!(self.cwd)),
            ("hook_event_name".to_string(), json!(event)),
            ("tool_name".to_string(), json!(request.tool)),
            ("tool_input".to_string(), Value::Object(request.input.clone())),
            ("tool_use_id".to_string(), json!(request.tool_use_id)),
        ])
    }

    /// Err is why it could not be asked.
    async fn ask(&self, input: Map<String, Value>) -> Result<Ran, String> {
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(&self.config.command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("it could not be started: {e}"))?;
        let mut group =
            Group(child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?)));
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let text = Value::Object(input).to_string();
        let work = async {
            let write = async {
                if let Some(mut stdin) = stdin {
                    // A hook need not read what it gets.
                    let _ = stdin.write_all(text.as_bytes()).await;
                }
            };
            let ((), stdout, stderr) = tokio::join!(write, bounded(stdout), bounded(stderr));
            let status = child.wait().await.map_err(|e| e.to_string())?;
            Ok(Ran { code: status.code(), stdout, stderr })
        };
        let result = tokio::time::timeout(Duration::from_millis(self.config.timeout_ms), work).await;
        if result.is_ok() {
            group.0 = None;
        }
        result.unwrap_or_else(|_| Err(format!("it took longer than {} ms", self.config.timeout_ms)))
    }
}

/// A hook's process group, ended with all that it started if nobody waits for it any more.
struct Group(Option<rustix::process::Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

async fn bounded(stream: Option<impl AsyncRead + Unpin>) -> String {
    let mut data = Vec::new();
    if let Some(stream) = stream {
        let mut limited = stream.take(MAX_HOOK_OUTPUT_BYTES);
        let _ = limited.read_to_end(&mut data).await;
        // Read on, so that the hook does not wait for ever; what comes is dropped.
        let _ = tokio::io::copy(&mut limited.into_inner(), &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&data).into_owned()
}

/// What a hook's JSON says about a call that has not run.
fn judge(ran: &Ran) -> Verdict {
    let reason =
        |text: Option<&Value>| text.and_then(Value::as_str).unwrap_or("refused by a hook").to_string();
    match ran.code {
        Some(0) => {}
        Some(2) => return Verdict::Deny(reason(Some(&json!(ran.stderr.trim())))),
        code => {
            tracing::warn!(?code, stderr = %crate::text::cut(&ran.stderr, 500), "a hook failed");
            return Verdict::Allow;
        }
    }
    let Ok(answer) = serde_json::from_str::<Value>(ran.stdout.trim()) else { return Verdict::Allow };
    if answer.get("continue") == Some(&json!(false)) {
        return Verdict::Deny(reason(answer.get("stopReason")));
    }
    if matches!(answer.get("decision").and_then(Value::as_str), Some("block" | "deny")) {
        return Verdict::Deny(reason(answer.get("reason")));
    }
    let specific = answer.get("hookSpecificOutput");
    let field = |name: &str| specific.and_then(|s| s.get(name));
    match field("permissionDecision").and_then(Value::as_str) {
        // Nobody can be asked in a fork.
        Some("deny" | "ask") => Verdict::Deny(reason(field("permissionDecisionReason"))),
        Some(_) | None => match field("updatedInput") {
            Some(Value::Object(input)) => Verdict::Rewrite(input.clone()),
            Some(_) | None => Verdict::Allow,
        },
    }
}

#[async_trait]
impl Interceptor for Hook {
    async fn before(&self, request: &ToolRequest) -> Verdict {
        if !self.applies(HookEvent::PreToolUse, &request.tool) {
            return Verdict::Allow;
        }
        match self.ask(self.input(request, "PreToolUse")).await {
            Ok(ran) => judge(&ran),
            Err(e) => Verdict::Deny(format!(
                "the hook `{}` did not decide: {e}",
                crate::text::cut(&self.config.command, 100)
            )),
        }
    }

    async fn after(&self, request: &ToolRequest, response: &mut ToolResponse) {
        if !self.applies(HookEvent::PostToolUse, &request.tool) {
            return;
        }
        let mut input = self.input(request, "PostToolUse");
        let text: Vec<&str> = response
            .parts
            .iter()
            .map(|part| match part {
                ResultPart::Text { text } => text.as_str(),
                ResultPart::Image(_) => "(image)",
            })
            .collect();
        let shown = crate::text::cut(&text.join("\n"), MAX_SHOWN_RESULT_BYTES);
        input.insert("tool_response".to_string(), json!({ "content": shown, "is_error": response.is_error }));
        let ran = match self.ask(input).await {
            Ok(ran) => ran,
            Err(e) => return tracing::warn!("a hook after {} did not answer: {e}", request.tool),
        };
        let answer = serde_json::from_str::<Value>(ran.stdout.trim()).unwrap_or_default();
        let blocks = answer.get("decision").and_then(Value::as_str) == Some("block");
        let context =
            answer.get("hookSpecificOutput").and_then(|s| s.get("additionalContext")).and_then(Value::as_str);
        let said = match ran.code {
            Some(2) => Some(ran.stderr.trim().to_string()),
            Some(0) if blocks => {
                Some(answer.get("reason").and_then(Value::as_str).unwrap_or_default().to_string())
            }
            Some(0) => context.map(str::to_string),
            Some(_) | None => None,
        };
        if let Some(said) = said.filter(|s| !s.is_empty()) {
            response.parts.push(ResultPart::Text { text: format!("[hook] {said}") });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(event: HookEvent, matcher: &str, command: &str) -> Hook {
        let config = HookConfig {
            event,
            matcher: matcher.to_string(),
            command: command.to_string(),
            timeout_ms: 5000,
        };
        Hook { config, session_id: "s".to_string(), cwd: "/workspace".to_string() }
    }

    fn request(tool: &str) -> ToolRequest {
        let input = json!({ "command": "ls" }).as_object().unwrap().clone();
        ToolRequest { tool: tool.to_string(), input, tool_use_id: "t".to_string(), turn: 1, subagent: None }
    }

    #[tokio::test]
    async fn decisions_by_exit_code_and_json() {
        let cases = [
            ("exit 0", Verdict::Allow),
            ("echo no >&2; exit 2", Verdict::Deny("no".to_string())),
            ("echo broken >&2; exit 1", Verdict::Allow),
            ("echo not json", Verdict::Allow),
            (r#"echo '{"decision":"block","reason":"r"}'"#, Verdict::Deny("r".to_string())),
            (r#"echo '{"continue":false,"stopReason":"s"}'"#, Verdict::Deny("s".to_string())),
            (
                r#"echo '{"hookSpecificOutput":{"permissionDecision":"deny","permissionDecisionReason":"d"}}'"#,
                Verdict::Deny("d".to_string()),
            ),
            (r#"echo '{"hookSpecificOutput":{"permissionDecision":"allow"}}'"#, Verdict::Allow),
            (
                r#"echo '{"hookSpecificOutput":{"permissionDecision":"allow","updatedInput":{"command":"pwd"}}}'"#,
                Verdict::Rewrite(json!({ "command": "pwd" }).as_object().unwrap().clone()),
            ),
            // It sees the call.
            (r#"grep -q '"tool_name":"Bash"' && exit 2"#, Verdict::Deny(String::new())),
        ];
        for (command, expected) in cases {
            let got = hook(HookEvent::PreToolUse, "Bash|Edit", command).before(&request("Bash")).await;
            assert_eq!(got, expected, "{command}");
        }
    }

    #[tokio::test]
    async fn a_slow_hook_refuses_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let mut hook =
            hook(HookEvent::PreToolUse, "", &format!("sleep 600 & echo $! > {}; wait", pid_file.display()));
        hook.config.timeout_ms = 1000;
        assert!(matches!(hook.before(&request("Read")).await, Verdict::Deny(_)));
        let pid: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        // The kernel needs a moment to take it away.
        for _ in 0..500 {
            let status = std::fs::read_to_string(format!("/proc/{pid}/stat", pid = pid.as_raw_nonzero()));
            if status.is_err() || status.is_ok_and(|s| s.contains(") Z ")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the hook's child is still there");
    }

    #[tokio::test]
    async fn matchers_choose_tools_and_post_hooks_add_text() {
        for (matcher, tool, applies) in [
            ("", "X", true),
            ("*", "X", true),
            ("Edit|Write", "Write", true),
            ("Edit", "Read", false),
            ("mcp__.*", "mcp__a", true),
        ] {
            let got =
                hook(HookEvent::PreToolUse, matcher, "exit 2").before(&request(tool)).await != Verdict::Allow;
            assert_eq!(got, applies, "{matcher} {tool}");
        }
        let mut response = ToolResponse::text("ok");
        hook(HookEvent::PostToolUse, "Bash", "echo 'format it' >&2; exit 2")
            .after(&request("Bash"), &mut response)
            .await;
        assert_eq!(response.parts[1], ResultPart::Text { text: "[hook] format it".to_string() });
    }
}
