//! Looks that take too long for who serves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const STACK_BYTES: usize = 256 << 10;

/// One look at a time, in a thread of its own, and what the last one found.
#[derive(Debug)]
pub struct Aside<T> {
    found: Mutex<Option<T>>,
    busy: AtomicBool,
}

/// One is under way.
pub struct Busy;

impl<T> Default for Aside<T> {
    fn default() -> Aside<T> {
        Aside { found: Mutex::new(None), busy: AtomicBool::new(false) }
    }
}

impl<T: Send + 'static> Aside<T> {
    pub fn take(&self) -> Option<T> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What it finds comes later, unless no thread can be had: whoever has used up all processes is looked at all the same, here.
    pub fn start(self: &Arc<Self>, look: impl Fn() -> T + Send + Sync + 'static) -> Result<Option<T>, Busy> {
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(Busy);
        }
        let look = Arc::new(look);
        let (aside, theirs) = (Arc::clone(self), Arc::clone(&look));
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            let found = theirs();
            *aside.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
            aside.busy.store(false, Ordering::Release);
        });
        Ok(thread.is_err().then(|| {
            self.busy.store(false, Ordering::Release);
            look()
        }))
    }
}
