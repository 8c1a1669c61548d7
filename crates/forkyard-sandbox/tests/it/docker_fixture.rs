//! A real engine of its own, in a folder of its own, ended by its process id.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bollard::query_parameters::CreateImageOptionsBuilder;
use bollard::{Docker, body_full};
use forkyard_core::SandboxId;
use forkyard_sandbox::{ExecRequest, NetworkMode, NetworkSpec, Sandbox, SandboxSpec};
use futures::StreamExt;
use tar::{Builder, EntryType, Header};

/// The only image there is: one static program under many names, and a few others.
pub const IMAGE: &str = "forkyard-test:1";

pub fn id(text: &str) -> SandboxId {
    SandboxId::new(text).unwrap()
}

pub fn spec() -> SandboxSpec {
    SandboxSpec {
        network: NetworkSpec { mode: NetworkMode::None, ..Default::default() },
        ..Default::default()
    }
}

pub async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> String {
    let (_, out, _) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
    String::from_utf8_lossy(&out).into_owned()
}

pub struct Daemon {
    dir: tempfile::TempDir,
    child: Child,
}

impl Daemon {
    /// None, with a word on why, where this machine has no engine or this user may not start one.
    pub async fn start() -> Option<Daemon> {
        Daemon::start_for(&[]).await
    }

    /// With an image that has what these programs of the host need to run in it.
    pub async fn start_for(programs: &[&Path]) -> Option<Daemon> {
        Daemon::start_with(|busybox| image(busybox, programs)).await
    }

    /// With an image that has nothing but busybox.
    pub async fn start_bare() -> Option<Daemon> {
        Daemon::start_with(bare_image).await
    }

    async fn start_with(image: impl FnOnce(&Path) -> Vec<u8>) -> Option<Daemon> {
        if !rustix::process::geteuid().is_root() {
            skipped("dockerd needs root");
            return None;
        }
        let (dockerd, busybox) = (needed("dockerd")?, needed("busybox")?);
        let dir = tempfile::Builder::new().prefix("fy").tempdir_in("/tmp").unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new(dockerd);
        command
            .args(["--data-root", &at("data"), "--exec-root", &at("exec"), "--pidfile", &at("pid")])
            .args(["-H", &format!("unix://{}", at("docker.sock"))])
            // Sandboxes have no network, so the engine needs none; several such engines may run at once.
            .args(["--bridge", "none", "--iptables=false", "--ip6tables=false"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // SAFETY: prctl is async-signal-safe and concerns the child alone: it ends with us, whatever ends us.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let mut daemon = Daemon { child: command.spawn().unwrap(), dir };
        let docker = loop {
            if let Some(status) = daemon.child.try_wait().unwrap() {
                let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap_or_default();
                panic!("dockerd ended: {status}\n{log}");
            }
            if let Ok(docker) = daemon.docker()
                && docker.ping().await.is_ok()
            {
                break docker.negotiate_version().await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        import(&docker, IMAGE, image(&busybox)).await;
        Some(daemon)
    }

    pub fn host(&self) -> String {
        format!("unix://{}", self.dir.path().join("docker.sock").display())
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A client of the engine itself, for looking from outside.
    pub fn docker(&self) -> Result<Docker, bollard::errors::Error> {
        let path = self.dir.path().join("docker.sock");
        let version = bollard::ClientVersion { major_version: 1, minor_version: 41 };
        Docker::connect_with_unix(&path.display().to_string(), 60, &version)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SAFETY: the child was started here and is not waited for yet, so its number is its own.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let _ = self.child.wait();
    }
}

/// A real part of a test is missing. Where all of them have to be there, that is a failure.
pub fn skipped(why: &str) {
    assert!(std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(), "{why}");
    eprintln!("skipped: {why}");
}

/// A program without which a test can't be.
pub fn needed(program: &str) -> Option<PathBuf> {
    let found = find(program);
    if found.is_none() {
        skipped(&format!("no {program}"));
    }
    found
}

pub fn find(program: &str) -> Option<PathBuf> {
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(program))
        .find(|path| path.exists())
}

const FULL: [&str; 9] = ["dash", "ls", "stat", "truncate", "touch", "od", "cp", "head", "id"];

/// What the loader would load, the loader included.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let listed = Command::new("ldd").arg(program).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

pub fn image(busybox: &Path, programs: &[&Path]) -> Vec<u8> {
    image_with(busybox, &FULL, programs)
}

/// With nothing but busybox.
pub fn bare_image(busybox: &Path) -> Vec<u8> {
    image_with(busybox, &[], &[])
}

fn image_with(busybox: &Path, full: &[&str], programs: &[&Path]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    let header = |kind, size, mode| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(mode);
        header
    };
    for dir in ["bin", "etc", "proc", "sys", "dev", "tmp"] {
        tar.append_data(&mut header(EntryType::Directory, 0, 0o755), dir, std::io::empty()).unwrap();
    }
    let program = std::fs::read(busybox).unwrap();
    tar.append_data(
        &mut header(EntryType::Regular, program.len() as u64, 0o755),
        "bin/busybox",
        &program[..],
    )
    .unwrap();
    // Where busybox knows less than the suite asks for, the host's own, with their libraries.
    let mut real: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (name, program) in full.iter().filter_map(|name| Some((name, find(name)?))) {
        for library in libraries(&program) {
            real.insert(library.display().to_string().trim_start_matches('/').to_string(), library);
        }
        real.insert(format!("bin/{name}"), program);
    }
    for library in programs.iter().flat_map(|program| libraries(program)) {
        real.insert(library.display().to_string().trim_start_matches('/').to_string(), library);
    }
    if let Some(dash) = real.get("bin/dash").cloned() {
        real.insert("bin/sh".into(), dash);
    }
    for (path, source) in &real {
        let data = std::fs::read(source).unwrap();
        tar.append_data(&mut header(EntryType::Regular, data.len() as u64, 0o755), path, &data[..]).unwrap();
    }
    let names = Command::new(busybox).arg("--list").output().unwrap().stdout;
    let missing = |name: &&str| *name != "busybox" && !real.contains_key(&format!("bin/{name}"));
    for name in String::from_utf8(names).unwrap().lines().filter(missing) {
        let mut link = header(EntryType::Symlink, 0, 0o777);
        tar.append_link(&mut link, format!("bin/{name}"), "busybox").unwrap();
    }
    let passwd = b"root:x:0:0::/:/bin/sh\n";
    tar.append_data(&mut header(EntryType::Regular, passwd.len() as u64, 0o644), "etc/passwd", &passwd[..])
        .unwrap();
    tar.into_inner().unwrap()
}

pub async fn import(docker: &Docker, name: &str, tar: Vec<u8>) {
    let (repo, tag) = name.split_once(':').unwrap();
    let options = CreateImageOptionsBuilder::default().from_src("-").repo(repo).tag(tag).build();
    let mut answers = Box::pin(docker.create_image(Some(options), Some(body_full(tar.into())), None));
    while let Some(answer) = answers.next().await {
        answer.unwrap();
    }
}
