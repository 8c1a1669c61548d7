//! Tokens of sandboxes: `fys_HOST_SANDBOX_RUN_FORK_ATTEMPT_EXPIRES_NONCE_SIGNATURE`.
//!
//! A token is bound to one sandbox, one fork and one attempt, and ends with the first of them. It is signed with a key of the
//! host that made it, so that a forged one is refused without a look into the store; the store has only its hash, beside its
//! run, and forgets it with the run.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use forkyard_core::{Attempt, ForkNum, HostId, Millis, RunId, SandboxId, Timestamp};
use forkyard_store::{Store, StoreError};
use ring::hmac;
use sha2::{Digest, Sha256};

pub const PREFIX: &str = "fys";
pub const TOKEN_LIFETIME: Millis = Millis::minutes(24 * 60);
const KEY_BYTES: usize = 32;
const NONCE_BYTES: usize = 16;
/// Parts of a token's text.
const PARTS: usize = 9;
const MAX_TEXT_BYTES: usize = 512;
/// Of the host, in Forkyard's home.
const KEY_FILE: &str = "sandbox-token-key";
/// Hosts whose keys are remembered.
const MAX_KEYS: usize = 1000;

/// What a token says of its holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    pub sandbox: SandboxId,
    pub run: RunId,
    pub fork: ForkNum,
    pub attempt: Attempt,
    pub expires_at: Timestamp,
}

#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("the sandbox token is not known")]
    Unknown,
    #[error("the sandbox token has expired")]
    Expired,
    #[error("attempt {current} works on this fork now; the token is of an older one")]
    Stale { current: Attempt },
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Clone)]
pub struct Tokens {
    store: Arc<dyn Store>,
    host: HostId,
    key: Arc<[u8]>,
    /// Of other hosts that share the store.
    others: Arc<Mutex<BTreeMap<HostId, Arc<[u8]>>>>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

fn random(bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0; bytes];
    let mut filled = 0;
    while filled < bytes {
        // The kernel's own source; it fails only where the system call is missing.
        filled += rustix::rand::getrandom(&mut buffer[filled..], rustix::rand::GetRandomFlags::empty())
            .expect("the kernel gives random bytes");
    }
    buffer
}

fn sign(key: &[u8], text: &str) -> String {
    hex(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref())
}

/// No run has such a name.
fn key_blob(host: &HostId) -> String {
    format!(".sandbox-keys/{host}")
}

/// Below its run, so that it goes with it.
fn hash_blob(c: &Claims, nonce: &str) -> String {
    format!("{}/inside/{}/{}/{nonce}", c.run, c.fork, c.attempt)
}

impl Tokens {
    /// The host's key is kept in its home, and published in the store for the other hosts.
    pub fn open(store: Arc<dyn Store>, host: HostId, home: &Path) -> io::Result<Tokens> {
        let key = host_key(&home.join(KEY_FILE))?;
        Ok(Tokens { store, host, key: key.into(), others: Arc::default() })
    }

    pub async fn issue(&self, c: &Claims) -> Result<String, StoreError> {
        self.store.put_blob(&key_blob(&self.host), &self.key).await?;
        let nonce = hex(&random(NONCE_BYTES));
        let payload = format!(
            "{PREFIX}_{}_{}_{}_{}_{}_{}_{nonce}",
            self.host, c.sandbox, c.run, c.fork, c.attempt, c.expires_at.0
        );
        let text = format!("{payload}_{}", sign(&self.key, &payload));
        let hash = hex(&Sha256::digest(text.as_bytes()));
        self.store.put_blob(&hash_blob(c, &nonce), hash.as_bytes()).await?;
        Ok(text)
    }

    /// Asked of the store each time: a newer attempt ends the token everywhere and at once.
    pub async fn verify(&self, text: &str, now: Timestamp) -> Result<Claims, Refused> {
        let (claims, host, nonce) = parse(text).ok_or(Refused::Unknown)?;
        let key = self.key_of(&host).await?.ok_or(Refused::Unknown)?;
        let (payload, signature) = text.rsplit_once('_').ok_or(Refused::Unknown)?;
        let signature = unhex(signature).ok_or(Refused::Unknown)?;
        hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &key), payload.as_bytes(), &signature)
            .map_err(|_| Refused::Unknown)?;
        if claims.expires_at <= now {
            return Err(Refused::Expired);
        }
        let current = self.store.attempt(&claims.run, claims.fork).await?.ok_or(Refused::Unknown)?;
        if current != claims.attempt {
            return Err(Refused::Stale { current });
        }
        let stored = self.store.blob(&hash_blob(&claims, &nonce)).await?.ok_or(Refused::Unknown)?;
        if stored != hex(&Sha256::digest(text.as_bytes())).into_bytes() {
            return Err(Refused::Unknown);
        }
        Ok(claims)
    }

    /// The agent has ended: nobody needs it any more.
    pub async fn revoke(&self, text: &str) -> Result<(), StoreError> {
        match parse(text) {
            Some((claims, _, nonce)) => self.store.delete_blob(&hash_blob(&claims, &nonce)).await,
            None => Ok(()),
        }
    }

    async fn key_of(&self, host: &HostId) -> Result<Option<Arc<[u8]>>, StoreError> {
        if *host == self.host {
            return Ok(Some(self.key.clone()));
        }
        let known = || self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = known().get(host) {
            return Ok(Some(key.clone()));
        }
        let Some(key) = self.store.blob(&key_blob(host)).await? else { return Ok(None) };
        let key: Arc<[u8]> = key.into();
        let mut known = known();
        if known.len() >= MAX_KEYS {
            known.clear();
        }
        known.insert(host.clone(), key.clone());
        Ok(Some(key))
    }
}

fn parse(text: &str) -> Option<(Claims, HostId, String)> {
    if text.len() > MAX_TEXT_BYTES {
        return None;
    }
    let parts: Vec<&str> = text.split('_').collect();
    let [PREFIX, host, sandbox, run, fork, attempt, expires, nonce, _] = parts[..] else { return None };
    debug_assert_eq!(parts.len(), PARTS);
    let claims = Claims {
        sandbox: SandboxId::new(sandbox).ok()?,
        run: RunId::new(run).ok()?,
        fork: fork.parse().ok()?,
        attempt: Attempt(attempt.parse().ok()?),
        expires_at: Timestamp(expires.parse().ok()?),
    };
    unhex(nonce).filter(|n| n.len() == NONCE_BYTES)?;
    Some((claims, HostId::new(host).ok()?, nonce.to_string()))
}

/// Made once; whoever is first wins, and everybody reads the same afterwards.
fn host_key(path: &Path) -> io::Result<Vec<u8>> {
    let read = || -> io::Result<Vec<u8>> {
        let text = fs::read_to_string(path)?;
        unhex(text.trim())
            .filter(|k| k.len() == KEY_BYTES)
            .ok_or_else(|| io::Error::other(format!("{} is not a key: remove it", path.display())))
    };
    match read() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        answer => return answer,
    }
    let temporary = path.with_extension(format!("new-{}-{}", std::process::id(), hex(&random(4))));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(hex(&random(KEY_BYTES)).as_bytes())?;
    file.sync_all()?;
    // Fails only if somebody was first.
    let _ = fs::hard_link(&temporary, path);
    fs::remove_file(&temporary)?;
    read()
}
