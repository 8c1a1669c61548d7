//! Who may use the API, and who did what with it.

use forkyard_core::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Result, StoreError, check};

/// Tokens and sessions that a store keeps. Sessions that have expired make room.
pub const MAX_TOKENS: usize = 10_000;

/// Entries of the audit trail that are removed by one call: others wait no longer for it than for any write.
pub const FORGET_AT_ONCE: usize = 1000;

/// What a token may do; each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// See runs, forks, events, sandboxes and results.
    Read,
    /// Start runs, steer them, use sandboxes.
    Steer,
    /// Make and revoke tokens, read the audit trail.
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Steer, Scope::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Steer => "steer",
            Scope::Admin => "admin",
        }
    }
    pub fn parse(text: &str) -> Option<Scope> {
        Scope::ALL.into_iter().find(|s| s.as_str() == text)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub id: String,
    /// A session: the token that opened it.
    pub parent: Option<String>,
    pub name: String,
    pub scope: Scope,
    /// Of its secret.
    pub hash: String,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
}

/// One thing that somebody did.
#[derive(Debug, Clone, PartialEq)]
pub struct Deed {
    pub at: Timestamp,
    /// The token that allowed it.
    pub token: String,
    /// Its name at that time.
    pub who: String,
    /// `run.pause`, `sandbox.exec` …
    pub action: String,
    /// `RUN`, `RUN/N`, or what else it was done to.
    pub target: String,
    pub detail: Value,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Grows.
    pub id: u64,
    pub deed: Deed,
}

#[derive(Debug, Clone, Default)]
pub struct AuditQuery {
    /// Older than this one (a cursor).
    pub before: Option<u64>,
    /// Only of this target, and of what lies under it (`RUN` has `RUN/0` under it).
    pub target: Option<String>,
    /// 0: the store's own bound.
    pub limit: usize,
}

/// What both databases and memory refuse alike.
pub fn check_token(token: &Token) -> Result<()> {
    check::key("a token's id", &token.id)?;
    check::key("a token's name", &token.name)?;
    check::key("a token's hash", &token.hash)?;
    check::time("a token's time", token.created_at)?;
    token.expires_at.map_or(Ok(()), |at| check::time("a token's end", at))
}

pub fn check_deed(deed: &Deed) -> Result<String> {
    check::key("who did it", &deed.who)?;
    check::key("an action", &deed.action)?;
    check::key("a target", &deed.target)?;
    check::time("an action's time", deed.at)?;
    check::data("an action's detail", &deed.detail)
}

pub fn too_many_tokens() -> StoreError {
    StoreError::Invalid(format!("there are {MAX_TOKENS} tokens already: revoke some"))
}
