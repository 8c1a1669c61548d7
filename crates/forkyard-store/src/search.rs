//! Finding runs by words. What is looked through is written beside a run's view, folded once, so that every store answers
//! by comparing bytes and all of them mean the same.

use forkyard_core::spec::shown_url;
use forkyard_core::view::{RunOutcome, RunStatus, RunView};

use crate::{Result, RunCounts, RunQuery, StoreError};

/// Of one run that is looked through: its id, repository, branch, and as much of its prompt as this leaves.
const MAX_TEXT_BYTES: usize = 16 << 10;
/// Words of one search.
pub const MAX_WORDS: usize = 16;
/// Bytes of a search, all its words together.
pub const MAX_SEARCH_BYTES: usize = 1000;

/// Words that all occur in a run, in any order, each as it stands or as a part of another; case does not matter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Words(Vec<String>);

impl Words {
    pub fn parse(search: &str) -> Result<Words> {
        let folded = fold(search);
        let words: Vec<String> = folded.split_whitespace().map(Into::into).collect();
        if search.len() > MAX_SEARCH_BYTES || words.len() > MAX_WORDS {
            let text = format!("a search has at most {MAX_WORDS} words and {MAX_SEARCH_BYTES} bytes");
            return Err(StoreError::Invalid(text));
        }
        Ok(Words(words))
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn occur_in(&self, view: &RunView) -> bool {
        self.is_empty() || {
            let text = searched(view);
            self.0.iter().all(|word| text.contains(word))
        }
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// What a search looks through. Without credentials: whoever may search may not guess them letter by letter.
pub(crate) fn searched(view: &RunView) -> String {
    let (id, repo, branch) = (&view.id, shown_url(&view.repo), view.branch.as_deref().unwrap_or_default());
    let mut text = fold(&format!("{id} {repo} {branch} "));
    let room = MAX_TEXT_BYTES.saturating_sub(text.len());
    let end = view.prompt.floor_char_boundary(room.min(view.prompt.len()));
    text.push_str(&fold(&view.prompt[..end]));
    text
}

/// Letter by letter, so that a part of a text folds to a part of the folded text. PostgreSQL has no NUL.
fn fold(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).flat_map(char::to_lowercase).collect()
}

/// The column that tells runs apart by how they ended: null while they are live.
pub(crate) fn ended_as(view: &RunView) -> Option<&'static str> {
    (view.status == RunStatus::Ended).then(|| view.outcome.map_or("", outcome))
}

pub(crate) fn outcome(outcome: RunOutcome) -> &'static str {
    match outcome {
        RunOutcome::Success => "success",
        RunOutcome::Failed => "failed",
        RunOutcome::Cancelled => "cancelled",
    }
}

impl RunQuery {
    /// Is it one of those that are asked for, on whichever page?
    pub fn wants(&self, view: &RunView) -> bool {
        let ended = view.status == RunStatus::Ended;
        (!self.live || !ended)
            && (self.outcomes.is_empty()
                || (ended && view.outcome.is_some_and(|o| self.outcomes.contains(&o))))
            && self.words.occur_in(view)
    }
}

impl RunCounts {
    /// So many runs whose column says this.
    pub fn add(&mut self, ended_as: Option<&str>, runs: u64) {
        self.all += runs;
        match ended_as {
            None => self.live += runs,
            Some("success") => self.success += runs,
            Some("failed") => self.failed += runs,
            Some("cancelled") => self.cancelled += runs,
            // Ended, and nobody said how.
            Some(_) => {}
        }
    }
    pub fn add_run(&mut self, view: &RunView) {
        self.add(ended_as(view), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_folded_and_bounded() {
        let words = Words::parse("  Größe\tFIX\0Me ").unwrap();
        assert_eq!(words.iter().collect::<Vec<_>>(), ["größe", "fix", "me"]);
        assert!(Words::parse(" \n ").unwrap().is_empty());
        assert!(Words::parse(&"a ".repeat(MAX_WORDS)).is_ok());
        assert!(Words::parse(&"a ".repeat(MAX_WORDS + 1)).is_err());
        assert!(Words::parse(&"a".repeat(MAX_SEARCH_BYTES + 1)).is_err());
    }
}
