//! Write: a whole file.

use async_trait::async_trait;
use bytes::Bytes;

use super::file_change::look;
use super::{Call, Failure, FileChange, Output, Tool, definition, edited};
use crate::inference::ToolDef;
use crate::session::Session;

/// Kept of the old content, for the diff.
const KEEP_BYTES: u64 = 1 << 20;

pub(crate) struct Write;

#[async_trait]
impl Tool for Write {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Write",
            "Writes a file as a whole: creates it and its directories, or replaces it. Prefer Edit for changes.",
            &[
                ("file_path", "string", true, "Absolute, or relative to the workspace."),
                ("content", "string", true, "All of the file's text."),
            ],
        )
    }

    async fn prepare(&self, call: &Call<'_>) -> Result<Option<FileChange>, Failure> {
        let path = call.path("file_path")?;
        let content = Bytes::copy_from_slice(call.text("content")?.as_bytes());
        let max = call.session.policy.max_file_bytes;
        let existing = look(call.session.sandbox.as_ref(), &path, KEEP_BYTES, max).await?;
        Ok(Some(FileChange::new(path, existing, content)))
    }

    async fn run(&self, call: &Call<'_>, change: Option<FileChange>) -> Result<Output, Failure> {
        let Some(change) = change else { return Err(Failure::result("nothing was prepared to be written")) };
        change.write(call).await?;
        let verb = if change.existed { "Replaced" } else { "Created" };
        let mut output =
            Output::text(format!("{verb} {}: {} bytes written.", change.path, change.after.len()));
        output.events.push(edited(call, &change));
        Ok(output)
    }
}
