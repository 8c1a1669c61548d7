//! Names that come from users, repositories and sandboxes, checked before git or the disk sees them.

use std::fmt;

pub use forkyard_core::spec::shown_url;

use super::error::{GitError, Result};

/// Longest branch or URL that is taken.
const MAX_NAME_BYTES: usize = 1000;
/// Linux's limit of a path, and of one part of it.
const MAX_PATH_BYTES: usize = 4095;
const MAX_PART_BYTES: usize = 255;

/// A full SHA-1 of a commit, in hex.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommitId(String);

impl CommitId {
    pub fn new(text: &str) -> Result<Self> {
        let ok = text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if ok {
            Ok(CommitId(text.into()))
        } else {
            Err(GitError::invalid(format!("{text:?} is not a full commit id")))
        }
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CommitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for CommitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The rules of git's own check-ref-format, and nothing that could be taken for an option or a range.
pub fn check_branch(name: &str) -> Result<()> {
    let bad = |why: &str| Err(GitError::invalid(format!("{name:?} is not a branch name: {why}")));
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return bad("write 1 to 1000 bytes");
    }
    if name.starts_with('-') {
        return bad("it starts with a dash");
    }
    if name == "@" || name.contains("@{") || name.contains("..") {
        return bad("`@`, `@{` and `..` mean something else to git");
    }
    if name.chars().any(|c| c.is_control() || c.is_whitespace() || "~^:?*[\\".contains(c)) {
        return bad("it has a space, a control character or one of ~^:?*[\\ in it");
    }
    for part in name.split('/') {
        if part.is_empty() || part.starts_with('.') || part.ends_with('.') || part.ends_with(".lock") {
            return bad("a part is empty, starts or ends with a dot, or ends with .lock");
        }
    }
    Ok(())
}

/// Where a repository is fetched from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Https,
    Http,
    Ssh,
    File,
}

impl Transport {
    pub(super) fn protocol(self) -> &'static str {
        match self {
            Transport::Https => "https",
            Transport::Http => "http",
            Transport::Ssh => "ssh",
            Transport::File => "file",
        }
    }
}

/// Only these transports, and no host that ssh would take for an option.
pub fn check_url(url: &str) -> Result<Transport> {
    let bad = |why: &str| {
        Err(GitError::invalid(format!("{:?} is not a repository: {why}", shown_url(url)))
            .hint("write https://HOST/PATH, ssh://HOST/PATH, USER@HOST:PATH or a local path"))
    };
    if url.is_empty() || url.len() > MAX_NAME_BYTES {
        return bad("write 1 to 1000 bytes");
    }
    if url.starts_with('-') {
        return bad("it starts with a dash");
    }
    if url.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return bad("it has a space or a control character in it");
    }
    let host_ok = |rest: &str| {
        let authority = rest.split('/').next().unwrap_or_default();
        let host = authority.rsplit('@').next().unwrap_or_default();
        !host.is_empty() && !host.starts_with('-') && !authority.starts_with('-')
    };
    for (scheme, transport) in [
        ("https://", Transport::Https),
        ("http://", Transport::Http),
        ("ssh://", Transport::Ssh),
        ("file://", Transport::File),
    ] {
        if let Some(rest) = url.strip_prefix(scheme) {
            return if transport == Transport::File || host_ok(rest) {
                Ok(transport)
            } else {
                bad("its host is odd")
            };
        }
    }
    if url.contains("::") || url.contains("://") {
        return bad("its transport is not allowed");
    }
    match url.split_once(':') {
        Some((host, path))
            if !host.contains('/') && !path.is_empty() && host_ok(host) && !path.starts_with('-') =>
        {
            Ok(Transport::Ssh)
        }
        Some(_) | None => bad("it has no transport"),
    }
}

/// A path of a file in a tree: relative, clean, and nothing that any file system would take for `.git`.
pub fn check_path(path: &str) -> Result<()> {
    let bad = |why: &str| Err(GitError::invalid(format!("path {path:?} is refused: {why}")));
    if path.is_empty() || path.len() > MAX_PATH_BYTES {
        return bad("it is empty or too long");
    }
    if path.starts_with('/') {
        return bad("it is absolute");
    }
    if path.contains('\0') {
        return bad("it has a NUL in it");
    }
    for part in path.split('/') {
        if part.is_empty() || part == "." || part == ".." {
            return bad("a part of it is empty, `.` or `..`");
        }
        if part.len() > MAX_PART_BYTES {
            return bad("a part of it is too long");
        }
        if is_dot_git(part) {
            return bad("it leads into a .git folder");
        }
    }
    Ok(())
}

/// `.git` as HFS+ and NTFS see it too: case, ignorable characters, trailing dots and spaces, streams, short names.
fn is_dot_git(part: &str) -> bool {
    let seen: String = part
        .chars()
        .filter(|c| !matches!(c, '\u{200c}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{206a}'..='\u{206f}' | '\u{feff}'))
        .flat_map(char::to_lowercase)
        .collect();
    let seen = seen.split([':', '\\']).next().unwrap_or_default().trim_end_matches(['.', ' ']);
    seen == ".git" || seen == "git~1"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_names_that_git_or_a_shell_would_misread_are_refused() {
        for bad in [
            "",
            "-x",
            "--upload-pack=touch /tmp/x",
            "a..b",
            "a b",
            "a\nb",
            "a\x1b[31m",
            "@",
            "a@{1}",
            "a~1",
            "a^",
            "a:b",
            "a?",
            "a*",
            "a[",
            "a\\b",
            "/a",
            "a/",
            "a//b",
            ".a",
            "a/.b",
            "a.",
            "a.lock",
            "a.lock/b",
            &"x".repeat(1001),
        ] {
            assert!(check_branch(bad).is_err(), "{bad:?}");
        }
        for good in ["main", "feature/x-1", "v1.2", "ä", "a@b", "HEAD"] {
            check_branch(good).unwrap();
        }
    }

    #[test]
    fn urls_are_https_ssh_or_files() {
        for (good, transport) in [
            ("https://github.com/a/b", Transport::Https),
            ("https://u:p@h/a", Transport::Https),
            ("http://127.0.0.1:8080/x.git", Transport::Http),
            ("ssh://git@h:22/a", Transport::Ssh),
            ("git@github.com:a/b.git", Transport::Ssh),
            ("file:///srv/a", Transport::File),
        ] {
            assert_eq!(check_url(good).unwrap(), transport, "{good}");
        }
        for bad in [
            "",
            "-x",
            "--upload-pack=x",
            "ext::sh -c x",
            "ext::sh",
            "fd::1",
            "git://h/a",
            "ftp://h/a",
            "https://",
            "ssh://-oProxyCommand=x/a",
            "-oProxyCommand=x:a",
            "ssh://u@-x/a",
            "https://h/a b",
            "https://h/\n",
            "just-a-name",
            "./a:b",
            "h:-x",
        ] {
            assert!(check_url(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn passwords_in_urls_are_not_shown() {
        assert_eq!(shown_url("https://u:p@h/a@b"), "https://***@h/a@b");
        assert_eq!(shown_url("https://h/a"), "https://h/a");
        assert!(!check_url("ftp://u:hunter2@h/a").unwrap_err().to_string().contains("hunter2"));
    }

    #[test]
    fn paths_that_lead_outside_or_into_dot_git_are_refused() {
        for bad in [
            "",
            "/etc/passwd",
            "..",
            "a/../b",
            "./a",
            "a//b",
            "a/",
            "a\0b",
            ".git",
            ".git/config",
            "a/.GIT/hooks/x",
            ".git.",
            ".git /x",
            "git~1/x",
            "GIT~1",
            ".gi\u{200c}t/x",
            ".git::$INDEX_ALLOCATION/x",
            ".git\\x",
            &"x".repeat(256),
            &"x/".repeat(2100),
        ] {
            assert!(check_path(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "a/b", ".gitignore", ".github/x", "a\nb", "-x", "ä ö", "a.git/x", "..a", "git~2"]
        {
            check_path(good).unwrap();
        }
    }
}
