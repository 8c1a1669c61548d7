use super::World;

#[test]
fn bad_usage_is_status_2_and_help_is_0() {
    let w = World::new();
    for args in [&["nonsense"][..], &["config", "--nope"], &["completions", "tcsh-ish"]] {
        assert_eq!(w.run(args).code, 2, "{args:?}");
    }
    for args in [&["--help"][..], &["--version"], &["help", "config"], &["config", "--help"]] {
        assert_eq!(w.run(args).code, 0, "{args:?}");
    }
}

#[test]
fn errors_are_text_on_stderr_and_json_where_asked_for() {
    let w = World::new();
    w.user_file("[run]\ntimout = \"1h\"\n");
    let ran = w.run(&["config"]);
    assert_eq!(ran.code, 2);
    assert_eq!(
        ran.stderr,
        "error: DIR/home/config.toml:2: unknown key `run.timout`; did you mean `run.timeout`?\n"
    );
    assert_eq!(ran.stdout, "");
    let json = w.json(&["config", "--json"]);
    assert_eq!((json["schema"].as_str(), json["exit_code"].as_i64()), (Some("forkyard.error/1"), Some(2)));
}

#[test]
fn no_home_at_all_says_what_to_set() {
    let w = World::new();
    let ran = w.run_with(&["config"], &[("FORKYARD_HOME", "")]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (2, "error: $HOME: it is not set; set it, or FORKYARD_HOME\n")
    );
}

#[test]
fn hostile_names_do_not_reach_the_terminal_raw() {
    let w = World::new();
    for args in
        [&["config", "\x1b[2Jevil"][..], &["--set", "\x1b[2J=1", "config"], &["trust", "\x1b]0;x\x07"]]
    {
        let ran = w.run_with(args, &[("FORKYARD_COLOR", "never")]);
        assert_eq!(ran.code, 2, "{args:?}");
        assert!(!ran.stderr.contains('\x1b') && !ran.stdout.contains('\x1b'), "{:?}", ran.stderr);
    }
}

#[test]
fn asked_for_nothing_it_says_where_to_begin() {
    let w = World::new();
    let ran = w.run(&[]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert!(
        ran.stdout.contains("forkyard demo") && ran.stdout.lines().all(|l| l.len() <= 100),
        "{}",
        ran.stdout
    );
}
