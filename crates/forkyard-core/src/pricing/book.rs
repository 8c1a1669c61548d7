//! The price list, and what a request costs by it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{CacheTtl, InputKind, Usage};
use crate::Usd;

const EMBEDDED: &str = include_str!("models.json");

/// Tokens that a price is given for.
const PER_TOKENS: u128 = 1_000_000;

/// What an image is counted at when a model does not say: the largest of those known.
const DEFAULT_IMAGE_TOKENS: u64 = 5_000;

/// What a model is taken to read when it does not say: what today's read at least.
pub const DEFAULT_CONTEXT_TOKENS: u64 = 200_000;

/// A model as users and the embedded list write it. Prices are USD per million tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Other names for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    pub input: f64,
    pub output: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_5m: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_1h: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read: Option<f64>,
    /// Prompts of more tokens than this are charged by `long` as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_over: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long: Option<RateSpec>,
    /// The model decides how much it thinks and has to be told so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adaptive_thinking: bool,
    /// The most tokens that one image can become.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_tokens: Option<u64>,
    /// The most that it reads, prompt and answer together. A conversation is summarised before it gets there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u64>,
}

impl ModelSpec {
    fn rates(&self) -> RateSpec {
        RateSpec {
            input: self.input,
            output: self.output,
            cache_write_5m: self.cache_write_5m,
            cache_write_1h: self.cache_write_1h,
            cache_read: self.cache_read,
        }
    }
}

/// Kinds that are left out cost what plain input costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateSpec {
    pub input: f64,
    pub output: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_5m: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_1h: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPrice {
    #[error("prices.{model}.{field} = {value}: not a price; write USD per million tokens, 0 or more")]
    Value { model: String, field: &'static str, value: String },
    #[error("prices.{model}: long_over and long belong together; give both or neither")]
    HalfTier { model: String },
    #[error("prices.{model}: the alias {alias:?} already means {other:?}")]
    AliasTaken { model: String, alias: String, other: String },
}

/// Prices of a million tokens, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    pub input: Usd,
    pub output: Usd,
    pub cache_write_5m: Usd,
    pub cache_write_1h: Usd,
    pub cache_read: Usd,
}

impl Rates {
    fn parse(model: &str, spec: &RateSpec) -> Result<Rates, BadPrice> {
        let price = |field, value: f64| {
            Usd::from_dollars(value).ok_or_else(|| BadPrice::Value {
                model: model.to_string(),
                field,
                value: value.to_string(),
            })
        };
        Ok(Rates {
            input: price("input", spec.input)?,
            output: price("output", spec.output)?,
            cache_write_5m: price("cache_write_5m", spec.cache_write_5m.unwrap_or(spec.input))?,
            cache_write_1h: price("cache_write_1h", spec.cache_write_1h.unwrap_or(spec.input))?,
            cache_read: price("cache_read", spec.cache_read.unwrap_or(spec.input))?,
        })
    }

    /// Rounded up once, to whole nano-dollars; the listed prices never need it.
    fn cost(&self, usage: &Usage) -> Usd {
        let parts = [
            (usage.input, self.input),
            (usage.output, self.output),
            (usage.cache_write_5m, self.cache_write_5m),
            (usage.cache_write_1h, self.cache_write_1h),
            (usage.cache_read, self.cache_read),
        ];
        let sum: u128 = parts.iter().map(|(tokens, price)| u128::from(*tokens) * u128::from(price.0)).sum();
        Usd(u64::try_from(sum.div_ceil(PER_TOKENS)).unwrap_or(u64::MAX))
    }

    /// The dearest input that this kind of request can cause: each token may miss the cache, hit it, or be written to it.
    fn dearest_input(&self, kind: InputKind) -> Usd {
        let plain = self.input.max(self.cache_read);
        match kind {
            InputKind::Plain => plain,
            // A longer-lived part may stand before a shorter-lived one.
            InputKind::Cached(CacheTtl::FiveMinutes) => plain.max(self.cache_write_5m),
            InputKind::Cached(CacheTtl::OneHour) => plain.max(self.cache_write_5m).max(self.cache_write_1h),
        }
    }

    fn worst(&self, kind: InputKind, input: u64, output: u64) -> Usd {
        let dearest = Rates { input: self.dearest_input(kind), ..*self };
        dearest.cost(&Usage { input, output, ..Usage::default() })
    }
}

/// One model's prices and what else has to be known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFacts {
    pub rates: Rates,
    /// Prompts over this many tokens, and their rates.
    pub long: Option<(u64, Rates)>,
    pub adaptive_thinking: bool,
    pub image_tokens: u64,
    pub context_tokens: u64,
}

impl ModelFacts {
    fn rates_for(&self, prompt: u64) -> &Rates {
        match &self.long {
            Some((over, rates)) if prompt > *over => rates,
            Some(_) | None => &self.rates,
        }
    }

    pub fn cost(&self, usage: &Usage) -> Usd {
        self.rates_for(usage.prompt()).cost(usage)
    }

    /// The most that a request can cost with at most this much input and output, whatever the cache does.
    pub fn worst_case(&self, kind: InputKind, input: u64, output: u64) -> Usd {
        let short = match &self.long {
            // Cheaper than `long` or not: a prompt that stays just within the limit counts too.
            Some((over, _)) => self.rates.worst(kind, input.min(*over), output),
            None => self.rates.worst(kind, input, output),
        };
        match &self.long {
            Some((over, long)) if input > *over => short.max(long.worst(kind, input, output)),
            Some(_) | None => short,
        }
    }

    /// The most output tokens that `money` pays for beside this input, in the worst case.
    pub fn affordable_output(&self, kind: InputKind, input: u64, money: Usd) -> u64 {
        let fits = |output: u64| self.worst_case(kind, input, output) <= money;
        if !fits(0) {
            return 0;
        }
        // Worst cases only grow with the output, so halving finds the last one that fits.
        let (mut low, mut high) = (0_u64, u64::from(u32::MAX));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }
}

/// Every model with a price.
#[derive(Debug, Clone)]
pub struct PriceBook {
    models: BTreeMap<String, ModelFacts>,
    aliases: BTreeMap<String, String>,
}

impl Default for PriceBook {
    fn default() -> PriceBook {
        let specs: BTreeMap<String, ModelSpec> =
            serde_json::from_str(EMBEDDED).expect("the embedded list is checked by a test");
        let empty = PriceBook { models: BTreeMap::new(), aliases: BTreeMap::new() };
        empty.with(&specs).expect("the embedded list is checked by a test")
    }
}

impl PriceBook {
    /// The same book with models added or replaced. An alias of an overriding model takes the alias over from an older one,
    /// but two models of the same list can't share one.
    pub fn with(mut self, specs: &BTreeMap<String, ModelSpec>) -> Result<PriceBook, BadPrice> {
        let mut taken: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, spec) in specs {
            let long = match (spec.long_over, &spec.long) {
                (Some(over), Some(rates)) => Some((over, Rates::parse(name, rates)?)),
                (None, None) => None,
                (Some(_), None) | (None, Some(_)) => return Err(BadPrice::HalfTier { model: name.clone() }),
            };
            for alias in &spec.aliases {
                if let Some(other) = taken.insert(alias, name) {
                    return Err(BadPrice::AliasTaken {
                        model: name.clone(),
                        alias: alias.clone(),
                        other: other.to_string(),
                    });
                }
                self.aliases.insert(alias.clone(), name.clone());
            }
            let facts = ModelFacts {
                rates: Rates::parse(name, &spec.rates())?,
                long,
                adaptive_thinking: spec.adaptive_thinking,
                image_tokens: spec.image_tokens.unwrap_or(DEFAULT_IMAGE_TOKENS),
                context_tokens: spec.context_tokens.unwrap_or(DEFAULT_CONTEXT_TOKENS),
            };
            self.models.insert(name.clone(), facts);
        }
        Ok(self)
    }

    /// The model's full name: `sonnet` is `claude-sonnet-5-5`. A name that is no alias is itself.
    pub fn resolve<'a>(&'a self, name: &'a str) -> &'a str {
        if self.models.contains_key(name) {
            return name;
        }
        self.aliases.get(name).map_or(name, String::as_str)
    }

    /// By name or alias; a dated release (`…-20261001`) has the price of its model.
    pub fn get(&self, name: &str) -> Option<&ModelFacts> {
        let name = self.resolve(name);
        self.models.get(name).or_else(|| {
            let (stem, date) = name.rsplit_once('-')?;
            let dated = date.len() == 8 && date.bytes().all(|b| b.is_ascii_digit());
            if dated { self.models.get(self.resolve(stem)) } else { None }
        })
    }

    pub fn models(&self) -> impl Iterator<Item = (&str, &ModelFacts)> {
        self.models.iter().map(|(name, facts)| (name.as_str(), facts))
    }
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        self.aliases.iter().map(|(alias, name)| (alias.as_str(), name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn book() -> PriceBook {
        PriceBook::default()
    }

    #[test]
    fn listed_prices_are_exact() {
        let sonnet = book();
        let sonnet = sonnet.get("sonnet").unwrap();
        let usage = Usage { input: 1, output: 1, cache_write_5m: 1, cache_write_1h: 1, cache_read: 1 };
        assert_eq!(sonnet.cost(&usage), Usd::nanos(2_000 + 10_000 + 2_500 + 4_000 + 100));
        let million = Usage { input: 1_000_000, ..Usage::default() };
        assert_eq!(sonnet.cost(&million), Usd::dollars(2));
    }

    #[test]
    fn long_prompts_are_charged_by_their_own_rates_as_a_whole() {
        let book = book();
        let haiku = book.get("haiku").unwrap();
        let at = Usage { cache_read: 100_000, output: 10, ..Usage::default() };
        let over = Usage { cache_read: 100_001, output: 10, ..Usage::default() };
        assert_eq!(haiku.cost(&at), Usd::nanos(100_000 * 10 + 10 * 500));
        assert_eq!(haiku.cost(&over), Usd::nanos(100_001 * 50 + 10 * 2_500));
    }

    #[test]
    fn aliases_dates_and_overrides_resolve() {
        let book = book();
        assert_eq!(book.resolve("opus"), "claude-opus-5-5");
        assert_eq!(book.resolve("llama"), "llama");
        assert_eq!(book.get("claude-haiku-4-5-20251001"), book.get("claude-haiku-4-5"));
        assert_eq!(book.get("llama"), None);
        assert_eq!(book.get("claude-haiku-4-5-2025"), None);

        let own: BTreeMap<String, ModelSpec> =
            serde_json::from_str(r#"{"llama": {"input": 0.0375, "output": 0.1, "aliases": ["sonnet"]}}"#)
                .unwrap();
        let book = book.with(&own).unwrap();
        assert_eq!(book.resolve("sonnet"), "llama");
        // 37.5 nano-dollars a token: rounded up once for the request, not for each token.
        assert_eq!(book.get("llama").unwrap().cost(&Usage { input: 3, ..Usage::default() }), Usd::nanos(113));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let bad = |json: &str| book().with(&serde_json::from_str(json).unwrap()).unwrap_err().to_string();
        assert!(bad(r#"{"m": {"input": -1, "output": 1}}"#).contains("prices.m.input = -1"));
        assert!(bad(r#"{"m": {"input": 1, "output": 1, "long_over": 5}}"#).contains("long_over"));
        let twice =
            r#"{"m": {"input":1,"output":1,"aliases":["x"]}, "n": {"input":1,"output":1,"aliases":["x"]}}"#;
        assert!(bad(twice).contains("\"x\""));
    }

    proptest! {
        #[test]
        fn the_worst_case_covers_every_split_of_the_tokens(
            model in prop::sample::select(vec!["haiku", "sonnet", "opus", "fable", "claude-haiku-4-5"]),
            parts in prop::array::uniform5(0_u64..150_000),
            slack in 0_u64..1000,
        ) {
            let book = book();
            let facts = book.get(model).unwrap();
            let [input, output, cache_write_5m, cache_write_1h, cache_read] = parts;
            let usage = Usage { input, output, cache_write_5m, cache_write_1h, cache_read };
            let worst = facts.worst_case(InputKind::Cached(CacheTtl::OneHour), usage.prompt() + slack, output + slack);
            prop_assert!(facts.cost(&usage) <= worst);
            let short_lived = Usage { cache_write_1h: 0, ..usage };
            let worst = facts.worst_case(InputKind::Cached(CacheTtl::FiveMinutes), short_lived.prompt(), output);
            prop_assert!(facts.cost(&short_lived) <= worst);
            let plain = Usage { input, output, cache_read, ..Usage::default() };
            prop_assert!(facts.cost(&plain) <= facts.worst_case(InputKind::Plain, plain.prompt(), output));
        }

        #[test]
        fn affordable_output_is_the_last_that_fits(input in 0_u64..300_000, nanos in 0_u64..5_000_000_000) {
            let book = book();
            let facts = book.get("haiku").unwrap();
            let kind = InputKind::Cached(CacheTtl::FiveMinutes);
            let output = facts.affordable_output(kind, input, Usd::nanos(nanos));
            if output > 0 {
                prop_assert!(facts.worst_case(kind, input, output) <= Usd::nanos(nanos));
            }
            prop_assert!(facts.worst_case(kind, input, output + 1) > Usd::nanos(nanos));
        }
    }
}
