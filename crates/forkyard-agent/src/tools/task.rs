//! Task: a subagent with a conversation of its own, in the same sandbox, under the same policy, hooks and budget.

use async_trait::async_trait;

use super::{Call, Failure, FileChange, Output, Tool, definition};
use crate::inference::ToolDef;
use crate::session::{Session, subagent};

/// A part of a task takes fewer turns than the whole.
pub(crate) const MAX_SUBAGENT_TURNS: u32 = 50;
/// Subagents start no subagents: depth, like everything, has a bound.
pub(crate) const SUBAGENT_TOOLS_EXCEPT: &[&str] = &["Task"];

pub(crate) struct Task;

#[async_trait]
impl Tool for Task {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Task",
            "Gives a self-contained part of the work to a subagent. It has the same tools and files, but does not see this \
             conversation: say all that it needs to know, and what it should report. You get its final answer.",
            &[
                ("description", "string", true, "The part of the work in a few words."),
                ("prompt", "string", true, "What it should do."),
            ],
        )
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let prompt = call.text("prompt")?;
        let description = call.optional_text("description")?.unwrap_or_default();
        subagent::run(call, description, prompt).await
    }
}
