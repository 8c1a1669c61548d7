//! What users are told when something is wrong. The snapshot is for reading: each text says what is wrong and what to do.

use std::fmt::Write;

use super::World;

/// Command lines and what they say, one after the other; ids that differ from run to run have names.
fn transcript(w: &World, lines: &[&[&str]], names: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for args in lines {
        let ran = w.run(args);
        let shown: Vec<&str> =
            args.iter().map(|a| if a.contains(' ') || a.is_empty() { "…" } else { a }).collect();
        writeln!(text, "$ forkyard {}    ({})", shown.join(" "), ran.code).unwrap();
        assert!(!ran.stderr.contains('\x1b'), "{args:?}");
        for line in ran.stdout.lines().chain(ran.stderr.lines()) {
            writeln!(text, "  {line}").unwrap();
        }
    }
    let dir = w.repo().parent().unwrap().display().to_string();
    for (id, name) in names.iter().chain([&(dir.as_str(), "DIR")]) {
        text = text.replace(id, name);
    }
    text
}

#[test]
fn what_was_written_wrong() {
    let w = World::with_commit();
    let model = w.model();
    let m = model.as_str();
    w.write(&w.repo().join("prompt.md"), "Work on {{ project }}.\n");
    w.write(&w.repo().join("wrong.toml"), &format!("prompt = \"x\"\nmodel = \"{m}\"\nprotect = [\"{{\"]\n"));
    let text = transcript(
        &w,
        &[
            &["frok"],
            &["fork"],
            &["fork", "-p", "x"],
            &["fork", "-p", " ", "-m", m],
            &["fork", "-p", "x", "-m", "nonsense"],
            &["fork", "-p", "x", "-m", "script:/nonexistent"],
            &["fork", "-p", "x", "-m", m, "-b", "nope"],
            &["fork", "-p", "x", "-m", m, "-f", "0"],
            &["fork", "-p", "x", "-m", m, "-f", "many"],
            &["fork", "-p", "x", "-m", m, "-t", "soon"],
            &["fork", "-p", "x", "-m", m, "--budget", "lots"],
            &["fork", "-p", "x", "-m", m, "--memory", "1"],
            &["fork", "-p", "x", "-m", m, "--network", "open"],
            &["fork", "-p", "x", "-m", m, "--volume", "a:b"],
            &["fork", "-p", "x", "-m", m, "--volume", "/nope:/x"],
            &["fork", "-p", "x", "-m", m, "--log-dir", "a.txt/logs"],
            &["fork", "-p", "x", "-m", m, "--protect", "["],
            &["fork", "-p", "x", "-m", m, "--capture", "["],
            &["fork", "-p", "x", "-m", m, "--allowed-tools", "Foo"],
            &["fork", "-p", "x", "-m", m, "--disallowed-tools", "Nope"],
            &["fork", "-p", "x", "-m", m, "--agent-prompt", "prompt.md"],
            &["fork", "-p", "x", "-m", m, "--allow", "http://foo/"],
            &["run", "wrong.toml"],
            &["list"],
            &["fork", "-p", "x", "-m", m, "--secret", "nope"],
            &["fork", "-p", "x", "-m", m, "--until-verified", "2"],
            &["fork", "-p", "x", "-m", m, "--engine", "nonsense"],
            &["fork", "-p", "x", "-m", m, "--server", "http://localhost:1"],
            &["fork", "-p", "x", "-m", m, "--prompt-file", "none.md"],
            &["fork", "/nonexistent", "-p", "x", "-m", m],
            &["fork", "..", "-p", "x", "-m", m],
            &["fork", "--upload-pack=x", "-p", "x"],
            &["fork", "https://example.com/r", "-p", "x", "-m", m, "--dirty"],
            &["run", "none.toml"],
            &["--set", "run.frks=2", "list"],
            &["--set", "forks", "list"],
            &["--color", "red", "list"],
            &["list", "--limit", "0"],
            &["gc", "--older-than", "soon"],
            &["cleanup", "--interval", "x"],
            &["completions", "tcsh"],
            &["trust"],
            &["replay", "r1"],
            &["status", "../x"],
            &["sandbox", "cp", "a", "b"],
            &["sandbox", "exec", "s404", "--", "true"],
            &["sandbox", "shell", "s404"],
            &["sandbox", "create", "--network", "open"],
            &["watch"],
        ],
        &[],
    );
    insta::assert_snapshot!(text);
}

#[test]
fn what_is_not_there_or_can_not_be_done() {
    let w = World::with_commit();
    let run = w.ended(&["--verify", "false"]);
    let (zero, nine) = (format!("{run}/0"), format!("{run}/9"));
    let nothing = {
        w.write(&w.script(), "name = \"idle\"\n[[turn]]\ntext = \"There is nothing to do.\"\n");
        w.ended(&[])
    };
    w.write(&w.repo().join("a.txt"), "mine\n");
    let text = transcript(
        &w,
        &[
            &["status", "r404"],
            &["status", &nine],
            &["diff", &nine],
            &["apply", &nothing],
            &["apply", &zero, "--work-tree"],
            &["apply", &zero, "--branch", "main"],
            &["apply", &zero, "--branch", "a..b"],
            &["apply", &zero, "--patch", "/nonexistent/p"],
            &["apply", &zero, "--into", "/nonexistent"],
            &["compare", &run, "9"],
            &["message", &zero, "x"],
            &["pause", &run],
            &["replay", &nine],
            &["watch", "r404"],
        ],
        &[(&run, "RUN"), (&nothing, "IDLE")],
    );
    insta::assert_snapshot!(text);
}

/// Every command of the program has a test of its name.
#[test]
fn no_command_is_without_a_test() {
    use clap::CommandFactory;
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    for command in forkyard::program::Cli::command().get_subcommands() {
        // Stopping a cleanup is tested where one is started.
        let name = command.get_name().trim_start_matches("stop-");
        let file = tests.join(format!("{name}.rs"));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        assert!(text.contains("#[test]") && text.contains(&format!("\"{name}\"")), "{}", file.display());
    }
}

/// With `--json` an error is a document too, and standard error still tells people.
#[test]
fn errors_are_documents_for_programs() {
    let w = World::with_commit();
    for args in [
        &["status", "r404"][..],
        &["fork", "-p", "x", "-m", "nonsense"],
        &["sandbox", "stats", "s404"],
        &["watch"],
        &["frok"],
        &["sandbox", "run"],
        &["sandbox", "exec", "s404", "--timeout"],
    ] {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let ran = w.run(&args);
        let json: serde_json::Value =
            serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}"));
        assert!(!json["error"].as_str().unwrap().starts_with("error"), "{json}");
        assert_eq!(
            (json["schema"].as_str(), json["exit_code"].as_i64()),
            (Some("forkyard.error/1"), Some(2)),
            "{args:?}"
        );
        assert!(ran.stderr.starts_with("error: "), "{args:?}");
        assert_eq!(ran.stdout.lines().count(), 1, "{args:?}: it may close a stream of lines");
    }
}

/// What a command says for programs is JSON to the last line, without colour, whatever the environment asks for.
#[test]
fn json_is_json_everywhere() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let zero = format!("{run}/0");
    for args in [
        &["status", &run][..],
        &["status", &zero],
        &["list"],
        &["logs", &run],
        &["events", &run],
        &["events", &run, "--compare"],
        &["diff", &zero],
        &["compare", &run],
        &["apply", &zero],
        &["replay", &zero, "--speed", "0"],
        &["gc", "--dry-run"],
        &["cleanup", "--once"],
        &["cleanup", "--dry-run"],
        &["stop-cleanup"],
        &["config"],
        &["doctor"],
        &["sandbox", "list"],
        &["fork", "-p", "x", "-m", &w.model(), "--network", "none"],
    ] {
        let args: Vec<&str> = args.iter().copied().chain(["--json", "--color", "always"]).collect();
        let ran = w.run(&args);
        assert_eq!(ran.code, 0, "{args:?}: {}{}", ran.stdout, ran.stderr);
        let stream = serde_json::Deserializer::from_str(&ran.stdout).into_iter::<serde_json::Value>();
        let mut documents = 0;
        for document in stream {
            let document = document.unwrap_or_else(|e| panic!("{args:?}: {e}: {}", ran.stdout));
            let schema = document["schema"].as_str().unwrap_or_else(|| panic!("{args:?}: {document}"));
            let (name, version) = schema.strip_prefix("forkyard.").unwrap().split_once('/').unwrap();
            assert!(version.parse::<u32>().is_ok(), "{schema}");
            // Each of them is described.
            let described = include_str!("../../../../docs/json.md");
            assert!(
                described.contains(&format!("forkyard.{name}/{version}")),
                "{schema} is not in docs/json.md"
            );
            documents += 1;
        }
        assert!(documents > 0, "{args:?}");
    }
}

/// What streams has a whole record in every line, the last one too.
#[test]
fn a_stream_is_a_record_a_line() {
    let w = World::with_commit();
    let model = w.model();
    let fork = ["fork", "-p", "x", "-m", &model, "--network", "none", "--json"];
    let no_wait: Vec<&str> = fork.iter().copied().chain(["--no-wait"]).collect();
    let failing: Vec<&str> = fork.iter().copied().chain(["--setup", "echo no; exit 3"]).collect();
    for (args, schema) in [
        (&fork[..], "forkyard.run/1"),
        (&no_wait, "forkyard.command/1"),
        (&failing, "forkyard.run/1"),
        (&["demo", "--json"], "forkyard.run/1"),
    ] {
        let ran = w.run(args);
        let lines: Vec<serde_json::Value> = ran
            .stdout
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{args:?}: {e}: {l}")))
            .collect();
        assert_eq!(lines.last().unwrap()["schema"], schema, "{args:?}: {}", ran.stderr);
    }
}

/// A base that can't be prepared: what went wrong in lines, and what to do.
#[test]
fn a_failed_base_says_why() {
    let w = World::with_commit();
    let ran = w.fork(&["-f", "2", "--setup", "echo first; echo second; exit 3"]);
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    let text = &ran.stdout;
    assert!(
        text.starts_with("0 of 2 forks succeeded, $0.00 in all\nerror: the base could not be prepared\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  setup ended with 3\n  first\n  second\n") && text.contains("\nhint: "),
        "{text}"
    );
}

/// Only a terminal gets colour by itself; NO_COLOR and --color are heard.
#[test]
fn colour_is_for_those_who_want_it() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let colored = |args: &[&str], env: &[(&str, &str)]| w.run_with(args, env).stdout.contains('\x1b');
    for command in
        [&["status", run.as_str()][..], &["list"], &["diff", &run], &["logs", &run], &["compare", &run]]
    {
        let always: Vec<&str> = command.iter().copied().chain(["--color", "always"]).collect();
        assert!(!colored(command, &[]), "{command:?}");
        assert!(colored(&always, &[]), "{command:?}");
        assert!(colored(command, &[("FORKYARD_COLOR", "always")]), "{command:?}");
        assert!(!colored(command, &[("NO_COLOR", "1"), ("FORKYARD_COLOR", "always")]), "{command:?}");
        assert!(colored(&always, &[("NO_COLOR", "1")]), "what is typed wins: {command:?}");
    }
}
