//! Work brought home: out of the sandbox as files and a pack of commits, into git as checked objects.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::task::{Base, Collected, Output, TaskError, TaskResult};
use forkyard_core::view::DiffStat;
use forkyard_core::{ForkNum, RunId, SandboxId};
use forkyard_sandbox::{ErrorKind, ExecRequest, GitExport, GlobRequest, Sandbox};
use sha2::{Digest, Sha256};

use super::verify::globs;
use super::{Hands, Job, git_error, now, sandbox_error, store_error, tail};
use crate::git::{ChangeKind, CommitId, CommitLimits, DiffSummary, Repo, WorkCommit, WorkLimits};

/// Captured files, each and in number.
const MAX_CAPTURED_BYTES: u64 = 16 << 20;
const MAX_CAPTURED: usize = 200;
/// Edited tests that are named; whoever edits more has made the point.
const MAX_NAMED_TESTS: usize = 50;
/// Of a path in a blob's name; a longer one is there by its hash.
const MAX_KEY_PATH: usize = 256;
/// Before each try to reach the sandbox that holds the work: what is away for a moment is not gone.
const ATTACH_PAUSES: [Duration; 3] = [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(4)];

/// What git inside may take to say what was committed.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
const PACK_LIMIT: Duration = Duration::from_secs(20);

impl Hands {
    pub(super) async fn collect(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        let (sandbox, from_checkpoint) = self.collectable(job, id, base).await?;
        let repo = self.repo(job).await?;
        let start = CommitId::new(&base.commit).map_err(git_error)?;
        let (commits, left_out, commit) = self.bring_home(job, &*sandbox, &repo, base).await?;
        let name = Self::fork(job).to_string();
        self.git.keep(&repo, &job.run, &name, &commit).await.map_err(git_error)?;
        let diff = self.git.diff(&repo, &start, &commit).await.map_err(git_error)?;
        let captured = self.capture(job, &*sandbox).await?;
        Ok(Output::Collected(Collected {
            commit: commit.to_string(),
            diff: DiffStat {
                files: diff.files.len() as u64,
                added: diff.lines_added,
                removed: diff.lines_removed,
            },
            from_checkpoint,
            captured,
            edited_tests: edited_tests(&diff, &job.spec.protect)?,
            commits,
            commits_left_out: left_out,
            put_back: put_back(&diff, &job.spec.protect)?,
            done: self.done_at_last(&job.run, Self::fork(job)).await,
        }))
    }

    /// Commits made inside, if they can be had, and the files as they are now on top of them. What is wrong with the commits
    /// is no reason to lose the files: these do not depend on anything that git inside says.
    async fn bring_home(
        &self,
        job: &Job,
        sandbox: &dyn Sandbox,
        repo: &Repo,
        base: &Base,
    ) -> Result<(u32, Option<String>, CommitId), TaskError> {
        let limits = WorkLimits::default();
        let start = &CommitId::new(&base.commit).map_err(git_error)?;
        let mut quarantine = self.git.quarantine(repo, start).await.map_err(git_error)?;
        let mut left_out = None;
        match commits_inside(sandbox, start).await {
            Ok(None) => {}
            Ok(Some((head, pack))) => {
                if let Err(e) = quarantine.take_commits(&head, pack, CommitLimits::default()).await {
                    left_out = Some(e.message);
                    quarantine = self.git.quarantine(repo, start).await.map_err(git_error)?;
                }
            }
            Err(why) => left_out = Some(why),
        }
        let mut tree = quarantine.tree().await.map_err(git_error)?.entries;
        let extras = self.extras(job, base).await?;
        if !extras.is_empty() {
            tree = extras.over(tree, &self.git.tree(repo, start).await.map_err(git_error)?.entries);
        }
        let export = GitExport {
            repo: None,
            base: tree,
            max_bytes: limits.max_bytes,
            max_files: limits.max_files as u64,
        };
        let work = sandbox.git_export(export).await.map_err(sandbox_error)?;
        let about = WorkCommit {
            message: format!("Forkyard {}/{}", job.run, Self::fork(job)),
            author: "forkyard".into(),
            email: "forkyard@localhost".into(),
            at: now(),
        };
        let commit = quarantine.commit(&work, &about, limits).await.map_err(git_error)?;
        Ok((u32::try_from(quarantine.commits()).unwrap_or(u32::MAX), left_out, commit))
    }

    /// The fork's sandbox; if it is gone, its last checkpoint in a sandbox of the same name.
    async fn collectable(
        &self,
        job: &Job,
        id: &SandboxId,
        base: &Base,
    ) -> Result<(Arc<dyn Sandbox>, bool), TaskError> {
        let provider = self.provider(job)?;
        for pause in ATTACH_PAUSES {
            tokio::time::sleep(pause).await;
            match provider.attach(id, job.attempt).await {
                Ok(sandbox) => return Ok((sandbox, false)),
                Err(e) if e.kind == ErrorKind::NotFound => break,
                Err(e) if matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Timeout) => {}
                Err(e) => return Err(sandbox_error(e)),
            }
        }
        provider.destroy(id).await.map_err(sandbox_error)?;
        Ok((self.create_work(job, id, base).await?, true))
    }

    /// Files that the user wants beside the diff, kept as blobs of the run.
    async fn capture(&self, job: &Job, sandbox: &dyn Sandbox) -> Result<Vec<String>, TaskError> {
        let Some((fork, spec)) = &job.fork else { return Ok(vec![]) };
        let mut captured = vec![];
        for pattern in &spec.capture {
            let found = sandbox
                .glob(GlobRequest { pattern: pattern.clone(), path: None, max: MAX_CAPTURED })
                .await
                .map_err(sandbox_error)?;
            for path in found {
                if captured.len() >= MAX_CAPTURED || captured.contains(&path) {
                    continue;
                }
                // A file that can't be read is no reason to lose the work.
                let Ok(data) = sandbox.read_file(&format!("/workspace/{path}"), 0, MAX_CAPTURED_BYTES).await
                else {
                    continue;
                };
                let key = captured_key(&job.run, *fork, &path);
                self.store.put_blob(&key, &data).await.map_err(store_error)?;
                captured.push(path);
            }
        }
        Ok(captured)
    }
}

/// What the sandbox's own git says it has committed since the base: the last commit, and a pack of all of them. None if there
/// is no such commit, or no git. All of it is hearsay until a quarantine has taken it.
async fn commits_inside(
    sandbox: &dyn Sandbox,
    base: &CommitId,
) -> Result<Option<(CommitId, Vec<u8>)>, String> {
    let ask = async |args: &[&str], input: String, limit: Duration, max: u64| {
        let argv = ["git", "--no-replace-objects", "-C", "/workspace"].iter().chain(args).copied();
        let request =
            ExecRequest { stdin: true, max_output: Some(max), ..ExecRequest::new(argv).timeout(limit) };
        let exec = sandbox.exec(request).await.map_err(|e| e.to_string())?;
        // A command that ends early does not read to the end: what it answers tells more.
        let _ = exec.control.write_stdin(input.into()).await;
        let _ = exec.control.close_stdin().await;
        exec.output().await.map_err(|e| e.to_string())
    };
    let head = ask(&["rev-parse", "--verify", "--quiet", "HEAD^{commit}"], String::new(), HEAD_LIMIT, 1024);
    let Ok((result, out, _)) = head.await else { return Ok(None) };
    let head = match CommitId::new(String::from_utf8_lossy(&out).trim_end()) {
        Ok(head) if result.exit_code == 0 => head,
        Ok(_) | Err(_) => return Ok(None),
    };
    if head == *base {
        return Ok(None);
    }
    let max = CommitLimits::default().max_pack_bytes;
    let wanted = format!("{head}\n^{base}\n");
    let args = ["pack-objects", "--revs", "--stdout", "--quiet", "--delta-base-offset", "--window=0"];
    let (result, pack, err) = ask(&args, wanted, PACK_LIMIT, max).await?;
    if result.truncated {
        return Err(format!("they have more than {max} bytes"));
    }
    if result.exit_code != 0 {
        return Err(format!("git inside failed: {}", tail(String::from_utf8_lossy(&err).trim())));
    }
    Ok(Some((head, pack)))
}

/// The blob of a captured file. It goes with its run.
pub fn captured_key(run: &RunId, fork: ForkNum, path: &str) -> String {
    if path.len() <= MAX_KEY_PATH {
        return format!("{run}/captured/{fork}/{path}");
    }
    let hash: String = Sha256::digest(path).iter().map(|b| format!("{b:02x}")).collect();
    format!("{run}/captured/{fork}/sha256:{hash}")
}

/// Editing what judges the work is pointed out to whoever chooses. A new test judges nothing but itself, and what is protected
/// was put back before the result was judged.
fn edited_tests(diff: &DiffSummary, protect: &[String]) -> Result<Vec<String>, TaskError> {
    let protected = globs(protect)?;
    let edited = diff.files.iter().filter(|f| match f.kind {
        ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::TypeChanged => {
            is_test(&f.path) || steers_tests(&f.path)
        }
        ChangeKind::Added => steers_tests(&f.path),
    });
    let paths = edited.map(|f| f.path.clone()).filter(|p| !protected.is_match(p));
    Ok(paths.take(MAX_NAMED_TESTS).collect())
}

/// What a result changed and is judged without.
fn put_back(diff: &DiffSummary, protect: &[String]) -> Result<Vec<String>, TaskError> {
    let protected = globs(protect)?;
    let paths = diff.files.iter().map(|f| f.path.clone()).filter(|p| protected.is_match(p));
    Ok(paths.take(MAX_NAMED_TESTS).collect())
}

fn is_test(path: &str) -> bool {
    let camel = path.rsplit('/').next().and_then(|n| n.split('.').next()).unwrap_or_default();
    let camel = ["Test", "Tests", "Spec"].iter().any(|end| camel.len() > end.len() && camel.ends_with(end));
    let path = path.to_ascii_lowercase();
    let dir = ["tests/", "test/", "spec/", "specs/", "__tests__/", "testdata/"]
        .iter()
        .any(|d| path.starts_with(d) || path.contains(&format!("/{d}")));
    let name = path.rsplit('/').next().unwrap_or(&path);
    let stem = name.rsplit_once('.').map_or(name, |(s, _)| s);
    dir || camel
        || ["test", "tests"].contains(&stem)
        || stem.starts_with("test_")
        || [".test", "_test", "_tests", "-test", ".spec", "_spec", "-spec"]
            .iter()
            .any(|end| stem.ends_with(end))
}

/// Files that decide which tests run and how.
fn steers_tests(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let stem = name.split('.').next().unwrap_or(name);
    ["conftest.py", "pytest.ini", "tox.ini", "noxfile.py", "karma.conf.js", "phpunit.xml", ".rspec"]
        .contains(&name)
        || ["jest", "vitest", "playwright", "cypress"].contains(&stem) && name.contains(".config.")
        || name.starts_with(".mocharc")
        || path == ".config/nextest.toml"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::git::FileChange;

    #[test]
    fn tests_are_known_by_their_names() {
        for yes in [
            "tests/a.rs",
            "src/test_x.py",
            "a/b_test.go",
            "x.test.ts",
            "pkg/__tests__/y.js",
            "spec/z.rb",
            "src/test/java/FooTest.java",
            "FooSpec.scala",
            "src/tests.rs",
            "a/testdata/x",
        ] {
            assert!(is_test(yes), "{yes}");
        }
        for no in ["src/latest.rs", "contest/a.c", "src/attestation.go", "src/inspec.rb", "a/Latest.kt"] {
            assert!(!is_test(no), "{no}");
        }
        for yes in ["conftest.py", "a/conftest.py", "jest.config.ts", ".mocharc.json", "pytest.ini"] {
            assert!(steers_tests(yes), "{yes}");
        }
        for no in ["src/jest.rs", "config.toml", "my-conftest.py.txt"] {
            assert!(!steers_tests(no), "{no}");
        }
    }

    #[test]
    fn edited_tests_are_named_unless_they_are_protected_or_new() {
        let file = |path: &str, kind| FileChange {
            path: path.into(),
            kind,
            lines: None,
            old_mode: 0o100_644,
            new_mode: 0o100_644,
        };
        let diff = DiffSummary {
            files: vec![
                file("src/lib.rs", ChangeKind::Modified),
                file("tests/new.rs", ChangeKind::Added),
                file("tests/old.rs", ChangeKind::Modified),
                file("tests/gone.rs", ChangeKind::Deleted),
                file("conftest.py", ChangeKind::Added),
            ],
            ..DiffSummary::default()
        };
        assert_eq!(edited_tests(&diff, &[]).unwrap(), ["tests/old.rs", "tests/gone.rs", "conftest.py"]);
        assert_eq!(edited_tests(&diff, &["tests/**".into()]).unwrap(), ["conftest.py"]);
        assert_eq!(put_back(&diff, &[]).unwrap(), Vec::<String>::new());
        let put_back = put_back(&diff, &["tests/**".into()]).unwrap();
        assert_eq!(put_back, ["tests/new.rs", "tests/old.rs", "tests/gone.rs"]);
    }
}
