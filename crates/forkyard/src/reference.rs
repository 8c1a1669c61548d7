//! docs/cli.md, from the command line's own definition.

use clap::{Arg, Command, CommandFactory};

use crate::cli::Cli;
use crate::exit::Exit;

pub fn markdown() -> String {
    let mut command = Cli::command();
    command.build();
    let mut out = String::from(
        "# Commands\n\n<!-- Generated from the command line's definition: change it there and run `cargo xtask codegen`. -->\n",
    );
    section(&mut out, &command, "forkyard", 2);
    for sub in visible(&command) {
        let name = format!("forkyard {}", sub.get_name());
        section(&mut out, sub, &name, 2);
        for part in visible(sub) {
            section(&mut out, part, &format!("{name} {}", part.get_name()), 3);
        }
    }
    out.push_str("\n## Exit status\n\n| status | meaning |\n|---|---|\n");
    for exit in Exit::ALL {
        out.push_str(&format!("| {} | {} |\n", exit.code(), exit.meaning()));
    }
    out
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help")
}

fn section(out: &mut String, command: &Command, name: &str, level: usize) {
    out.push_str(&format!("\n{} `{name}`\n\n", "#".repeat(level)));
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        out.push_str(&format!("{about}\n"));
    }
    let is_root = name == "forkyard";
    let args: Vec<&Arg> = command
        .get_arguments()
        .filter(|a| !a.is_hide_set() && !["help", "version"].contains(&a.get_id().as_str()))
        // Global options are told once, with the program.
        .filter(|a| is_root || !a.is_global_set())
        .collect();
    if !args.is_empty() {
        out.push_str("\n| option | meaning |\n|---|---|\n");
        for arg in args {
            let mut help =
                arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
            let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
            if !defaults.is_empty() && arg.get_action().takes_values() {
                help.push_str(&format!(" Default: `{}`.", defaults.join(" ")));
            }
            out.push_str(&format!(
                "| `{}` | {} |\n",
                option(arg),
                help.replace('\n', " ").replace('|', "\\|")
            ));
        }
    }
    let subs: Vec<&Command> = visible(command).collect();
    if !subs.is_empty() {
        out.push_str("\n| command | what it does |\n|---|---|\n");
        for sub in subs {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            out.push_str(&format!("| `{name} {}` | {about} |\n", sub.get_name()));
        }
    }
}

/// `-f, --forks <N>` or `<REPO>`.
fn option(arg: &Arg) -> String {
    let values: String = if arg.get_action().takes_values() {
        arg.get_value_names().unwrap_or_default().iter().map(|v| format!(" <{v}>")).collect()
    } else {
        String::new()
    };
    let short = arg.get_short().map(|c| format!("-{c}"));
    let long = arg.get_long().map(|l| format!("--{l}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    format!("{}{values}", names.join(", ")).trim().replace('|', "\\|")
}
