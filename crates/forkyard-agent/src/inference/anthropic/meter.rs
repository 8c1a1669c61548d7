//! Reads off a passing answer what it costs, and keeps nothing else of it.

use forkyard_core::pricing::Usage;
use serde::Deserialize;

use super::super::sse::{EventTooLong, SseParser};
use super::decode::WireUsage;

/// A whole answer that was not streamed; larger ones are taken at their worst case.
const MAX_WHOLE_BYTES: usize = 8 << 20;

pub enum Meter {
    Stream {
        parser: SseParser,
        usage: WireUsage,
        done: bool,
    },
    /// None once it was too large.
    Whole(Option<Vec<u8>>),
}

/// Of the events that matter.
#[derive(Deserialize)]
struct Event {
    r#type: String,
    message: Option<Reported>,
    usage: Option<WireUsage>,
}

#[derive(Deserialize)]
struct Reported {
    usage: Option<WireUsage>,
}

impl Meter {
    pub fn new(streams: bool) -> Meter {
        if streams {
            Meter::Stream { parser: SseParser::default(), usage: WireUsage::default(), done: false }
        } else {
            Meter::Whole(Some(Vec::new()))
        }
    }

    /// The usage so far, if this chunk said something of it.
    pub fn read(&mut self, chunk: &[u8]) -> Result<Option<Usage>, EventTooLong> {
        match self {
            Meter::Stream { parser, usage, done } => {
                let mut news = false;
                parser.push(chunk)?;
                while let Some(event) = parser.next_event() {
                    // What can't be read says nothing; the answer is then taken at its worst case.
                    let Ok(event) = serde_json::from_slice::<Event>(&event.data) else { continue };
                    let reported = match event.r#type.as_str() {
                        "message_start" => event.message.and_then(|m| m.usage),
                        "message_delta" => event.usage,
                        "message_stop" => {
                            *done = true;
                            None
                        }
                        _ => None,
                    };
                    if let Some(new) = reported {
                        usage.update(new);
                        news = true;
                    }
                }
                Ok(if news { usage.usage() } else { None })
            }
            Meter::Whole(body) => {
                if let Some(bytes) = body {
                    bytes.extend_from_slice(chunk);
                    if bytes.len() > MAX_WHOLE_BYTES {
                        *body = None;
                    }
                }
                Ok(None)
            }
        }
    }

    /// The answer has said that it is whole; one that is not streamed only ends.
    pub fn is_done(&self) -> bool {
        match self {
            Meter::Stream { done, .. } => *done,
            Meter::Whole(_) => false,
        }
    }

    /// What the answer cost, if all of it passed.
    pub fn finish(&self) -> Option<Usage> {
        match self {
            Meter::Stream { usage, done, .. } => usage.usage().filter(|_| *done),
            Meter::Whole(body) => serde_json::from_slice::<Reported>(body.as_ref()?).ok()?.usage?.usage(),
        }
    }
}
