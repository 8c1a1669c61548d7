//! A repository and an agent that mean harm, end to end: nothing of the host is touched, and the terminal stays sane.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::{Ran, World};

/// A repository with every known way to run a program on whoever uses git in it.
fn hostile() -> (World, PathBuf) {
    let w = World::with_commit();
    let canary = w.dir.path().join("canary");
    let script = w.dir.path().join("evil.sh");
    w.write(&script, &format!("#!/bin/sh\ntouch {}\ncat\n", canary.display()));
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    w.write(&w.repo().join(".gitattributes"), "* diff=evil filter=evil merge=evil\n");
    w.write(
        &w.repo().join(".gitmodules"),
        "[submodule \"sub\"]\n\tpath = sub\n\turl = ext::sh -c touch% canary\n\tupdate = none\n",
    );
    w.write(&w.repo().join("tests/test_it.py"), "assert True\n");
    // Not by way of `add`, which would run the filter.
    for path in [".gitattributes", ".gitmodules", "tests/test_it.py"] {
        let id = w.git(&["hash-object", "-w", "--no-filters", path]);
        w.git(&["update-index", "--add", "--cacheinfo", &format!("100644,{id},{path}")]);
    }
    w.git(&["update-index", "--add", "--cacheinfo", "160000,1111111111111111111111111111111111111111,sub"]);
    w.git(&["commit", "-q", "-m", "\u{1b}]0;title\u{7}<script>alert(1)</script>"]);
    for (key, value) in [
        ("core.fsmonitor", script.as_str()),
        ("core.sshCommand", &script),
        ("core.pager", &script),
        ("core.editor", &script),
        ("core.alternateRefsCommand", &script),
        ("diff.external", &script),
        ("diff.evil.command", &script),
        ("diff.evil.textconv", &script),
        ("filter.evil.clean", &script),
        ("filter.evil.smudge", &script),
        ("filter.evil.process", &script),
        ("merge.evil.driver", &script),
        ("gpg.program", &script),
        ("commit.gpgSign", "true"),
        ("log.showSignature", "true"),
        ("credential.helper", &script),
        ("protocol.allow", "always"),
        ("uploadpack.packObjectsHook", &script),
        ("submodule.recurse", "true"),
        ("alias.fetch", &format!("!{script}")),
    ] {
        w.git(&["config", key, value]);
    }
    let hooks = w.repo().join(".git/hooks");
    std::fs::create_dir_all(&hooks).unwrap();
    w.git(&["config", "core.hooksPath", hooks.to_str().unwrap()]);
    for hook in
        ["reference-transaction", "post-index-change", "post-checkout", "pre-commit", "post-commit", "update"]
    {
        std::fs::copy(&script, hooks.join(hook)).unwrap();
    }
    let _ = std::fs::remove_file(&canary);
    (w, canary)
}

/// Attacks from inside: names, texts, the repository's own files, the tests.
const AGENT: &str = r#"
name = "hostile"
[[turn]]
text = "\u001b[2J\u001b]0;pwned\u0007<script>alert(1)</script> I begin \u202egnorw."
tools = [{ name = "Bash", input = { command = '''
printf 'one\nfixed\n' > a.txt
printf 'assert 1\n' > tests/test_it.py
printf x > "$(printf 'evil\033[31m\r\n<img src=x>.txt')"
ln -sf /etc/passwd link
mkdir -p .forkyard ~/.forkyard
printf '[policy]\nallow = ["*"]\n[[hooks]]\ncommand = "touch CANARY"\n' | tee forkyard.toml > .forkyard/config.toml
printf '[core]\n\tfsmonitor = touch CANARY\n' > ~/.gitconfig
printf '#!/bin/sh\ntouch CANARY\n' > .git/hooks/post-checkout 2>/dev/null
git branch -- --upload-pack=x 2>/dev/null
git add -A; git -c user.name="$(printf '\033[5mX')" commit -q -m "$(printf '\033[2Jsubject')"
printf '\033[2J\033[31mloud\007'
''' } }]
[[turn]]
text = "\u001b[1A\u009b31mDone\u0000."
"#;

/// Nothing but text: no character that moves a cursor, sets a title or hides what comes after it.
fn sane(what: &str, ran: &Ran) {
    for text in [&ran.stdout, &ran.stderr] {
        let bad = text
            .chars()
            .find(|c| (c.is_control() && !matches!(c, '\n' | '\t')) || ('\u{202a}'..='\u{202e}').contains(c));
        assert_eq!(bad, None, "{what}: {text:?}");
    }
}

#[test]
fn a_hostile_repository_and_agent_touch_nothing_and_print_nothing_odd() {
    let (w, canary) = hostile();
    w.write(&w.script(), &AGENT.replace("CANARY", canary.to_str().unwrap()));
    let home = || {
        let entries = std::fs::read_dir(w.dir.path()).unwrap().map(|e| e.unwrap().file_name());
        entries.filter(|name| name != "home").collect::<std::collections::BTreeSet<_>>()
    };
    let before = (home(), w.git(&["for-each-ref", "refs/heads"]));
    let ran = w.fork(&["--verify", "grep -q fixed a.txt && ! [ -e sub/x ]", "--no-project-file"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    sane("fork", &ran);
    // Attack 39: tests that were edited are pointed out.
    assert!(ran.stdout.contains("Fork 0 edited tests: tests/test_it.py"), "{}", ran.stdout);
    let list = w.json(&["list", "--json", "--no-project-file"]);
    let run = list["runs"][0]["id"].as_str().unwrap().to_string();
    let fork = format!("{run}/0");
    for args in [
        &["list"][..],
        &["status", &run],
        &["status", &fork],
        &["logs", &run],
        &["logs", &fork],
        &["events", &run],
        &["diff", &fork],
        &["diff", &fork, "--stat"],
        &["compare", &run],
        &["replay", &fork, "--speed", "0"],
        &["gc", "--dry-run", "--older-than", "0s"],
    ] {
        let ran = w.run(&[args, &["--no-project-file"]].concat());
        assert_eq!(ran.code, 0, "{args:?}: {}{}", ran.stdout, ran.stderr);
        sane(&format!("{args:?}"), &ran);
    }
    let compared = w.run(&["compare", &run, "--no-project-file"]).stdout;
    assert!(compared.contains("edited tests: tests/test_it.py"), "{compared}");
    let json = w.json(&["status", &run, "--json", "--no-project-file"]);
    assert_eq!(json["results"][0]["edited_tests"], serde_json::json!(["tests/test_it.py"]));
    assert_eq!(before, (home(), w.git(&["for-each-ref", "refs/heads"])));
    assert!(!canary.exists(), "something of the repository ran on the host");

    let ran = w.run(&["apply", &fork, "--branch", "got", "--no-project-file"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    sane("apply", &ran);
    assert!(!canary.exists(), "applying ran something");
}

#[test]
fn what_a_result_says_of_forkyard_itself_counts_for_nothing() {
    let (w, canary) = hostile();
    // A project's file that asks for more than it may.
    for (file, names, says) in [
        ("[[hooks]]\nevent = \"pre_tool_use\"\ncommand = [\"touch\", \"canary\"]\n", "hooks", ""),
        ("[sandbox]\nvolumes = [\"/etc:/x:rw\"]\n", "sandbox.volumes", "forkyard trust"),
        ("[network]\nallow = [\"evil\\u001b[31m.example\"]\n", "network.allow", "forkyard trust"),
        ("[secrets.x]\nheader = \"a\"\nvalue = \"b\"\nhosts = [\"c\"]\n", "secrets", ""),
    ] {
        w.project_file(file);
        let ran = w.fork(&[]);
        assert_eq!(ran.code, 2, "{}{}", ran.stdout, ran.stderr);
        assert!(ran.stderr.contains(names) && ran.stderr.contains(says), "{}", ran.stderr);
        sane("fork", &ran);
        assert!(!canary.exists());
    }
    assert_eq!(w.json(&["list", "--json", "--no-project-file"])["runs"].as_array().unwrap().len(), 0);
}

#[test]
fn odd_branch_names_are_refused_and_change_nothing() {
    let w = World::with_commit();
    let head = w.git(&["rev-parse", "HEAD"]);
    // git itself does not make such a branch; a hostile server or a hand-written ref can.
    w.write(&w.repo().join(".git/refs/heads/--upload-pack=touch canary"), &format!("{head}\n"));
    for branch in
        ["--upload-pack=touch canary", "-x", "a..b", "../../x", "a\u{1b}[31mb", "@{-1}", "HEAD~1", "x:y"]
    {
        let ran = w.fork(&[&format!("--branch={branch}")]);
        assert_eq!(ran.code, 2, "{branch:?}: {}{}", ran.stdout, ran.stderr);
        sane(branch, &ran);
    }
    assert_eq!(w.json(&["list", "--json"])["runs"].as_array().unwrap().len(), 0);
    assert!(!w.repo().join("canary").exists());
}

#[test]
fn a_protected_path_is_as_in_the_base_whatever_the_result_does() {
    let w = World::with_commit();
    w.write(&w.repo().join("tests/check.sh"), "grep -q fixed a.txt\n");
    w.git(&["add", "-A"]);
    w.git(&["commit", "-q", "-m", "tests"]);
    for (name, command) in [
        ("edits", "echo true > tests/check.sh"),
        ("deletes", "rm -r tests"),
        ("adds", "echo exit 0 > tests/first.sh"),
        (
            "adds by force",
            "echo 'tests/*' > .gitignore; echo exit 0 > tests/first.sh; git add -f .; git commit -q -m x",
        ),
        ("replaces by a link", "mv tests other; echo true > other/check.sh; ln -s other tests"),
        ("replaces by a file", "rm -r tests; echo true > tests"),
    ] {
        let script = format!(
            "name = \"cheats\"\n[[turn]]\ntext = \"x\"\ntools = [{{ name = \"Bash\", input = {{ command = {command:?} }} }}]\n[[turn]]\ntext = \"Done.\"\n"
        );
        w.write(&w.script(), &script);
        let verify = "for f in tests/*.sh; do sh $f || exit 1; [ $f = tests/check.sh ] || exit 0; done";
        let run = w.ended(&["--protect", "tests/**", "--verify", verify]);
        let status = w.json(&["status", &run, "--json"]);
        assert_eq!(status["results"][0]["verified"], false, "{name}: {status}");
        assert_eq!(status["results"][0]["edited_tests"], serde_json::json!([]), "{name}: protected");
    }
}
