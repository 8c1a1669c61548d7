//! A sandbox in memory: files, and a shell of a few words, by the same rules as the real ones (call ids, attempts, bounds).
//! What it has run is counted, so that a test can tell once from twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId, Timestamp};
use forkyard_sandbox::{
    ErrorKind, Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, FileInfo, FileKind, GitExport,
    GlobRequest, GrepMatch, GrepRequest, GrepResult, Health, Labels, PtySize, Result, Sandbox, SandboxError,
    SandboxInfo, Signal, SnapshotInfo, SnapshotMode, Stats, WorkDiff,
};
use tokio::io::AsyncRead;
use tokio::sync::{mpsc, watch};

#[derive(Clone)]
struct Called {
    output: Arc<Mutex<Vec<u8>>>,
    ended: watch::Receiver<Option<ExecResult>>,
    kill: Arc<watch::Sender<bool>>,
}

#[derive(Default)]
struct Inner {
    files: BTreeMap<String, Vec<u8>>,
    links: BTreeMap<String, String>,
    calls: BTreeMap<CallId, Called>,
    /// Every command that was started, in order.
    ran: Vec<String>,
    attempt: Attempt,
    dead: bool,
    reads: u32,
    running: u32,
    most_running: u32,
    gates: BTreeSet<String>,
    snapshots: BTreeMap<SnapshotId, BTreeMap<String, Vec<u8>>>,
}

/// The sandbox itself; it outlives those who are attached.
#[derive(Clone)]
pub struct World {
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<u64>>,
}

impl World {
    pub fn new() -> World {
        World { inner: Arc::default(), changed: Arc::new(watch::Sender::new(0)) }
    }
    fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        let value = f(&mut self.inner.lock().unwrap());
        self.changed.send_modify(|n| *n += 1);
        value
    }
    pub fn attach(&self, attempt: u32) -> Arc<dyn Sandbox> {
        self.with(|w| w.attempt = w.attempt.max(Attempt(attempt)));
        Arc::new(Attached {
            world: self.clone(),
            attempt: Attempt(attempt),
            id: SandboxId::new("sb1").unwrap(),
        })
    }
    pub fn put(&self, path: &str, text: &str) {
        self.with(|w| w.files.insert(path.to_string(), text.as_bytes().to_vec()));
    }
    pub fn link(&self, path: &str, target: &str) {
        self.with(|w| w.links.insert(path.to_string(), target.to_string()));
    }
    pub fn file(&self, path: &str) -> Option<String> {
        self.with(|w| w.files.get(path).map(|f| String::from_utf8_lossy(f).into_owned()))
    }
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        self.with(|w| w.files.clone())
    }
    pub fn ran(&self) -> Vec<String> {
        self.with(|w| w.ran.clone())
    }
    pub fn reads(&self) -> u32 {
        self.with(|w| w.reads)
    }
    pub fn most_running(&self) -> u32 {
        self.with(|w| w.most_running)
    }
    pub fn calls(&self) -> usize {
        self.with(|w| w.calls.len())
    }
    pub fn kill(&self) {
        self.with(|w| w.dead = true);
    }
    /// Lets `gate NAME` pass.
    pub fn open(&self, gate: &str) {
        self.with(|w| w.gates.insert(gate.to_string()));
    }
    /// A new sandbox from a snapshot of this one.
    pub fn restore(&self, snapshot: &str) -> World {
        let files = self.with(|w| w.snapshots[&SnapshotId::new(snapshot).unwrap()].clone());
        let world = World::new();
        world.with(|w| w.files = files);
        world
    }
    /// Until what is asked of the world holds.
    pub async fn until(&self, mut holds: impl FnMut(&World) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            if holds(self) {
                return;
            }
            // What `holds` looked at has counted as a change: only wait if nothing else happened.
            let _ = tokio::time::timeout(Duration::from_millis(5), changed.changed()).await;
        }
    }
}

struct Attached {
    world: World,
    attempt: Attempt,
    id: SandboxId,
}

impl Attached {
    fn check(&self) -> Result<()> {
        let (dead, attempt) = self.world.with(|w| (w.dead, w.attempt));
        if dead {
            return Err(SandboxError::new(ErrorKind::Unavailable, "the sandbox is gone"));
        }
        if attempt > self.attempt {
            return Err(SandboxError::new(ErrorKind::Stale, "a newer attempt"));
        }
        Ok(())
    }

    fn real(&self, path: &str) -> String {
        self.world.with(|w| w.links.get(path).cloned().unwrap_or_else(|| path.to_string()))
    }

    /// Starts a command; its words are the program.
    fn start(&self, command: String) -> Called {
        let output = Arc::new(Mutex::new(Vec::new()));
        let (ended, ended_rx) = watch::channel(None);
        let (kill, mut killed) = watch::channel(false);
        self.world.with(|w| w.ran.push(command.clone()));
        let (world, out) = (self.world.clone(), output.clone());
        tokio::spawn(async move {
            let mut exit = (0, None, false);
            for part in command.split(" && ") {
                let (word, rest) = part.split_once(' ').unwrap_or((part, ""));
                match word {
                    "echo" => out.lock().unwrap().extend_from_slice(format!("{rest}\n").as_bytes()),
                    "append" => {
                        let (path, text) = rest.split_once(' ').unwrap();
                        world.with(|w| {
                            w.files
                                .entry(path.to_string())
                                .or_default()
                                .extend_from_slice(format!("{text}\n").as_bytes());
                        });
                    }
                    "cat" => {
                        let text = world.file(rest).unwrap_or_default();
                        out.lock().unwrap().extend_from_slice(text.as_bytes());
                    }
                    "gate" => world.until(|w| w.with(|w| w.gates.contains(rest))).await,
                    "flood" => out.lock().unwrap().resize(rest.parse().unwrap(), b'x'),
                    "fail" => exit.0 = rest.parse().unwrap(),
                    "oom" => exit = (137, Some(9), true),
                    "hang" => {
                        let _ = killed.wait_for(|k| *k).await;
                        exit = (137, Some(9), false);
                    }
                    other => panic!("the world's shell does not know {other:?}"),
                }
                if exit.0 != 0 {
                    break;
                }
            }
            let bytes = out.lock().unwrap().len() as u64;
            ended.send_replace(Some(ExecResult {
                exit_code: exit.0,
                signal: exit.1,
                timed_out: false,
                oom_killed: exit.2,
                duration: Duration::ZERO,
                stdout_bytes: bytes,
                stderr_bytes: 0,
                truncated: false,
            }));
            world.with(|_| ());
        });
        Called { output, ended: ended_rx, kill: Arc::new(kill) }
    }
}

struct Control(Arc<watch::Sender<bool>>);

#[async_trait]
impl ExecControl for Control {
    async fn write_stdin(&self, _: Bytes) -> Result<()> {
        Ok(())
    }
    async fn close_stdin(&self) -> Result<()> {
        Ok(())
    }
    async fn signal(&self, _: Signal) -> Result<()> {
        self.0.send_replace(true);
        Ok(())
    }
    async fn resize(&self, _: PtySize) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Sandbox for Attached {
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn attempt(&self) -> Attempt {
        self.attempt
    }
    async fn info(&self) -> Result<SandboxInfo> {
        Err(SandboxError::new(ErrorKind::Unsupported, "not needed"))
    }

    async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        self.check()?;
        let id = request.call.clone().expect("the agent's commands have ids");
        let known = self.world.with(|w| w.calls.get(&id).cloned());
        let called = match known {
            Some(called) => called,
            None => {
                let called = self.start(request.argv.last().unwrap().clone());
                self.world.with(|w| w.calls.insert(id, called.clone()));
                called
            }
        };
        let (tx, events) = mpsc::channel(4);
        let mut ended = called.ended.clone();
        let control = Box::new(Control(called.kill.clone()));
        let max = usize::try_from(request.max_output.unwrap_or(ExecRequest::DEFAULT_MAX_OUTPUT)).unwrap();
        tokio::spawn(async move {
            let Ok(result) = ended.wait_for(Option::is_some).await.map(|r| r.clone().unwrap()) else {
                return;
            };
            let output = called.output.lock().unwrap().clone();
            for piece in output[..output.len().min(max)].chunks(64 << 10) {
                if tx.send(Ok(ExecEvent::Stdout(Bytes::copy_from_slice(piece)))).await.is_err() {
                    return;
                }
            }
            let _ = tx.send(Ok(ExecEvent::Exit(result))).await;
        });
        Ok(Exec { events: events.into(), control })
    }
    async fn forget(&self, call: &CallId) -> Result<()> {
        self.check()?;
        self.world.with(|w| w.calls.remove(call));
        Ok(())
    }
    async fn calls(&self) -> Result<Vec<CallId>> {
        Ok(self.world.with(|w| w.calls.keys().cloned().collect()))
    }

    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        self.check()?;
        self.world.with(|w| {
            w.reads += 1;
            w.running += 1;
            w.most_running = w.most_running.max(w.running);
        });
        // Others get a chance to start meanwhile.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let path = self.real(path);
        self.world.with(|w| {
            w.running -= 1;
            let file =
                w.files.get(&path).ok_or_else(|| SandboxError::new(ErrorKind::NotFound, "no such file"))?;
            let start = usize::try_from(offset).unwrap().min(file.len());
            let end = (start + usize::try_from(max).unwrap()).min(file.len());
            Ok(Bytes::copy_from_slice(&file[start..end]))
        })
    }
    async fn write_file(&self, path: &str, data: Bytes, _: Option<u32>) -> Result<()> {
        self.check()?;
        let path = self.real(path);
        self.world.with(|w| w.files.insert(path, data.to_vec()));
        Ok(())
    }
    async fn write_file_from(
        &self,
        _: &str,
        _: &mut (dyn AsyncRead + Send + Unpin),
        _: Option<u32>,
    ) -> Result<u64> {
        Err(SandboxError::new(ErrorKind::Unsupported, "not needed"))
    }
    async fn unpack(&self, _: &str, _: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        Err(SandboxError::new(ErrorKind::Unsupported, "not needed"))
    }
    async fn stat(&self, path: &str) -> Result<FileInfo> {
        self.check()?;
        self.world.with(|w| {
            let info = |kind, size, target| FileInfo {
                name: path.to_string(),
                kind,
                size,
                mode: 0o644,
                modified: Timestamp(0),
                symlink_target: target,
            };
            if let Some(target) = w.links.get(path) {
                return Ok(info(FileKind::Symlink, 0, Some(target.clone())));
            }
            if let Some(file) = w.files.get(path) {
                return Ok(info(FileKind::File, file.len() as u64, None));
            }
            if w.files.keys().any(|f| f.starts_with(&format!("{path}/"))) {
                return Ok(info(FileKind::Dir, 0, None));
            }
            Err(SandboxError::new(ErrorKind::NotFound, "no such file"))
        })
    }
    async fn list_files(&self, _: &str) -> Result<Vec<FileInfo>> {
        Ok(Vec::new())
    }
    async fn remove(&self, path: &str, _: bool) -> Result<()> {
        self.world.with(|w| w.files.remove(path));
        Ok(())
    }
    async fn make_dir(&self, _: &str) -> Result<()> {
        Ok(())
    }

    async fn glob(&self, request: GlobRequest) -> Result<Vec<String>> {
        self.check()?;
        let end = request.pattern.trim_start_matches('*').to_string();
        let files = self.world.with(|w| w.files.keys().cloned().collect::<Vec<_>>());
        Ok(files.into_iter().filter(|f| f.ends_with(&end)).take(request.max).collect())
    }
    async fn grep(&self, request: GrepRequest) -> Result<GrepResult> {
        self.check()?;
        let mut matches = Vec::new();
        for (path, data) in self.world.files() {
            for (line, text) in (1..).zip(String::from_utf8_lossy(&data).lines()) {
                if text.contains(&request.pattern) {
                    matches.push(GrepMatch { path: path.clone(), line, text: text.to_string() });
                }
            }
        }
        let truncated = matches.len() > request.max;
        matches.truncate(request.max);
        Ok(GrepResult { matches, truncated, unsearched: Vec::new() })
    }
    async fn git_export(&self, _: GitExport) -> Result<WorkDiff> {
        Ok(WorkDiff::default())
    }

    async fn stats(&self) -> Result<Stats> {
        Ok(Stats::default())
    }
    async fn health(&self) -> Result<Health> {
        self.check()?;
        Ok(Health { healthy: true, detail: String::new() })
    }

    async fn snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        self.check()?;
        self.world.with(|w| {
            let files = w.files.clone();
            w.snapshots.entry(id.clone()).or_insert(files);
        });
        Ok(SnapshotInfo {
            id: id.clone(),
            provider: forkyard_core::sandbox::ProviderKind::Local,
            mode: SnapshotMode::Sealed,
            labels: labels.clone(),
            created_at: Timestamp(0),
            bytes: None,
        })
    }
    async fn pause(&self) -> Result<()> {
        Ok(())
    }
    async fn resume(&self) -> Result<()> {
        Ok(())
    }
}
