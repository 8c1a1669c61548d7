use super::World;

#[test]
fn a_session_again_as_it_was_and_for_programs() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    let zero = format!("{run}/0");
    assert_eq!(w.run(&["replay", &zero, "--speed", "0"]).stdout, w.run(&["logs", &zero]).stdout);
    assert_eq!(w.run(&["replay", &zero, "--speed", "1000"]).stdout, w.run(&["logs", &zero]).stdout);
    let lines = w.run(&["replay", &zero, "--speed", "0", "--json"]).stdout;
    let kinds: Vec<String> = lines
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["type"].as_str().unwrap().to_string())
        .collect();
    assert_eq!(kinds.first().map(String::as_str), Some("agent.started"));
    assert_eq!(kinds.last().map(String::as_str), Some("agent.completed"));
    assert_eq!(w.run(&["replay", &format!("{run}/7")]).code, 2);
}
