//! Tokens: `fy_ID_SECRET`. The secret is 256 random bits; the store has only its hash.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use forkyard_core::{Millis, Timestamp};
use forkyard_store::{Scope, Store, StoreError, Token};
use sha2::{Digest, Sha256};

use crate::App;
use crate::error::{ApiError, Code, Result};

const PREFIX: &str = "fy";
const ID_BYTES: usize = 6;
const SECRET_BYTES: usize = 32;
/// Of a token that is revoked by this server its streams hear at once; of one that expires or that another process
/// revokes, after this.
const LOOK_EVERY: Duration = Duration::from_secs(15);

/// How a caller showed who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    Header,
    Cookie,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub token: String,
    /// Of a session: the token that opened it.
    pub parent: Option<String>,
    pub name: String,
    pub scope: Scope,
    pub via: Via,
}

impl Principal {
    /// Keys of different users never meet.
    pub fn owner(&self) -> &str {
        self.parent.as_deref().unwrap_or(&self.token)
    }
}

/// A new token; its text is shown once and stored nowhere.
pub struct Made {
    pub token: Token,
    pub text: String,
}

pub(super) fn random_hex(bytes: usize) -> String {
    let mut buffer = vec![0; bytes];
    let mut filled = 0;
    while filled < bytes {
        // The kernel's own source; it fails only where the system call is missing.
        filled += rustix::rand::getrandom(&mut buffer[filled..], rustix::rand::GetRandomFlags::empty())
            .expect("the kernel gives random bytes");
    }
    hex(&buffer)
}

/// For names that nobody has.
pub fn random_id() -> String {
    random_hex(ID_BYTES)
}

/// The same for the same text.
pub fn stable_id(text: &str) -> String {
    hash(text)[..24].to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn hash(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes()))
}

pub async fn make_token(
    store: &dyn Store,
    now: Timestamp,
    name: &str,
    scope: Scope,
    lifetime: Option<Millis>,
) -> Result<Made, StoreError> {
    put(store, now, None, name, scope, lifetime).await
}

/// What a login leads to: it can do what the token can, and ends with it, however long its own lifetime is.
pub async fn open_session(
    store: &dyn Store,
    now: Timestamp,
    of: &Token,
    lifetime: Millis,
) -> Result<Made, StoreError> {
    let left = of.expires_at.map_or(lifetime, |at| at.since(now));
    put(store, now, Some(&of.id), &of.name, of.scope, Some(lifetime.min(left))).await
}

async fn put(
    store: &dyn Store,
    now: Timestamp,
    parent: Option<&str>,
    name: &str,
    scope: Scope,
    lifetime: Option<Millis>,
) -> Result<Made, StoreError> {
    let (id, secret) = (random_hex(ID_BYTES), random_hex(SECRET_BYTES));
    let token = Token {
        id: id.clone(),
        parent: parent.map(Into::into),
        name: name.to_string(),
        scope,
        hash: hash(&secret),
        created_at: now,
        expires_at: lifetime.map(|l| now + l),
        revoked_at: None,
    };
    store.put_token(token.clone()).await?;
    Ok(Made { token, text: format!("{PREFIX}_{id}_{secret}") })
}

/// Asked of the store each time, so that a token ends everywhere when it is revoked.
pub async fn verify(store: &dyn Store, now: Timestamp, text: &str, via: Via) -> Result<Principal> {
    let unknown = || ApiError::new(Code::Unauthenticated, "the token is not known");
    let mut parts = text.split('_');
    let (Some(PREFIX), Some(id), Some(secret), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(unknown().hint("a token reads fy_ID_SECRET"));
    };
    if id.is_empty() || id.len() > 2 * ID_BYTES {
        return Err(unknown());
    }
    let found = store.token(id).await?;
    // Digests are compared: what time could tell is of a digest, not of the secret.
    let token = found.filter(|t| t.hash == hash(secret)).ok_or_else(unknown)?;
    check(&token, now)?;
    if (via == Via::Cookie) != token.parent.is_some() {
        return Err(unknown().hint("a session's cookie is not a token"));
    }
    Ok(Principal { token: token.id, parent: token.parent, name: token.name, scope: token.scope, via })
}

fn check(token: &Token, now: Timestamp) -> Result<()> {
    if token.revoked_at.is_some() {
        return Err(ApiError::new(Code::TokenRevoked, format!("token {} was revoked", token.id)));
    }
    if token.expires_at.is_some_and(|at| at <= now) {
        return Err(ApiError::new(Code::TokenExpired, format!("token {} has expired", token.id))
            .hint("`forkyard token create` makes a new one"));
    }
    Ok(())
}

impl Principal {
    /// For streams that outlive a check: comes back when the token does not hold any more.
    pub(crate) async fn until_void(self, app: App) {
        let mut told = app.revocations();
        while self.still_valid(app.store(), app.now()).await {
            tokio::select! {
                _ = told.changed() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    async fn still_valid(&self, store: &dyn Store, now: Timestamp) -> bool {
        match store.token(&self.token).await {
            Ok(Some(token)) => check(&token, now).is_ok(),
            Ok(None) => false,
            // A store that is away for a moment ends nothing.
            Err(_) => true,
        }
    }
}

/// The token of this machine's owner, of scope admin, kept in a file that only the owner can read. Made anew if the file is
/// missing or the store does not know it any more.
pub async fn generated_token(
    store: &dyn Store,
    now: Timestamp,
    path: &Path,
) -> std::io::Result<(Token, String)> {
    let other = |e: &dyn std::fmt::Display| std::io::Error::other(e.to_string());
    if let Ok(text) = fs::read_to_string(path)
        && let Ok(known) = verify(store, now, text.trim(), Via::Header).await
        && known.scope == Scope::Admin
        && let Ok(Some(token)) = store.token(&known.token).await
    {
        return Ok((token, text.trim().to_string()));
    }
    let made = make_token(store, now, "owner", Scope::Admin, None).await.map_err(|e| other(&e))?;
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(made.text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    Ok((made.token, made.text))
}
