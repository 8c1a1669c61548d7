use super::World;

#[test]
fn a_paused_run_goes_on_when_it_is_resumed() {
    let w = World::with_commit();
    let run = w.started();
    let ran = w.run(&["pause", &run]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.contains(&format!("forkyard resume {run}")), "{}", ran.stdout);
    w.wait_for(&run, "run.paused");
    assert!(w.run(&["list", "--live"]).stdout.contains("paused"));
    assert_eq!(w.json(&["status", &run, "--json"])["paused"], true);
    assert_eq!(w.run(&["resume", &run, "--no-wait"]).code, 0);
    w.wait_for(&run, "run.resumed");
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}
