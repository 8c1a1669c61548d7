//! What can go wrong for a program that uses the library.

use std::fmt;

use crate::error::CliError;
use crate::exit::Exit;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// By what the caller does about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller asked for something that can't be right. Nothing was changed; asking again fails again.
    Invalid,
    /// It could not be done: the machine, the network, a sandbox, a model.
    Failed,
}

/// What went wrong, and what to do about it. The message may hold what a repository or a remote said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
    pub hint: Option<String>,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<CliError> for Error {
    fn from(e: CliError) -> Error {
        let kind = if e.exit == Exit::Usage { ErrorKind::Invalid } else { ErrorKind::Failed };
        Error { kind, message: e.message, hint: e.hint }
    }
}

impl From<forkyard_sandbox::SandboxError> for Error {
    fn from(e: forkyard_sandbox::SandboxError) -> Error {
        CliError::from(e).into()
    }
}

impl From<forkyard_core::InvalidId> for Error {
    fn from(e: forkyard_core::InvalidId) -> Error {
        CliError::from(e).into()
    }
}
