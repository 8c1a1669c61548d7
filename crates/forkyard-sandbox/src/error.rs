//! One error for all providers, by what the caller does with it.

/// What went wrong, as far as a caller acts on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request itself is wrong: unknown image, impossible limit, bad path. Never retried.
    Invalid,
    /// The sandbox, file, snapshot or call does not exist (any more).
    NotFound,
    /// The command or file exists but may not be used that way.
    Denied,
    /// Credentials for a registry or a cloud provider were refused. Never retried.
    Auth,
    /// This machine can't give the isolation or the limit asked for. Never retried; the hint says how to get it.
    Unsupported,
    /// A newer attempt owns the sandbox.
    Stale,
    /// A limit of ours was hit: output, file size, disk.
    TooLarge,
    /// The engine, the disk or the network failed; trying again may help.
    Unavailable,
    /// The operation took longer than its limit.
    Timeout,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}{}", hint.as_ref().map(|h| format!(" ({h})")).unwrap_or_default())]
pub struct SandboxError {
    pub kind: ErrorKind,
    pub message: String,
    /// What the user can do about it.
    pub hint: Option<String>,
}

impl SandboxError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        SandboxError { kind, message: message.into(), hint: None }
    }
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    pub fn is_retryable(&self) -> bool {
        matches!(self.kind, ErrorKind::Unavailable | ErrorKind::Timeout)
    }
}
