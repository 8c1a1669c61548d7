//! What a process that drives runs shows of itself: metrics for Prometheus and by OTLP, traces by OTLP, logs.
//!
//! Nothing else in Forkyard knows a metric. Counters follow from the recorded events of the runs that this process drives
//! ([`counts`]), so that the processes of one store add up; gauges are asked of the store, the engine and the models when
//! somebody looks ([`gauges`]). Traces are the spans that agents and activities open anyway.

mod counts;
mod gauges;
mod logs;
mod otlp;
mod sdk;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use forkyard_temporal::Counted;
use forkyard_temporal::sdk_metrics::CoreMeter;
use opentelemetry::metrics::MeterProvider;
use opentelemetry_prometheus::ExporterBuilder;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::error::{CliError, Result};
use crate::settings::Settings;
use crate::yard::Yard;
use counts::Counts;
use gauges::Gauges;
use otlp::Otlp;

/// Gauges that are sent and not asked for are this old at most.
const GAUGES_EVERY: Duration = Duration::from_secs(10);

/// Open from the start of a command to its end.
pub struct Observer {
    otlp: Option<Otlp>,
    /// Metrics are served at a port.
    serves: bool,
    /// Of a worker for Temporal.
    temporal: Option<Temporal>,
}

struct Temporal {
    provider: SdkMeterProvider,
    registry: Registry,
    counted: Counted,
}

/// What a worker for Temporal shows itself by.
#[derive(Default)]
pub struct Watched {
    /// Where the SDK's own metrics go; None: nobody looks.
    pub meter: Option<Arc<dyn CoreMeter>>,
    /// Runs whose events this process counts.
    pub counted: Option<Counted>,
}

impl Observer {
    /// Logs to standard error from now on; traces too, if there is somewhere to send them.
    pub fn start(s: &Settings, serves: bool) -> Result<Observer> {
        let otlp = Otlp::open(s)?;
        logs::start(&s.log, s.log_format, otlp.as_ref().map(Otlp::tracer));
        Ok(Observer { otlp, serves: serves && s.metrics, temporal: None })
    }

    /// The process is a worker for Temporal: what its SDK measures is told beside what we count, under the SDK's own names.
    pub fn watch_temporal(&mut self, s: &Settings) -> Watched {
        if !self.serves && self.otlp.is_none() {
            return Watched::default();
        }
        let (registry, counted) = (Registry::new(), Counted::default());
        let exporter = exporter(&registry).without_counter_suffixes().without_target_info();
        let provider = self.provider(s, exporter);
        let meter = Arc::new(sdk::SdkMeter::new(provider.meter("temporal")));
        self.temporal = Some(Temporal { provider, registry, counted: counted.clone() });
        Watched { meter: Some(meter), counted: Some(counted) }
    }

    fn provider(&self, s: &Settings, exporter: ExporterBuilder) -> SdkMeterProvider {
        let mut builder = SdkMeterProvider::builder().with_resource(otlp::resource(s));
        if self.serves {
            match exporter.build() {
                Ok(exporter) => builder = builder.with_reader(exporter),
                Err(e) => tracing::warn!("there are no metrics: {e}"),
            }
        }
        if let Some(otlp) = &self.otlp {
            match otlp.metrics(s) {
                Ok(reader) => builder = builder.with_reader(reader),
                Err(e) => tracing::warn!("metrics are not sent: {e}"),
            }
        }
        builder.build()
    }

    fn counted(&self) -> Option<&Counted> {
        self.temporal.as_ref().map(|t| &t.counted)
    }

    /// Does `work`, and tells of it meanwhile.
    pub async fn over<T>(self, yard: &Yard, work: impl Future<Output = T>) -> T {
        let done = CancellationToken::new();
        let work = async {
            let result = work.await;
            done.cancel();
            result
        };
        let (result, ()) = tokio::join!(work, tell(yard, &self, done.clone()));
        if let Some(otlp) = self.otlp {
            // It waits for the network, on a thread of its own.
            let _ = tokio::task::spawn_blocking(move || otlp.end()).await;
        }
        result
    }
}

async fn tell(yard: &Yard, observer: &Observer, stop: CancellationToken) {
    let s = &yard.settings;
    if !observer.serves && observer.otlp.is_none() {
        return;
    }
    let registry = Registry::new();
    let provider = observer.provider(s, exporter(&registry));
    let registries = match &observer.temporal {
        Some(temporal) => vec![registry, temporal.registry.clone()],
        None => vec![registry],
    };
    let meter = provider.meter("forkyard");
    let gauges = Arc::new(Gauges::new(&meter, yard));
    let refreshing = async {
        loop {
            gauges.read().await;
            tokio::time::sleep(GAUGES_EVERY).await;
        }
    };
    let serving = async {
        if observer.serves {
            serve(s, registries, gauges.clone(), stop.clone()).await;
        }
        std::future::pending().await
    };
    // Only the counting ends, when all is counted.
    tokio::select! {
        () = counts::follow(yard, observer.counted(), Counts::new(&meter), stop.clone()) => {}
        () = refreshing => {}
        () = serving => {}
    }
    let mut providers = vec![provider];
    providers.extend(observer.temporal.as_ref().map(|t| t.provider.clone()));
    for provider in providers {
        let ended = tokio::task::spawn_blocking(move || provider.shutdown()).await;
        if let Ok(Err(e)) = ended {
            tracing::debug!("metrics: {e}");
        }
    }
}

fn exporter(registry: &Registry) -> ExporterBuilder {
    opentelemetry_prometheus::exporter()
        .with_registry(registry.clone())
        .without_units()
        .scope_info_enabled(false)
}

/// On loopback alone, unless a setting says otherwise: who runs what, and for how much, is nobody else's business.
async fn serve(s: &Settings, registries: Vec<Registry>, gauges: Arc<Gauges>, stop: CancellationToken) {
    let address = SocketAddr::new(s.metrics_address, s.metrics_port);
    let listener = match TcpListener::bind(address).await {
        Ok(listener) => listener,
        Err(e) => {
            tracing::warn!(
                "no metrics at {address}: {e}; set METRICS_PORT to another port, or DISABLE_METRICS to true"
            );
            return;
        }
    };
    let answer = move || {
        let (registries, gauges) = (registries.clone(), gauges.clone());
        async move {
            gauges.read().await;
            let all: Vec<_> = registries.iter().flat_map(Registry::gather).collect();
            let text = TextEncoder::new().encode_to_string(&all).unwrap_or_default();
            ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text)
        }
    };
    forkyard_server::serve(listener, Router::new().route("/metrics", get(answer)), None, stop).await;
}

fn failure(what: &str, e: &dyn std::fmt::Display) -> CliError {
    CliError::usage(format!("{what}: {e}"))
}
