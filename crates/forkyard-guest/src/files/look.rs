//! The files below a folder, one after the other in the order of their paths, less what ignore files name. The tree is hostile:
//! a folder of millions of names, an ignore file without an end or one that nobody ever writes cost bounded memory and no wait.

use std::cmp::Ordering;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forkyard_guest::protocol::Fault;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{Dir, FileType, OFlags};

use super::tree::OPEN_DIR;
use super::{FileError, Result, ops, resolve};

/// Names in the folders on the way down that wait for their turn: some 300,000, and few in a test. Ignored ones do not count.
const MAX_WAITING: usize = if cfg!(test) { 64 << 10 } else { 16 << 20 };
/// What a name takes besides its bytes.
const NAME_COST: usize = 40;
/// Rules that hold in one folder, its own and those of the folders above it. Real projects have hundreds; each is compiled
/// to hundreds of bytes.
const MAX_RULES: usize = 10_000;
const MAX_RULE_BYTES: usize = 1 << 20;
/// Folders that they are from: each has a matcher of its own, with a cache of up to 10 MiB.
const MAX_RULE_FILES: usize = 32;

/// Which ignore files count.
pub struct IgnoreFiles {
    /// In each folder, the weakest first.
    pub names: &'static [&'static str],
    /// Those above the start too.
    pub above: bool,
}

/// What there is, by its path from the start; `false` ends the walk. Of a start that is no folder the path is empty.
pub type Visit<'a> = &'a mut dyn FnMut(&Path, FileType) -> Result<bool>;

/// Folders are not visited themselves, `.git` is left out, and no link below the start is followed.
pub fn each(start: &str, ignore_files: &IgnoreFiles, max_depth: usize, visit: Visit<'_>) -> Result<()> {
    let found = resolve::open(start, OFlags::PATH)?;
    let stat = rustix::fs::fstat(&found).map_err(|e| FileError::errno(start, e))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::Directory {
        return visit(Path::new(""), kind).map(drop);
    }
    let start: PathBuf = Path::new(start).components().collect();
    let mut walk = Walk { ignore_files, levels: Vec::new(), above: Vec::new(), waiting: 0 };
    if ignore_files.above {
        let mut above: Vec<&Path> = start.ancestors().skip(1).collect();
        above.reverse();
        for dir in above {
            let rules = walk.rules(dir)?;
            walk.above.extend(rules);
        }
    }
    let (mut at, mut relative) = (start, PathBuf::new());
    walk.enter(&at, OPEN_DIR - OFlags::NOFOLLOW)?;
    while let Some(level) = walk.levels.last_mut() {
        let Some(entry) = level.entries.pop() else {
            walk.levels.pop();
            at.pop();
            relative.pop();
            continue;
        };
        walk.waiting -= entry.cost();
        relative.push(&entry.name);
        if entry.kind != FileType::Directory {
            if !visit(&relative, entry.kind)? {
                return Ok(());
            }
        } else if walk.levels.len() < max_depth {
            at.push(&entry.name);
            if walk.enter(&at, OPEN_DIR)? {
                continue;
            }
            at.pop();
        }
        relative.pop();
    }
    Ok(())
}

struct Walk<'a> {
    ignore_files: &'a IgnoreFiles,
    levels: Vec<Level>,
    /// Of the folders above the start.
    above: Vec<Rules>,
    /// What the entries of all levels take.
    waiting: usize,
}

struct Level {
    /// The next one is the last.
    entries: Vec<Entry>,
    rules: Option<Rules>,
}

struct Entry {
    name: OsString,
    kind: FileType,
}

impl Entry {
    fn cost(&self) -> usize {
        self.name.len() + NAME_COST
    }

    /// By what their paths begin with: a folder's goes on with a slash.
    fn order(&self, other: &Entry) -> Ordering {
        let (a, b) = (self.name.as_bytes(), other.name.as_bytes());
        let both = a.len().min(b.len());
        a[..both].cmp(&b[..both]).then_with(|| self.byte(both).cmp(&other.byte(both)))
    }

    fn byte(&self, at: usize) -> Option<u8> {
        let end = (self.kind == FileType::Directory).then_some(b'/');
        self.name.as_bytes().get(at).copied().or(end)
    }
}

struct Rules {
    matcher: Gitignore,
    count: usize,
    bytes: usize,
}

impl Walk<'_> {
    /// False: it is gone, or not to be read.
    fn enter(&mut self, dir: &Path, flags: OFlags) -> Result<bool> {
        let Ok(names) = resolve::open_raw(dir, flags).and_then(Dir::new) else { return Ok(false) };
        let rules = self.rules(dir)?;
        self.levels.push(Level { entries: Vec::new(), rules });
        let entries = self.entries(dir, names)?;
        if let Some(level) = self.levels.last_mut() {
            level.entries = entries;
        }
        Ok(true)
    }

    fn entries(&mut self, dir: &Path, names: Dir) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for found in names {
            let Ok(found) = found else { break };
            let name = found.file_name().to_bytes();
            if matches!(name, b"." | b"..") || name.eq_ignore_ascii_case(b".git") {
                continue;
            }
            let path = dir.join(OsStr::from_bytes(name));
            let kind = match found.file_type() {
                FileType::Unknown => match rustix::fs::lstat(&path) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(_) => continue, // gone since it was listed
                },
                known => known,
            };
            if self.is_ignored(&path, kind == FileType::Directory) {
                continue;
            }
            let entry = Entry { name: OsStr::from_bytes(name).to_owned(), kind };
            self.waiting += entry.cost();
            if self.waiting > MAX_WAITING {
                return Err(too_large(
                    dir,
                    "there are too many files here to look at: remove or ignore them",
                ));
            }
            entries.push(entry);
        }
        entries.sort_unstable_by(|a, b| b.order(a));
        Ok(entries)
    }

    fn all_rules(&self) -> impl Iterator<Item = &Rules> {
        self.levels.iter().rev().filter_map(|level| level.rules.as_ref()).chain(self.above.iter().rev())
    }

    /// As the deepest folder says that says anything.
    fn is_ignored(&self, path: &Path, is_dir: bool) -> bool {
        for rules in self.all_rules() {
            match rules.matcher.matched(path, is_dir) {
                Match::None => {}
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
            }
        }
        false
    }

    /// Those of one folder; None if it has none.
    fn rules(&self, dir: &Path) -> Result<Option<Rules>> {
        let (mut builder, mut text) = (GitignoreBuilder::new(dir), Vec::new());
        let (mut files, mut count, mut bytes) = (1, 0, 0);
        for rules in self.all_rules() {
            (files, count, bytes) = (files + 1, count + rules.count, bytes + rules.bytes);
        }
        for name in self.ignore_files.names {
            // What is no regular file, or not to be read, has no rules.
            let Some(Ok(file)) = dir.join(name).to_str().map(ops::open_regular) else { continue };
            let left = MAX_RULE_BYTES.saturating_sub(bytes + text.len()) as u64;
            let read = File::from(file).take(left + 1).read_to_end(&mut text);
            if read.is_ok() {
                text.push(b'\n');
            }
        }
        let text = String::from_utf8_lossy(&text);
        let mut own = 0;
        for line in text.trim_start_matches('\u{feff}').lines().filter(|line| !line.trim().is_empty()) {
            own += 1;
            if count + own > MAX_RULES {
                break;
            }
            let _ = builder.add_line(None, line); // one that can't be understood says nothing
        }
        if own == 0 {
            return Ok(None);
        }
        (count, bytes) = (count + own, bytes + text.len());
        if files > MAX_RULE_FILES || count > MAX_RULES || bytes > MAX_RULE_BYTES {
            let bounds = format!("{MAX_RULES} rules of {MAX_RULE_BYTES} bytes in {MAX_RULE_FILES} folders");
            let why = format!("its ignore files and those above it hold more than {bounds}: shorten them");
            return Err(too_large(dir, &why));
        }
        let failed = |e| too_large(dir, &format!("its ignore files can't be used: {e}"));
        Ok(Some(Rules { matcher: builder.build().map_err(failed)?, count: own, bytes: text.len() }))
    }
}

fn too_large(dir: &Path, why: &str) -> FileError {
    FileError::new(Fault::TooLarge, format!("{}: {why}", dir.display()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, mknodat};

    use super::*;

    const ALL: IgnoreFiles = IgnoreFiles { names: &[".gitignore", ".ignore"], above: false };

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forkyard-look-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    fn look(root: &Path, depth: usize) -> Result<Vec<String>> {
        let mut seen = Vec::new();
        each(root.to_str().unwrap(), &ALL, depth, &mut |path, _| {
            seen.push(path.to_str().unwrap().to_string());
            Ok(true)
        })?;
        Ok(seen)
    }

    #[test]
    fn paths_come_in_order_without_what_is_ignored() {
        let root = scratch("order");
        for dir in ["a/deep", "b", ".git", "out"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        for file in ["a.b", "a0", "a/deep/x", "a/x.log", "a/y.log", "b/x.log", ".git/x", "out/x", "kept.log"]
        {
            std::fs::write(root.join(file), "").unwrap();
        }
        std::fs::write(root.join(".gitignore"), "\u{feff}*.log\n/out/\n").unwrap();
        std::fs::write(root.join(".ignore"), "!kept.log").unwrap();
        std::fs::write(root.join("a/.gitignore"), "!x.log").unwrap();
        let all = [".gitignore", ".ignore", "a.b", "a/.gitignore", "a/deep/x", "a/x.log", "a0", "kept.log"];
        assert_eq!(look(&root, usize::MAX).unwrap(), all);
        let shallow = all.into_iter().filter(|path| !path.contains("deep")).collect::<Vec<_>>();
        assert_eq!(look(&root, 2).unwrap(), shallow);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn ignore_files_are_bounded_and_waited_for_by_nobody() {
        let root = scratch("rules");
        std::fs::write(root.join("file"), "").unwrap();
        let named = root.join(".gitignore");
        mknodat(rustix::fs::CWD, &named, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        assert_eq!(look(&root, 2).unwrap(), [".gitignore", "file"]);
        std::fs::remove_file(&named).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &named).unwrap();
        assert_eq!(look(&root, 2).unwrap(), [".gitignore", "file"]);
        std::fs::remove_file(&named).unwrap();
        for (text, fits) in [
            ("x\n".repeat(MAX_RULES), true),
            ("x\n".repeat(MAX_RULES + 1), false),
            (format!("#{}\n", "x".repeat(MAX_RULE_BYTES)), false),
        ] {
            std::fs::write(&named, text).unwrap();
            let kind = look(&root, 2).map(drop).map_err(|e| e.kind);
            assert_eq!(kind, if fits { Ok(()) } else { Err(Fault::TooLarge) });
        }
        // Those of folders above count too.
        let mut dir = root.clone();
        for depth in 1..=MAX_RULE_FILES + 1 {
            std::fs::write(dir.join(".gitignore"), "x").unwrap();
            assert_eq!(look(&root, usize::MAX).is_ok(), depth <= MAX_RULE_FILES, "{depth}");
            dir.push("d");
            std::fs::create_dir(&dir).unwrap();
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn names_that_wait_are_bounded() {
        let root = scratch("names");
        let name = |i: usize| root.join(format!("{i:0>250}"));
        let fit = MAX_WAITING / (250 + NAME_COST);
        (0..=fit).for_each(|i| std::fs::write(name(i), "").unwrap());
        assert_eq!(look(&root, 1).unwrap_err().kind, Fault::TooLarge);
        std::fs::remove_file(name(0)).unwrap();
        assert_eq!(look(&root, 1).unwrap().len(), fit);
        std::fs::write(name(0), "").unwrap();
        std::fs::write(root.join(".ignore"), "*0").unwrap();
        assert!(look(&root, 1).is_ok(), "what is ignored waits for nothing");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
