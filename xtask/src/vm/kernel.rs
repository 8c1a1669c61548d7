//! Debian's own kernel, taken out of its package: nothing is installed into the machine that runs the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::setup;

/// Always depends on the newest kernel of the distribution.
const META_PACKAGE: &str = "linux-image-amd64";

pub struct Kernel {
    /// As `uname -r` says it.
    pub release: String,
    pub image: PathBuf,
    /// `/lib/modules/RELEASE` of the package.
    pub modules: PathBuf,
}

/// The kernel below `dir`; downloaded if there is none yet.
pub fn find(dir: &Path) -> Result<Kernel> {
    if let Some(kernel) = unpacked(dir) {
        return Ok(kernel);
    }
    fs::create_dir_all(dir)?;
    // The first try spares the update where the lists are fresh.
    if download(dir).is_err() {
        setup::apt(&["update"], &[])?;
        download(dir)?;
    }
    unpacked(dir).with_context(|| format!("no kernel in {}", dir.display()))
}

fn download(dir: &Path) -> Result<()> {
    let depends = Command::new("apt-cache").args(["depends", META_PACKAGE]).output().context("apt-cache")?;
    let depends = String::from_utf8_lossy(&depends.stdout).into_owned();
    let package = depends
        .lines()
        .find_map(|line| {
            line.trim().strip_prefix("Depends: ").filter(|name| name.starts_with("linux-image-"))
        })
        .with_context(|| format!("apt knows no {META_PACKAGE}"))?;
    println!("· apt-get download {package}");
    // As root, apt warns that its own user can't write here, and downloads all the same.
    let downloaded = Command::new("apt-get").args(["-q", "download", package]).current_dir(dir).output()?;
    if !downloaded.status.success() {
        bail!("apt-get download {package}: {}", String::from_utf8_lossy(&downloaded.stderr).trim());
    }
    let deb = files(dir).into_iter().find(|path| path.extension().is_some_and(|e| e == "deb"));
    let deb = deb.with_context(|| format!("{package} was not downloaded"))?;
    let part = dir.join("unpacking");
    let _ = fs::remove_dir_all(&part);
    if !Command::new("dpkg").arg("-x").arg(&deb).arg(&part).status().context("dpkg")?.success() {
        bail!("dpkg can't unpack {}", deb.display());
    }
    fs::rename(&part, dir.join("package"))?;
    fs::remove_file(&deb)?;
    Ok(())
}

fn unpacked(dir: &Path) -> Option<Kernel> {
    let package = dir.join("package");
    let image = files(&package.join("boot")).into_iter().find(|p| name(p).starts_with("vmlinuz-"))?;
    let release = name(&image).strip_prefix("vmlinuz-")?.to_string();
    // Newer packages keep them below /usr, which is where /lib leads to.
    let below = ["lib/modules", "usr/lib/modules"].map(|at| package.join(at).join(&release));
    let modules = below.into_iter().find(|dir| dir.is_dir())?;
    Some(Kernel { release, image, modules })
}

/// The file of a module, whatever folder of the package it is in.
pub fn module(kernel: &Kernel, name: &str) -> Option<PathBuf> {
    let mut dirs = vec![kernel.modules.clone()];
    while let Some(dir) = dirs.pop() {
        for path in files(&dir) {
            if path.is_dir() {
                dirs.push(path);
            } else if self::name(&path).split(".ko").next().map(|n| n.replace('-', "_")).as_deref()
                == Some(name)
                && self::name(&path).contains(".ko")
            {
                return Some(path);
            }
        }
    }
    None
}

/// The modules that a module says it needs, from its own description.
pub fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|part| part == KEY) else { return Vec::new() };
    let value = &module[at + KEY.len()..];
    let end = value.iter().position(|b| *b == 0).unwrap_or(0);
    let list = String::from_utf8_lossy(&value[..end]);
    list.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_says_what_it_needs() {
        let module = b"\x7fELF..license=GPL\0depends=mbcache,jbd2,crc-16\0name=ext4\0";
        assert_eq!(depends(module), ["mbcache", "jbd2", "crc_16"]);
        assert!(depends(b"..\0depends=\0name=crc16\0").is_empty());
        assert!(depends(b"nothing").is_empty());
    }
}
