//! Every example of the library runs and says what it promises. They are built together with these tests.

use std::path::Path;
use std::process::Command;

fn run(name: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_forkyard")).parent().unwrap().join("examples").join(name);
    let ran = Command::new(&program)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}; `cargo build --examples` makes it", program.display()));
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{name}: {out}{err}");
    out.into_owned()
}

/// Lines whose beginnings and order are always the same.
fn says(name: &str, lines: &[&str]) {
    let said = run(name);
    let mut rest = said.lines();
    for line in lines {
        assert!(rest.any(|l| l.starts_with(line)), "{name} does not say {line:?} in its place:\n{said}");
    }
}

#[test]
fn single_agent() {
    says(
        "single_agent",
        &["success: true", "response: A server in server.js", "3 turns, 4 tool calls, 0 errors"],
    );
}

#[test]
fn parallel_forks() {
    says(
        "parallel_forks",
        &[
            "fork 0: success, verified",
            "fork 1: success, not verified",
            "fork 2: success, verified",
            "100 % succeeded",
            "the best is fork 0",
            "+echo $(($1 + $2))",
        ],
    );
}

#[test]
fn sandbox() {
    says(
        "sandbox",
        &[
            "runs on Linux",
            "said \"hello from inside\" and ended with 3",
            "the slow one: exit code 124, timed out: true",
            "app.sh (",
            "the parent still has 35 bytes",
            "destroyed 2",
        ],
    );
}

#[test]
fn sandbox_ids() {
    says(
        "sandbox_ids",
        &["fork 0: success, Some(1)", "fork 1: success", "the first still has 0 files", "destroyed 2"],
    );
}

#[test]
fn agent_with_files() {
    let said = run("agent_with_files");
    assert!(
        said.contains("package.json: { \"name\": \"api\" }\nserver.js: console.log('listening');\n"),
        "{said}"
    );
    assert!(!said.contains("notes.txt") && said.ends_with("still active: 0\n"), "{said}");
}

#[test]
fn swarm() {
    says("swarm", &["backend-dev: A server", "tester: A server", "documenter: A server"]);
}

#[test]
fn named_forks() {
    says("named_forks", &["careful: The test passes.", "  captured add.sh", "writer: The test still fails."]);
}

#[test]
fn interceptors() {
    says("interceptors", &["refused: 1", "told the model: ", "out/log/today.txt: now"]);
}

#[test]
fn limits() {
    says(
        "limits",
        &[
            "within the limit: 1",
            "half a gigabyte in 64 MiB: killed: true",
            "memory under 64 MiB: true, processes: true",
        ],
    );
}

/// An example that nobody runs would rot.
#[test]
fn all_of_them_are_here() {
    let here = include_str!("examples.rs");
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "rs") {
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(here.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
