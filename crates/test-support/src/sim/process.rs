//! A simulated process: alive, standing still, or gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

pub struct Proc {
    pub generation: u64,
    alive: AtomicBool,
    paused: watch::Sender<bool>,
}

impl Proc {
    pub fn new(generation: u64) -> Arc<Proc> {
        Arc::new(Proc { generation, alive: AtomicBool::new(true), paused: watch::Sender::new(false) })
    }
    pub fn immortal() -> Arc<Proc> {
        Proc::new(0)
    }
    /// Whatever a process does to the world or the store goes through here: a stopped one waits, a dead one never returns.
    pub async fn gate(&self) {
        let mut paused = self.paused.subscribe();
        while *paused.borrow_and_update() {
            if paused.changed().await.is_err() {
                break;
            }
        }
        if !self.is_alive() {
            std::future::pending::<()>().await;
        }
    }
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }
    pub fn die(&self) {
        self.alive.store(false, Ordering::Relaxed);
    }
    /// SIGSTOP.
    pub fn pause(&self) {
        self.paused.send_replace(true);
    }
    pub fn resume(&self) {
        self.paused.send_replace(false);
    }
}
