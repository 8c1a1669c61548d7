//! Interceptors: what stands between a model's wish and its execution, for every tool call of every agent and subagent.
//!
//! The order is fixed: policy, then interceptors in their order (hooks of the user first), then waiting messages, the cache,
//! execution, events. A call that was rewritten is judged by policy again: nothing gets around it.
//!
//! An interceptor of one's own:
//!
//! ```
//! use async_trait::async_trait;
//! use forkyard_agent::{Interceptor, ToolRequest, ToolResponse, Verdict};
//!
//! /// A file that is not there, and a folder that is not edited by hand.
//! struct Mapping;
//!
//! #[async_trait]
//! impl Interceptor for Mapping {
//!     async fn before(&self, request: &ToolRequest) -> Verdict {
//!         let path = request.input.get("file_path").and_then(|p| p.as_str()).unwrap_or_default();
//!         match (request.tool.as_str(), path) {
//!             ("Read", "VERSION") => Verdict::Respond(ToolResponse::text("1.2.3")),
//!             ("Write" | "Edit", p) if p.starts_with("generated/") => {
//!                 Verdict::Deny("edit the template and run `make generate`".into())
//!             }
//!             _ => Verdict::Allow,
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! # let call = |tool: &str, path: &str| ToolRequest {
//! #     tool: tool.into(),
//! #     input: serde_json::Map::from_iter([("file_path".to_string(), path.into())]),
//! #     tool_use_id: "t1".into(),
//! #     turn: 1,
//! #     subagent: None,
//! # };
//! assert_eq!(Mapping.before(&call("Read", "VERSION")).await, Verdict::Respond(ToolResponse::text("1.2.3")));
//! assert!(matches!(Mapping.before(&call("Edit", "generated/a.rs")).await, Verdict::Deny(_)));
//! assert_eq!(Mapping.before(&call("Edit", "src/a.rs")).await, Verdict::Allow);
//! # });
//! # Ok(())
//! # }
//! ```
//!
//! It takes effect through `Agent::interceptors`, or for all agents of a host through the engine's configuration.

mod cache;
mod hooks;

use async_trait::async_trait;
use serde_json::{Map, Value};

pub(crate) use cache::ReadCache;
pub use hooks::Hook;

use crate::inference::ResultPart;

/// A call on its way.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolRequest {
    pub tool: String,
    pub input: Map<String, Value>,
    pub tool_use_id: String,
    pub turn: u32,
    /// The subagent that asks, if one does.
    pub subagent: Option<String>,
}

/// What a model gets for a call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolResponse {
    pub parts: Vec<ResultPart>,
    pub is_error: bool,
}

impl ToolResponse {
    pub fn text(text: impl Into<String>) -> ToolResponse {
        ToolResponse { parts: vec![ResultPart::Text { text: text.into() }], is_error: false }
    }
}

/// What is to become of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Allow,
    /// The model gets the reason as an error.
    Deny(String),
    /// Another input for the same tool.
    Rewrite(Map<String, Value>),
    /// The answer, without running anything: a virtual file, a stand-in.
    Respond(ToolResponse),
}

/// Judges, changes or answers calls.
#[async_trait]
pub trait Interceptor: Send + Sync {
    async fn before(&self, _request: &ToolRequest) -> Verdict {
        Verdict::Allow
    }
    /// Sees what a call that ran gave; may add to it or hide from it.
    async fn after(&self, _request: &ToolRequest, _response: &mut ToolResponse) {}
}
