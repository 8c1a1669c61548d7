//! What the program ends with.

use std::process::ExitCode;

/// The documented exit statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It worked; of a run: at least one fork succeeded, or with `--verify` is verified.
    Success,
    /// It did not; of a run: no fork succeeded.
    Failure,
    /// The command line, a setting or a specification is wrong; nothing was changed.
    Usage,
    /// Interrupted; the run can be resumed.
    Interrupted,
    /// That of a command in a sandbox which the user asked for.
    Command(u8),
}

impl Exit {
    pub const ALL: [Exit; 4] = [Exit::Success, Exit::Failure, Exit::Usage, Exit::Interrupted];

    pub fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Failure => 1,
            Exit::Usage => 2,
            Exit::Interrupted => 130,
            Exit::Command(code) => code,
        }
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Exit::Success => "It worked. Of a run: at least one fork succeeded; with --verify: is verified.",
            Exit::Failure => "It did not work. Of a run: no fork succeeded.",
            Exit::Usage => "The command line, a setting or a file is wrong. Nothing was changed.",
            Exit::Interrupted => "Interrupted. The run can be resumed.",
            Exit::Command(_) => "That of the command in the sandbox.",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit.code())
    }
}
