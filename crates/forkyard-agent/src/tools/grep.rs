//! Grep: lines by a regular expression.

use async_trait::async_trait;
use forkyard_sandbox::GrepRequest;

use super::{Call, Failure, FileChange, Output, Tool, definition};
use crate::inference::ToolDef;
use crate::session::Session;
use crate::text::cut;

const MAX_MATCHES: usize = 100;
const MAX_LINE_BYTES: usize = 500;
/// Names of files that could not be searched.
const MAX_UNSEARCHED_BYTES: usize = 1000;

pub(crate) struct Grep;

#[async_trait]
impl Tool for Grep {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Grep",
            "Searches the contents of files by a regular expression. Gives `path:line:text`, at most 100 of them; ignored and \
             binary files are left out.",
            &[
                ("pattern", "string", true, "A regular expression."),
                ("path", "string", false, "A file or directory; the workspace if not given."),
                ("glob", "string", false, "Only files that match, such as `*.rs`."),
                ("ignore_case", "boolean", false, "Take small and capital letters as equal."),
            ],
        )
    }

    fn only_reads(&self) -> bool {
        true
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let request = GrepRequest {
            pattern: call.text("pattern")?.to_string(),
            path: call.optional_text("path")?.map(|p| call.session.absolute(p)),
            glob: call.optional_text("glob")?.map(str::to_string),
            ignore_case: call.flag("ignore_case")?,
            max: MAX_MATCHES,
        };
        let found = call.session.sandbox.grep(request).await?;
        let lines: Vec<String> = found
            .matches
            .iter()
            .take(MAX_MATCHES)
            .map(|m| format!("{}:{}:{}", m.path, m.line, cut(m.text.trim_end(), MAX_LINE_BYTES)))
            .collect();
        let mut text = if lines.is_empty() { "No matches.".into() } else { lines.join("\n") };
        if found.truncated || found.matches.len() > MAX_MATCHES {
            text.push_str(&format!("\n[only the first {MAX_MATCHES} matches are shown]"));
        }
        if !found.unsearched.is_empty() {
            let names = cut(&found.unsearched.join(", "), MAX_UNSEARCHED_BYTES);
            text.push_str(&format!("\n[not searched to the end, for a line of many megabytes: {names}]"));
        }
        Ok(Output::text(text))
    }
}
