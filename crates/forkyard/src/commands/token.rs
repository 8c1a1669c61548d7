use clap::{Args, Subcommand};
use forkyard_core::Timestamp;
use forkyard_engine::clock::Clock;
use forkyard_server::dto::token::{CreateToken, Token};
use forkyard_store::Scope;
use serde_json::json;

use super::cleanup::duration;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Color, Table};
use crate::runs::with_place;

#[derive(Debug, Clone, Args)]
pub struct TokenArgs {
    #[command(subcommand)]
    pub command: TokenCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum TokenCommand {
    Create(CreateArgs),
    List(ListArgs),
    Revoke(RevokeArgs),
}

/// Make a token; it is shown once.
#[derive(Debug, Clone, Args)]
pub struct CreateArgs {
    /// Who or what it is for.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What it may do: read, steer (which includes read) or admin (which includes both).
    #[arg(long, value_name = "SCOPE", default_value = "read", value_parser = scope)]
    pub scope: Scope,
    /// It ends after this time [default: never].
    #[arg(long, value_name = "DURATION")]
    pub expires: Option<String>,
}

/// List tokens, revoked and expired ones included.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {}

/// End a token and the sessions that it opened, at once.
#[derive(Debug, Clone, Args)]
pub struct RevokeArgs {
    /// The token's id.
    #[arg(value_name = "ID")]
    pub id: String,
}

fn scope(text: &str) -> std::result::Result<Scope, String> {
    Scope::parse(text).ok_or_else(|| "write read, steer or admin".into())
}

impl TokenArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        match &self.command {
            TokenCommand::Create(a) => a.run(global, out),
            TokenCommand::List(a) => a.run(global, out),
            TokenCommand::Revoke(a) => a.run(global, out),
        }
    }
}

impl CreateArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let lifetime = self.expires.as_deref().map(|t| duration("--expires", t)).transpose()?;
        let request = CreateToken {
            name: self.name.clone(),
            scope: self.scope.into(),
            lifetime_ms: lifetime.map(|l| l.0),
        };
        let made = with_place(global, async |place| place.make_token(request).await)?;
        if out.json {
            let mut json = document(&made.about, Clock::system().now());
            json["schema"] = "forkyard.token/1".into();
            json["token"] = made.token.into();
            out.json(&json)?;
        } else {
            out.line(&made.token)?;
        }
        Ok(Exit::Success)
    }
}

impl ListArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let now = Clock::system().now();
        let tokens = with_place(global, async |place| place.tokens().await)?;
        if out.json {
            let list: Vec<_> = tokens.iter().map(|t| document(t, now)).collect();
            out.json(&json!({ "schema": "forkyard.tokens/1", "tokens": list }))?;
            return Ok(Exit::Success);
        }
        if tokens.is_empty() {
            out.line("There is no token. Make one with `forkyard token create NAME`.")?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![
            left("Id"),
            left("Name"),
            left("Scope"),
            left("State"),
            left("Made (UTC)"),
            left("Ends (UTC)"),
        ]);
        for t in &tokens {
            let (word, color) = match state(t, now) {
                "valid" => ("valid", Color::Green),
                other => (other, Color::Dim),
            };
            table.row(vec![
                t.id.as_str().into(),
                Cell::new(&t.name),
                Scope::from(t.scope).as_str().into(),
                Cell::new(word).color(color),
                day(Timestamp(t.created_at)).into(),
                t.expires_at.map_or("never".into(), |at| day(Timestamp(at))).into(),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}

impl RevokeArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        if !with_place(global, async |place| place.revoke_token(&self.id).await)? {
            return Err(CliError::usage(format!("there is no token {:?}", self.id))
                .hint("`forkyard token list` shows their ids"));
        }
        if out.json {
            out.json(&json!({ "schema": "forkyard.token_revoked/1", "id": self.id }))?;
        } else {
            out.line(&format!("{} is revoked.", self.id))?;
        }
        Ok(Exit::Success)
    }
}

fn state(t: &Token, now: Timestamp) -> &'static str {
    match (t.revoked_at, t.expires_at) {
        (Some(_), _) => "revoked",
        (None, Some(at)) if Timestamp(at) <= now => "expired",
        (None, _) => "valid",
    }
}

fn document(t: &Token, now: Timestamp) -> serde_json::Value {
    json!({
        "id": t.id, "name": t.name, "scope": t.scope, "state": state(t, now),
        "created_at": t.created_at, "expires_at": t.expires_at, "revoked_at": t.revoked_at,
    })
}
