use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use forkyard_core::sandbox::NetworkMode;
use forkyard_sandbox::SandboxError;
use forkyard_sandbox::docker::{DockerOptions, engine};
use forkyard_sandbox::local::{Level, LocalOptions, LocalProvider, Shown, doctor};
use forkyard_server::dto::about;
use serde::Serialize;
use serde_json::json;

use crate::cli::Global;
use crate::commands::run_options::docker_image;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::settings::{Settings, environment};

mod attack;
mod list;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Attack a sandbox as a hostile agent would, and say what stopped each attempt; exit status 1 on a breach, and if one could not be made.
    #[arg(long)]
    pub attack: bool,
    /// Whose sandboxes are attacked: local or docker [default: local].
    #[arg(long, value_name = "NAME", requires = "attack")]
    pub provider: Option<String>,
    /// Image that the attacked sandboxes start from.
    #[arg(long, value_name = "IMAGE", requires = "attack")]
    pub image: Option<String>,
    /// Only the attempts of these numbers, as docs/attacks.md lists them.
    #[arg(long, value_name = "NUMBER", requires = "attack", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=39))]
    pub only: Vec<u8>,
}

/// That of Debian 12: the oldest that Forkyard is meant for. It has all the switches that keep a hostile repository harmless.
const MIN_GIT: (u32, u32) = (2, 39);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Health {
    Good,
    /// Something optional is missing.
    Missing,
    /// As it was asked for: data can leave, or be changed, there.
    Open,
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
        if self.attack {
            let mut flags = global.flags()?;
            flags.set_option("sandbox.provider", "--provider", self.provider.as_ref());
            flags.set_option("sandbox.image", "--image", self.image.as_ref());
            return attack::run(&global.load(flags)?.settings, &self.only, out);
        }
        let checks = match global.load(global.flags()?) {
            Ok(resolved) => match &resolved.settings.remote_url {
                // Runs are made there: what this machine offers does not matter to them.
                Some(url) => vec![git(), server(&resolved.settings, url)],
                None => checks(&resolved.settings),
            },
            // Wrong settings are a finding, not the end of the examination.
            Err(e) => vec![Check::bad("settings", e.message, "correct them"), git()],
        };
        let sound = checks.iter().all(|c| c.health != Health::Bad);
        if out.json {
            out.json(&json!({ "schema": "forkyard.doctor/1", "sound": sound, "checks": checks }))?;
        } else {
            let style = out.style;
            out.text(&list::list(&checks, &style))?;
        }
        Ok(if sound { Exit::Success } else { Exit::Failure })
    }
}

/// For the API.
pub fn examined(s: &Settings) -> Vec<about::Check> {
    let health = |h| match h {
        Health::Good => about::CheckHealth::Good,
        Health::Missing => about::CheckHealth::Missing,
        Health::Open => about::CheckHealth::Open,
        Health::Bad => about::CheckHealth::Bad,
    };
    let told = |c: Check| about::Check {
        name: c.name.into_owned(),
        health: health(c.health),
        found: c.found,
        fix: c.fix,
    };
    checks(s).into_iter().map(told).collect()
}

/// Whether a server answers, and to this token.
fn server(s: &Settings, url: &str) -> Check {
    match crate::runtime().and_then(|r| r.block_on(crate::remote::examine(s, url))) {
        Ok(found) => Check::good("server", found),
        Err(e) => Check::bad("server", e.message, e.hint.unwrap_or_default()),
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
        docker(s),
    ];
    checks.extend(sandboxes);
    checks.push(match leaves(s) {
        open if open.is_empty() => {
            Check::good("data can leave", "nowhere: package registries and git hosts are read-only")
        }
        open => Check {
            name: "data can leave".into(),
            health: Health::Open,
            found: open.join("; "),
            fix: Some("write host:ro, or leave them out, where nothing should".into()),
        },
    });
    checks
}

/// What local sandboxes get from this machine, found by trying it.
fn sandboxes(s: &Settings) -> Vec<Check> {
    let tried = crate::runtime().map(|runtime| {
        runtime.block_on(async {
            let provider = LocalProvider::new(&state_dir(s), local_options())?;
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

/// As every sandbox of this user has them: toolchains are looked for in the same home.
fn local_options() -> LocalOptions {
    LocalOptions { home: environment().get("HOME").map(PathBuf::from), ..LocalOptions::default() }
}

fn state_dir(s: &Settings) -> PathBuf {
    s.home.join("sandboxes")
}

/// Of the host, what a local sandbox without an image sees. Nothing is made for that.
pub fn host_trees(home: &Path) -> Vec<Shown> {
    forkyard_sandbox::local::host_trees(local_options().home.as_deref(), home).shown
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

/// Where what is in a sandbox can get to, by the settings.
fn leaves(s: &Settings) -> Vec<String> {
    let mut open = Vec::new();
    match s.network {
        NetworkMode::None => {}
        NetworkMode::Bridge => open.push("any public address (network mode bridge)".to_string()),
        NetworkMode::Isolated => {
            let tunnelled = s.allow.iter().filter(|entry| !entry.ends_with(":ro"));
            open.extend(tunnelled.map(|entry| format!("host {entry} (network.allow without :ro)")));
        }
    }
    if s.network != NetworkMode::None {
        for (name, secret) in &s.tables.secrets {
            open.push(format!("host {} (requests that the secret {name} is for)", secret.hosts.join(", ")));
        }
    }
    let writable = s.volumes.iter().filter(|v| v.ends_with(":rw"));
    open.extend(writable.map(|v| format!("folder {} (a writable volume)", v.split(':').next().unwrap_or(v))));
    open
}

/// The engine of the settings.
fn docker_options(s: &Settings) -> DockerOptions {
    DockerOptions { host: s.docker_host.clone(), image: docker_image(s), ..DockerOptions::default() }
}

fn docker(s: &Settings) -> Check {
    let reached = crate::runtime()
        .map(|runtime| runtime.block_on(async { engine(docker_options(s).host.as_deref()).await }));
    match reached {
        Ok(Ok(found)) => Check::good("docker", found),
        Ok(Err(e)) => {
            let fix = e.hint.unwrap_or_else(|| "start dockerd to use --provider docker".into());
            Check::missing("docker", e.message, fix)
        }
        Err(e) => Check::missing("docker", e.message, "free some memory and processes"),
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
