use super::World;

#[test]
fn a_fork_and_then_the_run() {
    let w = World::with_commit();
    let run = w.started();
    let ran = w.run(&["cancel", &format!("{run}/1")]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, format!("{run}/1 is cancelled.\n").as_str()),
        "{}",
        ran.stderr
    );
    assert!(w.run(&["status", &format!("{run}/1")]).stdout.contains("cancelled"));
    let ran = w.run(&["cancel", &run]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("0 of 2 forks succeeded"), "{}", ran.stdout);
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "cancelled");
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

#[test]
fn without_waiting_it_happens_all_the_same() {
    let w = World::with_commit();
    let run = w.started();
    let json = w.json(&["cancel", &run, "--no-wait", "--json"]);
    assert_eq!(json["command"], "cancel");
    assert_eq!(w.run(&["logs", "-f", &run]).code, 0);
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "cancelled");
}

#[test]
fn what_has_ended_takes_no_commands() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    let one = format!("{run}/0");
    for args in [
        &["pause", &run][..],
        &["resume", &run],
        &["cancel", &run],
        &["cancel", &one],
        &["add", &run],
        &["message", &run, "x"],
    ] {
        let ran = w.run(args);
        let expected =
            format!("error: run {run} has ended\nhint: `forkyard status {run}` shows what came of it\n");
        assert_eq!((ran.code, ran.stderr), (2, expected), "{args:?}");
    }
}

/// A run that is let go of and then called off has cost what it cost.
#[test]
fn what_was_spent_before_is_told() {
    let w = World::with_commit();
    let (mut driver, run) = w.driven(&super::priced(), &[]);
    let pid = rustix::process::Pid::from_child(&driver);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(driver.wait().unwrap().code(), Some(130));
    let ran = w.run(&["cancel", &run]);
    let status = w.json(&["status", &run, "--json"]);
    let fork = &status["results"][0];
    assert_eq!(
        (&status["outcome"], &fork["turns"]),
        (&"cancelled".into(), &1.into()),
        "{}{status}",
        ran.stderr
    );
    assert!(
        fork["total_cost"].as_f64().unwrap() > 0.0 && fork["total_tokens"].as_u64().unwrap() > 0,
        "{fork}"
    );
}
