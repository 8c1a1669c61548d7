//! Running git with nothing around it that a repository, a user's configuration or a remote could use to run something else.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, prlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::error::{GitError, GitErrorKind, Result};

/// Most that one git command may answer with: a listing of a million files fits.
pub const MAX_OUTPUT_BYTES: u64 = 256 << 20;
/// What git reads and packs for forks that are done must not hold up those that begin, or agents at work.
const YIELDING: i32 = 10;
/// Enough of standard error for the reason.
const MAX_STDERR_BYTES: u64 = 64 << 10;

/// What git on the host needs from outside.
#[derive(Debug, Clone)]
pub struct GitConfig {
    /// Where caches and scratch repositories live.
    pub dir: PathBuf,
    /// The user's environment: only PATH, HOME, ssh's and proxies' variables of it reach git.
    pub env: BTreeMap<String, String>,
    /// For https://github.com alone.
    pub github_token: Option<String>,
    /// Of one command.
    pub timeout: Duration,
}

/// Variables of the user that git may need to reach a remote.
const NETWORK_ENV: &[&str] = &[
    "HOME",
    "SSH_AUTH_SOCK",
    "XDG_CONFIG_HOME",
    "http_proxy",
    "https_proxy",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "GIT_SSL_CAINFO",
];

/// Switched off or pinned in every repository, by the scope that no repository's own config can override.
const PINNED: &[(&str, &str)] = &[
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.untrackedCache", "false"),
    ("core.attributesFile", "/dev/null"),
    ("core.pager", "cat"),
    ("core.alternateRefsCommand", "true"),
    ("core.protectHFS", "true"),
    ("core.protectNTFS", "true"),
    ("core.logAllRefUpdates", "false"),
    ("commit.gpgSign", "false"),
    ("diff.ignoreSubmodules", "all"),
    ("fetch.recurseSubmodules", "false"),
    ("fetch.writeCommitGraph", "false"),
    ("gc.auto", "0"),
    ("gc.autoDetach", "false"),
    ("maintenance.auto", "false"),
    ("push.recurseSubmodules", "no"),
    ("submodule.recurse", "false"),
    ("transfer.fsckObjects", "true"),
    ("transfer.bundleURI", "false"),
    ("uploadpack.allowFilter", "false"),
];

/// Whose configuration counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Around {
    /// Nobody's: objects alone.
    Nothing,
    /// The user's own, for work in the user's own tree: ignore files, line endings, filters.
    User,
    /// Nobody's, but the remote is reached with the user's credentials.
    Network { protocol: &'static str },
}

/// One git command.
#[derive(Debug, Clone)]
pub(super) struct Call {
    args: Vec<OsString>,
    env: Vec<(&'static str, OsString)>,
    config: Vec<(String, String)>,
    cwd: Option<PathBuf>,
    stdin: Vec<u8>,
    around: Around,
    max_output: u64,
    resources: Option<Resources>,
}

/// What a process that reads hostile data may use of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resources {
    pub memory_bytes: u64,
    pub file_bytes: u64,
    pub cpu_s: u64,
}

impl Resources {
    /// For data that is bounded before it is unpacked, and not after.
    pub const QUARANTINE: Resources = Resources { memory_bytes: 1 << 30, file_bytes: 256 << 20, cpu_s: 60 };

    /// Set from outside, before the process has read a byte of what it is given.
    fn set(self, pid: Pid) -> std::io::Result<()> {
        for (resource, value) in [
            (Resource::Data, self.memory_bytes),
            (Resource::Fsize, self.file_bytes),
            (Resource::Cpu, self.cpu_s),
            (Resource::Core, 0),
        ] {
            let limit = Rlimit { current: Some(value), maximum: Some(value) };
            prlimit(Some(pid), resource, limit)?;
        }
        Ok(())
    }
}

pub(super) fn git<I: Into<OsString>>(args: impl IntoIterator<Item = I>) -> Call {
    Call {
        args: args.into_iter().map(Into::into).collect(),
        env: Vec::new(),
        config: Vec::new(),
        cwd: None,
        stdin: Vec::new(),
        around: Around::Nothing,
        max_output: MAX_OUTPUT_BYTES,
        resources: None,
    }
}

impl Call {
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }
    pub fn args<I: Into<OsString> + Clone>(mut self, args: impl AsRef<[I]>) -> Self {
        self.args.extend(args.as_ref().iter().cloned().map(Into::into));
        self
    }
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.env.push((name, value.into()));
        self
    }
    pub fn config(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.push((key.into(), value.into()));
        self
    }
    pub fn cwd(mut self, dir: &Path) -> Self {
        self.cwd = Some(dir.to_path_buf());
        self
    }
    pub fn stdin(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.stdin = data.into();
        self
    }
    pub fn around(mut self, around: Around) -> Self {
        self.around = around;
        self
    }
    pub fn resources(mut self, resources: Resources) -> Self {
        self.resources = Some(resources);
        self
    }
    pub fn max_output(mut self, bytes: u64) -> Self {
        self.max_output = bytes;
        self
    }
    fn name(&self) -> String {
        format!("git {}", self.args.first().map(|a| a.to_string_lossy().into_owned()).unwrap_or_default())
    }
}

pub(super) struct Answer {
    pub ok: bool,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_string()
    }
}

/// Runs git. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Git {
    pub(super) config: Arc<GitConfig>,
}

/// Ends the whole group of processes when it is dropped: a cancelled fetch must not leave its helpers behind.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0.take() {
            // Already gone is fine.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Git {
    pub fn new(config: GitConfig) -> Self {
        Git { config: Arc::new(config) }
    }

    /// An error unless git says that it worked.
    pub(super) async fn run(&self, call: Call) -> Result<Answer> {
        let name = call.name();
        let answer = self.try_run(call).await?;
        if answer.ok { Ok(answer) } else { Err(GitError::from_stderr(&name, &answer.stderr)) }
    }

    /// Whatever git says.
    pub(super) async fn try_run(&self, call: Call) -> Result<Answer> {
        let name = call.name();
        let max = call.max_output;
        let input = call.stdin.clone();
        let (mut child, mut group) = self.spawn(&call)?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        let work = async {
            let write = async {
                // A command that fails early closes its end: its status tells more than our broken pipe.
                let _ = stdin.write_all(&input).await;
                drop(stdin);
            };
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let read_out = async { stdout.take(max + 1).read_to_end(&mut out).await.map(|n| n as u64) };
            let read_err = async {
                let mut stderr = stderr;
                (&mut stderr).take(MAX_STDERR_BYTES).read_to_end(&mut err).await?;
                tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await
            };
            let ((), read, _) = tokio::join!(write, read_out, read_err);
            if read.map_err(io_error)? > max {
                return Err(GitError::new(
                    GitErrorKind::TooLarge,
                    format!("{name} answered with more than {max} bytes"),
                ));
            }
            let status = child.wait().await.map_err(io_error)?;
            Ok(Answer {
                ok: status.success(),
                stdout: out,
                stderr: String::from_utf8_lossy(&err).into_owned(),
            })
        };
        let limit = self.config.timeout;
        let answer = tokio::time::timeout(limit, work).await.map_err(|_| {
            GitError::new(GitErrorKind::Timeout, format!("{name} took longer than {} s", limit.as_secs()))
        })??;
        group.0 = None;
        Ok(answer)
    }

    /// A command whose ends the caller holds, and the guard that ends it.
    pub(super) fn spawn_held(&self, call: &Call) -> Result<(Child, impl Drop + Send + use<>)> {
        self.spawn(call)
    }

    fn spawn(&self, call: &Call) -> Result<(Child, Group)> {
        let user = &self.config.env;
        let mut command = Command::new("git");
        command.args(&call.args).env_clear();
        command.env("PATH", user.get("PATH").map_or("/usr/local/bin:/usr/bin:/bin", String::as_str));
        for (name, value) in [
            ("LC_ALL", "C"),
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_ATTR_NOSYSTEM", "1"),
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_ASKPASS", "true"),
            ("SSH_ASKPASS", "true"),
            ("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oForwardAgent=no -oClearAllForwardings=yes"),
            ("GIT_NO_REPLACE_OBJECTS", "1"),
            ("GIT_NO_LAZY_FETCH", "1"),
            ("GIT_GRAFT_FILE", "/dev/null"),
            ("GIT_LITERAL_PATHSPECS", "1"),
            ("GIT_OPTIONAL_LOCKS", "0"),
            ("GIT_ADVICE", "0"),
            ("GIT_EDITOR", "false"),
            ("GIT_PAGER", "cat"),
        ] {
            command.env(name, value);
        }
        let mut config: Vec<(String, String)> =
            PINNED.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect();
        let allow = match call.around {
            Around::Nothing => {
                command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("HOME", "/nonexistent");
                "none"
            }
            Around::User => {
                command.envs(["HOME", "XDG_CONFIG_HOME"].iter().filter_map(|n| Some((n, user.get(*n)?))));
                // The user's own attributes and lists of ignored files count in the user's own tree.
                config.retain(|(k, _)| k != "core.attributesFile");
                "none"
            }
            Around::Network { protocol } => {
                command.env("GIT_CONFIG_GLOBAL", "/dev/null");
                command.envs(NETWORK_ENV.iter().filter_map(|n| Some((n, user.get(*n)?))));
                if let Some(token) = &self.config.github_token {
                    // The helper is asked for this host alone; the token is in no argument and in no file.
                    command.env("FORKYARD_GIT_TOKEN", token);
                    config.push((
                        "credential.https://github.com.helper".into(),
                        "!f() { test \"$1\" = get && echo username=x-access-token && echo \"password=$FORKYARD_GIT_TOKEN\"; }; f"
                            .into(),
                    ));
                }
                protocol
            }
        };
        command.env("GIT_ALLOW_PROTOCOL", allow);
        command.envs(call.env.iter().map(|(name, value)| (name, value)));
        config.extend(call.config.iter().cloned());
        command.env("GIT_CONFIG_COUNT", config.len().to_string());
        for (i, (key, value)) in config.iter().enumerate() {
            command.env(format!("GIT_CONFIG_KEY_{i}"), key).env(format!("GIT_CONFIG_VALUE_{i}"), value);
        }
        command
            .current_dir(call.cwd.as_deref().unwrap_or(&self.config.dir))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let child = command.spawn().map_err(|e| {
            if e.kind() == std::io::ErrorKind::NotFound {
                GitError::new(GitErrorKind::Unavailable, "git could not be started")
                    .hint("install git, version 2.39 or newer")
            } else {
                io_error(e)
            }
        })?;
        let pid = child.id().and_then(|id| Pid::from_raw(id as i32));
        let group = Group(pid);
        if let Some(pid) = pid {
            let _ = rustix::process::setpriority_process(Some(pid), YIELDING);
        }
        if let (Some(resources), Some(pid)) = (call.resources, pid) {
            resources.set(pid).map_err(io_error)?;
        }
        Ok((child, group))
    }

    /// Helpers for credentials that the user has configured.
    pub(super) async fn user_credentials(&self) -> Vec<(String, String)> {
        let call =
            git(["config", "--global", "--null", "--get-regexp", "^credential\\."]).around(Around::User);
        let Ok(answer) = self.try_run(call).await else { return Vec::new() };
        String::from_utf8_lossy(&answer.stdout)
            .split_terminator('\0')
            .filter_map(|entry| entry.split_once('\n').map(|(k, v)| (k.to_string(), v.to_string())))
            .collect()
    }
}

pub(super) fn io_error(e: std::io::Error) -> GitError {
    GitError::new(GitErrorKind::Unavailable, e.to_string())
}
