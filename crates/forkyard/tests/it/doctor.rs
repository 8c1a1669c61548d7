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

#[test]
fn attacks_are_made_and_told() {
    let w = World::new();
    // With nothing of the host's tools: the attempts are carried along.
    let ran = w.run_with(
        &[
            "doctor",
            "--attack",
            "--only",
            "7,16,28,33",
            "--json",
            "--set",
            "network.allow=open.example,read.example:ro",
        ],
        &[("PATH", "/nonexistent")],
    );
    let json: serde_json::Value =
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", ran.stdout, ran.stderr));
    assert_eq!((ran.code, &json["breaches"]), (0, &0.into()), "{json}");
    let attempts = json["attempts"].as_array().unwrap();
    assert!(attempts.len() >= 4, "{json}");
    for attempt in attempts {
        assert!(["denied", "harmless"].contains(&attempt["outcome"].as_str().unwrap()), "{attempt}");
        assert!(!attempt["layer"].as_str().unwrap().is_empty());
    }
    let leaves = json["leaves"].as_array().unwrap();
    assert_eq!(leaves.len(), 1, "{leaves:?}");
    assert!(leaves[0].as_str().unwrap().contains("open.example"));
    assert_eq!(std::fs::read_dir(w.home().join("doctor")).unwrap().count(), 0, "nothing is left");

    let ran = w.run(&["doctor", "--attack", "--only", "16"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(
        ran.stdout.contains("seccomp") && ran.stdout.ends_with("1 attempt, 0 breaches.\n"),
        "{}",
        ran.stdout
    );
    let ran = w.run(&["doctor", "--attack", "--only", "39"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert_eq!(w.run(&["doctor", "--only", "16"]).code, 2);
}

/// Where no sandbox can be made that is the error, and nothing is called a breach.
#[test]
fn without_a_sandbox_nothing_is_attacked() {
    let w = World::new();
    let ran = w.run(&["doctor", "--attack", "--only", "16", "--image", "archive:/no/such/file"]);
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("/no/such/file") && ran.stderr.contains("hint"), "{}", ran.stderr);
    assert!(!ran.stdout.contains("breach") && !ran.stderr.contains("breach"), "{}{}", ran.stdout, ran.stderr);
    assert_eq!(std::fs::read_dir(w.home().join("doctor")).unwrap().count(), 0, "nothing is left");
}

/// What a sandbox sees of the host is what doctor and config say, toolchains of the user's home among it.
#[test]
fn host_trees_are_those_of_a_sandbox() {
    let w = World::new();
    let home = tempfile::tempdir().unwrap();
    for folder in [".rustup", ".cargo/bin", ".pyenv/shims"] {
        std::fs::create_dir_all(home.path().join(folder)).unwrap();
    }
    let env = [("HOME", home.path().to_str().unwrap())];
    let json = |args: &[&str]| -> serde_json::Value {
        let ran = w.run_with(args, &env);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", ran.stdout, ran.stderr))
    };
    let doctor = json(&["doctor", "--json"]);
    let row =
        |name: &str| doctor["checks"].as_array().unwrap().iter().find(|c| c["name"] == name).unwrap().clone();
    let said = row("host trees, read-only")["found"].as_str().unwrap().to_string();
    let config = json(&["config", "--json"]);
    let trees: Vec<&str> =
        config["host_trees"].as_array().unwrap().iter().map(|tree| tree["path"].as_str().unwrap()).collect();
    let mounts = w.run_with(&["sandbox", "run", "--network", "none", "cat", "/proc/mounts"], &env);
    assert_eq!(mounts.code, 0, "{}", mounts.stderr);
    for folder in [".rustup", ".cargo/bin", ".pyenv"] {
        let path = home.path().join(folder).display().to_string();
        assert!(said.contains(&path), "{said}");
        assert!(trees.contains(&path.as_str()), "{trees:?}");
        assert!(mounts.stdout.contains(&path), "{}", mounts.stdout);
    }
    assert!(w.run_with(&["config"], &env).stdout.contains(".pyenv (pyenv)"));
    assert_eq!(row("network rate")["health"], "missing");
}

#[test]
fn an_absent_engine_is_a_finding_and_an_error() {
    let w = World::new();
    let host = ("DOCKER_HOST", "unix:///nowhere/docker.sock");
    let ran = w.run_with(&["doctor", "--json"], &[host]);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let docker = json["checks"].as_array().unwrap().iter().find(|c| c["name"] == "docker").unwrap().clone();
    assert_eq!((ran.code, docker["health"].as_str()), (0, Some("missing")), "{docker}");
    let ran = w.run_with(&["doctor", "--attack", "--provider", "docker"], &[host]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("/nowhere/docker.sock") && ran.stderr.contains("hint"), "{}", ran.stderr);
}
