use super::World;

#[test]
fn a_sound_machine_and_what_is_missing() {
    let w = World::new();
    let json = w.json(&["doctor", "--json"]);
    assert_eq!(json["sound"], true, "{json}");
    let check =
        |name: &str| json["checks"].as_array().unwrap().iter().find(|c| c["name"] == name).unwrap().clone();
    assert_eq!(check("git")["health"], "good");
    assert_eq!(check("isolation")["health"], "good");
    assert_eq!(check("anthropic key")["health"], "missing");
    assert!(check("anthropic key")["fix"].as_str().unwrap().contains("ANTHROPIC_API_KEY"));
}

#[test]
fn broken_settings_and_a_missing_git_are_findings() {
    let w = World::new();
    w.user_file("nonsense = 1\n");
    let ran = w.run_with(&["doctor"], &[("PATH", "/nonexistent")]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stdout.contains("unknown key `nonsense`") && ran.stdout.contains("install git"),
        "{}",
        ran.stdout
    );
}

#[test]
fn a_home_that_can_not_be_made_is_found() {
    let w = World::new();
    let ran = w.run_with(&["doctor"], &[("FORKYARD_HOME", "/proc/nope")]);
    assert_eq!(ran.code, 1);
    assert!(ran.stdout.contains("set FORKYARD_HOME"), "{}", ran.stdout);
}
