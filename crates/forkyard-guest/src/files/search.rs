//! glob and grep, with ripgrep's own parts: what .gitignore names is left out, hidden files are looked at, .git is not.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use forkyard_guest::protocol::{Fault, MatchMeta, escape_name};
use globset::{GlobBuilder, GlobMatcher};
use grep_regex::RegexMatcherBuilder;
use grep_searcher::sinks::Lossy;
use grep_searcher::{BinaryDetection, MmapChoice, SearcherBuilder};
use rustix::fs::{FileType, OFlags};

use super::look::{self, IgnoreFiles};
use super::{FileError, Result, WORKSPACE, ops, resolve};

/// Answers of one question, whatever was asked for.
const MAX_ANSWERS: u64 = 100_000;
/// Longer lines are cut: nobody reads a minified bundle.
const MAX_LINE: usize = 2000;
/// Bytes of the answers of one question.
const MAX_ANSWER_BYTES: usize = 16 << 20;
const NAMES_PART: usize = 2000;
const MATCHES_PART: usize = 500;
/// Bound of the compiled expression, which may be hostile.
const REGEX_SIZE: usize = 16 << 20;
/// Of what the search remembers of it: when that is full it begins anew.
const REGEX_CACHE: usize = 16 << 20;
/// A line is held as a whole to be searched: longer ones are data.
const MAX_SEARCHED_LINE: usize = 8 << 20;
/// Files that are named for having longer ones.
const MAX_UNSEARCHED: usize = 100;
/// The last one is the strongest.
const IGNORE_FILES: IgnoreFiles =
    IgnoreFiles { names: &[".git/info/exclude", ".gitignore", ".ignore"], above: true };

fn invalid(message: impl std::fmt::Display) -> FileError {
    FileError::new(Fault::Invalid, message.to_string())
}

fn bound(max: u64) -> u64 {
    if max == 0 { MAX_ANSWERS } else { max.min(MAX_ANSWERS) }
}

/// Matches paths relative to where the search starts. A pattern without `/` matches names at any depth.
fn glob_matcher(pattern: &str) -> Result<GlobMatcher> {
    let pattern = pattern.strip_prefix("./").unwrap_or(pattern);
    let anywhere = if pattern.contains('/') { pattern.to_string() } else { format!("**/{pattern}") };
    GlobBuilder::new(&anywhere)
        .literal_separator(true)
        .build()
        .map(|glob| glob.compile_matcher())
        .map_err(|e| invalid(format!("pattern {pattern:?}: {e}")))
}

fn start(path: Option<&str>) -> Result<String> {
    let path = resolve::absolute(path.unwrap_or(WORKSPACE))?;
    resolve::open(&path, OFlags::PATH)?; // names what is missing
    Ok(path)
}

/// Files whose relative path matches, sorted.
pub fn glob(pattern: &str, path: Option<&str>, max: u64, mut part: impl FnMut(Vec<String>)) -> Result<()> {
    let root = start(path)?;
    // A pattern may be absolute if it lies below the start.
    let relative = pattern.strip_prefix(&format!("{}/", root.trim_end_matches('/'))).unwrap_or(pattern);
    let matcher = glob_matcher(relative)?;
    let mut left = bound(max);
    let mut found = Vec::new();
    look::each(&root, &IGNORE_FILES, usize::MAX, &mut |path, _| {
        if matcher.is_match(path) {
            found.push(escape_name(path.as_os_str().as_encoded_bytes()));
            left -= 1;
        }
        if left == 0 || found.len() == NAMES_PART {
            part(std::mem::take(&mut found));
        }
        Ok(left > 0)
    })?;
    if !found.is_empty() {
        part(found);
    }
    Ok(())
}

pub struct Grep {
    pub pattern: String,
    pub path: Option<String>,
    pub glob: Option<String>,
    pub ignore_case: bool,
    pub max: u64,
}

/// A part of what a search found.
#[derive(Default)]
pub struct Found {
    pub matches: Vec<MatchMeta>,
    /// There is more than was asked for.
    pub truncated: bool,
    /// Files with a line that is too long to be looked at: what follows it was not searched either.
    pub unsearched: Vec<String>,
}

/// Matches in the order of paths and lines.
pub fn grep(query: &Grep, mut part: impl FnMut(Found)) -> Result<()> {
    let root = start(query.path.as_deref())?;
    let matcher = RegexMatcherBuilder::new()
        .case_insensitive(query.ignore_case)
        .line_terminator(Some(b'\n'))
        .size_limit(REGEX_SIZE)
        .dfa_size_limit(REGEX_CACHE)
        .build(&query.pattern)
        .map_err(|e| invalid(format!("pattern {:?}: {e}", query.pattern)))?;
    let only = query.glob.as_deref().map(glob_matcher).transpose()?;
    let mut searcher = SearcherBuilder::new()
        .binary_detection(BinaryDetection::quit(0))
        .memory_map(MmapChoice::never()) // a file that shrinks under a map would kill the guest
        .heap_limit(Some(MAX_SEARCHED_LINE))
        .line_number(true)
        .build();
    let (mut left, mut bytes, mut unsearched) = (bound(query.max), 0, 0);
    let mut found = Found::default();
    look::each(&root, &IGNORE_FILES, usize::MAX, &mut |path, kind| {
        let full = Path::new(&root).join(path);
        let path = match path.as_os_str().is_empty() {
            true => Path::new(full.file_name().unwrap_or_default()),
            false => path,
        };
        if kind != FileType::RegularFile || only.as_ref().is_some_and(|glob| !glob.is_match(path)) {
            return Ok(true);
        }
        let Some(Ok(file)) = full.to_str().map(ops::open_regular) else { return Ok(true) };
        let name = escape_name(path.as_os_str().as_encoded_bytes());
        let sink = Lossy(|line, text| {
            if left == 0 || bytes > MAX_ANSWER_BYTES {
                found.truncated = true;
                return Ok(false);
            }
            let text = text.trim_end_matches(['\n', '\r']);
            let cut = text.floor_char_boundary(MAX_LINE);
            left -= 1;
            bytes += cut + name.len();
            found.matches.push(MatchMeta { path: name.clone(), line, text: text[..cut].to_string() });
            if found.matches.len() == MATCHES_PART {
                part(std::mem::take(&mut found));
            }
            Ok(true)
        });
        // Of `Other` there is one error: the bound on a line. What can't be read has nothing to find.
        if searcher
            .search_file(&matcher, &File::from(file), sink)
            .is_err_and(|e| e.kind() == ErrorKind::Other)
            && unsearched < MAX_UNSEARCHED
        {
            unsearched += 1;
            found.unsearched.push(name);
        }
        Ok(!found.truncated)
    })?;
    if found.truncated || !found.matches.is_empty() || !found.unsearched.is_empty() {
        part(found);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_to_hold_is_told() {
        let root = std::env::temp_dir().join(format!("forkyard-search-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        for (name, length) in [("fits", MAX_SEARCHED_LINE / 2), ("line", MAX_SEARCHED_LINE + 1), ("short", 0)]
        {
            std::fs::write(root.join(name), format!("needle\n{}needle\n", "x".repeat(length))).unwrap();
        }
        let path = root.to_str().map(String::from);
        let query = Grep { pattern: "needle".into(), path, glob: None, ignore_case: false, max: 0 };
        let (mut matches, mut unsearched) = (Vec::new(), Vec::new());
        grep(&query, |found| {
            matches.extend(found.matches.into_iter().map(|m| (m.path, m.line)));
            unsearched.extend(found.unsearched);
            assert!(!found.truncated);
        })
        .unwrap();
        let all = [("fits", 1), ("fits", 2), ("line", 1), ("short", 1), ("short", 2)];
        assert_eq!(matches, all.map(|(path, line)| (path.to_string(), line)));
        assert_eq!(unsearched, ["line"]);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
