use std::borrow::Cow;
use std::path::Path;
use std::process::Command;

use clap::Args;
use forkyard_sandbox::SandboxError;
use forkyard_sandbox::local::{Level, LocalOptions, LocalProvider, doctor};
use serde::Serialize;
use serde_json::json;

use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::render::table::left;
use crate::render::{Cell, Color, Table};
use crate::settings::Settings;

/// Say what this machine offers, and how to get the rest.
#[derive(Debug, Args)]
pub struct DoctorArgs {}

/// That of Debian 12: the oldest that Forkyard is meant for. It has all the switches that keep a hostile repository harmless.
const MIN_GIT: (u32, u32) = (2, 39);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Health {
    Good,
    /// Something optional is missing.
    Missing,
    /// Runs will fail.
    Bad,
}

#[derive(Debug, Clone, Serialize)]
struct Check {
    name: Cow<'static, str>,
    health: Health,
    found: String,
    fix: Option<String>,
}

impl Check {
    fn good(name: &'static str, found: impl Into<String>) -> Check {
        Check { name: name.into(), health: Health::Good, found: found.into(), fix: None }
    }
    fn missing(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { name: name.into(), health: Health::Missing, found: found.into(), fix: Some(fix.into()) }
    }
    fn bad(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { name: name.into(), health: Health::Bad, found: found.into(), fix: Some(fix.into()) }
    }
}

impl DoctorArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let checks = match global.load(global.flags()?) {
            Ok(resolved) => checks(&resolved.settings),
            // Wrong settings are a finding, not the end of the examination.
            Err(e) => vec![Check::bad("settings", e.message, "correct them"), git()],
        };
        let sound = checks.iter().all(|c| c.health != Health::Bad);
        if out.json {
            out.json(&json!({ "schema": "forkyard.doctor/1", "sound": sound, "checks": checks }))?;
        } else {
            let mut table = Table::new(vec![left(""), left("Part"), left("Found"), left("Fix")]);
            for c in &checks {
                let mark = match c.health {
                    Health::Good => Cell::new("✓").color(Color::Green),
                    Health::Missing => Cell::new("–").color(Color::Yellow),
                    Health::Bad => Cell::new("✗").color(Color::Red),
                };
                table.row(vec![
                    mark,
                    Cell::new(&c.name),
                    Cell::new(&c.found),
                    Cell::new(c.fix.as_deref().unwrap_or_default()),
                ]);
            }
            let style = out.style;
            out.text(&table.render(&style))?;
        }
        Ok(if sound { Exit::Success } else { Exit::Failure })
    }
}

fn checks(s: &Settings) -> Vec<Check> {
    let key = |name, set: bool, fix: &str| {
        if set { Check::good(name, "set") } else { Check::missing(name, "not set", fix) }
    };
    let home = writable_home(&s.home);
    let sandboxes = if home.health == Health::Good { sandboxes(s) } else { vec![] };
    let mut checks = vec![
        home,
        git(),
        key("anthropic key", s.anthropic_api_key.is_some(), "export ANTHROPIC_API_KEY for real models"),
        key("github token", s.github_token.is_some(), "export GITHUB_TOKEN for private repositories"),
        docker(),
    ];
    checks.extend(sandboxes);
    checks
}

/// What local sandboxes get from this machine, found by trying it.
fn sandboxes(s: &Settings) -> Vec<Check> {
    let tried = crate::runtime().map(|runtime| {
        runtime.block_on(async {
            let provider = LocalProvider::new(&s.home.join("sandboxes"), LocalOptions::default())?;
            Ok::<_, SandboxError>(doctor(&provider).await)
        })
    });
    let found = match tried {
        Ok(Ok(found)) => found,
        Ok(Err(e)) => {
            let fix = e.hint.unwrap_or_else(|| "use --provider docker".into());
            return vec![Check::bad("sandboxes", e.message, fix)];
        }
        Err(e) => return vec![Check::bad("sandboxes", e.message, "free some memory and processes")],
    };
    found
        .into_iter()
        .map(|f| Check {
            name: f.what.into(),
            health: match f.level {
                Level::Ok => Health::Good,
                Level::Weak => Health::Missing,
                Level::Missing => Health::Bad,
            },
            found: f.detail,
            fix: f.fix,
        })
        .collect()
}

fn writable_home(home: &Path) -> Check {
    let name = "home";
    let shown = home.display().to_string();
    let probe = home.join(format!(".probe.{}", std::process::id()));
    let tried = std::fs::create_dir_all(home)
        .and_then(|()| std::fs::write(&probe, ""))
        .and_then(|()| std::fs::remove_file(&probe));
    match tried {
        Ok(()) => Check::good(name, shown),
        Err(e) => Check::bad(name, format!("{shown}: {e}"), "make it writable, or set FORKYARD_HOME"),
    }
}

fn git() -> Check {
    let name = "git";
    let Ok(out) = Command::new("git").arg("--version").output() else {
        return Check::bad(name, "not installed", "install git");
    };
    let text = String::from_utf8_lossy(&out.stdout).trim().to_string();
    match version(&text) {
        Some(v) if v >= MIN_GIT => Check::good(name, text),
        Some(_) | None => Check::bad(name, text, format!("install git {}.{} or newer", MIN_GIT.0, MIN_GIT.1)),
    }
}

/// Major and minor of `git version 2.47.3`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix("git version ")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn docker() -> Check {
    let socket = Path::new("/var/run/docker.sock");
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => Check::good("docker", socket.display().to_string()),
        Err(e) => Check::missing("docker", e.to_string(), "start dockerd to use --provider docker"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_git_are_read() {
        assert_eq!(version("git version 2.47.3"), Some((2, 47)));
        assert_eq!(version("git version 2.39.5 (Apple Git-154)"), Some((2, 39)));
        assert_eq!(version("nonsense"), None);
        assert!((2, 9) < MIN_GIT && (3, 0) > MIN_GIT);
    }
}
