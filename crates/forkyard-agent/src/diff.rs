//! The change of one file, for readers.

use similar::TextDiff;

use crate::event::{ChangeType, FileEdited};

/// Longer diffs are only counted.
const MAX_FULL_DIFF_CHARS: usize = 50_000;
const PREVIEW_LINES: usize = 100;
const PREVIEW_CHARS: usize = 5_000;
/// Files larger than this are not compared line by line: it would take longer than the edit.
const MAX_COMPARED_BYTES: usize = 1 << 20;
/// A pathological pair of files may not hold up the agent; the rest is then shown as replaced.
const COMPARE_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(200);

/// `before` is None where there was no file. Either side may be missing where it is not known any more: then only the fact
/// is told.
pub(crate) fn file_edited(
    turn: u32,
    tool_use_id: &str,
    path: &str,
    change_type: ChangeType,
    before: Option<&[u8]>,
    after: Option<&[u8]>,
) -> FileEdited {
    let before_text =
        before.or((change_type == ChangeType::Created).then_some(&[][..])).map(std::str::from_utf8);
    let after_text = after.map(std::str::from_utf8);
    let mut edited = FileEdited {
        turn,
        tool_use_id: tool_use_id.to_string(),
        file_path: path.to_string(),
        change_type,
        lines_added: 0,
        lines_removed: 0,
        diff_preview: String::new(),
        full_diff: None,
        full_diff_available: false,
        full_diff_size: 0,
    };
    let (Some(Ok(before)), Some(Ok(after))) = (before_text, after_text) else { return edited };
    if before.len().max(after.len()) > MAX_COMPARED_BYTES {
        return edited;
    }
    let diff = TextDiff::configure().timeout(COMPARE_TIMEOUT).diff_lines(before, after);
    for change in diff.iter_all_changes() {
        match change.tag() {
            similar::ChangeTag::Insert => edited.lines_added += 1,
            similar::ChangeTag::Delete => edited.lines_removed += 1,
            similar::ChangeTag::Equal => {}
        }
    }
    let name = path.trim_start_matches('/');
    let old_name = match change_type {
        ChangeType::Created => "/dev/null".to_string(),
        ChangeType::Modified => format!("a/{name}"),
    };
    let text = diff.unified_diff().context_radius(3).header(&old_name, &format!("b/{name}")).to_string();
    edited.full_diff_size = text.chars().count() as u64;
    let mut preview: String = text.lines().take(PREVIEW_LINES).flat_map(|line| [line, "\n"]).collect();
    if let Some((at, _)) = preview.char_indices().nth(PREVIEW_CHARS) {
        preview.truncate(at);
    }
    edited.diff_preview = preview;
    if edited.full_diff_size <= MAX_FULL_DIFF_CHARS as u64 {
        edited.full_diff_available = true;
        edited.full_diff = Some(text);
    }
    edited
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_counted_and_shown() {
        let e = file_edited(
            3,
            "t",
            "/workspace/a",
            ChangeType::Modified,
            Some(b"1\n2\n3\n"),
            Some(b"1\nx\n3\n4\n"),
        );
        assert_eq!((e.lines_added, e.lines_removed), (2, 1));
        assert!(e.full_diff.unwrap().starts_with("--- a/workspace/a\n+++ b/workspace/a\n@@"));
    }

    #[test]
    fn long_and_unknown_diffs_are_not_kept() {
        let after = "line\n".repeat(20_000);
        let e = file_edited(1, "t", "/a", ChangeType::Created, None, Some(after.as_bytes()));
        assert_eq!((e.lines_added, e.full_diff.is_none(), e.full_diff_available), (20_000, true, false));
        assert!(e.full_diff_size > 50_000 && e.diff_preview.chars().count() <= PREVIEW_CHARS);
        let e = file_edited(1, "t", "/a", ChangeType::Modified, None, Some(b"x"));
        assert!(!e.full_diff_available);
        let e = file_edited(1, "t", "/a", ChangeType::Modified, Some(&[0xff]), Some(b"x"));
        assert!(!e.full_diff_available);
    }
}
