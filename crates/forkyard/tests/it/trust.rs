use super::World;

const FILE: &str = "[network]\nallow = [\"evil.example\"]\n";

#[test]
fn a_project_file_counts_after_trust_and_until_it_changes() {
    let w = World::new();
    w.project_file(FILE);
    let ran = w.run(&["config"]);
    assert_eq!(ran.code, 2);
    assert_eq!(
        ran.stderr,
        "error: DIR/repo/forkyard.toml:2: a project's file may not set `network.allow` unless you trust it; read the file, then \
         run `forkyard trust`; or leave it out with --no-project-file\n"
    );
    assert_eq!(w.run(&["config", "--no-project-file"]).code, 0);

    let ran = w.run(&["trust"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout.contains("evil.example") && ran.stdout.contains("is trusted with this content"),
        "{}",
        ran.stdout
    );
    assert!(w.run(&["config", "network.allow"]).stdout.contains("evil.example"));
    assert!(w.run(&["trust"]).stdout.contains("trusted already"));

    w.project_file(&format!("{FILE}\n"));
    assert_eq!(w.run(&["config"]).code, 2);
    w.project_file(FILE);
    assert!(w.run(&["trust", "--revoke"]).stdout.contains("not trusted any more"));
    assert_eq!(w.run(&["config"]).code, 2);
}

#[test]
fn nothing_to_trust_says_so() {
    let w = World::new();
    let ran = w.run(&["trust"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.starts_with("error: there is no forkyard.toml here\nhint: "), "{}", ran.stderr);
    assert_eq!(w.run(&["trust", "none.toml"]).code, 2);
    assert_eq!(w.run(&["trust", "/dev/zero"]).code, 2);
}

/// What is there already can be seen and steered whatever a project's file says.
#[test]
fn a_file_that_nobody_trusts_is_in_nobodys_way() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    for file in [FILE, "[run]\ntimout = 1\n", "= broken"] {
        w.project_file(file);
        for args in [&["list"][..], &["status", &run], &["diff", &run], &["sandbox", "list"]] {
            let ran = w.run(args);
            assert_eq!(ran.code, 0, "{file:?} {args:?}: {}", ran.stderr);
        }
        let ran = w.run(&["cancel", &run]);
        assert!(ran.stderr.contains("has ended"), "{file:?}: {}", ran.stderr);
        assert_eq!(w.fork(&[]).code, 2, "{file:?}");
        assert_eq!(w.run(&["list", "--set", "run.forks=many"]).code, 2, "the command line has to be right");
    }
}
