//! The API against its own description, by schemathesis: whatever it is sent, no answer is a fault of the server or
//! other than the description says.

use std::path::PathBuf;
use std::process::Command;

use super::World;
use super::serve::Server;

/// Put there by `cargo xtask setup`.
fn schemathesis() -> Option<PathBuf> {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent()?.to_path_buf();
    Some(target.join("tools/schemathesis/bin/schemathesis")).filter(|p| p.is_file())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_as_described() {
    let Some(program) = schemathesis() else {
        assert!(
            std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(),
            "schemathesis is missing: cargo xtask setup"
        );
        return;
    };
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full");
    let w = World::with_commit();
    // So that there is something to find.
    w.ended(&[]);
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    // From a file: of an address it would leave out the very one that it read the description from.
    let described = s.get("/api/v1/openapi.json").await;
    let file = w.dir.path().join("openapi.json");
    w.write(&file, &described.to_string());
    let done = Command::new(program)
        .args(["run", file.to_str().unwrap(), "--url", &s.url, "--no-color", "--seed", "7"])
        .args(["-H", &format!("Authorization: Bearer {}", s.token)])
        .args([
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ])
        .args(["--max-examples", if full { "100" } else { "3" }])
        .current_dir(w.dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}");
    let paths = described["paths"].as_object().unwrap().values();
    let operations = paths.map(|item| item.as_object().unwrap().len()).sum::<usize>();
    let number = |after: &str| -> usize {
        let rest = said.split(after).nth(1).unwrap_or_default().trim_start();
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default().parse().unwrap_or(0)
    };
    let (selected, tested) = (number("Operations:"), number("Tested:"));
    assert_eq!((selected, tested), (operations, operations), "{said}");
    // What it made is gone with it.
    let made = s.get("/api/v1/sandboxes?limit=500").await;
    for sandbox in made["sandboxes"].as_array().unwrap() {
        let id = sandbox["id"].as_str().unwrap();
        s.ask(reqwest::Method::DELETE, &format!("/api/v1/sandboxes/{id}"), None, 204).await;
    }
}
