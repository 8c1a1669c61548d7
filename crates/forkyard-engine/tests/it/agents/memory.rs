//! Floods: what a command writes and what a model answers may be larger than the memory there is. The process that drives the
//! agent takes in what it keeps, and no more.

use forkyard_core::view::ForkOutcome;
use serde_json::json;
use test_support::model_server::{Gate, Part, Reply, Seen};

use super::kills::{Loss, Trial};
use super::{Process, is_full_scale, until};

/// What one command writes.
fn output_bytes() -> u64 {
    if is_full_scale() { 1 << 30 } else { 1 << 27 }
}

/// Of one answer, as text or as the input of a call.
const ANSWER_BYTES: u64 = 100 << 20;
/// What a result may hold: the tool's 30,000 bytes, and the lines that say what is missing.
const MAX_RESULT_CHARS: usize = 31_000;
/// What the driver may take while a command floods it: frames on their way and what of them is shown, by threads that a loaded
/// machine lets run one after the other.
const MAX_FOR_OUTPUT: u64 = 24 << 20;
/// What it may take for an answer: the 8 MiB that are kept of one, while they are put together.
const MAX_FOR_ANSWER: u64 = 24 << 20;

/// The most that a process has ever had in memory.
fn peak_bytes(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Three turns, of which the last two wait to be let through: a small command, a command that floods, an answer that does.
fn script(gate: Gate, flood: Part) -> impl Fn(&Seen) -> Reply + Send + Sync + 'static {
    let bash = |command: String| Reply::tool("Bash", json!({ "command": command }));
    move |seen| match seen.messages().iter().filter(|m| m["role"] == "assistant").count() {
        0 => bash("echo hello".into()),
        1 => bash(format!("yes 0123456789 | head -c {}; echo the end >&2", output_bytes())).gate(&gate),
        _ => Reply::message(vec![flood.clone()]).huge(ANSWER_BYTES).gate(&gate),
    }
}

async fn stays_small(flood: Part) {
    let gate = Gate::default();
    let trial = Trial::new(Loss::Process, script(gate.clone(), flood)).await;
    let driver = Process::start("drive", &trial.plan);
    until("the second turn is asked for", || async { trial.server.seen().len() == 2 }).await;
    let start = peak_bytes(&driver);

    gate.open(1);
    until("the third turn is asked for", || async { trial.server.seen().len() == 3 }).await;
    let grown = peak_bytes(&driver) - start;
    println!("{} MiB of output: {} KiB more than {} KiB", output_bytes() >> 20, grown >> 10, start >> 10);
    assert!(grown < MAX_FOR_OUTPUT, "{grown} bytes for a command's output");
    let result = trial.server.seen()[2].last_text();
    assert!(result.starts_with("0123456789\n") && result.contains("the end"), "both ends are kept: {result}");
    assert!(result.contains("bytes left out"), "what is missing is told: {result}");
    assert!(result.len() < MAX_RESULT_CHARS, "{} bytes", result.len());

    gate.open(1);
    until("the run ends", || trial.ended()).await;
    let grown = peak_bytes(&driver) - start;
    println!("{} MiB of answer: {} KiB more", ANSWER_BYTES >> 20, grown >> 10);
    assert!(grown < MAX_FOR_ANSWER, "{grown} bytes for an answer");
    assert_eq!(trial.server.seen().len(), 3, "it would be as large again");
    let fork = trial.store.fork(&trial.run, 0).await.unwrap().unwrap();
    assert_eq!(fork.outcome, Some(ForkOutcome::Failed), "{fork:?}");
    assert!(format!("{fork:?}").contains("larger than"), "{fork:?}");
    drop(driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_output_and_of_text_does_not_grow_the_driver() {
    stays_small(Part::Text("x".into())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_output_and_of_tool_input_does_not_grow_the_driver() {
    stays_small(Part::Tool { id: None, name: "Write".into(), input: r#"{"content": ""#.into() }).await;
}
