//! Logs on standard error, and spans to whoever collects traces.

use opentelemetry_sdk::trace::SdkTracer;
use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::settings::LogFormat;

pub fn start(filter: &str, format: LogFormat, tracer: Option<SdkTracer>) {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("warn"));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    };
    // Spans are ours and have no contents in them; what is logged may quote a repository, and stays here.
    let ours = filter_fn(|m| m.is_span() && *m.level() <= Level::INFO && m.target().starts_with("forkyard"));
    let traces = tracer.map(|t| {
        tracing_opentelemetry::layer()
            .with_tracer(t)
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(ours)
    });
    // Fails only if somebody listens already.
    let _ = tracing_subscriber::registry().with(lines).with(traces).try_init();
}
