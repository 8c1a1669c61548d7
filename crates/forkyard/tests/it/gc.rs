use super::World;

#[test]
fn old_runs_go_with_everything_of_theirs() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    assert!(w.run(&["gc"]).stdout.starts_with("0 runs"));
    let dry = w.run(&["gc", "--older-than", "0s", "--dry-run"]).stdout;
    assert!(dry.contains(&format!("would remove run {run}")), "{dry}");
    assert_ne!(w.git(&["for-each-ref", "refs/forkyard/"]), "");
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([run]), "{done}");
    assert_eq!(done["freed"]["left"], serde_json::json!([]), "{done}");
    assert_eq!(done["freed"]["snapshots"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(w.git(&["for-each-ref", "refs/forkyard/"]), "");
    assert_eq!(w.run(&["status", &run]).code, 2);
    assert!(!w.home().join("logs").join(&run).exists());
    assert_eq!(w.run(&["gc", "--older-than", "soon"]).code, 2);
}

#[test]
fn a_run_whose_sandbox_its_user_keeps_is_not_old() {
    let w = World::with_commit();
    let run = w.ended(&["--keep", "-f", "1"]);
    let kept = w.json(&["sandbox", "list", "--json"])["sandboxes"][0]["id"].as_str().unwrap().to_string();
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([]), "{done}");
    assert!(done["freed"]["left"][0].as_str().unwrap().contains(&kept), "{done}");
    assert_eq!(w.run(&["sandbox", "exec", &kept, "true"]).code, 0, "the next sweep leaves it alone, too");
    assert_eq!(w.run(&["sandbox", "rm", &kept]).code, 0);
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([run]), "{done}");
}
