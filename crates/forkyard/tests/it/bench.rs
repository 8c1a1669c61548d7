use super::World;

/// Whether the figures are good depends on the machine; that they are there does not.
#[test]
fn sandboxes_are_measured() {
    let w = World::new();
    let few = ["--rounds", "2", "--alive", "0", "--files", "0", "--this-user-only", "--json"];
    let ran = w.run(&[&["bench", "sandbox"][..], &few].concat());
    assert!(ran.code == 0 || ran.code == 1, "{}", ran.stderr);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).expect("one document");
    assert_eq!(json["schema"], "forkyard.bench_sandbox/1");
    let report = &json["reports"][0];
    assert!(!report["figures"].as_array().expect("a list").is_empty(), "{json}");
    assert!(!report["outcomes"].as_array().expect("a list").is_empty(), "{json}");
    let left: Vec<_> = std::fs::read_dir(w.home())
        .map(|all| all.flatten().filter(|f| f.file_name().to_string_lossy().starts_with("bench-")).collect())
        .unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(w.run(&["bench", "sandbox", "--rounds", "0"]).code, 2);
}
