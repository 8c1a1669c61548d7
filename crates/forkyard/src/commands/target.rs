//! What a command is about: a run, or one fork of it.

use std::fmt;
use std::str::FromStr;

use forkyard_core::{ForkNum, ForkRef, InvalidId, RunId};

/// `RUN` or `RUN/N`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub run: RunId,
    /// None: the run as a whole.
    pub fork: Option<ForkNum>,
}

impl FromStr for Target {
    type Err = InvalidId;
    fn from_str(text: &str) -> Result<Target, InvalidId> {
        if text.contains('/') {
            let ForkRef { run, fork } = text.parse()?;
            return Ok(Target { run, fork: Some(fork) });
        }
        Ok(Target { run: RunId::new(text)?, fork: None })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fork {
            Some(fork) => write!(f, "{}/{fork}", self.run),
            None => self.run.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_forks_are_told_apart() {
        let t: Target = "abc".parse().unwrap();
        assert_eq!((t.fork, t.to_string().as_str()), (None, "abc"));
        let t: Target = "abc/3".parse().unwrap();
        assert_eq!((t.fork, t.to_string().as_str()), (Some(3), "abc/3"));
        for bad in ["", "A", "abc/", "abc/x", "../x", "abc/1/2"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }
}
