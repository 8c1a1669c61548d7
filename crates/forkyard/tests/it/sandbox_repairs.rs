//! What is damaged or missing is named, and does not keep the rest.

use super::World;

#[test]
fn a_sandbox_whose_record_is_damaged_is_listed_and_removed() {
    let w = World::new();
    for name in ["box1", "box2"] {
        assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", name]).code, 0);
    }
    w.write(&w.home().join("sandboxes/sandboxes/box1/meta.json"), "");
    let list = w.json(&["--json", "sandbox", "list"]);
    let of =
        |name: &str| list["sandboxes"].as_array().unwrap().iter().find(|s| s["id"] == name).unwrap().clone();
    assert_eq!((&of("box1")["status"], &of("box2")["status"]), (&"dead".into(), &"running".into()), "{list}");
    let ran = w.run(&["sandbox", "list"]);
    assert!(ran.code == 0 && ran.stdout.contains("dead"), "{}{}", ran.stdout, ran.stderr);
    let ran = w.run(&["sandbox", "health"]);
    assert!(ran.code == 1 && ran.stdout.contains("box1 is not well: "), "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("box1/meta.json") && ran.stdout.contains("box2 is well"), "{}", ran.stdout);
    for args in [
        &["sandbox", "create", "--network", "none", "--name", "box1"][..],
        &["sandbox", "exec", "box1", "true"],
        &["sandbox", "stop", "box1"],
        &["sandbox", "start", "box1"],
    ] {
        let ran = w.run(args);
        assert!(ran.code != 0 && ran.stderr.contains("forkyard sandbox rm box1"), "{args:?}: {}", ran.stderr);
    }
    assert_eq!(w.run(&["sandbox", "exec", "box2", "true"]).code, 0);
    let ran = w.run(&["sandbox", "rm", "box1"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "box1 is gone.\n"), "{}", ran.stderr);
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
}

#[test]
fn a_snapshot_whose_record_is_damaged_keeps_no_others() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    for name in ["good", "bad"] {
        assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", name]).code, 0);
    }
    // Under the name that it has once it is synced, which may not be yet.
    let records = w.home().join("sandboxes/snapshots");
    let _ = std::fs::remove_file(records.join("bad.unsynced"));
    w.write(&records.join("bad.json"), "{");
    let fix = "forkyard sandbox snapshots --remove bad";
    let ran = w.run(&["sandbox", "snapshots"]);
    assert!(ran.code == 0 && ran.stdout.contains("good") && !ran.stdout.contains("bad"), "{}", ran.stdout);
    assert!(ran.stderr.contains("bad is damaged: ") && ran.stderr.contains(fix), "{}", ran.stderr);
    assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", "other"]).code, 0);
    for args in [
        &["sandbox", "snapshot", "box1", "--name", "bad"][..],
        &["sandbox", "run", "--network", "none", "--snapshot", "bad", "true"],
    ] {
        let ran = w.run(args);
        assert!(ran.code != 0 && ran.stderr.contains(fix), "{args:?}: {}", ran.stderr);
    }
    // One that is not there does not keep those that come after it.
    let ran = w.run(&["sandbox", "snapshots", "--remove", "none", "bad", "other"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, "bad is gone.\nother is gone.\n"), "{}", ran.stderr);
    assert!(ran.stderr.contains("there is no snapshot none"), "{}", ran.stderr);
    assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", "bad"]).code, 0);
    assert_eq!(w.run(&["sandbox", "snapshots", "--remove", "good", "bad"]).code, 0);
}

#[test]
fn one_that_is_missing_keeps_no_other_from_being_removed() {
    let w = World::new();
    for name in ["box1", "box2"] {
        assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", name]).code, 0);
    }
    let ran = w.run(&["sandbox", "rm", "none1", "box1", "none2", "box2"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, "box1 is gone.\nbox2 is gone.\n"), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("no sandbox none1") && ran.stderr.contains("no sandbox none2"),
        "{}",
        ran.stderr
    );
    let ran = w.run(&["sandbox", "rm", "none1"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

#[test]
fn mistakes_with_files_say_what_to_do() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    assert_eq!(w.run(&["sandbox", "snapshot", "box1", "--name", "snap1"]).code, 0);
    let ran = w.run(&["sandbox", "snapshots", "--export", "snap1", "/no/dir/file"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("no folder /no/dir") && ran.stderr.contains("hint: "), "{}", ran.stderr);
    // What is no archive is not shown for that.
    let secret = "a line that is nobody's business\n".repeat(40);
    w.write(&w.repo().join("notes"), &secret);
    let image = format!("archive:{}", w.repo().join("notes").display());
    let ran = w.run(&["sandbox", "run", "--network", "none", "--image", &image, "true"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(!ran.stderr.contains("nobody's business") && ran.stderr.contains("hint: "), "{}", ran.stderr);
    assert!(ran.stderr.contains("is no archive"), "{}", ran.stderr);
}
