use super::World;

#[test]
fn runs_and_forks_are_shown_for_people_and_for_programs() {
    let w = World::with_commit();
    assert!(w.run(&["list"]).stdout.starts_with("There is no run."));
    let run = w.ended(&["-f", "2"]);
    let list = w.run(&["list"]).stdout;
    assert!(list.contains(&run) && list.contains("success") && list.contains("add a line"), "{list}");
    let json = w.json(&["status", &run, "--json"]);
    assert_eq!((json["schema"].as_str(), json["total_forks"].as_u64()), (Some("forkyard.run/1"), Some(2)));
    let shown = w.run(&["status", &run]).stdout;
    assert!(shown.contains("2 of 2 forks succeeded"), "{shown}");
    let fork = w.run(&["status", &format!("{run}/1")]).stdout;
    assert!(fork.contains("diff       1 file +1 -0"), "{fork}");
    let json = w.json(&["status", &format!("{run}/1"), "--json"]);
    assert_eq!((json["schema"].as_str(), json["fork"]["fork"].as_u64()), (Some("forkyard.fork/1"), Some(1)));
}

#[test]
fn what_is_not_there_is_named_with_a_way_on() {
    let w = World::with_commit();
    for command in
        ["status", "logs", "events", "diff", "apply", "compare", "pause", "resume", "cancel", "add"]
    {
        let ran = w.run(&[command, "r404"]);
        assert_eq!(
            (ran.code, ran.stderr.as_str()),
            (2, "error: there is no run r404\nhint: `forkyard list` shows the runs\n"),
            "{command}"
        );
    }
    let run = w.ended(&[]);
    let ran = w.run(&["status", &format!("{run}/7")]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("has no fork 7"), "{}", ran.stderr);
}

/// Forks at work are shown as far as they are, those that wait too, and a run that nobody drives says so.
#[test]
fn a_live_run_is_shown_as_it_is() {
    let w = World::with_commit();
    let (mut driver, run) = w.driven(&super::priced(), &["-f", "2", "--max-concurrent", "1"]);
    let json = w.json(&["status", &run, "--json"]);
    assert_eq!((&json["abandoned"], &json["total_forks"]), (&false.into(), &2.into()), "{json}");
    let (first, second) = (&json["results"][0], &json["results"][1]);
    assert_eq!((&first["turns"], &second["status"]), (&1.into(), &"pending".into()), "{json}");
    assert!(first["total_cost"].as_f64().unwrap() > 0.0, "{json}");
    let shown = w.run(&["status", &run]).stdout;
    assert!(shown.contains("running") && shown.contains("pending") && !shown.contains("resume"), "{shown}");
    driver.kill().unwrap();
    driver.wait().unwrap();
    let shown = w.run(&["status", &run]).stdout;
    assert!(shown.contains(&format!("Nobody drives it; go on with: forkyard resume {run}")), "{shown}");
    assert_eq!(w.json(&["status", &run, "--json"])["abandoned"], true);
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}
