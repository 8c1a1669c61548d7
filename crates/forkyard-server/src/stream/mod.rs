//! A run's events as they happen. One reader of the store serves all watchers of a run; a watcher that falls behind is
//! told so and goes on from the store, so that nobody is slowed by it and nothing is lost to it.
//!
//! Positions have no gaps. So a watcher that has P delivers P+1 next, from wherever it comes: what is older it drops, what
//! is newer sends it to the store.

//!
//! The list of runs has one reader, too, whose watchers are told which runs changed: see [`runs`].

mod feed;
mod live;
mod runs;
mod sse;
mod tail;

pub use feed::{Feeds, Line};
pub use sse::{frames, response};
pub use tail::{Filter, Tail, Told};
