//! One reader a run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use forkyard_core::{ForkNum, RunId, SandboxId};
use forkyard_engine::ports::LiveEvent;
use forkyard_store::{EventQuery, Recorded, RunQuery, Store, StoreError};
use futures::Stream;
use tokio::sync::broadcast;
use tokio_util::task::AbortOnDropHandle;

use super::live::Live;
use super::runs::RunList;
use crate::dto::event::Event;

/// Lines that a watcher may be behind before it has to go to the store. With [`MAX_LINE_BYTES`] it bounds the memory of a
/// run, however many watch it.
const BEHIND: usize = 512;
/// A larger event is not handed around: watchers that want it take it from the store.
const MAX_LINE_BYTES: usize = 32 << 10;
const PAGE: usize = 256;
/// After the store failed.
const RETRY: Duration = Duration::from_millis(500);

/// One event, written out once for all.
#[derive(Debug, Clone)]
pub struct Line {
    pub position: u64,
    pub fork: Option<ForkNum>,
    pub kind: String,
    /// The sandbox that it is about.
    pub sandbox: Option<SandboxId>,
    /// None: too large to be handed around.
    pub json: Option<Bytes>,
}

impl Line {
    pub fn new(recorded: Recorded) -> Line {
        let (position, fork, kind) = (recorded.position, recorded.stream.fork(), recorded.event.kind.clone());
        let sandbox = recorded.event.sandbox.clone();
        let json = serde_json::to_vec(&Event::from(recorded)).ok().map(Bytes::from);
        Line { position, fork, kind, sandbox, json }
    }
}

/// The runs that somebody watches.
pub struct Feeds {
    store: Arc<dyn Store>,
    open: Mutex<HashMap<RunId, Weak<Feed>>>,
    list: Mutex<Weak<RunList>>,
}

/// Ends with its last watcher.
pub struct Feed {
    lines: broadcast::Sender<Arc<Line>>,
    live: Arc<Live>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

/// What a watcher listens to.
pub(super) struct Heard {
    pub(super) lines: broadcast::Receiver<Arc<Line>>,
    pub(super) live: broadcast::Receiver<(ForkNum, Bytes)>,
    /// Held for as long as somebody listens.
    _feed: Arc<Feed>,
}

impl Feed {
    fn listen(self: Arc<Feed>) -> Heard {
        Heard { lines: self.lines.subscribe(), live: self.live.subscribe(), _feed: self }
    }
}

impl Feeds {
    pub fn new(store: Arc<dyn Store>) -> Feeds {
        Feeds { store, open: Mutex::default(), list: Mutex::default() }
    }

    /// What becomes of the runs that are asked for, as messages.
    pub fn follow_runs(&self, wanted: RunQuery) -> impl Stream<Item = Bytes> + Send + use<> {
        let mut open = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let list = open.upgrade().unwrap_or_else(|| {
            let list = RunList::start(self.store.clone());
            *open = Arc::downgrade(&list);
            list
        });
        list.follow(wanted)
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// What is committed after this call is heard, if it is not in the store when the watcher looks next.
    pub(super) async fn watch(&self, run: &RunId) -> Result<Heard, StoreError> {
        if let Some(feed) = self.found(run) {
            return Ok(feed.listen());
        }
        // Before the first watcher looks into the store, so that no event falls between the two.
        let from = self.store.last_position(run).await?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(feed) = open.get(run).and_then(Weak::upgrade) {
            return Ok(feed.listen());
        }
        let (lines, live) = (broadcast::channel(BEHIND).0, Live::new());
        let reader = tokio::spawn(read(self.store.clone(), run.clone(), from, lines.clone()));
        let speaker = tokio::spawn(live.clone().pass_on());
        let tasks = [reader, speaker].map(AbortOnDropHandle::new);
        let feed = Arc::new(Feed { lines, live, _tasks: tasks });
        open.retain(|_, f| f.strong_count() > 0);
        open.insert(run.clone(), Arc::downgrade(&feed));
        Ok(feed.listen())
    }

    fn found(&self, run: &RunId) -> Option<Arc<Feed>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(run).and_then(Weak::upgrade)
    }

    /// What an agent of this process says right now, for those who watch its run.
    pub fn say(&self, run: &RunId, fork: ForkNum, event: &LiveEvent) {
        if let Some(feed) = self.found(run) {
            feed.live.say(fork, event);
        }
    }
}

async fn read(store: Arc<dyn Store>, run: RunId, mut at: u64, lines: broadcast::Sender<Arc<Line>>) {
    let mut watch = store.watch(Some(&run));
    loop {
        match store.read_run(&run, &EventQuery { after: at, limit: PAGE, ..Default::default() }).await {
            Ok(page) if page.is_empty() => watch.changed().await,
            Ok(page) => {
                for recorded in page {
                    at = recorded.position;
                    let mut line = Line::new(recorded);
                    line.json = line.json.filter(|j| j.len() <= MAX_LINE_BYTES);
                    // Fails only if nobody listens right now.
                    let _ = lines.send(Arc::new(line));
                }
            }
            Err(e) => {
                tracing::warn!(%run, "events could not be read: {e}");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
