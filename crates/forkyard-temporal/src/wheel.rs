//! What turns a machine inside a workflow: its tasks as activities, its timers, and its events on their way into the store.
//!
//! Everything pending is polled in the order in which it began, so a replay sees the same. Nothing here inherits the workflow's
//! own cancellation: the machine decides what a cancel stops, and cleanup goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::{Duration, UNIX_EPOCH};

use forkyard_core::budget::Balance;
use forkyard_core::fork::ForkResult;
use forkyard_core::task::{Dispatch, ErrorClass, Output, Task, TaskError, TaskKind, TaskResult, Timer};
use forkyard_core::view::View;
use forkyard_core::{ForkNum, HostId, RunId, SandboxId, Timestamp};
use forkyard_store::{CommandId, LeaseToken, NewEvent};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use temporalio_common::{ActivityDefinition, RetryPolicy};
use temporalio_sdk::{
    ActivityCancellationType, ActivityExecutionError, ActivityOptions, TimeoutType, TimerOptions,
    TimerResult, WorkflowCancellationToken, WorkflowContext,
};

use crate::hand::{Hand, LET_GO, REFUSED, SILENT};
use crate::wire::{
    ATTENTIVE, Ask, ForkEnd, Look, Pace, Perform, Performed, Record, Waiting, host_queue, making_queue,
};

/// Above a task's own limit, which the worker keeps: for the way there and back.
const SLACK: Duration = Duration::from_secs(60);
/// How long a task may wait for room on a host that has taken it.
const ROOM_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);
/// What is asked of the store and not of a sandbox takes milliseconds. One that takes this long was given to a worker that is
/// cut off, or whose store hangs, and is asked again of whoever is there.
pub const SMALL: Duration = Duration::from_secs(10);
/// Between two tries of what was refused: the store is away, or the worker has another one.
const FIRST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(60);

/// Whose machine it is, and what all its activities have to know.
#[derive(Debug, Clone)]
pub struct Frame {
    pub run: RunId,
    pub fork: Option<ForkNum>,
    pub store: String,
    pub lease: LeaseToken,
    pub pace: Pace,
    pub counted: bool,
    /// Of the workflow.
    pub logic: u32,
}

/// How a task ended.
pub enum TaskEnd {
    Done(Performed),
    /// Its worker shows no sign of life any more.
    Lost,
    /// Nobody ever said a word of it: it was given to the poll of a worker that is no more.
    Unheard,
    /// Its worker was stopped on purpose.
    LetGo,
    /// No worker of the host that has its sandbox takes anything.
    HostLost(HostId),
    /// Before it began.
    Stopped,
    Broken(String),
}

/// What a task's end means to its machine.
pub enum Outcome {
    Result(TaskResult, Option<Balance>),
    /// The next attempt begins.
    Lost {
        let_go: bool,
    },
    /// So it does here, and nothing was begun before.
    Unheard,
}

impl TaskEnd {
    pub fn outcome(self, kind: TaskKind) -> Outcome {
        let error = match self {
            TaskEnd::Done(done) => return Outcome::Result(done.result, done.balance),
            TaskEnd::Lost => return Outcome::Lost { let_go: false },
            TaskEnd::LetGo => return Outcome::Lost { let_go: true },
            TaskEnd::Unheard => return Outcome::Unheard,
            TaskEnd::HostLost(host) => host_lost(kind, &host),
            TaskEnd::Stopped => TaskError::new(ErrorClass::Cancelled, "was stopped"),
            TaskEnd::Broken(why) => TaskError::new(ErrorClass::Transient, why),
        };
        Outcome::Result(Err(error), None)
    }
}

/// What it means for a task that its host is gone. A sandbox there is lost with it, and what has to be destroyed there is owed
/// to the host's own sweep.
fn host_lost(kind: TaskKind, host: &HostId) -> TaskError {
    let class = match kind {
        TaskKind::HealthCheck | TaskKind::RunAgent => ErrorClass::SandboxLost,
        TaskKind::Destroy => ErrorClass::Permanent,
        TaskKind::PrepareBase
        | TaskKind::VerifyBase
        | TaskKind::CheckBudget
        | TaskKind::CreateSandbox
        | TaskKind::Collect
        | TaskKind::Verify
        | TaskKind::Publish => ErrorClass::Transient,
    };
    TaskError::new(class, format!("no worker of host {host} takes anything: it is lost"))
}

/// What came of something that was pending.
pub enum Arrived {
    Task {
        serial: u64,
        kind: TaskKind,
        sandbox: Option<SandboxId>,
        ended: TaskEnd,
        stamp: Stamp,
    },
    Timer(Timer, u64),
    Recorded(Stamp),
    Looked(Look),
    Inbox(Waiting),
    ForkStarted(ForkNum),
    ForkEnded(ForkNum, Result<ForkEnd, String>),
    /// Something was sent; nothing follows from it.
    Sent,
}

/// A workflow whose signals leave notes.
pub trait Noted {
    fn has_notes(&self) -> bool;
}

/// How far the events go that somebody carries.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    seq: u64,
    note: u64,
}

/// Events that may not have arrived in the store yet.
#[derive(Default)]
struct Outbox {
    /// Of the stream that surely are there.
    from: u64,
    events: Vec<NewEvent>,
    views: Vec<View>,
    /// Commands that were answered, each with the note that did.
    consume: Vec<(u64, CommandId)>,
    /// Notes that were taken; a note is what one step left.
    noted: u64,
    /// Up to this note somebody is on the way with it.
    carried: u64,
    recording: bool,
}

impl Outbox {
    fn is_empty(&self) -> bool {
        self.events.is_empty() && self.consume.is_empty()
    }
    fn stamp(&self) -> Stamp {
        Stamp { seq: self.from + self.events.len() as u64, note: self.noted }
    }
    fn arrived(&mut self, stamp: Stamp) {
        let n = stamp.seq.saturating_sub(self.from).min(self.events.len() as u64);
        self.events.drain(..n as usize);
        self.from += n;
        self.consume.retain(|(note, _)| *note > stamp.note);
    }
    /// Whoever carried it ended, and nobody knows whether it got through: what is left goes again.
    fn in_doubt(&mut self, stamp: Stamp) {
        if self.carried <= stamp.note && !self.is_empty() {
            self.carried = 0;
        }
    }
}

pub struct Wheel<'a, W> {
    ctx: &'a WorkflowContext<W>,
    frame: Frame,
    pending: Vec<LocalBoxFuture<'a, Arrived>>,
    tasks: BTreeMap<u64, WorkflowCancellationToken>,
    timers: BTreeMap<Timer, (u64, WorkflowCancellationToken)>,
    timers_set: u64,
    outbox: Outbox,
    /// Where sandboxes are, or were asked for.
    homes: BTreeMap<SandboxId, HostId>,
    /// Where the result's commit is.
    bench: Option<HostId>,
    lost_hosts: BTreeSet<HostId>,
    cancel_heard: bool,
}

pub fn now<W>(ctx: &WorkflowContext<W>) -> Timestamp {
    let time = ctx.workflow_time().unwrap_or(UNIX_EPOCH);
    Timestamp(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64)
}

/// Of the store: tried again until it is done, by whichever worker can.
fn small(summary: &str) -> ActivityOptions {
    ActivityOptions::with_start_to_close_timeout(SMALL)
        .cancellation_token(WorkflowCancellationToken::new())
        .retry_policy(
            RetryPolicy::builder().initial_interval(FIRST_REST).maximum_interval(LONGEST_REST).build(),
        )
        .summary(summary)
        .build()
}

impl<'a, W: Noted> Wheel<'a, W> {
    /// `seq` events of its stream are there already.
    pub fn new(ctx: &'a WorkflowContext<W>, frame: Frame, seq: u64) -> Wheel<'a, W> {
        Wheel {
            ctx,
            frame,
            pending: vec![],
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            timers_set: 0,
            outbox: Outbox { from: seq, ..Outbox::default() },
            homes: BTreeMap::new(),
            bench: None,
            lost_hosts: BTreeSet::new(),
            cancel_heard: false,
        }
    }

    /// Whether the workflow itself was cancelled, as by the end of its parent. Said once.
    pub fn hears_cancel(&mut self) -> bool {
        let news = self.ctx.cancellation_token().is_cancelled() && !self.cancel_heard;
        self.cancel_heard |= news;
        news
    }

    pub fn push(&mut self, future: impl Future<Output = Arrived> + 'a) {
        self.pending.push(Box::pin(future));
    }

    /// Everything that has come by now, at least one thing; or nothing, if there are notes or a cancel.
    pub async fn next(&mut self) -> Vec<Arrived> {
        let (ctx, pending) = (self.ctx, &mut self.pending);
        let attentive = self.frame.logic >= ATTENTIVE && !self.cancel_heard;
        let arrived = poll_fn(|cx| {
            let mut arrived = vec![];
            let mut k = 0;
            while k < pending.len() {
                match pending[k].as_mut().poll(cx) {
                    Poll::Ready(a) => {
                        drop(pending.remove(k));
                        arrived.push(a);
                    }
                    Poll::Pending => k += 1,
                }
            }
            // The state is only looked at: changing it in here would wake this for ever.
            let cancelled = attentive && ctx.cancellation_token().is_cancelled();
            match arrived.is_empty() && !cancelled && !ctx.state(W::has_notes) {
                true => Poll::Pending,
                false => Poll::Ready(arrived),
            }
        })
        .await;
        for a in &arrived {
            match a {
                Arrived::Task { stamp, ended: TaskEnd::Done(_), .. } => self.outbox.arrived(*stamp),
                Arrived::Task { stamp, .. } => self.outbox.in_doubt(*stamp),
                Arrived::Recorded(stamp) => {
                    self.outbox.arrived(*stamp);
                    self.outbox.recording = false;
                }
                Arrived::Timer(..)
                | Arrived::Looked(_)
                | Arrived::Inbox(_)
                | Arrived::ForkStarted(_)
                | Arrived::ForkEnded(..)
                | Arrived::Sent => {}
            }
        }
        arrived
    }

    // ---- events

    /// To be called before the effects of a step: tasks carry its events.
    pub fn note(&mut self, events: Vec<NewEvent>, views: Vec<View>, consume: &[CommandId]) {
        if events.is_empty() && consume.is_empty() {
            return;
        }
        let o = &mut self.outbox;
        o.noted += 1;
        if !events.is_empty() {
            o.views = views;
        }
        o.events.extend(events);
        o.consume.extend(consume.iter().map(|id| (o.noted, *id)));
    }

    fn record(&mut self) -> (Record, Stamp) {
        let o = &mut self.outbox;
        o.carried = o.noted;
        let record = Record {
            run: self.frame.run.clone(),
            fork: self.frame.fork,
            store: self.frame.store.clone(),
            lease: self.frame.lease,
            from: o.from,
            events: o.events.clone(),
            views: if o.events.is_empty() { vec![] } else { o.views.clone() },
            consume: o.consume.iter().map(|(_, id)| *id).collect(),
        };
        (record, o.stamp())
    }

    /// Sends what no task carries. One at a time: what comes meanwhile goes with the next.
    pub fn flush(&mut self) {
        let o = &self.outbox;
        if o.recording || o.is_empty() || o.carried == o.noted {
            return;
        }
        let (record, stamp) = self.record();
        self.outbox.recording = true;
        let sent = self.ctx.execute_activity(Hand::record, record, small("record"));
        self.push(async move {
            // It is tried until it is done; an error is one of reading its answer.
            let _ = sent.await;
            Arrived::Recorded(stamp)
        });
    }

    /// Everything that happened is in the store.
    pub fn is_settled(&self) -> bool {
        self.outbox.is_empty() && !self.outbox.recording
    }

    // ---- tasks

    pub fn perform(&mut self, dispatch: Dispatch) {
        let (kind, serial) = (dispatch.task.kind(), dispatch.serial);
        let home = self.home(&dispatch.task);
        if let (Some(host), Some(id)) = (&home, dispatch.task.creates()) {
            self.homes.insert(id.clone(), host.clone());
        }
        let sandbox = dispatch.task.creates().cloned();
        let (record, stamp) = self.record();
        let token = WorkflowCancellationToken::new();
        self.tasks.insert(serial, token.clone());
        let perform = Perform {
            record,
            serial,
            attempt: dispatch.attempt,
            limit: dispatch.limit,
            task: dispatch.task,
            pace: self.frame.pace,
            counted: self.frame.counted,
        };
        let (ctx, queue) = (self.ctx, self.ctx.task_queue().to_string());
        self.push(async move {
            let ended = task(ctx, &queue, home, kind, perform, token).await;
            Arrived::Task { serial, kind, sandbox, ended, stamp }
        });
    }

    /// The host that a task has to be done on; None: any.
    fn home(&self, task: &Task) -> Option<HostId> {
        let host = match task {
            Task::PrepareBase { .. } | Task::CheckBudget | Task::CreateSandbox { .. } => None,
            Task::VerifyBase { base, .. } => Some(&base.host),
            Task::HealthCheck { sandbox }
            | Task::RunAgent { sandbox, .. }
            | Task::Collect { sandbox, .. }
            | Task::Destroy { sandbox } => self.homes.get(sandbox),
            // Where the work was collected.
            Task::Verify { .. } | Task::Publish { .. } => self.bench.as_ref(),
        };
        // What a lost host owes is asked of it once more, so that it is known to be owed.
        let owed = matches!(task, Task::Destroy { .. });
        host.filter(|h| owed || !self.lost_hosts.contains(*h)).cloned()
    }

    pub fn cancel(&self, serial: u64) {
        if let Some(token) = self.tasks.get(&serial) {
            token.cancel();
        }
    }

    /// Whether somebody still waits for this task. Remembers where it was done.
    pub fn heard(&mut self, serial: u64, sandbox: Option<&SandboxId>, ended: &TaskEnd) -> bool {
        match ended {
            TaskEnd::Done(done) => {
                if let Some(id) = sandbox {
                    self.homes.insert(id.clone(), done.host.clone());
                }
                if let Ok(Output::Collected(_)) = &done.result {
                    self.bench = Some(done.host.clone());
                }
            }
            TaskEnd::HostLost(host) => {
                self.lost_hosts.insert(host.clone());
            }
            TaskEnd::Lost | TaskEnd::Unheard | TaskEnd::LetGo | TaskEnd::Stopped | TaskEnd::Broken(_) => {}
        }
        self.tasks.remove(&serial).is_some()
    }

    pub fn host_of(&self, sandbox: &SandboxId) -> Option<&HostId> {
        self.homes.get(sandbox)
    }

    /// What comes of them from now on concerns nobody.
    pub fn let_go(&mut self) {
        for token in std::mem::take(&mut self.tasks).into_values() {
            token.cancel();
        }
        for (_, token) in std::mem::take(&mut self.timers).into_values() {
            token.cancel();
        }
    }

    // ---- timers

    pub fn set_timer(&mut self, timer: Timer, at: Timestamp) {
        self.clear_timer(timer);
        self.timers_set += 1;
        let (n, token) = (self.timers_set, WorkflowCancellationToken::new());
        self.timers.insert(timer, (n, token.clone()));
        let wait = at.since(now(self.ctx)).as_duration().max(Duration::from_millis(1));
        let summary = match timer {
            Timer::Deadline => "deadline",
            Timer::Linger => "linger",
            Timer::Retry(_) => "retry",
        };
        let fires = self
            .ctx
            .timer(TimerOptions::builder(wait).cancellation_token(token).summary(summary.into()).build());
        self.push(async move {
            match fires.await {
                TimerResult::Fired => Arrived::Timer(timer, n),
                TimerResult::Cancelled => Arrived::Sent,
            }
        });
    }

    pub fn clear_timer(&mut self, timer: Timer) {
        if let Some((_, token)) = self.timers.remove(&timer) {
            token.cancel();
        }
    }

    /// Whether this timer is the one that was set last.
    pub fn fired(&mut self, timer: Timer, n: u64) -> bool {
        let is = self.timers.get(&timer).is_some_and(|(set, _)| *set == n);
        if is {
            self.timers.remove(&timer);
        }
        is
    }

    // ---- the store

    fn ask(&self) -> Ask {
        Ask {
            run: self.frame.run.clone(),
            fork: self.frame.fork.unwrap_or(0),
            store: self.frame.store.clone(),
        }
    }

    pub fn look(&mut self) {
        let unread = Arrived::Looked(Look { progress: 0, messages: false });
        self.small(Hand::look, self.ask(), "look", unread, Arrived::Looked);
    }

    pub fn read_inbox(&mut self) {
        let unread = Arrived::Inbox(Waiting { commands: vec![], unreadable: vec![] });
        self.small(Hand::inbox, self.ask(), "inbox", unread, Arrived::Inbox);
    }

    pub fn tell(&mut self, said: crate::wire::Said, key: String) {
        let mut ask = self.ask();
        ask.fork = said.fork;
        let tell = crate::wire::Tell { ask, said, key, at: now(self.ctx) };
        self.small(Hand::tell, tell, "message", Arrived::Sent, |()| Arrived::Sent);
    }

    /// `unread`: what an answer comes to that can't be read, because it is something newer's. Whoever asked is not left waiting for
    /// it, and asks again with the next news.
    fn small<A: ActivityDefinition + 'static>(
        &mut self,
        activity: A,
        input: A::Input,
        summary: &str,
        unread: Arrived,
        arrived: impl FnOnce(A::Output) -> Arrived + 'a,
    ) where
        A::Output: temporalio_common::data_converters::TemporalDeserializable,
    {
        let asked = self.ctx.execute_activity(activity, input, small(summary));
        self.push(async move {
            match asked.await {
                Ok(answer) => arrived(answer),
                Err(_) => unread,
            }
        });
    }
}

async fn task<W>(
    ctx: &WorkflowContext<W>,
    queue: &str,
    home: Option<HostId>,
    kind: TaskKind,
    perform: Perform,
    token: WorkflowCancellationToken,
) -> TaskEnd {
    let pace = perform.pace;
    let makes = home.is_none() && !matches!(kind, TaskKind::CheckBudget | TaskKind::Destroy);
    let limit = perform.limit.as_duration() + pace.grace.as_duration() + SLACK;
    let mut rest = FIRST_REST;
    loop {
        let limit = if makes { limit + ROOM_WAIT } else { limit };
        let options = ActivityOptions::with_start_to_close_timeout(limit)
            .activity_id(format!("{}-{}", kind.as_str(), perform.serial))
            .heartbeat_timeout(pace.lost_after.as_duration())
            .cancellation_type(ActivityCancellationType::WaitCancellationCompleted)
            .cancellation_token(token.clone())
            // The machine counts tries.
            .retry_policy(RetryPolicy::builder().maximum_attempts(1).build())
            .summary(format!("{} (attempt {})", kind.as_str(), perform.attempt));
        let options = match &home {
            Some(host) => options
                .task_queue(host_queue(queue, host))
                .schedule_to_start_timeout(pace.host_lost_after.as_duration())
                .build(),
            None if makes => options.task_queue(making_queue(queue)).build(),
            None => options.build(),
        };
        let error = match activity(ctx, kind, perform.clone(), options).await {
            Ok(done) => return TaskEnd::Done(done),
            Err(e) => e,
        };
        if let Some(timeout) = error.as_timeout() {
            // A worker's first word comes with the beginning.
            let silent = timeout.raw_last_heartbeat_details().is_none_or(<[_]>::is_empty);
            return match (timeout.timeout_type(), home) {
                (TimeoutType::ScheduleToStart, Some(host)) => TaskEnd::HostLost(host),
                (TimeoutType::Heartbeat, _) if silent => TaskEnd::Unheard,
                _ => TaskEnd::Lost,
            };
        }
        if error.as_cancelled().is_some() {
            return TaskEnd::Stopped;
        }
        match failure_type(&error) {
            Some(REFUSED) if token.is_cancelled() => return TaskEnd::Stopped,
            Some(REFUSED) => {
                let options = TimerOptions::builder(rest).cancellation_token(token.clone()).build();
                ctx.timer(options).await;
                rest = (rest * 2).min(LONGEST_REST);
            }
            Some(LET_GO) => return TaskEnd::LetGo,
            Some(SILENT) => return TaskEnd::Lost,
            _ => return TaskEnd::Broken(said(&error)),
        }
    }
}

fn failure_type(error: &ActivityExecutionError) -> Option<&str> {
    match error.reason() {
        Some(temporalio_common::error::IncomingError::Application(failure)) => failure.type_name(),
        _ => None,
    }
}

/// The innermost reason, which is what people can do something about.
pub fn said(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

type Doing<'c> = LocalBoxFuture<'c, Result<Performed, ActivityExecutionError>>;

/// Each kind has a name of its own, for those who look at a history.
fn activity<W>(ctx: &WorkflowContext<W>, kind: TaskKind, p: Perform, o: ActivityOptions) -> Doing<'_> {
    match kind {
        TaskKind::PrepareBase => ctx.execute_activity(Hand::prepare_base, p, o).boxed_local(),
        TaskKind::VerifyBase => ctx.execute_activity(Hand::verify_base, p, o).boxed_local(),
        TaskKind::CheckBudget => ctx.execute_activity(Hand::check_budget, p, o).boxed_local(),
        TaskKind::CreateSandbox => ctx.execute_activity(Hand::create_sandbox, p, o).boxed_local(),
        TaskKind::HealthCheck => ctx.execute_activity(Hand::health_check, p, o).boxed_local(),
        TaskKind::RunAgent => ctx.execute_activity(Hand::run_agent, p, o).boxed_local(),
        TaskKind::Collect => ctx.execute_activity(Hand::collect, p, o).boxed_local(),
        TaskKind::Verify => ctx.execute_activity(Hand::verify, p, o).boxed_local(),
        TaskKind::Publish => ctx.execute_activity(Hand::publish, p, o).boxed_local(),
        TaskKind::Destroy => ctx.execute_activity(Hand::cleanup_sandbox, p, o).boxed_local(),
    }
}

/// A fork whose workflow ended without a result.
pub fn broken(fork: ForkNum, why: String) -> ForkResult {
    ForkResult::unstarted(fork, forkyard_core::view::ForkOutcome::Failed, Some(why))
}
