//! Glob: files by name.

use async_trait::async_trait;
use forkyard_sandbox::GlobRequest;

use super::{Call, Failure, FileChange, Output, Tool, definition};
use crate::inference::ToolDef;
use crate::session::Session;

const MAX_FILES: usize = 1000;

pub(crate) struct Glob;

#[async_trait]
impl Tool for Glob {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Glob",
            "Finds files by a pattern such as `**/*.rs`. Sorted, relative to the path; ignored files are left out.",
            &[
                ("pattern", "string", true, "With *, **, ?, [..] and {a,b}."),
                ("path", "string", false, "Where to look; the workspace if not given."),
            ],
        )
    }

    fn only_reads(&self) -> bool {
        true
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let request = GlobRequest {
            pattern: call.text("pattern")?.to_string(),
            path: call.optional_text("path")?.map(|p| call.session.absolute(p)),
            max: MAX_FILES + 1,
        };
        let mut files = call.session.sandbox.glob(request).await?;
        if files.is_empty() {
            return Ok(Output::text("No files match."));
        }
        let cut = files.len() > MAX_FILES;
        files.truncate(MAX_FILES);
        let mut text = files.join("\n");
        if cut {
            text.push_str(&format!("\n[more than {MAX_FILES} files match; use a narrower pattern]"));
        }
        Ok(Output::text(text))
    }
}
