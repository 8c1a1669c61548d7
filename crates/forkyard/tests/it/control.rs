use super::World;

/// Fork after fork waits for its turn; the one fork of this script works until it is told something.
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

#[test]
fn a_run_is_talked_to_added_to_and_cancelled() {
    let w = World::with_commit();
    let run = started(&w);
    wait_for(&w, &run, "agent.tool_use");
    assert_eq!(w.run(&["add", &run, "-p", "another"]).code, 0);
    let ran = w.run(&["message", &format!("{run}/0"), "hurry", "--interrupt"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, format!("Sent to {run}/0.\n").as_str()),
        "{}",
        ran.stderr
    );
    wait_for(&w, &run, "agent.message_injected");
    let ran = w.run(&["cancel", &format!("{run}/1")]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(w.run(&["status", &format!("{run}/1")]).stdout.contains("cancelled"));
    let ran = w.run(&["cancel", &run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let status = w.json(&["status", &run, "--json"]);
    assert_eq!((status["outcome"].as_str(), status["total_forks"].as_u64()), (Some("cancelled"), Some(3)));
    for args in [&["pause", &run][..], &["resume", &run], &["cancel", &run], &["message", &run, "x"]] {
        let ran = w.run(args);
        assert_eq!(ran.code, 2, "{args:?}");
        assert!(ran.stderr.contains("has ended"), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn a_paused_run_goes_on_when_it_is_resumed() {
    let w = World::with_commit();
    let run = started(&w);
    wait_for(&w, &run, "agent.tool_use");
    assert_eq!(w.run(&["pause", &run]).code, 0);
    wait_for(&w, &run, "run.paused");
    assert!(w.run(&["list", "--live"]).stdout.contains("paused"));
    assert_eq!(w.run(&["resume", &run, "--no-wait"]).code, 0);
    wait_for(&w, &run, "run.resumed");
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}

#[test]
fn a_run_whose_process_was_killed_is_resumed_to_its_end() {
    let w = World::with_commit();
    w.write(&w.script(), WAITS);
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
        if let Some(id) = list["runs"][0]["id"].as_str() {
            break id.to_string();
        }
        assert!(driver.try_wait().unwrap().is_none(), "it ended without a run");
    };
    wait_for(&w, &run, "agent.tool_use");
    driver.kill().unwrap();
    driver.wait().unwrap();
    let status = w.json(&["status", &run, "--json"]);
    let sandbox = status["results"][0]["sandbox_id"].as_str().unwrap();
    let ran = w.run(&["sandbox", "exec", sandbox, "--", "touch", "go"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = w.run(&["resume", &run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("1 of 1 forks succeeded"), "{}", ran.stdout);
}
