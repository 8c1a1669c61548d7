//! Every command against a server says what it says on the server's own machine.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use super::serve::{PATIENCE, Server};
use super::terminal::Terminal;
use super::{Ran, World};

/// A server with its machine, and another machine's user: a home of their own, the same repository to look at.
struct Pair {
    there: World,
    server: Server,
    /// Only its folder is used.
    home: tempfile::TempDir,
}

impl Pair {
    fn new() -> Pair {
        let there = World::with_commit();
        let server = Server::start(&there);
        Pair { there, server, home: tempfile::tempdir().unwrap() }
    }

    fn program(&self, args: &[&str]) -> Command {
        let mut program = self.there.program(args);
        program
            .env("FORKYARD_HOME", self.home.path())
            .env("FORKYARD_SERVER", &self.server.url)
            .env("FORKYARD_TOKEN", &self.server.token);
        program
    }

    fn remote(&self, args: &[&str]) -> Ran {
        ran(self.program(args), &self.there)
    }

    fn remote_json(&self, args: &[&str]) -> Value {
        let ran = self.remote(args);
        serde_json::from_str(&ran.stdout)
            .unwrap_or_else(|e| panic!("{args:?}: {e}: {}{}", ran.stdout, ran.stderr))
    }

    /// A run of two forks that does not end by itself, driven by the server.
    fn started(&self) -> String {
        // A file of its own: the server has read the other one.
        let script = self.there.dir.path().join("waits.toml");
        self.there.write(&script, super::WAITS);
        let model = format!("script:{}", script.display());
        let args = ["fork", "-p", "x", "-m", &model, "--network", "none", "-f", "2", "--no-wait", "--json"];
        let run = self.remote_json(&args)["run"].as_str().unwrap().to_string();
        self.there.wait_for(&run, "agent.tool_use");
        run
    }
}

fn ran(mut program: Command, w: &World) -> Ran {
    let out = program.output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap().replace(w.dir.path().to_str().unwrap(), "DIR");
    Ran { code: out.status.code().unwrap(), stdout: text(out.stdout), stderr: text(out.stderr) }
}

/// What differs between two of the same kind: names, times, and what a machine uses at the moment.
fn alike(text: &str, names: &[&str]) -> String {
    let mut text = text.to_string();
    for name in names {
        text = text.replace(name, "NAME");
    }
    let mut values: Vec<Value> =
        serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect();
    if values.is_empty() {
        return text;
    }
    fn hide(v: &mut Value) {
        match v {
            Value::Object(map) => {
                for (key, v) in map.iter_mut() {
                    // Ids are random, and of different lengths in tokens.
                    let changes = key.ends_with("_at")
                        || key.ends_with("time")
                        || key.contains("cost")
                        || key.contains("tokens")
                        || key == "reason"
                        || matches!(
                            key.as_str(),
                            "deadline"
                                | "duration_ms"
                                | "sandbox_id"
                                | "modified"
                                | "id"
                                | "sandboxes"
                                | "stats"
                        );
                    match changes && !v.is_null() {
                        true => *v = "…".into(),
                        false => hide(v),
                    }
                }
            }
            Value::Array(all) => all.iter_mut().for_each(hide),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    values.iter_mut().for_each(hide);
    serde_json::to_string_pretty(&values).unwrap()
}

#[test]
fn what_is_read_is_the_same_to_the_byte() {
    let p = Pair::new();
    let run = p.there.ended(&["-f", "3", "--verify", "grep -q two a.txt", "--capture", "a.txt"]);
    let (zero, one) = (format!("{run}/0"), format!("{run}/1"));
    let (none, nine) = ("nosuchrun".to_string(), format!("{run}/9"));
    let table: &[&[&str]] = &[
        &["list"],
        &["list", "--live", "--limit", "1"],
        &["status", &run],
        &["status", &one],
        &["events", &run],
        &["events", &zero, "-t", "fork.*,agent.tool_use", "--since", "3"],
        &["events", &run, "--compare"],
        &["logs", &run],
        &["logs", &one, "-n", "3"],
        &["logs", &run, "-f"],
        &["replay", &one, "--speed", "0"],
        &["diff", &one],
        &["diff", &run, "--stat"],
        &["diff", &one, "--patch"],
        &["diff", &one, "--", "a.txt"],
        &["diff", &one, "--", "none.txt"],
        &["compare", &run],
        &["compare", &run, "0", "1"],
        &["apply", &one, "--patch", "-"],
        &["gc", "--dry-run", "--older-than", "0s"],
        &["cleanup", "--dry-run", "--max-age", "0s"],
        &["cleanup", "--once"],
        // What is wrong is the same mistake.
        &["status", &none],
        &["status", &nine],
        &["logs", &nine],
        &["diff", &nine],
        &["compare", &none],
        &["pause", &run],
        &["message", &run, "hello"],
        &["cancel", &run],
        &["sandbox", "list"],
        &["sandbox", "snapshots"],
        &["sandbox", "exec", "nosuchbox", "--", "true"],
    ];
    for args in table {
        for json in [&[][..], &["--json"]] {
            // Before what a command takes as it is.
            let all: Vec<&str> = json.iter().chain(args.iter()).copied().collect();
            let (here, there) = (p.there.run(&all), p.remote(&all));
            assert_eq!(there.stdout, here.stdout, "{all:?}: {}", there.stderr);
            assert_eq!((there.code, &there.stderr), (here.code, &here.stderr), "{all:?}");
        }
    }
}

#[test]
fn what_is_done_is_the_same() {
    let p = Pair::new();
    let model = p.there.model();
    let fork = [
        "--json",
        "fork",
        "-p",
        "add a line",
        "-m",
        &model,
        "--network",
        "none",
        "-f",
        "2",
        "--verify",
        "grep -q two a.txt",
    ];
    let (here, there) = (p.there.run(&fork), p.remote(&fork));
    let last = |r: &Ran| r.stdout.lines().last().unwrap_or_else(|| panic!("{}", r.stderr)).to_string();
    let id = |r: &Ran| serde_json::from_str::<Value>(&last(r)).unwrap()["run"].as_str().unwrap().to_string();
    assert_eq!(alike(&last(&there), &[&id(&there)]), alike(&last(&here), &[&id(&here)]), "{}", there.stderr);
    assert_eq!((there.code, there.stderr.as_str()), (here.code, here.stderr.as_str()));
    // A file with forks that differ.
    let file = p.there.dir.path().join("swarm.toml");
    let text = format!(
        "prompt = \"x\"\nmodel = {model:?}\nnetwork = \"none\"\n[[fork]]\nname = \"a\"\n[[fork]]\nname = \"b\"\nprompt = \"y\"\nmemory = \"300MiB\"\n"
    );
    p.there.write(&file, &text);
    let args = ["--json", "run", file.to_str().unwrap()];
    let (here, there) = (p.there.run(&args), p.remote(&args));
    assert_eq!(alike(&last(&there), &[&id(&there)]), alike(&last(&here), &[&id(&here)]), "{}", there.stderr);
    // The whole specification arrived, not only what is told of it.
    let spec = |r: &Ran| {
        let events = p.there.run(&["--json", "events", &id(r), "-t", "run.submitted"]).stdout;
        serde_json::from_str::<Value>(&events).unwrap()["data"]["spec"].clone()
    };
    assert_eq!(spec(&there), spec(&here));

    // Live runs, one for each side.
    let (a, b) = (p.started(), p.started());
    let both = |args: &[&str]| {
        let of = |run: &str| args.iter().map(|a| a.replace("RUN", run)).collect::<Vec<_>>();
        let (mine, its) = (of(&a), of(&b));
        let mine: Vec<&str> = mine.iter().map(String::as_str).collect();
        let its: Vec<&str> = its.iter().map(String::as_str).collect();
        let (here, there) = (p.there.run(&mine), p.remote(&its));
        assert_eq!(alike(&there.stdout, &[&b]), alike(&here.stdout, &[&a]), "{args:?}: {}", there.stderr);
        assert_eq!(there.code, here.code, "{args:?}: {}{}", there.stderr, here.stderr);
    };
    for args in [
        &["--json", "message", "RUN/0", "hello"][..],
        &["message", "RUN", "all of you"],
        &["--json", "add", "RUN", "-f", "1"],
        &["--json", "pause", "RUN"],
        &["resume", "RUN", "--no-wait"],
        &["--json", "cancel", "RUN/1"],
        &["cancel", "RUN/1"],
        &["--json", "cancel", "RUN", "--no-wait"],
        &["logs", "-f", "RUN/9"],
    ] {
        both(args);
    }
    assert_eq!(p.remote(&["logs", "-f", &b]).code, 0);
    let status = p.remote_json(&["--json", "status", &b]);
    assert_eq!(
        (status["outcome"].as_str(), status["total_forks"].as_u64()),
        (Some("cancelled"), Some(3)),
        "{status}"
    );
}

#[test]
fn sandboxes_are_used_from_afar() {
    let p = Pair::new();
    p.there.write(&p.there.repo().join("in.txt"), "from outside\n");
    let both = |args: &[&str]| {
        let of = |name: &str| args.iter().map(|a| a.replace("BOX", name)).collect::<Vec<_>>();
        let (mine, its) = (of("boxa"), of("boxb"));
        let mine: Vec<&str> = mine.iter().map(String::as_str).collect();
        let its: Vec<&str> = its.iter().map(String::as_str).collect();
        let (here, there) = (p.there.run(&mine), p.remote(&its));
        let shown = |r: &Ran, name: &str| alike(&r.stdout, &[name]);
        assert_eq!(shown(&there, "boxb"), shown(&here, "boxa"), "{args:?}: {}{}", there.stderr, here.stderr);
        assert_eq!((there.code, &there.stderr), (here.code, &here.stderr), "{args:?}");
    };
    for args in [
        &["--json", "sandbox", "create", "--name", "BOX", "--network", "none", "--memory", "300MiB"][..],
        &["sandbox", "cp", "in.txt", "BOX:/workspace/"],
        &["--json", "sandbox", "exec", "BOX", "--", "sh", "-c", "cat in.txt; echo no >&2; exit 3"],
        &["sandbox", "exec", "BOX", "--", "printf", "\\377\\376\\n"],
        &["--json", "sandbox", "ls", "BOX"],
        &["sandbox", "cat", "BOX", "/workspace/in.txt"],
        &["sandbox", "cat", "BOX", "/workspace/none"],
        &["--json", "sandbox", "stats", "BOX"],
        &["--json", "sandbox", "health", "BOX"],
        &["--json", "sandbox", "snapshot", "BOX", "--name", "snapBOX"],
        &["sandbox", "exec", "BOX", "--", "no-such-program"],
        &["sandbox", "exec", "BOX", "--", "/etc"],
        &["--json", "sandbox", "fork", "BOX", "-n", "2"],
        &["--json", "sandbox", "fork", "BOX", "--memory", "200MiB"],
        &["--json", "sandbox", "pause", "BOX"],
        &["--json", "sandbox", "resume", "BOX"],
        &["--json", "sandbox", "stop", "BOX"],
        &["--json", "sandbox", "start", "BOX"],
        &["sandbox", "cp", "BOX:/workspace/in.txt", "out-BOX.txt"],
        &["--json", "sandbox", "run", "--network", "none", "--", "echo", "hi"],
        &["--json", "sandbox", "snapshots", "--remove", "snapBOX"],
        &["sandbox", "rm", "BOX"],
    ] {
        // Bytes that are no text have no other way to be compared.
        if args.contains(&"printf") {
            let bytes = |mut c: Command| c.output().unwrap().stdout;
            let command = |name: &'static str| ["sandbox", "exec", name, "--", "printf", "\\377\\376\\n"];
            assert_eq!(bytes(p.program(&command("boxb"))), bytes(p.there.program(&command("boxa"))));
            continue;
        }
        both(args);
    }
    assert_eq!(std::fs::read_to_string(p.there.repo().join("out-boxb.txt")).unwrap(), "from outside\n");
    // A shell on a terminal of its own.
    assert_eq!(p.remote(&["sandbox", "create", "--name", "boxc", "--network", "none"]).code, 0);
    let mut t = Terminal::run(p.program(&["sandbox", "shell", "boxc", "sh"]), (80, 20));
    t.press("echo $((6*7)); exit 5\r");
    t.wait_for("42");
    assert_eq!(t.end().code(), Some(5));
}

#[test]
fn a_result_comes_home_as_the_commit_that_it_is() {
    let p = Pair::new();
    let run = p.there.ended(&["-f", "2", "--capture", "a.txt"]);
    let commit =
        p.there.json(&["--json", "diff", &format!("{run}/1")])["commit"].as_str().unwrap().to_string();
    // Another machine's clone.
    let clone = p.home.path().join("clone");
    p.there.git(&["clone", "-q", ".", clone.to_str().unwrap()]);
    let at = |args: &[&str]| {
        let mut program = p.program(args);
        program.current_dir(&clone);
        ran(program, &p.there)
    };
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).current_dir(&clone).output().unwrap();
        assert!(out.status.success(), "{args:?}");
        String::from_utf8(out.stdout).unwrap().trim().to_string()
    };
    let applied = at(&["--json", "apply", &format!("{run}/1")]);
    assert_eq!(applied.code, 0, "{}{}", applied.stdout, applied.stderr);
    assert_eq!(git(&["rev-parse", &format!("refs/heads/forkyard/{run}-1")]), commit);
    assert_eq!(at(&["apply", &format!("{run}/1")]).code, 1, "the branch is there already");
    let applied = at(&["apply", &format!("{run}/0"), "--work-tree"]);
    assert_eq!(applied.code, 0, "{}", applied.stderr);
    assert_eq!(std::fs::read_to_string(clone.join("a.txt")).unwrap(), "one\nzero\n");
    // It does not fit twice, and nothing is changed.
    assert_eq!(at(&["apply", &format!("{run}/1"), "--work-tree"]).code, 1);
    assert_eq!(std::fs::read_to_string(clone.join("a.txt")).unwrap(), "one\nzero\n");
    let captured = p.home.path().join("captured");
    assert_eq!(at(&["apply", &format!("{run}/1"), "--captured", captured.to_str().unwrap()]).code, 0);
    assert_eq!(std::fs::read_to_string(captured.join("a.txt")).unwrap(), "one\ntwo\n");
    // A repository without the base can't take it.
    let other = p.home.path().join("other");
    Command::new("git").args(["init", "-q"]).arg(&other).status().unwrap();
    let refused = at(&["apply", &format!("{run}/1"), "--into", other.to_str().unwrap()]);
    assert!(refused.code != 0 && refused.stderr.contains("does not have commit"), "{}", refused.stderr);
}

#[test]
fn who_may_not_or_can_not_is_told_why() {
    let p = Pair::new();
    let with = |key: &str, value: &str, args: &[&str]| {
        let mut program = p.program(args);
        program.env(key, value);
        ran(program, &p.there)
    };
    let wrong = with("FORKYARD_TOKEN", "fy_wrong", &["list"]);
    assert!(wrong.code == 1 && wrong.stderr.contains("FORKYARD_TOKEN"), "{}", wrong.stderr);
    let mut program = p.program(&["list"]);
    program.env_remove("FORKYARD_TOKEN");
    let none = ran(program, &p.there);
    assert!(none.code == 2 && none.stderr.contains("wants a token"), "{}", none.stderr);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let since = Instant::now();
    let down = p.remote(&["list", "--server", &format!("http://{free}")]);
    assert!(
        down.code == 1 && down.stderr.contains("does not answer") && down.stderr.contains("refused"),
        "{}",
        down.stderr
    );
    assert!(since.elapsed() < PATIENCE / 4, "a server that never answered is not waited for");
    let bad = p.remote(&["list", "--server", "yard.example.org"]);
    assert!(bad.code == 2 && bad.stderr.contains("is not a URL"), "{}", bad.stderr);
    // A token that may only look.
    let made = p.there.json(&["--json", "token", "create", "looker", "--scope", "read"]);
    let token = made["token"].as_str().unwrap();
    assert_eq!(with("FORKYARD_TOKEN", token, &["list"]).code, 0);
    let refused = with("FORKYARD_TOKEN", token, &["sandbox", "create", "--network", "none"]);
    assert!(refused.code == 1 && refused.stderr.contains("scope steer"), "{}", refused.stderr);
    // It would clean up another machine than the one that is meant.
    let refused = p.remote(&["cleanup"]);
    assert!(refused.code == 2 && refused.stderr.contains("about this machine"), "{}", refused.stderr);
    // What is about this machine alone refuses a server that is named to it, and pays no heed to any other.
    let (url, set) = (p.server.url.clone(), format!("remote.url={}", p.server.url));
    for args in [
        &["demo"][..],
        &["worker"],
        &["serve"],
        &["bench", "sandbox"],
        &["trust"],
        &["completions", "bash"],
        &["doctor", "--attack"],
    ] {
        for named in [["--server", &url], ["--set", &set]] {
            let refused = p.remote(&[args, &named].concat());
            assert!(
                refused.code == 2 && refused.stderr.contains("no server does this"),
                "{args:?} {named:?}: {}",
                refused.stderr
            );
        }
    }
    assert_eq!(p.remote(&["config"]).code, 0);
    assert_eq!(p.remote(&["completions", "bash"]).code, 0);
    let here = p.remote(&["worker", "--run", "nosuchrun"]);
    assert!(here.code == 2 && here.stderr.contains("there is no run nosuchrun"), "{}", here.stderr);
    drop(Server::start_env(
        &World::new(),
        &["--port", "0", "--no-work"],
        &[("DISABLE_METRICS", "true"), ("FORKYARD_SERVER", &url)],
    ));
    let doctor = p.remote(&["doctor"]);
    assert!(
        doctor.code == 0 && doctor.stdout.contains("of scope admin"),
        "{}{}",
        doctor.stdout,
        doctor.stderr
    );
    let doctor = with("FORKYARD_TOKEN", "fy_wrong", &["doctor"]);
    assert!(doctor.code == 1 && doctor.stdout.contains('✗'), "{}", doctor.stdout);
}

#[test]
fn tokens_are_the_servers() {
    let p = Pair::new();
    let made = p.remote_json(&["token", "create", "laptop", "--expires", "1d", "--json"]);
    let (id, text) = (made["id"].as_str().unwrap(), made["token"].as_str().unwrap());
    for args in [&["token", "list"][..], &["token", "list", "--json"], &["token", "revoke", "../x"]] {
        let (here, there) = (p.remote(args), p.there.run(args));
        assert_eq!(
            (here.code, &here.stdout, &here.stderr),
            (there.code, &there.stdout, &there.stderr),
            "{args:?}"
        );
    }
    assert_eq!(p.there.json(&["token", "list", "--json"])["tokens"][1]["name"], "laptop");
    let with = |args: &[&str]| {
        let mut program = p.program(args);
        program.env("FORKYARD_TOKEN", text);
        ran(program, &p.there)
    };
    assert_eq!(with(&["list"]).code, 0);
    for args in [&["token", "list"][..], &["token", "create", "x"], &["stop-cleanup"]] {
        let refused = with(args);
        assert!(refused.code == 1 && refused.stderr.contains("scope admin"), "{args:?}: {}", refused.stderr);
    }
    assert_eq!(p.remote(&["token", "revoke", id]).stdout, format!("{id} is revoked.\n"));
    assert_eq!(with(&["list"]).code, 1);
    // Nothing of it was done here.
    let mut here = p.there.program(&["token", "list"]);
    here.env("FORKYARD_HOME", p.home.path());
    assert!(ran(here, &p.there).stdout.starts_with("There is no token."));
}

#[test]
fn a_cleanup_is_stopped_on_the_server() {
    let p = Pair::new();
    let mut cleanup =
        p.there.program(&["cleanup", "--interval", "1h"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(cleanup.stdout.take().unwrap()).lines();
    assert!(said.next().unwrap().unwrap().starts_with("Looking for orphaned sandboxes"));
    // It begins with a look at everything; told to stop before that, it would not have heard.
    super::until("it stops", || {
        let told = p.remote_json(&["stop-cleanup", "--json"]);
        assert_eq!(told["schema"], "forkyard.cleanup/1");
        cleanup.try_wait().unwrap().is_some()
    });
    assert!(cleanup.wait().unwrap().success());
    assert!(said.next().unwrap().unwrap().contains("sandboxes removed so far"));
    let none = p.remote(&["stop-cleanup", "--engine", "temporal"]);
    assert!(none.code == 1 && none.stderr.contains("knows of no Temporal service"), "{}", none.stderr);
    let (here, there) = (p.remote(&["stop-cleanup"]), p.there.run(&["stop-cleanup"]));
    assert_eq!((here.code, here.stdout), (0, there.stdout));
}

#[test]
fn whoever_watches_goes_on_after_a_restart() {
    let mut p = Pair::new();
    let run = p.started();
    let port = p.server.port();
    let mut t = Terminal::run(p.program(&["watch", &run]), (90, 24));
    t.wait_for("I wait.");
    let mut events = p.program(&["--json", "events", "-f", &run]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(events.stdout.take().unwrap()).lines();
    let position = |line: String| {
        let event: Value = serde_json::from_str(&line).unwrap();
        event["position"].as_u64().unwrap()
    };
    let mut seen = vec![position(lines.next().unwrap().unwrap())];
    // Killed, with the run that it drives.
    p.server.child.kill().unwrap();
    p.server.child.wait().unwrap();
    p.server = Server::start_with(&p.there, &["--port", &port]);
    t.press("mcome to an end\r");
    t.wait_for("Sent to fork 0");
    t.press("Cy");
    t.wait_for("cancelled");
    seen.extend(lines.map(|l| position(l.unwrap())));
    assert!(events.wait().unwrap().success());
    let expected: Vec<u64> = (1..=seen.len() as u64).collect();
    assert_eq!(seen, expected, "each once, in order");
    let last = p.there.run(&["events", &run]).stdout.lines().count();
    assert_eq!(seen.len(), last, "all of them");
    t.press("q");
    assert!(t.end().success());
}
