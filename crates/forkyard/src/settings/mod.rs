//! Settings, resolved once: flags > environment > project's file > user's file > defaults. The only module that reads the
//! environment; everything else gets values.

mod error;
mod file;
mod home;
mod reference;
mod resolve;
mod table;
mod tables;
mod trust;
mod value;

use std::path::{Path, PathBuf};

pub use error::{Origin, SettingsError, nearest};
pub use home::{PROJECT_FILE, USER_FILE, environment, find_project_file, home, read_file};
pub use reference::markdown;
pub use resolve::{Effective, Resolved, Sources, resolve, setting};
pub use table::{ColorMode, LogFormat, Settings, TABLE};
pub use trust::Trust;
pub use value::{ByteSize, Raw, Value};

/// Values that were given as flags.
#[derive(Debug, Clone, Default)]
pub struct Flags {
    values: Vec<(&'static str, String, Raw)>,
}

impl Flags {
    /// As [`Sources`] takes them.
    pub fn into_values(self) -> Vec<(&'static str, String, Raw)> {
        self.values
    }
    /// `flag` is what the user typed, for errors.
    pub fn set(&mut self, key: &'static str, flag: &str, value: impl Into<String>) {
        self.values.push((key, flag.to_string(), Raw::Text(value.into())));
    }
    pub fn set_list(&mut self, key: &'static str, flag: &str, values: &[String]) {
        if !values.is_empty() {
            self.values.push((key, flag.to_string(), Raw::List(values.to_vec())));
        }
    }
    pub fn set_option<T: ToString>(&mut self, key: &'static str, flag: &str, value: Option<&T>) {
        if let Some(v) = value {
            self.set(key, flag, v.to_string());
        }
    }
}

/// Which project's file counts.
#[derive(Debug, Clone)]
pub enum Project<'a> {
    /// None at all.
    None,
    /// That of the repository around this folder.
    Around(&'a Path),
}

/// Settings of this process.
pub fn load(flags: Flags, project: Project<'_>) -> Result<Resolved, SettingsError> {
    load_from(None, flags, project)
}

/// The same, with a home that the caller names.
pub fn load_from(
    home: Option<PathBuf>,
    flags: Flags,
    project: Project<'_>,
) -> Result<Resolved, SettingsError> {
    let env = environment();
    let home = match home {
        Some(home) => home,
        None => self::home(&env)?,
    };
    let user_path = home.join(USER_FILE);
    let shown = user_path.display().to_string();
    let user_file = read_file(&user_path, |line| Origin::File { path: shown.clone(), line })?;
    let project_file = match project {
        Project::None => None,
        Project::Around(dir) => match find_project_file(dir) {
            Some(path) => {
                let shown = path.display().to_string();
                read_file(&path, |line| Origin::Project { path: shown.clone(), line })?
            }
            None => None,
        },
    };
    // A list of trust that can't be read trusts nothing.
    let project_trusted =
        project_file.as_ref().is_some_and(|f| Trust::new(&home).is_trusted(&f.text).unwrap_or(false));
    resolve(&Sources { home, flags: flags.into_values(), env, user_file, project_file, project_trusted })
}

#[cfg(test)]
mod tests;
