//! The most input tokens that a request can have, known before it is sent.
//!
//! No token is shorter than a byte, so bytes bound tokens; images are bounded by the model's maximum. Where the conversation's last
//! answer said how much was read, only what was added since is counted by bytes.

use std::collections::HashMap;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard};

use forkyard_core::pricing::Usage;

use super::{Block, Message, ResultPart, ToolDef, TurnRequest};

/// What a provider puts around a block, a message or a tool definition; the real ones are below ten tokens.
const FRAME_TOKENS: u64 = 24;
/// The provider's own instructions for tool use and thinking, which a request does not show; some hundred tokens.
const HIDDEN_TOKENS: u64 = 2048;
/// No model reads more: bounds what bytes do not (documents, which are made of pages).
pub const MAX_CONTEXT_TOKENS: u64 = 2_000_000;
/// A provider calls its count an estimate: this much is added.
const COUNT_MARGIN_TOKENS: u64 = 128;
const COUNT_MARGIN_DIVISOR: u64 = 32;
/// Conversations that are remembered per session: the agent's and its subagents'. The forgotten are counted by bytes.
const MAX_CONVERSATIONS: usize = 64;

fn text(text: &str) -> u64 {
    text.len() as u64
}

fn weigh_block(block: &Block, image_tokens: u64) -> u64 {
    let content = match block {
        Block::Text { text: t } => text(t),
        // A signature is a ciphertext of the thinking, whose tokens the provider knows; bytes bound both.
        Block::Thinking { thinking, signature } => text(thinking) + text(signature),
        Block::RedactedThinking { data } => text(data),
        Block::ToolUse { id, name, input } => text(id) + text(name) + text(input.as_str()),
        Block::ToolResult { tool_use_id, content, .. } => {
            let parts = content.iter().map(|part| match part {
                ResultPart::Text { text: t } => text(t) + FRAME_TOKENS,
                ResultPart::Image(_) => image_tokens + FRAME_TOKENS,
            });
            text(tool_use_id) + parts.sum::<u64>()
        }
        Block::Image(_) => image_tokens,
        Block::Other { json } => text(json.as_str()),
    };
    content + FRAME_TOKENS
}

fn weigh_messages(messages: &[Message], image_tokens: u64) -> u64 {
    let message =
        |m: &Message| FRAME_TOKENS + m.content.iter().map(|b| weigh_block(b, image_tokens)).sum::<u64>();
    messages.iter().map(message).sum()
}

/// By bytes alone.
pub fn weigh(request: &TurnRequest, image_tokens: u64) -> u64 {
    let tool = |t: &ToolDef| {
        text(&t.name) + text(&t.description) + t.input_schema.to_string().len() as u64 + FRAME_TOKENS
    };
    HIDDEN_TOKENS
        + text(&request.system)
        + request.tools.iter().map(tool).sum::<u64>()
        + weigh_messages(&request.messages, image_tokens)
}

/// Of a request in a provider's own format, whose text is all of its JSON.
pub fn weigh_raw(text_bytes: u64, images: u64, image_tokens: u64) -> u64 {
    HIDDEN_TOKENS + text_bytes + images * (image_tokens + FRAME_TOKENS)
}

/// What a provider's count bounds.
pub fn bound_of_count(counted: u64) -> u64 {
    counted.saturating_add(counted / COUNT_MARGIN_DIVISOR).saturating_add(COUNT_MARGIN_TOKENS)
}

/// What the conversations of one session were last reported to hold.
#[derive(Debug, Default)]
pub struct Conversations {
    known: Mutex<HashMap<String, Known>>,
    hasher: RandomState,
}

#[derive(Debug, Clone)]
struct Known {
    messages: usize,
    digest: u64,
    tokens: u64,
    /// How far the digest of the request under way has come: the answer only adds to it. A long conversation is gone through
    /// once a turn, not twice.
    under_way: Option<(usize, DefaultHasher)>,
}

impl Conversations {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keyed by chance, so that no content can be made to collide on purpose.
    fn begun(&self, request: &TurnRequest, messages: &[Message]) -> DefaultHasher {
        let mut hasher = self.hasher.build_hasher();
        hash_shared_head(request, &mut hasher);
        messages.iter().for_each(|message| message.hash(&mut hasher));
        hasher
    }

    /// None if this is not a continuation of what was reported: a first request, or a compacted conversation.
    pub fn bound(&self, request: &TurnRequest, image_tokens: u64) -> Option<u64> {
        let (messages, digest, tokens) = {
            let all = self.lock();
            let known = all.get(&request.conversation)?;
            (known.messages, known.digest, known.tokens)
        };
        let (old, new) = request.messages.split_at_checked(messages)?;
        let mut hasher = self.begun(request, old);
        if hasher.finish() != digest {
            return None;
        }
        new.iter().for_each(|message| message.hash(&mut hasher));
        if let Some(known) = self.lock().get_mut(&request.conversation) {
            known.under_way = Some((request.messages.len(), hasher));
        }
        Some(tokens + weigh_messages(new, image_tokens))
    }

    /// The answer's tokens are input from now on, as it is appended to the conversation.
    pub fn reported(&self, request: &TurnRequest, answer: &Message, usage: &Usage) {
        let frames = FRAME_TOKENS * (answer.content.len() as u64 + 1);
        let under_way = self.lock().get_mut(&request.conversation).and_then(|known| known.under_way.take());
        let mut hasher = match under_way {
            Some((messages, hasher)) if messages == request.messages.len() => hasher,
            Some(_) | None => self.begun(request, &request.messages),
        };
        answer.hash(&mut hasher);
        let known = Known {
            messages: request.messages.len() + 1,
            digest: hasher.finish(),
            tokens: usage.total().saturating_add(frames),
            under_way: None,
        };
        let mut all = self.lock();
        if all.len() >= MAX_CONVERSATIONS && !all.contains_key(&request.conversation) {
            all.clear();
        }
        all.insert(request.conversation.clone(), known);
    }
}

fn hash_shared_head(request: &TurnRequest, hasher: &mut impl Hasher) {
    request.model.hash(hasher);
    request.system.hash(hasher);
    for tool in &request.tools {
        tool.name.hash(hasher);
        tool.description.hash(hasher);
        tool.input_schema.to_string().hash(hasher);
    }
}

/// Names the part that forks share. None if there is none worth waiting for.
pub fn shared_prefix(request: &TurnRequest, hasher: &RandomState) -> Option<u64> {
    let first = request.messages.first()?;
    let shared = &first.content[..request.shared_blocks.min(first.content.len())];
    if shared.is_empty() {
        return None;
    }
    let mut state = hasher.build_hasher();
    hash_shared_head(request, &mut state);
    shared.hash(&mut state);
    Some(state.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::{Image, RawJson};

    fn request(messages: Vec<Message>) -> TurnRequest {
        TurnRequest { system: "be brief".into(), ..TurnRequest::new("m", messages, 100) }
    }

    #[test]
    fn a_continuation_counts_only_what_was_added() {
        let conversations = Conversations::default();
        let first = request(vec![Message::user("x".repeat(10_000))]);
        assert_eq!(conversations.bound(&first, 0), None);
        let answer = Message::assistant(vec![Block::text("ok")]);
        conversations.reported(&first, &answer, &Usage { input: 2000, output: 5, ..Usage::default() });

        let mut next = first.clone();
        next.messages.extend([answer, Message::user("y".repeat(50))]);
        let bound = conversations.bound(&next, 0).unwrap();
        assert!((2055..2055 + 5 * FRAME_TOKENS).contains(&bound), "{bound}");

        let mut compacted = next.clone();
        compacted.messages[0] = Message::user("summary");
        assert_eq!(conversations.bound(&compacted, 0), None);
        let mut other = next.clone();
        other.conversation = "subagent".into();
        assert_eq!(conversations.bound(&other, 0), None);
        next.messages.truncate(1);
        assert_eq!(conversations.bound(&next, 0), None);
    }

    #[test]
    fn images_weigh_the_models_maximum_and_not_their_bytes() {
        let image = Image { media_type: "image/png".into(), base64: "A".repeat(1 << 20) };
        let result = Block::ToolResult {
            tool_use_id: "t".into(),
            content: vec![ResultPart::Image(image.clone())],
            is_error: false,
        };
        let call = Block::ToolUse { id: "t".into(), name: "Read".into(), input: RawJson::new("{}") };
        let weight = weigh(
            &request(vec![
                Message::assistant(vec![call]),
                Message::results(vec![result, Block::Image(image)]),
            ]),
            5000,
        );
        assert!((10_000..10_000 + HIDDEN_TOKENS + 500).contains(&weight), "{weight}");
    }
}
