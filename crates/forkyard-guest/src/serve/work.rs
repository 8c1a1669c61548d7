//! Requests that take their time: each in a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forkyard_guest::protocol::{Answer, Fault, Op, Request};

use super::outbox::Outbox;
use super::procs;
use super::server::Server;
use crate::files;

/// A thread's stack; grep's engine is the hungriest of them.
const THREAD_STACK: usize = 1 << 20;
/// File threads at once; more requests wait in their connection's order of arrival.
const MAX_THREADS: usize = 32;
/// To whoever writes from outside; commands are killed for it.
const AT_LIMIT: &str = "it would pass the sandbox's disk limit";

impl Server {
    /// Runs in a thread; at most so many at once.
    pub(super) fn ask_files(&mut self, number: u64, request: Request, body: Vec<u8>) {
        let Some(conn) = self.conns.get(&number) else { return };
        if self.threads.load(Ordering::SeqCst) >= MAX_THREADS {
            self.waiting.push_back((number, request, body));
            return;
        }
        let out = conn.out.clone();
        let changes = files::changes_files(&request.op).then(|| Arc::clone(&self.changes));
        if let Some(changes) = &changes {
            changes.fetch_add(1, Ordering::SeqCst);
        }
        self.threads.fetch_add(1, Ordering::SeqCst);
        let threads = Arc::clone(&self.threads);
        let disk = files::adds_files(&request.op).then(|| self.watchdog.disk());
        let (seq, failed) = (request.seq, (out.clone(), changes.clone()));
        let thread = std::thread::Builder::new().stack_size(THREAD_STACK).spawn(move || {
            if disk.is_none_or(|disk| disk.take_room(body.len() as u64)) {
                files::answer(request.seq, request.op, &body, &out);
            } else {
                out.error(request.seq, Fault::TooLarge, AT_LIMIT);
            }
            if let Some(changes) = changes {
                changes.fetch_sub(1, Ordering::SeqCst);
            }
            threads.fetch_sub(1, Ordering::SeqCst);
            out.notify();
        });
        if thread.is_err() {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            let (out, changes) = failed;
            if let Some(changes) = changes {
                changes.fetch_sub(1, Ordering::SeqCst);
            }
            out.error(seq, Fault::Unavailable, "no thread: the sandbox is at its limit of processes");
        }
    }

    pub(super) fn start_waiting(&mut self) {
        while self.threads.load(Ordering::SeqCst) < MAX_THREADS {
            let Some((number, request, body)) = self.waiting.pop_front() else { return };
            // As if it came now: somebody may have asked for quiet meanwhile.
            self.on_request(number, request, body);
        }
    }

    pub(super) fn upload(&mut self, number: u64, seq: u32, write: u32, op: &Op, body: &[u8]) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let out = conn.out.clone();
        if let Op::Append { .. } = op {
            // Not answered: an error is kept for the commit by dropping the upload.
            let disk = self.watchdog.disk();
            let failed = conn.uploads.get_mut(&write).and_then(|upload| {
                if !disk.take_room(body.len() as u64) {
                    return Some(files::FileError::new(Fault::TooLarge, AT_LIMIT));
                }
                upload.append(body).err()
            });
            if let Some(e) = failed {
                conn.uploads.remove(&write);
                self.changes.fetch_sub(1, Ordering::SeqCst);
                out.error(write, e.kind, e.message);
                self.on_quiet();
            }
            return;
        }
        let Some(upload) = conn.uploads.remove(&write) else {
            return out.error(seq, Fault::NotFound, "no such upload");
        };
        let result = if let Op::Commit { .. } = op { upload.commit() } else { Ok(()) };
        self.changes.fetch_sub(1, Ordering::SeqCst);
        match result {
            Ok(()) => out.push(seq, Answer::Done, &[]),
            Err(e) => out.error(seq, e.kind, e.message),
        }
        self.on_quiet();
    }

    pub(super) fn stats(&mut self, seq: u32, out: Outbox) {
        let disk = self.watchdog.disk();
        let spawned = std::thread::Builder::new().stack_size(THREAD_STACK).spawn({
            let out = out.clone();
            move || {
                let processes = procs::all();
                let page = rustix::param::page_size() as u64;
                let tick_us = 1_000_000 / rustix::param::clock_ticks_per_second().max(1);
                let ticks: u64 = processes.iter().map(|p| p.ticks).sum();
                let answer = Answer::Stats {
                    memory_bytes: processes.iter().map(|p| p.resident_pages * page).sum(),
                    cpu_us: ticks * tick_us + children_cpu_us(),
                    processes: processes.len() as u32,
                    disk_bytes: disk.has_upper().then(|| disk.measure()),
                };
                let _ = out.send(seq, answer, &[]);
            }
        });
        if spawned.is_err() {
            out.error(seq, Fault::Unavailable, "no thread: the sandbox is at its limit of processes");
        }
    }
}

fn children_cpu_us() -> u64 {
    // SAFETY: an all-zero rusage is valid and lives across the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let us = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
    us(usage.ru_utime) + us(usage.ru_stime)
}
