//! Prompt caching as the API does it: by prefix, up to marked blocks, with a bounded look back.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use super::Bill;

/// How many blocks before a mark the API looks for an entry.
const LOOK_BACK_BLOCKS: usize = 20;
/// Bytes of JSON that make a token here.
const BYTES_PER_TOKEN: u64 = 4;

/// One block of the prompt, in the order that the API caches by: tools, system, messages.
struct PromptBlock {
    /// Of everything up to and with this block.
    digest: u64,
    /// Likewise.
    tokens: u64,
    mark: Option<Ttl>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ttl {
    FiveMinutes,
    OneHour,
}

fn blocks(body: &Value) -> Vec<PromptBlock> {
    fn list<'a>(value: &'a Value, prefix: &str, out: &mut Vec<(String, &'a Value)>) {
        match value {
            Value::Array(all) => out.extend(all.iter().map(|v| (prefix.to_string(), v))),
            Value::Null => {}
            one => out.push((prefix.to_string(), one)),
        }
    }
    let mut all = Vec::new();
    list(&body["tools"], "tool", &mut all);
    list(&body["system"], "system", &mut all);
    for message in body["messages"].as_array().into_iter().flatten() {
        list(&message["content"], message["role"].as_str().unwrap_or("?"), &mut all);
    }
    let mut hasher = DefaultHasher::new();
    body["model"].to_string().hash(&mut hasher);
    let mut bytes = 0_u64;
    all.into_iter()
        .map(|(kind, block)| {
            let mut bare = block.clone();
            let mark = bare.as_object_mut().and_then(|o| o.remove("cache_control"));
            let text = bare.to_string();
            (kind, &text).hash(&mut hasher);
            bytes += text.len() as u64;
            let mark = mark.map(|m| if m["ttl"] == "1h" { Ttl::OneHour } else { Ttl::FiveMinutes });
            PromptBlock { digest: hasher.finish(), tokens: bytes.div_ceil(BYTES_PER_TOKEN), mark }
        })
        .collect()
}

/// What the counting endpoint says, and what is billed in all.
pub fn count_tokens(body: &Value) -> u64 {
    blocks(body).last().map_or(0, |b| b.tokens)
}

pub(super) fn marks(body: &Value) -> usize {
    blocks(body).iter().filter(|b| b.mark.is_some()).count()
}

#[derive(Debug, Default)]
pub struct PromptCache {
    entries: HashSet<u64>,
}

impl PromptCache {
    /// What the input costs at this moment.
    pub fn charge(&self, body: &Value) -> Bill {
        let blocks = blocks(body);
        let total = blocks.last().map_or(0, |b| b.tokens);
        let hit = (0..blocks.len())
            .rev()
            .filter(|i| blocks[*i].mark.is_some())
            .flat_map(|mark| (mark.saturating_sub(LOOK_BACK_BLOCKS)..=mark).rev())
            .filter(|i| self.entries.contains(&blocks[*i].digest))
            .max();
        let mut bill = Bill { cache_read: hit.map_or(0, |i| blocks[i].tokens), ..Bill::default() };
        let mut at = bill.cache_read;
        for block in blocks.iter().filter(|b| b.tokens > bill.cache_read) {
            if let Some(ttl) = block.mark {
                let written = block.tokens - at;
                at = block.tokens;
                match ttl {
                    Ttl::FiveMinutes => bill.cache_write_5m += written,
                    Ttl::OneHour => bill.cache_write_1h += written,
                }
            }
        }
        bill.input = total - at;
        bill
    }

    /// The answer has begun: the marked prefixes can be read from now on.
    pub fn keep(&mut self, body: &Value) {
        self.entries.extend(blocks(body).iter().filter(|b| b.mark.is_some()).map(|b| b.digest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(texts: &[(&str, bool)]) -> Value {
        let block = |(text, marked): &(&str, bool)| {
            let mut block = json!({"type": "text", "text": text});
            if *marked {
                block["cache_control"] = json!({"type": "ephemeral"});
            }
            block
        };
        let content: Vec<Value> = texts.iter().map(block).collect();
        json!({"model": "m", "messages": [{"role": "user", "content": content}]})
    }

    #[test]
    fn a_prefix_is_read_once_it_was_written() {
        let mut cache = PromptCache::default();
        let first = body(&[("shared part of some length", true), ("own", false)]);
        let bill = cache.charge(&first);
        assert!(bill.cache_write_5m > 0 && bill.input > 0 && bill.cache_read == 0);
        assert_eq!(bill.prompt(), count_tokens(&first));
        assert_eq!(cache.charge(&first).cache_read, 0, "not before the answer begins");
        cache.keep(&first);
        let second = body(&[("shared part of some length", true), ("another's", false)]);
        assert_eq!(cache.charge(&second).cache_read, bill.cache_write_5m);
        let changed = body(&[("Shared part of some length", true)]);
        assert_eq!(cache.charge(&changed).cache_read, 0);
    }

    #[test]
    fn the_look_back_is_bounded() {
        let mut cache = PromptCache::default();
        cache.keep(&body(&[("a", true)]));
        let mut near: Vec<(&str, bool)> = vec![("a", false)];
        near.extend(std::iter::repeat_n(("b", false), LOOK_BACK_BLOCKS - 1));
        near.push(("b", true));
        assert!(cache.charge(&body(&near)).cache_read > 0);
        near.insert(1, ("b", false));
        assert_eq!(cache.charge(&body(&near)).cache_read, 0);
    }
}
