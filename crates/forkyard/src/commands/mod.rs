//! One file a command: its arguments, and what it does with them. A test of the same name lies in tests/it/.

pub mod add;
pub mod apply;
pub mod bench;
pub mod cancel;
pub mod cleanup;
pub mod compare;
pub mod completions;
pub mod config;
pub mod demo;
pub mod diff;
pub mod doctor;
pub mod events;
pub mod fork;
pub mod gc;
pub mod list;
pub mod logs;
pub mod message;
pub mod pause;
pub mod replay;
pub mod resume;
pub mod run;
pub mod run_options;
pub mod sandbox;
pub mod serve;
pub mod status;
pub mod target;
pub mod token;
pub mod trust;
pub mod watch;
pub mod worker;

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use crate::cli::Cli;

    #[test]
    fn definitions_are_sound_and_every_option_is_explained() {
        let listed = Cli::command();
        let mut built = listed.clone();
        built.build();
        built.clone().debug_assert();
        fn check(listed: &clap::Command, built: &clap::Command) {
            let name = built.get_name();
            // Options that several commands share must not bring a text for the command.
            let said = |c: &clap::Command| c.get_about().map(ToString::to_string);
            assert!(said(listed).is_some(), "{name}");
            assert_eq!(said(listed), said(built), "{name}");
            for arg in built.get_arguments() {
                assert!(arg.get_help().is_some(), "{name} {}", arg.get_id());
            }
        }
        check(&listed, &built);
        let names = built.get_subcommands().map(clap::Command::get_name);
        for name in names.filter(|name| *name != "help") {
            check(listed.find_subcommand(name).unwrap(), built.find_subcommand(name).unwrap());
        }
        for command in built.find_subcommand("sandbox").unwrap().get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }

    #[test]
    fn typical_lines_are_understood() {
        for line in [
            "fork . -p x -f 3 --wait",
            "fork https://example.com/r -p x --no-wait --verify make",
            "run swarm.toml -f 2",
            "add abc -f 2",
            "apply abc/1 --work-tree",
            "apply abc --patch -",
            "diff abc/1 --stat -- src/lib.rs",
            "events abc -f -t agent.*,fork.started",
            "logs abc/0 -n 20",
            "message abc/0 hello --interrupt",
            "replay abc/0 --speed 0",
            "cleanup --interval 15m --max-age 180m",
            "list --limit 5",
            "compare abc 0 1 2",
            "watch",
            "worker --run abc",
            "serve -p 0 --root /srv",
            "token create me --scope steer --expires 90d",
            "token revoke abc",
        ] {
            let words = std::iter::once("forkyard").chain(line.split(' '));
            Cli::try_parse_from(words).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
    }

    #[test]
    fn wrong_lines_are_refused_before_anything_happens() {
        for line in [
            "fork .",
            "apply ABC/1",
            "apply abc/1 --work-tree --patch x",
            "add abc -f 0",
            "add abc -f 101",
            "list --limit 0",
            "status ../x",
            "replay abc",
            "replay abc/0 --speed NaN",
            "replay abc/0 --speed -1",
            "fork . -p x --image a --snapshot b",
            "fork . -p x --max-forks 3",
            "events abc -f --compare",
            "token create me --scope root",
            "serve --tls-cert a",
        ] {
            let words = std::iter::once("forkyard").chain(line.split(' '));
            assert!(Cli::try_parse_from(words).is_err(), "{line}");
        }
    }
}
