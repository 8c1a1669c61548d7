//! What the machine is made of: the kernel's modules, a few programs of the host with the libraries they need, and the test
//! program. The archive holds two roots: the first only makes the disk ready; the second, below `tree/`, is copied to it and
//! becomes the root, because a sandbox's root can't be changed on the archive itself.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use super::kernel::{self, Kernel};

/// Programs that the suites run, inside sandboxes or around them.
const PROGRAMS: &[&str] = &[
    "sh",
    "bash",
    "awk",
    "[",
    "base64",
    "basename",
    "cat",
    "chmod",
    "chown",
    "cmp",
    "comm",
    "cp",
    "cut",
    "dash",
    "date",
    "dd",
    "df",
    "diff",
    "dirname",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "getent",
    "grep",
    "gzip",
    "head",
    "hostname",
    "id",
    "ldd",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mkfs.ext4",
    "mknod",
    "mktemp",
    "mount",
    "mv",
    "nice",
    "nproc",
    "nsenter",
    "od",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setarch",
    "setpriv",
    "setsid",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "stty",
    "su",
    "sync",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "truncate",
    "tty",
    "umount",
    "uname",
    "uniq",
    "unshare",
    "wc",
    "xargs",
    "yes",
    "zstd",
];
/// For the disk (virtio, ext4 and its checksums, quotas), and what the kernel loads by itself when it is asked for.
const MODULES: &[&str] =
    &["virtio_pci", "virtio_blk", "ext4", "crc32c_generic", "quota_v2", "overlay", "loop"];
/// What `modprobe` reads besides the modules themselves.
const MODULE_LISTS: &[&str] = &["modules.order", "modules.builtin", "modules.builtin.modinfo"];
const EMPTY_DIRS: &[&str] = &["dev", "proc", "sys", "run", "tmp", "root", "mnt", "var/tmp", "opt", "etc"];
const BUSYBOX: &[&str] = &["/bin/busybox", "/usr/bin/busybox"];
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n";
const GROUP: &str = "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n";
/// Whom TLS trusts: a client without anybody to trust does not start.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// For names that are not ASCII.
const LOCALE: &str = "/usr/lib/locale/C.utf8";

/// Writes the archive.
pub fn make(kernel: &Kernel, tests: &[PathBuf], scratch: &Path, to: &Path) -> Result<()> {
    let busybox = BUSYBOX.iter().map(Path::new).find(|path| path.exists());
    let busybox = busybox.context("there is no busybox: cargo xtask setup")?;
    let mut archive = Archive::default();
    archive.file("bin/busybox", busybox)?;
    archive.link("bin/sh", "busybox");
    archive.text("init", 0o755, include_str!("init.sh"));
    for dir in ["dev", "proc", "sys", "new"] {
        archive.dir(dir);
    }
    modules(&mut archive, kernel, busybox, scratch)?;

    let mut tree = Tree { archive: &mut archive, libraries: BTreeSet::new() };
    for link in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        if let Ok(target) = fs::read_link(Path::new("/").join(link)) {
            tree.archive.link(&format!("tree/{link}"), &target.display().to_string());
        }
    }
    for name in PROGRAMS {
        tree.program(&find(name).with_context(|| format!("there is no {name} on this machine"))?)?;
    }
    tree.archive.file("tree/usr/bin/busybox", busybox)?;
    tree.archive.link("tree/usr/sbin/modprobe", "../bin/busybox");
    for test in tests {
        tree.libraries(test)?;
        let name = test.file_name().context("a program has a name")?.to_string_lossy();
        tree.archive.file(&format!("tree/suite/{name}"), test)?;
    }
    for entry in fs::read_dir(LOCALE).into_iter().flatten().flatten().filter(|entry| entry.path().is_file()) {
        let name = entry.file_name().to_string_lossy().into_owned();
        tree.archive.file(&format!("tree{LOCALE}/{name}"), &entry.path())?;
    }
    for dir in EMPTY_DIRS {
        archive.dir(&format!("tree/{dir}"));
    }
    archive.file(&format!("tree{CERTIFICATES}"), Path::new(CERTIFICATES)).context(CERTIFICATES)?;
    archive.text("tree/etc/passwd", 0o644, PASSWD);
    archive.text("tree/etc/group", 0o644, GROUP);
    archive.text("tree/etc/shadow", 0o600, "root:*:1::::::\n");
    archive.text("tree/suite/run", 0o755, include_str!("run.sh"));
    let mut file = BufWriter::new(fs::File::create(to).with_context(|| to.display().to_string())?);
    archive.write(&mut file)?;
    file.flush()?;
    Ok(())
}

/// The modules and those that they need, listed for modprobe in both roots.
fn modules(archive: &mut Archive, kernel: &Kernel, busybox: &Path, scratch: &Path) -> Result<()> {
    let mut wanted: Vec<String> = MODULES.iter().map(|name| name.to_string()).collect();
    let base = scratch.join("modules");
    let _ = fs::remove_dir_all(&base);
    let lib = base.join("lib/modules").join(&kernel.release);
    fs::create_dir_all(&lib)?;
    let mut seen = BTreeSet::new();
    while let Some(name) = wanted.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        // Built in, if there is none.
        let Some(file) = kernel::module(kernel, &name) else { continue };
        wanted.extend(kernel::depends(&fs::read(&file)?));
        fs::copy(&file, lib.join(file.file_name().context("a module has a name")?))?;
    }
    for list in MODULE_LISTS {
        let _ = fs::copy(kernel.modules.join(list), lib.join(list));
    }
    let listed = Command::new(busybox).arg("depmod").arg("-b").arg(&base).arg(&kernel.release).output()?;
    if !listed.status.success() {
        bail!("depmod: {}", String::from_utf8_lossy(&listed.stderr).trim());
    }
    for entry in fs::read_dir(&lib)?.flatten().filter(|entry| entry.path().is_file()) {
        let at = format!("lib/modules/{}/{}", kernel.release, entry.file_name().to_string_lossy());
        archive.file(&at, &entry.path())?;
        archive.file(&format!("tree/usr/{at}"), &entry.path())?;
    }
    Ok(())
}

struct Tree<'a> {
    archive: &'a mut Archive,
    libraries: BTreeSet<PathBuf>,
}

impl Tree<'_> {
    fn program(&mut self, path: &Path) -> Result<()> {
        self.put(path)?;
        self.libraries(path)
    }

    /// At its place on the host, where folders are no links.
    fn put(&mut self, path: &Path) -> Result<()> {
        let (dir, name) = (path.parent().context("a folder")?, path.file_name().context("a name")?);
        let at = dir.canonicalize()?.join(name);
        self.archive.file(&format!("tree{}", at.display()), path).with_context(|| path.display().to_string())
    }

    /// What the dynamic linker would load; a script or a static program needs nothing.
    fn libraries(&mut self, program: &Path) -> Result<()> {
        let listed = Command::new("ldd").arg(program).output().context("ldd")?;
        for line in String::from_utf8_lossy(&listed.stdout).lines() {
            if line.contains("not found") {
                bail!("{}: {}", program.display(), line.trim());
            }
            let path = line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
            if let Some(path) = path.filter(|path| self.libraries.insert(path.clone())) {
                self.put(&path)?;
            }
        }
        Ok(())
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let dirs = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"];
    dirs.iter().map(|dir| Path::new(dir).join(program)).find(|path| path.is_file())
}
