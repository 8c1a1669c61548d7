//! What tokens cost. Prices are data: an embedded list that users may override or extend.

mod book;
mod usage;

pub use book::{BadPrice, DEFAULT_CONTEXT_TOKENS, ModelFacts, ModelSpec, PriceBook, RateSpec, Rates};
pub use usage::Usage;

/// How long a written prompt cache entry is kept: the longer, the dearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum CacheTtl {
    #[serde(rename = "5m")]
    FiveMinutes,
    #[serde(rename = "1h")]
    OneHour,
}

/// Which kinds of input tokens a request can cause: the dearest of them is what its worst case is counted at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// No cache is written.
    Plain,
    Cached(CacheTtl),
}
