//! Work on the files of sandboxes in a fork of the zygote: it owns them, and has rights over whatever modes they were given,
//! but over nothing else of the host.

use std::os::fd::{AsFd, OwnedFd};

use forkyard_guest::zygote::{Work, WorkResult};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::reply;
use crate::files::archive::{self, Refusal};
use crate::files::{image, merge, tree};
use crate::sys::Failure;

/// Of a worker: whoever built a tree or an archive to fill it ends the worker, not the machine. Millions of files with a
/// second name each fit.
const MAX_MEMORY: u64 = 1 << 30;

pub fn run(work: Work, fds: Vec<OwnedFd>) {
    // A removal holds the names of folders on its way down alone, and what it can't remove would stay for ever.
    if !matches!(work, Work::Remove { .. }) {
        let _ = setrlimit(Resource::As, Rlimit { current: Some(MAX_MEMORY), maximum: Some(MAX_MEMORY) });
    }
    let mut fds = fds.into_iter();
    let Some(result) = fds.next() else { return };
    let at = |path: &str| format!("/state/{path}");
    let outcome = match work {
        Work::Remove { path } => tree::remove(&at(&path)).map(|()| WorkResult::Done { bytes: 0, entries: 0 }),
        Work::Measure { path } => tree::measure(&at(&path)).map(done),
        Work::Copy { from, to, limit_ms } => {
            let from = match from {
                Some(path) => tree::open(&at(&path)),
                None => fds.next().ok_or_else(missing),
            };
            match from.and_then(|from| tree::copy(from.as_fd(), &at(&to), Some(limit_ms))) {
                Ok(Some(size)) => Ok(done(size)),
                Ok(None) => Ok(WorkResult::TimedOut),
                Err(e) => Err(e),
            }
        }
        Work::Merge { layers, to } => {
            let layers: Vec<String> = layers.iter().map(|layer| at(layer)).collect();
            merge::merge(&layers, &at(&to)).map(done)
        }
        Work::Pack { layer } => match fds.next() {
            Some(archive) => archive::pack(&at(&layer), archive).map(done),
            None => Err(missing()),
        },
        Work::Unpack { layer, limits } => {
            unpacked(fds.next().map(|from| archive::unpack(from, &at(&layer), limits)))
        }
        Work::UnpackImage { layer, limits } => {
            unpacked(fds.next().map(|from| image::unpack(from, &at(&layer), limits)))
        }
    };
    let outcome = outcome.unwrap_or_else(|Failure { step, errno }| WorkResult::Failed { step, errno });
    reply(result.as_fd(), &outcome, &[]);
}

fn done(size: tree::Size) -> WorkResult {
    WorkResult::Done { bytes: size.bytes, entries: size.entries }
}

fn unpacked(result: Option<Result<tree::Size, Refusal>>) -> crate::sys::Result<WorkResult> {
    match result {
        Some(Ok(size)) => Ok(done(size)),
        Some(Err(Refusal::Broken(reason))) => Ok(WorkResult::Refused { reason }),
        Some(Err(Refusal::Failed(failure))) => Err(failure),
        None => Err(missing()),
    }
}

fn missing() -> Failure {
    Failure { step: "descriptor".into(), errno: libc::EBADF }
}
