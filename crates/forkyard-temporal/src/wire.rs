//! What workflows and activities say to each other. All of it is kept in Temporal's history for ever: fields may be added with
//! a default, none may change its meaning.

use forkyard_core::budget::Balance;
use forkyard_core::fork::{ForkPlan, ForkResult};
use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::task::{Output, Task, TaskResult, Wish};
use forkyard_core::view::{ForkOutcome, Progress, RunOutcome, View};
use forkyard_core::{Attempt, ForkNum, HostId, Millis, RunId, SandboxId, Timestamp};
use forkyard_store::{CommandId, LeaseToken, NewEvent};
use serde::{Deserialize, Serialize};

/// What the workflows of this release do with an input. A release that would do something else for the same history has a
/// larger number, and still knows how to drive the smaller ones.
///
/// Every number has histories of real runs in `tests/fixtures/logicN`, which all later releases replay. The test `write_fixtures`
/// writes those of this one, once: `cargo nextest run -p forkyard-temporal --run-ignored only write_fixtures`.
pub const LOGIC: u32 = 4;
/// From here on a fork does not count the tasks that nobody took as losses.
pub const FORGIVING: u32 = 2;
/// From here on a workflow that is cancelled while it waits hears it at once, not with whatever comes next.
pub const ATTENTIVE: u32 = 3;
/// From here on a fork says to the service's search which phase it is in, not only how it ended.
pub const TELLING: u32 = 4;

/// Names that Temporal's users see.
pub fn run_workflow_id(run: &RunId) -> String {
    format!("forkyard/{run}")
}
pub fn fork_workflow_id(run: &RunId, fork: ForkNum) -> String {
    format!("forkyard/{run}/{fork}")
}

/// The queue whose tasks make sandboxes: whichever host has room takes them.
pub fn making_queue(queue: &str) -> String {
    format!("{queue}/make")
}
/// The queue of one host: what has to be done where a sandbox is.
pub fn host_queue(queue: &str, host: &HostId) -> String {
    format!("{queue}/host/{host}")
}

/// Of a prompt, this much stands beside a workflow's name; the service takes 400 bytes.
const SUMMARY_CHARS: usize = 120;
const SUMMARY_BYTES: usize = 240;

/// The beginning of a prompt.
pub fn summary(prompt: &str) -> &str {
    let end = prompt.char_indices().nth(SUMMARY_CHARS).map_or(prompt.len(), |(at, _)| at);
    beginning(prompt, end.min(SUMMARY_BYTES))
}

/// Temporal refuses a payload over 2 MiB; what else is in a run's start, and in the tasks that carry its prompts, fits beside this.
pub const MAX_SPEC_BYTES: usize = 2 * 1024 * 1024 - 64 * 1024;

/// Whether Temporal takes a run, or forks that are added to one; if not, what to change.
pub fn check_size(asked: &impl Serialize) -> Result<(), String> {
    let bytes = serde_json::to_vec(asked).map_err(|e| e.to_string())?.len();
    if bytes <= MAX_SPEC_BYTES {
        return Ok(());
    }
    Err(format!(
        "the forks have {} KB of prompts and settings together, and Temporal takes {} KB: put long texts into files of the \
         repository, or ask for fewer forks",
        bytes.div_ceil(1024),
        MAX_SPEC_BYTES / 1024
    ))
}

/// Times that a run's workflows keep, whoever carries them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pace {
    /// A worker that is silent for this long is lost.
    pub lost_after: Millis,
    /// A host whose workers take nothing for this long is lost.
    pub host_lost_after: Millis,
    /// How long a task that was stopped may take to come to a safe point.
    pub grace: Millis,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { lost_after: Millis::secs(90), host_lost_after: Millis::secs(90), grace: Millis::secs(10) }
    }
}

/// The input of a run's workflow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    pub logic: u32,
    pub run: RunId,
    pub spec: RunSpec,
    pub submitted_at: Timestamp,
    /// The store that knows of it; a worker with another one refuses.
    pub store: String,
    pub pace: Pace,
    /// The service knows our search attributes.
    #[serde(default)]
    pub searchable: bool,
    /// Payloads are encrypted: prompts stay out of what is not.
    #[serde(default)]
    pub sealed: bool,
}

/// The input of a fork's workflow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkStart {
    pub logic: u32,
    pub plan: ForkPlan,
    pub wish: Wish,
    pub store: String,
    pub lease: LeaseToken,
    pub pace: Pace,
    #[serde(default)]
    pub searchable: bool,
    /// Somebody wants to know how much is spent.
    #[serde(default)]
    pub counted: bool,
}

/// What a fork's workflow ends with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkEnd {
    pub result: ForkResult,
    pub balance: Option<Balance>,
}

/// What a run's workflow ends with, and answers to the query `results`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResults {
    pub outcome: Option<RunOutcome>,
    pub winner: Option<ForkNum>,
    pub ranking: Vec<ForkNum>,
    pub total_forks: u32,
    pub successful: u32,
    pub failed: u32,
    pub total_cost_usd: f64,
    /// From its submission to its end, or to what happened last.
    #[serde(default)]
    pub total_duration_seconds: u64,
    pub results: Vec<ForkSummary>,
}

/// One line of the results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkSummary {
    pub fork_num: ForkNum,
    pub status: ForkOutcome,
    pub verified: bool,
    pub cost_usd: f64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub duration_seconds: u64,
    #[serde(default)]
    pub sandbox_id: Option<SandboxId>,
    /// The beginning of what its agent said last.
    #[serde(default)]
    pub output: String,
    pub error: Option<String>,
}

/// Of an agent's last words, this much stands in a line of the results.
const MAX_OUTPUT_BYTES: usize = 1 << 10;

impl ForkSummary {
    pub fn of(r: &ForkResult) -> ForkSummary {
        let report = r.report.clone().unwrap_or_default();
        ForkSummary {
            fork_num: r.fork,
            status: r.outcome,
            verified: r.verified(),
            cost_usd: report.cost.as_dollars(),
            input_tokens: report.tokens.input,
            output_tokens: report.tokens.output,
            duration_seconds: r.driven.0 / 1000,
            sandbox_id: r.sandbox.clone(),
            output: beginning(&report.final_response, MAX_OUTPUT_BYTES).to_string(),
            error: r.error.clone(),
        }
    }
}

/// The answer to a run's query `progress`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunProgress {
    #[serde(flatten)]
    pub progress: Progress,
    pub status: String,
    /// What forks that ended have cost; with a budget, what is spent as far as the workflow was told.
    pub total_cost_usd: f64,
    pub paused: bool,
    pub cancelled: bool,
}

/// The answer to a fork's query `status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkStatus {
    pub phase: String,
    pub attempt: Attempt,
    pub outcome: Option<ForkOutcome>,
    pub host: Option<HostId>,
    pub error: Option<String>,
}

/// What somebody says to an agent, by the signal `message`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Said {
    #[serde(default)]
    pub fork: ForkNum,
    pub content: String,
}

/// Events on their way into the store, with the rows that follow from them. Every activity carries all that it can't be sure of
/// having arrived, so it does not matter which of them comes first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub run: RunId,
    /// None: the run's own stream.
    pub fork: Option<ForkNum>,
    pub store: String,
    pub lease: LeaseToken,
    /// The stream's length before the first of these events.
    pub from: u64,
    pub events: Vec<NewEvent>,
    pub views: Vec<View>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consume: Vec<CommandId>,
}

/// A task for an activity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Perform {
    pub record: Record,
    pub serial: u64,
    pub attempt: Attempt,
    pub limit: Millis,
    pub task: Task,
    pub pace: Pace,
    #[serde(default)]
    pub counted: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Performed {
    /// Where it was done.
    pub host: HostId,
    pub result: TaskResult,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<Balance>,
}

/// Of an agent's last words, this much goes into histories, which carry them several times. The journal has all of them.
pub const MAX_WORDS_BYTES: usize = 2 << 10;

/// A result as histories carry it.
pub fn in_brief(mut result: TaskResult) -> TaskResult {
    let report = match &mut result {
        Ok(Output::Agent(report)) => Some(report),
        Ok(_) => None,
        Err(e) => e.partial.as_mut(),
    };
    if let Some(report) = report {
        report.final_response = beginning(&report.final_response, MAX_WORDS_BYTES).to_string();
    }
    result
}

fn beginning(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

/// What a worker's heartbeat says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    pub host: HostId,
    pub attempt: Attempt,
    /// Where the agent's last progress stands in the run.
    pub progress: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    pub run: RunId,
    pub store: String,
    /// Of the workflow's execution: the lease's owner.
    pub owner: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    pub lease: LeaseToken,
    /// Events that the run's stream has.
    pub seq: u64,
}

/// A question about a run or a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    pub run: RunId,
    pub fork: ForkNum,
    pub store: String,
}

/// Commands that wait in the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    pub commands: Vec<(CommandId, Command)>,
    /// Those that this release can't read: they are dropped, or they would be read again for ever.
    pub unreadable: Vec<CommandId>,
}

/// How a fork stands in the store.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Look {
    pub progress: u64,
    pub messages: bool,
}

/// A message on its way into the store's inbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tell {
    pub ask: Ask,
    pub said: Said,
    /// The same for every try.
    pub key: String,
    pub at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_temporal_would_refuse_is_refused_with_the_fix() {
        let spec = |forks: u32| RunSpec::new("/repo", "x".repeat(200 << 10), "m", forks);
        check_size(&spec(9)).unwrap();
        let e = check_size(&spec(10)).unwrap_err();
        assert!(e.starts_with("the forks have 20") && e.contains("takes 1984 KB"), "{e}");
        assert!(e.contains("files of the repository"), "{e}");
    }

    #[test]
    fn of_last_words_the_beginning_travels() {
        use forkyard_core::task::{AgentReport, ErrorClass, TaskError};
        let report = || AgentReport { final_response: "ä".repeat(32 << 10), turns: 3, ..Default::default() };
        let done = in_brief(Ok(Output::Agent(report())));
        let Ok(Output::Agent(done)) = done else { panic!("{done:?}") };
        assert_eq!((done.final_response.len(), done.turns), (MAX_WORDS_BYTES, 3));
        let mut failed = TaskError::new(ErrorClass::Permanent, "it stopped");
        failed.partial = Some(report());
        let partial = in_brief(Err(failed)).unwrap_err().partial.unwrap();
        assert_eq!(partial.final_response.len(), MAX_WORDS_BYTES);
        assert_eq!(in_brief(Ok(Output::Healthy)), Ok(Output::Healthy));
    }

    #[test]
    fn results_of_older_releases_are_read() {
        let old = serde_json::json!({
            "outcome": "success", "winner": 0, "ranking": [0], "total_forks": 1, "successful": 1, "failed": 0,
            "total_cost_usd": 0.5,
            "results": [{
                "fork_num": 0, "status": "success", "verified": true, "cost_usd": 0.5, "input_tokens": 1,
                "output_tokens": 2, "duration_seconds": 3, "error": null,
            }],
        });
        let read: RunResults = serde_json::from_value(old).unwrap();
        assert_eq!((read.total_duration_seconds, read.results[0].sandbox_id.as_ref()), (0, None));
    }

    #[test]
    fn a_summary_is_short_in_every_script() {
        assert_eq!(summary("add a line"), "add a line");
        assert_eq!(summary(&"a".repeat(500)).len(), 120);
        assert_eq!(summary(&"\u{1f980}".repeat(500)).len(), 240);
    }
}
