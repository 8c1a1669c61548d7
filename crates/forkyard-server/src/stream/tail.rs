//! One watcher of one run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forkyard_core::view::RunStatus;
use forkyard_core::{ForkNum, RunId};
use forkyard_store::{EventQuery, StoreError};
use tokio::sync::broadcast::error::RecvError;

use super::feed::{Feeds, Heard, Line};
use crate::App;

/// Events that are taken from the store at once.
const PAGE: usize = 100;
const RETRY: Duration = Duration::from_millis(500);

/// What a watcher wants of a run.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub fork: Option<ForkNum>,
    /// Exact, or a category with a dot at its end; empty: all.
    pub kinds: Vec<String>,
}

impl Filter {
    pub fn wants(&self, line: &Line) -> bool {
        let kind = |k: &String| if k.ends_with('.') { line.kind.starts_with(k) } else { line.kind == *k };
        self.fork.is_none_or(|f| line.fork == Some(f))
            && (self.kinds.is_empty() || self.kinds.iter().any(kind))
    }
}

/// What a watcher is told.
#[derive(Debug, Clone)]
pub enum Told {
    Event(Arc<Line>),
    /// All that was recorded so far is told; what follows is news.
    CaughtUp {
        position: u64,
    },
    /// The watcher was too slow: what it missed follows, from the store.
    CatchUp {
        position: u64,
    },
    /// What an agent says right now, as JSON; recorded nowhere, and may be missed.
    Live {
        fork: ForkNum,
        json: Bytes,
    },
    /// The run has ended, or is gone, and everything is told.
    End {
        position: u64,
    },
}

pub struct Tail {
    app: App,
    run: RunId,
    filter: Filter,
    /// It wants what is not recorded, too.
    live: bool,
    /// Everything up to here is told, or was not wanted.
    at: u64,
    heard: Heard,
    ready: VecDeque<Told>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Reads the store until there is nothing newer there. `news`: says so then.
    Store {
        news: bool,
    },
    Live,
    Done,
}

impl Tail {
    pub async fn open(app: &App, run: RunId, after: u64, filter: Filter) -> Result<Tail, StoreError> {
        let heard = app.feeds().watch(&run).await?;
        Ok(Tail {
            app: app.clone(),
            run,
            filter,
            live: false,
            at: after,
            heard,
            ready: VecDeque::new(),
            state: State::Store { news: true },
        })
    }

    /// With what agents say while they say it.
    pub fn with_live(self, live: bool) -> Tail {
        Tail { live, ..self }
    }

    /// What is next; None after the end. May be dropped while it waits: nothing is lost by that.
    pub async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some(told) = self.ready.pop_front() {
                return Some(told);
            }
            match self.state {
                State::Done => return None,
                State::Store { news } => {
                    if let Err(e) = self.read_store(news).await {
                        tracing::warn!(run = %self.run, "events could not be read: {e}");
                        tokio::time::sleep(RETRY).await;
                    }
                }
                State::Live => self.hear().await,
            }
        }
    }

    /// What is there without waiting.
    pub fn ready(&mut self) -> Option<Told> {
        self.ready.pop_front()
    }

    async fn read_store(&mut self, news: bool) -> Result<(), StoreError> {
        let feeds: &Feeds = self.app.feeds();
        let store = feeds.store();
        // Asked before reading: what is recorded until the end is read.
        let ended = store.run(&self.run).await?.is_none_or(|v| v.status == RunStatus::Ended);
        let last = store.last_position(&self.run).await?;
        let query = EventQuery {
            after: self.at,
            fork: self.filter.fork,
            kinds: self.filter.kinds.clone(),
            limit: PAGE,
            ..Default::default()
        };
        let page = store.read_run(&self.run, &query).await?;
        if let Some(newest) = page.last() {
            self.at = newest.position;
            self.ready.extend(page.into_iter().map(|r| Told::Event(Arc::new(Line::new(r)))));
            return Ok(());
        }
        self.at = self.at.max(last);
        if news {
            self.ready.push_back(Told::CaughtUp { position: self.at });
        }
        self.state = State::Live;
        if ended {
            self.ready.push_back(Told::End { position: self.at });
            self.state = State::Done;
        }
        Ok(())
    }

    async fn hear(&mut self) {
        let line = tokio::select! {
            biased;
            line = self.heard.lines.recv() => line,
            live = self.heard.live.recv() => {
                // Whoever is too slow for it misses some.
                if let Ok((fork, json)) = live
                    && self.live
                    && self.filter.fork.is_none_or(|f| f == fork)
                {
                    self.ready.push_back(Told::Live { fork, json });
                }
                return;
            }
        };
        match line {
            Ok(line) if line.position <= self.at => {}
            Ok(line) if line.position > self.at + 1 => self.state = State::Store { news: false },
            Ok(line) => {
                if !self.filter.wants(&line) {
                    self.at = line.position;
                } else if line.json.is_none() {
                    self.state = State::Store { news: false };
                    return;
                } else {
                    self.at = line.position;
                    self.ready.push_back(Told::Event(line.clone()));
                }
                if line.kind == "run.ended" {
                    self.state = State::Store { news: false };
                }
            }
            Err(RecvError::Lagged(_)) => {
                self.ready.push_back(Told::CatchUp { position: self.at });
                self.state = State::Store { news: true };
            }
            // The feed is held by this tail, so its reader is there.
            Err(RecvError::Closed) => self.state = State::Done,
        }
    }
}
