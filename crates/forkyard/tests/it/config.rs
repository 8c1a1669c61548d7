use super::World;

#[test]
fn values_and_where_they_come_from() {
    let w = World::new();
    w.user_file("[run]\ntimeout = \"1h\"\n[anthropic]\napi_key = \"hunter2\"\n");
    w.project_file("[run]\nverify = \"make test\"\n");
    let ran = w.run_with(
        &["config", "--changed", "--set", "run.forks=3"],
        &[("FORKYARD_BUDGET", "$5"), ("FORKYARD_FROKS", "1")],
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(
        ran.stdout,
        "Home: DIR/home\n\n\
         Key                Value      From\n\
         run.forks          3          --set run.forks\n\
         run.timeout        1h         DIR/home/config.toml:2\n\
         run.budget         $5         $FORKYARD_BUDGET\n\
         run.verify         make test  DIR/repo/forkyard.toml:2\n\
         anthropic.api_key  ***        DIR/home/config.toml:4\n\
         warning: $FORKYARD_FROKS: no setting reads this variable; did you mean $FORKYARD_FORKS?\n"
    );
}

#[test]
fn json_has_typed_values_and_no_secret() {
    let w = World::new();
    w.user_file("[anthropic]\napi_key = \"hunter2\"\n[secrets.a]\nheader = \"X\"\nvalue = \"hunter2\"\nhosts = [\"h\"]\n");
    let ran = w.run(&["config", "--json"]);
    assert!(!ran.stdout.contains("hunter2"), "{}", ran.stdout);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let find = |key: &str| {
        json["settings"].as_array().unwrap().iter().find(|s| s["key"] == key).unwrap()["value"].clone()
    };
    assert_eq!((find("run.timeout"), find("run.forks")), (7200.0.into(), 1.into()));
    assert_eq!(find("run.budget"), serde_json::Value::Null);
    assert_eq!(json["secrets"][0]["name"], "a");
}

#[test]
fn nothing_changed_says_so() {
    let w = World::new();
    assert_eq!(w.run(&["config", "--changed"]).stdout, "Home: DIR/home\n\nEvery setting has its default.\n");
}

#[test]
fn one_key_one_table_and_a_wrong_one() {
    let w = World::new();
    assert_eq!(w.run(&["config", "run.forks"]).stdout, "Key        Value  From\nrun.forks  1      default\n");
    assert_eq!(w.run(&["config", "temporal"]).stdout.lines().count(), 9);
    let ran = w.run(&["config", "run.frks"]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (2, "error: unknown key run.frks\nhint: did you mean `run.forks`?\n")
    );
    let ran = w.run(&["config", "--set", "forks"]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (2, "error: --set forks: there is no `=`\nhint: write --set KEY=VALUE\n")
    );
}
