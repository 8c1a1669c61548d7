//! What a process that drives runs shows of itself: metrics for Prometheus and by OTLP, traces by OTLP, logs.
//!
//! Nothing else in Forkyard knows a metric. Counters follow from the recorded events of the runs that this process drives
//! ([`counts`]), so that the processes of one store add up; gauges are asked of the store, the engine and the models when
//! somebody looks ([`gauges`]). Traces are the spans that agents and activities open anyway.

mod counts;
mod gauges;
mod logs;
mod otlp;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use opentelemetry::metrics::MeterProvider;
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
}

impl Observer {
    /// Logs to standard error from now on; traces too, if there is somewhere to send them.
    pub fn start(s: &Settings, serves: bool) -> Result<Observer> {
        let otlp = Otlp::open(s)?;
        logs::start(&s.log, s.log_format, otlp.as_ref().map(Otlp::tracer));
        Ok(Observer { otlp, serves: serves && s.metrics })
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
    let mut builder = SdkMeterProvider::builder().with_resource(otlp::resource(s));
    if observer.serves {
        let exporter = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .without_units()
            .scope_info_enabled(false)
            .build();
        match exporter {
            Ok(exporter) => builder = builder.with_reader(exporter),
            Err(e) => tracing::warn!("there are no metrics: {e}"),
        }
    }
    if let Some(otlp) = &observer.otlp {
        match otlp.metrics(s) {
            Ok(reader) => builder = builder.with_reader(reader),
            Err(e) => tracing::warn!("metrics are not sent: {e}"),
        }
    }
    let provider = builder.build();
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
            serve(s.metrics_port, registry, gauges.clone(), stop.clone()).await;
        }
        std::future::pending().await
    };
    // Only the counting ends, when all is counted.
    tokio::select! {
        () = counts::follow(yard, Counts::new(&meter), stop.clone()) => {}
        () = refreshing => {}
        () = serving => {}
    }
    let ended = tokio::task::spawn_blocking(move || provider.shutdown()).await;
    if let Ok(Err(e)) = ended {
        tracing::debug!("metrics: {e}");
    }
}

/// On loopback alone: who runs what, and for how much, is nobody else's business.
async fn serve(port: u16, registry: Registry, gauges: Arc<Gauges>, stop: CancellationToken) {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
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
        let (registry, gauges) = (registry.clone(), gauges.clone());
        async move {
            gauges.read().await;
            let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap_or_default();
            ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text)
        }
    };
    forkyard_server::serve(listener, Router::new().route("/metrics", get(answer)), None, stop).await;
}

fn failure(what: &str, e: &dyn std::fmt::Display) -> CliError {
    CliError::usage(format!("{what}: {e}"))
}
