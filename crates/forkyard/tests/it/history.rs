//! Git inside the sandbox: the past is there, and what is committed there comes home.

use super::World;

/// Looks at the past, commits twice under names of its own, and leaves something uncommitted.
const COMMITS: &str = r#"
name = "commits"
[[turn]]
text = "I look and commit."
tools = [{ name = "Bash", input = { command = '''
set -e
git log --format=%s > log.txt
git status --porcelain | grep -v 'log.txt\|status.txt' > status.txt || true
git rev-parse --abbrev-ref HEAD > branch.txt
git remote -v > remotes.txt; cat .git/config >> remotes.txt; ls .git/objects/info >> remotes.txt 2>/dev/null || true
echo two >> a.txt
git add a.txt log.txt
printf 'Add two \033[2J\nbody\n' | git -c user.name="$(printf 'Evil \033[31m')" commit -q -F -
echo three >> a.txt
git commit -q -a -m 'Add three' --date '2001-02-03T04:05:06Z'
echo rest > rest.txt
''' } }]
[[turn]]
text = "Done."
"#;

fn world() -> World {
    let w = World::with_commit();
    w.write(&w.repo().join("b.txt"), "b\n");
    w.git(&["add", "-A"]);
    w.git(&["commit", "-q", "-m", "second"]);
    w.git(&["remote", "add", "origin", "https://user:hunter2@example.com/r.git"]);
    w
}

#[test]
fn the_past_is_inside_and_commits_come_home() {
    let w = world();
    w.write(&w.script(), COMMITS);
    let run = w.ended(&["--verify", "test -e rest.txt"]);
    let result = format!("refs/forkyard/{run}/0");
    let show = |path: &str| w.git(&["show", &format!("{result}:{path}")]);
    assert_eq!(show("log.txt"), "second\nfirst");
    assert_eq!(show("status.txt"), "", "a fresh checkout is clean");
    assert_eq!(show("branch.txt"), format!("forkyard/{run}-0"));
    assert!(!show("remotes.txt").contains("hunter2"), "{}", show("remotes.txt"));
    assert!(!show("remotes.txt").contains("alternates"), "{}", show("remotes.txt"));
    let log = w.git(&["log", "--format=%an|%ad|%s", "--date=short", &result]);
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 5, "{log}");
    assert!(lines[0].starts_with("forkyard|") && lines[0].ends_with(&format!("|Forkyard {run}/0")), "{log}");
    assert_eq!(lines[1], "forkyard|2001-02-03|Add three");
    assert!(lines[2].starts_with("Evil \x1b[31m|"), "{log}");
    assert_eq!(
        &lines[3..].iter().map(|l| l.rsplit('|').next().unwrap()).collect::<Vec<_>>(),
        &["second", "first"]
    );
    assert_eq!(
        w.git(&["diff", "--name-only", &format!("{result}~1"), &result]),
        "branch.txt\nremotes.txt\nrest.txt\nstatus.txt"
    );

    // What an agent called itself and its commits is harmless where it is shown.
    let shown = w.run(&["status", &format!("{run}/0")]).stdout;
    assert!(
        shown.contains("Add two \\x1b[2J body (Evil \\x1b[31m)")
            || shown.contains("Add two \\x1b[2J (Evil \\x1b[31m)"),
        "{shown}"
    );
    assert!(!shown.contains('\x1b'), "{shown:?}");
    let json = w.json(&["status", &format!("{run}/0"), "--json"]);
    assert_eq!(json["commits"].as_array().unwrap().len(), 3, "{json}");

    assert_eq!(w.run(&["apply", &run]).code, 0);
    assert_eq!(w.git(&["rev-list", "--count", &format!("main..forkyard/{run}-0")]), "3");
}

/// Each leaves a `.git` that is of no use, or worse, and a change that has to come home all the same.
#[test]
fn a_hostile_repository_inside_costs_its_commits_and_nothing_else() {
    let canary = |w: &World| w.dir.path().join("canary");
    for (name, command) in [
        ("gone", "rm -rf .git"),
        ("a file", "rm -rf .git; echo gitdir: /nonexistent > .git"),
        ("a link", "rm -rf .git; ln -s / .git"),
        ("no head", "echo nonsense > .git/HEAD"),
        (
            "odd refs",
            "git commit -q --allow-empty -m x; git rev-parse HEAD > .git/refs/heads/--upload-pack=x; mkdir -p '.git/refs/heads/..x'; echo x > .git/refs/heads/..x/y",
        ),
        ("another past", "git checkout -q --orphan new; git commit -q -m new"),
        ("older", "git update-ref --no-deref HEAD HEAD~1"),
        ("replaced", "git commit -q --allow-empty -m x; git replace HEAD HEAD~1"),
        (
            "grafts",
            "git commit -q --allow-empty -m x; mkdir -p .git/info; git rev-parse HEAD > .git/info/grafts",
        ),
        (
            "alternates",
            "git commit -q --allow-empty -m x; mkdir -p .git/objects/info; echo /etc > .git/objects/info/alternates",
        ),
        (
            "config",
            "git config core.fsmonitor 'touch CANARY; :'; git config core.hooksPath /workspace/hooks; git config core.pager 'touch CANARY'; git config pack.packSizeLimit 1; git commit -q --allow-empty -m x",
        ),
        (
            "a submodule",
            "git update-index --add --cacheinfo 160000,1111111111111111111111111111111111111111,sub; git commit -q -m sub",
        ),
        (
            "too much",
            "head -c 80000000 /dev/urandom > big; git add big; git commit -q -m big; git rm -q --cached big; rm big; git commit -q -m small",
        ),
        ("a program", "mkdir -p ~/bin; printf '#!/bin/sh\\nyes' > ~/bin/git; chmod +x ~/bin/git"),
    ] {
        let w = world();
        let command = command.replace("CANARY", &canary(&w).display().to_string());
        let script = format!(
            "name = \"hostile\"\n[[turn]]\ntext = \"x\"\ntools = [{{ name = \"Bash\", input = {{ command = {:?} }} }}]\n[[turn]]\ntext = \"Done.\"\n",
            format!("{command}; echo changed > a.txt")
        );
        w.write(&w.script(), &script);
        let run = w.ended(&[]);
        let status = w.json(&["status", &format!("{run}/0"), "--json"]);
        assert_eq!(status["fork"]["outcome"], "success", "{name}: {status}");
        let result = format!("refs/forkyard/{run}/0");
        assert_eq!(w.git(&["show", &format!("{result}:a.txt")]), "changed", "{name}");
        assert_eq!(w.git(&["merge-base", "main", &result]), w.git(&["rev-parse", "main"]), "{name}");
        assert_eq!(w.git(&["diff", "--name-only", "main", &result]), "a.txt", "{name}");
        w.git(&["fsck", "--strict", "--no-dangling"]);
        assert!(!canary(&w).exists(), "{name}");
        assert_eq!(w.git(&["status", "--porcelain"]), "", "{name}");
        assert_eq!(
            w.git(&["for-each-ref", "refs/heads", "refs/replace", "--format=%(refname)"]),
            "refs/heads/main"
        );
        let left = std::fs::read_dir(w.home().join("git/quarantine")).map(|d| d.count()).unwrap_or(0);
        assert_eq!(left, 0, "{name}");
    }
}

#[test]
fn a_submodule_of_the_repository_stays_what_it_is() {
    let w = world();
    w.git(&["update-index", "--add", "--cacheinfo", "160000,1111111111111111111111111111111111111111,sub"]);
    w.git(&["commit", "-q", "-m", "sub"]);
    w.write(
        &w.script(),
        "name = \"all\"\n[[turn]]\ntext = \"x\"\ntools = [{ name = \"Bash\", input = { command = \"echo two >> a.txt; git add -A; git commit -q -m all\" } }]\n[[turn]]\ntext = \"Done.\"\n",
    );
    let run = w.ended(&[]);
    assert_eq!(w.git(&["diff", "--name-only", "main", &format!("refs/forkyard/{run}/0")]), "a.txt");
    assert_eq!(w.git(&["log", "-1", "--format=%s", &format!("refs/forkyard/{run}/0")]), "all");
}
