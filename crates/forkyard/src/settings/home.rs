//! Where Forkyard keeps everything, and the files that settings are read from.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::error::{Origin, Problem, SettingsError};
use super::file::MAX_FILE_BYTES;
use super::resolve::SourceFile;

/// The user's file, below the home.
pub const USER_FILE: &str = "config.toml";
/// The project's own file, in the root of its repository.
pub const PROJECT_FILE: &str = "forkyard.toml";

/// The process's environment. Names and values that are not UTF-8 are no settings of ours.
pub fn environment() -> BTreeMap<String, String> {
    std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))).collect()
}

/// `$FORKYARD_HOME`; else `~/.forkyard` if it is there; else `$XDG_DATA_HOME/forkyard`; else `~/.local/share/forkyard`.
pub fn home(env: &BTreeMap<String, String>) -> Result<PathBuf, SettingsError> {
    let set = |name: &str| env.get(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let problem = |name: &str, what: String, fix: &str| SettingsError {
        problems: vec![Problem { origin: Origin::Env(name.into()), what, fix: fix.into() }],
    };
    if let Some(path) = set("FORKYARD_HOME") {
        return if path.is_absolute() {
            Ok(path)
        } else {
            Err(problem(
                "FORKYARD_HOME",
                format!("{} is not absolute", path.display()),
                "write a path that starts with /",
            ))
        };
    }
    let user = set("HOME").filter(|p| p.is_absolute());
    if let Some(dot) = user.as_ref().map(|h| h.join(".forkyard")).filter(|d| d.is_dir()) {
        return Ok(dot);
    }
    // The XDG specification says that a relative path is to be ignored.
    if let Some(data) = set("XDG_DATA_HOME").filter(|p| p.is_absolute()) {
        return Ok(data.join("forkyard"));
    }
    user.map(|h| h.join(".local/share/forkyard"))
        .ok_or_else(|| problem("HOME", "it is not set".into(), "set it, or FORKYARD_HOME"))
}

/// The text of a file, or None if there is none. Only a regular file: a project's may be a FIFO or a link to /dev/zero.
pub fn read_file(path: &Path, origin: impl Fn(usize) -> Origin) -> Result<Option<SourceFile>, SettingsError> {
    let problem = |what: String| SettingsError {
        problems: vec![Problem {
            origin: origin(1),
            what,
            fix: "make it a readable text file, or remove it".into(),
        }],
    };
    match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(problem(e.to_string())),
        Ok(m) if !m.is_file() => return Err(problem("it is not a regular file".into())),
        Ok(_) => {}
    }
    let mut text = String::new();
    fs::File::open(path)
        // One byte more than allowed, so that the reader of the text sees that it is too long.
        .and_then(|f| f.take(MAX_FILE_BYTES as u64 + 1).read_to_string(&mut text))
        .map_err(|e| problem(e.to_string()))?;
    Ok(Some(SourceFile { path: path.display().to_string(), text }))
}

/// The project's file of the repository that `dir` lies in: the nearest one on the way up to the folder with `.git`.
pub fn find_project_file(dir: &Path) -> Option<PathBuf> {
    for d in dir.ancestors() {
        let file = d.join(PROJECT_FILE);
        if fs::symlink_metadata(&file).is_ok() {
            return Some(file);
        }
        if d.join(".git").exists() {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn home_is_where_users_expect_it() {
        let dir = tempfile::tempdir().unwrap();
        let user = dir.path().to_str().unwrap();
        assert_eq!(home(&env(&[("FORKYARD_HOME", "/x"), ("HOME", user)])).unwrap(), Path::new("/x"));
        assert_eq!(home(&env(&[("HOME", user)])).unwrap(), dir.path().join(".local/share/forkyard"));
        assert_eq!(home(&env(&[("HOME", user), ("XDG_DATA_HOME", "/d")])).unwrap(), Path::new("/d/forkyard"));
        fs::create_dir(dir.path().join(".forkyard")).unwrap();
        assert_eq!(
            home(&env(&[("HOME", user), ("XDG_DATA_HOME", "/d")])).unwrap(),
            dir.path().join(".forkyard")
        );
        assert!(
            home(&env(&[]))
                .unwrap_err()
                .to_string()
                .contains("$HOME: it is not set; set it, or FORKYARD_HOME")
        );
        assert!(home(&env(&[("FORKYARD_HOME", "x")])).is_err());
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let origin = |line| Origin::Project { path: "p".into(), line };
        assert!(read_file(&dir.path().join("none"), origin).unwrap().is_none());
        assert!(read_file(dir.path(), origin).is_err());
        assert!(read_file(Path::new("/dev/zero"), origin).is_err());
        let not_utf8 = dir.path().join("bin");
        fs::write(&not_utf8, [0xff, 0xfe]).unwrap();
        assert!(read_file(&not_utf8, origin).is_err());
    }

    #[test]
    fn the_project_file_of_another_repository_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("repo/sub");
        fs::create_dir_all(&inner).unwrap();
        fs::write(dir.path().join(PROJECT_FILE), "").unwrap();
        assert!(find_project_file(&inner).is_some());
        fs::create_dir(dir.path().join("repo/.git")).unwrap();
        assert_eq!(find_project_file(&inner), None);
    }
}
