//! Commands under way: their streams, their ends, and the limits that the guest itself keeps.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll;

use super::job::{Feed, Which};
use super::server::{Server, Token, has_children};
use super::spool;
use super::watch::{INTERVAL, Limit, Verdict};
use crate::sys::ipc;

impl Server {
    /// Watches the streams of a job that can take more, and no others: a closed pipe would report itself for ever.
    pub(super) fn watch_job(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        for which in [Which::Stdout, Which::Stderr] {
            let stream = job.stream(which);
            let Some(fd) = &stream.fd else { continue };
            let wanted = stream.spool.room() > 0;
            if wanted != stream.watched {
                stream.watched = wanted;
                let data = epoll::EventData::new_u64(Token::Output(which, number).pack());
                let _ = if wanted {
                    epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
                } else {
                    epoll::delete(&self.epoll, fd)
                };
            }
        }
    }

    pub(super) fn read_output(&mut self, number: u64, which: Which) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        let dir = self.config.spool.as_ref().map(|fd| fd.as_fd());
        let budget = spool::MAX_TOTAL.saturating_sub(self.spooled);
        let taken = job.read(which, &mut self.buffer, dir, budget);
        if job.call.is_some() {
            self.spooled += taken.bytes;
        }
        if taken.over {
            let stream = job.stream(which);
            close(&self.epoll, &mut stream.fd, &mut stream.watched);
        }
        self.progress(number);
    }

    /// After anything happened to a job: pass output on, notice its end, forget it if nobody waits for it.
    pub(super) fn progress(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        job.pump();
        if job.exit.is_none() && job.is_done(Instant::now()) {
            job.finish();
            let left = [job.stdout.fd.take(), job.stderr.fd.take()];
            close(&self.epoll, &mut job.stdin, &mut job.stdin_watched);
            job.terminal = None;
            job.pump();
            for fd in left.into_iter().flatten() {
                let drain = self.number();
                let _ = epoll::delete(&self.epoll, &fd);
                if self.watch(fd.as_fd(), Token::Drain(drain), epoll::EventFlags::IN).is_ok() {
                    self.drains.insert(drain, fd);
                }
            }
        }
        let Some(job) = self.jobs.get(&number) else { return };
        if job.exit.is_some() && job.call.is_none() && job.readers.is_empty() {
            self.jobs.remove(&number);
        } else {
            self.watch_job(number);
        }
    }

    pub(super) fn feed(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        let wants = match job.feed() {
            Feed::Over => return close(&self.epoll, &mut job.stdin, &mut job.stdin_watched),
            Feed::Room => true,
            Feed::Nothing => false,
        };
        let Some(stdin) = &job.stdin else { return };
        if wants != job.stdin_watched {
            job.stdin_watched = wants;
            let data = epoll::EventData::new_u64(Token::Stdin(number).pack());
            let _ = if wants {
                epoll::add(&self.epoll, stdin, data, epoll::EventFlags::OUT)
            } else {
                epoll::delete(&self.epoll, stdin)
            };
        }
    }

    /// Takes in every child that has ended, commands and orphans alike.
    pub(super) fn reap(&mut self) {
        let mut info = [0; 512];
        while rustix::io::read(&self.children, &mut info).is_ok_and(|n| n == info.len()) {}
        let (mut ended, mut any, mut killed) = (Vec::new(), false, false);
        loop {
            let mut status = 0;
            // SAFETY: waitpid writes one status, which lives across the call.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                break;
            }
            any = true;
            killed |= libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
            let job = self.jobs.iter_mut().find(|(_, job)| job.pid == pid && job.ended.is_none());
            if let Some((number, job)) = job {
                job.ended = Some((status, Instant::now()));
                ended.push(*number);
            }
        }
        if any {
            self.see_oom();
        }
        // Whoever held too much was killed: what it held without a process would be left.
        if killed && std::process::id() == 1 && !has_children() {
            ipc::clear();
        }
        for number in ended {
            if let Some(job) = self.jobs.get_mut(&number) {
                job.oom_killed |= self.oom_seen > job.oom_before && job.was_killed();
            }
            // What it wrote last is in the pipe by now.
            for which in [Which::Stdout, Which::Stderr] {
                self.read_output(number, which);
            }
            self.progress(number);
        }
    }

    /// Looks at the kernel's count of processes that it killed for this sandbox's memory limit.
    pub(super) fn see_oom(&mut self) {
        let Some(events) = &self.config.oom_events else { return };
        let mut text = [0; 512];
        let n = rustix::io::pread(events, &mut text, 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..n]);
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        // It only grows: one that can't be read is no news.
        self.oom_seen = self.oom_seen.max(count.unwrap_or(0));
    }

    pub(super) fn look(&mut self, now: Instant) {
        if self.next_look.is_some_and(|at| now < at) {
            return;
        }
        if !has_children() {
            self.next_look = None;
            return;
        }
        self.next_look = Some(now + INTERVAL);
        let by_signals = self.still.is_some();
        if let Some(still) = &mut self.still {
            still.renew();
        }
        let limit = match self.watchdog.look(by_signals, self.stands_still()) {
            Verdict::Fine => return,
            Verdict::Over(limit) => limit,
        };
        let why = match limit {
            Limit::Memory => "the sandbox passed its memory limit",
            Limit::Disk => "the sandbox passed its disk limit",
            Limit::Processors => {
                "the sandbox passed its limit of processors, and went on while it was stopped"
            }
            Limit::Pause => "a command went on while the sandbox was paused",
        };
        for job in self.jobs.values_mut().filter(|job| job.ended.is_none()) {
            job.note = Some(format!("forkyard: killed, because {why}\n"));
            job.oom_killed |= limit == Limit::Memory;
        }
        self.watchdog.kill();
    }

    /// Whether something is not kept by the kernel.
    pub(super) fn has_to_look(&self) -> bool {
        self.watchdog.is_needed() || self.still.is_some()
    }

    /// A new command may be what the watchdog has to look at.
    pub(super) fn expect_work(&mut self) {
        if !self.has_to_look() {
            return;
        }
        if self.next_look.is_none() {
            self.watchdog.begin();
            self.next_look = Some(Instant::now() + INTERVAL);
        }
        self.watchdog.measure_if_over();
    }
}

/// What is closed is taken out of the loop first: of a terminal there are several descriptors, and while one of them is open the
/// kernel goes on to report what another was watched for.
fn close(epoll: &OwnedFd, fd: &mut Option<OwnedFd>, watched: &mut bool) {
    if let Some(fd) = fd.take()
        && *watched
    {
        let _ = epoll::delete(epoll, &fd);
    }
    *watched = false;
}
