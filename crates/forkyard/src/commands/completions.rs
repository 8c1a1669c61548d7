use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

/// Commands whose first word is a run.
const ABOUT_RUNS: &[&str] = &[
    "add", "apply", "cancel", "compare", "diff", "events", "logs", "message", "pause", "replay", "resume",
    "status", "watch",
];

/// Ids of runs, newest first, besides what the definition of the command line knows.
const BASH_RUNS: &str = r#"
_forkyard_with_runs() {
    _forkyard "$@"
    local word=${COMP_WORDS[COMP_CWORD]}
    case ${COMP_WORDS[1]} in
        COMMANDS)
            if [[ $word != -* ]]; then
                local runs=$(forkyard list --limit 100 --json 2>/dev/null | sed -n 's/^ *"id": "\([a-z0-9]*\)".*/\1/p')
                COMPREPLY=($(compgen -W "$runs" -- "$word"))
            fi
            ;;
    esac
}
complete -F _forkyard_with_runs -o nosort -o bashdefault -o default forkyard
"#;

const FISH_RUNS: &str = r#"
complete -c forkyard -n "__fish_seen_subcommand_from COMMANDS" -f -a '(forkyard list --limit 100 --json 2>/dev/null | sed -n \'s/^ *"id": "\([a-z0-9]*\)".*/\1/p\')'
"#;

impl CompletionsArgs {
    pub fn run(&self, out: &mut Output<'_>) -> Result<Exit> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "forkyard", &mut script);
        out.text(&String::from_utf8_lossy(&script))?;
        match self.shell {
            Shell::Bash => out.text(&BASH_RUNS.replace("COMMANDS", &ABOUT_RUNS.join("|")))?,
            Shell::Fish => out.text(&FISH_RUNS.replace("COMMANDS", &ABOUT_RUNS.join(" ")))?,
            _ => {}
        }
        Ok(Exit::Success)
    }
}
