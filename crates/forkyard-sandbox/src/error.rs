//! One error for all providers, by what the caller does with it.

use forkyard_core::{Attempt, SandboxId};

use crate::{Root, SandboxSpec};

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

/// For whoever was replaced.
pub(crate) const STALE_HINT: &str = "its new owner goes on with it: leave it to that one, or attach again";
/// Where a disk of this machine is full.
pub(crate) const FULL_HINT: &str =
    "the disk is full: `forkyard gc` frees what nothing needs; FORKYARD_HOME can lie on another";

impl SandboxError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        SandboxError { kind, message: message.into(), hint: None }
    }
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// The same, unless it has one already.
    pub fn or_hint(self, hint: impl Into<String>) -> Self {
        if self.hint.is_some() { self } else { self.hint(hint) }
    }
    /// A sandbox that is not there any more, or never was.
    pub fn gone(id: &SandboxId, why: &str) -> Self {
        SandboxError::new(ErrorKind::NotFound, format!("sandbox {id} {why}"))
            .hint("`forkyard sandbox list` shows those that there are")
    }
    /// One that was there: it met its deadline, or somebody destroyed or killed it.
    pub fn ended(id: &SandboxId) -> Self {
        SandboxError::gone(id, "has ended").hint(format!(
            "`forkyard sandbox start {id}` works before its deadline, if it was not destroyed; else make another, with a longer --lifetime"
        ))
    }
    /// One that can't go on: it has no time left.
    pub(crate) fn overdue(id: &SandboxId) -> Self {
        SandboxError::gone(id, "has passed its deadline")
            .hint("make another, from a snapshot of it if there is one, with a longer --lifetime")
    }
    /// Whose owner is now another one.
    pub(crate) fn stale(id: &SandboxId, owner: Attempt, attempt: Attempt) -> Self {
        let message = format!("attempt {owner} owns sandbox {id}, {attempt} is older");
        SandboxError::new(ErrorKind::Stale, message).hint(STALE_HINT)
    }
    /// What a caller of `create` can do about what a provider said.
    pub(crate) fn of_create(self, spec: &SandboxSpec) -> Self {
        match (&spec.root, self.kind) {
            (_, ErrorKind::Invalid | ErrorKind::NotFound)
                if self.hint.is_none() && !spec.volumes.is_empty() =>
            {
                self.hint("a volume is a folder of this host that exists, at an absolute path inside")
            }
            (Root::Image(_), ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Unsupported) => {
                self.or_hint("name a registry's image, oci:FOLDER or archive:FILE that is there and whole")
            }
            (Root::Image(_), ErrorKind::Unavailable | ErrorKind::Timeout) => {
                self.or_hint("can the registry be reached? oci:FOLDER and archive:FILE need none")
            }
            (Root::Directory(_), ErrorKind::Invalid | ErrorKind::NotFound) => {
                self.or_hint("name a folder of this host by its whole path")
            }
            (Root::Snapshot(_), ErrorKind::NotFound) => {
                self.or_hint("`forkyard sandbox snapshot` takes one; they belong to one host and provider")
            }
            _ => self,
        }
    }
    pub fn is_retryable(&self) -> bool {
        matches!(self.kind, ErrorKind::Unavailable | ErrorKind::Timeout)
    }
}
