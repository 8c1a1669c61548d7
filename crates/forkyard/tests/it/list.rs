use super::World;

#[test]
fn runs_newest_first() {
    let w = World::with_commit();
    assert_eq!(
        w.run(&["list"]).stdout,
        "There is no run. Start one with `forkyard fork`, or see `forkyard demo`.\n"
    );
    let (first, second) = (w.ended(&[]), w.ended(&["-f", "2"]));
    let json = w.json(&["list", "--json"]);
    let ids: Vec<&str> = json["runs"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [second.as_str(), first.as_str()]);
    assert_eq!(w.json(&["list", "-l", "1", "--json"])["runs"].as_array().unwrap().len(), 1);
    assert!(w.run(&["list", "--live"]).stdout.starts_with("No run is under way."));
    let shown = w.run(&["list"]).stdout.replace(&second, "RUN2").replace(&first, "RUN1");
    for (line, begins) in shown.lines().zip(["Run", "RUN2", "RUN1"]) {
        assert!(line.starts_with(begins), "{shown}");
    }
    assert!(shown.contains("success") && shown.contains("2/2") && shown.contains("add a line"), "{shown}");
}
