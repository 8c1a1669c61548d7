use super::World;

#[test]
fn an_agent_is_told_something_and_interrupted() {
    let w = World::with_commit();
    let run = w.started();
    let zero = format!("{run}/0");
    let ran = w.run(&["message", &zero, "hurry", "--interrupt"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, format!("Sent to {zero}.\n").as_str()), "{}", ran.stderr);
    w.wait_for(&run, "agent.message_injected");
    assert!(w.run(&["logs", &zero]).stdout.contains("> hurry"));
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}

#[test]
fn all_forks_are_told_and_an_empty_text_is_refused() {
    let w = World::with_commit();
    let run = w.started();
    let json = w.json(&["message", &run, "hello", "--json"]);
    assert_eq!(
        (json["schema"].as_str(), json["forks"].to_string()),
        (Some("forkyard.message/1"), "[0,1]".into())
    );
    assert_eq!(w.run(&["message", &run, " "]).code, 2);
    assert_eq!(w.run(&["message", &format!("{run}/9"), "x"]).code, 2);
    assert_eq!(w.run(&["cancel", &run]).code, 0);
}
