//! Real work in the default sandbox as an ordinary user: clone, build and test of a small project in Rust, Node and Python,
//! each with a dependency from its registry as this host is configured to reach it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::{Attempt, SandboxId};
use forkyard_sandbox::egress::{Resolver, SystemResolver, UpstreamTls};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ExecRequest, NetworkSpec, Provider, SandboxSpec};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

use crate::egress_fixture::{Net, origin};
use crate::egress_tools::git_backend;
use crate::local::as_user_with;

/// Registries that are slow still count as there.
const PATIENCE: Duration = Duration::from_secs(240);
/// Handed to the same test when it runs as an ordinary user.
const FOUND: &str = "REAL_WORK_FOUND";

/// What this host's own tools are told: where their registries are, and the settings that say so.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    allow: Vec<String>,
    env: BTreeMap<String, String>,
    cargo_config: String,
}

/// What a tool says about itself; nothing if it does not.
fn asked(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|o| o.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (!text.is_empty() && text != "undefined").then_some(text)
}

/// `host` or `host:port` of every URL in a text.
fn hosts(text: &str) -> Vec<String> {
    text.split("://")
        .skip(1)
        .filter_map(|rest| rest.split(['/', '"', '\'', ' ', '\n', '#', '?']).next())
        .map(|authority| authority.rsplit('@').next().unwrap_or(authority).to_string())
        .filter(|host| !host.is_empty())
        .collect()
}

impl Found {
    fn look() -> Found {
        let mut found = Found::default();
        let variables = [
            ("npm_config_registry", asked("npm", &["config", "get", "registry"])),
            (
                "PIP_INDEX_URL",
                std::env::var("PIP_INDEX_URL")
                    .ok()
                    .or_else(|| asked("pip3", &["config", "get", "global.index-url"])),
            ),
        ];
        for (name, value) in variables {
            if let Some(value) = value {
                found.env.insert(name.to_string(), value);
            }
        }
        let home = std::env::var_os("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
        found.cargo_config = home
            .and_then(|home| std::fs::read_to_string(home.join("config.toml")).ok())
            .filter(|text| text.contains("[source"))
            .unwrap_or_default();
        let texts = found.env.values().chain([&found.cargo_config]);
        let mut all: Vec<String> =
            texts.flat_map(|text| hosts(text)).map(|host| format!("{host}:ro")).collect();
        all.sort();
        all.dedup();
        found.allow = all;
        found
    }
}

/// A name of the tests, else what the host says.
struct Both(Arc<dyn Resolver>, SystemResolver);

#[async_trait]
impl Resolver for Both {
    async fn resolve(&self, name: &str) -> std::io::Result<Vec<std::net::IpAddr>> {
        match self.0.resolve(name).await {
            Ok(found) => Ok(found),
            Err(_) => self.1.resolve(name).await,
        }
    }
}

const RUST: &[(&str, &str)] = &[
    (
        "Cargo.toml",
        "[package]\nname = \"small\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[dependencies]\nitoa = \"1\"\n",
    ),
    (
        "src/lib.rs",
        "pub fn text(n: u64) -> String {\n    itoa::Buffer::new().format(n).to_string()\n}\n\n#[test]\nfn it_formats() {\n    assert_eq!(text(42), \"42\");\n}\n",
    ),
];
const NODE: &[(&str, &str)] = &[
    (
        "package.json",
        "{ \"name\": \"small\", \"version\": \"1.0.0\", \"scripts\": { \"test\": \"node test.js\" }, \"dependencies\": { \"left-pad\": \"^1.3.0\" } }\n",
    ),
    (
        "test.js",
        "const pad = require('left-pad');\nrequire('assert').strictEqual(pad('7', 3, '0'), '007');\nconsole.log('node passed');\n",
    ),
];
const PYTHON: &[(&str, &str)] = &[
    ("requirements.txt", "six\n"),
    (
        "test_small.py",
        "import unittest\nimport six\n\nclass Small(unittest.TestCase):\n    def test_it(self):\n        self.assertTrue(six.PY3)\n",
    ),
];

/// Bare repositories, one a project.
fn repositories(root: &Path) {
    for (name, files) in [("rust", RUST), ("node", NODE), ("python", PYTHON)] {
        let work = root.join(name);
        for (path, text) in files {
            let path = work.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let script = "git init -q -b main . && git add -A && git -c user.email=a@b.c -c user.name=n commit -qm one && git clone -q --bare . ../$0.git";
        let done = Command::new("sh").args(["-c", script, name]).current_dir(&work).status().unwrap();
        assert!(done.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn projects_are_cloned_built_and_tested() {
    let found: Found = match std::env::var(FOUND) {
        Ok(text) => serde_json::from_str(&text).unwrap(),
        Err(_) => Found::look(),
    };
    let net = Net::with(|config| {
        config.resolver = Arc::new(Both(config.resolver.clone(), SystemResolver::default()));
        config.upstream_tls = UpstreamTls::from_host(&[]).unwrap();
    });
    let root = tempfile::tempdir().unwrap();
    repositories(root.path());
    net.names.set("git.test", &[&["127.0.0.1"]]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let site = origin(None, listener, git_backend(root.path())).await;
    let port = site.port();
    let mut allow = vec![format!("git.test:{port}:ro"), format!("127.0.0.1:{port}:ro")];
    allow.extend(found.allow.clone());

    let state = tempfile::tempdir().unwrap();
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let options = LocalOptions { egress: Some(Arc::new(net.proxy.clone())), home, ..LocalOptions::default() };
    let provider = LocalProvider::new(state.path(), options).unwrap();
    let spec = SandboxSpec {
        network: NetworkSpec { allow, ..NetworkSpec::default() },
        env: found.env.clone(),
        ..SandboxSpec::default()
    };
    let id = SandboxId::new("realwork").unwrap();
    let sandbox = provider.create(&id, Attempt(1), &spec).await.unwrap();
    if !found.cargo_config.is_empty() {
        let config = found.cargo_config.clone();
        sandbox.write_file("/home/user/.cargo/config.toml", config.into(), None).await.unwrap();
    }
    let clone = |name: &str| format!("set -e; git clone -q http://git.test:{port}/{name}.git && cd {name}; ");
    let steps = [
        ("rust", "cargo test 2>&1", "1 passed"),
        ("node", "npm install --silent 2>&1; npm test --silent 2>&1", "node passed"),
        (
            "python",
            "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt 2>&1 && .venv/bin/python -m unittest -v 2>&1",
            "OK",
        ),
    ];
    for (name, script, passed) in steps {
        let request = ExecRequest::shell(clone(name) + script).timeout(PATIENCE);
        let (result, out, err) = sandbox.exec(request).await.unwrap().output().await.unwrap();
        let text = String::from_utf8_lossy(&out).into_owned() + &String::from_utf8_lossy(&err);
        let decisions = net.decisions.lock().unwrap();
        assert!(result.exit_code == 0 && text.contains(passed), "{name}: {result:?}\n{text}\n{decisions:#?}");
    }
    // Read-only all the same: nothing is pushed where it was cloned from.
    let push = "cd rust && git -c user.email=a@b.c -c user.name=n commit -q --allow-empty -m x && git push -q origin main";
    let (result, ..) = sandbox.exec(ExecRequest::shell(push)).await.unwrap().output().await.unwrap();
    assert_ne!(result.exit_code, 0);
    provider.destroy(&id).await.unwrap();
    provider.settle().await;
}

/// The toolchain where rustup would have put it, had this user installed it: by links, since it is large.
fn lend_toolchain(home: &Path) {
    let sysroot = PathBuf::from(asked("rustc", &["--print", "sysroot"]).expect("rustc is here"));
    let toolchains = home.join(".rustup/toolchains");
    let bin = home.join(".cargo/bin");
    for dir in [&toolchains, &bin] {
        std::fs::create_dir_all(dir).unwrap();
    }
    let lent = toolchains.join("lent");
    // Links where they can be had; another file system needs copies.
    for how in ["-al", "-a"] {
        let copied = Command::new("cp").arg(how).arg(&sysroot).arg(&lent).output().unwrap();
        if copied.status.success() {
            break;
        }
        let _ = std::fs::remove_dir_all(&lent);
    }
    for program in ["cargo", "rustc", "rustdoc"] {
        std::os::unix::fs::symlink(lent.join("bin").join(program), bin.join(program)).unwrap();
    }
}

#[test]
fn projects_are_built_by_an_ordinary_user() {
    let found = serde_json::to_string(&Found::look()).unwrap();
    as_user_with("real_work::projects_are_cloned_built_and_tested", &[(FOUND, &found)], lend_toolchain);
}

#[test]
fn urls_are_found_in_settings() {
    let text = "[source.x]\nregistry = \"sparse+https://user@mirror.example:8443/index/\"\n[y]\nz = 'http://other.example'";
    assert_eq!(hosts(text), ["mirror.example:8443", "other.example"]);
}
