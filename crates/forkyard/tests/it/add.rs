use super::World;

#[test]
fn more_forks_join_a_run_with_a_prompt_of_their_own() {
    let w = World::with_commit();
    let run = w.started();
    let ran = w.run(&["add", &run, "-p", "another"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, format!("One more fork for {run}. See them with: forkyard status {run}\n").as_str()),
        "{}",
        ran.stderr
    );
    let json = w.json(&["add", &run, "-f", "2", "--json"]);
    assert_eq!((json["command"].as_str(), json["run"].as_str()), (Some("add"), Some(run.as_str())));
    let since = std::time::Instant::now();
    while w.json(&["status", &run, "--json"])["total_forks"] != 5 {
        assert!(since.elapsed().as_secs() < 60, "{}", w.run(&["status", &run]).stdout);
    }
    let ran = w.run(&["add", &run, "-m", "nonsense"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let ran = w.run_with(&["add", &run, "-f", "4"], &[("FORKYARD_MAX_FORKS", "8")]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(
        ran.stderr.contains("4 more forks for a run of 5 are more than `run.max_forks` = 8"),
        "{}",
        ran.stderr
    );
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}
