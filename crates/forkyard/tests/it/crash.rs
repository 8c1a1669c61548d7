//! Runs whose processes are killed, left by their shells, or share a repository.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::World;

/// Every call of a tool leaves a line: one that ran twice, or not at all, shows in the result.
const LINES: &str = r#"
name = "lines"
price_as = "sonnet"
[[turn]]
text = "One."
tools = [{ name = "Bash", input = { command = "echo 1 >> a.txt; sleep 0.1" } }]
[[turn]]
text = "Two."
tools = [{ name = "Bash", input = { command = "echo 2 >> a.txt; git commit -q -a -m two" } }, { name = "Bash", input = { command = "sleep 0.1; echo 3 >> a.txt" } }]
[[turn]]
when = { fork = 1 }
text = "Four, but only here."
tools = [{ name = "Bash", input = { command = "echo 4 >> a.txt" } }]
[[turn]]
text = "Done."
"#;

const VERIFY: &str = "test \"$(tail -n +2 a.txt | tr -d '\\n')\" = 123";

/// What a run came to, without what differs from run to run.
fn outcome(w: &World, run: &str) -> serde_json::Value {
    let status = w.json(&["status", run, "--json"]);
    let results: Vec<serde_json::Value> = status["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| {
            let result = format!("refs/forkyard/{run}/{}", r["fork_num"]);
            serde_json::json!({
                "status": r["status"], "verified": r["verified"], "turns": r["turns"], "diff": r["diff"],
                "tool_calls": r["tool_calls"],
                "tree": w.git(&["rev-parse", &format!("{result}^{{tree}}")]),
                "commits": w.git(&["rev-list", "--count", &format!("main..{result}")]),
            })
        })
        .collect();
    serde_json::json!({ "outcome": status["outcome"], "winner": status["winner"], "results": results })
}

fn start(w: &World, more: &[&str]) -> Child {
    let model = w.model();
    w.program(&["fork", "-p", "lines", "-m", &model, "--network", "none", "-f", "2", "--verify", VERIFY])
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn runs(w: &World) -> Vec<String> {
    let list = w.json(&["list", "--json"]);
    list["runs"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap().to_string()).collect()
}

#[test]
fn killed_at_any_moment_and_resumed_it_comes_to_the_same() {
    let kills = if std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full") { 30 } else { 3 };
    let w = World::with_commit();
    w.write(&w.script(), LINES);
    let began = Instant::now();
    assert!(start(&w, &[]).wait().unwrap().success());
    let whole = began.elapsed();
    let expected = outcome(&w, &runs(&w)[0]);
    assert_eq!((&expected["outcome"], &expected["winner"]), (&"success".into(), &0.into()), "{expected}");

    let mut seen = runs(&w);
    for i in 0..kills {
        let mut driver = start(&w, &[]);
        // Spread over the whole run, at a moment that nobody chose.
        let at = whole.mul_f64((f64::from(i) + fastrand::f64()) / f64::from(kills));
        std::thread::sleep(at);
        driver.kill().unwrap();
        driver.wait().unwrap();
        let Some(run) = runs(&w).into_iter().find(|r| !seen.contains(r)) else { continue };
        if w.json(&["status", &run, "--json"])["status"] != "ended" {
            let ran = w.run(&["resume", &run]);
            assert_eq!(ran.code, 0, "killed after {at:?}: {}{}", ran.stdout, ran.stderr);
        }
        assert_eq!(outcome(&w, &run), expected, "killed after {at:?}");
        seen.push(run);
    }
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
    assert_eq!(w.git(&["status", "--porcelain"]), "");
    assert_eq!(w.git(&["fsck", "--no-dangling"]), "");
}

#[test]
fn without_waiting_it_survives_the_shell_that_started_it() {
    let w = World::with_commit();
    w.write(&w.script(), LINES);
    let line = format!(
        "'{}' fork -p lines -m '{}' --network none --no-wait --json > '{}/said'; exec sleep 1000",
        env!("CARGO_BIN_EXE_forkyard"),
        w.model(),
        w.dir.path().display()
    );
    let mut shell = w.other("sh");
    let mut shell = shell.args(["-c", &line]).process_group(0).stdin(Stdio::null()).spawn().unwrap();
    let said = loop {
        let text = std::fs::read_to_string(w.dir.path().join("said")).unwrap_or_default();
        if let Ok(json) = serde_json::from_str::<serde_json::Value>(&text) {
            break json;
        }
        assert!(shell.try_wait().unwrap().is_none(), "the shell ended");
        std::thread::sleep(Duration::from_millis(10));
    };
    // As when a terminal is closed, and then some.
    let group = rustix::process::Pid::from_child(&shell);
    for signal in [rustix::process::Signal::HUP, rustix::process::Signal::KILL] {
        let _ = rustix::process::kill_process_group(group, signal);
    }
    shell.wait().unwrap();
    let run = said["run"].as_str().unwrap();
    assert_eq!(w.run(&["logs", "-f", run]).code, 0);
    assert_eq!(w.json(&["status", run, "--json"])["outcome"], "success");
}

#[test]
fn two_runs_on_one_repository_disturb_neither_each_other_nor_its_user() {
    let w = World::with_commit();
    w.write(&w.script(), LINES);
    // The user is in the middle of something.
    w.write(&w.repo().join("a.txt"), "half done\n");
    w.write(&w.repo().join("new.txt"), "untracked\n");
    w.write(&w.repo().join("staged.txt"), "staged\n");
    w.git(&["add", "staged.txt"]);
    let state = || {
        let index = std::fs::read(w.repo().join(".git/index")).unwrap();
        let heads = w.git(&["for-each-ref", "refs/heads", "refs/tags", "refs/stash"]);
        let reflog = w.git(&["reflog", "--all"]);
        (index, w.git(&["status", "--porcelain"]), heads, reflog, w.git(&["stash", "list"]))
    };
    let before = state();
    // In a home that neither has seen before.
    let both = [start(&w, &[]), start(&w, &[])];
    for driver in both {
        let done = driver.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    assert_eq!(state(), before);
    assert_eq!(std::fs::read_to_string(w.repo().join("a.txt")).unwrap(), "half done\n");
    let runs = runs(&w);
    assert_eq!(runs.len(), 2);
    assert_eq!(outcome(&w, &runs[0]), outcome(&w, &runs[1]));
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

impl World {
    /// Another program in this world's repository and home.
    fn other(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command
            .current_dir(self.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("FORKYARD_HOME", self.home());
        command
    }
}
