//! What a user asks for, and whether it can be right. Nothing that fails [`RunSpec::validate`] is ever stored.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::budget::BudgetLimits;
use crate::sandbox::{LimitsOverride, NetworkMode, ProviderKind, Root, Volume};
use crate::view::EngineKind;
use crate::{Millis, SandboxId, Usd};

/// Forks of one run; a setting may lower it.
pub const MAX_FORKS: u32 = 100;
pub const DEFAULT_MAX_CONCURRENT: u32 = 5;
pub const DEFAULT_FORK_TIMEOUT: Millis = Millis::secs(7200);
pub const DEFAULT_MAX_TURNS: u32 = 100;
/// A fork that needs more than a week is a mistake in the unit.
pub const MAX_FORK_TIMEOUT: Millis = Millis::secs(7 * 24 * 3600);
pub const MIN_FORK_TIMEOUT: Millis = Millis::secs(1);
pub const MAX_LINGER: Millis = Millis::secs(24 * 3600);
pub const MAX_TURNS_LIMIT: u32 = 10_000;
/// Tool calls of one turn that a run may ask for.
pub const MAX_TOOL_CALLS_LIMIT: u32 = 1000;
/// Below this an answer can't hold a useful tool call.
pub const MIN_OUTPUT_TOKENS: u32 = 1024;
/// No model writes more in one answer.
pub const MAX_OUTPUT_TOKENS: u32 = 1_000_000;
/// Prompts, system prompts and commands, each. Larger texts belong into the repository.
pub const MAX_TEXT_BYTES: usize = 256 << 10;
/// Globs and allow-list entries, each list.
pub const MAX_LIST: usize = 256;
const MIN_MEMORY: u64 = 16 << 20;
const MIN_DISK: u64 = 16 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    #[serde(default)]
    pub engine: EngineKind,
    pub repo: RepoSpec,
    pub forks: Vec<ForkSpec>,
    pub max_concurrent: u32,
    /// Driven, unpaused time of one fork.
    pub fork_timeout: Millis,
    #[serde(default)]
    pub budget: BudgetLimits,
    #[serde(default)]
    pub sandbox: SandboxPlan,
    /// Runs once in the base's sandbox; its result is what every fork starts from.
    #[serde(default)]
    pub setup: Option<String>,
    /// Exit status 0: the result is verified.
    #[serde(default)]
    pub verify: Option<String>,
    /// The last line of its output is a number; higher is better.
    #[serde(default)]
    pub score: Option<String>,
    /// Paths that a result may not change in the eyes of verify and score.
    #[serde(default)]
    pub protect: Vec<String>,
    /// How long a finished agent waits for messages.
    #[serde(default)]
    pub linger: Millis,
    /// Hand the sandbox to the user instead of destroying it.
    #[serde(default)]
    pub keep: bool,
    #[serde(default)]
    pub until_verified: Option<UntilVerified>,
    pub max_turns: u32,
    #[serde(default)]
    pub agent: AgentPlan,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepoSpec {
    /// A URL or an absolute path of the host.
    pub source: String,
    /// None: HEAD, or the remote's default branch.
    #[serde(default)]
    pub branch: Option<String>,
    /// Carry uncommitted changes of a local repository.
    #[serde(default)]
    pub dirty: bool,
}

/// What makes one fork differ from the others.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkSpec {
    #[serde(default)]
    pub name: Option<String>,
    pub prompt: String,
    pub model: String,
    #[serde(default)]
    pub system_prompt: Option<String>,
    #[serde(default)]
    pub root: Option<Root>,
    #[serde(default)]
    pub limits: LimitsOverride,
    /// Files to bring back beside the diff.
    #[serde(default)]
    pub capture: Vec<String>,
    /// Work in a child of this sandbox instead of the base; it is never changed or destroyed.
    #[serde(default)]
    pub parent: Option<SandboxId>,
}

/// What a fork's sandbox is made from, before the repository and setup come into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    Root(Root),
    /// A child of this sandbox, with the files that it has.
    Parent(SandboxId),
}

/// How the run's sandboxes are made. Secrets are named here and resolved on the host: their values are never stored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxPlan {
    pub provider: ProviderKind,
    pub root: Root,
    pub limits: LimitsOverride,
    pub network: NetworkPlan,
    pub env: BTreeMap<String, String>,
    pub volumes: Vec<Volume>,
    pub strict: bool,
    // What does not ask for it reads as before, to older versions too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub disk_image: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkPlan {
    pub mode: NetworkMode,
    pub allow: Vec<String>,
    pub no_default_allow: bool,
    pub secrets: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentPlan {
    pub permission_mode: Option<String>,
    /// Empty: all.
    pub allowed_tools: Vec<String>,
    pub disallowed_tools: Vec<String>,
    /// The user's own system prompt template.
    pub prompt_template: Option<String>,
    /// Of one turn; the policy may allow fewer.
    pub max_tool_calls: Option<u32>,
    pub effort: Option<Effort>,
    /// Output of one answer.
    pub max_output_tokens: Option<u32>,
    /// The agent itself runs inside the sandbox and reaches the model only through Forkyard.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub in_sandbox: bool,
}

/// How much a model should think, where it can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    Low,
    Medium,
    High,
    Max,
}

impl Effort {
    pub fn as_str(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::Medium => "medium",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }
}

/// Spawn more forks until enough are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UntilVerified {
    pub verified: u32,
    pub max_forks: u32,
}

/// What is wrong with a specification, field by field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    pub field: String,
    pub value: String,
    pub problem: String,
    pub fix: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}; {}", self.field, self.value, self.problem, self.fix)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct InvalidSpec(pub Vec<FieldError>);

impl fmt::Display for InvalidSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            write!(f, "{}{e}", if i > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}

/// What validation has to know about models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKnown {
    Priced,
    /// It can be used, but not under a budget.
    Unpriced,
    No,
}

impl RunSpec {
    /// A run of `n` equal forks with every default.
    pub fn new(
        source: impl Into<String>,
        prompt: impl Into<String>,
        model: impl Into<String>,
        n: u32,
    ) -> RunSpec {
        let fork = ForkSpec { prompt: prompt.into(), model: model.into(), ..Default::default() };
        RunSpec {
            engine: EngineKind::default(),
            repo: RepoSpec { source: source.into(), branch: None, dirty: false },
            forks: vec![fork; n as usize],
            max_concurrent: DEFAULT_MAX_CONCURRENT,
            fork_timeout: DEFAULT_FORK_TIMEOUT,
            budget: BudgetLimits::default(),
            sandbox: SandboxPlan::default(),
            setup: None,
            verify: None,
            score: None,
            protect: vec![],
            linger: Millis::ZERO,
            keep: false,
            until_verified: None,
            max_turns: DEFAULT_MAX_TURNS,
            agent: AgentPlan::default(),
        }
    }

    /// Is a result checked by something other than its author?
    pub fn judges(&self) -> bool {
        self.verify.is_some() || self.score.is_some()
    }

    pub fn start_of(&self, fork: &ForkSpec) -> Start {
        match (&fork.parent, &fork.root) {
            (Some(parent), _) => Start::Parent(parent.clone()),
            (None, Some(root)) => Start::Root(root.clone()),
            (None, None) => Start::Root(self.sandbox.root.clone()),
        }
    }

    /// What its forks start from, each once, in the order of the forks: the base is prepared for every one of them.
    pub fn starts(&self) -> Vec<Start> {
        let mut starts: Vec<Start> = vec![];
        for start in self.forks.iter().map(|f| self.start_of(f)) {
            if !starts.contains(&start) {
                starts.push(start);
            }
        }
        starts
    }

    pub fn validate(&self, model: impl Fn(&str) -> ModelKnown) -> Result<(), InvalidSpec> {
        let mut c = Check(vec![]);
        c.text("repo.source", &self.repo.source, true);
        if let Some(b) = &self.repo.branch {
            c.require(
                is_branch_name(b),
                "repo.branch",
                b,
                "is not a branch name",
                "name an existing branch, tag or commit",
            );
        }
        let n = self.forks.len() as u64;
        c.range("forks", n, 1, u64::from(MAX_FORKS));
        c.range("max_concurrent", u64::from(self.max_concurrent), 1, u64::from(MAX_FORKS));
        c.range("fork_timeout_ms", self.fork_timeout.0, MIN_FORK_TIMEOUT.0, MAX_FORK_TIMEOUT.0);
        c.range("linger_ms", self.linger.0, 0, MAX_LINGER.0);
        c.range("max_turns", u64::from(self.max_turns), 1, u64::from(MAX_TURNS_LIMIT));
        for (field, limit) in [("budget.run", self.budget.run), ("budget.fork", self.budget.fork)] {
            if let Some(limit) = limit {
                c.require(
                    limit <= Usd::MAX_LIMIT,
                    field,
                    limit,
                    "is more than any run may spend",
                    "give at most 1000000 dollars",
                );
            }
        }
        for (field, text) in [("setup", &self.setup), ("verify", &self.verify), ("score", &self.score)] {
            if let Some(text) = text {
                c.text(field, text, true);
            }
        }
        c.list("protect", &self.protect);
        c.list("sandbox.network.allow", &self.sandbox.network.allow);
        c.list("agent.allowed_tools", &self.agent.allowed_tools);
        c.list("agent.disallowed_tools", &self.agent.disallowed_tools);
        if let Some(calls) = self.agent.max_tool_calls {
            c.range("agent.max_tool_calls", u64::from(calls), 1, u64::from(MAX_TOOL_CALLS_LIMIT));
        }
        if let Some(tokens) = self.agent.max_output_tokens {
            let (least, most) = (u64::from(MIN_OUTPUT_TOKENS), u64::from(MAX_OUTPUT_TOKENS));
            c.range("agent.max_output_tokens", u64::from(tokens), least, most);
        }
        c.limits("sandbox.limits", &self.sandbox.limits);
        if let Some(u) = self.until_verified {
            c.require(
                self.verify.is_some(),
                "until_verified",
                u.verified,
                "needs a verify command",
                "add --verify CMD",
            );
            c.range("until_verified.max_forks", u64::from(u.max_forks), n.max(1), u64::from(MAX_FORKS));
            c.range("until_verified.verified", u64::from(u.verified), 1, u64::from(u.max_forks.max(1)));
        }
        let limited = self.budget.run.is_some() || self.budget.fork.is_some();
        for (i, fork) in self.forks.iter().enumerate().take(MAX_FORKS as usize) {
            c.fork(&format!("forks[{i}]"), fork, limited, &model);
        }
        c.done()
    }

    /// The same questions for forks that are added to a live run.
    pub fn validate_added(
        &self,
        total: usize,
        added: &[ForkSpec],
        model: impl Fn(&str) -> ModelKnown,
    ) -> Result<(), InvalidSpec> {
        let mut c = Check(vec![]);
        c.range("forks", added.len() as u64, 1, u64::from(MAX_FORKS).saturating_sub(total as u64).max(1));
        c.range("forks in all", (total + added.len()) as u64, 1, u64::from(MAX_FORKS));
        let limited = self.budget.run.is_some() || self.budget.fork.is_some();
        let starts = self.starts();
        for (i, fork) in added.iter().enumerate().take(MAX_FORKS as usize) {
            c.fork(&format!("forks[{i}]"), fork, limited, &model);
            c.require(
                starts.contains(&self.start_of(fork)),
                &format!("forks[{i}].root"),
                format!("{:?}", self.start_of(fork)),
                "was not prepared for this run",
                "name an image, snapshot or sandbox that the run began with, or start another run",
            );
        }
        c.done()
    }
}

/// What git would accept as a branch, tag or commit, and nothing that a command line could take for an option.
pub fn is_branch_name(name: &str) -> bool {
    let bad = |c: char| c.is_control() || c.is_whitespace() || "~^:?*[\\".contains(c);
    !name.is_empty()
        && name.len() <= 244
        && !name.starts_with(['-', '/', '.'])
        && !name.ends_with(['/', '.'])
        && !name.ends_with(".lock")
        && !name.contains("..")
        && !name.contains("//")
        && !name.contains("/.")
        && !name.contains("@{")
        && name != "@"
        && !name.contains(bad)
}

struct Check(Vec<FieldError>);

impl Check {
    fn done(self) -> Result<(), InvalidSpec> {
        if self.0.is_empty() { Ok(()) } else { Err(InvalidSpec(self.0)) }
    }
    fn require(&mut self, ok: bool, field: &str, value: impl fmt::Display, problem: &str, fix: &str) {
        if !ok {
            let value: String = value.to_string().chars().take(120).collect();
            self.0.push(FieldError { field: field.into(), value, problem: problem.into(), fix: fix.into() });
        }
    }
    fn range(&mut self, field: &str, value: u64, min: u64, max: u64) {
        let ok = (min..=max).contains(&value);
        self.require(ok, field, value, "is out of range", &format!("give {min} to {max}"));
    }
    fn text(&mut self, field: &str, value: &str, needed: bool) {
        self.require(!needed || !value.trim().is_empty(), field, "\"\"", "is empty", "give some text");
        self.require(
            value.len() <= MAX_TEXT_BYTES,
            field,
            format!("{} bytes", value.len()),
            "is too long",
            "put it into a file of the repository",
        );
        self.require(
            !value.contains('\0'),
            field,
            "a text with a NUL byte",
            "can't be passed on",
            "remove the NUL byte",
        );
    }
    fn list(&mut self, field: &str, items: &[String]) {
        self.range(&format!("{field} (entries)"), items.len() as u64, 0, MAX_LIST as u64);
        for item in items.iter().take(MAX_LIST) {
            self.text(field, item, true);
        }
    }
    fn limits(&mut self, field: &str, l: &LimitsOverride) {
        if let Some(m) = l.memory_bytes {
            self.range(&format!("{field}.memory_bytes"), m, MIN_MEMORY, 1 << 50);
        }
        if let Some(d) = l.disk_bytes {
            self.range(&format!("{field}.disk_bytes"), d, MIN_DISK, 1 << 50);
        }
        if let Some(p) = l.processes {
            self.range(&format!("{field}.processes"), u64::from(p), 4, 1 << 22);
        }
        if let Some(c) = l.cpus {
            self.require(
                c.is_finite() && (0.01..=1024.0).contains(&c),
                &format!("{field}.cpus"),
                c,
                "is out of range",
                "give 0.01 to 1024",
            );
        }
    }
    fn fork(&mut self, at: &str, f: &ForkSpec, limited: bool, model: &impl Fn(&str) -> ModelKnown) {
        self.text(&format!("{at}.prompt"), &f.prompt, true);
        if let Some(s) = &f.system_prompt {
            self.text(&format!("{at}.system_prompt"), s, false);
        }
        if let Some(n) = &f.name {
            self.text(&format!("{at}.name"), n, true);
        }
        self.require(
            f.root.is_none() || f.parent.is_none(),
            &format!("{at}.root"),
            format!("{:?}", f.root),
            "contradicts the sandbox that the fork is to be a child of",
            "give one of image, snapshot and sandbox",
        );
        self.list(&format!("{at}.capture"), &f.capture);
        self.limits(&format!("{at}.limits"), &f.limits);
        let field = format!("{at}.model");
        match model(&f.model) {
            ModelKnown::Priced => {}
            ModelKnown::Unpriced => self.require(
                !limited,
                &field,
                &f.model,
                "has no price, so no budget can hold it",
                "add its price to the price list, or leave the budget out",
            ),
            ModelKnown::No => self.require(
                false,
                &field,
                &f.model,
                "is not a model that Forkyard knows",
                "name one of the price list (fable, opus, sonnet, haiku, script:FILE …) or add it",
            ),
        }
    }
}

/// A URL without what stands before the `@`: it may be a password.
pub fn shown_url(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find('/').unwrap_or(rest.len());
            match rest[..end].rsplit_once('@') {
                Some((_, host)) => format!("{scheme}://***@{host}{}", &rest[end..]),
                None => url.to_string(),
            }
        }
        None => url.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(name: &str) -> ModelKnown {
        match name {
            "sonnet" => ModelKnown::Priced,
            "local" => ModelKnown::Unpriced,
            _ => ModelKnown::No,
        }
    }
    fn spec() -> RunSpec {
        RunSpec::new("https://example.org/r.git", "do it", "sonnet", 2)
    }
    fn fields(s: &RunSpec) -> Vec<String> {
        s.validate(known).err().map(|e| e.0.into_iter().map(|f| f.field).collect()).unwrap_or_default()
    }

    #[test]
    fn defaults_are_valid_and_survive_json() {
        assert_eq!(fields(&spec()), Vec::<String>::new());
        let json = serde_json::to_string(&spec()).unwrap();
        assert_eq!(serde_json::from_str::<RunSpec>(&json).unwrap(), spec());
    }

    #[test]
    fn each_bad_value_is_named() {
        type Change = fn(&mut RunSpec);
        let cases: Vec<(&str, Change)> = vec![
            ("forks", |s| s.forks.clear()),
            ("forks", |s| s.forks = vec![s.forks[0].clone(); 101]),
            ("max_concurrent", |s| s.max_concurrent = 0),
            ("fork_timeout_ms", |s| s.fork_timeout = Millis::ZERO),
            ("fork_timeout_ms", |s| s.fork_timeout = Millis(u64::MAX)),
            ("linger_ms", |s| s.linger = Millis(u64::MAX)),
            ("max_turns", |s| s.max_turns = 0),
            ("agent.max_tool_calls", |s| s.agent.max_tool_calls = Some(0)),
            ("agent.max_output_tokens", |s| s.agent.max_output_tokens = Some(10)),
            ("budget.run", |s| s.budget.run = Some(Usd(u64::MAX))),
            ("forks[1].model", |s| s.forks[1].model = "gpt-0".into()),
            ("forks[0].prompt", |s| s.forks[0].prompt = " ".into()),
            ("forks[0].prompt", |s| s.forks[0].prompt = "x".repeat(MAX_TEXT_BYTES + 1)),
            ("repo.branch", |s| s.repo.branch = Some("--upload-pack=x".into())),
            ("repo.source", |s| s.repo.source = String::new()),
            ("sandbox.limits.cpus", |s| s.sandbox.limits.cpus = Some(f64::NAN)),
            ("sandbox.limits.memory_bytes", |s| s.sandbox.limits.memory_bytes = Some(1)),
            ("until_verified", |s| s.until_verified = Some(UntilVerified { verified: 1, max_forks: 4 })),
        ];
        for (field, change) in cases {
            let mut s = spec();
            change(&mut s);
            assert!(fields(&s).iter().any(|f| f == field), "{field}: {:?}", fields(&s));
        }
    }

    #[test]
    fn a_model_without_a_price_runs_only_without_a_budget() {
        let mut s = spec();
        s.forks[0].model = "local".into();
        assert_eq!(fields(&s), Vec::<String>::new());
        s.budget.run = Some(Usd::ZERO);
        assert_eq!(fields(&s), ["forks[0].model"]);
    }

    #[test]
    fn branch_names_follow_git() {
        for ok in ["main", "feature/x-1", "v1.2", "a@b"] {
            assert!(is_branch_name(ok), "{ok}");
        }
        for bad in
            ["", "-x", "a..b", "a b", "a\nb", "x.lock", "/a", "a/", "a//b", "a~1", "@", "a@{1}", "a/.b"]
        {
            assert!(!is_branch_name(bad), "{bad}");
        }
    }
}
