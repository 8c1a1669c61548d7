use super::World;

#[test]
fn a_run_ends_in_a_table_and_the_exit_status_says_what_came_of_it() {
    let w = World::with_commit();
    let ran = w.fork(&["-f", "2", "--verify", "grep -q zero a.txt"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("★ 0  success  yes"), "{}", ran.stdout);
    assert!(ran.stdout.contains("forkyard apply r"), "{}", ran.stdout);
    // The user's own files and branches are as they were.
    assert_eq!(w.git(&["status", "--porcelain"]), "");
    assert_eq!(w.git(&["branch", "--format=%(refname:short)"]), "main");

    let ran = w.fork(&["--verify", "false"]);
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
}

#[test]
fn a_score_that_fails_and_a_tie_are_told_with_the_ranking() {
    let w = World::with_commit();
    // Fork 0 has its score refused, forks 1 and 2 did the same.
    let ran = w.fork(&["-f", "3", "--score", "grep -q two a.txt || exit 3; echo 7"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("\nFork 0: score failed: exit 3\n"), "{}", ran.stdout);
    let list = w.json(&["list", "--json"]);
    let run = list["runs"][0]["id"].as_str().unwrap();
    let status = w.json(&["status", run, "--json"]);
    let reasons: Vec<&str> = status["ranking"]["order"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["reason"].as_str().unwrap())
        .collect();
    assert!(
        reasons[0].starts_with("score 7, +1 -0 lines") && reasons[0].contains("(before fork "),
        "{reasons:?}"
    );
    assert!(reasons[2].starts_with("score failed: exit 3, "), "{reasons:?}");
    assert_eq!(status["results"][0]["score_error"], "exit 3");
    let fork = w.run(&["status", &format!("{run}/0")]);
    assert!(fork.stdout.contains("\nscore      failed: exit 3\n"), "{}", fork.stdout);

    let ran = w.fork(&["--score", "echo well done"]);
    assert!(
        ran.stdout.contains("Fork 0: score failed: its last line is no number: \"well done\""),
        "{}",
        ran.stdout
    );
}

#[test]
fn mistakes_are_found_before_anything_is_stored() {
    let w = World::with_commit();
    let model = w.model();
    for (args, expected) in [
        (&["fork", "-p", "x", "-m", "nonsense"][..], "nonsense"),
        (&["fork", "-p", "x", "-m", "script:/nonexistent"], "/nonexistent"),
        (&["fork", "-p", "x", "-m", &model, "-b", "nope"], "nope"),
        (&["fork", "-p", "x", "-m", &model, "--engine", "nonsense"], "temporal"),
        (
            &["fork", "-p", "x", "-m", &model, "--engine", "temporal", "--log-dir", "logs"],
            "--log-dir: Temporal's workers write the logs",
        ),
        (
            &["fork", "-p", "x", "-m", &model, "--engine", "temporal", "--volume", "/nope:/x"],
            "/nope is not a folder of this machine",
        ),
        (&["fork", "-p", "x"], "ANTHROPIC_API_KEY"),
        (&["fork", "/nonexistent", "-p", "x"], "neither a folder nor a URL"),
    ] {
        let ran = w.run(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
    }
    assert!(!w.repo().join("logs").exists(), "no folder is made for what is refused");
    let server = ["--server", "http://localhost:1", "--log-dir", "logs"];
    let args: Vec<&str> = ["fork", "-p", "x", "-m", &model].into_iter().chain(server).collect();
    let ran = w.run_with(&args, &[("FORKYARD_TOKEN", "x")]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--log-dir: a server writes the logs of its runs"), "{}", ran.stderr);
    assert_eq!(w.json(&["list", "--json"])["runs"].as_array().unwrap().len(), 0);
}

#[test]
fn without_waiting_a_worker_of_its_own_takes_the_run_to_its_end() {
    let w = World::with_commit();
    let ran = w.fork(&["--no-wait", "--json"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let run = json["run"].as_str().unwrap();
    // Ends with the run.
    assert_eq!(w.run(&["logs", "-f", run]).code, 0);
    let status = w.json(&["status", run, "--json"]);
    assert_eq!((status["outcome"].as_str(), status["successful"].as_u64()), (Some("success"), Some(1)));
}

#[test]
fn hooks_of_the_users_file_judge_calls() {
    let w = World::with_commit();
    w.user_file(
        "[[hooks]]\nevent = \"PreToolUse\"\nmatcher = \"Write\"\ncommand = \"echo not on a Friday >&2; exit 2\"\n",
    );
    let run = w.ended(&[]);
    let result = &w.json(&["status", &run, "--json"])["results"][0];
    assert_eq!((result["errors"].as_u64(), result["diff"]["files"].as_u64()), (Some(1), Some(0)), "{result}");
    assert!(w.run(&["logs", &run]).stdout.contains("not on a Friday"));
    // A repository does not get one by having it in its file.
    w.project_file("[[hooks]]\nevent = \"PreToolUse\"\ncommand = \"true\"\n");
    let ran = w.fork(&[]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(ran.stderr.contains("`hooks`") && ran.stderr.contains("forkyard trust"), "{}", ran.stderr);
}

#[test]
fn docker_is_looked_for_where_its_own_programs_look() {
    let w = World::with_commit();
    let args = ["fork", "-p", "x", "-m", &w.model(), "--provider", "docker"];
    let ran = w.run_with(&args, &[("DOCKER_HOST", "unix:///nonexistent.sock")]);
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    assert!(ran.stderr.contains("/nonexistent.sock"), "{}", ran.stderr);
}

#[test]
fn what_setup_made_is_nobodys_work() {
    let w = World::with_commit();
    let script = r#"
name = "rewrites"
[[turn]]
when = { fork = 1 }
text = "I write it myself."
tools = [{ name = "Bash", input = { command = "echo mine > built.txt" } }]
[[turn]]
when = { fork = 2 }
text = "I commit it."
tools = [{ name = "Bash", input = { command = "git add built.txt && git commit -qm built && rm removed.txt" } }]
[[turn]]
text = "Done."
"#;
    w.write(&w.script(), script);
    let setup = "echo theirs > built.txt; echo theirs > removed.txt; echo more >> a.txt";
    let run = w.ended(&["-f", "3", "--setup", setup]);
    let files = |fork: usize| w.run(&["diff", &format!("{run}/{fork}"), "--stat"]).stdout;
    assert_eq!([files(0), files(1), files(2)], ["", "A  +1  -0  built.txt\n", "A  +1  -0  built.txt\n"]);
}

#[test]
fn what_is_kept_is_named_with_a_way_in_and_out() {
    let w = World::with_commit();
    let ran = w.fork(&["--keep"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let line =
        ran.stdout.lines().find(|l| l.starts_with("Kept until ")).unwrap_or_else(|| panic!("{}", ran.stdout));
    let id = line.split("forkyard sandbox rm ").nth(1).unwrap().trim_end_matches(')');
    assert!(line.contains(&format!("forkyard sandbox shell {id} ")), "{line}");
    assert_eq!(w.run(&["sandbox", "rm", id]).code, 0);
}
