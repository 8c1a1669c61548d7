//! Repositories that try to run something on the host. Each attack leaves a file if it works.

use std::os::unix::fs::PermissionsExt;

use forkyard_engine::git::{GitErrorKind, WorkLimits};

use super::*;

/// A repository with every known way to run a program in its own config, attributes and hooks.
fn hostile() -> (World, PathBuf) {
    let w = World::new();
    let canary = w.dir.path().join("canary");
    let run = format!("touch {}", canary.display());
    let script = w.dir.path().join("evil.sh");
    fs::write(&script, format!("#!/bin/sh\n{run}\ncat\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    w.write(".gitattributes", "* diff=evil filter=evil merge=evil\n*.md textconv=evil\n");
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "attributes"]);
    for (key, value) in [
        ("core.fsmonitor", script.as_str()),
        ("core.sshCommand", &script),
        ("core.pager", &script),
        ("core.editor", &script),
        ("core.askPass", &script),
        ("core.alternateRefsCommand", &script),
        ("core.gitProxy", &script),
        ("diff.external", &script),
        ("diff.evil.command", &script),
        ("diff.evil.textconv", &script),
        ("merge.evil.driver", &script),
        ("gpg.program", &script),
        ("commit.gpgSign", "true"),
        ("credential.helper", &script),
        ("protocol.ext.allow", "always"),
        ("protocol.allow", "always"),
        ("uploadpack.packObjectsHook", &script),
        ("extensions.partialClone", "evil"),
        ("remote.evil.url", &format!("ext::{script}")),
        ("remote.evil.promisor", "true"),
        ("tar.tar.gz.command", &script),
    ] {
        w.raw(&["config", key, value]);
    }
    let hooks = w.user().join(".git/hooks");
    fs::create_dir_all(&hooks).unwrap();
    w.raw(&["config", "core.hooksPath", hooks.to_str().unwrap()]);
    for hook in [
        "reference-transaction",
        "post-index-change",
        "pre-auto-gc",
        "post-checkout",
        "update",
        "post-rewrite",
        "fsmonitor-watchman",
        "pre-commit",
        "post-update",
    ] {
        fs::copy(&script, hooks.join(hook)).unwrap();
    }
    fs::write(w.user().join(".git/info/attributes"), "* diff=evil filter=evil\n").unwrap();
    let _ = fs::remove_file(&canary);
    (w, canary)
}

#[tokio::test]
async fn nothing_of_a_hostile_repository_runs() {
    let (w, canary) = hostile();
    let (repo, base) = (w.repo().await, w.head().await);
    w.git.resolve(&repo, Some("main")).await.unwrap();
    let tree = w.git.tree(&repo, &base).await.unwrap();
    let mut out = Vec::new();
    w.git.archive(&repo, &tree.entries, 0, &mut out).await.unwrap();
    let diff = work(
        vec![
            changed("src/lib.rs", "x\n"),
            changed("README.md", "y\n"),
            changed(".gitattributes", "* diff=other\n"),
        ],
        &[],
    );
    let commit = w.git.commit_work(&repo, &base, &diff, &about(), WorkLimits::default()).await.unwrap();
    w.git.keep(&repo, &run_id(), "0", &commit).await.unwrap();
    assert_eq!(w.git.diff(&repo, &base, &commit).await.unwrap().files.len(), 3);
    let patch = w.git.patch(&repo, &base, &commit, 1 << 20).await.unwrap();
    assert!(String::from_utf8_lossy(&patch).contains("-hello\n+y\n"));
    w.git.apply_branch(&repo, &base, &commit, &repo, "got").await.unwrap();
    w.git.drop_run(&repo, &run_id()).await.unwrap();
    let url = format!("file://{}", w.user().display());
    w.git.fetch(&url, None).await.unwrap();
    // A missing object must not be asked for elsewhere.
    let missing = CommitId::new(&"1".repeat(40)).unwrap();
    assert!(!w.git.has(&repo, &missing).await.unwrap());
    assert_eq!(w.git.resolve(&repo, Some(missing.as_str())).await.unwrap_err().kind, GitErrorKind::NotFound);
    assert!(!canary.exists());
}

#[tokio::test]
async fn in_the_users_own_tree_hooks_and_monitors_stay_off() {
    let (w, canary) = hostile();
    let repo = w.repo().await;
    let base = w.head().await;
    w.write("untracked", "x\n");
    assert!(w.git.is_dirty(&repo).await.unwrap());
    w.git.commit_dirty(&repo, Timestamp(0)).await.unwrap();
    let commit = w
        .git
        .commit_work(&repo, &base, &work(vec![changed("new", "x\n")], &[]), &about(), WorkLimits::default())
        .await
        .unwrap();
    let patch = w.git.patch(&repo, &base, &commit, 1 << 20).await.unwrap();
    w.git.apply_work_tree(&repo, patch).await.unwrap();
    assert!(!canary.exists());
}

#[tokio::test]
async fn the_attacks_would_have_worked() {
    // If the plain git does not fall for it, the tests above prove nothing.
    let (w, canary) = hostile();
    w.write("README.md", "changed\n");
    let _ = Command::new("git").args(["status"]).current_dir(w.user()).output().unwrap();
    assert!(canary.exists());
}

#[tokio::test]
async fn replaced_objects_do_not_change_what_is_seen() {
    let w = World::new();
    let (repo, base) = (w.repo().await, w.head().await);
    let diff = work(vec![changed("README.md", "evil\n")], &[]);
    let commit = w.git.commit_work(&repo, &base, &diff, &about(), WorkLimits::default()).await.unwrap();
    w.raw(&["replace", commit.as_str(), base.as_str()]);
    assert_eq!(w.git.diff(&repo, &base, &commit).await.unwrap().files.len(), 1);
    assert_eq!(w.git.file(&repo, &commit, "README.md", 100).await.unwrap().unwrap(), b"evil\n");
}

#[tokio::test]
async fn replaced_objects_do_not_change_where_a_run_starts() {
    let w = World::new();
    let (repo, first) = (w.repo().await, w.head().await);
    w.raw(&["tag", "-a", "v1", "-m", "one"]);
    w.write("README.md", "second\n");
    w.raw(&["commit", "-q", "-a", "-m", "second"]);
    let second = w.head().await;
    w.raw(&["tag", "-a", "v2", "-m", "two"]);
    w.raw(&["replace", &w.raw(&["rev-parse", "v1"]), &w.raw(&["rev-parse", "v2"])]);
    assert_eq!(w.raw(&["rev-parse", "v1^{commit}"]), second.as_str(), "git itself believes it");
    assert_eq!(w.git.resolve(&repo, Some("v1")).await.unwrap().commit, first);
    // A tree that is as HEAD says is clean, whatever HEAD is replaced by.
    w.raw(&["replace", second.as_str(), first.as_str()]);
    assert_eq!(w.git.commit_dirty(&repo, Timestamp(0)).await.unwrap(), second);
}

#[tokio::test]
async fn attributes_and_config_of_a_repository_do_not_change_what_is_seen() {
    let w = World::new();
    let (repo, base) = (w.repo().await, w.head().await);
    fs::create_dir_all(w.user().join(".git/info")).unwrap();
    fs::write(w.user().join(".git/info/attributes"), "* binary\n").unwrap();
    w.raw(&["config", "diff.noprefix", "true"]);
    w.raw(&["config", "diff.context", "0"]);
    w.raw(&["config", "core.quotePath", "false"]);
    let diff = work(vec![changed("src/lib.rs", "one\n2\nthree\n")], &[]);
    let commit = w.git.commit_work(&repo, &base, &diff, &about(), WorkLimits::default()).await.unwrap();
    let seen = w.git.diff(&repo, &base, &commit).await.unwrap();
    assert_eq!((seen.lines_added, seen.lines_removed), (1, 1));
    let patch = w.git.patch(&repo, &base, &commit, 1 << 20).await.unwrap();
    let patch = String::from_utf8(patch).unwrap();
    assert!(patch.contains("--- a/src/lib.rs\n") && patch.contains("\n one\n-two\n+2\n three\n"), "{patch}");
}

#[tokio::test]
async fn messages_of_a_remote_reach_no_terminal_raw() {
    let w = World::new();
    let hostile = w.dir.path().join("\x1b]0;evil\x07");
    let e = w.git.open(&hostile).await.unwrap_err();
    assert!(!e.to_string().chars().any(|c| c.is_control()), "{e:?}");
}

#[tokio::test]
async fn a_repository_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        // Only root can give a folder away.
        return;
    }
    let w = World::new();
    let status = Command::new("chown").args(["-R", "65534"]).arg(w.user()).status().unwrap();
    assert!(status.success());
    let e = w.git.open(&w.user()).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::Invalid, "{e}");
    assert!(e.to_string().contains("safe.directory"), "{e}");
}
