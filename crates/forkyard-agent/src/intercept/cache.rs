//! Answers to calls that only read, kept until something may have changed.

use std::collections::BTreeMap;
use std::sync::Mutex;

use serde_json::{Map, Value};

use super::ToolResponse;
use crate::inference::ResultPart;

/// Answers and bytes that are kept: enough for a model that reads the same few files again.
const MAX_ENTRIES: usize = 64;
const MAX_BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
pub(crate) struct ReadCache(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    answers: BTreeMap<String, ToolResponse>,
    bytes: usize,
}

fn key(tool: &str, input: &Map<String, Value>) -> String {
    // serde_json's maps are ordered: equal inputs are equal texts.
    format!("{tool} {}", Value::Object(input.clone()))
}

impl ReadCache {
    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn get(&self, tool: &str, input: &Map<String, Value>) -> Option<ToolResponse> {
        self.entries().answers.get(&key(tool, input)).cloned()
    }

    pub fn put(&self, tool: &str, input: &Map<String, Value>, response: &ToolResponse) {
        let bytes: usize = response
            .parts
            .iter()
            .map(|part| match part {
                ResultPart::Text { text } => text.len(),
                ResultPart::Image(image) => image.base64.len(),
            })
            .sum();
        let mut entries = self.entries();
        if response.is_error || entries.answers.len() >= MAX_ENTRIES || entries.bytes + bytes > MAX_BYTES {
            return;
        }
        if entries.answers.insert(key(tool, input), response.clone()).is_none() {
            entries.bytes += bytes;
        }
    }

    /// Something may have changed.
    pub fn clear(&self) {
        *self.entries() = Entries::default();
    }
}
