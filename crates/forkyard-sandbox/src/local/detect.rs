//! What of the host a sandbox of the default root sees: system trees and toolchains, read-only. An allow-list; never a home as a
//! whole, never a folder that holds credentials.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A host tree that is shown, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shown {
    pub path: PathBuf,
    pub why: &'static str,
}

/// Trees, variables and search path of the default root.
#[derive(Debug, Clone, Default)]
pub struct HostTrees {
    pub shown: Vec<Shown>,
    pub env: BTreeMap<String, String>,
    pub path: Vec<PathBuf>,
    /// What must not be seen, and the system tree that it lies in: with these trees nothing may be made.
    pub exposed: Option<(PathBuf, PathBuf)>,
}

const SYSTEM: &[&str] = &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
const SYSTEM_PATH: &[&str] = &["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Toolchains in a home: the folder to show, the folder with its programs, the variable that names the first.
const TOOLCHAINS: &[(&str, Option<&str>, Option<&str>, &str)] = &[
    (".rustup", None, Some("RUSTUP_HOME"), "rustup"),
    (".cargo/bin", Some(".cargo/bin"), None, "cargo programs"),
    (".nvm/versions", None, None, "nvm"),
    (".pyenv", Some(".pyenv/shims"), Some("PYENV_ROOT"), "pyenv"),
    (".volta/tools", Some(".volta/bin"), None, "volta"),
    (".bun/bin", Some(".bun/bin"), None, "bun"),
    (".deno/bin", Some(".deno/bin"), None, "deno"),
    (".local/share/uv/python", None, None, "uv pythons"),
    (".sdkman/candidates", None, None, "sdkman"),
];

/// `home`: of the user who runs Forkyard. `state`: where it keeps sandboxes. Neither may be seen as a whole: what holds one of
/// them is not shown.
pub fn host_trees(home: Option<&Path>, state: &Path) -> HostTrees {
    let mut found = HostTrees::default();
    let real_dir = |path: &Path| path.symlink_metadata().is_ok_and(|m| m.is_dir());
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.into());
    let private: Vec<PathBuf> = home.into_iter().chain([state]).map(real).collect();
    let holds = |tree: &Path| private.iter().find(|path| path.starts_with(real(tree)));
    for path in SYSTEM.iter().map(Path::new).filter(|path| real_dir(path)) {
        found.exposed = found.exposed.or_else(|| Some((holds(path)?.clone(), path.into())));
        found.shown.push(Shown { path: path.into(), why: "system" });
    }
    for (path, why) in [("/opt", "optional software"), ("/nix/store", "nix")] {
        let path = Path::new(path);
        let has_entries = path.read_dir().is_ok_and(|mut entries| entries.next().is_some());
        if real_dir(path) && has_entries && holds(path).is_none() {
            found.shown.push(Shown { path: path.into(), why });
        }
    }
    found.path = SYSTEM_PATH.iter().map(PathBuf::from).collect();
    let Some(home) = home.filter(|home| home.is_absolute() && *home != Path::new("/")) else { return found };
    for (folder, programs, variable, why) in TOOLCHAINS {
        let path = home.join(folder);
        if !real_dir(&path) || holds(&path).is_some() {
            continue;
        }
        if let Some(programs) = programs {
            found.path.insert(0, home.join(programs));
        }
        if *why == "nvm" {
            found.path.extend(newest_node(&path));
        }
        if let Some(variable) = variable {
            found.env.insert(variable.to_string(), path.display().to_string());
        }
        found.shown.push(Shown { path, why });
    }
    found
}

/// The programs of the newest node that nvm holds.
fn newest_node(versions: &Path) -> Option<PathBuf> {
    let number = |name: &str| -> Option<Vec<u32>> {
        name.strip_prefix('v')?.split('.').map(|p| p.parse().ok()).collect()
    };
    let entries = versions.join("node").read_dir().ok()?;
    let newest =
        entries.flatten().filter_map(|e| Some((number(e.file_name().to_str()?)?, e.path()))).max()?;
    Some(newest.1.join("bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toolchains_are_shown_and_credentials_are_not() {
        let home = tempfile::tempdir().unwrap();
        for dir in [
            ".rustup/toolchains",
            ".cargo/bin",
            ".ssh",
            ".aws",
            ".config/gh",
            ".nvm/versions/node/v9.1.0/bin",
            ".nvm/versions/node/v20.2.0/bin",
        ] {
            std::fs::create_dir_all(home.path().join(dir)).unwrap();
        }
        std::fs::write(home.path().join(".cargo/credentials.toml"), "secret").unwrap();
        let found = host_trees(Some(home.path()), Path::new("/nowhere"));
        let below: Vec<_> =
            found.shown.iter().filter_map(|s| s.path.strip_prefix(home.path()).ok()).collect();
        assert_eq!(below, [Path::new(".rustup"), Path::new(".cargo/bin"), Path::new(".nvm/versions")]);
        assert_eq!(found.env["RUSTUP_HOME"], home.path().join(".rustup").display().to_string());
        assert!(found.path.contains(&home.path().join(".nvm/versions/node/v20.2.0/bin")), "{:?}", found.path);
        assert!(found.shown.iter().any(|s| s.path == Path::new("/usr")));
        assert_eq!(found.exposed, None);
    }

    #[test]
    fn what_holds_a_home_or_the_state_is_not_shown() {
        let home = tempfile::tempdir().unwrap();
        let state = home.path().join(".rustup/state");
        std::fs::create_dir_all(&state).unwrap();
        std::fs::create_dir_all(home.path().join(".cargo/bin")).unwrap();
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&state, &link).unwrap();
        for state in [&state, &link] {
            let found = host_trees(Some(home.path()), state);
            let below: Vec<_> =
                found.shown.iter().filter_map(|s| s.path.strip_prefix(home.path()).ok()).collect();
            assert_eq!(below, [Path::new(".cargo/bin")]);
        }
        for (home, state) in [("/usr/share", "/nowhere"), ("/nowhere", "/usr/share")] {
            let (private, tree) = host_trees(Some(Path::new(home)), Path::new(state)).exposed.unwrap();
            assert_eq!((private.as_path(), tree.as_path()), (Path::new("/usr/share"), Path::new("/usr")));
        }
        for state in ["/opt", "/opt/forkyard/state"] {
            let found = host_trees(None, Path::new(state));
            assert!(!found.shown.iter().any(|s| s.path == Path::new("/opt")), "{state}");
        }
    }
}
