//! This test program as another process: started again with a role, killed or read from by a test.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use forkyard_core::{Attempt, Usd, budget::Ask};
use forkyard_store::conformance::{entry, events, run_id};
use forkyard_store::{Reserve, Store, StoreError};

const ROLE: &str = "FORKYARD_STORE_TEST_ROLE";
const URL: &str = "FORKYARD_STORE_TEST_URL";
const ARGUMENT: &str = "FORKYARD_STORE_TEST_ARGUMENT";

/// Killed at the end of the test that started it, if it has not ended.
pub struct Process(Child);

impl Process {
    pub fn start(role: &str, url: &str, argument: impl ToString) -> Process {
        Process::spawn(Command::new(std::env::current_exe().unwrap()), role, url, argument)
    }

    /// With mounts of its own, that end with it. Needs no root where user namespaces are allowed.
    pub fn start_with_mounts(role: &str, url: &str) -> Process {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user"]).arg(std::env::current_exe().unwrap());
        Process::spawn(command, role, url, "")
    }

    fn spawn(mut command: Command, role: &str, url: &str, argument: impl ToString) -> Process {
        let child = command
            .args(["--exact", "child::role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(URL, url)
            .env(ARGUMENT, argument.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Process(child)
    }

    /// What it says, word by word, until it ends. Lines of the test harness are left out.
    pub fn lines(&mut self) -> impl Iterator<Item = Vec<String>> + use<> {
        let out = BufReader::new(self.0.stdout.take().expect("read once"));
        out.lines()
            .map_while(Result::ok)
            .filter_map(|line| Some(line.strip_prefix("> ")?.split(' ').map(str::to_string).collect()))
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    #[track_caller]
    pub fn succeed(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // In one write: a killed process must not leave half a line that looks whole.
    out.write_all(format!("> {line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Not a test: what a started process does.
#[test]
#[ignore = "started by other tests"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (url, argument) = (std::env::var(URL).unwrap(), std::env::var(ARGUMENT).unwrap());
    // The harness has begun a line.
    println!();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        match role.as_str() {
            "write" => write(&url, &argument).await,
            "watch" => watch(&url, argument.parse().unwrap()).await,
            "spend" => spend(&url, &argument).await,
            "open" => say(forkyard_store::open(&url).await.unwrap().identity().await.unwrap()),
            "full" => super::faults::full(&url).await,
            other => panic!("no such role: {other}"),
        }
    });
}

/// `argument`: forks, steps. Appends to each fork's journal and says what was answered with Ok.
async fn write(url: &str, argument: &str) {
    let mut words = argument.split(' ');
    let forks: std::ops::Range<u32> =
        words.next().unwrap().parse().unwrap()..words.next().unwrap().parse().unwrap();
    let steps: u64 = words.next().unwrap().parse().unwrap();
    let store = forkyard_store::open(url).await.unwrap();
    let run = run_id("a");
    let mut tasks = tokio::task::JoinSet::new();
    for fork in forks {
        let (store, run) = (store.clone(), run.clone());
        tasks.spawn(async move {
            let mut at = store.journal_len(&run, fork).await.unwrap();
            for _ in 0..steps {
                let done =
                    store.append_journal(entry(&run, fork, 1, at, events("agent.a", 2))).await.unwrap();
                at = done.seq;
                say(format!("ok {fork} {} {}", done.seq, done.position));
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

/// Says the run's last position whenever it is told of a change, until it is at `last`.
async fn watch(url: &str, last: u64) {
    let store = forkyard_store::open(url).await.unwrap();
    let run = run_id("a");
    let mut watch = store.watch(Some(&run));
    loop {
        let at = store.last_position(&run).await.unwrap();
        say(format!("at {at}"));
        if at >= last {
            return;
        }
        watch.changed().await;
    }
}

/// Reserves until nothing is left, as fork `argument`, and says what it got and what it paid.
async fn spend(url: &str, argument: &str) {
    let fork = argument.parse().unwrap();
    let store: Arc<dyn Store> = forkyard_store::open(url).await.unwrap();
    let run = run_id("a");
    let mut spent = 0;
    for i in 0.. {
        let request = format!("{fork}-{i}");
        let ask = Ask { fork, attempt: Attempt(1), request: request.clone(), worst: Usd(7) };
        match retry(|| store.reserve(&run, ask.clone())).await {
            Reserve::Granted => {}
            Reserve::Short { outstanding: true, .. } => continue,
            Reserve::Short { .. } => break,
            other => panic!("{other:?}"),
        }
        retry(|| store.mark_sent(&run, &request)).await;
        if i % 2 == 0 {
            retry(|| store.settle(&run, &request, Usd(3))).await;
            spent += 3;
        } else {
            retry(|| store.release_reservation(&run, &request)).await;
            spent += 7;
        }
    }
    say(format!("spent {spent}"));
}

/// As every caller does with an error that may pass.
pub async fn retry<T, F: Future<Output = Result<T, StoreError>>>(mut ask: impl FnMut() -> F) -> T {
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await
            }
            Err(error) => panic!("{error}"),
        }
    }
}
