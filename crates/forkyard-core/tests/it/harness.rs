//! Drives a machine by hand: every step is replayed from its events and must give the same state.

use forkyard_core::fork::{Fork, ForkEvent, ForkInput, ForkPlan, ForkStep};
use forkyard_core::run::{Command, Run, RunEvent, RunInput, RunStep};
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::task::*;
use forkyard_core::view::DiffStat;
use forkyard_core::{HostId, Millis, RunId, SnapshotId, Timestamp, event};

pub fn base() -> Base {
    Base {
        commit: "c0".into(),
        branch: "main".into(),
        snapshot: SnapshotId::new("base").unwrap(),
        host: HostId::new("h").unwrap(),
    }
}

pub fn plan() -> ForkPlan {
    ForkPlan {
        run: RunId::new("r1").unwrap(),
        fork: 0,
        spec: ForkSpec { prompt: "p".into(), model: "script".into(), ..Default::default() },
        base: base(),
        provider: ProviderKind::Local,
        timeout: Millis::secs(100),
        linger: Millis::ZERO,
        keep: false,
        judges: true,
    }
}

pub fn report(stop: AgentStop, turns: u32) -> AgentReport {
    AgentReport { stop, turns, ..Default::default() }
}

pub fn collected() -> Collected {
    Collected {
        commit: "c1".into(),
        diff: DiffStat { files: 1, added: 2, removed: 1 },
        from_checkpoint: false,
        captured: vec![],
        edited_tests: vec![],
        ..Default::default()
    }
}

/// The answer of an activity that has no trouble.
pub fn good(task: &Task) -> TaskResult {
    Ok(match task.kind() {
        TaskKind::PrepareBase => Output::Base(base()),
        TaskKind::VerifyBase => Output::BaseVerified(Verdict { passed: Some(false), ..Default::default() }),
        TaskKind::CheckBudget => Output::BudgetOk,
        TaskKind::CreateSandbox => Output::Created { host: HostId::new("h").unwrap() },
        TaskKind::HealthCheck => Output::Healthy,
        TaskKind::RunAgent => Output::Agent(report(AgentStop::Finished, 3)),
        TaskKind::Collect => Output::Collected(collected()),
        TaskKind::Verify => Output::Verified(Verdict { passed: Some(true), ..Default::default() }),
        TaskKind::Publish => Output::Published { reference: "refs/x".into() },
        TaskKind::Destroy => Output::Destroyed,
    })
}

pub fn bad(class: ErrorClass) -> TaskResult {
    Err(TaskError::new(class, "no"))
}

/// A fork with its log and what it has asked for.
pub struct Rig {
    pub now: Timestamp,
    pub fork: Fork,
    pub log: Vec<(Timestamp, ForkEvent)>,
    pub tasks: Vec<Dispatch>,
    pub cancels: Vec<u64>,
    pub timers: Vec<(Timer, Timestamp)>,
    pub kinds: Vec<TaskKind>,
}

impl Rig {
    pub fn new(plan: ForkPlan) -> Rig {
        Rig::at(Timestamp(1_000_000), plan)
    }
    pub fn at(now: Timestamp, plan: ForkPlan) -> Rig {
        let (fork, step) = Fork::start(now, plan, Wish::default());
        let mut rig =
            Rig { now, fork, log: vec![], tasks: vec![], cancels: vec![], timers: vec![], kinds: vec![] };
        rig.take(step);
        rig
    }
    fn take(&mut self, step: ForkStep) {
        self.log.extend(step.events.into_iter().map(|e| (self.now, e)));
        for effect in step.effects {
            match effect {
                Effect::Perform(d) => {
                    self.kinds.push(d.task.kind());
                    self.tasks.push(d);
                }
                Effect::Cancel { serial } => self.cancels.push(serial),
                Effect::SetTimer { timer, at } => {
                    self.timers.retain(|t| t.0 != timer);
                    self.timers.push((timer, at));
                }
                Effect::ClearTimer { timer } => self.timers.retain(|t| t.0 != timer),
                Effect::Fork { .. } => panic!("a fork has no forks"),
            }
        }
        // Through the stored form, as a new driver would read it.
        let stored: Vec<(Timestamp, ForkEvent)> = self
            .log
            .iter()
            .map(|(at, e)| {
                let (kind, data) = event::encode(e);
                (*at, event::decode_fork(&kind, event::VERSION, data).unwrap())
            })
            .collect();
        let again = Fork::replay(stored.iter().map(|(at, e)| (*at, e))).unwrap();
        assert_eq!(again, self.fork, "replay differs");
    }
    pub fn input(&mut self, input: ForkInput) {
        let step = self.fork.handle(self.now, input);
        self.take(step);
    }
    pub fn pass(&mut self, ms: u64) {
        self.now = self.now + Millis(ms);
    }
    /// Answers the oldest task in flight.
    pub fn answer(&mut self, result: TaskResult) {
        let d = self.tasks.remove(0);
        self.input(ForkInput::Outcome { serial: d.serial, result });
    }
    pub fn answer_good(&mut self) {
        let result = good(&self.tasks[0].task);
        self.answer(result);
    }
    pub fn until(&mut self, kind: TaskKind) {
        while self.tasks[0].task.kind() != kind {
            self.answer_good();
        }
    }
    pub fn finish(&mut self) {
        while !self.fork.is_ended() {
            if self.tasks.is_empty() {
                self.fire();
            } else {
                self.answer_good();
            }
        }
    }
    /// The next timer goes off.
    pub fn fire(&mut self) {
        self.timers.sort_by_key(|t| t.1);
        let (timer, at) = self.timers.remove(0);
        self.now = self.now.max(at);
        self.input(ForkInput::Timer(timer));
    }
    pub fn wish(&mut self, paused: bool, cancelled: bool) {
        self.input(ForkInput::Wish(Wish { paused, cancelled }));
    }
}

/// A run whose forks answer at once.
pub struct RunRig {
    pub now: Timestamp,
    pub run: Run,
    pub log: Vec<(Timestamp, RunEvent)>,
    pub tasks: Vec<Dispatch>,
    pub forks: Vec<(u32, Wish)>,
    pub timers: Vec<(Timer, Timestamp)>,
}

impl RunRig {
    pub fn new(spec: RunSpec) -> RunRig {
        let now = Timestamp(1_000_000);
        let (run, step) = Run::submit(now, RunId::new("r1").unwrap(), spec);
        let mut rig = RunRig { now, run, log: vec![], tasks: vec![], forks: vec![], timers: vec![] };
        rig.take(step);
        rig.input(RunInput::Takeover { commands: vec![] });
        rig
    }
    fn take(&mut self, step: RunStep) {
        self.log.extend(step.events.into_iter().map(|e| (self.now, e)));
        for effect in step.effects {
            match effect {
                Effect::Perform(d) => self.tasks.push(d),
                Effect::Cancel { serial } => {
                    // The activity stops at once.
                    self.tasks.retain(|d| d.serial != serial);
                    let result = bad(ErrorClass::Cancelled);
                    self.input(RunInput::Outcome { serial, result });
                }
                Effect::SetTimer { timer, at } => {
                    self.timers.retain(|t| t.0 != timer);
                    self.timers.push((timer, at));
                }
                Effect::ClearTimer { timer } => self.timers.retain(|t| t.0 != timer),
                Effect::Fork { fork, wish } => {
                    self.forks.retain(|f| f.0 != fork);
                    self.forks.push((fork, wish));
                }
            }
        }
        let stored: Vec<(Timestamp, RunEvent)> = self
            .log
            .iter()
            .map(|(at, e)| {
                let (kind, data) = event::encode(e);
                (*at, event::decode_run(&kind, event::VERSION, data).unwrap())
            })
            .collect();
        assert_eq!(Run::replay(stored.iter().map(|(at, e)| (*at, e))).unwrap(), self.run, "replay differs");
        assert!(self.run.live_forks().count() <= self.run.spec().max_concurrent as usize);
    }
    pub fn input(&mut self, input: RunInput) {
        let step = self.run.handle(self.now, input);
        self.take(step);
    }
    pub fn command(&mut self, command: Command) {
        self.input(RunInput::Command(command));
    }
    pub fn answer(&mut self, kind: TaskKind, result: TaskResult) {
        let i = self.tasks.iter().position(|d| d.task.kind() == kind).expect("such a task is in flight");
        let d = self.tasks.remove(i);
        self.input(RunInput::Outcome { serial: d.serial, result });
    }
    pub fn answer_all(&mut self) {
        while !self.tasks.is_empty() {
            let d = self.tasks.remove(0);
            let result = good(&d.task);
            self.input(RunInput::Outcome { serial: d.serial, result });
        }
    }
    pub fn end_fork(&mut self, fork: u32, result: forkyard_core::fork::ForkResult) {
        self.forks.retain(|f| f.0 != fork);
        self.input(RunInput::ForkEnded(result));
    }
    pub fn live(&self) -> Vec<u32> {
        self.run.live_forks().collect()
    }
    pub fn refusals(&self) -> Vec<&str> {
        self.log
            .iter()
            .filter_map(|(_, e)| match e {
                RunEvent::Refused { reason, .. } => Some(reason.as_str()),
                _ => None,
            })
            .collect()
    }
}
