//! Runs that nobody drives, or somebody else.

use super::World;

/// Works until a file appears.
const WAITS: &str = r#"
name = "waits"
[[turn]]
text = "I wait."
tools = [{ name = "Bash", input = { command = "while ! [ -e go ]; do sleep 0.05; done" } }]
[[turn]]
text = "Done."
"#;

fn started(w: &World) -> String {
    w.write(&w.script(), WAITS);
    let ran = w.fork(&["--no-wait", "--json", "-f", "2"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    json["run"].as_str().unwrap().to_string()
}

/// Until the run has an event of this kind.
fn wait_for(w: &World, run: &str, kind: &str) {
    let since = std::time::Instant::now();
    while w.run(&["events", run, "-t", kind]).stdout.is_empty() {
        assert!(since.elapsed().as_secs() < 60, "no {kind}: {}", w.run(&["events", run]).stdout);
    }
}

/// A run of one fork whose driver was killed while its agent waits.
fn killed(w: &World) -> String {
    w.write(&w.script(), WAITS);
    let list = w.json(&["list", "--json"]);
    let before: Vec<String> =
        list["runs"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap().to_string()).collect();
    let model = w.model();
    let mut driver = std::process::Command::new(env!("CARGO_BIN_EXE_forkyard"))
        .args(["fork", "-p", "wait", "-m", &model, "--network", "none"])
        .current_dir(w.repo())
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("FORKYARD_HOME", w.home())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let run = loop {
        let list = w.json(&["list", "--json"]);
        // Newest first.
        if let Some(id) = list["runs"][0]["id"].as_str().filter(|id| !before.contains(&id.to_string())) {
            break id.to_string();
        }
        assert!(driver.try_wait().unwrap().is_none(), "it ended without a run");
    };
    wait_for(w, &run, "agent.tool_use");
    driver.kill().unwrap();
    driver.wait().unwrap();
    run
}

/// Lets the agent of the run's first fork go on.
fn let_go(w: &World, run: &str) {
    let status = w.json(&["status", run, "--json"]);
    let sandbox = status["results"][0]["sandbox_id"].as_str().unwrap();
    let ran = w.run(&["sandbox", "exec", sandbox, "--", "touch", "go"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn whoever_wants_something_of_a_run_that_nobody_drives_gets_it_driven() {
    let w = World::with_commit();
    let run = killed(&w);
    let ran = w.run(&["pause", &run]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.starts_with(&format!("Nobody drives {run}")), "{}", ran.stdout);
    let_go(&w, &run);
    assert_eq!(w.run(&["resume", &run, "--no-wait"]).code, 0);
    assert_eq!(w.run(&["logs", "-f", &run]).code, 0);
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "success");

    let run = killed(&w);
    let_go(&w, &run);
    let ran = w.run(&["add", &run]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    wait_for(&w, &run, "run.forks_added");
    assert_eq!(w.run(&["cancel", &run]).code, 0);

    let run = killed(&w);
    let_go(&w, &run);
    let ran = w.run(&["message", &format!("{run}/0"), "go on"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(w.run(&["logs", "-f", &run]).code, 0);
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "success");
}

/// Sends a signal once the program has shown something: its status and what it printed.
fn interrupted(w: &World, args: &[&str]) -> (Option<i32>, String) {
    use std::io::{BufRead, Read};
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_forkyard"))
        .args(args)
        .current_dir(w.repo())
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("FORKYARD_HOME", w.home())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = String::new();
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut shown).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    std::io::copy(&mut stderr, &mut std::io::sink()).unwrap();
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

#[test]
fn who_only_watches_a_run_does_not_detach_it_by_leaving() {
    let w = World::with_commit();
    let run = started(&w);
    wait_for(&w, &run, "agent.tool_use");
    let (code, said) = interrupted(&w, &["resume", &run]);
    assert_eq!(code, Some(130));
    assert!(said.starts_with(&format!("{run} goes on: another process drives it.")), "{said}");
    let status = w.json(&["status", &run, "--json"]);
    assert_eq!((&status["detached"], &status["status"]), (&false.into(), &"running".into()), "{status}");
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}

#[test]
fn who_drives_a_run_detaches_it_by_leaving() {
    let w = World::with_commit();
    w.write(&w.script(), WAITS);
    let (code, said) = interrupted(&w, &["fork", "-p", "x", "-m", &w.model(), "--network", "none"]);
    assert_eq!(code, Some(130), "{said}");
    let list = w.json(&["list", "--json"]);
    let run = list["runs"][0]["id"].as_str().unwrap();
    let ways = format!("Go on with: forkyard resume {run}\nOr end it with: forkyard cancel {run}\n");
    assert_eq!(said, format!("Detached. {ways}"));
    assert_eq!(w.json(&["status", run, "--json"])["detached"], true);
    let ran = w.run(&["add", run]);
    assert!(ran.stdout.contains("which is detached"), "{}{}", ran.stdout, ran.stderr);
    assert_eq!(w.run(&["cancel", run]).code, 0);
}
