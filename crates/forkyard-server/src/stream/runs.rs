//! The list of runs as it changes. One reader of the store looks at each run that changed, a few times a second at most, and
//! tells all watchers; each takes what its query is about.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use forkyard_core::view::{RunStatus, RunView};
use forkyard_core::{RunId, Usd};
use forkyard_store::{Changed, Changes, RunQuery, Store, StoreError};
use futures::stream::{self, Stream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::task::AbortOnDropHandle;

use crate::dto::run::{Run, RunNews};

/// An agent at work changes its run many times a second, and nobody reads that fast.
const EVERY: Duration = Duration::from_millis(400);
/// Looks that a watcher may be behind before it has to read the list again.
const BEHIND: usize = 32;

/// What one look has found.
enum Look {
    /// Each with its view, or none if it is gone, and what it has cost.
    Runs(Vec<(RunId, Option<RunView>, Usd)>),
    /// It is not known what changed.
    Any,
}

/// Ends with its last watcher.
pub(super) struct RunList {
    looks: broadcast::Sender<Arc<Look>>,
    _reader: AbortOnDropHandle<()>,
}

impl RunList {
    pub(super) fn start(store: Arc<dyn Store>) -> Arc<RunList> {
        let looks = broadcast::channel(BEHIND).0;
        // From now on, not from whenever the task begins.
        let changes = store.changes();
        let reader = AbortOnDropHandle::new(tokio::spawn(read(store, changes, looks.clone())));
        Arc::new(RunList { looks, _reader: reader })
    }

    /// What changes after this call is told, as messages of a stream.
    pub(super) fn follow(self: Arc<RunList>, wanted: RunQuery) -> impl Stream<Item = Bytes> + Send + use<> {
        let watcher = Watcher { looks: self.looks.subscribe(), wanted, begun: false, _list: self };
        stream::unfold(watcher, |mut watcher| async move { Some((watcher.next().await?, watcher)) })
    }
}

struct Watcher {
    looks: broadcast::Receiver<Arc<Look>>,
    wanted: RunQuery,
    begun: bool,
    /// Held for as long as somebody listens.
    _list: Arc<RunList>,
}

impl Watcher {
    async fn next(&mut self) -> Option<Bytes> {
        let again = || Some(Bytes::from_static(b"event: again\ndata: {}\n\n"));
        if !self.begun {
            self.begun = true;
            return again();
        }
        loop {
            match self.looks.recv().await {
                Ok(look) => match &*look {
                    Look::Any => return again(),
                    Look::Runs(runs) => {
                        let mut out = BytesMut::new();
                        for (id, view, spent) in runs {
                            self.tell(id, view.as_ref(), *spent, &mut out);
                        }
                        if !out.is_empty() {
                            return Some(out.freeze());
                        }
                    }
                },
                Err(RecvError::Lagged(_)) => return again(),
                // The reader is held by this watcher, so it is there.
                Err(RecvError::Closed) => return None,
            }
        }
    }

    fn tell(&self, id: &RunId, view: Option<&RunView>, spent: Usd, out: &mut BytesMut) {
        let news = match view {
            Some(view) if self.wanted.wants(view) => {
                RunNews::Run(Box::new(Run { cost_usd: Some(spent.as_dollars()), ..view.into() }))
            }
            // A run's words stay: it was never one of those.
            Some(view) if !self.wanted.words.occur_in(view) => return,
            Some(_) | None => RunNews::Gone(id.to_string()),
        };
        if let Ok(json) = serde_json::to_vec(&news) {
            out.put_slice(b"data: ");
            out.put_slice(&json);
            out.put_slice(b"\n\n");
        }
    }
}

async fn read(store: Arc<dyn Store>, mut changes: Changes, looks: broadcast::Sender<Arc<Look>>) {
    // Live runs as they were told last: most changes of a run are not of what the list has of it.
    let mut told: HashMap<RunId, (RunView, Usd)> = HashMap::new();
    loop {
        let look = match changes.next().await {
            Changed::Any => Look::Any,
            Changed::Runs(runs) => {
                let mut found = Vec::new();
                let mut failed = None;
                for run in runs {
                    match look_at(&*store, &run).await {
                        Ok(now) => found.extend(news(&mut told, run, now)),
                        Err(e) => failed = Some(e),
                    }
                }
                match failed {
                    Some(e) => {
                        tracing::warn!("changed runs could not be read: {e}");
                        Look::Any
                    }
                    None => Look::Runs(found),
                }
            }
        };
        if !matches!(&look, Look::Runs(runs) if runs.is_empty()) {
            // Fails only if nobody listens right now.
            let _ = looks.send(Arc::new(look));
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn look_at(store: &dyn Store, run: &RunId) -> Result<Option<(RunView, Usd)>, StoreError> {
    let Some(view) = store.run(run).await? else { return Ok(None) };
    match store.balance(run).await {
        Ok(balance) => Ok(Some((view, balance.spent))),
        // Gone between the two.
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

fn news(
    told: &mut HashMap<RunId, (RunView, Usd)>,
    run: RunId,
    now: Option<(RunView, Usd)>,
) -> Option<(RunId, Option<RunView>, Usd)> {
    match now {
        None => {
            told.remove(&run);
            Some((run, None, Usd::ZERO))
        }
        Some(now) if told.get(&run) == Some(&now) => None,
        Some((view, spent)) => {
            if view.status == RunStatus::Ended {
                told.remove(&run);
            } else {
                told.insert(run.clone(), (view.clone(), spent));
            }
            Some((run, Some(view), spent))
        }
    }
}
