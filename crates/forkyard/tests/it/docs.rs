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
