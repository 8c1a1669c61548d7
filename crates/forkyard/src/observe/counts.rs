//! Counters, out of what is recorded of the runs that this process drives, or has opened for Temporal.

use std::collections::BTreeMap;
use std::time::Duration;

use forkyard_core::fork::ForkResult;
use forkyard_core::pricing::Usage;
use forkyard_core::run::RunEvent;
use forkyard_core::view::RunOutcome;
use forkyard_core::{ForkNum, RunId, Timestamp, Usd, event};
use forkyard_store::{EventQuery, Recorded};
use forkyard_temporal::Counted;
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Counter, Histogram, Meter};
use serde::Deserialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::yard::Yard;

/// Events of one read.
const PAGE: usize = 500;
/// Changes come in bursts; metrics are looked at every few seconds.
const PAUSE: Duration = Duration::from_millis(200);
/// A driver that begins or lets go changes nothing that a watch would surely see.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub struct Counts {
    forks: Counter<u64>,
    fork_seconds: Histogram<f64>,
    fork_cost: Histogram<f64>,
    runs: Counter<u64>,
    task_errors: Counter<u64>,
    takeovers: Counter<u64>,
    budget_warnings: Counter<u64>,
    cost: Counter<f64>,
    tokens: Histogram<u64>,
    answer_seconds: Histogram<f64>,
    stream_errors: Counter<u64>,
    tool_calls: Counter<u64>,
    tool_seconds: Histogram<f64>,
}

/// Tools of the agent, those that agent programs bring along included.
const TOOLS: [&str; 13] = [
    "Bash",
    "BashOutput",
    "Edit",
    "Glob",
    "Grep",
    "KillBash",
    "MultiEdit",
    "NotebookEdit",
    "Read",
    "Skill",
    "Task",
    "WebFetch",
    "Write",
];

/// The seeds' buckets.
const FORK_SECONDS: [f64; 6] = [60.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0];
const FORK_DOLLARS: [f64; 7] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0];
/// Those of OpenTelemetry's conventions for generative AI: powers of four, and of two.
const TOKENS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];
const OPERATION_SECONDS: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];

impl Counts {
    pub fn new(meter: &Meter) -> Counts {
        let counter =
            |name: &'static str, what: &'static str| meter.u64_counter(name).with_description(what).build();
        let histogram = |name: &'static str, what: &'static str, unit: &'static str, buckets: &[f64]| {
            let built = meter.f64_histogram(name).with_description(what).with_unit(unit);
            built.with_boundaries(buckets.to_vec()).build()
        };
        Counts {
            forks: counter("sandbox_fork_completed", "Forks that have ended"),
            fork_seconds: histogram(
                "sandbox_fork_duration_seconds",
                "Time of a fork that counted against its limit",
                "s",
                &FORK_SECONDS,
            ),
            fork_cost: histogram(
                "sandbox_fork_cost_usd",
                "What the model cost for a fork, in dollars",
                "USD",
                &FORK_DOLLARS,
            ),
            runs: counter("forkyard_run_completed", "Runs that have ended"),
            task_errors: counter("forkyard_task_errors", "Tasks that failed, tries that follow or not"),
            takeovers: counter("forkyard_takeovers", "Runs that this process took over or took up"),
            budget_warnings: counter("forkyard_budget_warnings", "Budgets that were used up to 80 %"),
            cost: meter
                .f64_counter("forkyard_cost_usd")
                .with_description("What models cost, in dollars")
                .build(),
            tokens: meter
                .u64_histogram("gen_ai.client.token.usage")
                .with_description("Tokens of one answer")
                .with_unit("{token}")
                .with_boundaries(TOKENS.to_vec())
                .build(),
            answer_seconds: histogram(
                "gen_ai.client.operation.duration",
                "Time from what an agent did before to the model's answer, waiting and tries included",
                "s",
                &OPERATION_SECONDS,
            ),
            stream_errors: counter("forkyard_stream_errors", "Answers of models that broke off"),
            tool_calls: counter("forkyard_tool_calls", "Tool calls of agents"),
            tool_seconds: histogram(
                "forkyard_tool_duration_seconds",
                "Time of a tool call",
                "s",
                &OPERATION_SECONDS,
            ),
        }
    }

    fn run_event(&self, e: &RunEvent, model: &str) {
        match e {
            RunEvent::ForkEnded { result } => self.fork_ended(result, model),
            RunEvent::Ended { outcome, .. } => {
                let word = match outcome {
                    RunOutcome::Success => "success",
                    RunOutcome::Failed => "failed",
                    RunOutcome::Cancelled => "cancelled",
                };
                self.runs.add(1, &[KeyValue::new("outcome", word)]);
            }
            RunEvent::TakenOver { .. } => self.takeovers.add(1, &[]),
            RunEvent::BudgetWarning(_) => self.budget_warnings.add(1, &[]),
            RunEvent::Submitted { .. }
            | RunEvent::Task(_)
            | RunEvent::GaveUp { .. }
            | RunEvent::ForkStarted { .. }
            | RunEvent::ForksAdded { .. }
            | RunEvent::Paused
            | RunEvent::Resumed
            | RunEvent::Detached
            | RunEvent::Cancelled
            | RunEvent::ForkCancelled { .. }
            | RunEvent::Refused { .. }
            | RunEvent::PhaseEntered { .. } => {}
        }
    }

    fn fork_ended(&self, result: &ForkResult, model: &str) {
        let status = KeyValue::new("status", result.outcome.as_str());
        let model = KeyValue::new("model", model.to_string());
        self.forks.add(1, &[status.clone(), model.clone()]);
        self.fork_seconds.record(result.driven.0 as f64 / 1000.0, &[status]);
        let cost = result.report.as_ref().map_or(Usd::ZERO, |r| r.cost);
        self.fork_cost.record(cost.as_dollars(), &[model]);
    }

    fn answered(&self, a: &Answered, provider: &'static str, took: Option<Duration>) {
        let about = [
            KeyValue::new("gen_ai.operation.name", "chat"),
            KeyValue::new("gen_ai.provider.name", provider),
            KeyValue::new("gen_ai.request.model", a.model.clone()),
            KeyValue::new("gen_ai.response.model", a.model.clone()),
        ];
        for (kind, tokens) in [("input", a.usage.prompt()), ("output", a.usage.output)] {
            let mut about = about.to_vec();
            about.push(KeyValue::new("gen_ai.token.type", kind));
            self.tokens.record(tokens, &about);
        }
        if let Some(took) = took {
            self.answer_seconds.record(took.as_secs_f64(), &about);
        }
        self.cost.add(a.cost.as_dollars(), &[KeyValue::new("model", a.model.clone())]);
    }

    fn called(&self, c: &Called) {
        let result = match (&c.denied_by, c.is_error) {
            (Some(_), _) => "denied",
            (None, true) => "error",
            (None, false) => "ok",
        };
        // A model may call whatever it likes; a label has a bounded number of values.
        let known = TOOLS.iter().find(|t| **t == c.tool);
        let tool = KeyValue::new("tool", known.copied().unwrap_or("other"));
        self.tool_calls.add(1, &[tool.clone(), KeyValue::new("result", result)]);
        self.tool_seconds.record(c.duration_ms as f64 / 1000.0, &[tool]);
    }
}

/// Of `agent.assistant_message`, and of `agent.compacted`, which names no model.
#[derive(Deserialize)]
struct Answered {
    #[serde(default)]
    model: String,
    usage: Usage,
    cost: Usd,
}

/// Of `agent.tool_completed`.
#[derive(Deserialize)]
struct Called {
    tool: String,
    #[serde(default)]
    denied_by: Option<Value>,
    is_error: bool,
    duration_ms: u64,
}

/// A run that this process drives.
struct Tracked {
    position: u64,
    /// When each agent, or its subagent, did something for the last time.
    last: BTreeMap<(ForkNum, Option<String>), Timestamp>,
    /// As they were asked for.
    models: BTreeMap<ForkNum, String>,
    ended: bool,
}

/// Counts what happens in the runs that this process drives, each event once, until `stop`.
pub async fn follow(yard: &Yard, counted: Option<&Counted>, counts: Counts, stop: CancellationToken) {
    let mut tracked: BTreeMap<RunId, Tracked> = BTreeMap::new();
    let mut watch = yard.store.watch(None);
    loop {
        // Asked before reading: of a run that is not driven any more, everything is read now.
        let mut driven = yard.engine.driving();
        driven.extend(counted.map(Counted::all).unwrap_or_default());
        for (run, from) in &driven {
            let (last, models) = (BTreeMap::new(), BTreeMap::new());
            let new = || Tracked { position: *from, last, models, ended: false };
            tracked.entry(run.clone()).or_insert_with(new);
        }
        for (run, t) in &mut tracked {
            if let Err(e) = read(yard, &counts, run, t).await {
                tracing::warn!(%run, "its events can't be counted yet: {e}");
            }
            if let (true, Some(counted)) = (t.ended, counted) {
                counted.forget(run);
            }
        }
        tracked.retain(|run, _| driven.contains_key(run));
        // What happened until the end has been read.
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = watch.changed() => tokio::time::sleep(PAUSE).await,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

async fn read(yard: &Yard, counts: &Counts, run: &RunId, t: &mut Tracked) -> forkyard_store::Result<()> {
    loop {
        let query = EventQuery { after: t.position, limit: PAGE, ..Default::default() };
        let page = yard.store.read_run(run, &query).await?;
        let Some(last) = page.last().map(|r| r.position) else { return Ok(()) };
        for r in page {
            if let ("run.fork_ended", Some(n)) = (r.event.kind.as_str(), ended_fork(&r)) {
                t.known(yard, run, n).await?;
            } else if let Some(n) = r.stream.fork() {
                t.known(yard, run, n).await?;
            }
            t.count(counts, r);
        }
        t.position = last;
    }
}

fn ended_fork(r: &Recorded) -> Option<ForkNum> {
    r.event.data.pointer("/result/fork")?.as_u64()?.try_into().ok()
}

impl Tracked {
    async fn known(&mut self, yard: &Yard, run: &RunId, fork: ForkNum) -> forkyard_store::Result<()> {
        if !self.models.contains_key(&fork)
            && let Some(view) = yard.store.fork(run, fork).await?
        {
            self.models.insert(fork, view.model);
        }
        Ok(())
    }

    fn model(&self, fork: ForkNum) -> &str {
        self.models.get(&fork).map_or("", String::as_str)
    }

    /// What can't be read is of another version, and told by `forkyard events`.
    fn count(&mut self, counts: &Counts, r: Recorded) {
        let kind = r.event.kind.as_str();
        let Some(fork) = r.stream.fork() else {
            let ended = ended_fork(&r);
            if let Some(error) = kind.strip_suffix(".task_failed") {
                return failed(counts, error, &r.event.data);
            }
            if let Ok(e) = event::decode_run(kind, r.event.version, r.event.data) {
                self.ended |= matches!(e, RunEvent::Ended { .. });
                counts.run_event(&e, label(ended.map_or("", |n| self.model(n))));
            }
            return;
        };
        if let Some(category) = kind.strip_suffix(".task_failed") {
            return failed(counts, category, &r.event.data);
        }
        if !kind.starts_with("agent.") {
            return;
        }
        let whose = (fork, r.event.data["subagent"].as_str().map(String::from));
        let before = self.last.insert(whose, r.event.at);
        match kind {
            "agent.assistant_message" | "agent.compacted" => {
                if let Ok(mut a) = serde_json::from_value::<Answered>(r.event.data) {
                    if a.model.is_empty() {
                        a.model = label(self.model(fork)).to_string();
                    }
                    let took = before.map(|b| r.event.at.since(b).as_duration());
                    counts.answered(&a, provider(self.model(fork)), took);
                }
            }
            "agent.tool_completed" => {
                if let Ok(c) = serde_json::from_value::<Called>(r.event.data) {
                    counts.called(&c);
                }
            }
            "agent.stream_error" => counts.stream_errors.add(1, &[]),
            _ => {}
        }
    }
}

fn failed(counts: &Counts, machine: &str, data: &Value) {
    let class = data.pointer("/error/class").and_then(Value::as_str).unwrap_or("unknown").to_string();
    counts
        .task_errors
        .add(1, &[KeyValue::new("machine", machine.to_string()), KeyValue::new("class", class)]);
}

/// Who answers, as OpenTelemetry names it.
fn provider(model: &str) -> &'static str {
    match model.split_once(':') {
        Some(("script", _)) => "script",
        Some(("openai", _)) => "openai",
        Some(_) | None => "anthropic",
    }
}

/// A model's name without what is of this machine.
fn label(model: &str) -> &str {
    match model.split_once(':') {
        Some(("script", _)) => "script",
        Some(("openai", name)) => name,
        Some(_) => model,
        None if model.is_empty() => "unknown",
        None => model,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_no_paths_in_them() {
        for (model, who, name) in [
            ("sonnet", "anthropic", "sonnet"),
            ("openai:gpt-5", "openai", "gpt-5"),
            ("script:/home/me/s.toml", "script", "script"),
            ("", "anthropic", "unknown"),
        ] {
            assert_eq!((provider(model), label(model)), (who, name), "{model}");
        }
    }
}
