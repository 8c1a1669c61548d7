//! From a model's name to who answers. One layer for each provider, so that all forks of a process share one limiter.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use forkyard_agent::inference::{
    ANTHROPIC_BASE_URL, Inference, InferenceSettings, OPENAI_BASE_URL, Pressure, Provider, Timeouts, Traffic,
};
use forkyard_core::pricing::{CacheTtl, PriceBook};
use forkyard_core::spec::ModelKnown;

#[derive(Debug, Clone, Default)]
pub struct ModelsConfig {
    pub anthropic_key: Option<String>,
    pub anthropic_url: Option<String>,
    pub openai_key: Option<String>,
    pub openai_url: Option<String>,
    pub record: Option<PathBuf>,
    pub replay: Option<PathBuf>,
    pub prices: PriceBook,
}

/// `script:FILE`, `openai:NAME`, or a model of the price list.
pub const SCRIPT: &str = "script:";
pub const OPENAI: &str = "openai:";

pub struct Models {
    config: ModelsConfig,
    /// By provider: `anthropic`, `openai`, or a script's path.
    open: Mutex<BTreeMap<String, Inference>>,
}

impl Models {
    pub fn new(config: ModelsConfig) -> Models {
        Models { config, open: Mutex::default() }
    }

    pub fn known(&self, model: &str) -> ModelKnown {
        if let Some(path) = model.strip_prefix(SCRIPT) {
            return if path.is_empty() { ModelKnown::No } else { ModelKnown::Priced };
        }
        if self.config.prices.get(model).is_some() {
            return ModelKnown::Priced;
        }
        match model.strip_prefix(OPENAI) {
            Some(name) if self.config.prices.get(name).is_some() => ModelKnown::Priced,
            Some(name) if !name.is_empty() => ModelKnown::Unpriced,
            Some(_) | None => ModelKnown::No,
        }
    }

    /// Short names first, then those of the price list.
    pub fn names(&self) -> Vec<String> {
        let aliases = self.config.prices.aliases().map(|(alias, _)| alias);
        aliases.chain(self.config.prices.models().map(|(name, _)| name)).map(String::from).collect()
    }

    /// Whether the model can be asked at all: a key is there, a script can be read. The reason and the fix, if not.
    pub fn check(&self, model: &str) -> Result<(), String> {
        self.open(model).map(|_| ())
    }

    /// The layer, and the name that the provider knows the model by.
    pub fn open(&self, model: &str) -> Result<(Inference, String), String> {
        let (key, provider, name) = self.provider(model)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inference) = open.get(&key) {
            return Ok((inference.clone(), name));
        }
        let traffic = match (&self.config.record, &self.config.replay, &provider) {
            (_, _, Provider::Script { .. }) => Traffic::Live,
            (Some(path), _, _) => Traffic::Record(path.clone()),
            (None, Some(path), _) => Traffic::Replay(path.clone()),
            (None, None, _) => Traffic::Live,
        };
        let backend = provider.open(&traffic, Timeouts::default()).map_err(|e| e.to_string())?;
        let inference = Inference::new(backend, self.config.prices.clone(), InferenceSettings::default());
        open.insert(key, inference.clone());
        Ok((inference, name))
    }

    /// How the providers that were asked take it, by name.
    pub fn pressure(&self) -> BTreeMap<&'static str, Pressure> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.values().map(|inference| (inference.provider(), inference.pressure())).collect()
    }

    fn provider(&self, model: &str) -> Result<(String, Provider, String), String> {
        let c = &self.config;
        if let Some(path) = model.strip_prefix(SCRIPT) {
            let provider = Provider::Script { path: PathBuf::from(path) };
            return Ok((model.to_string(), provider, "script".to_string()));
        }
        if let Some(name) = model.strip_prefix(OPENAI) {
            let base_url = c.openai_url.clone().unwrap_or_else(|| OPENAI_BASE_URL.to_string());
            return Ok((
                "openai".into(),
                Provider::OpenAi { key: c.openai_key.clone(), base_url },
                name.into(),
            ));
        }
        let key = match (&c.anthropic_key, &c.replay) {
            (Some(key), _) => key.clone(),
            (None, Some(_)) => String::new(),
            (None, None) => {
                return Err(format!(
                    "{model} needs an Anthropic key: set ANTHROPIC_API_KEY, or try `forkyard demo`, which needs none"
                ));
            }
        };
        let base_url = c.anthropic_url.clone().unwrap_or_else(|| ANTHROPIC_BASE_URL.to_string());
        let provider = Provider::Anthropic { key, base_url, shared_ttl: CacheTtl::FiveMinutes };
        Ok(("anthropic".into(), provider, c.prices.resolve(model).to_string()))
    }
}
