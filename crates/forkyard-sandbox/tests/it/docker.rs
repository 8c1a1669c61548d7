//! The Docker provider against a real engine. One test starts one engine and asks everything of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bollard::query_parameters::{ListContainersOptionsBuilder, ListVolumesOptionsBuilder};
use forkyard_core::{Attempt, CallId, Millis, SandboxId, SnapshotId};
use forkyard_sandbox::conformance::{Case, Ctx, Stage, attacks, conformance};
use forkyard_sandbox::docker::{DockerOptions, DockerProvider};
use forkyard_sandbox::{
    ErrorKind, ExecRequest, Labels, Lifetime, NetworkMode, NetworkSpec, Provider, Root, Sandbox, SandboxSpec,
    SandboxStatus, SnapshotMode, Volume,
};
use tokio_util::sync::CancellationToken;

use crate::docker_fixture::{Daemon, IMAGE};
use crate::egress_fixture::Net;

const FIRST: Attempt = Attempt(1);

fn id(text: &str) -> SandboxId {
    SandboxId::new(text).unwrap()
}

fn spec() -> SandboxSpec {
    let network = NetworkSpec { mode: NetworkMode::None, ..Default::default() };
    SandboxSpec { network, ..Default::default() }
}

async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> (i32, String) {
    let (result, out, err) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
    (result.exit_code, format!("{}{}", String::from_utf8_lossy(&out), String::from_utf8_lossy(&err)))
}

struct Bench {
    daemon: Daemon,
    state: tempfile::TempDir,
    provider: DockerProvider,
}

impl Bench {
    async fn start() -> Option<Bench> {
        let daemon = Daemon::start().await?;
        let state = tempfile::tempdir().unwrap();
        let provider = connect(&daemon, state.path(), None).await;
        Some(Bench { daemon, state, provider })
    }

    async fn left(&self) -> (usize, usize) {
        left(&self.daemon).await
    }
}

/// Containers and volumes of an engine.
pub async fn left(daemon: &Daemon) -> (usize, usize) {
    let docker = daemon.docker().unwrap();
    let options = ListContainersOptionsBuilder::default().all(true).build();
    let containers = docker.list_containers(Some(options)).await.unwrap().len();
    let options = ListVolumesOptionsBuilder::default().build();
    let volumes = docker.list_volumes(Some(options)).await.unwrap().volumes.unwrap_or_default().len();
    (containers, volumes)
}

pub async fn connect(
    daemon: &Daemon,
    state: &std::path::Path,
    egress: Option<Arc<dyn forkyard_sandbox::EgressFactory>>,
) -> DockerProvider {
    connect_warm(daemon, state, egress, 0).await
}

pub async fn connect_warm(
    daemon: &Daemon,
    state: &std::path::Path,
    egress: Option<Arc<dyn forkyard_sandbox::EgressFactory>>,
    warm: usize,
) -> DockerProvider {
    let (host, image) = (Some(daemon.host()), Some(IMAGE.into()));
    let options = DockerOptions { host, image, egress, warm, ..DockerOptions::default() };
    DockerProvider::connect(state, options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_of_the_engine_from_birth_to_nothing() {
    let Some(bench) = Bench::start().await else { return };
    hardened(&bench).await;
    lifecycle(&bench).await;
    snapshots(&bench).await;
    bad_input(&bench).await;
    leftovers(&bench).await;
    volumes(&bench).await;
    assert_eq!(bench.left().await, (0, 0), "nothing is left");
    assert_eq!(std::fs::read_dir(bench.state.path().join("sandboxes")).unwrap().count(), 0);
}

/// Real attempts from inside, not inspections of configuration.
async fn hardened(bench: &Bench) {
    let sandbox = bench.provider.create(&id("hard"), FIRST, &spec()).await.unwrap();
    let (code, text) = sh(&sandbox, "id -u; id -g; id -un; pwd; echo $HOME").await;
    assert_eq!((code, text.as_str()), (0, "1000\n1000\nuser\n/workspace\n/home/user\n"));
    let denied = [
        "touch /x",
        "touch /etc/x",
        "touch /.forkyard/x",
        "touch /.forkyard/run/x",
        "rm -f /.forkyard/run/guest.sock && test ! -e /.forkyard/run/guest.sock",
        "mount -t tmpfs t /tmp",
        "unshare -U true",
        "chroot / true",
        "mknod /tmp/d c 1 3",
        "cat /proc/1/environ",
        "ls /proc/1/root/",
        "cat /proc/1/mem",
        "kill -9 1; test ! -d /proc/1",
        "hostname evil",
        "echo x > /proc/sys/kernel/hostname",
        "ip link add d type dummy",
        "ip link set lo down",
        "wget -q -T 2 -O- http://203.0.113.1/",
        "nslookup example.com 8.8.8.8",
        "test -e /var/run/docker.sock",
        "su -c true",
        "chown 0:0 /workspace",
        "dmesg",
    ];
    for attempt in denied {
        let (code, text) = sh(&sandbox, attempt).await;
        assert_ne!(code, 0, "{attempt}: {text}");
    }
    let (_, interfaces) = sh(&sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1").await;
    assert_eq!(interfaces.trim(), "lo");
    let (_, caps) = sh(&sandbox, "grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status").await;
    for line in ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"] {
        assert!(caps.contains(line), "{caps}");
    }
    assert!(caps.contains("NoNewPrivs:\t1") && caps.contains("Seccomp:\t2"), "{caps}");
    let (code, text) =
        sh(&sandbox, "echo a > /workspace/a && echo b > /home/user/b && echo c > /tmp/c").await;
    assert_eq!(code, 0, "{text}");

    // Limits of the kernel's: a fork bomb and a memory hog hurt themselves.
    let mut small = spec();
    small.limits.memory_bytes = 64 << 20;
    small.limits.processes = 20;
    let sandbox = bench.provider.create(&id("small"), FIRST, &small).await.unwrap();
    let (_, text) =
        sh(&sandbox, "for i in $(seq 100); do sleep 30 & done 2>&1; jobs -p | wc -l; kill $(jobs -p); wait")
            .await;
    assert!(text.contains("fork") || text.trim().parse::<u32>().is_ok_and(|n| n < 60), "{text}");
    let (code, _) = sh(&sandbox, "dd if=/dev/zero of=/dev/null bs=300M count=1").await;
    assert_ne!(code, 0);
    assert!(sandbox.health().await.unwrap().healthy);
    // Disk: looked after by the guest, in the workspace and at home alike.
    let mut full = spec();
    full.limits.disk_bytes = 32 << 20;
    let sandbox = bench.provider.create(&id("full"), FIRST, &full).await.unwrap();
    for dir in ["/workspace", "/home/user"] {
        let (code, _) =
            sh(&sandbox, &format!("dd if=/dev/zero of={dir}/fill bs=1M count=200; sleep 20")).await;
        assert_ne!(code, 0, "{dir}");
        assert_eq!(sh(&sandbox, &format!("rm {dir}/fill")).await.0, 0);
    }
    for name in ["hard", "small", "full"] {
        bench.provider.destroy(&id(name)).await.unwrap();
    }
}

async fn lifecycle(bench: &Bench) {
    let provider = &bench.provider;
    let mut labelled = spec();
    labelled.labels = BTreeMap::from([("run".to_string(), "r1".to_string()), ("fork".into(), "0".into())]);
    labelled.env.insert("GREETING".into(), "hi there".into());
    let one = provider.create(&id("one"), FIRST, &labelled).await.unwrap();
    provider.create(&id("two"), FIRST, &spec()).await.unwrap();
    assert_eq!(sh(&one, "echo $GREETING").await.1, "hi there\n");

    let listed = provider.list(&Labels::from([("run".to_string(), "r1".to_string())])).await.unwrap();
    assert_eq!(listed.iter().map(|i| i.id.as_str()).collect::<Vec<_>>(), ["one"]);
    assert_eq!(listed[0].labels, labelled.labels);
    assert_eq!(provider.list(&Labels::new()).await.unwrap().len(), 2);
    // Another install on the same engine sees nothing of it.
    let other_state = tempfile::tempdir().unwrap();
    let other = connect(&bench.daemon, other_state.path(), None).await;
    assert!(other.list(&Labels::new()).await.unwrap().is_empty());
    assert_eq!(other.attach(&id("one"), FIRST).await.err().unwrap().kind, ErrorKind::NotFound);
    other.destroy(&id("one")).await.unwrap();
    assert_eq!(provider.list(&Labels::new()).await.unwrap().len(), 2);

    // Another process of the same install takes over, in the middle of a call.
    let call = CallId::new("c1").unwrap();
    let request = ExecRequest::shell("echo begun; sleep 1; echo done").call(call.clone());
    let mut running = one.exec(request.clone()).await.unwrap();
    running.events.recv().await.unwrap().unwrap();
    let again = connect(&bench.daemon, bench.state.path(), None).await;
    let taken = again.attach(&id("one"), Attempt(2)).await.unwrap();
    let (result, out, _) = taken.exec(request).await.unwrap().output().await.unwrap();
    assert_eq!((result.exit_code, out.as_slice()), (0, &b"begun\ndone\n"[..]));
    taken.forget(&call).await.unwrap();
    assert_eq!(one.exec(ExecRequest::shell("true")).await.err().unwrap().kind, ErrorKind::Stale);
    assert_eq!(provider.attach(&id("one"), FIRST).await.err().unwrap().kind, ErrorKind::Stale);
    assert_eq!(provider.list(&labelled.labels).await.unwrap()[0].attempt, Attempt(2));
    // Creating what exists is attaching to it.
    let same = provider.create(&id("one"), Attempt(3), &labelled).await.unwrap();
    assert_eq!(sh(&same, "echo kept > /workspace/kept; echo there > /home/user/there").await.0, 0);

    same.pause().await.unwrap();
    assert_eq!(same.info().await.unwrap().status, SandboxStatus::Paused);
    same.resume().await.unwrap();
    assert_eq!(same.info().await.unwrap().status, SandboxStatus::Running);

    provider.stop(&id("one")).await.unwrap();
    assert_eq!(provider.list(&labelled.labels).await.unwrap()[0].status, SandboxStatus::Stopped);
    let error = provider.attach(&id("one"), Attempt(4)).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert_eq!(provider.start(&id("one"), Attempt(2)).await.err().unwrap().kind, ErrorKind::Stale);
    let started = provider.start(&id("one"), Attempt(4)).await.unwrap();
    assert_eq!(sh(&started, "cat /workspace/kept /home/user/there").await.1, "kept\nthere\n");
    let stats = started.stats().await.unwrap();
    assert!(stats.memory_bytes > 0, "{stats:?}");

    // The deadline holds without any owner.
    let short = SandboxSpec { lifetime: Lifetime(Millis(300)), ..spec() };
    provider.create(&id("short"), FIRST, &short).await.unwrap();
    loop {
        let all = provider.list(&Labels::new()).await.unwrap();
        match all.iter().find(|i| i.id == id("short")).unwrap().status {
            SandboxStatus::Dead => break,
            SandboxStatus::Running => tokio::time::sleep(Duration::from_millis(50)).await,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(provider.attach(&id("short"), FIRST).await.err().unwrap().kind, ErrorKind::NotFound);

    for name in ["one", "two", "short", "one", "never"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    assert_eq!(started.exec(ExecRequest::shell("true")).await.err().unwrap().kind, ErrorKind::NotFound);
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty());
}

async fn snapshots(bench: &Bench) {
    let provider = &bench.provider;
    let source = provider.create(&id("source"), FIRST, &spec()).await.unwrap();
    let fill = "cd /workspace && mkdir -p d/e && echo one > d/e/f && ln -s f d/e/l && ln d/e/f hard && \
                chmod 4755 d/e/f && printf x > \"$(printf 'odd\\nname')\" && mkfifo pipe && echo h > /home/user/h && \
                dd if=/dev/zero of=big bs=1M count=8 2>/dev/null && chmod 700 d";
    assert_eq!(sh(&source, fill).await, (0, String::new()));
    let snapshot = SnapshotId::new("snap1").unwrap();
    let labels = Labels::from([("run".to_string(), "r1".to_string())]);
    let info = source.snapshot(&snapshot, &labels).await.unwrap();
    assert_eq!(info.mode, SnapshotMode::Sealed);
    assert!(info.bytes.unwrap() >= 8 << 20);
    assert_eq!(source.snapshot(&snapshot, &Labels::new()).await.unwrap(), info, "the first one stays");

    // A writer in the background is never seen by a child.
    let writer = "i=0; while true; do i=$((i+1)); echo $i > /workspace/counter; done";
    let writing = source.exec(ExecRequest::shell(writer)).await.unwrap();
    while source.stat("/workspace/counter").await.is_err() {
        tokio::task::yield_now().await;
    }
    let busy = SnapshotId::new("snap2").unwrap();
    assert_eq!(source.snapshot(&busy, &labels).await.unwrap().mode, SnapshotMode::Copied);
    let from = |id: &SnapshotId| SandboxSpec { root: Root::Snapshot(id.clone()), ..spec() };
    let options = DockerOptions {
        host: Some(bench.daemon.host()),
        image: Some(IMAGE.into()),
        freeze: Duration::ZERO,
        ..Default::default()
    };
    let hasty = DockerProvider::connect(bench.state.path(), options).await.unwrap();
    let (late, same) =
        (SnapshotId::new("late").unwrap(), hasty.attach_beside(&id("source"), FIRST).await.unwrap());
    let refused = same.snapshot(&late, &labels).await.unwrap_err();
    assert!(refused.kind == ErrorKind::Timeout && refused.hint.is_some(), "{refused}");
    let count = || async { source.read_file("/workspace/counter", 0, 100).await.unwrap_or_default() };
    let before = count().await;
    while count().await == before {
        tokio::task::yield_now().await;
    }
    let child = provider.create(&id("child"), FIRST, &from(&snapshot)).await.unwrap();
    let seen = sh(
        &child,
        "cd /workspace; cat d/e/l hard /home/user/h; ls; stat -c '%a %U' d d/e/f; echo mine > d/e/f",
    )
    .await;
    assert_eq!(seen, (0, "one\none\nh\nbig\nd\nhard\nodd\nname\npipe\n700 user\n755 user\n".to_string()));
    assert_eq!(sh(&source, "cat /workspace/d/e/f").await.1, "one\n", "a child's write stays its own");
    assert!(sh(&source, "test -e /workspace/counter").await.0 == 0, "the source was thawed");
    let second = provider.create(&id("second"), FIRST, &from(&busy)).await.unwrap();
    let (code, count) = sh(&second, "sleep 0.2; cat /workspace/counter").await;
    let again = sh(&second, "cat /workspace/counter").await.1;
    assert_eq!((code, &count), (0, &again), "nobody writes there");
    drop(writing);

    // Out and in again, under another name.
    let archive = bench.state.path().join("out.tar");
    provider.export_snapshot(&snapshot, &archive).await.unwrap();
    let copy = SnapshotId::new("copy").unwrap();
    provider.import_snapshot(&copy, &archive, None).await.unwrap();
    let names: Vec<_> = provider.snapshots().await.unwrap().into_iter().map(|s| s.id.to_string()).collect();
    assert_eq!(names, ["copy", "snap1", "snap2"]);
    let third = provider.create(&id("third"), FIRST, &from(&copy)).await.unwrap();
    assert_eq!(sh(&third, "cat /workspace/hard").await.1, "one\n");
    for broken in [&b"rubbish"[..], &std::fs::read(&archive).unwrap()[..5000]] {
        let path = bench.state.path().join("broken.tar");
        std::fs::write(&path, broken).unwrap();
        let broken = SnapshotId::new("broken").unwrap();
        assert_eq!(
            provider.import_snapshot(&broken, &path, None).await.unwrap_err().kind,
            ErrorKind::Invalid
        );
    }
    // Children keep working without it.
    for snapshot in [&snapshot, &busy, &copy, &copy] {
        provider.remove_snapshot(snapshot).await.unwrap();
    }
    assert!(provider.snapshots().await.unwrap().is_empty());
    assert_eq!(sh(&third, "cat /workspace/hard").await.1, "one\n");
    let gone = provider.create(&id("gone"), FIRST, &from(&copy)).await.err().unwrap();
    assert_eq!(gone.kind, ErrorKind::NotFound);
    for name in ["source", "child", "second", "third"] {
        provider.destroy(&id(name)).await.unwrap();
    }
}

async fn bad_input(bench: &Bench) {
    let provider = &bench.provider;
    let image = |name: &str| SandboxSpec { root: Root::Image(name.into()), ..spec() };
    let mut memory = spec();
    memory.limits.memory_bytes = 1;
    let mut cpus = spec();
    cpus.limits.cpus = f64::NAN;
    let mut volume = spec();
    volume.volumes.push(Volume { host_path: "/no/such/place".into(), path: "/v".into(), writable: false });
    let mut relative = spec();
    relative.volumes.push(Volume { host_path: "x".into(), path: "/v".into(), writable: false });
    let isolated = SandboxSpec { network: NetworkSpec::default(), ..spec() };
    let table = [
        (image("No/Such:Image!"), ErrorKind::Invalid),
        (image("archive:/no/such/file"), ErrorKind::NotFound),
        (image("oci:/tmp"), ErrorKind::Unsupported),
        (SandboxSpec { root: Root::Directory("/usr".into()), ..spec() }, ErrorKind::Unsupported),
        (memory, ErrorKind::Invalid),
        (cpus, ErrorKind::Invalid),
        (volume, ErrorKind::NotFound),
        (relative, ErrorKind::Invalid),
        (isolated, ErrorKind::Unsupported),
        (SandboxSpec { strict: true, ..spec() }, ErrorKind::Unsupported),
        (SandboxSpec { lifetime: Lifetime(Millis(0)), ..spec() }, ErrorKind::Invalid),
    ];
    for (spec, kind) in table {
        let error = provider.create(&id("bad"), FIRST, &spec).await.err().unwrap();
        assert_eq!(error.kind, kind, "{error}");
    }
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty(), "the list stays true");
    let sandbox = provider.create(&id("good"), FIRST, &spec()).await.unwrap();
    let missing = sandbox.exec(ExecRequest::new(["/no/such/program"])).await.err().unwrap();
    assert_eq!(missing.kind, ErrorKind::NotFound);
    provider.destroy(&id("good")).await.unwrap();
}

/// Beside what conformance asks of every provider: whose a folder is decides here, and a path is followed by the engine.
async fn volumes(bench: &Bench) {
    let provider = &bench.provider;
    let mounted = |host: &Path, path: &str, writable| {
        let volume = Volume { host_path: host.display().to_string(), path: path.into(), writable };
        SandboxSpec { volumes: vec![volume], ..spec() }
    };
    let refused = async |host: &Path, path: &str, writable| {
        let error = provider.create(&id("vol"), FIRST, &mounted(host, path, writable)).await.err().unwrap();
        assert!(error.hint.is_some(), "{error}");
        (error.kind, error.to_string())
    };
    let dir = tempfile::tempdir().unwrap();
    let (theirs, data) = (dir.path().join("theirs"), dir.path().join("data"));
    for folder in [&theirs, &data] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("f"), "host").unwrap();
    }
    std::os::unix::fs::chown(&theirs, Some(54_321), Some(54_321)).unwrap();
    let (kind, said) = refused(&theirs, "/mnt/v", true).await;
    assert!(kind == ErrorKind::Unsupported && said.contains("chown 1000:1000"), "{said}");
    // The engine's socket, what is Forkyard's, what a sandbox has of its own, what is a file in the image.
    for private in [bench.daemon.dir(), bench.state.path(), &bench.state.path().join("sandboxes")] {
        assert_eq!(refused(private, "/mnt/v", false).await.0, ErrorKind::Invalid, "{private:?}");
    }
    for taken in ["/workspace/data", "/etc", "/proc/x", "/.forkyard/run"] {
        assert_eq!(refused(&data, taken, false).await.0, ErrorKind::Invalid, "{taken}");
    }
    let (_, said) = refused(&data, "/bin/busybox", false).await;
    assert!(said.contains("--volume") && !said.contains("registry"), "{said}");
    assert_eq!(bench.left().await, (0, 0));

    let sandbox = provider.create(&id("vol"), FIRST, &mounted(&theirs, "/mnt/v", false)).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /mnt/v/f").await.1, "host");
    // A link in the folder's place is not followed by a later start.
    provider.stop(&id("vol")).await.unwrap();
    let moved = dir.path().join("moved");
    std::fs::rename(&theirs, &moved).unwrap();
    std::os::unix::fs::symlink(&data, &theirs).unwrap();
    assert_eq!(provider.start(&id("vol"), Attempt(2)).await.err().unwrap().kind, ErrorKind::Denied);
    std::fs::remove_file(&theirs).unwrap();
    std::fs::rename(&moved, &theirs).unwrap();
    let started = provider.start(&id("vol"), Attempt(2)).await.unwrap();
    assert_eq!(sh(&started, "cat /mnt/v/f").await.1, "host");
    // A folder that was made anew is one that the user put there; one that the engine can't start stays a stopped one.
    provider.stop(&id("vol")).await.unwrap();
    std::fs::rename(&theirs, &moved).unwrap();
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join("f"), "anew").unwrap();
    let shared = bench.state.path().join("shared");
    let away = bench.state.path().join("away");
    std::fs::rename(&shared, &away).unwrap();
    provider.start(&id("vol"), Attempt(3)).await.err().unwrap();
    std::fs::rename(&away, &shared).unwrap();
    assert_eq!(provider.list(&Labels::new()).await.unwrap()[0].status, SandboxStatus::Stopped);
    let started = provider.start(&id("vol"), Attempt(3)).await.unwrap();
    assert_eq!(sh(&started, "cat /mnt/v/f").await.1, "anew");
    // Which folders those are is the host's word.
    let write = "(echo x > /.forkyard/folders; rm -f /.forkyard/folders) 2>/dev/null; grep -c '\"/mnt/v\"' /.forkyard/folders";
    assert_eq!(sh(&started, write).await.1, "1\n");
    provider.destroy(&id("vol")).await.unwrap();
}

/// Of makers that did not live to write down what they made: one that can't be removed keeps no other.
async fn leftovers(bench: &Bench) {
    let names = ["stuck", "u", "v", "w", "x", "y", "z"];
    let sandboxes = bench.state.path().join("sandboxes");
    let left = || names.into_iter().filter(|name| sandboxes.join(name).exists()).collect::<Vec<_>>();
    for name in names {
        std::fs::create_dir(sandboxes.join(name)).unwrap();
    }
    let mount = sandboxes.join("stuck/mount");
    std::fs::create_dir(&mount).unwrap();
    rustix::mount::mount_bind(&mount, &mount).unwrap();
    let swept = bench.provider.sweep().await;
    let still = left();
    rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert!(swept.unwrap_err().message.contains("stuck"));
    assert_eq!(still, ["stuck"]);
    bench.provider.sweep().await.unwrap();
    assert!(left().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_proxy_serves_a_container_that_has_no_network() {
    let Some(daemon) = Daemon::start().await else { return };
    let net = Net::new();
    let site = net.http("site.test").await;
    let state = tempfile::tempdir().unwrap();
    let provider = connect(&daemon, state.path(), Some(Arc::new(net.proxy.clone()))).await;
    let allowed = SandboxSpec { network: net.allow(&[("site.test", &site)]), ..spec() };
    let sandbox = provider.create(&id("net"), FIRST, &allowed).await.unwrap();
    let get = format!("wget -q -O- http://site.test:{}/x", site.port());
    assert_eq!(sh(&sandbox, &get).await, (0, "hello /x".to_string()));
    assert_ne!(sh(&sandbox, "wget -q -O- http://other.test/").await.0, 0);
    let stats = sandbox.stats().await.unwrap();
    assert!(stats.network_rx_bytes > 0 && stats.network_tx_bytes > 0, "{stats:?}");
    let (_, files) =
        sh(&sandbox, "grep -c BEGIN /etc/ssl/certs/ca-certificates.crt; cat /etc/gitconfig").await;
    assert!(files.contains("insteadOf"), "{files}");

    // A new owner re-opens the proxy.
    let again = connect(&daemon, state.path(), Some(Arc::new(net.proxy.clone()))).await;
    let taken = again.attach(&id("net"), Attempt(2)).await.unwrap();
    drop(sandbox);
    assert_eq!(sh(&taken, &get).await, (0, "hello /x".to_string()));
    again.destroy(&id("net")).await.unwrap();

    let none = provider.create(&id("none"), FIRST, &spec()).await.unwrap();
    assert_ne!(sh(&none, &get).await.0, 0);
    provider.destroy(&id("none")).await.unwrap();
}

/// The cases of every provider, one after another on one engine; all failures are told, not the first alone. `between` comes
/// before each.
pub async fn suite(
    daemon: Option<Daemon>,
    cases: Vec<Case>,
    warm: usize,
    between: impl AsyncFn(&DockerProvider),
) {
    let Some(daemon) = daemon else { return };
    let state = tempfile::tempdir().unwrap();
    let stage = Arc::new(Stage::new().unwrap());
    let provider = Arc::new(connect_warm(&daemon, state.path(), Some(stage.egress()), warm).await);
    let stop = CancellationToken::new();
    let keeping = tokio::spawn({
        let (provider, stop) = (provider.clone(), stop.clone());
        async move { provider.keep_ready(stop).await }
    });
    let other = Arc::new(connect(&daemon, state.path(), Some(stage.egress())).await);
    let capabilities = provider.capabilities();
    let ctx = Ctx::new(provider.clone(), other, spec()).on(stage);
    let only = std::env::var("ONLY").unwrap_or_default();
    let mut failures = Vec::new();
    for case in cases.iter().filter(|case| case.name.contains(&only) && (case.applies)(&capabilities)) {
        between(&provider).await;
        let begin = std::time::Instant::now();
        // One that hangs must not hide the others.
        let ended = tokio::time::timeout(Duration::from_secs(120), case.run(&ctx)).await;
        println!("{:6} ms {}", begin.elapsed().as_millis(), case.name);
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(e)) => failures.push(format!("{}: {e}", case.name)),
            Err(_) => failures.push(format!("{}: did not end", case.name)),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty());
    stop.cancel();
    keeping.await.unwrap();
    assert_eq!(left(&daemon).await, (0, 0), "nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_of_conformance() {
    suite(Daemon::start().await, conformance(), 0, async |_| {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_of_conformance_on_busybox_alone() {
    suite(Daemon::start_bare().await, conformance(), 0, async |_| {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_attack_is_stopped() {
    suite(Daemon::start().await, attacks(), 0, async |_| {}).await;
}
