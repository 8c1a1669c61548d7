use super::World;

#[test]
fn events_in_their_order_by_kind_and_from_a_position() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let one = format!("{run}/1");
    let events = w.run(&["events", &run, "--json"]).stdout;
    let positions: Vec<u64> = events
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["position"].as_u64().unwrap())
        .collect();
    assert_eq!(positions, (1..=positions.len() as u64).collect::<Vec<_>>());
    let some = w.run(&["events", &one, "-t", "agent.tool_use", "--since", "3"]).stdout;
    assert_eq!(some.lines().count(), 1, "{some}");
    assert!(w.run(&["events", &run, "-f", "-t", "run.*"]).stdout.contains("run."));
    assert!(!events.contains('\x1b'), "{events}");
    let ran = w.run(&["events", &run, "-t", "agent.*,nonsense"]);
    assert_eq!(ran.code, 2);
    assert!(
        ran.stderr.starts_with("error: -t nonsense: no event has this type\nhint: there are run.*"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("agent.tool_use"), "{}", ran.stderr);
}

#[test]
fn forks_side_by_side() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let steps = w.run(&["events", &run, "--compare"]).stdout;
    insta::assert_snapshot!(steps, @r"
    Step  Fork 0       Fork 1
       1  Write a.txt  Write a.txt
    ");
    let json = w.json(&["events", &run, "--compare", "--json"]);
    assert_eq!(json["forks"]["1"], serde_json::json!(["Write a.txt"]));
}
