//! What one more fork costs, as Markdown tables: a repository of 1 GiB and 50,000 files, from the prepared base to the last
//! fork's first request to the model, beside plain clones and git worktrees; and a hundred forks in one process.
//!
//! `cargo run --release -p forkyard-engine --example bench_forks -- [--quick]`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forkyard_core::sandbox::{NetworkMode, ProviderKind};
use forkyard_core::spec::RunSpec;
use forkyard_core::view::RunOutcome;
use forkyard_core::{HostId, RunId, Timestamp};
use forkyard_engine::Engine;
use forkyard_engine::activities::{Hands, HandsConfig};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_sandbox::Provider;
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_store::{EventQuery, Recorded, Store};
use tokio_util::sync::CancellationToken;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// A model takes a moment to answer: by then every fork has asked.
const THINKS: u64 = 2_000;
const SCRIPT: &str = r#"
name = "bench"
[[turn]]
text = "I write."
delay_ms = THINKS
tools = [{ name = "Write", input = { file_path = "result.txt", content = "done\n" } }]
[[turn]]
text = "Done."
"#;

struct Size {
    files: usize,
    bytes: usize,
    forks: u32,
    rounds: usize,
    hundred: u32,
}

const FULL: Size = Size { files: 50_000, bytes: 1 << 30, forks: 20, rounds: 3, hundred: 100 };
const QUICK: Size = Size { files: 2_000, bytes: 32 << 20, forks: 20, rounds: 2, hundred: 20 };

/// A folder that is removed at the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Result<Place> {
        let dir = std::env::temp_dir().join(format!("forkyard-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        Ok(Place(dir))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn git(dir: &Path, args: &[&str]) -> Result<()> {
    let done = Command::new("git")
        .args(["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"])
        .args(args)
        .current_dir(dir)
        .output()?;
    if !done.status.success() {
        return Err(format!("git {args:?}: {}", String::from_utf8_lossy(&done.stderr)).into());
    }
    Ok(())
}

/// Files of equal size that do not compress, in folders of a hundred.
fn repository(dir: &Path, size: &Size) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for i in 0..size.files {
        let folder = dir.join(format!("d{}", i / 100));
        if i % 100 == 0 {
            std::fs::create_dir_all(&folder)?;
        }
        let data: Vec<u8> = (0..size.bytes / size.files / 8)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            })
            .collect();
        std::fs::write(folder.join(format!("f{i}")), data)?;
    }
    git(dir, &["init", "-q", "-b", "main"])?;
    git(dir, &["-c", "core.compression=0", "add", "-A"])?;
    git(dir, &["commit", "-q", "-m", "all"])
}

/// Store and engine of one process, with real sandboxes and the script model.
struct Yard {
    store: Arc<dyn Store>,
    engine: Embedded,
    runs: AtomicU32,
}

async fn yard(place: &Path, host_limit: u32) -> Result<Yard> {
    let home = place.join("home");
    std::fs::create_dir_all(&home)?;
    std::fs::write(place.join("script.toml"), SCRIPT.replace("THINKS", &THINKS.to_string()))?;
    let store = forkyard_store::open(&home.join("forkyard.db").display().to_string()).await?;
    let local: Arc<dyn Provider> =
        Arc::new(LocalProvider::new(&home.join("sandboxes"), LocalOptions::default())?);
    let models = Arc::new(Models::new(ModelsConfig::default()));
    let env = std::env::vars().filter(|(name, _)| name == "PATH" || name == "HOME").collect();
    let git = GitConfig { dir: home.join("git"), env, github_token: None, timeout: Duration::from_secs(600) };
    let host = HostId::new("bench")?;
    let hands = Hands {
        store: store.clone(),
        providers: BTreeMap::from([(ProviderKind::Local, local)]),
        git: Arc::new(Git::new(git)),
        models: models.clone(),
        host: host.clone(),
        config: HandsConfig::default(),
        onlooker: None,
    };
    let config = EmbeddedConfig { host_limit: host_limit as usize, ..EmbeddedConfig::new(host, "bench") };
    let known = Arc::new(move |m: &str| models.known(m));
    let engine = Embedded::new(store.clone(), Arc::new(hands), known, Clock::system(), config);
    Ok(Yard { store, engine, runs: AtomicU32::new(0) })
}

struct Ran {
    id: RunId,
    events: Vec<Recorded>,
    outcome: Option<RunOutcome>,
}

impl Ran {
    fn at(&self, kind: &str) -> impl Iterator<Item = Timestamp> {
        self.events.iter().filter(move |r| r.event.kind == kind).map(|r| r.event.at)
    }
    fn submitted(&self) -> Option<Timestamp> {
        self.at("run.submitted").min()
    }
    fn base_ready(&self) -> Option<Timestamp> {
        self.at("run.fork_started").min()
    }
    /// When the last fork asked the model for the first time, from when it was answered.
    fn last_first_request(&self) -> Option<Timestamp> {
        let mut first: BTreeMap<u32, Timestamp> = BTreeMap::new();
        for r in self.events.iter().filter(|r| r.event.kind == "agent.assistant_message") {
            if let Some(fork) = r.stream.fork() {
                let at = first.entry(fork).or_insert(r.event.at);
                *at = (*at).min(r.event.at);
            }
        }
        first.into_values().max().map(|answered| Timestamp(answered.0.saturating_sub(THINKS)))
    }
}

/// Drives a run to its end while another task reads its events as they come.
async fn run(yard: &Yard, place: &Path, repo: &Path, forks: u32) -> Result<Ran> {
    let model = format!("script:{}", place.join("script.toml").display());
    let mut spec = RunSpec::new(repo.display().to_string(), "write", model, forks);
    spec.max_concurrent = forks;
    spec.sandbox.network.mode = NetworkMode::None;
    let id = RunId::new(format!("run{}", yard.runs.fetch_add(1, Ordering::Relaxed)))?;
    let id = yard.engine.submit(id, spec, None).await?;
    let store = yard.store.clone();
    let reader = tokio::spawn({
        let id = id.clone();
        async move {
            let mut watch = store.watch(Some(&id));
            let mut events: Vec<Recorded> = vec![];
            loop {
                let after = events.last().map_or(0, |r: &Recorded| r.position);
                let page = store.read_run(&id, &EventQuery { after, ..EventQuery::default() }).await?;
                let ended = page.iter().any(|r| r.event.kind == "run.ended");
                let empty = page.is_empty();
                events.extend(page);
                if ended {
                    return Ok::<_, forkyard_store::StoreError>(events);
                }
                if empty {
                    watch.changed().await;
                }
            }
        }
    });
    yard.engine.drive(&id, CancellationToken::new()).await?;
    let events = reader.await??;
    let all = all_events(yard, &id).await?;
    let positions: Vec<u64> = events.iter().map(|r| r.position).collect();
    if positions != all || positions != (1..=all.len() as u64).collect::<Vec<_>>() {
        return Err(format!("the reader saw {} events, the log has {}", positions.len(), all.len()).into());
    }
    let outcome = yard.store.run(&id).await?.and_then(|v| v.outcome);
    Ok(Ran { id, events, outcome })
}

async fn all_events(yard: &Yard, run: &RunId) -> Result<Vec<u64>> {
    let mut all: Vec<u64> = vec![];
    loop {
        let after = all.last().copied().unwrap_or(0);
        let page = yard.store.read_run(run, &EventQuery { after, ..EventQuery::default() }).await?;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page.iter().map(|r| r.position));
    }
}

fn ms(from: Option<Timestamp>, to: Option<Timestamp>) -> Result<u64> {
    Ok(to.ok_or("an event is missing")?.since(from.ok_or("an event is missing")?).0)
}

/// Bytes on disk, files that several folders share counted once.
fn disk(dir: &Path) -> Result<u64> {
    let done = Command::new("du").args(["-s", "--block-size=1"]).arg(dir).output()?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let bytes = text.split_whitespace().next().and_then(|n| n.parse().ok());
    Ok(bytes.ok_or("du said something else")?)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn median(mut of: Vec<u64>) -> u64 {
    of.sort_unstable();
    of[of.len() / 2]
}

async fn large(place: &Path, size: &Size) -> Result<()> {
    let repo = place.join("repo");
    repository(&repo, size)?;
    let yard = yard(place, size.forks).await?;
    let (mut one, mut many, mut prepare) = (vec![], vec![], vec![]);
    let sandboxes = place.join("home/sandboxes");
    // The first one also starts what sandboxes need.
    run(&yard, place, &repo, 1).await?;
    let mut grown = 0;
    for _ in 0..size.rounds {
        let ran = run(&yard, place, &repo, 1).await?;
        one.push(ms(ran.base_ready(), ran.last_first_request())?);
        prepare.push(ms(ran.submitted(), ran.base_ready())?);
        let before = disk(&sandboxes)?;
        let ran = run(&yard, place, &repo, size.forks).await?;
        many.push(ms(ran.base_ready(), ran.last_first_request())?);
        // What is left is the base's; the forks' own is gone with them.
        grown = disk(&sandboxes)?.saturating_sub(before);
    }
    let (one, many, prepare) = (median(one), median(many), median(prepare));
    let allowed = one as f64 * 1.3 + 5.0 * f64::from(size.forks);
    println!("\n{} files, {}, medians of {}:\n", size.files, mib(size.bytes as u64), size.rounds);
    println!("| from the base to the last fork's first request to the model | ms |\n|---|---|");
    println!("| 1 fork | {one} |");
    println!("| {} forks at once | {many} |", size.forks);
    println!("| 1.3 times one, and 5 ms a fork | {allowed:.0} |");
    println!("| (preparing the base, once a run) | {prepare} |\n");

    println!("| {} work trees | time | disk |\n|---|---|---|", size.forks);
    println!("| forks (and the base that they share) | {} ms | {} |", prepare + many, mib(grown));
    // Room for those who share nothing.
    drop(yard);
    std::fs::remove_dir_all(place.join("home"))?;
    for (name, args) in
        [("plain clones", &["clone", "-q"][..]), ("git worktrees", &["worktree", "add", "-q", "--detach"])]
    {
        let dir = place.join("others");
        std::fs::create_dir_all(&dir)?;
        let before = disk(place)?;
        let began = Instant::now();
        for i in 0..size.forks {
            let to = dir.join(i.to_string()).display().to_string();
            let source = repo.display().to_string();
            let args: Vec<&str> =
                if args[0] == "clone" { [args, &[&source, &to]].concat() } else { [args, &[&to]].concat() };
            git(&repo, &args)?;
        }
        let took = began.elapsed();
        println!("| {name} | {} ms | {} |", took.as_millis(), mib(disk(place)?.saturating_sub(before)));
        std::fs::remove_dir_all(&dir)?;
        git(&repo, &["worktree", "prune"])?;
    }
    Ok(())
}

/// Of this process, at its largest.
fn peak_memory() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? * 1024)
}

async fn hundred(place: &Path, size: &Size) -> Result<()> {
    let repo = place.join("repo");
    repository(&repo, &Size { files: 100, bytes: 1 << 20, ..*size })?;
    let yard = yard(place, size.hundred).await?;
    let began = Instant::now();
    let ran = run(&yard, place, &repo, size.hundred).await?;
    let took: Duration = began.elapsed();
    let forks = yard.store.forks(&ran.id).await?;
    let good = forks.iter().filter(|f| f.diff.is_some_and(|d| d.files == 1)).count();
    println!("\n| {} forks at once | |\n|---|---|", size.hundred);
    println!("| outcome | {:?}, {good} results |", ran.outcome.ok_or("it did not end")?);
    println!("| time | {:.1} s |", took.as_secs_f64());
    println!("| events, none missed by a reader that followed | {} |", ran.events.len());
    println!("| memory of the orchestrator at its largest | {} |", mib(peak_memory()?));
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let quick = args.iter().any(|a| a == "--quick");
    let size = if quick { QUICK } else { FULL };
    let place = Place::new()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if args.iter().any(|a| a == "hundred") {
        return runtime.block_on(hundred(&place.0, &size));
    }
    runtime.block_on(large(&place.0, &size))?;
    // Memory is a process's own.
    let mut again = Command::new(std::env::current_exe()?);
    again.arg("hundred").args(quick.then_some("--quick"));
    if !again.status()?.success() {
        return Err("the hundred forks failed".into());
    }
    Ok(())
}
