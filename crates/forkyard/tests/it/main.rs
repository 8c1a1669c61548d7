//! Tests of the program from outside: the real binary, in a home of its own.

mod completions;
mod config;
mod docs;
mod doctor;
mod trust;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with a repository and a home, and the program that runs in it.
struct World {
    dir: tempfile::TempDir,
}

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("repo/.git")).unwrap();
        World { dir }
    }
    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }
    fn repo(&self) -> PathBuf {
        self.dir.path().join("repo")
    }
    fn write(&self, path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    fn user_file(&self, text: &str) {
        self.write(&self.home().join("config.toml"), text);
    }
    fn project_file(&self, text: &str) {
        self.write(&self.repo().join("forkyard.toml"), text);
    }
    fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, &[])
    }
    fn run_with(&self, args: &[&str], env: &[(&str, &str)]) -> Ran {
        let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_forkyard"))
            .args(args)
            .current_dir(self.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("FORKYARD_HOME", self.home())
            .envs(env.iter().copied())
            .output()
            .unwrap();
        let text =
            |b: Vec<u8>| String::from_utf8(b).unwrap().replace(self.dir.path().to_str().unwrap(), "DIR");
        Ran { code: status.code().unwrap(), stdout: text(stdout), stderr: text(stderr) }
    }
    fn json(&self, args: &[&str]) -> serde_json::Value {
        let ran = self.run(args);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", ran.stdout, ran.stderr))
    }
}
