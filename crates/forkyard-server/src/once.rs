//! Requests that are sent twice and done once. A client that does not know whether its request arrived sends it again under
//! the same `Idempotency-Key`: it gets the answer that it missed, and nothing is done or recorded a second time.

use std::sync::Arc;

use axum::http::HeaderMap;
use forkyard_core::RunId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::App;
use crate::access::{Principal, random_id, stable_id};
use crate::error::{ApiError, Code, Result};

const HEADER: &str = "idempotency-key";
/// Characters of a key.
const MAX_KEY: usize = 200;
/// Digits of an id that say in which shelf it is; each shelf has room for the newest.
const SHELF_DIGITS: usize = 3;
const MAX_ON_SHELF: usize = 64;
/// Who is in the same row takes turns.
const TURNS: usize = 64;

/// A key of somebody's; keys of different users never meet.
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn read(headers: &HeaderMap, by: &Principal) -> Result<Option<Key>> {
        let Some(given) = headers.get(HEADER) else { return Ok(None) };
        let text = given.to_str().ok().filter(|t| (1..=MAX_KEY).contains(&t.len()));
        let text = text.ok_or_else(|| {
            ApiError::field("Idempotency-Key", "", "can't be used", "send 1 to 200 visible ASCII characters")
        })?;
        Ok(Some(Key(format!("api/{}/{text}", by.owner()))))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The same for the same key, or one that nobody has.
pub(crate) fn id_for(key: Option<&Key>, what: &str) -> String {
    match key {
        Some(key) => stable_id(&format!("{what} {}", key.0)),
        None => random_id(),
    }
}

/// What a key was used for.
#[derive(Serialize, Deserialize)]
struct Used {
    id: String,
    /// A digest of the request.
    request: String,
    /// None: it is under way, or was when a server ended.
    answer: Option<Value>,
}

pub(crate) struct Turns(Vec<Arc<Mutex<()>>>);

impl Default for Turns {
    fn default() -> Turns {
        Turns((0..TURNS).map(|_| Arc::default()).collect())
    }
}

/// What came of a request.
pub(crate) struct Done<T> {
    pub(crate) answer: T,
    /// False: it was done before.
    pub(crate) new: bool,
}

impl App {
    /// Does `act`, or answers as it did before under this key. `what` is where the request goes, `run` the run that it is
    /// about: what is known of it goes with that one.
    pub(crate) async fn once<T: Serialize + DeserializeOwned>(
        &self,
        key: Option<&Key>,
        what: &str,
        run: Option<&RunId>,
        request: &impl Serialize,
        act: impl Future<Output = Result<T>>,
    ) -> Result<Done<T>> {
        let Some(key) = key else { return Ok(Done { answer: act.await?, new: true }) };
        let internal = |e: serde_json::Error| ApiError::new(Code::Internal, e.to_string());
        let request = stable_id(&serde_json::to_string(request).map_err(internal)?);
        let id = stable_id(&format!("{what} {}", key.0));
        let digits = &id[..SHELF_DIGITS];
        let shelf = match run {
            Some(run) => format!("{run}/once/{digits}"),
            None => format!("once/{digits}"),
        };
        let turn = usize::from_str_radix(digits, 16).unwrap_or(0) % TURNS;
        let _turn = self.turns().0[turn].clone().lock_owned().await;
        match self.shelf(&shelf).await?.into_iter().find(|used| used.id == id) {
            Some(used) if used.request != request => {
                return Err(ApiError::new(Code::KeyReused, "the key was used for another request")
                    .hint("use a new key for a new request"));
            }
            Some(Used { answer: Some(answer), .. }) => {
                return Ok(Done { answer: serde_json::from_value(answer).map_err(internal)?, new: false });
            }
            Some(Used { answer: None, .. }) | None => {}
        }
        let used = |answer| Used { id: id.clone(), request: request.clone(), answer };
        self.put_on_shelf(&shelf, &id, Some(used(None))).await?;
        match act.await {
            Ok(answer) => {
                let kept = serde_json::to_value(&answer).map_err(internal)?;
                self.put_on_shelf(&shelf, &id, Some(used(Some(kept)))).await?;
                Ok(Done { answer, new: true })
            }
            Err(e) => {
                // What was refused was not done: the key may come with what is right. What failed may be half done.
                if e.code.status().is_client_error() {
                    self.put_on_shelf(&shelf, &id, None).await?;
                }
                Err(e)
            }
        }
    }

    async fn shelf(&self, shelf: &str) -> Result<Vec<Used>> {
        let stored = self.store().blob(shelf).await?;
        Ok(stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    /// Puts it behind the others, or takes it away. Those of one shelf take turns.
    async fn put_on_shelf(&self, shelf: &str, id: &str, used: Option<Used>) -> Result<()> {
        let mut all = self.shelf(shelf).await?;
        all.retain(|other| other.id != id);
        all.extend(used);
        let surplus = all.len().saturating_sub(MAX_ON_SHELF);
        all.drain(..surplus);
        let bytes = serde_json::to_vec(&all).map_err(|e| ApiError::new(Code::Internal, e.to_string()))?;
        Ok(self.store().put_blob(shelf, &bytes).await?)
    }
}
