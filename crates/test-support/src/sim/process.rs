//! A simulated process: alive, standing still, or gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forkyard_store::Bell;

pub struct Proc {
    pub generation: u64,
    alive: AtomicBool,
    paused: AtomicBool,
    resumed: Bell,
}

impl Proc {
    pub fn new(generation: u64) -> Arc<Proc> {
        Arc::new(Proc {
            generation,
            alive: AtomicBool::new(true),
            paused: AtomicBool::new(false),
            resumed: Bell::default(),
        })
    }
    pub fn immortal() -> Arc<Proc> {
        Proc::new(0)
    }
    /// Whatever a process does to the world or the store goes through here: a stopped one waits, a dead one never returns.
    pub async fn gate(&self) {
        loop {
            let heard = self.resumed.rings();
            if !self.paused.load(Ordering::Relaxed) {
                break;
            }
            self.resumed.after(heard).await;
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
        self.paused.store(true, Ordering::Relaxed);
    }
    pub fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
        self.resumed.ring();
    }
}
