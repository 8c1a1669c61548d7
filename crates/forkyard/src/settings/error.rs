//! What is wrong with somebody's settings. All of it is reported at once, each with where it stands and what to write.

use std::fmt;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// As it was typed: `--timeout`.
    Flag(String),
    /// The variable's name.
    Env(String),
    /// The project's own file.
    Project {
        path: String,
        line: usize,
    },
    /// The user's file.
    File {
        path: String,
        line: usize,
    },
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag(flag) => f.write_str(flag),
            Origin::Env(name) => write!(f, "${name}"),
            Origin::Project { path, line } | Origin::File { path, line } => write!(f, "{path}:{line}"),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub origin: Origin,
    pub what: String,
    /// What to do about it.
    pub fix: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.origin, self.what, self.fix)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct SettingsError {
    pub problems: Vec<Problem>,
}

/// The nearest known word, if one is near enough to be meant.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // A key's last part moved to another table is likelier than any typo.
    let last = word.rsplit('.').next().unwrap_or(word);
    let score = |k: &str| {
        let moved = k.rsplit('.').next() == Some(last) && last.len() > 2;
        if moved { 0.9 } else { strsim::jaro_winkler(word, k) }
    };
    known.map(|k| (score(k), k)).filter(|(s, _)| *s > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, k)| k)
}
