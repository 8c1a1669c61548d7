//! Runs on a real Temporal service: real sandboxes, real workers, the command line as users have it.

use std::process::{Child, Stdio};

use serde_json::{Value, json};
use test_support::temporal::Temporal;

use super::{WAITS, World, until};

pub(super) struct Worker(pub(super) Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A world whose runs are Temporal's, unless a command says otherwise.
fn world(w: &World, server: &Temporal) {
    w.user_file(&format!("[engine]\nkind = \"temporal\"\n[temporal]\naddress = \"{}\"\n", server.address()));
}

pub(super) fn worker(w: &World) -> Worker {
    let log = std::fs::File::create(w.dir.path().join("worker.log")).unwrap();
    Worker(w.program(&["worker"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
}

fn query(server: &Temporal, id: &str, name: &str) -> Value {
    let said = server.cli(&["workflow", "query", "--workflow-id", id, "--type", name, "-o", "json"]).unwrap();
    let json: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
    json["queryResult"][0].clone()
}

#[test]
fn the_demo_runs_on_temporal() {
    let Some(server) = Temporal::start() else { return };
    let w = World::new();
    let _worker = worker_at(&w, &server);
    let ran = w.run_with(&["demo", "--engine", "temporal"], &[("TEMPORAL_ADDRESS", &server.address())]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("2 verified"), "{}", ran.stdout);
    assert!(ran.stdout.contains("the tests there pass now"), "{}", ran.stdout);
    let listed = w.json(&["list", "--json"]);
    let run = listed["runs"][0]["id"].as_str().unwrap_or_else(|| panic!("{listed}"));
    let results = query(&server, &format!("forkyard/{run}"), "results");
    assert_eq!((&results["outcome"], &results["total_forks"]), (&json!("success"), &json!(4)), "{results}");
    assert!(results["total_duration_seconds"].is_u64(), "{results}");
    let best = results["results"].as_array().unwrap().iter().find(|f| f["fork_num"] == results["winner"]);
    let best = best.unwrap_or_else(|| panic!("{results}"));
    assert!(best["sandbox_id"].is_string() && best["output"].as_str() > Some(""), "{best}");
    let progress = query(&server, &format!("forkyard/{run}"), "progress");
    assert_eq!((&progress["status"], &progress["in_progress"]), (&json!("ended"), &json!(0)), "{progress}");
    // Nothing is left of it.
    let left = w.json(&["sandbox", "list", "--json"]);
    assert_eq!(left["sandboxes"].as_array().map(Vec::len), Some(0), "{left}");
}

fn worker_at(w: &World, server: &Temporal) -> Worker {
    world(w, server);
    worker(w)
}

#[test]
fn a_run_is_steered_by_commands_and_by_signals() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    let mut worker = worker_at(&w, &server);
    let run = w.started();
    let id = format!("forkyard/{run}");
    let paused = || query(&server, &id, "progress")["paused"] == json!(true);
    assert_eq!(w.run(&["pause", &run]).code, 0);
    until("it is paused", paused);
    server.cli(&["workflow", "signal", "--workflow-id", &id, "--name", "resume"]).unwrap();
    until("it goes on", || !paused());
    until("readers know it", || w.json(&["status", &run, "--json"])["paused"] == json!(false));
    until("the service's search knows its forks' phase", || {
        let query = format!("ForkyardRun = \"{run}\" AND ForkyardStatus = \"agent\"");
        let found = server.cli(&["workflow", "list", "--query", &query, "-o", "json"]).unwrap();
        found.contains(&format!("{id}/0"))
    });
    let status = query(&server, &format!("{id}/0"), "status");
    assert_eq!(status["phase"], "agent", "{status}");
    // A worker that is stopped hands back what it does, and the next one goes on with it.
    let pid = rustix::process::Pid::from_child(&worker.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(worker.0.wait().unwrap().success());
    let _next = self::worker(&w);
    until("the next attempt is at work", || {
        query(&server, &format!("{id}/0"), "status")["attempt"].as_u64() > Some(1)
    });
    let ran = w.run(&["cancel", &run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "cancelled");
    let described = server.cli(&["workflow", "describe", "--workflow-id", &id, "-o", "json"]).unwrap();
    assert!(described.contains("CANCELED"), "{described}");
}

/// Somebody terminates workflows by hand: the run, or all of it.
#[test]
fn a_run_whose_workflow_was_terminated_is_ended() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    let _worker = worker_at(&w, &server);
    for (forks_too, asked) in [(false, "cancel"), (true, "cancel"), (false, "status"), (true, "list")] {
        let run = w.started();
        let id = format!("forkyard/{run}");
        let terminate = |id: &str| {
            server.cli(&["workflow", "terminate", "--workflow-id", id, "--reason", "by hand"]).unwrap();
        };
        terminate(&id);
        if forks_too {
            // What the first one did to them may have come before.
            for fork in 0..2 {
                let id = format!("{id}/{fork}");
                let _ = server.cli(&["workflow", "terminate", "--workflow-id", &id, "--reason", "by hand"]);
            }
        }
        let ran = if asked == "list" { w.run(&["list"]) } else { w.run(&[asked, &run]) };
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
        until("its end", || {
            let is = |view: &Value| view["outcome"] == "cancelled";
            match asked {
                "list" => w.json(&["list", "--json"])["runs"].as_array().unwrap().iter().all(is),
                _ => is(&w.json(&["status", &run, "--json"])),
            }
        });
        let status = w.json(&["status", &run, "--json"]);
        assert!(status["results"].as_array().unwrap().iter().all(|r| r["status"] == "cancelled"), "{status}");
        let left = w.json(&["sandbox", "list", "--json"]);
        assert_eq!(left["sandboxes"].as_array().map(Vec::len), Some(0), "{left}");
        assert_ne!(w.run(&["pause", &run]).code, 0, "it has ended");
    }
}

#[test]
fn what_is_not_there_is_named() {
    let w = World::with_commit();
    w.user_file("[engine]\nkind = \"temporal\"\n[temporal]\naddress = \"127.0.0.1:1\"\n");
    let ran = w.fork(&[]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("127.0.0.1:1 does not answer") && ran.stderr.contains("TEMPORAL_ADDRESS"),
        "{}",
        ran.stderr
    );
    let ran = w.run(&["worker"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let ran = w.run_with(
        &["worker"],
        &[("TEMPORAL_ADDRESS", "http://127.0.0.1:1"), ("TEMPORAL_API_KEY", "sk-secret")],
    );
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("temporal.api_key") && !ran.stderr.contains("sk-secret"), "{}", ran.stderr);
    assert_eq!(w.json(&["list", "--json"])["runs"].as_array().unwrap().len(), 0, "nothing was stored");

    let Some(server) = Temporal::start() else { return };
    let _worker = worker_at(&w, &server);
    let run = w.started();
    server.kill();
    let address = server.address();
    let old = format!("Temporal at {address} does not answer: shown as last recorded");
    for args in [&["status", &run][..], &["status", &format!("{run}/0")], &["list"]] {
        let ran = w.run(args);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stderr.contains(&old) && ran.stdout.contains(&run), "{}{}", ran.stdout, ran.stderr);
    }
    assert_eq!(w.json(&["status", &run, "--json"])["notice"], json!(old));
    assert_eq!(w.json(&["list", "--json"])["notice"], json!(old));
    let stored = format!("it is stored; it will be heard when Temporal at {address} is back");
    for args in [&["pause", &run][..], &["resume", &run], &["message", &run, "hello"], &["cancel", &run]] {
        let ran = w.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
        assert!(ran.stdout.contains(&stored), "{args:?}: {}{}", ran.stdout, ran.stderr);
    }
    server.restart();
    until("it is heard", || w.json(&["status", &run, "--json"])["outcome"] == json!("cancelled"));
}

/// The service remembers the polls of a dead worker for minutes.
#[test]
fn a_worker_that_was_killed_is_missed_at_once() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    let mut worker = worker_at(&w, &server);
    w.ended(&[]);
    worker.0.kill().unwrap();
    worker.0.wait().unwrap();
    let nobody = "No worker polls the task queue sandbox-orchestration";
    let ran = w.fork(&["--no-wait"]);
    assert!(ran.stdout.contains(nobody), "{}{}", ran.stdout, ran.stderr);
    let listed = w.json(&["list", "--json", "--live"]);
    let run = listed["runs"][0]["id"].as_str().unwrap();
    assert!(listed["notice"].as_str().unwrap().contains(nobody), "{listed}");
    let ran = w.run(&["status", run]);
    assert!(ran.stderr.contains(nobody), "{}{}", ran.stdout, ran.stderr);
    let commands = [&["pause", run][..], &["resume", run], &["cancel", run], &["cleanup"], &["stop-cleanup"]];
    for args in commands {
        let ran = w.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
        assert!(ran.stdout.contains(nobody), "{args:?}: {}{}", ran.stdout, ran.stderr);
        assert!(!ran.stdout.contains("forkyard resume"), "that would bring nobody: {}", ran.stdout);
    }
    let _next = self::worker(&w);
    until("it is heard", || w.json(&["status", run, "--json"])["outcome"] == json!("cancelled"));
}

/// Histories carry the beginning of what an agent says at its end.
#[test]
fn last_words_are_shown_whole() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    let _worker = worker_at(&w, &server);
    let words = "A long story. ".repeat(1000);
    w.write(&w.script(), &format!("name = \"talks\"\n[[turn]]\ntext = \"{words}\"\n"));
    let run = w.ended(&["-f", "1"]);
    let shown = w.json(&["status", &run, "--json"]);
    assert_eq!(shown["results"][0]["final_response"].as_str().map(str::trim), Some(words.trim()));
    let results = query(&server, &format!("forkyard/{run}"), "results");
    assert_eq!(results["results"][0]["output"], json!(words[..1024]));
}

#[test]
fn a_run_waits_for_its_first_worker() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    world(&w, &server);
    let long = w.dir.path().join("long.txt");
    w.write(&long, &"x".repeat(250 << 10));
    let ran = w.fork(&["--prompt-file", long.to_str().unwrap(), "-f", "20", "--no-wait"]);
    assert_eq!(ran.code, 2, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("Temporal takes 1984 KB"), "{}", ran.stderr);
    let ran = w.fork(&["--no-wait"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("No worker polls the task queue sandbox-orchestration"), "{}", ran.stdout);
    let listed = w.json(&["list", "--json"]);
    let run = listed["runs"][0]["id"].as_str().unwrap();
    let ran = w.run(&["pause", run]);
    assert!(ran.stdout.contains("It is stored. No worker polls"), "{}", ran.stdout);
    assert_eq!(w.run(&["resume", "--no-wait", run]).code, 0);
    let _worker = worker(&w);
    until("it ends", || w.json(&["status", run, "--json"])["outcome"] == json!("success"));
}

#[test]
fn orphans_are_looked_for_on_every_host_until_that_is_stopped() {
    let Some(server) = Temporal::start() else { return };
    let w = World::with_commit();
    let _worker = worker_at(&w, &server);
    w.write(&w.script(), WAITS);
    assert_eq!(w.run(&["stop-cleanup"]).code, 2, "there is none yet");
    let ran = w.run(&["cleanup", "--interval", "1s"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("forkyard stop-cleanup --engine temporal"), "{}", ran.stdout);
    let stats = || query(&server, "forkyard/cleanup/sandbox-orchestration", "stats");
    until("it has looked", || stats()["last_cleanup"].is_u64());
    assert_eq!((&stats()["running"], &stats()["last_error"]), (&json!(true), &Value::Null));
    let ran = w.run(&["cleanup", "--interval", "5m"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("under way already: every host looks every 1.0s"), "{}", ran.stdout);
    let ran = w.run(&["stop-cleanup", "--json"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(stats()["running"], json!(false));
    let ran = w.run(&["stop-cleanup"]);
    assert_eq!(ran.code, 2, "it has stopped: {}", ran.stdout);
    assert!(ran.stderr.contains("no cleanup is under way"), "{}", ran.stderr);
}

#[test]
fn with_a_key_the_service_keeps_nothing_that_it_could_read() {
    let Some(server) = Temporal::start() else { return };
    let plan = "a plan that nobody else should know";
    let histories = |key: Option<String>| {
        let w = World::with_commit();
        let key = key.map(|key| format!("payload_key = \"{key}\"\n")).unwrap_or_default();
        let address = server.address();
        w.user_file(&format!("[engine]\nkind = \"temporal\"\n[temporal]\naddress = \"{address}\"\n{key}"));
        let _worker = worker(&w);
        let ran = w.run(&["fork", "-p", plan, "-m", &w.model(), "--network", "none", "--json"]);
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
        let end: Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
        let run = end["run"].as_str().unwrap_or_else(|| panic!("{end}")).to_string();
        ["", "/0"].map(|fork| {
            let id = format!("forkyard/{run}{fork}");
            server.cli(&["workflow", "show", "--workflow-id", &id, "-o", "json"]).unwrap()
        })
    };
    assert!(histories(None).iter().all(|h| contents(h).contains(plan)), "without one it can");
    assert!(!histories(Some("a1".repeat(32))).iter().any(|h| contents(h).contains(plan)));
}

/// What the payloads of a history say, as far as they can be read.
fn contents(history: &str) -> String {
    use base64::Engine;
    let data = history.split("\"data\": \"").skip(1).filter_map(|rest| rest.split('"').next());
    let decoded = data.filter_map(|text| base64::engine::general_purpose::STANDARD.decode(text).ok());
    decoded.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect()
}
