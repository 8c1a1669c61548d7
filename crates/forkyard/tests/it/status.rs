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

/// Whoever only looks need not name the one run that can be meant; whoever changes something has to.
#[test]
fn without_a_name_it_is_the_one_under_way_or_the_newest() {
    let w = World::with_commit();
    let looking = [
        &["status"][..],
        &["logs"],
        &["events"],
        &["events", "--compare"],
        &["diff"],
        &["compare"],
        &["replay", "--speed", "0"],
    ];
    for args in looking {
        let ran = w.run(args);
        let none =
            "error: there is no run yet\nhint: start one with `forkyard fork`, or see `forkyard demo`\n";
        assert_eq!((ran.code, ran.stderr.as_str()), (2, none), "{args:?}");
    }
    let other = World::with_commit();
    let (repo, model) = (other.repo().display().to_string(), w.model());
    let theirs = ["fork", repo.as_str(), "-p", "x", "-m", &model, "--network", "none"];
    let (older, newest) = (w.ended(&[]), w.ended(&["-f", "2"]));
    assert_eq!(w.run(&theirs).code, 0);
    let status = w.json(&["status", &newest, "--json"]);
    let best = format!("{newest}/{}", status["ranking"]["order"][0]["fork"]);
    for args in looking {
        let ran = w.run(args);
        // A session is one fork's: that of the best.
        let name = if args[0] == "replay" { &best } else { &newest };
        let named = w.run(&[&[args[0], name.as_str()], &args[1..]].concat());
        assert_eq!((ran.code, &ran.stdout), (0, &named.stdout), "{args:?}");
        // Another repository's newer run is not meant.
        assert_eq!(ran.stderr, format!("run {newest}: the newest of this repository\n"), "{args:?}");
    }
    for args in [&["cancel"][..], &["apply"], &["pause"], &["resume"], &["add"], &["message"]] {
        let ran = w.run(args);
        assert_eq!(ran.code, 2, "{args:?}");
        assert!(ran.stderr.contains("required arguments were not provided"), "{args:?}: {}", ran.stderr);
    }
    // One that is under way is meant before any that has ended, and of two neither.
    let live = w.started();
    let ran = w.run(&["status"]);
    assert_eq!(ran.stderr, format!("run {live}: the one of this repository that is under way\n"));
    let ran = w.run(&["diff"]);
    assert_eq!(ran.code, 2);
    let hint = format!("run {live} has no best fork yet\nhint: name one of its forks: {live}/0, {live}/1\n");
    assert!(ran.stderr.ends_with(&hint), "{}", ran.stderr);
    let second = w.started();
    let ran = w.run(&["status"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.starts_with("error: 2 runs of this repository are under way: "), "{}", ran.stderr);
    assert!(ran.stderr.contains(&live) && ran.stderr.contains(&second) && !ran.stderr.contains(&older));
    for run in [live, second] {
        assert_eq!(w.run(&["cancel", &run]).code, 0);
    }
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
    // What nobody drives is not under way: without a name, one that has ended since is meant.
    w.write(&w.script(), super::SCRIPT);
    let ended = w.ended(&[]);
    assert_eq!(w.run(&["status"]).stderr, format!("run {ended}: the newest of this repository\n"));
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}
