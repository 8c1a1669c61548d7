use super::World;

#[test]
fn a_result_becomes_a_branch_a_patch_or_files() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let one = format!("{run}/1");
    let ran = w.run(&["apply", &one]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let branch = format!("forkyard/{run}-1");
    assert_eq!(w.git(&["show", &format!("{branch}:a.txt")]), "one\ntwo");
    // A branch that is there is never moved.
    let ran = w.run(&["apply", &one]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("name another one with --branch"), "{}", ran.stderr);
    assert_eq!(w.git(&["status", "--porcelain"]), "");

    assert_eq!(w.run(&["apply", &one, "--patch", "p.diff"]).code, 0);
    w.git(&["apply", "--check", "p.diff"]);

    let ran = w.run(&["apply", &one, "--work-tree"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(std::fs::read_to_string(w.repo().join("a.txt")).unwrap(), "one\ntwo\n");
}

#[test]
fn a_conflict_changes_nothing() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    w.write(&w.repo().join("a.txt"), "mine\n");
    let ran = w.run(&["apply", &run, "--work-tree"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("nothing was changed") && ran.stderr.contains("a.txt"), "{}", ran.stderr);
    assert_eq!(std::fs::read_to_string(w.repo().join("a.txt")).unwrap(), "mine\n");
}
