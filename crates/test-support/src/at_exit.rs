//! What a test process leaves behind is removed when it ends, also when tests share it.

use std::sync::{Mutex, Once};

type Cleanup = Box<dyn FnOnce() + Send>;

static CLEANUPS: Mutex<Vec<Cleanup>> = Mutex::new(Vec::new());
static REGISTERED: Once = Once::new();

extern "C" fn run() {
    let mut all = CLEANUPS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Last in, first out, as with values in a scope.
    while let Some(cleanup) = all.pop() {
        cleanup();
    }
}

/// Runs `cleanup` when the process exits (not when it is killed).
pub fn at_exit(cleanup: impl FnOnce() + Send + 'static) {
    REGISTERED.call_once(|| {
        // SAFETY: `run` is a plain function without arguments that lives as long as the process.
        assert_eq!(unsafe { libc::atexit(run) }, 0, "no room for another exit handler");
    });
    CLEANUPS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(Box::new(cleanup));
}

/// Keeps a temporary folder for as long as the process runs.
pub fn keep_until_exit(folder: tempfile::TempDir) {
    at_exit(move || drop(folder));
}
