//! A Docker engine for the time of a benchmark, in a folder of its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const UP_WITHIN: Duration = Duration::from_secs(60);

pub struct Engine {
    child: Child,
    dir: PathBuf,
}

impl Engine {
    /// None where this user may not start one: what needs it says that it is missing.
    pub fn start() -> Result<Option<Engine>> {
        let id = Command::new("id").arg("-u").output()?;
        if id.stdout.trim_ascii() != b"0" {
            return Ok(None);
        }
        let dir = std::env::temp_dir().join(format!("forkyard-engine-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let at = |name: &str| dir.join(name).display().to_string();
        let log = std::fs::File::create(dir.join("log"))?;
        // With its network as users have it, but not in that of this machine, where another engine's may be.
        let child = Command::new("unshare")
            .args(["--net", "dockerd", "-H", &host(&dir)])
            .args(["--data-root", &at("data"), "--exec-root", &at("exec"), "--pidfile", &at("pid")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("dockerd")?;
        let mut engine = Engine { child, dir };
        let begun = Instant::now();
        while !engine.answers() {
            if let Some(status) = engine.child.try_wait()? {
                let said = std::fs::read_to_string(engine.dir.join("log")).unwrap_or_default();
                bail!("dockerd ended: {status}: {}", said.lines().last().unwrap_or_default());
            }
            if begun.elapsed() > UP_WITHIN {
                bail!("dockerd does not answer within {} s", UP_WITHIN.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(Some(engine))
    }

    /// For DOCKER_HOST.
    pub fn host(&self) -> String {
        host(&self.dir)
    }

    fn answers(&self) -> bool {
        let asked = Command::new("docker").args(["-H", &self.host(), "version"]).output();
        asked.is_ok_and(|output| output.status.success())
    }
}

fn host(dir: &Path) -> String {
    format!("unix://{}", dir.join("docker.sock").display())
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
