use super::World;

#[test]
fn the_same_change_has_the_same_letter() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "3"]);
    let shown = w.run(&["compare", &run]).stdout;
    assert!(shown.contains("Fork 0     Forks 1-2  File\na M +1 -0  b M +1 -0  a.txt"), "{shown}");
    assert!(
        shown.contains("1 file changed by any of 3 forks: 0 the same in all, 1 in different ways"),
        "{shown}"
    );
    let json = w.json(&["compare", &run, "1", "2", "--json"]);
    assert_eq!(json["files"][0]["variants"], serde_json::json!({ "1": "a", "2": "a" }));
    let steps = w.run(&["events", &run, "--compare"]).stdout;
    assert!(steps.contains("Write a.txt"), "{steps}");
}
