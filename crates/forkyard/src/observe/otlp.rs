//! Traces and metrics by OTLP over HTTP. What can't be sent is logged and dropped: nothing waits for a collector.

use std::collections::HashMap;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{
    ExporterBuildError, MetricExporter, Protocol, SpanExporter, WithExportConfig, WithHttpConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::PeriodicReader;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

use super::failure;
use crate::error::{CliError, Result};
use crate::settings::Settings;

/// One request to the collector, and all that is left at the end.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct Otlp {
    endpoint: String,
    headers: HashMap<String, String>,
    tracers: SdkTracerProvider,
}

impl Otlp {
    pub fn open(s: &Settings) -> Result<Option<Otlp>> {
        let Some(endpoint) = &s.otlp_endpoint else { return Ok(None) };
        let endpoint = endpoint.trim_end_matches('/').to_string();
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(CliError::usage(format!("`otlp.endpoint` = {endpoint:?} is not a URL"))
                .hint("write http://HOST:4318, where a collector takes OTLP over HTTP"));
        }
        let headers = headers(s.otlp_headers.as_ref().map_or("", |h| h.expose()))?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{endpoint}/v1/traces"))
            .with_headers(headers.clone())
            .with_timeout(PATIENCE)
            .build()
            .map_err(|e| failure("otlp.endpoint", &e))?;
        let tracers =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource(s)).build();
        Ok(Some(Otlp { endpoint, headers, tracers }))
    }

    pub fn tracer(&self) -> SdkTracer {
        self.tracers.tracer("forkyard")
    }

    pub fn metrics(&self, s: &Settings) -> Result<PeriodicReader<MetricExporter>, ExporterBuildError> {
        let exporter = MetricExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/metrics", self.endpoint))
            .with_headers(self.headers.clone())
            .with_timeout(PATIENCE)
            .build()?;
        Ok(PeriodicReader::builder(exporter).with_interval(s.otlp_interval.as_duration()).build())
    }

    /// Sends what is left. Blocks.
    pub fn end(self) {
        if let Err(e) = self.tracers.shutdown_with_timeout(PATIENCE) {
            tracing::debug!("traces: {e}");
        }
    }
}

pub fn resource(s: &Settings) -> Resource {
    Resource::builder()
        .with_service_name(s.otlp_service.clone())
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build()
}

/// `name=value,name=value`.
fn headers(text: &str) -> Result<HashMap<String, String>> {
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        Some((name.trim().to_string(), value.trim().to_string()))
    };
    let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
    // The text may be a secret: it is not shown.
    let all: Option<HashMap<String, String>> = parts.map(pair).collect();
    all.ok_or_else(|| CliError::usage("`otlp.headers` is not understood").hint("write name=value,name=value"))
}
