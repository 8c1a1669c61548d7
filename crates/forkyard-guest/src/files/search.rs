//! glob and grep, with ripgrep's own parts: what .gitignore names is left out, hidden files are looked at, .git is not.

use std::path::Path;

use forkyard_guest::protocol::{Fault, MatchMeta, escape_name};
use globset::{GlobBuilder, GlobMatcher};
use grep_regex::RegexMatcherBuilder;
use grep_searcher::sinks::Lossy;
use grep_searcher::{BinaryDetection, MmapChoice, SearcherBuilder};
use ignore::WalkBuilder;
use rustix::fs::OFlags;

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
const REGEX_SIZE: usize = 32 << 20;

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

fn walker(root: &Path) -> WalkBuilder {
    let mut walk = WalkBuilder::new(root);
    walk.hidden(false)
        .require_git(false)
        .git_global(false)
        .follow_links(false)
        .filter_entry(|entry| entry.file_name() != ".git")
        .threads(1);
    walk
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
    let mut found = Vec::new();
    for entry in walker(Path::new(&root)).build().flatten() {
        if entry.file_type().is_none_or(|kind| kind.is_dir()) {
            continue;
        }
        let Ok(relative) = entry.path().strip_prefix(&root) else { continue };
        if matcher.is_match(relative) {
            found.push(escape_name(relative.as_os_str().as_encoded_bytes()));
        }
    }
    found.sort_unstable();
    found.truncate(usize::try_from(bound(max)).unwrap_or(usize::MAX));
    for names in found.chunks(NAMES_PART) {
        part(names.to_vec());
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

/// Matches in the order of paths and lines.
pub fn grep(query: &Grep, mut part: impl FnMut(Vec<MatchMeta>, bool)) -> Result<()> {
    let root = start(query.path.as_deref())?;
    let matcher = RegexMatcherBuilder::new()
        .case_insensitive(query.ignore_case)
        .line_terminator(Some(b'\n'))
        .size_limit(REGEX_SIZE)
        .build(&query.pattern)
        .map_err(|e| invalid(format!("pattern {:?}: {e}", query.pattern)))?;
    let only = query.glob.as_deref().map(glob_matcher).transpose()?;
    let max = usize::try_from(bound(query.max)).unwrap_or(usize::MAX);
    let mut searcher = SearcherBuilder::new()
        .binary_detection(BinaryDetection::quit(0))
        .memory_map(MmapChoice::never()) // a file that shrinks under a map would kill the guest
        .line_number(true)
        .build();
    let (mut matches, mut bytes, mut truncated) = (Vec::new(), 0, false);
    let mut walk = walker(Path::new(&root));
    walk.sort_by_file_path(Path::cmp);
    for entry in walk.build().flatten() {
        if entry.file_type().is_none_or(|kind| !kind.is_file()) {
            continue;
        }
        let relative = match entry.path().strip_prefix(&root) {
            Ok(relative) if !relative.as_os_str().is_empty() => relative,
            _ => Path::new(entry.path().file_name().unwrap_or_default()),
        };
        if only.as_ref().is_some_and(|glob| !glob.is_match(relative)) {
            continue;
        }
        let Some(Ok(file)) = entry.path().to_str().map(ops::open_regular) else { continue };
        let name = escape_name(relative.as_os_str().as_encoded_bytes());
        let sink = Lossy(|line, text| {
            if matches.len() >= max || bytes > MAX_ANSWER_BYTES {
                truncated = true;
                return Ok(false);
            }
            let text = text.trim_end_matches(['\n', '\r']);
            let cut = text.floor_char_boundary(MAX_LINE);
            bytes += cut + name.len();
            matches.push(MatchMeta { path: name.clone(), line, text: text[..cut].to_string() });
            Ok(true)
        });
        let _ = searcher.search_file(&matcher, &std::fs::File::from(file), sink); // unreadable: nothing to find
        if truncated {
            break;
        }
    }
    for some in matches.chunks(MATCHES_PART) {
        part(some.to_vec(), false);
    }
    if truncated {
        part(Vec::new(), true);
    }
    Ok(())
}
