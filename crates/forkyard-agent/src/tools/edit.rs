//! Edit: one text in a file replaced by another.

use async_trait::async_trait;
use bytes::Bytes;

use super::file_change::look;
use super::{Call, Failure, FileChange, Output, Tool, definition, edited};
use crate::inference::ToolDef;
use crate::session::Session;

/// A file is edited in memory.
const MAX_EDIT_BYTES: u64 = 16 << 20;
/// Places that are named where a text occurs too often.
const MAX_PLACES: usize = 10;

pub(crate) struct Edit;

#[async_trait]
impl Tool for Edit {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Edit",
            "Replaces old_string by new_string in a file. old_string must occur exactly once, spaces and line ends included \
             (without the line numbers that Read shows), unless replace_all is true.",
            &[
                ("file_path", "string", true, "Absolute, or relative to the workspace."),
                ("old_string", "string", true, "The text to replace, as it stands in the file."),
                ("new_string", "string", true, "The text to put there."),
                ("replace_all", "boolean", false, "Replace every occurrence."),
            ],
        )
    }

    async fn prepare(&self, call: &Call<'_>) -> Result<Option<FileChange>, Failure> {
        let path = call.path("file_path")?;
        let (old, new) = (call.text("old_string")?, call.text("new_string")?);
        let max = MAX_EDIT_BYTES.min(call.session.policy.max_file_bytes);
        let Some(existing) = look(call.session.sandbox.as_ref(), &path, max, max).await? else {
            return Err(Failure::result(format!("{path} does not exist; use Write to create it")));
        };
        let content = existing.content.clone().unwrap_or_default();
        let Ok(text) = std::str::from_utf8(&content) else {
            return Err(Failure::result(format!("{path} is not UTF-8 text; it can't be edited as text")));
        };
        let replaced = replace(text, old, new, call.flag("replace_all")?)
            .map_err(|e| Failure::result(format!("{path}: {e}")))?;
        if replaced.len() as u64 > call.session.policy.max_file_bytes {
            return Err(Failure::result(format!("{path} would become larger than a file may be")));
        }
        Ok(Some(FileChange::new(path, Some(existing), Bytes::from(replaced))))
    }

    async fn run(&self, call: &Call<'_>, change: Option<FileChange>) -> Result<Output, Failure> {
        let Some(change) = change else { return Err(Failure::result("nothing was prepared to be written")) };
        change.write(call).await?;
        let mut output = Output::text(format!("Edited {}.", change.path));
        output.events.push(edited(call, &change));
        Ok(output)
    }
}

fn replace(text: &str, old: &str, new: &str, all: bool) -> Result<String, String> {
    if old.is_empty() {
        return Err("old_string is empty; use Write to replace a whole file".to_string());
    }
    if old == new {
        return Err("old_string and new_string are the same".to_string());
    }
    let places: Vec<usize> = text.match_indices(old).map(|(at, _)| at).collect();
    match places.len() {
        0 => Err(mismatch(text, old)),
        1 => Ok(text.replacen(old, new, 1)),
        _ if all => Ok(text.replace(old, new)),
        n => {
            let lines: Vec<String> =
                places.iter().take(MAX_PLACES).map(|at| line_of(text, *at).to_string()).collect();
            let more = if n > MAX_PLACES { ", …" } else { "" };
            Err(format!(
                "old_string occurs {n} times (lines {}{more}); add surrounding text to make it unique, or set replace_all",
                lines.join(", ")
            ))
        }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Why it was not found, as well as can be told.
fn mismatch(text: &str, old: &str) -> String {
    let not_found = "old_string was not found";
    let squeeze = |s: &str| s.split_whitespace().collect::<Vec<_>>().join(" ");
    let wanted: Vec<String> = old.lines().map(squeeze).filter(|l| !l.is_empty()).collect();
    let lines: Vec<(usize, String)> =
        (1..).zip(text.lines().map(squeeze)).filter(|(_, l)| !l.is_empty()).collect();
    if wanted.is_empty() {
        return format!("{not_found}: it is only white space, which occurs nowhere like that");
    }
    let found = lines.windows(wanted.len()).find(|w| w.iter().map(|(_, l)| l).eq(wanted.iter()));
    if let Some(window) = found {
        return format!(
            "{not_found}, but lines {} to {} differ from it only in white space or blank lines; copy them as they are",
            window[0].0,
            window[window.len() - 1].0
        );
    }
    if let Some((line, _)) = lines.iter().find(|(_, l)| *l == wanted[0]) {
        return format!(
            "{not_found}: its first line is at line {line}, but what follows there differs; read the file again"
        );
    }
    let numbered = old.lines().next().is_some_and(|l| {
        let rest = l.trim_start().trim_start_matches(|c: char| c.is_ascii_digit());
        rest.len() < l.trim_start().len() && rest.starts_with('\t')
    });
    if numbered {
        return format!("{not_found}: leave out the line numbers that Read puts in front");
    }
    format!("{not_found}; read the file again to see what it holds now")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_once_or_all() {
        assert_eq!(replace("abc", "b", "x", false).unwrap(), "axc");
        assert_eq!(replace("aba", "a", "x", true).unwrap(), "xbx");
        assert!(replace("a\nb\na", "a", "x", false).unwrap_err().contains("2 times (lines 1, 3)"));
        for (old, new) in [("", "x"), ("a", "a")] {
            assert!(replace("a", old, new, false).is_err());
        }
    }

    #[test]
    fn mismatches_are_explained() {
        let text = "fn a() {\n    one();\n    two();\n}\n";
        for (old, hint) in [
            ("one();\ntwo();", "lines 2 to 3"),
            ("    one();\n    three();", "at line 2"),
            ("     2\t    one();", "line numbers"),
            ("nothing like it", "read the file again"),
            ("\n\n\n", "white space"),
        ] {
            let e = replace(text, old, "x", false).unwrap_err();
            assert!(e.contains(hint), "{old:?}: {e}");
        }
    }
}
