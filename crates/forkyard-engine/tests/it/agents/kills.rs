//! A scripted task of thirty turns whose commands are not idempotent, driven by real processes in real sandboxes, killed at odd
//! moments: it always ends with the same files, and each command has run once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::sandbox::{Labels, NetworkMode, ProviderKind};
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkOutcome, RunStatus, SandboxState};
use forkyard_core::{HostId, RunId, SandboxId, Usd};
use forkyard_engine::Engine;
use forkyard_engine::activities::{AgentSettings, Hands, HandsConfig};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_engine::ports::Onlooker;
use forkyard_sandbox::Provider;
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_store::{EventQuery, ProcessKind, SandboxQuery, Store};
use serde::{Deserialize, Serialize};
use serde_json::json;
use test_support::model_server::{ModelServer, Reply, Seen};
use tokio_util::sync::CancellationToken;

use super::moments::EndsItself;
use super::{MODEL, Process, billed, is_full_scale, sqlite_url, until};

pub const TURNS: usize = 30;
/// The turn whose command runs for seconds.
const SLOW: usize = 12;
/// From this turn on something runs in the background: checkpoints are copies then.
const BACKGROUND: usize = 20;

#[derive(Clone, Serialize, Deserialize)]
pub struct Plan {
    store: String,
    server: String,
    folder: PathBuf,
    /// Checkpoints are kept for other hosts, too.
    travels: bool,
    /// The driver kills itself as soon as the results of this turn are durable.
    pub dies_after: Option<u32>,
}

impl Plan {
    pub fn provider(&self) -> LocalProvider {
        LocalProvider::new(&self.folder.join("sandboxes"), LocalOptions::default()).unwrap()
    }
    fn repo(&self) -> PathBuf {
        self.folder.join("repo")
    }

    fn engine(&self, store: Arc<dyn Store>, owner: &str) -> Embedded {
        let path = "/usr/local/bin:/usr/bin:/bin".to_string();
        let home = self.folder.join("user-home").display().to_string();
        let git = Git::new(GitConfig {
            dir: self.folder.join("git"),
            env: BTreeMap::from([("PATH".into(), path), ("HOME".into(), home)]),
            github_token: None,
            timeout: Duration::from_secs(120),
        });
        let models = Arc::new(Models::new(ModelsConfig {
            anthropic_key: Some("k".into()),
            anthropic_url: Some(self.server.clone()),
            ..ModelsConfig::default()
        }));
        let known = models.clone();
        let host = HostId::new("host1").unwrap();
        let local: Arc<dyn Provider> = Arc::new(self.provider());
        let hands = Hands {
            store: store.clone(),
            providers: BTreeMap::from([(ProviderKind::Local, local)]),
            git: Arc::new(git),
            models,
            host: host.clone(),
            config: HandsConfig {
                agent: AgentSettings { travels: self.travels, ..AgentSettings::default() },
                ..HandsConfig::default()
            },
            onlooker: self.dies_after.map(|turn| Arc::new(EndsItself { turn }) as Arc<dyn Onlooker>),
        };
        let mut config = EmbeddedConfig::new(host, owner);
        // Takeovers are what is tested, not waiting for them.
        config.lease_ttl = Duration::from_millis(600);
        config.renew_every = Duration::from_millis(150);
        config.store_retry = Duration::from_millis(50);
        Embedded::new(store, Arc::new(hands), Arc::new(move |m| known.known(m)), Clock::system(), config)
    }
}

/// One process that drives whatever nobody drives.
pub async fn drive(plan: Plan) {
    let store = forkyard_store::open(&plan.store).await.unwrap();
    let owner = format!("p{}", std::process::id());
    plan.engine(store, &owner).work(ProcessKind::Worker, CancellationToken::new()).await;
}

/// The nth answer of the conversation: commands that append, one that takes seconds, files written and edited.
pub fn script(seen: &Seen) -> Reply {
    let n = seen.messages().iter().filter(|m| m["role"] == "assistant").count();
    let bash = |command: String| Reply::tool("Bash", json!({ "command": command }));
    match n {
        SLOW => bash("echo begin >> log; sleep 3; echo end >> log".into()),
        BACKGROUND => Reply::tool(
            "Bash",
            json!({ "command": "while :; do echo x >> bg.tmp; sleep 0.05; done", "run_in_background": true }),
        ),
        n if n >= TURNS => Reply::text("Done."),
        n if n % 5 == 3 => {
            Reply::tool("Write", json!({ "file_path": format!("f{n}"), "content": format!("value {n}\n") }))
        }
        n if n % 5 == 4 => Reply::tool(
            "Edit",
            json!({ "file_path": format!("f{}", n - 1), "old_string": "value", "new_string": "value value" }),
        ),
        n => bash(format!("echo {n} >> log; echo {n} >> ignored.tmp")),
    }
}

/// What the files have to be in the end.
fn expected() -> BTreeMap<String, String> {
    let mut log = String::new();
    let mut files = BTreeMap::new();
    for n in 0..TURNS {
        match n {
            SLOW => log.push_str("begin\nend\n"),
            BACKGROUND => {}
            n if n % 5 == 3 => {
                files.insert(format!("f{n}"), format!("value {n}\n"));
            }
            n if n % 5 == 4 => {
                files.insert(format!("f{}", n - 1), format!("value value {}\n", n - 1));
            }
            n => log.push_str(&format!("{n}\n")),
        }
    }
    files.insert("log".into(), log);
    files.insert(".gitignore".into(), "*.tmp\n".into());
    files
}

fn git(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("git")
        .args(["-c", "user.name=U", "-c", "user.email=u@example.com"])
        .args(args)
        .current_dir(dir)
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn files_of(repo: &Path, commit: &str) -> BTreeMap<String, String> {
    let names = git(repo, &["ls-tree", "-r", "--name-only", commit]);
    names.lines().map(|n| (n.to_string(), git(repo, &["show", &format!("{commit}:{n}")]))).collect()
}

/// What goes with the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    Process,
    Sandbox,
    Host,
}

pub struct Trial {
    pub plan: Plan,
    pub server: ModelServer,
    pub store: Arc<dyn Store>,
    pub run: RunId,
}

impl Trial {
    /// `brain` answers the agent.
    pub async fn new(loss: Loss, brain: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Trial {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        test_support::keep_until_exit(folder);
        let server = ModelServer::start().await;
        server.brain(brain);
        let travels = loss == Loss::Host;
        let plan = Plan {
            store: sqlite_url(),
            server: server.url().into(),
            folder: path,
            travels,
            dies_after: None,
        };
        let repo = plan.repo();
        std::fs::create_dir_all(&repo).unwrap();
        std::fs::write(repo.join(".gitignore"), "*.tmp\n").unwrap();
        git(&repo, &["init", "-q", "-b", "main"]);
        git(&repo, &["add", "."]);
        git(&repo, &["commit", "-q", "-m", "Start"]);
        let store = forkyard_store::open(&plan.store).await.unwrap();
        let mut spec = RunSpec::new(repo.display().to_string(), "Do the task.", MODEL, 1);
        spec.sandbox.network.mode = NetworkMode::None;
        spec.budget.run = Some(Usd::dollars(100));
        let engine = plan.engine(store.clone(), "submitter");
        let run = engine.submit(RunId::new("run1").unwrap(), spec, None).await.unwrap();
        Trial { plan, server, store, run }
    }

    pub async fn ended(&self) -> bool {
        self.store.run(&self.run).await.unwrap().is_some_and(|v| v.status == RunStatus::Ended)
    }

    /// The highest that any attempt came to.
    async fn last_turn(&self) -> u64 {
        let entries = self.store.read_journals(&self.run, 0).await.unwrap();
        let answers = entries.iter().filter(|e| e.event.kind == "agent.assistant_message");
        answers.filter_map(|e| e.event.data["turn"].as_u64()).max().unwrap_or(0)
    }

    /// Answers and results of all attempts. That one has begun is no step.
    async fn steps(&self) -> u64 {
        let entries = self.store.read_journals(&self.run, 0).await.unwrap();
        let kinds = ["agent.assistant_message", "agent.tool_completed"];
        entries.iter().filter(|e| kinds.contains(&e.event.kind.as_str())).count() as u64
    }

    /// The sandbox that the agent works in, if there is one.
    async fn work(&self) -> Vec<SandboxId> {
        let labels = Labels::from([("role".to_string(), "work".to_string())]);
        let found = self.plan.provider().list(&labels).await.unwrap();
        found.into_iter().map(|s| s.id).collect()
    }

    pub async fn lose(&self, loss: Loss) {
        if loss == Loss::Process {
            return;
        }
        let provider = self.plan.provider();
        for id in self.work().await {
            provider.destroy(&id).await.unwrap();
        }
        if loss == Loss::Host {
            // What another host would not find. It has a base of its own.
            for snapshot in provider.snapshots().await.unwrap() {
                if snapshot.labels.contains_key("fork") {
                    provider.remove_snapshot(&snapshot.id).await.unwrap();
                }
            }
        }
    }

    /// Kills the driver at odd moments, each time after some progress. Answers with the number of kills.
    async fn disturb(&self, kills: usize, rng: &mut fastrand::Rng, loss: Loss) -> usize {
        let mut done = 0;
        let mut driver = Process::start("drive", &self.plan);
        while done < kills && !self.ended().await {
            // A fork whose worker or sandbox is lost again and again without progress in between fails, as it should.
            let progress = || async {
                match loss {
                    Loss::Process => self.steps().await,
                    Loss::Sandbox | Loss::Host => self.last_turn().await,
                }
            };
            let before = progress().await;
            until("the agent makes progress", || async { progress().await > before || self.ended().await })
                .await;
            tokio::time::sleep(Duration::from_millis(rng.u64(0..400))).await;
            if self.ended().await {
                break;
            }
            driver.kill();
            done += 1;
            self.lose(loss).await;
            driver = Process::start("drive", &self.plan);
        }
        until("the run ends", || self.ended()).await;
        driver.kill();
        done
    }

    /// What happened, step by step, for whoever reads of a failure.
    pub async fn story(&self) -> String {
        let all = EventQuery { limit: 10_000, ..EventQuery::default() };
        let entries = self.store.read_run(&self.run, &all).await.unwrap();
        let steps = entries.iter().map(|e| {
            let text = e.event.data.to_string();
            format!("{:?} {} {}\n", e.stream, e.event.kind, text.chars().take(240).collect::<String>())
        });
        steps.collect()
    }

    /// What has to hold however it was reached.
    pub async fn check(&self) {
        let fork = self.store.fork(&self.run, 0).await.unwrap().unwrap();
        assert_eq!(fork.outcome, Some(ForkOutcome::Success), "{fork:?}");
        let commit = format!("refs/forkyard/{}/0", self.run);
        let files = files_of(&self.plan.repo(), &commit);
        assert_eq!(files, expected(), "{}", self.story().await);
        let balance = self.store.balance(&self.run).await.unwrap();
        assert_eq!(balance.reserved, Usd::ZERO);
        assert!(billed(&self.server) <= balance.spent, "{balance:?}");
        assert_eq!(fork.cost, balance.spent, "what is reported is what was spent");
        assert_eq!(self.work().await, [], "a sandbox is left");
        for sandbox in self.store.sandboxes(&SandboxQuery::default()).await.unwrap() {
            assert_eq!(sandbox.state, SandboxState::Destroyed, "{sandbox:?}");
        }
        let left = self.plan.provider().snapshots().await.unwrap();
        assert!(left.iter().all(|s| !s.labels.contains_key("fork")), "{left:?}");
    }
}

/// Runs until that many kills are done: how many it needs depends on when they come.
async fn survives(loss: Loss, kills: usize) {
    let mut rng = fastrand::Rng::with_seed(11);
    let (mut done, mut runs, mut told) = (0, 0, 0);
    while done < kills {
        let trial = Trial::new(loss, script).await;
        let n = trial.disturb((kills - done).min(6), &mut rng, loss).await;
        trial.check().await;
        let requests = trial.server.seen();
        if loss == Loss::Process {
            let most = TURNS + 1 + n;
            assert!(requests.len() <= most, "{} requests with {n} kills", requests.len());
        }
        let lost = match loss {
            Loss::Process | Loss::Sandbox => "The sandbox was lost",
            Loss::Host => "only those that git does not ignore",
        };
        let lost_here = requests.iter().any(|s| s.raw.contains(lost));
        assert!(loss != Loss::Process || !lost_here, "nothing was lost\n{}", trial.story().await);
        told += usize::from(lost_here);
        done += n;
        runs += 1;
        assert!(runs <= kills, "runs end before they can be killed");
    }
    assert_eq!(told > 0, loss != Loss::Process, "the model is told what was lost, and only then");
    println!("{done} kills over {runs} runs");
}

fn scaled(full: usize) -> usize {
    if is_full_scale() { full } else { full / 10 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_driver_changes_nothing() {
    survives(Loss::Process, scaled(100)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_driver_and_a_lost_sandbox_lead_to_the_same_files() {
    survives(Loss::Sandbox, scaled(100)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_host_is_replaced_by_what_the_store_has() {
    survives(Loss::Host, scaled(30)).await;
}
