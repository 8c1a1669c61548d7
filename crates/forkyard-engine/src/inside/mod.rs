//! An agent that works inside its own sandbox: the token that it shows, what it is told, and the desk where its journal and
//! its testimony are taken in. The host starts it and listens; see `activities::worker`.

mod desk;
mod relay;
mod task;
mod token;

pub use desk::{Desk, DeskError, Entry, MAX_JOURNAL_PAGE, Testimony, is_journal_kind};
pub use relay::{Asked, Refusal, Relays};
pub use task::{TaskData, bytes_as_gib};
pub use token::{Claims, PREFIX, Refused, TOKEN_LIFETIME, Tokens};

/// Where an agent inside finds its server; the proxy of every sandbox that has a token leads there.
pub const CALLBACK_URL: &str = "http://forkyard.internal";

/// What is the worker's own, below its user's home: its token, its task, its program.
pub const WORKER_DIR: &str = ".forkyard";

/// Recorded when whoever works inside says that it is done.
pub const TASK_COMPLETED: &str = "worker.task_completed";
pub const HEARTBEAT: &str = "agent.heartbeat";
