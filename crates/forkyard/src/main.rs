use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use forkyard::program::{
    Cli, CliError, ColorMode, Exit, Output, Raw, Style, Value, environment, expects_sandbox,
};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    if expects_sandbox(&args, &environment()) {
        forkyard_sandbox::local::expect_sandboxes();
    }
    // One TLS provider for everything. It fails only if there is one already, and nothing has run yet.
    rustls::crypto::ring::default_provider().install_default().expect("no provider is installed yet");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // To a closed terminal nothing can be said.
            let _ = e.print();
            return match e.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Success.into(),
                _ => {
                    // What comes after `--` is a command's own.
                    if args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json") {
                        let mut stdout = std::io::stdout();
                        let mut out = Output::stdout(&mut stdout, ColorMode::Never, true);
                        let _ = out.json_line(&CliError::from(&e).json());
                    }
                    Exit::Usage.into()
                }
            };
        }
    };
    let color = color(&cli);
    let mut stdout = std::io::stdout();
    let mut out = Output::stdout(&mut stdout, color, cli.global.json);
    match cli.run(&mut out) {
        Ok(exit) => exit.into(),
        Err(e) => {
            if cli.global.json {
                let _ = out.json_line(&e.json());
            }
            let _ = std::io::stderr().write_all(e.render(&Style::stderr(color)).as_bytes());
            e.exit.into()
        }
    }
}

/// Colour is needed to say that the settings are wrong, so it is found without them.
fn color(cli: &Cli) -> ColorMode {
    let env = environment();
    if env.get("NO_COLOR").is_some_and(|v| !v.is_empty()) && cli.global.color.is_none() {
        return ColorMode::Never;
    }
    let given = cli.global.color.as_ref().or_else(|| env.get("FORKYARD_COLOR"));
    given.and_then(|t| ColorMode::parse(&Raw::Text(t.clone())).ok()).unwrap_or(ColorMode::Auto)
}
