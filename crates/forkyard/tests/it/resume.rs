use rustix::process::{Pid, Signal, kill_process};

use super::{WAITS, World, until};

/// A model that calls a command, and takes its time for the answer after it.
const THINKS: &str = r#"
name = "thinks"
price_as = "sonnet"
[[turn]]
text = "I look."
tools = [{ name = "Bash", input = { command = "true" } }]
usage = { input = 1000, output = 100 }
[[turn]]
delay_ms = 2000
text = "Done."
usage = { input = 2000, output = 200 }
"#;

/// Lets the agent's command end, whoever drives it, then resumes the run to its end.
fn resumed_to_the_end(w: &World, run: &str) {
    let status = w.json(&["status", run, "--json"]);
    let sandbox = status["results"][0]["sandbox_id"].as_str().unwrap();
    let ran = w.run(&["sandbox", "exec", sandbox, "--", "touch", "go"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = w.run(&["resume", run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("1 of 1 fork succeeded"), "{}", ran.stdout);
}

#[test]
fn a_run_whose_process_was_killed_is_resumed_to_its_end() {
    let w = World::with_commit();
    let (mut driver, run) = w.driven(WAITS, &[]);
    driver.kill().unwrap();
    driver.wait().unwrap();
    resumed_to_the_end(&w, &run);
}

#[test]
fn ctrl_c_detaches_and_says_how_to_go_on() {
    let w = World::with_commit();
    let (driver, run) = w.driven(WAITS, &[]);
    kill_process(Pid::from_child(&driver), Signal::INT).unwrap();
    let ended = driver.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert_eq!(
        String::from_utf8(ended.stdout).unwrap(),
        format!("Detached. Go on with: forkyard resume {run}\nOr end it with: forkyard cancel {run}\n")
    );
    assert!(w.run(&["status", &run]).stdout.contains(&format!("go on with: forkyard resume {run}")));
    resumed_to_the_end(&w, &run);
}

#[test]
fn ctrl_c_twice_cancels() {
    let w = World::with_commit();
    let (driver, run) = w.driven(WAITS, &[]);
    let pid = Pid::from_child(&driver);
    kill_process(pid, Signal::INT).unwrap();
    // The first one is understood when the run is detached; agents stop at a safe point after it.
    let since = std::time::Instant::now();
    let detached = || !w.run(&["events", &run, "-t", "run.detached"]).stdout.is_empty();
    while !detached() && since.elapsed().as_secs() < 60 {}
    // It may have gone already: then it is detached, which is what one ctrl-C asks for.
    let _ = kill_process(pid, Signal::INT);
    let code = driver.wait_with_output().unwrap().status.code();
    let outcome = w.json(&["status", &run, "--json"])["outcome"].clone();
    match code {
        Some(1) => assert_eq!(outcome, "cancelled"),
        other => assert_eq!((other, outcome), (Some(130), serde_json::Value::Null)),
    }
}

#[test]
fn what_was_asked_before_ctrl_c_is_answered_and_paid_once() {
    let w = World::with_commit();
    let (undisturbed, run) = w.driven(THINKS, &["--budget", "5"]);
    assert!(undisturbed.wait_with_output().unwrap().status.success());
    let expected = w.json(&["status", &run, "--json"])["total_cost_usd"].clone();
    let other = World::with_commit();
    let (driver, run) = other.driven(THINKS, &["--budget", "5"]);
    until("a request is under way", || reserved(&other, &run) > 0);
    kill_process(Pid::from_child(&driver), Signal::INT).unwrap();
    assert_eq!(driver.wait_with_output().unwrap().status.code(), Some(130));
    let ran = other.run(&["resume", &run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(other.json(&["status", &run, "--json"])["total_cost_usd"], expected);
}

/// What is set aside for requests under way, as the store has it.
fn reserved(w: &World, run: &str) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = forkyard_store::open(&w.home().join("forkyard.db").display().to_string()).await.unwrap();
        store.balance(&forkyard_core::RunId::new(run).unwrap()).await.unwrap().reserved.0
    })
}
