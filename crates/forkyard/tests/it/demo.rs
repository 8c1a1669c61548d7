use super::World;

#[test]
fn the_demo_ends_with_an_applied_winner() {
    let w = World::new();
    // It is about this machine, whatever server other commands are for.
    let ran = w.run_with(&["demo"], &[("FORKYARD_SERVER", "http://127.0.0.1:1")]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(
        ran.stdout.contains("2 of 4 forks succeeded, 2 verified") || ran.stdout.contains("2 verified"),
        "{}",
        ran.stdout
    );
    assert!(
        ran.stdout.contains("Fork 3 edited protected files (put back): tests/run.sh\n"),
        "{}",
        ran.stdout
    );
    assert!(ran.stdout.contains("the tests there pass now"), "{}", ran.stdout);
}
