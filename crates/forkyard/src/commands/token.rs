use clap::{Args, Subcommand};
use forkyard_core::Timestamp;
use forkyard_engine::clock::Clock;
use forkyard_server::access::make_token;
use forkyard_store::{Scope, StoreError, Token};
use serde_json::json;

use super::cleanup::duration;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::store_error;
use crate::output::Output;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Color, Table};
use crate::runs::with_yard;

/// Make, list and revoke tokens for the HTTP API.
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
        let now = Clock::system().now();
        let made = with_yard(global, async |yard| {
            make_token(&*yard.store, now, &self.name, self.scope, lifetime).await.map_err(store_error)
        })?;
        if out.json {
            let mut json = document(&made.token, now);
            json["schema"] = "forkyard.token/1".into();
            json["token"] = made.text.into();
            out.json(&json)?;
        } else {
            out.line(&made.text)?;
        }
        Ok(Exit::Success)
    }
}

impl ListArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let now = Clock::system().now();
        let mut tokens = with_yard(global, async |yard| yard.store.tokens().await.map_err(store_error))?;
        // Sessions come and go with their token.
        tokens.retain(|t| t.parent.is_none());
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
                t.scope.as_str().into(),
                Cell::new(word).color(color),
                day(t.created_at).into(),
                t.expires_at.map_or("never".into(), day).into(),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}

impl RevokeArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_yard(global, async |yard| {
            yard.store.revoke_token(&self.id, Clock::system().now()).await.map_err(|e| match e {
                StoreError::NotFound { .. } => CliError::usage(format!("there is no token {:?}", self.id))
                    .hint("`forkyard token list` shows their ids"),
                e => store_error(e),
            })
        })?;
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
        (None, Some(at)) if at <= now => "expired",
        (None, _) => "valid",
    }
}

fn document(t: &Token, now: Timestamp) -> serde_json::Value {
    json!({
        "id": t.id, "name": t.name, "scope": t.scope, "state": state(t, now),
        "created_at": t.created_at, "expires_at": t.expires_at, "revoked_at": t.revoked_at,
    })
}
