//! One error for git on the host, by what the caller does with it.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GitErrorKind {
    /// The URL, path, branch or patch itself is wrong. Never retried.
    Invalid,
    /// No such repository, branch or commit.
    NotFound,
    /// The remote wants other credentials. Never retried.
    Auth,
    /// What is to be applied does not fit the target; nothing was changed.
    Conflict,
    /// A bound of ours was hit.
    TooLarge,
    /// Objects that git's own checks refuse. Never retried.
    Corrupt,
    /// Network, disk or a lock; trying again may help.
    Unavailable,
    /// It took longer than its limit.
    Timeout,
}

/// Longest message that is kept: a remote may say as much as it likes.
const MAX_MESSAGE_CHARS: usize = 2000;

#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}{}", hint.as_ref().map(|h| format!(" ({h})")).unwrap_or_default())]
pub struct GitError {
    pub kind: GitErrorKind,
    /// Free of control characters, whatever a remote said.
    pub message: String,
    pub hint: Option<String>,
}

impl GitError {
    pub fn new(kind: GitErrorKind, message: impl AsRef<str>) -> Self {
        let message = message
            .as_ref()
            .trim()
            .chars()
            .take(MAX_MESSAGE_CHARS)
            .map(|c| if c == '\n' || !c.is_control() { c } else { '?' })
            .collect();
        GitError { kind, message, hint: None }
    }
    pub fn invalid(message: impl AsRef<str>) -> Self {
        GitError::new(GitErrorKind::Invalid, message)
    }
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    pub fn is_retryable(&self) -> bool {
        match self.kind {
            GitErrorKind::Unavailable | GitErrorKind::Timeout => true,
            GitErrorKind::Invalid
            | GitErrorKind::NotFound
            | GitErrorKind::Auth
            | GitErrorKind::Conflict
            | GitErrorKind::TooLarge
            | GitErrorKind::Corrupt => false,
        }
    }

    /// From what git wrote to standard error.
    pub(super) fn from_stderr(what: &str, stderr: &str) -> Self {
        let has = |words: &[&str]| words.iter().any(|w| stderr.contains(w));
        let (kind, hint) = if has(&["dubious ownership"]) {
            (
                GitErrorKind::Invalid,
                Some("the repository belongs to another user; clone it, or add it to git's safe.directory"),
            )
        } else if has(&[
            "Authentication failed",
            "could not read Username",
            "could not read Password",
            "Permission denied (publickey",
            "returned error: 401",
            "returned error: 403",
            "terminal prompts disabled",
        ]) {
            (
                GitErrorKind::Auth,
                Some("set GITHUB_TOKEN, or configure a git credential helper or an ssh agent"),
            )
        } else if has(&[
            "does not appear to be a git repository",
            "not a git repository",
            "Repository not found",
            "returned error: 404",
            "couldn't find remote ref",
            "' not found",
        ]) {
            (GitErrorKind::NotFound, None)
        } else if has(&[
            "fsck error",
            "inflate",
            "corrupt",
            "bad object",
            "index-pack died",
            "hasDot",
            "gitmodules",
        ]) {
            (GitErrorKind::Corrupt, None)
        } else if has(&["transport '", "not allowed"]) {
            (GitErrorKind::Invalid, Some("use https, ssh or a local path"))
        } else {
            (GitErrorKind::Unavailable, None)
        };
        let mut error = GitError::new(kind, format!("{what}: {}", stderr.trim()));
        error.hint = hint.map(str::to_string);
        error
    }
}

pub type Result<T, E = GitError> = std::result::Result<T, E>;
