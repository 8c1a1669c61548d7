//! Errors as users see them: what is wrong, and what to do about it.

use clap::error::ErrorKind;
use forkyard_core::InvalidId;
use forkyard_core::spec::InvalidSpec;
use forkyard_engine::git::{GitError, GitErrorKind};
use forkyard_sandbox::SandboxError;
use serde_json::json;

use crate::exit::Exit;
use crate::render::{Color, Style, plain_block};
use crate::settings::SettingsError;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CliError {
    pub exit: Exit,
    pub message: String,
    pub hint: Option<String>,
}

pub type Result<T, E = CliError> = std::result::Result<T, E>;

impl CliError {
    /// The user wrote something that can't be right.
    pub fn usage(message: impl Into<String>) -> CliError {
        CliError { exit: Exit::Usage, message: message.into(), hint: None }
    }
    pub fn failure(message: impl Into<String>) -> CliError {
        CliError { exit: Exit::Failure, message: message.into(), hint: None }
    }
    pub fn hint(mut self, hint: impl Into<String>) -> CliError {
        self.hint = Some(hint.into());
        self
    }

    /// For standard error. The message may hold what a repository or a remote said.
    pub fn render(&self, style: &Style) -> String {
        let mut out = format!("{} {}\n", style.paint(Color::Red, "error:"), plain_block(&self.message));
        if let Some(hint) = &self.hint {
            out.push_str(&format!("{} {}\n", style.paint(Color::Cyan, "hint:"), plain_block(hint)));
        }
        out
    }

    /// For `--json`, on standard output.
    pub fn json(&self) -> serde_json::Value {
        json!({ "schema": "forkyard.error/1", "error": self.message, "hint": self.hint, "exit_code": self.exit.code() })
    }
}

impl From<SettingsError> for CliError {
    fn from(e: SettingsError) -> CliError {
        CliError::usage(e.to_string())
    }
}

/// A command line that could not be understood.
impl From<&clap::Error> for CliError {
    fn from(e: &clap::Error) -> CliError {
        let text = e.render().to_string();
        let said = match e.kind() {
            // All that is said then is the help.
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "the command is not complete",
            _ => text.split("\n\n").next().unwrap_or_default(),
        };
        CliError::usage(said.trim_start_matches("error: ").trim()).hint("--help says what can be written")
    }
}

impl From<InvalidSpec> for CliError {
    fn from(e: InvalidSpec) -> CliError {
        CliError::usage(e.to_string())
    }
}

impl From<InvalidId> for CliError {
    fn from(e: InvalidId) -> CliError {
        let hint = match e.what {
            "sandbox id" => "`forkyard sandbox list` shows the sandboxes",
            "snapshot id" => "`forkyard sandbox snapshots` shows the snapshots",
            _ => "`forkyard list` shows the runs",
        };
        CliError::usage(e.to_string()).hint(hint)
    }
}

impl From<GitError> for CliError {
    fn from(e: GitError) -> CliError {
        let exit = match e.kind {
            GitErrorKind::Invalid | GitErrorKind::NotFound => Exit::Usage,
            GitErrorKind::Auth
            | GitErrorKind::Conflict
            | GitErrorKind::TooLarge
            | GitErrorKind::Corrupt
            | GitErrorKind::Unavailable
            | GitErrorKind::Timeout => Exit::Failure,
        };
        CliError { exit, message: e.message, hint: e.hint }
    }
}

impl From<SandboxError> for CliError {
    fn from(e: SandboxError) -> CliError {
        let exit = if e.kind == forkyard_sandbox::ErrorKind::Invalid { Exit::Usage } else { Exit::Failure };
        CliError { exit, message: e.message, hint: e.hint }
    }
}

impl From<std::io::Error> for CliError {
    fn from(e: std::io::Error) -> CliError {
        CliError::failure(e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do_and_steer_no_terminal() {
        let e = CliError::failure("a remote said \x1b[2Jboo\nand more").hint("try this");
        assert_eq!(e.render(&Style::PIPE), "error: a remote said \\x1b[2Jboo\nand more\nhint: try this\n");
        assert_eq!(e.json()["exit_code"], 1);
        let e = CliError::from(InvalidId { what: "run id", value: "A".into(), max: 40 });
        assert_eq!(e.exit, Exit::Usage);
        let shows = |e: InvalidId| CliError::from(e).hint.unwrap();
        assert!(shows(forkyard_core::RunId::new("A").unwrap_err()).contains("`forkyard list`"));
        assert!(shows(forkyard_core::SandboxId::new("A").unwrap_err()).contains("`forkyard sandbox list`"));
        assert!(shows(forkyard_core::SnapshotId::new("A").unwrap_err()).contains("sandbox snapshots`"));
    }
}
