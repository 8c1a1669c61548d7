//! The local provider.

use std::sync::Arc;

use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId};
use forkyard_sandbox::conformance::{Case, Ctx, Stage, attacks, conformance};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{
    EgressCounters, EgressFactory, EgressHandle, ErrorKind, ExecRequest, InsideFile, Labels, NetworkMode,
    NetworkSpec, PROXY_ADDRESS, Provider, Root, Sandbox, SandboxSpec, SandboxStatus, SnapshotMode,
};

fn provider() -> (LocalProvider, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (LocalProvider::new(dir.path(), LocalOptions::default()).unwrap(), dir)
}

fn offline() -> SandboxSpec {
    let mut spec = SandboxSpec::default();
    spec.network.mode = NetworkMode::None;
    spec
}

async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> (i32, String, String) {
    let (result, out, err) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
    (result.exit_code, String::from_utf8_lossy(&out).into(), String::from_utf8_lossy(&err).into())
}

#[tokio::test]
async fn a_sandbox_is_made_used_and_gone() {
    let (provider, dir) = provider();
    let id = SandboxId::new("one").unwrap();
    let sandbox = provider.create(&id, Attempt(1), &offline()).await.unwrap();
    assert_eq!(
        sh(&sandbox, "id -u; pwd; echo oops >&2; exit 3").await,
        (3, "1000\n/workspace\n".into(), "oops\n".into())
    );
    sandbox.write_file("a/b.txt", Bytes::from_static(b"hi"), None).await.unwrap();
    assert_eq!(sh(&sandbox, "cat a/b.txt").await.1, "hi");
    assert_eq!(sandbox.read_file("/workspace/a/b.txt", 0, 10).await.unwrap(), "hi");
    let listed = provider.list(&Labels::new()).await.unwrap();
    assert_eq!(listed.len(), 1);
    provider.destroy(&id).await.unwrap();
    provider.destroy(&id).await.unwrap();
    assert_eq!(sandbox.exec(ExecRequest::new(["true"])).await.err().unwrap().kind, ErrorKind::NotFound);
    provider.settle().await;
    for part in ["sandboxes", "trash"] {
        assert_eq!(dir.path().join(part).read_dir().unwrap().count(), 0, "{part}");
    }
}

#[tokio::test]
async fn a_call_is_handed_over_and_the_older_owner_refused() {
    let (first, dir) = provider();
    let id = SandboxId::new("two").unwrap();
    let old = first.create(&id, Attempt(1), &offline()).await.unwrap();
    let call = CallId::new("call1").unwrap();
    let script = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo $RANDOM$$ | tee result";
    let mut running = old.exec(ExecRequest::shell(script).call(call.clone())).await.unwrap();
    running.events.recv().await.unwrap().unwrap();
    // Another process' provider on the same state.
    let second = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
    let new = second.attach(&id, Attempt(2)).await.unwrap();
    assert_eq!(old.calls().await.err().unwrap().kind, ErrorKind::Stale);
    assert_eq!(first.attach(&id, Attempt(1)).await.err().unwrap().kind, ErrorKind::Stale);
    assert_eq!(new.calls().await.unwrap(), vec![call.clone()]);
    new.write_file("go", Bytes::new(), None).await.unwrap();
    for _ in 0..2 {
        let again = new.exec(ExecRequest::shell("echo never").call(call.clone())).await.unwrap();
        let (result, out, _) = again.output().await.unwrap();
        let written = new.read_file("result", 0, 100).await.unwrap();
        assert_eq!(
            (result.exit_code, String::from_utf8(out).unwrap()),
            (0, format!("begun\n{}", std::str::from_utf8(&written).unwrap()))
        );
    }
    new.forget(&call).await.unwrap();
    assert!(new.calls().await.unwrap().is_empty());
    second.destroy(&id).await.unwrap();
    second.settle().await;
}

#[tokio::test]
async fn children_of_a_snapshot_share_nothing_later() {
    let (provider, dir) = provider();
    let parent = provider.create(&SandboxId::new("parent").unwrap(), Attempt(1), &offline()).await.unwrap();
    sh(&parent, "mkdir d; echo one > d/f; rm -rf /etc/xdg; echo kept > /tmp/t").await;
    let snap = SnapshotId::new("snap").unwrap();
    let info = parent.snapshot(&snap, &Labels::new()).await.unwrap();
    assert_eq!(info.mode, SnapshotMode::Sealed);
    assert_eq!(
        parent.snapshot(&snap, &Labels::new()).await.unwrap(),
        info,
        "the same id gives the first result"
    );
    assert_eq!(sh(&parent, "echo two > d/f; cat d/f; cat /tmp/t").await.1, "two\nkept\n");
    let child_spec = SandboxSpec { root: Root::Snapshot(snap.clone()), ..offline() };
    let child = provider.create(&SandboxId::new("child").unwrap(), Attempt(1), &child_spec).await.unwrap();
    assert_eq!(sh(&child, "cat d/f; ls /etc/xdg 2>&1 | wc -l; echo three > d/f").await.1, "one\n1\n");
    assert_eq!(sh(&parent, "cat d/f").await.1, "two\n");
    provider.remove_snapshot(&snap).await.unwrap();
    assert_eq!(sh(&child, "cat d/f /tmp/t").await.1, "three\nkept\n", "children keep working");
    for name in ["parent", "child"] {
        provider.destroy(&SandboxId::new(name).unwrap()).await.unwrap();
    }
    provider.settle().await;
    assert_eq!(dir.path().join("layers").read_dir().unwrap().count(), 0);
}

/// Fewer in CI, all of them at full scale.
pub fn scaled(few: u32, all: u32) -> u32 {
    if std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|scale| scale == "full") { all } else { few }
}

/// What of sandboxes, snapshots and images is left in a state folder.
fn left(state: &std::path::Path) -> Vec<std::path::PathBuf> {
    let parts = ["sandboxes", "trash", "layers", "snapshots", "images"];
    parts.iter().flat_map(|part| state.join(part).read_dir().unwrap().flatten().map(|e| e.path())).collect()
}

pub fn assert_empty(state: &std::path::Path) {
    assert_eq!(left(state), Vec::<std::path::PathBuf>::new());
}

/// After a kill. A helper that the killed owner was just starting holds its locks for a moment longer than the owner.
pub async fn sweep_until_empty(provider: &LocalProvider, state: &std::path::Path) {
    let gone = async {
        loop {
            provider.sweep().await.unwrap();
            if left(state).is_empty() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    if tokio::time::timeout(std::time::Duration::from_secs(20), gone).await.is_err() {
        assert_empty(state);
    }
}

/// Every case on a fresh state folder; what failed, by name.
async fn run_cases(cases: Vec<Case>) {
    run_cases_on(cases, offline()).await;
}

/// Cases that move a hundred megabytes, or need a crowd of processes to get somewhere: minutes where every instruction is
/// emulated, so that only the whole of the suites has them there.
const TOO_MUCH: &[&str] = &[
    "binary_and_large_files",
    "a_slow_reader_stops_the_writer",
    "an_output_flood_is_contained",
    "a_busy_machine_hides_no_flood",
    "moving_folders_hide_no_flood",
];

pub async fn run_cases_on(cases: Vec<Case>, spec: SandboxSpec) {
    let dir = tempfile::tempdir().unwrap();
    let stage = Arc::new(Stage::new().unwrap());
    let options = LocalOptions { egress: Some(stage.egress()), ..LocalOptions::default() };
    let open = || Arc::new(LocalProvider::new(dir.path(), options.clone()).unwrap());
    let (provider, other) = (open(), open());
    let ctx = Ctx::new(provider.clone(), other.clone(), spec.clone()).on(stage);
    let only = std::env::var("ONLY").unwrap_or_default();
    // In the virtual machine every instruction is emulated.
    let emulated = std::env::var_os("FORKYARD_MACHINE").is_some();
    let whole = std::env::var("FORKYARD_MACHINE_SCALE").is_ok_and(|scale| scale == "full");
    let too_much = |case: &Case| !whole && TOO_MUCH.contains(&case.name);
    let limit = std::time::Duration::from_secs(if emulated { 600 } else { 120 });
    let mut failed = Vec::new();
    for case in
        cases.iter().filter(|case| case.name.contains(&only) && (case.applies)(&provider.capabilities()))
    {
        if emulated && too_much(case) {
            println!("left out: {}", case.name);
            continue;
        }
        let begin = std::time::Instant::now();
        let ended = tokio::time::timeout(limit, case.run(&ctx)).await;
        println!("{:6} ms {}", begin.elapsed().as_millis(), case.name);
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(e)) => failed.push(format!("{}: {e}", case.name)),
            Err(_) => failed.push(format!("{}: hangs", case.name)),
        }
    }
    if let Root::Image(reference) = &spec.root {
        provider.remove_image(reference).await.unwrap();
    }
    provider.settle().await;
    other.settle().await;
    for part in ["sandboxes", "trash", "layers", "snapshots", "images"] {
        let left: Vec<_> =
            dir.path().join(part).read_dir().unwrap().flatten().map(|e| e.file_name()).collect();
        if !left.is_empty() {
            failed.push(format!("left in {part}: {left:?}"));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_here() {
    run_cases(conformance()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_here() {
    run_cases(attacks()).await;
}

/// Runs one of the tests above again as an account without any rights.
pub fn as_ordinary_user(test: &str) {
    as_user_with(test, &[], |_| {});
}

/// The same with variables, in a home that was prepared.
pub fn as_user_with(test: &str, env: &[(&str, &str)], prepare: impl FnOnce(&std::path::Path)) {
    if !rustix::process::geteuid().is_root() {
        return; // the tests above are that already
    }
    const ID: u32 = 64_321;
    let dir = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir()
        .unwrap();
    let (program, temporary) = (dir.path().join("it"), dir.path().join("tmp"));
    // By another process: a descriptor of ours, open for writing, could be inherited by a fork of another test.
    let copied =
        std::process::Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status();
    assert!(copied.unwrap().success());
    std::fs::create_dir(&temporary).unwrap();
    prepare(&temporary);
    std::os::unix::fs::chown(&temporary, Some(ID), Some(ID)).unwrap();
    let output = std::process::Command::new("setpriv")
        .args([&format!("--reuid={ID}"), &format!("--regid={ID}"), "--clear-groups", "--"])
        .arg(&program)
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .envs(env.iter().copied())
        .env("TMPDIR", &temporary)
        .env("HOME", &temporary)
        .current_dir(&temporary)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn conformance_as_an_ordinary_user() {
    as_ordinary_user("local::conformance_here");
}

#[test]
fn attacks_as_an_ordinary_user() {
    as_ordinary_user("local::attacks_here");
}

/// Answers every connection with a line, like a proxy that knows only one word.
pub struct OneWord(pub &'static str);

struct Serving(tokio::task::JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl EgressHandle for Serving {
    fn counters(&self) -> EgressCounters {
        EgressCounters { rx_bytes: 7, tx_bytes: 5 }
    }
}

impl EgressFactory for OneWord {
    fn files(&self) -> Vec<InsideFile> {
        vec![InsideFile {
            path: "/etc/ssl/one.pem".into(),
            begins_with: None,
            data: "pem".into(),
            mode: 0o444,
        }]
    }
    fn env(&self, _: &SandboxId, _: &NetworkSpec) -> std::collections::BTreeMap<String, String> {
        [("HTTPS_PROXY".to_string(), format!("http://{PROXY_ADDRESS}"))].into()
    }
    fn serve(
        &self,
        _: &SandboxId,
        _: &NetworkSpec,
        _: Option<u64>,
        listener: std::net::TcpListener,
    ) -> forkyard_sandbox::Result<Box<dyn EgressHandle>> {
        let (listener, word) = (tokio::net::TcpListener::from_std(listener).unwrap(), self.0);
        Ok(Box::new(Serving(tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, word.as_bytes()).await;
            }
        }))))
    }
}

#[tokio::test]
async fn the_proxy_is_reached_from_inside_and_again_after_attach() {
    let dir = tempfile::tempdir().unwrap();
    let options = LocalOptions { egress: Some(Arc::new(OneWord("word\n"))), ..LocalOptions::default() };
    let provider = LocalProvider::new(dir.path(), options.clone()).unwrap();
    let id = SandboxId::new("net").unwrap();
    let sandbox = provider.create(&id, Attempt(1), &SandboxSpec::default()).await.unwrap();
    let ask =
        "bash -c 'read line < /dev/tcp/127.0.0.1/3128; echo $line'; cat /etc/ssl/one.pem; echo $HTTPS_PROXY";
    let want = "word\npemhttp://127.0.0.1:3128\n";
    assert_eq!(sh(&sandbox, ask).await.1, want);
    assert_eq!(sandbox.stats().await.unwrap().network_rx_bytes, 7);
    drop(sandbox);
    let other = LocalProvider::new(dir.path(), options).unwrap();
    let sandbox = other.attach(&id, Attempt(2)).await.unwrap();
    assert_eq!(sh(&sandbox, ask).await.1, want);
    // Without a proxy the default mode is refused, and says what can be had.
    let without = LocalProvider::new(&dir.path().join("x"), LocalOptions::default()).unwrap();
    let refused = without.create(&id, Attempt(1), &SandboxSpec::default()).await.err().unwrap();
    assert_eq!(refused.kind, ErrorKind::Unsupported);
    other.destroy(&id).await.unwrap();
    other.settle().await;
}

/// Whoever asks for figures, from whichever process and for however long, never stands between a sandbox and its owner's
/// proxy.
#[tokio::test]
async fn whoever_looks_offers_no_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let with = |word| {
        let options = LocalOptions { egress: Some(Arc::new(OneWord(word))), ..LocalOptions::default() };
        LocalProvider::new(dir.path(), options).unwrap()
    };
    let (owner, other) = (with("word\n"), with("wrong\n"));
    let id = SandboxId::new("net").unwrap();
    let sandbox = owner.create(&id, Attempt(1), &SandboxSpec::default()).await.unwrap();
    let looking =
        [other.observe(&id, Attempt(1)).await.unwrap(), other.observe(&id, Attempt(1)).await.unwrap()];
    let ask = "for i in $(seq 20); do bash -c 'read line < /dev/tcp/127.0.0.1/3128; echo $line'; done";
    assert_eq!(sh(&sandbox, ask).await.1, "word\n".repeat(20));
    for handle in &looking {
        handle.stats().await.unwrap();
        let busy = sh(&sandbox, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done").await;
        assert_eq!(busy.1, "");
        assert!(handle.stats().await.unwrap().cpu_percent > 0.0, "the second question knows of the first");
    }
    owner.destroy(&id).await.unwrap();
    owner.settle().await;
}

/// Not a test by itself: makes sandboxes, says so, and waits to be killed.
#[tokio::test]
#[ignore = "run by another test"]
async fn owner_that_will_be_killed() {
    let Some(state) = std::env::var_os("KILLED_OWNER_STATE") else { return };
    let provider = LocalProvider::new(std::path::Path::new(&state), LocalOptions::default()).unwrap();
    let mut kept = Vec::new();
    for i in 0..3 {
        let id = SandboxId::new(format!("orphan{i}")).unwrap();
        let sandbox = provider.create(&id, Attempt(1), &offline()).await.unwrap();
        kept.push(
            sandbox
                .exec(ExecRequest::shell("echo up; sleep 7654321").call(CallId::new("c").unwrap()))
                .await
                .unwrap(),
        );
        kept[i].events.recv().await.unwrap().unwrap();
    }
    println!("made");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn nothing_is_left_after_the_owner_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "local::owner_that_will_be_killed", "--ignored", "--nocapture"])
        .env("KILLED_OWNER_STATE", dir.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(owner.stdout.take().unwrap()));
    assert!(lines.map_while(Result::ok).any(|line| line == "made"));
    owner.kill().unwrap();
    owner.wait().unwrap();
    let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
    provider.sweep().await.unwrap();
    let left = provider.list(&Labels::new()).await.unwrap();
    assert_eq!(left.len(), 3);
    assert!(left.iter().all(|info| info.status == SandboxStatus::Running), "{left:?}");
    let again = provider.attach(&left[0].id, Attempt(2)).await.unwrap();
    assert_eq!(again.calls().await.unwrap().len(), 1, "its call runs on");
    for info in &left {
        provider.destroy(&info.id).await.unwrap();
    }
    provider.settle().await;
    for part in ["sandboxes", "trash"] {
        assert_eq!(dir.path().join(part).read_dir().unwrap().count(), 0, "{part}");
    }
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let alive = processes.filter(|p| {
        std::fs::read(p.path().join("cmdline")).is_ok_and(|c| c.windows(7).any(|w| w == b"7654321"))
    });
    assert_eq!(alive.count(), 0);
}
