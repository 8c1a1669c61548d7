//! Generated documents are what the code says. `cargo xtask codegen` writes them by running these tests with
//! `FORKYARD_UPDATE_DOCS` set.

use std::path::Path;

fn current(file: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
    if std::env::var_os("FORKYARD_UPDATE_DOCS").is_some() {
        std::fs::write(&path, generated).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == generated, "docs/{file} is out of date: run `cargo xtask codegen`");
}

#[test]
fn configuration() {
    current("configuration.md", &forkyard::program::settings_reference());
}

#[test]
fn cli() {
    current("cli.md", &forkyard::program::commands_reference());
}

#[test]
fn api_errors() {
    let head = "# Error codes of the API\n\n<!-- Generated from the server's codes: change them there and run `cargo xtask codegen`. -->\n\nAn answer that is an error has the body `{\"error\": {\"code\", \"message\", \"hint\", \"fields\"}}`. Codes are for programs and are never renamed; messages are for people and may change.\n\n";
    current("api-errors.md", &format!("{head}{}", forkyard_server::error::markdown()));
}

/// What the dashboard's types are made from.
#[test]
fn openapi() {
    let described = serde_json::to_string_pretty(&forkyard_server::routes::openapi()).unwrap();
    current("openapi.json", &format!("{described}\n"));
}

/// The tutorial's repository and answers give what its page says.
#[test]
fn tutorial() {
    let w = super::World::new();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    std::fs::remove_dir(w.repo().join(".git")).unwrap();
    let made =
        std::process::Command::new("sh").arg(docs.join("tutorial/make.sh")).arg(w.repo()).status().unwrap();
    assert!(made.success());
    w.write(&w.script(), &std::fs::read_to_string(docs.join("tutorial/answers.toml")).unwrap());
    let more = ["-f", "3", "--verify", "sh tests/run.sh", "--protect", "tests/**"];
    let ran = w.fork(&more);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let page = std::fs::read_to_string(docs.join("tutorial.md")).unwrap();
    // Times and costs differ from run to run.
    let steady = |line: &str| -> Vec<String> {
        let varies =
            |w: &str| w.starts_with('$') || (w.ends_with('s') && w.starts_with(|c: char| c.is_ascii_digit()));
        line.split_whitespace().filter(|w| !varies(w)).map(String::from).collect()
    };
    for line in ran.stdout.lines().filter(|l| l.contains("1 file") || l.contains("succeeded")) {
        assert!(page.lines().any(|l| steady(l) == steady(line)), "not in the tutorial: {line}");
    }
}

#[test]
fn attacks() {
    current("attacks.md", &forkyard_sandbox::conformance::attacks_markdown());
}
