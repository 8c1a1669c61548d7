//! What every provider must do, and what a hostile program inside must not be able to do. The same cases run on each of them,
//! in tests and by `forkyard doctor --attack`.

mod attacks;
mod bad_input;
mod commands;
mod files;
mod lifecycle;
mod secrets;
mod snapshots;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forkyard_core::{Attempt, SandboxId};
use futures::future::BoxFuture;

pub use self::attacks::{Attack, AttackReport, Ending, Stage, attempt, markdown as attacks_markdown};

use crate::{Achieved, Capabilities, ExecRequest, ExecResult, Provider, Sandbox, SandboxError, SandboxSpec};

/// Where cases run.
pub struct Ctx {
    pub provider: Arc<dyn Provider>,
    /// Another provider object on the same state, as another process would have.
    pub other: Arc<dyn Provider>,
    /// What sandboxes are made from; cases change what they are about.
    pub spec: SandboxSpec,
    /// The network of the providers, where attacks on it are to be made.
    pub stage: Option<Arc<Stage>>,
    /// What such a sandbox was seen to get on this machine.
    achieved: Option<Achieved>,
    next: AtomicU32,
}

/// Why a case failed.
#[derive(Debug)]
pub struct Failed {
    pub why: String,
    /// While what it needs was made: nothing was tried yet, and nothing is shown.
    pub before: bool,
}

impl Failed {
    pub fn new(why: impl Into<String>) -> Failed {
        Failed { why: why.into(), before: false }
    }

    pub fn before(e: impl Into<Failed>) -> Failed {
        Failed { before: true, ..e.into() }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl From<SandboxError> for Failed {
    fn from(e: SandboxError) -> Failed {
        Failed::new(format!("{:?}: {e}", e.kind))
    }
}

impl From<std::io::Error> for Failed {
    fn from(e: std::io::Error) -> Failed {
        Failed::new(e.to_string())
    }
}

impl From<serde_json::Error> for Failed {
    fn from(e: serde_json::Error) -> Failed {
        Failed::new(e.to_string())
    }
}

pub type CaseResult = std::result::Result<(), Failed>;
type Run = for<'a> fn(&'a Ctx) -> BoxFuture<'a, CaseResult>;

/// One thing that is shown.
pub struct Case {
    pub name: &'static str,
    /// What it attempts; None for a case of conformance.
    pub attack: Option<Attack>,
    /// Whether a provider is meant to pass it.
    pub applies: fn(&Capabilities) -> bool,
    run: Run,
}

/// Fails a case with what was expected and what was.
macro_rules! ensure {
    ($condition:expr, $($what:tt)+) => {{
        let condition: bool = $condition;
        if !condition {
            return Err($crate::conformance::Failed::new(format!($($what)+)));
        }
    }};
}
macro_rules! ensure_eq {
    ($left:expr, $right:expr) => {
        match (&$left, &$right) {
            (left, right) => {
                if left != right {
                    let what = concat!(stringify!($left), " is not ", stringify!($right));
                    return Err($crate::conformance::Failed::new(format!("{what}: {left:?} / {right:?}")));
                }
            }
        }
    };
}
macro_rules! case {
    ($name:ident) => {
        $crate::conformance::Case {
            name: stringify!($name),
            attack: None,
            applies: |_| true,
            run: |ctx| Box::pin($name(ctx)),
        }
    };
    ($name:ident, $applies:expr) => {
        $crate::conformance::Case { applies: $applies, ..case!($name) }
    };
}
use {case, ensure, ensure_eq};

impl Ctx {
    pub fn new(provider: Arc<dyn Provider>, other: Arc<dyn Provider>, spec: SandboxSpec) -> Ctx {
        Ctx { provider, other, spec, stage: None, achieved: None, next: AtomicU32::new(0) }
    }

    /// Makes one sandbox and removes it: where none can be made, that is what there is to say. What it achieved is known then.
    pub async fn trial(&mut self) -> crate::Result<()> {
        let (id, mut spec) = (self.id(), self.spec.clone());
        // Less than any machine has, or there would be nothing to keep.
        spec.limits.cpus = 0.5;
        let sandbox = self.provider.create(&id, Attempt(1), &spec).await?;
        let info = sandbox.info().await;
        self.provider.destroy(&id).await?;
        self.achieved = Some(info?.achieved);
        Ok(())
    }

    /// Both providers have this stage's egress.
    pub fn on(mut self, stage: Arc<Stage>) -> Ctx {
        self.stage = Some(stage);
        self
    }

    fn stage(&self) -> Result<&Stage, Failed> {
        self.stage.as_deref().ok_or_else(|| Failed::new("attacks on the network need a stage"))
    }

    fn id(&self) -> SandboxId {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        SandboxId::new(format!("case{}x{number}", std::process::id())).expect("letters and digits")
    }

    async fn sandbox(&self) -> Result<Arc<dyn Sandbox>, Failed> {
        self.sandbox_with(&self.spec).await
    }

    async fn sandbox_with(&self, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>, Failed> {
        self.provider.create(&self.id(), Attempt(1), spec).await.map_err(Failed::before)
    }
}

/// Output of a shell script inside.
struct Output {
    result: ExecResult,
    out: String,
    err: String,
}

async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> Result<Output, Failed> {
    run(sandbox, ExecRequest::shell(script)).await
}

async fn run(sandbox: &Arc<dyn Sandbox>, request: ExecRequest) -> Result<Output, Failed> {
    let (result, out, err) = sandbox.exec(request).await?.output().await?;
    Ok(Output {
        result,
        out: String::from_utf8_lossy(&out).into(),
        err: String::from_utf8_lossy(&err).into(),
    })
}

/// Every case of conformance.
pub fn conformance() -> Vec<Case> {
    [
        lifecycle::cases(),
        commands::cases(),
        files::cases(),
        snapshots::cases(),
        secrets::cases(),
        bad_input::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Every attempt of a hostile program.
pub fn attacks() -> Vec<Case> {
    attacks::cases()
}

impl Case {
    /// Runs it and ends whatever sandboxes it made.
    pub async fn run(&self, ctx: &Ctx) -> CaseResult {
        let result = (self.run)(ctx).await;
        let prefix = format!("case{}x", std::process::id());
        for info in ctx.provider.list(&Default::default()).await? {
            if info.id.as_str().starts_with(&prefix) {
                ctx.provider.destroy(&info.id).await?;
            }
        }
        result
    }
}
