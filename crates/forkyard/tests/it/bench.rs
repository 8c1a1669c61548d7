use super::World;

/// Whether the figures are good depends on the machine; that they are there does not.
#[test]
fn sandboxes_are_measured() {
    let w = World::new();
    let few = ["bench", "sandbox", "--rounds", "2", "--alive", "0", "--files", "0", "--json"];
    let ran = w.run_with(&few, &[("DOCKER_HOST", "unix:///nonexistent")]);
    assert!(ran.code == 0 || ran.code == 1, "{}", ran.stderr);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).expect("one document");
    assert_eq!(json["schema"], "forkyard.bench_sandbox/1");
    let reports = json["reports"].as_array().expect("a list");
    // Whoever asks is told that there is no Docker; the ordinary user beside root is not to have it.
    let without_docker = |report: &serde_json::Value| {
        let missing = report["missing"].as_array().expect("a list");
        missing.iter().any(|what| what.as_str().expect("words").starts_with("docker: "))
    };
    let told: Vec<bool> = reports.iter().map(without_docker).collect();
    let is_root = rustix::process::geteuid().is_root();
    assert_eq!(told, if is_root { &[true, false][..] } else { &[true] }, "{json}");
    for (report, root) in reports.iter().zip([is_root, false]) {
        assert_eq!(report["root"], root);
        assert!(!report["figures"].as_array().expect("a list").is_empty(), "{json}");
        assert!(!report["outcomes"].as_array().expect("a list").is_empty(), "{json}");
    }
    let left: Vec<_> = std::fs::read_dir(w.home())
        .map(|all| all.flatten().filter(|f| f.file_name().to_string_lossy().starts_with("bench-")).collect())
        .unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(w.run(&["bench", "sandbox", "--rounds", "0"]).code, 2);
}
