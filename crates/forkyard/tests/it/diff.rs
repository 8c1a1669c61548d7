use super::World;

#[test]
fn a_result_is_shown_as_a_patch_a_summary_or_json() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let one = format!("{run}/1");
    let shown = w.run(&["diff", &one]).stdout;
    assert!(shown.contains("--- a/a.txt\n+++ b/a.txt\n") && shown.contains("\n+two\n"), "{shown}");
    assert_eq!(w.run(&["diff", &one, "--stat"]).stdout, "M  +1  -0  a.txt\n");
    assert_eq!(w.run(&["diff", &one, "--", "other"]).stdout, "");
    assert_eq!(w.json(&["diff", &one, "--json"])["files"][0]["path"], "a.txt");
    let patch = w.run(&["diff", &run, "--patch"]).stdout;
    assert!(patch.starts_with("diff --git a/a.txt b/a.txt\n"), "{patch}");
}
