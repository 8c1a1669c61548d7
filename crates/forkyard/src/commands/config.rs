use clap::Args;
use serde_json::json;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::table::left;
use crate::render::{Cell, Color, Table, plain};
use crate::settings::{Effective, Origin, TABLE, nearest};

#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Only these keys, or keys of these tables.
    #[arg(value_name = "KEY")]
    pub keys: Vec<String>,
    /// Only what is not a default.
    #[arg(long)]
    pub changed: bool,
}

impl ConfigArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        for key in &self.keys {
            if !TABLE.iter().any(|s| matches(key, s.key)) {
                let near = nearest(key, TABLE.iter().map(|s| s.key));
                let error = CliError::usage(format!("unknown key {}", plain(key)));
                return Err(error.hint(
                    near.map_or("`forkyard config` lists the keys".into(), |n| {
                        format!("did you mean `{n}`?")
                    }),
                ));
            }
        }
        let resolved = global.load(global.flags()?)?;
        let shown: Vec<&Effective> = resolved
            .effective
            .iter()
            .filter(|e| self.keys.is_empty() || self.keys.iter().any(|k| matches(k, e.setting.key)))
            .filter(|e| !self.changed || e.origin != Origin::Default)
            .collect();
        let secrets = &resolved.settings.tables.secrets;
        // Runs on another machine see that one's.
        let trees = match &resolved.settings.remote_url {
            Some(_) => vec![],
            None => super::doctor::host_trees(&resolved.settings.home),
        };
        if out.json {
            let settings: Vec<_> = shown
                .iter()
                .map(|e| json!({ "key": e.setting.key, "value": e.json, "origin": e.origin.to_string() }))
                .collect();
            let secrets: Vec<_> = secrets
                .iter()
                .map(|(name, s)| json!({ "name": name, "header": s.header, "hosts": s.hosts }))
                .collect();
            let warnings: Vec<String> = resolved.warnings.iter().map(ToString::to_string).collect();
            out.json(&json!({
                "schema": "forkyard.config/1",
                "home": resolved.settings.home,
                "settings": settings,
                "secrets": secrets,
                "host_trees": trees,
                "warnings": warnings,
            }))?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![left("Key"), left("Value"), left("From")]);
        for e in shown {
            let from = Cell::new(e.origin.to_string());
            let from =
                if e.origin == Origin::Default { from.color(Color::Dim) } else { from.color(Color::Cyan) };
            table.row(vec![e.setting.key.into(), Cell::new(&e.shown), from]);
        }
        if self.keys.is_empty() {
            for (name, s) in secrets {
                table.row(vec![
                    Cell::new(format!("secrets.{name}")),
                    Cell::new(format!("*** in {} for {}", s.header, s.hosts.join(","))),
                    Cell::default(),
                ]);
            }
            out.line(&format!("Home: {}\n", plain(&resolved.settings.home.display().to_string())))?;
        }
        let style = out.style;
        if table.is_empty() {
            out.line("Every setting has its default.")?;
        } else {
            out.text(&table.render(&style))?;
        }
        if self.keys.is_empty() && !self.changed && !trees.is_empty() {
            out.line("\nOf this machine, a local sandbox without an image sees, read-only:")?;
            for tree in &trees {
                out.line(&format!("  {} ({})", plain(&tree.path.display().to_string()), tree.why))?;
            }
        }
        for warning in &resolved.warnings {
            out.line(&format!("{} {}", style.paint(Color::Yellow, "warning:"), plain(&warning.to_string())))?;
        }
        Ok(Exit::Success)
    }
}

/// A key, or the table that it is in.
fn matches(asked: &str, key: &str) -> bool {
    key == asked || key.strip_prefix(asked).is_some_and(|rest| rest.starts_with('.'))
}
