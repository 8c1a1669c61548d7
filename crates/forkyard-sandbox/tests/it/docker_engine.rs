//! The Docker provider and its engine: owners that die, engines that are not what they should be, users without leave,
//! registries.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bollard::query_parameters::{
    ListContainersOptionsBuilder, PushImageOptionsBuilder, RemoveImageOptionsBuilder, TagImageOptionsBuilder,
};
use forkyard_core::{Attempt, SnapshotId};
use forkyard_sandbox::docker::{DockerOptions, DockerProvider};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{
    ErrorKind, ExecRequest, Labels, LimitMeans, Provider, Root, SandboxSpec, SandboxStatus, Volume,
};
use futures::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use crate::docker::{connect, left};
use crate::docker_fixture::{Daemon, IMAGE, id, needed, sh, spec};
use crate::docker_warm::until_ready;
use crate::local::as_user_with;

const FIRST: Attempt = Attempt(1);
/// For the engine to finish what somebody asked for who is gone.
const ENGINE_WITHIN: Duration = Duration::from_secs(30);

/// Not a test by itself: makes a sandbox and a child of it, says so, and waits to be killed.
#[tokio::test]
#[ignore = "run by another test"]
async fn owner_that_will_be_killed() {
    let (Ok(host), Some(state)) =
        (std::env::var("KILLED_OWNER_HOST"), std::env::var_os("KILLED_OWNER_STATE"))
    else {
        return;
    };
    let warm = if std::env::var_os("KILLED_OWNER_KEEPS").is_some() { 2 } else { 0 };
    let options = DockerOptions { host: Some(host), image: Some(IMAGE.into()), warm, ..Default::default() };
    let provider = DockerProvider::connect(Path::new(&state), options).await.unwrap();
    let keeper = provider.clone();
    tokio::spawn(async move { keeper.keep_ready(CancellationToken::new()).await });
    let parent = provider.create(&id("parent"), FIRST, &spec()).await.unwrap();
    let mark = std::env::var("KILLED_OWNER_MARK").unwrap();
    sh(&parent, &format!("echo one > f; (sleep {mark} &) >/dev/null 2>&1")).await;
    // Commands may look at each other.
    sh(&parent, "cd /tmp; sleep 60 > /dev/null 2>&1 & echo $! > /workspace/pid").await;
    assert_eq!(sh(&parent, "readlink /proc/$(cat pid)/cwd; kill $(cat pid); rm pid").await, "/tmp\n");
    let snapshot = SnapshotId::new("snap").unwrap();
    parent.snapshot(&snapshot, &Labels::new()).await.unwrap();
    let child = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..spec() };
    if warm > 0 {
        until_ready(&provider, 1).await;
    }
    provider.create(&id("child"), FIRST, &child).await.unwrap();
    provider.remove_snapshot(&snapshot).await.unwrap();
    println!("made");
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_owners_that_were_killed() {
    nothing_is_left_of(&[]).await;
}

/// They are killed while they make containers for later, take one, and have some ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_keepers_that_were_killed() {
    nothing_is_left_of(&[("KILLED_OWNER_KEEPS", "1")]).await;
}

async fn nothing_is_left_of(env: &[(&str, &str)]) {
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|scale| scale == "full");
    let cycles = if full { 100 } else { 10 };
    // By this its processes are known among those of tests beside it.
    let mark = (1_000_000 + std::process::id()).to_string();
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    // The image is prepared once; how long a whole owner takes says when to kill the others.
    let mut whole = Duration::ZERO;
    for cycle in 0..cycles {
        let begin = std::time::Instant::now();
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "docker_engine::owner_that_will_be_killed", "--ignored", "--nocapture"])
            .env("KILLED_OWNER_HOST", daemon.host())
            .env("KILLED_OWNER_STATE", state.path())
            .env("KILLED_OWNER_MARK", &mark)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        if cycle == 0 || cycle % 3 == 2 {
            let lines = std::io::BufRead::lines(std::io::BufReader::new(owner.stdout.take().unwrap()));
            assert!(lines.map_while(Result::ok).any(|line| line == "made"));
            whole = whole.max(begin.elapsed());
        } else {
            // Anywhere on its way: nothing is expected of the moment, only of what is left after it.
            tokio::time::sleep(whole * (1 + (cycle * 7) % 10) / 11).await;
        }
        owner.kill().unwrap();
        owner.wait().unwrap();
        let provider = connect(&daemon, state.path(), None).await;
        // The engine may still be at work on what the dead owner asked for: what comes of it is found by the next look.
        let limit = std::time::Instant::now() + ENGINE_WITHIN;
        loop {
            provider.sweep().await.unwrap();
            for info in provider.list(&Labels::new()).await.unwrap() {
                provider.destroy(&info.id).await.unwrap();
            }
            match left(&daemon).await {
                (0, 0) => break,
                left => assert!(std::time::Instant::now() < limit, "cycle {cycle}: {left:?}"),
            }
        }
        for snapshot in provider.snapshots().await.unwrap() {
            provider.remove_snapshot(&snapshot.id).await.unwrap();
        }
        for part in ["sandboxes", "snapshots", "ready", "taken"] {
            let names: Vec<_> = std::fs::read_dir(state.path().join(part)).unwrap().flatten().collect();
            assert!(names.is_empty(), "cycle {cycle}: {names:?}");
        }
    }
    let alive = std::fs::read_dir("/proc").unwrap().flatten().filter(|p| {
        std::fs::read(p.path().join("cmdline"))
            .is_ok_and(|c| c.split(|b| *b == 0).any(|a| a == mark.as_bytes()))
    });
    assert_eq!(alive.count(), 0);
}

/// Answers every request with the same words.
fn impostor(path: &Path, answer: String) -> tokio::task::JoinHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    })
}

fn json_answer(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn engines_that_are_not_what_they_should_be() {
    let dir = tempfile::tempdir().unwrap();
    let answer = json_answer;
    let old = answer("200 OK", r#"{"ApiVersion":"1.40","Version":"19.03.0"}"#);
    let refuses = answer("403 Forbidden", r#"{"message":"not for you"}"#);
    let broken = answer("500 Oops", r#"{"message":"boom"}"#);
    let table = [
        ("old", old, ErrorKind::Unsupported),
        ("refuses", refuses, ErrorKind::Auth),
        ("broken", broken, ErrorKind::Unavailable),
        ("rubbish", "SSH-2.0-OpenSSH_9.2\r\n".to_string(), ErrorKind::Unavailable),
    ];
    for (name, answer, kind) in table {
        let path = dir.path().join(name);
        let _server = impostor(&path, answer);
        let options =
            DockerOptions { host: Some(format!("unix://{}", path.display())), ..Default::default() };
        let error = DockerProvider::connect(&dir.path().join("state"), options).await.err().unwrap();
        assert_eq!(error.kind, kind, "{name}: {error}");
        assert!(error.hint.is_some(), "{name}: no fix in {error}");
    }
}

/// The engine behind a word of ours: `first` hears of each question before it, and may answer in its place.
fn relay(path: &Path, engine: PathBuf, first: impl Fn(&str) -> Option<String> + Send + Sync + 'static) {
    let (listener, first) = (UnixListener::bind(path).unwrap(), Arc::new(first));
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (engine, first) = (engine.clone(), first.clone());
            tokio::spawn(async move {
                let mut far = UnixStream::connect(engine).await.unwrap();
                let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
                loop {
                    // A client waits for its answer before it asks again, so a question begins with a piece.
                    tokio::select! {
                        n = near.read(&mut asked) => match n {
                            Ok(n @ 1..) => {
                                let question = String::from_utf8_lossy(&asked[..n]).into_owned();
                                if let Some(answer) = first(question.lines().next().unwrap_or_default()) {
                                    let _ = near.write_all(answer.as_bytes()).await;
                                    return;
                                }
                                far.write_all(&asked[..n]).await.unwrap();
                            }
                            Ok(0) | Err(_) => return,
                        },
                        n = far.read(&mut answered) => match n {
                            Ok(n @ 1..) => if near.write_all(&answered[..n]).await.is_err() { return },
                            Ok(0) | Err(_) => return,
                        },
                    }
                }
            });
        }
    });
}

async fn connect_by(relay: &Path, state: &Path) -> DockerProvider {
    let host = Some(format!("unix://{}", relay.display()));
    let options = DockerOptions { host, image: Some(IMAGE.into()), ..Default::default() };
    DockerProvider::connect(state, options).await.unwrap()
}

/// The engine follows what a path leads to when it mounts it; that may be later than it was looked at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_folder_than_the_one_that_was_named_is_not_shown() {
    let Some(daemon) = Daemon::start().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let [state, secret, shown, kept] = ["state", "secret", "shown", "kept"].map(|name| dir.path().join(name));
    let provider = connect(&daemon, &state, None).await;
    for folder in [&secret, &shown] {
        std::fs::create_dir(folder).unwrap();
    }
    std::fs::write(shown.join("file"), "mine").unwrap();
    let volume = Volume { host_path: shown.display().to_string(), path: "/data".into(), writable: false };
    let with = SandboxSpec { volumes: vec![volume], ..spec() };
    let sandbox = provider.create(&id("box"), FIRST, &with).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /data/file").await, "mine");
    provider.stop(&id("box")).await.unwrap();

    let by = dir.path().join("relay");
    let (from, to) = (shown.clone(), kept.clone());
    relay(&by, daemon.host().trim_start_matches("unix://").into(), move |question| {
        if question.starts_with("POST ") && question.contains("/start") {
            std::fs::rename(&from, &to).unwrap();
            std::os::unix::fs::symlink(&secret, &from).unwrap();
        }
        None
    });
    let late = connect_by(&by, &state).await;
    let refused = late.start(&id("box"), Attempt(2)).await.err().unwrap();
    assert!(refused.message.contains("/data is another folder"), "{refused}");
    assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("try again")), "{refused}");
    assert_eq!(provider.list(&Labels::new()).await.unwrap()[0].status, SandboxStatus::Stopped);
    std::fs::remove_file(&shown).unwrap();
    std::fs::rename(&kept, &shown).unwrap();
    let sandbox = provider.start(&id("box"), Attempt(3)).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /data/file").await, "mine");
    provider.destroy(&id("box")).await.unwrap();
}

/// As an engine of an ordinary user without delegated control groups. It would take the limits and drop them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_engine_cant_keep_is_the_guests_or_refused() {
    const MEMORY: u64 = 64 << 20;
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let engine = PathBuf::from(daemon.host().trim_start_matches("unix://"));
    let mut spec = spec();
    spec.limits.memory_bytes = MEMORY;
    let says = async |name: &str, kept: bool, processes: bool| {
        let info = serde_json::json!({
            "MemoryLimit": kept, "CpuCfsPeriod": kept, "CpuCfsQuota": kept, "PidsLimit": processes,
        });
        let (path, answer) = (state.path().join(name), json_answer("200 OK", &info.to_string()));
        relay(&path, engine.clone(), move |question| question.contains("/info ").then(|| answer.clone()));
        let provider = connect_by(&path, &state.path().join("state")).await;
        let made = provider.create(&id(name), FIRST, &spec).await;
        (provider, made)
    };
    let refused = says("crowd", true, false).await.1.err().unwrap();
    assert!(refused.kind == ErrorKind::Unsupported && refused.hint.is_some(), "{refused}");
    assert_eq!(left(&daemon).await, (0, 0));

    for (name, kept) in [("weak", false), ("strong", true)] {
        let (provider, sandbox) = says(name, kept, true).await;
        let sandbox = sandbox.unwrap();
        let achieved = sandbox.info().await.unwrap().achieved;
        let means = if kept { LimitMeans::Kernel } else { LimitMeans::Watchdog };
        assert_eq!((achieved.memory, achieved.cpu, achieved.processes), (means, means, LimitMeans::Kernel));
        let options = ListContainersOptionsBuilder::default().all(true).build();
        let found = daemon.docker().unwrap().list_containers(Some(options)).await.unwrap();
        let [found] = &found[..] else { panic!("{found:?}") };
        let host = daemon.docker().unwrap().inspect_container(found.id.as_ref().unwrap(), None).await;
        let host = host.unwrap().host_config.unwrap();
        let asked = (host.memory.unwrap_or_default() as u64, host.nano_cpus.unwrap_or_default() > 0);
        assert_eq!(asked, if kept { (MEMORY, true) } else { (0, false) });
        // It would go on for long: only who is stopped ends with an error.
        let hog = ExecRequest::shell("dd if=/dev/zero of=/dev/null bs=300M count=2000");
        let (result, ..) = sandbox.exec(hog).await.unwrap().output().await.unwrap();
        assert_ne!(result.exit_code, 0, "{name}");
        assert!(result.oom_killed, "{name}");
        provider.destroy(&id(name)).await.unwrap();
    }
    assert_eq!(left(&daemon).await, (0, 0));
}

/// Run as an ordinary user: by leave of the engine's socket, or without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test"]
async fn as_whoever_this_is() {
    let Ok(host) = std::env::var("ORDINARY_DOCKER_HOST") else { return };
    let state = tempfile::tempdir().unwrap();
    let options = DockerOptions { host: Some(host), image: Some(IMAGE.into()), ..Default::default() };
    let connected = DockerProvider::connect(state.path(), options).await;
    if std::env::var("ORDINARY_MAY").is_err() {
        let error = connected.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Denied, "{error}");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("group docker")), "{error}");
        return;
    }
    let provider = connected.unwrap();
    let parent = provider.create(&id("mine"), FIRST, &spec()).await.unwrap();
    let own = rustix::process::geteuid().as_raw();
    assert_eq!(sh(&parent, "id -u; echo one > f; chmod 000 f").await, format!("{own}\n"));
    // The folder that it shares with the host is the same user's: nothing comes to lie there, and nothing goes.
    let shared = "cd /.forkyard/run; head -c 9000000 /dev/zero > x; mkdir d; ln -s / l; rm -f guest.sock; mv guest.sock y
        ls; cd /workspace; mkdir d && mv f d/f && mv d/f . && rmdir d && echo moved";
    assert_eq!(sh(&parent, &format!("({shared}) 2>/dev/null")).await, "guest.sock\nmoved\n");
    let snapshot = SnapshotId::new("snap").unwrap();
    parent.snapshot(&snapshot, &Labels::new()).await.unwrap();
    let child = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..spec() };
    let child = provider.create(&id("child"), FIRST, &child).await.unwrap();
    assert_eq!(sh(&child, "stat -c %a f; chmod 600 f; cat f; chmod 000 /.forkyard/run").await, "0\none\n");
    provider.remove_snapshot(&snapshot).await.unwrap();
    for name in ["mine", "child"] {
        provider.destroy(&id(name)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordinary_users_with_and_without_leave() {
    use std::os::unix::fs::PermissionsExt;
    let Some(daemon) = Daemon::start().await else { return };
    let host = daemon.host();
    let socket = host.trim_start_matches("unix://").to_string();
    let test = "docker_engine::as_whoever_this_is";
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = |env: Vec<(&'static str, String)>| {
        tokio::task::spawn_blocking(move || {
            let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (*k, v.as_str())).collect();
            as_user_with(test, &env, |_| {});
        })
    };
    run(vec![("ORDINARY_DOCKER_HOST", host.clone())]).await.unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    run(vec![("ORDINARY_DOCKER_HOST", host), ("ORDINARY_MAY", "1".into())]).await.unwrap();
    assert_eq!(left(&daemon).await, (0, 0));
}

/// Debian's `docker-registry`, ended with the test.
struct Registry {
    child: std::process::Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    async fn start() -> Option<Registry> {
        let program = needed("docker-registry")?;
        let dir = tempfile::tempdir().unwrap();
        // Free a moment ago; whoever takes it meanwhile makes this test fail, not lie.
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
            dir.path().join("data").display()
        );
        std::fs::write(dir.path().join("config.yml"), config).unwrap();
        let child = Command::new(program)
            .arg("serve")
            .arg(dir.path().join("config.yml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let registry = Registry { child, address, _dir: dir };
        while tokio::net::TcpStream::connect(&registry.address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Some(registry)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_come_from_a_registry() {
    let Some(daemon) = Daemon::start().await else { return };
    let Some(registry) = Registry::start().await else { return };
    let docker = daemon.docker().unwrap();
    let repo = format!("{}/forkyard/test", registry.address);
    let name = format!("{repo}:1");
    docker
        .tag_image(IMAGE, Some(TagImageOptionsBuilder::default().repo(&repo).tag("1").build()))
        .await
        .unwrap();
    let options = PushImageOptionsBuilder::default().tag("1").build();
    let mut pushing = Box::pin(docker.push_image(&repo, Some(options), None));
    while let Some(said) = pushing.next().await {
        said.unwrap();
    }
    for image in [name.as_str(), IMAGE] {
        docker.remove_image(image, Some(RemoveImageOptionsBuilder::default().build()), None).await.unwrap();
    }
    let state = tempfile::tempdir().unwrap();
    let provider = connect(&daemon, state.path(), None).await;
    let from = |image: &str| SandboxSpec { root: Root::Image(image.into()), ..spec() };
    let sandbox = provider.create(&id("pulled"), FIRST, &from(&name)).await.unwrap();
    assert_eq!(sh(&sandbox, "id -un").await, "user\n");
    provider.destroy(&id("pulled")).await.unwrap();
    for missing in [format!("{repo}:2"), format!("{}/forkyard/other:1", registry.address)] {
        let error = provider.create(&id("missing"), FIRST, &from(&missing)).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
        assert!(error.hint.is_some(), "{error}");
    }
    assert_eq!(left(&daemon).await, (0, 0));

    // The same registry without an engine.
    let state = tempfile::tempdir().unwrap();
    let local = LocalProvider::new(state.path(), LocalOptions::default()).unwrap();
    let sandbox = local.create(&id("local"), FIRST, &from(&name)).await.unwrap();
    assert_eq!(sh(&sandbox, "ls /bin/busybox").await, "/bin/busybox\n");
    local.destroy(&id("local")).await.unwrap();
    local.remove_image(&name).await.unwrap();
    local.settle().await;
}
