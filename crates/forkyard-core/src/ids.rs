//! Identifiers. All are lowercase `[a-z0-9]`, so that they can stand in a path, a label, a host name or a URL unquoted.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest identifier that any of Forkyard's ids may have; short enough for a host name label.
pub const MAX_ID_LEN: usize = 63;
/// A run's id stands in those of its sandboxes and snapshots, with fork, attempt and role behind it.
pub const MAX_RUN_ID_LEN: usize = 40;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not a valid {what}: use 1 to {max} characters of a-z and 0-9")]
pub struct InvalidId {
    pub what: &'static str,
    pub value: String,
    pub max: usize,
}

fn check(what: &'static str, value: &str, max: usize) -> Result<(), InvalidId> {
    let ok = (1..=max).contains(&value.len())
        && value.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if ok { Ok(()) } else { Err(InvalidId { what, value: value.chars().take(max + 1).collect(), max }) }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            pub fn new(value: impl Into<String>) -> Result<Self, InvalidId> {
                let value = value.into();
                check($what, &value, $max)?;
                Ok(Self(value))
            }
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                Self::new(value)
            }
        }
        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(value: &str) -> Result<Self, InvalidId> {
                Self::new(value)
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// One submitted job.
    RunId,
    "run id",
    MAX_RUN_ID_LEN
);
id!(
    /// A machine with a stable identity; local sandboxes, snapshots and bases belong to one.
    HostId,
    "host id",
    MAX_ID_LEN
);
id!(
    /// One isolated environment. Of a run's sandboxes it derives from (run, fork, attempt, role): see [`SandboxId::derive`].
    SandboxId,
    "sandbox id",
    MAX_ID_LEN
);
id!(
    /// A frozen file system.
    SnapshotId,
    "snapshot id",
    MAX_ID_LEN
);
id!(
    /// One tool call. The guest hands a call's result over by it after a crash. Unique within a sandbox.
    CallId,
    "call id",
    MAX_ID_LEN
);

impl CallId {
    /// A call id from any text (a model's `toolu_01AbC…`): kept apart by a hash where characters had to be dropped.
    pub fn from_text(text: &str) -> CallId {
        let mut id: String = text
            .chars()
            .filter(|c| c.is_ascii_alphanumeric())
            .map(|c| c.to_ascii_lowercase())
            .take(40)
            .collect();
        if id != text {
            // FNV-1a: stable for ever, and only has to keep ids of one sandbox apart.
            let hash = text
                .bytes()
                .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
            id.push_str(&format!("{hash:016x}"));
        }
        CallId(id)
    }
}

/// One branch of a run, numbered from 0.
pub type ForkNum = u32;

/// One tenure over a fork. Starts at 1; a larger number fences off every smaller one everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Attempt(pub u32);

impl Attempt {
    pub fn next(self) -> Attempt {
        Attempt(self.0 + 1)
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a sandbox of a run is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Where the repository is checked out and set up, once.
    Base,
    /// Where an agent works.
    Work,
    /// Where a result is verified.
    Verify,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Base => "base",
            Role::Work => "work",
            Role::Verify => "verify",
        }
    }
}

impl SandboxId {
    /// The id of a run's sandbox: creating it twice is creating it once, and cleanup needs no memory.
    /// `fork` is None for the sandboxes of the run itself.
    pub fn derive(run: &RunId, fork: Option<ForkNum>, attempt: Attempt, role: Role) -> SandboxId {
        let fork = fork.map_or_else(|| "r".to_string(), |n| format!("f{n}"));
        SandboxId(format!("{run}{fork}a{attempt}{}", &role.as_str()[..1]))
    }
}

/// A fork as people write it: `RUN/N`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ForkRef {
    pub run: RunId,
    pub fork: ForkNum,
}

impl fmt::Display for ForkRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.run, self.fork)
    }
}

impl std::str::FromStr for ForkRef {
    type Err = InvalidId;
    fn from_str(s: &str) -> Result<Self, InvalidId> {
        let bad = || InvalidId {
            what: "fork (write RUN/N)",
            value: s.chars().take(80).collect(),
            max: MAX_RUN_ID_LEN,
        };
        let (run, fork) = s.split_once('/').ok_or_else(bad)?;
        Ok(ForkRef { run: RunId::new(run)?, fork: fork.parse().map_err(|_| bad())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_refuse_everything_but_lowercase_and_digits() {
        for bad in ["", "A", "a-b", "../x", "a b", "ä", &"x".repeat(64)] {
            assert!(RunId::new(bad).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<RunId>("\"UP\"").is_err());
        assert_eq!(RunId::new("r1").unwrap().to_string(), "r1");
    }

    #[test]
    fn sandbox_ids_differ_by_every_part() {
        let (a, b) = (RunId::new("ra").unwrap(), RunId::new("rb").unwrap());
        let mut all = std::collections::BTreeSet::new();
        for run in [&a, &b] {
            for fork in [None, Some(0), Some(1), Some(11)] {
                for attempt in [1, 2, 11] {
                    for role in [Role::Base, Role::Work, Role::Verify] {
                        let id = SandboxId::derive(run, fork, Attempt(attempt), role);
                        SandboxId::new(id.as_str()).unwrap();
                        assert!(all.insert(id));
                    }
                }
            }
        }
    }

    #[test]
    fn call_ids_keep_similar_texts_apart() {
        let a = CallId::from_text("toolu_01AbC");
        assert_ne!(a, CallId::from_text("toolu_01aBC"));
        assert_eq!(a, CallId::from_text("toolu_01AbC"));
        assert_eq!(CallId::from_text("abc1").as_str(), "abc1");
        CallId::new(a.as_str()).unwrap();
    }

    #[test]
    fn fork_refs_round_trip() {
        let f: ForkRef = "abc/3".parse().unwrap();
        assert_eq!(f.to_string(), "abc/3");
        for bad in ["abc", "abc/", "abc/-1", "/1", "a/b/1"] {
            assert!(bad.parse::<ForkRef>().is_err(), "{bad}");
        }
    }
}
