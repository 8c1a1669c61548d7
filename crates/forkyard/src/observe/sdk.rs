//! What Temporal's SDK measures of itself, in a meter of ours: under the names that it has in every language, for Prometheus and
//! for OTLP alike.

use std::borrow::Cow;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use forkyard_temporal::sdk_metrics as temporal;
use forkyard_temporal::sdk_metrics::{
    CoreMeter, CounterBase, GaugeBase, GaugeF64Base, HistogramBase, HistogramDurationBase, HistogramF64Base,
    MetricAttributable, MetricAttributes, MetricParameters, NewAttributes, OrderedPromLabelSet,
    UpDownCounterBase, default_buckets_for,
};
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Counter, Gauge, Histogram, Meter, UpDownCounter};

const PREFIX: &str = "temporal_";

#[derive(Debug)]
pub struct SdkMeter(Meter);

impl SdkMeter {
    pub fn new(meter: Meter) -> SdkMeter {
        SdkMeter(meter)
    }
}

/// An instrument that is given its labels later.
struct Open<I>(I);

/// An instrument with its labels.
struct Bound<I> {
    instrument: I,
    labels: Vec<KeyValue>,
}

/// The SDK keeps the labels that this meter made of its attributes.
fn labels(attributes: &MetricAttributes) -> Vec<KeyValue> {
    match attributes {
        MetricAttributes::Prometheus { labels } => labels
            .as_prom_labels()
            .into_iter()
            .map(|(name, value)| KeyValue::new(name.to_string(), value))
            .collect(),
        _ => vec![],
    }
}

macro_rules! bind {
    ($base:ident for $instrument:ty: |$this:ident, $value:ident: $kind:ty| $method:ident => $record:expr) => {
        impl MetricAttributable<Box<dyn $base>> for Open<$instrument> {
            fn with_attributes(
                &self,
                attributes: &MetricAttributes,
            ) -> Result<Box<dyn $base>, Box<dyn Error>> {
                Ok(Box::new(Bound { instrument: self.0.clone(), labels: labels(attributes) }))
            }
        }
        impl $base for Bound<$instrument> {
            fn $method(&self, $value: $kind) {
                let $this = self;
                $record
            }
        }
    };
}

bind!(CounterBase for Counter<u64>: |of, n: u64| adds => of.instrument.add(n, &of.labels));
bind!(UpDownCounterBase for UpDownCounter<i64>: |of, n: i64| adds => of.instrument.add(n, &of.labels));
bind!(GaugeBase for Gauge<u64>: |of, n: u64| records => of.instrument.record(n, &of.labels));
bind!(GaugeF64Base for Gauge<f64>: |of, n: f64| records => of.instrument.record(n, &of.labels));
bind!(HistogramBase for Histogram<u64>: |of, n: u64| records => of.instrument.record(n, &of.labels));
bind!(HistogramF64Base for Histogram<f64>: |of, n: f64| records => of.instrument.record(n, &of.labels));
// In milliseconds, as the SDK's own exporter has them.
bind!(HistogramDurationBase for Histogram<f64>: |of, time: Duration| records =>
    of.instrument.record(time.as_secs_f64() * 1e3, &of.labels));

fn name(p: &MetricParameters) -> Cow<'static, str> {
    format!("{PREFIX}{}", p.name).into()
}

impl SdkMeter {
    fn milliseconds(&self, p: &MetricParameters) -> Histogram<f64> {
        let buckets = default_buckets_for(&p.name, false).to_vec();
        let built = self.0.f64_histogram(name(p)).with_description(p.description.clone());
        built.with_boundaries(buckets).build()
    }
}

impl CoreMeter for SdkMeter {
    fn new_attributes(&self, attributes: NewAttributes) -> MetricAttributes {
        MetricAttributes::Prometheus { labels: Arc::new(attributes.into()) }
    }
    fn extend_attributes(&self, existing: MetricAttributes, more: NewAttributes) -> MetricAttributes {
        let mut labels = match existing {
            MetricAttributes::Prometheus { labels } => (*labels).clone(),
            _ => OrderedPromLabelSet::new(),
        };
        for pair in more.attributes {
            labels.add_kv(pair);
        }
        MetricAttributes::Prometheus { labels: Arc::new(labels) }
    }
    fn counter(&self, p: MetricParameters) -> temporal::Counter {
        let counter = self.0.u64_counter(name(&p)).with_description(p.description).build();
        temporal::Counter::new(Arc::new(Open(counter)))
    }
    fn up_down_counter(&self, p: MetricParameters) -> temporal::UpDownCounter {
        let counter = self.0.i64_up_down_counter(name(&p)).with_description(p.description).build();
        temporal::UpDownCounter::new(Arc::new(Open(counter)))
    }
    fn gauge(&self, p: MetricParameters) -> temporal::Gauge {
        let gauge = self.0.u64_gauge(name(&p)).with_description(p.description).build();
        temporal::Gauge::new(Arc::new(Open(gauge)))
    }
    fn gauge_f64(&self, p: MetricParameters) -> temporal::GaugeF64 {
        let gauge = self.0.f64_gauge(name(&p)).with_description(p.description).build();
        temporal::GaugeF64::new(Arc::new(Open(gauge)))
    }
    fn histogram(&self, p: MetricParameters) -> temporal::Histogram {
        let histogram = self.0.u64_histogram(name(&p)).with_description(p.description).build();
        temporal::Histogram::new(Arc::new(Open(histogram)))
    }
    fn histogram_f64(&self, p: MetricParameters) -> temporal::HistogramF64 {
        let histogram = self.0.f64_histogram(name(&p)).with_description(p.description).build();
        temporal::HistogramF64::new(Arc::new(Open(histogram)))
    }
    fn histogram_duration(&self, p: MetricParameters) -> temporal::HistogramDuration {
        temporal::HistogramDuration::new(Arc::new(Open(self.milliseconds(&p))))
    }
}
