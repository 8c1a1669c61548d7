//! Before anybody can speak with a container's guest: what it finds beside its environment, and what its end says.

use serde::{Deserialize, Serialize};

/// A folder of the host that a container gets: where it is mounted, and which one the host has checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedFolder {
    pub path: String,
    pub device: u64,
    pub inode: u64,
}

/// Why a guest did not begin, by what can be done about it. It is told by the exit code of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoStart {
    /// Its last words say what failed; also whatever else ended it.
    Other,
    /// The engine mounted another folder than the one that the host has checked.
    OtherFolder,
    /// A mounted folder can't be looked at from inside.
    UnseenFolder,
    /// The image has something where Forkyard's own files are to be.
    Image,
}

impl NoStart {
    /// None that programs or engines end with by themselves, but for the first.
    pub fn code(self) -> u8 {
        match self {
            NoStart::Other => 1,
            NoStart::OtherFolder => 31,
            NoStart::UnseenFolder => 32,
            NoStart::Image => 33,
        }
    }

    pub fn of(code: i64) -> NoStart {
        let named = [NoStart::OtherFolder, NoStart::UnseenFolder, NoStart::Image];
        named.into_iter().find(|why| i64::from(why.code()) == code).unwrap_or(NoStart::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_code_says_why() {
        for why in [NoStart::Other, NoStart::OtherFolder, NoStart::UnseenFolder, NoStart::Image] {
            assert_eq!(NoStart::of(why.code().into()), why);
        }
        for code in [0, 2, 126, 127, 134, 137, -1] {
            assert_eq!(NoStart::of(code), NoStart::Other);
        }
    }
}
