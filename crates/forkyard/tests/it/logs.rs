use super::World;

#[test]
fn a_session_is_told_by_logs_events_and_replay() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let one = format!("{run}/1");
    let log = w.run(&["logs", &one]).stdout;
    assert!(log.contains("I add two.") && log.contains("$ Write a.txt"), "{log}");
    // Whatever an agent says, it steers no terminal.
    assert!(log.contains("Done \\x1b[2Jand well.") && !log.contains('\x1b'), "{log}");
    let all = w.run(&["logs", &run]).stdout;
    assert!(
        all.lines().any(|l| l.starts_with("[0] ")) && all.lines().any(|l| l.starts_with("[1] ")),
        "{all}"
    );
    let tail = w.run(&["logs", &one, "-n", "2"]).stdout;
    assert_eq!(
        tail.lines().collect::<Vec<_>>(),
        log.lines().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>()
    );
    assert_eq!(w.run(&["replay", &one, "--speed", "0"]).stdout, log);

    let events = w.run(&["events", &run, "--json"]).stdout;
    let positions: Vec<u64> = events
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["position"].as_u64().unwrap())
        .collect();
    assert_eq!(positions, (1..=positions.len() as u64).collect::<Vec<_>>());
    let some = w.run(&["events", &one, "-t", "agent.tool_use", "--since", "3"]).stdout;
    assert_eq!(some.lines().count(), 1, "{some}");
    assert!(w.run(&["events", &run, "-f", "-t", "run.*"]).stdout.contains("run."));
}
