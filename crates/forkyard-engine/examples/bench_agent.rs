//! What an agent itself costs, as a Markdown table: its own time per turn, without model and command; the memory of fifty agents
//! in one process. Everything is real but the model: engine, store, sandboxes, HTTP.
//!
//! `cargo run --release -p forkyard-engine --example bench_agent -- [--quick]`

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::post;
use forkyard_core::sandbox::{NetworkMode, ProviderKind};
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkOutcome, RunStatus};
use forkyard_core::{Attempt, HostId, RunId, SandboxId};
use forkyard_engine::Engine;
use forkyard_engine::activities::{Hands, HandsConfig};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ExecRequest, Provider, SandboxSpec};
use forkyard_store::{ProcessKind, Store};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Bytes of a result that fills a conversation; what a tool gives at most is a little more.
const FILLER_BYTES: usize = 28_000;
const MIB: u64 = 1 << 20;

/// What one fork does, written into its prompt: `plan TOOL FILLERS TURNS`.
#[derive(Clone, Copy)]
struct Script {
    tool: &'static str,
    /// Turns that make the conversation long before the measured ones.
    fillers: usize,
    turns: usize,
}

impl Script {
    fn prompt(&self) -> String {
        format!("plan {} {} {} end", self.tool, self.fillers, self.turns)
    }
}

// ---- the model, in a process of its own

#[derive(Default)]
struct Times {
    answered: Option<Instant>,
    gaps_us: Vec<u128>,
}

type Shared = Arc<Mutex<Times>>;

fn event(kind: &str, data: &str) -> String {
    format!("event: {kind}\ndata: {data}\n\n")
}

/// A whole answer: a call, or the end. The reported size stays small, so that nothing is summarised.
fn answer(call: Option<(&str, String)>) -> String {
    let mut out = event(
        "message_start",
        r#"{"type":"message_start","message":{"model":"claude-sonnet-5-5","usage":{"input_tokens":100,"output_tokens":1}}}"#,
    );
    let (block, delta, stop) = match &call {
        Some((name, input)) => (
            format!(r#"{{"type":"tool_use","id":"toolu_1","name":"{name}","input":{{}}}}"#),
            format!(
                r#"{{"type":"input_json_delta","partial_json":{}}}"#,
                serde_json::Value::String(input.clone())
            ),
            "tool_use",
        ),
        None => (
            r#"{"type":"text","text":""}"#.to_string(),
            r#"{"type":"text_delta","text":"Done."}"#.to_string(),
            "end_turn",
        ),
    };
    out.push_str(&event(
        "content_block_start",
        &format!(r#"{{"type":"content_block_start","index":0,"content_block":{block}}}"#),
    ));
    out.push_str(&event(
        "content_block_delta",
        &format!(r#"{{"type":"content_block_delta","index":0,"delta":{delta}}}"#),
    ));
    out.push_str(&event("content_block_stop", r#"{"type":"content_block_stop","index":0}"#));
    out.push_str(&event(
        "message_delta",
        &format!(
            r#"{{"type":"message_delta","delta":{{"stop_reason":"{stop}"}},"usage":{{"output_tokens":20}}}}"#
        ),
    ));
    out.push_str(&event("message_stop", r#"{"type":"message_stop"}"#));
    out
}

async fn messages(State(times): State<Shared>, body: Bytes) -> ([(&'static str, &'static str); 1], String) {
    let arrived = Instant::now();
    let text = String::from_utf8_lossy(&body);
    let n = text.matches(r#""role":"assistant""#).count();
    let plan = text.split("plan ").nth(1).and_then(|rest| rest.split(" end").next()).unwrap_or_default();
    let words: Vec<&str> = plan.split(' ').collect();
    let [tool, fillers, turns] = words[..] else {
        return ([("content-type", "text/event-stream")], answer(None));
    };
    let (fillers, turns): (usize, usize) = (fillers.parse().unwrap_or(0), turns.parse().unwrap_or(0));
    let call = match n {
        n if n < fillers => {
            Some(("Bash", format!(r#"{{"command":"head -c {FILLER_BYTES} /dev/zero | tr '\\0' x"}}"#)))
        }
        n if n >= fillers + turns => None,
        n if tool == "Glob" => Some(("Glob", format!(r#"{{"pattern":"*.none{n}"}}"#))),
        _ => Some(("Bash", r#"{"command":"true"}"#.to_string())),
    };
    let done = call.is_none();
    let reply = answer(call);
    let mut times = times.lock().unwrap_or_else(|e| e.into_inner());
    // The first measured one follows a filler.
    if let Some(answered) = times.answered.filter(|_| n > fillers) {
        times.gaps_us.push((arrived - answered).as_micros());
    }
    if done {
        let gaps: Vec<String> = times.gaps_us.drain(..).map(|g| g.to_string()).collect();
        println!("gaps {}", gaps.join(" "));
        let _ = std::io::stdout().flush();
    }
    times.answered = (!done).then(Instant::now);
    ([("content-type", "text/event-stream")], reply)
}

async fn serve() -> Result<(), Failure> {
    let app = Router::new()
        .route("/v1/messages", post(messages))
        .layer(DefaultBodyLimit::max(64 << 20))
        .with_state(Shared::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("port {}", listener.local_addr()?.port());
    std::io::stdout().flush()?;
    use axum::serve::ListenerExt;
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, app).await?;
    Ok(())
}

/// Killed when it is dropped.
struct Server {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    url: String,
}

impl Server {
    fn start() -> Result<Server, Failure> {
        let me = std::env::current_exe()?;
        let mut child =
            Command::new(me).arg("--serve").stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        let line = lines.next().ok_or("the server did not start")??;
        let port = line.strip_prefix("port ").ok_or("the server said something else")?;
        let url = format!("http://127.0.0.1:{port}");
        Ok(Server { child, lines, url })
    }
    /// Of the next conversation that ended, in microseconds, sorted.
    fn gaps(&mut self) -> Result<Vec<u64>, Failure> {
        let line = self.lines.next().ok_or("the server is gone")??;
        let words = line.strip_prefix("gaps ").ok_or("the server said something else")?;
        let mut gaps: Vec<u64> = words.split(' ').filter_map(|w| w.parse().ok()).collect();
        gaps.sort_unstable();
        Ok(gaps)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---- the engine, in this one

struct Bench {
    folder: tempfile::TempDir,
    store: Arc<dyn Store>,
    engine: Embedded,
    provider: Arc<dyn Provider>,
}

fn git(dir: &Path, args: &[&str]) -> Result<(), Failure> {
    let mut command = Command::new("git");
    command.args(["-c", "user.name=U", "-c", "user.email=u@example.com"]).args(args).current_dir(dir);
    if command.status()?.success() { Ok(()) } else { Err(format!("git {args:?}").into()) }
}

impl Bench {
    async fn new(server: &str, keep_checkpoints: u32) -> Result<Bench, Failure> {
        let folder = tempfile::tempdir()?;
        let path = folder.path();
        let repo = path.join("repo");
        std::fs::create_dir_all(&repo)?;
        std::fs::write(repo.join("README.md"), "A repository.\n")?;
        git(&repo, &["init", "-q", "-b", "main"])?;
        git(&repo, &["add", "."])?;
        git(&repo, &["commit", "-q", "-m", "Start"])?;
        let store = forkyard_store::open(&format!("sqlite:{}", path.join("store.db").display())).await?;
        let provider: Arc<dyn Provider> =
            Arc::new(LocalProvider::new(&path.join("sandboxes"), LocalOptions::default())?);
        let models = Arc::new(Models::new(ModelsConfig {
            anthropic_key: Some("k".into()),
            anthropic_url: Some(server.to_string()),
            ..ModelsConfig::default()
        }));
        let known = models.clone();
        let host = HostId::new("host1")?;
        let env = BTreeMap::from([
            ("PATH".to_string(), "/usr/local/bin:/usr/bin:/bin".to_string()),
            ("HOME".to_string(), path.join("home").display().to_string()),
        ]);
        let timeout = Duration::from_secs(120);
        let git = GitConfig { dir: path.join("git"), env, github_token: None, timeout };
        let mut config = HandsConfig::default();
        config.agent.keep_checkpoints = keep_checkpoints;
        let hands = Hands {
            store: store.clone(),
            providers: BTreeMap::from([(ProviderKind::Local, provider.clone())]),
            git: Arc::new(Git::new(git)),
            models,
            host: host.clone(),
            config,
            onlooker: None,
        };
        let check = Arc::new(move |m: &str| known.known(m));
        let config = EmbeddedConfig::new(host, "bench");
        let engine = Embedded::new(store.clone(), Arc::new(hands), check, Clock::system(), config);
        Ok(Bench { folder, store, engine, provider })
    }

    fn repo(&self) -> PathBuf {
        self.folder.path().join("repo")
    }

    /// Drives a run to its end. `look` is called again and again meanwhile.
    async fn run(&self, script: Script, forks: u32, mut look: impl FnMut()) -> Result<(), Failure> {
        let mut spec = RunSpec::new(self.repo().display().to_string(), script.prompt(), "sonnet", forks);
        spec.max_concurrent = forks;
        spec.max_turns = 10_000;
        spec.sandbox.network.mode = NetworkMode::None;
        let run = self.engine.submit(RunId::new("run1")?, spec, None).await?;
        let stop = CancellationToken::new();
        let (engine, token) = (self.engine.clone(), stop.clone());
        let work = tokio::spawn(async move { engine.work(ProcessKind::Worker, token).await });
        loop {
            look();
            let view = self.store.run(&run).await?;
            if view.is_some_and(|v| v.status == RunStatus::Ended) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.cancel();
        work.await?;
        for fork in self.store.forks(&run).await? {
            if fork.outcome != Some(ForkOutcome::Success) {
                return Err(format!("fork {}: {:?} {:?}", fork.fork, fork.outcome, fork.error).into());
            }
        }
        Ok(())
    }

    /// What the command alone takes, in microseconds, sorted.
    async fn commands(&self, count: usize) -> Result<Vec<u64>, Failure> {
        let id = SandboxId::new("commands")?;
        let mut spec = SandboxSpec::default();
        spec.network.mode = NetworkMode::None;
        let sandbox = self.provider.create(&id, Attempt(1), &spec).await?;
        let mut times = Vec::new();
        for _ in 0..count {
            let started = Instant::now();
            sandbox.exec(ExecRequest::new(["/bin/bash", "-c", "true"])).await?.output().await?;
            times.push(u64::try_from(started.elapsed().as_micros())?);
        }
        self.provider.destroy(&id).await?;
        times.sort_unstable();
        Ok(times)
    }
}

fn at(sorted: &[u64], percent: usize) -> u64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0)
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn row(what: &str, value: impl std::fmt::Display) {
    println!("| {what} | {value} |");
}

async fn own_time(server: &mut Server, turns: usize) -> Result<(), Failure> {
    let ms = |us: u64| format!("{:.2} ms", us as f64 / 1000.0);
    for (name, tool, fillers, keep) in [
        ("a read", "Glob", 0, 3),
        ("a read, 1 MB conversation", "Glob", 38, 3),
        ("a command", "Bash", 0, 0),
        ("a command, 1 MB conversation", "Bash", 38, 0),
        ("a command and its checkpoint", "Bash", 0, 3),
    ] {
        let bench = Bench::new(&server.url, keep).await?;
        let commands = if tool == "Bash" { bench.commands(turns).await? } else { vec![0] };
        bench.run(Script { tool, fillers, turns }, 1, || {}).await?;
        let gaps = server.gaps()?;
        let own = |percent| ms(at(&gaps, percent).saturating_sub(at(&commands, 50)));
        row(
            &format!("own time of a turn with {name}, p50 / p95"),
            format!("{} / {} ({} turns, command {})", own(50), own(95), gaps.len(), ms(at(&commands, 50))),
        );
    }
    Ok(())
}

async fn memory(server: &mut Server, turns: usize) -> Result<(), Failure> {
    let bench = Bench::new(&server.url, 3).await?;
    let before = resident_bytes();
    let mut peak = before;
    let script = Script { tool: "Bash", fillers: 3, turns };
    bench.run(script, 50, || peak = peak.max(resident_bytes())).await?;
    row(
        "50 agents in one process: its memory with all that serves them, and what they added",
        format!("{} MiB, {} MiB", peak / MIB, (peak - before) / MIB),
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        if args.iter().any(|a| a == "--serve") {
            return serve().await;
        }
        let quick = args.iter().any(|a| a == "--quick");
        println!("| what | value |\n|---|---|");
        // First: what others leave behind in the allocator is not the agents'.
        let mut server = Server::start()?;
        memory(&mut server, if quick { 3 } else { 15 }).await?;
        drop(server);
        let mut server = Server::start()?;
        own_time(&mut server, if quick { 30 } else { 200 }).await
    })
}
