use std::os::unix::fs::PermissionsExt;

use forkyard_engine::git::{Git, GitErrorKind, WorkLimits};

use super::*;

fn url(w: &World) -> String {
    format!("file://{}", w.user().display())
}

#[tokio::test]
async fn the_default_branch_a_branch_a_tag_and_a_commit_are_fetched() {
    let w = World::new();
    let first = w.head().await;
    w.raw(&["tag", "-a", "v1", "-m", "x"]);
    w.raw(&["checkout", "-q", "-b", "side"]);
    w.write("more", "x");
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "more"]);
    let second = w.head().await;
    w.raw(&["checkout", "-q", "main"]);
    w.raw(&["config", "uploadpack.allowAnySHA1InWant", "true"]);
    for (rev, commit, branch) in [
        (None, &first, Some("main")),
        (Some("side"), &second, Some("side")),
        (Some("v1"), &first, None),
        (Some(second.as_str()), &second, None),
    ] {
        let (repo, r) = w.git.fetch(&url(&w), rev).await.unwrap();
        assert_eq!((&r.commit, r.branch.as_deref()), (commit, branch), "{rev:?}");
        assert!(w.git.has(&repo, commit).await.unwrap());
        assert!(w.git.file(&repo, commit, "README.md", 100).await.unwrap().is_some());
    }
    let e = w.git.fetch(&url(&w), Some("nope")).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::NotFound, "{e}");
    let e = w.git.fetch(&format!("{}/none", url(&w)), None).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::NotFound, "{e}");
}

#[tokio::test]
async fn a_branch_that_moved_is_fetched_again_and_the_old_commit_stays() {
    let w = World::new();
    let (repo, old) = w.git.fetch(&url(&w), Some("main")).await.unwrap();
    w.write("README.md", "changed\n");
    w.raw(&["commit", "-q", "-a", "-m", "second"]);
    let (_, new) = w.git.fetch(&url(&w), Some("main")).await.unwrap();
    assert_ne!(old.commit, new.commit);
    for r in [&old, &new] {
        assert!(w.git.has(&repo, &r.commit).await.unwrap());
    }
}

/// A longer past than anybody fetches.
fn more_commits(w: &World, count: usize) {
    let mut stream = String::new();
    for i in 0..count {
        stream
            .push_str("commit refs/heads/main\ncommitter U <u@example.com> 1700000000 +0000\ndata 4\nmore\n");
        if i == 0 {
            stream.push_str("from refs/heads/main^0\n");
        }
        stream.push_str(&format!("M 100644 inline README.md\ndata <<END\n{i}\nEND\n\n"));
    }
    let mut child = Command::new("git")
        .args(["fast-import", "--quiet"])
        .current_dir(w.user())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), stream.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    w.raw(&["reset", "-q", "--hard"]);
}

#[tokio::test]
async fn work_on_a_shallow_cache_is_committed_compared_and_applied() {
    let w = World::new();
    more_commits(&w, 1100);
    let (cache, r) = w.git.fetch(&url(&w), None).await.unwrap();
    assert!(
        w.dir
            .path()
            .join("home/git")
            .read_dir()
            .unwrap()
            .flatten()
            .any(|e| e.path().join("shallow").exists())
    );
    let diff = work(vec![changed("a", "b\n")], &[]);
    let commit = w.git.commit_work(&cache, &r.commit, &diff, &about(), WorkLimits::default()).await.unwrap();
    w.git.keep(&cache, &run_id(), "0", &commit).await.unwrap();
    assert_eq!(w.git.diff(&cache, &r.commit, &commit).await.unwrap().files.len(), 1);
    let target = w.repo().await;
    w.git.apply_branch(&cache, &r.commit, &commit, &target, "got").await.unwrap();
    assert_eq!(w.raw(&["rev-list", "--count", "got"]), "1102", "the past that was not fetched included");
}

#[tokio::test]
async fn many_fetches_at_once_share_one_cache() {
    let w = World::new();
    let other = Git::new(config(w.dir.path()));
    let url = url(&w);
    let fetches = (0..6).map(|i| {
        let (git, url) = (if i % 2 == 0 { w.git.clone() } else { other.clone() }, url.clone());
        tokio::spawn(async move { git.fetch(&url, None).await.unwrap() })
    });
    let mut results = Vec::new();
    for f in fetches {
        results.push(f.await.unwrap());
    }
    assert!(results.windows(2).all(|p| p[0] == p[1]));
    let caches = w
        .dir
        .path()
        .join("home/git")
        .read_dir()
        .unwrap()
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("repo-"));
    assert_eq!(caches.count(), 2, "a cache and its lock");
}

#[tokio::test]
async fn odd_urls_and_branches_start_nothing() {
    let w = World::new();
    for bad in ["ext::touch canary", "--upload-pack=touch canary", "file://x\ny", "fd::0"] {
        assert_eq!(w.git.fetch(bad, None).await.unwrap_err().kind, GitErrorKind::Invalid, "{bad}");
    }
    for bad in ["--upload-pack=touch canary", "-b", "a..b", "x:refs/heads/main"] {
        assert_eq!(w.git.fetch(&url(&w), Some(bad)).await.unwrap_err().kind, GitErrorKind::Invalid, "{bad}");
    }
}

/// Puts a program called git first on PATH.
fn with_fake_git(w: &World, script: &str, change: impl FnOnce(&mut GitConfig)) -> Git {
    let bin = w.dir.path().join("bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join("git"), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(bin.join("git"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut c = config(w.dir.path());
    c.env.insert("PATH".into(), format!("{}:/usr/local/bin:/usr/bin:/bin", bin.display()));
    change(&mut c);
    Git::new(c)
}

#[tokio::test]
async fn the_token_is_in_no_argument_and_only_where_the_network_is() {
    let w = World::new();
    let log = w.dir.path().join("log");
    let real = which_git();
    let script = format!("{{ echo \"ARGS $*\"; env; echo; }} >> {}\nexec {real} \"$@\"", log.display());
    let git = with_fake_git(&w, &script, |c| {
        c.github_token = Some("hunter2".into());
        c.env.insert("ANTHROPIC_API_KEY".into(), "hunter3".into());
    });
    let (repo, r) = git.fetch(&url(&w), None).await.unwrap();
    git.tree(&repo, &r.commit).await.unwrap();
    let log = fs::read_to_string(log).unwrap();
    assert!(!log.contains("hunter3"), "only what git needs is passed on");
    for call in log.split("\n\n") {
        let args = call.lines().find(|l| l.starts_with("ARGS ")).unwrap_or_default();
        assert!(!args.contains("hunter2"), "{args}");
        let network = args.starts_with("ARGS ls-remote") || args.starts_with("ARGS fetch");
        assert_eq!(call.contains("FORKYARD_GIT_TOKEN=hunter2"), network, "{args}");
        if !network && !args.is_empty() {
            assert!(call.contains("GIT_ALLOW_PROTOCOL=none"), "{args}");
        }
    }
}

#[tokio::test]
async fn the_token_is_given_to_github_and_to_nobody_else() {
    let w = World::new();
    let log = w.dir.path().join("log");
    // Asks git's own credential machinery, in the very environment that a fetch gets.
    let ask = |host: &str| {
        format!("printf 'protocol=https\\nhost={host}\\n\\n' | {} credential fill 2>&1", which_git())
    };
    let script = format!(
        "case \"$1\" in ls-remote) {{ {}; echo ---; {}; }} >> {}; exit 1;; esac\nexec {} \"$@\"",
        ask("github.com"),
        ask("evil.example"),
        log.display(),
        which_git()
    );
    let git = with_fake_git(&w, &script, |c| c.github_token = Some("hunter2".into()));
    git.fetch(&url(&w), None).await.unwrap_err();
    let log = fs::read_to_string(log).unwrap();
    let (github, evil) = log.split_once("---").unwrap();
    assert!(github.contains("password=hunter2"), "{github}");
    assert!(!evil.contains("hunter2"), "{evil}");
}

fn which_git() -> String {
    ["/usr/local/bin/git", "/usr/bin/git", "/bin/git"]
        .iter()
        .find(|p| Path::new(p).exists())
        .unwrap()
        .to_string()
}

#[tokio::test]
async fn a_git_that_hangs_is_ended_with_its_children() {
    let w = World::new();
    let pids = w.dir.path().join("pids");
    let script = format!("sleep 1000 & echo $! >> {}; wait", pids.display());
    let git = with_fake_git(&w, &script, |c| c.timeout = Duration::from_millis(300));
    let e = git.prepare().await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::Timeout, "{e}");
    let pid = fs::read_to_string(&pids).unwrap().trim().to_string();
    // Gone, or waiting to be reaped by whoever adopted it.
    let ended = || fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |s| s.contains(") Z "));
    while !ended() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn no_git_at_all_says_what_to_install() {
    let w = World::new();
    let mut c = config(w.dir.path());
    c.env.insert("PATH".into(), "/nonexistent".into());
    let e = Git::new(c).prepare().await.unwrap_err();
    assert!(e.to_string().contains("install git"), "{e}");
}
