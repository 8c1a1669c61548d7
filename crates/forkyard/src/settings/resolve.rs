//! Flags before environment before the project's file before the user's file before defaults.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::error::{Origin, Problem, SettingsError, nearest};
use super::file::{self, Entry};
use super::table::{Reads, Setting, Settings, TABLE};
use super::tables::{self, Tables};
use super::value::{Raw, Value};

/// A text file with the name that is shown for it.
#[derive(Debug, Clone)]
pub struct SourceFile {
    pub path: String,
    pub text: String,
}

/// Everything that settings are made of. Whoever holds one of these needs no environment and no disk.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    pub home: PathBuf,
    /// (key, flag as typed, value)
    pub flags: Vec<(&'static str, String, Raw)>,
    pub env: BTreeMap<String, String>,
    pub user_file: Option<SourceFile>,
    pub project_file: Option<SourceFile>,
    /// The user trusts exactly this content of the project's file.
    pub project_trusted: bool,
}

/// A setting's value as `forkyard config` shows it.
#[derive(Debug, Clone)]
pub struct Effective {
    pub setting: &'static Setting,
    /// Secrets are `***`; unset is empty.
    pub shown: String,
    pub json: serde_json::Value,
    pub origin: Origin,
}

#[derive(Debug, Clone)]
pub struct Resolved {
    pub settings: Settings,
    pub effective: Vec<Effective>,
    /// Not wrong enough to stop.
    pub warnings: Vec<Problem>,
}

/// Names that start like ours and mean something to somebody else.
const OTHER_VARIABLES: &[&str] = &["FORKYARD_HOME", "FORKYARD_TEST_", "FORKYARD_UPDATE_DOCS"];

pub fn setting(key: &str) -> Option<&'static Setting> {
    TABLE.iter().find(|s| s.key == key)
}

pub fn resolve(sources: &Sources) -> Result<Resolved, SettingsError> {
    let mut resolver = Resolver {
        values: BTreeMap::new(),
        problems: Vec::new(),
        effective: Vec::new(),
        tables: Tables::default(),
    };
    // From the weakest to the strongest: a later one replaces.
    resolver.read_user_file(sources);
    resolver.read_project_file(sources);
    resolver.read_env(&sources.env);
    for (key, flag, raw) in &sources.flags {
        debug_assert!(setting(key).is_some(), "{key} is not a setting");
        resolver.values.insert(key, (raw.clone(), Origin::Flag(flag.clone())));
    }
    let tables = std::mem::take(&mut resolver.tables);
    let settings = Settings::take(sources.home.clone(), tables, &mut resolver);
    if let Some(s) = &settings {
        resolver.check_together(s);
    }
    match settings {
        Some(settings) if resolver.problems.is_empty() => Ok(Resolved {
            settings,
            effective: resolver.effective,
            warnings: unknown_variables(&sources.env),
        }),
        Some(_) | None => Err(SettingsError { problems: resolver.problems }),
    }
}

pub(super) struct Resolver {
    values: BTreeMap<&'static str, (Raw, Origin)>,
    problems: Vec<Problem>,
    effective: Vec<Effective>,
    tables: Tables,
}

impl Resolver {
    fn read_user_file(&mut self, sources: &Sources) {
        let Some(f) = &sources.user_file else { return };
        let origin = |line| Origin::File { path: f.path.clone(), line };
        for (entry, s) in self.known_entries(&f.text, origin, true) {
            self.values.insert(s.key, (entry.raw, origin(entry.line)));
        }
        self.read_tables(&f.text, &sources.env, origin);
    }

    fn read_tables(&mut self, text: &str, env: &BTreeMap<String, String>, origin: impl Fn(usize) -> Origin) {
        // A file that is no TOML at all has been reported already.
        if toml::from_str::<toml::Table>(text).is_ok()
            && let Err(problem) = self.tables.read(text, env, origin)
        {
            self.problems.push(problem);
        }
    }

    fn read_project_file(&mut self, sources: &Sources) {
        let Some(f) = &sources.project_file else { return };
        let origin = |line| Origin::Project { path: f.path.clone(), line };
        if sources.project_trusted {
            self.read_tables(&f.text, &sources.env, origin);
        }
        for (entry, s) in self.known_entries(&f.text, origin, sources.project_trusted) {
            if s.project || sources.project_trusted {
                self.values.insert(s.key, (entry.raw, origin(entry.line)));
            } else {
                self.problems.push(not_trusted(origin(entry.line), s.key));
            }
        }
    }

    fn known_entries(
        &mut self,
        text: &str,
        origin: impl Fn(usize) -> Origin,
        tables_allowed: bool,
    ) -> Vec<(Entry, &'static Setting)> {
        let whole = |key: &str| setting(key).is_some_and(|s| s.kind == BTreeMap::<String, String>::KIND);
        let entries = match file::read(text, &origin, whole, tables::is_table_key) {
            Ok(entries) => entries,
            Err(problem) => {
                self.problems.push(problem);
                return Vec::new();
            }
        };
        let mut known = Vec::new();
        for entry in entries {
            if tables::is_table_key(&entry.key) {
                if !tables_allowed {
                    self.problems.push(not_trusted(origin(entry.line), &entry.key));
                }
                continue;
            }
            match setting(&entry.key) {
                Some(s) => known.push((entry, s)),
                None => self.problems.push(unknown_key(origin(entry.line), &entry.key)),
            }
        }
        known
    }

    fn read_env(&mut self, env: &BTreeMap<String, String>) {
        for s in TABLE {
            // An empty variable is an unset one, as shells have it.
            let found = s.env.iter().find_map(|v| env.get(v.name).filter(|t| !t.is_empty()).map(|t| (v, t)));
            let Some((v, text)) = found else { continue };
            let origin = Origin::Env(v.name.into());
            let text = match v.reads {
                Reads::AsIs => text.clone(),
                Reads::InUnit(unit) if text.trim().parse::<f64>().is_ok() => format!("{}{unit}", text.trim()),
                Reads::InUnit(_) => text.clone(),
                Reads::Negated => match bool::parse(&Raw::Text(text.clone())) {
                    Ok(b) => (!b).to_string(),
                    Err(fix) => {
                        self.problems.push(Problem { origin, what: format!("{text:?} is neither"), fix });
                        continue;
                    }
                },
            };
            self.values.insert(s.key, (Raw::Text(text), origin));
        }
        // By agreement of many programs, whatever its value.
        if env.get("NO_COLOR").is_some_and(|v| !v.is_empty()) {
            self.values.insert("color", (Raw::Text("never".into()), Origin::Env("NO_COLOR".into())));
        }
    }

    /// The typed value of a key, or None after noting what is wrong with it.
    pub(super) fn take<T: Value>(&mut self, key: &'static str) -> Option<T> {
        let s = setting(key).expect("the table's own key");
        let (raw, origin) = match self.values.remove(key) {
            Some((raw, origin)) => (Some(raw), origin),
            None => (s.default.map(|d| Raw::Text(d.into())), Origin::Default),
        };
        let value = match &raw {
            None => T::unset().ok_or_else(|| "give it a value".to_string()),
            Some(raw) => T::parse(raw).and_then(|v| in_range(s, v)),
        };
        match value {
            Ok(value) => {
                self.effective.push(Effective {
                    setting: s,
                    shown: value.show(),
                    json: value.json(),
                    origin,
                });
                Some(value)
            }
            Err(fix) => {
                let given =
                    raw.map_or(String::new(), |r| if s.is_secret() { "***".into() } else { r.show() });
                let given: String = given.chars().take(120).collect();
                self.problems.push(Problem {
                    origin,
                    what: format!("`{key}` = {given:?} can't be used"),
                    fix,
                });
                None
            }
        }
    }

    /// What no single value shows.
    fn check_together(&mut self, s: &Settings) {
        let mut wrong = |key: &str, what: String, fix: &str| {
            let origin = self
                .effective
                .iter()
                .find(|e| e.setting.key == key)
                .map_or(Origin::Default, |e| e.origin.clone());
            self.problems.push(Problem { origin, what, fix: fix.into() });
        };
        if s.forks > s.max_forks {
            wrong(
                "run.forks",
                format!("{} forks are more than `run.max_forks` = {}", s.forks, s.max_forks),
                "raise run.max_forks or ask for fewer",
            );
        }
        if s.heartbeat_timeout.0 / 3 < s.heartbeat_interval.0 {
            wrong(
                "engine.heartbeat_timeout",
                format!("{} is less than three heartbeats of {}", s.heartbeat_timeout, s.heartbeat_interval),
                "make it at least three times engine.heartbeat_interval",
            );
        }
        if s.temporal_tls_cert.is_some() != s.temporal_tls_key.is_some() {
            wrong(
                "temporal.tls_cert",
                "a client certificate and its key go together".into(),
                "set both temporal.tls_cert and temporal.tls_key, or neither",
            );
        }
        for (key, url) in
            [("anthropic.base_url", &s.anthropic_base_url), ("openai.base_url", &s.openai_base_url)]
        {
            if !(url.starts_with("https://") || url.starts_with("http://")) {
                wrong(key, format!("{url:?} is not a URL"), "write http:// or https:// before the host");
            }
        }
        for volume in &s.volumes {
            let parts: Vec<&str> = volume.split(':').collect();
            let ok = matches!(parts.as_slice(), [host, path] | [host, path, "rw" | "ro"] if host.starts_with('/') && path.starts_with('/'));
            if !ok {
                wrong(
                    "sandbox.volumes",
                    format!("{volume:?} is not a volume"),
                    "write HOST:PATH or HOST:PATH:rw with absolute paths",
                );
            }
        }
        for name in s.sandbox_env.keys() {
            let ok = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                && !name.starts_with(|c: char| c.is_ascii_digit());
            if !ok || name.is_empty() {
                wrong(
                    "sandbox.env",
                    format!("{name:?} is not a variable's name"),
                    "use letters, digits and _",
                );
            }
        }
    }
}

fn in_range<T: Value>(s: &Setting, value: T) -> Result<T, String> {
    let Some((min, max)) = s.range else { return Ok(value) };
    let bound = |t: &str| T::parse(&Raw::Text(t.into())).expect("the table's own bounds can be read");
    if value.within(&bound(min), &bound(max)) {
        Ok(value)
    } else {
        Err(format!("write something from {min} to {max}"))
    }
}

fn not_trusted(origin: Origin, key: &str) -> Problem {
    Problem {
        origin,
        what: format!("a project's file may not set `{key}` unless you trust it"),
        fix: "read the file, then run `forkyard trust`; or leave it out with --no-project-file".into(),
    }
}

fn unknown_key(origin: Origin, key: &str) -> Problem {
    let key: String = key.chars().take(120).collect();
    let fix = match nearest(&key, TABLE.iter().map(|s| s.key).chain(tables::NAMES.iter().copied())) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`forkyard config` lists the known ones".into(),
    };
    Problem { origin, what: format!("unknown key `{key}`"), fix }
}

/// A misspelt variable would be ignored without a word; but a newer Forkyard may know more of them, so it is no error.
fn unknown_variables(env: &BTreeMap<String, String>) -> Vec<Problem> {
    let known = || TABLE.iter().flat_map(|s| s.env).map(|v| v.name);
    env.keys()
        .filter(|n| n.starts_with("FORKYARD_"))
        .filter(|n| !OTHER_VARIABLES.iter().any(|o| n.starts_with(o)) && !known().any(|k| k == n.as_str()))
        .map(|n| Problem {
            origin: Origin::Env(n.clone()),
            what: "no setting reads this variable".into(),
            fix: nearest(n, known()).map_or("unset it".into(), |near| format!("did you mean ${near}?")),
        })
        .collect()
}
