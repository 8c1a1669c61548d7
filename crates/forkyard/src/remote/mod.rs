//! Another Forkyard, by its HTTP API: what `--server URL` makes of every command.
//!
//! Once it has answered, questions are patient: a server that restarts is waited for, and whoever watches a run goes on
//! where it was. What changes something is sent once, with a key of its own where the API takes one.

mod client;
mod request;
mod runs;
mod sandbox;
mod shell;
mod sse;
mod watch;

use serde_json::Value;

use crate::error::Result;
use crate::settings::Settings;
use client::Client;
pub use runs::Remote;

/// Who answers there, and to whom.
pub async fn examine(s: &Settings, url: &str) -> Result<String> {
    let client = Client::new(s, url)?;
    let ready: Value = client.get("/ready").await?;
    let me: Value = client.get("/session").await?;
    let text = |v: &Value, key: &str| v[key].as_str().unwrap_or("?").to_string();
    let (version, name, scope) = (text(&ready, "version"), text(&me, "name"), text(&me, "scope"));
    Ok(format!("forkyard {version} at {}, which knows this token as {name:?} of scope {scope}", client.base))
}
