//! Tests of the program from outside: the real binary, in a home of its own.

mod add;
mod api;
mod apply;
mod bench;
mod cancel;
mod cleanup;
mod compare;
mod completions;
mod config;
mod control;
mod crash;
mod dashboard;
mod demo;
mod diff;
// The sandboxes' own tests use more of it.
#[allow(dead_code)]
#[path = "../../../forkyard-sandbox/tests/it/docker_fixture.rs"]
mod docker_fixture;
mod docs;
mod doctor;
mod errors;
mod events;
mod examples;
mod fork;
mod gc;
mod history;
mod hostile;
mod in_sandbox;
mod in_sandbox_wire;
mod list;
mod logs;
mod message;
mod observe;
mod ordinary_user;
mod pause;
mod remote;
mod replay;
mod resume;
mod run;
mod sandbox;
mod sandbox_docker;
mod sandbox_ends;
mod sandbox_folders;
mod sandbox_made;
mod sandbox_repairs;
mod sandbox_shell;
mod sandbox_streams;
mod secrets;
mod serve;
mod serve_fuzz;
mod serve_once;
mod serve_sandboxes;
mod serve_steer;
mod serve_stream;
mod start;
mod status;
mod temporal;
mod terminal;
mod timeout;
mod token;
mod topology;
mod trust;
mod usage;
mod watch;
mod worker;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; a failing test says so instead of hanging.
const PATIENCE: Duration = Duration::from_secs(120);

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Fork 0 writes one thing, all others another.
const SCRIPT: &str = r#"
name = "adds"
price_as = "sonnet"
[[turn]]
when = { fork = 0 }
text = "I add zero."
tools = [{ name = "Write", input = { file_path = "a.txt", content = "one\nzero\n" } }]
[[turn]]
when = { fork = 1 }
text = "I add two."
tools = [{ name = "Write", input = { file_path = "a.txt", content = "one\ntwo\n" } }]
[[turn]]
when = { fork = 2 }
text = "I add two."
tools = [{ name = "Write", input = { file_path = "a.txt", content = "one\ntwo\n" } }]
[[turn]]
text = "Done \u001b[2Jand well."
"#;

/// A model that works until there is a file `go`.
const WAITS: &str = r#"
name = "waits"
[[turn]]
text = "I wait."
tools = [{ name = "Bash", input = { command = "while ! [ -e go ]; do sleep 0.05; done" } }]
[[turn]]
text = "Done."
"#;

/// The same, and it costs something.
fn priced() -> String {
    WAITS.replace("name = \"waits\"", "name = \"waits\"\nprice_as = \"sonnet\"")
}

/// A folder with a repository and a home, and the program that runs in it.
struct World {
    dir: tempfile::TempDir,
}

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("repo/.git")).unwrap();
        World { dir }
    }
    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }
    fn repo(&self) -> PathBuf {
        self.dir.path().join("repo")
    }
    fn write(&self, path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    fn user_file(&self, text: &str) {
        self.write(&self.home().join("config.toml"), text);
    }
    fn project_file(&self, text: &str) {
        self.write(&self.repo().join("forkyard.toml"), text);
    }
    /// A repository with a commit, and a model that adds a line to a file; with `wait`, after a command that ends when the
    /// file of that name appears in the repository's folder of the host.
    fn with_commit() -> World {
        let w = World::new();
        std::fs::remove_dir(w.repo().join(".git")).unwrap();
        w.write(&w.repo().join("a.txt"), "one\n");
        for args in [&["init", "-q", "-b", "main"][..], &["add", "-A"], &["commit", "-q", "-m", "first"]] {
            w.git(args);
        }
        w.write(&w.script(), SCRIPT);
        w
    }
    fn script(&self) -> PathBuf {
        self.dir.path().join("script.toml")
    }
    fn model(&self) -> String {
        format!("script:{}", self.script().display())
    }
    fn git(&self, args: &[&str]) -> String {
        let done = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@localhost"])
            .args(args)
            .current_dir(self.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", self.dir.path())
            .output()
            .unwrap();
        assert!(done.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap().trim().to_string()
    }
    /// `fork` with the script model; more arguments after it.
    fn fork(&self, more: &[&str]) -> Ran {
        let model = self.model();
        let mut args = vec!["fork", "-p", "add a line", "-m", &model, "--network", "none"];
        args.extend(more);
        self.run(&args)
    }
    /// A run that has ended: its id.
    fn ended(&self, more: &[&str]) -> String {
        let args: Vec<&str> = ["--json"].iter().chain(more).copied().collect();
        let ran = self.fork(&args);
        let last = ran.stdout.lines().last().unwrap_or_else(|| panic!("{}", ran.stderr));
        let json: serde_json::Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {last}"));
        assert_eq!(json["schema"], "forkyard.run/1", "{}{}", ran.stdout, ran.stderr);
        json["run"].as_str().unwrap().to_string()
    }
    /// A `fork` in a process of its own, with an agent at work: the process and the run.
    fn driven(&self, script: &str, more: &[&str]) -> (Child, String) {
        self.write(&self.script(), script);
        let model = self.model();
        let args = ["fork", "-p", "wait", "-m", &model, "--network", "none"];
        let args: Vec<&str> = args.iter().chain(more).copied().collect();
        let (out, err) = (Stdio::piped(), Stdio::null());
        let mut driver = self.program(&args).stdout(out).stderr(err).spawn().unwrap();
        let mut run = String::new();
        until("the run is listed", || {
            assert!(driver.try_wait().unwrap().is_none(), "it ended without a run");
            let list = self.json(&["list", "--json"]);
            run = list["runs"][0]["id"].as_str().unwrap_or_default().to_string();
            !run.is_empty()
        });
        self.wait_for(&run, "agent.tool_use");
        (driver, run)
    }
    /// A run of two forks under way, which a worker drives and which does not end by itself: its id.
    fn started(&self) -> String {
        self.write(&self.script(), WAITS);
        let ran = self.fork(&["--no-wait", "--json", "-f", "2"]);
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
        let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        let run = json["run"].as_str().unwrap().to_string();
        self.wait_for(&run, "agent.tool_use");
        run
    }
    /// Until the run has an event of this kind.
    fn wait_for(&self, run: &str, kind: &str) {
        let since = std::time::Instant::now();
        while self.run(&["events", run, "-t", kind]).stdout.is_empty() {
            assert!(since.elapsed().as_secs() < 60, "no {kind}: {}", self.run(&["events", run]).stdout);
        }
    }
    /// The program, in this world.
    fn program(&self, args: &[&str]) -> Command {
        let mut program = Command::new(env!("CARGO_BIN_EXE_forkyard"));
        program
            .args(args)
            .current_dir(self.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("FORKYARD_HOME", self.home());
        program
    }
    fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, &[])
    }
    fn run_with(&self, args: &[&str], env: &[(&str, &str)]) -> Ran {
        let Output { status, stdout, stderr } =
            self.program(args).envs(env.iter().copied()).output().unwrap();
        let text =
            |b: Vec<u8>| String::from_utf8(b).unwrap().replace(self.dir.path().to_str().unwrap(), "DIR");
        Ran { code: status.code().unwrap(), stdout: text(stdout), stderr: text(stderr) }
    }
    fn json(&self, args: &[&str]) -> serde_json::Value {
        let ran = self.run(args);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", ran.stdout, ran.stderr))
    }
}

/// What outlives the program would outlive the test.
impl Drop for World {
    fn drop(&mut self) {
        let made = std::fs::read_dir(self.home().join("sandboxes/sandboxes"));
        for sandbox in made.into_iter().flatten().flatten() {
            let _ = self.program(&["sandbox", "rm"]).arg(sandbox.file_name()).output();
        }
    }
}
