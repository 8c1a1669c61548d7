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
        let child = Command::new("dockerd")
            .args(["--data-root", &at("data"), "--exec-root", &at("exec"), "--pidfile", &at("pid")])
            .args(["-H", &host(&dir), "--bridge", "none", "--iptables=false", "--ip6tables=false"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("dockerd")?;
        let mut engine = Engine { child, dir };
        let begun = Instant::now();
        while !engine.answers() {
            if let Some(status) = engine.child.try_wait()? {
                bail!("dockerd ended: {status}");
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
