//! From settings to a backend: the one place that knows all of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkyard_core::pricing::CacheTtl;

use super::anthropic::Anthropic;
use super::backend::Backend;
use super::http::{HttpBackend, Timeouts, Wire};
use super::openai::OpenAi;
use super::record::{BadRecording, Recorder, Replay};
use super::script::{BadScript, Script, ScriptBackend};
use super::transport::{BadEndpoint, Live, Transport};

/// Who answers.
#[derive(Clone)]
pub enum Provider {
    Anthropic { key: String, base_url: String, shared_ttl: CacheTtl },
    OpenAi { key: Option<String>, base_url: String },
    Script { path: PathBuf },
}

/// What passes between the layer and a provider over HTTP.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Traffic {
    #[default]
    Live,
    /// Live, and written to this new file.
    Record(PathBuf),
    /// From this file; no key is needed.
    Replay(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub enum BadProvider {
    #[error(transparent)]
    Endpoint(#[from] BadEndpoint),
    #[error(transparent)]
    Script(#[from] BadScript),
    #[error(transparent)]
    Recording(#[from] BadRecording),
    #[error("can't record to {path}: {source}")]
    Record { path: String, source: std::io::Error },
    #[error("a script needs no network: there is nothing to record or replay")]
    NoTraffic,
    #[error("the key of {provider} is empty")]
    NoKey { provider: &'static str },
}

impl Provider {
    pub fn open(&self, traffic: &Traffic, timeouts: Timeouts) -> Result<Arc<dyn Backend>, BadProvider> {
        match self {
            Provider::Anthropic { key, base_url, shared_ttl } => {
                if key.trim().is_empty() && !matches!(traffic, Traffic::Replay(_)) {
                    return Err(BadProvider::NoKey { provider: "anthropic" });
                }
                let wire = Anthropic::new(key).shared_ttl(*shared_ttl);
                over_http(wire, Some(key), base_url, traffic, timeouts)
            }
            Provider::OpenAi { key, base_url } => {
                over_http(OpenAi::new(key.clone(), base_url), key.as_deref(), base_url, traffic, timeouts)
            }
            Provider::Script { path } => match traffic {
                Traffic::Live => Ok(Arc::new(ScriptBackend::new(Script::open(path)?))),
                Traffic::Record(_) | Traffic::Replay(_) => Err(BadProvider::NoTraffic),
            },
        }
    }
}

fn over_http<W: Wire + 'static>(
    wire: W,
    key: Option<&str>,
    base_url: &str,
    traffic: &Traffic,
    timeouts: Timeouts,
) -> Result<Arc<dyn Backend>, BadProvider> {
    let transport: Arc<dyn Transport> = match traffic {
        Traffic::Live => Arc::new(Live::new(base_url)?),
        Traffic::Record(path) => Arc::new(record(Live::new(base_url)?, path, key)?),
        Traffic::Replay(path) => Arc::new(Replay::open(path)?),
    };
    Ok(Arc::new(HttpBackend::new(wire, transport, timeouts)))
}

fn record(live: Live, path: &Path, key: Option<&str>) -> Result<Recorder, BadProvider> {
    let secrets = key.into_iter().map(str::to_string).collect();
    Recorder::create(Arc::new(live), path, secrets)
        .map_err(|source| BadProvider::Record { path: path.display().to_string(), source })
}
