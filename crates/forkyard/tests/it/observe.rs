//! Metrics, traces and logs of a real server: scraped by a real Prometheus, received by a collector of ours.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use reqwest::Method;
use serde_json::{Value, json};

use test_support::temporal::Temporal;

use super::World;
use super::serve::{PATIENCE, Server};

/// One that nobody has at this moment.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A run of two forks that has ended.
async fn a_run(w: &World, s: &Server) -> String {
    let body = json!({
        "repo": w.repo(), "prompt": "add a line", "model": w.model(), "forks": 2, "budget_usd": 5,
        "sandbox": { "network": "none" },
    });
    let made = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await;
    let run = made["id"].as_str().unwrap().to_string();
    let ended = s.until(&format!("/api/v1/runs/{run}"), |r| r["status"] == "ended").await;
    assert_eq!(ended["outcome"], "success", "{ended}");
    run
}

pub(super) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(since.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub(super) struct Prometheus {
    child: Child,
    url: String,
    http: reqwest::Client,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// None where it is not installed.
    fn scrape(dir: &Path, target: u16) -> Option<Prometheus> {
        let config = format!(
            "scrape_configs:\n- job_name: forkyard\n  scrape_interval: 300ms\n  scrape_timeout: 300ms\n  \
             static_configs:\n  - targets: ['127.0.0.1:{target}']\n"
        );
        Prometheus::start(dir, &config)
    }

    pub(super) fn start(dir: &Path, text: &str) -> Option<Prometheus> {
        let program = Path::new("/usr/bin/prometheus");
        if !program.is_file() {
            assert!(
                std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(),
                "prometheus is missing: cargo xtask setup"
            );
            return None;
        }
        let config = dir.join("prometheus.yml");
        std::fs::write(&config, text).unwrap();
        // The client wants to know before it is made, though nothing here is encrypted.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let port = free_port();
        let child = Command::new(program)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Prometheus { child, url: format!("http://127.0.0.1:{port}"), http: reqwest::Client::new() })
    }

    /// None while it starts.
    pub(super) async fn query(&self, expr: &str) -> Option<Vec<Value>> {
        let coded: String = expr.bytes().map(|b| format!("%{b:02X}")).collect();
        let asked = self.http.get(format!("{}/api/v1/query?query={coded}", self.url));
        let answer: Value = asked.send().await.ok()?.json().await.ok()?;
        assert_eq!(answer["status"], "success", "{expr}: {answer}");
        answer["data"]["result"].as_array().cloned()
    }
}

/// Every query of a dashboard, with Grafana's own variables filled in.
fn queries(name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/grafana").join(name);
    let board: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|p| p["targets"].as_array()).flatten();
    targets.map(|t| t["expr"].as_str().unwrap().replace("$__rate_interval", "30s")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_prometheus_scrapes_and_every_panel_has_data() {
    let w = World::with_commit();
    let port = free_port();
    let s = Server::start_env(&w, &["--port", "0"], &[("METRICS_PORT", &port.to_string())]);
    let Some(prometheus) = Prometheus::scrape(w.dir.path(), port) else { return };
    a_run(&w, &s).await;
    let ended = "sum(sandbox_fork_completed_total)";
    until("both forks are scraped", async || {
        let found = prometheus.query(ended).await?;
        (found.first()?["value"][1] == "2").then_some(())
    })
    .await;
    // A rate needs more than one sample.
    until("they are scraped again", async || {
        let found = prometheus.query("min(count_over_time(sandbox_fork_completed_total[1m]))").await?;
        (found.first()?["value"][1].as_str()?.parse::<u32>().ok()? >= 3).then_some(())
    })
    .await;
    for expr in queries("sandbox-orchestration.json") {
        assert!(!prometheus.query(&expr).await.unwrap().is_empty(), "no data: {expr}");
    }
    let text =
        s.http.get(format!("http://127.0.0.1:{port}/metrics")).send().await.unwrap().text().await.unwrap();
    for line in [
        r#"sandbox_fork_completed_total{model="script",status="success"} 2"#,
        r#"sandbox_fork_duration_seconds_bucket{status="success",le="60"} 2"#,
        r#"sandbox_fork_duration_seconds_bucket{status="success",le="7200"} 2"#,
        r#"sandbox_fork_cost_usd_bucket{model="script",le="0.01"}"#,
        r#"sandbox_fork_cost_usd_bucket{model="script",le="10"} 2"#,
        r#"forkyard_run_completed_total{outcome="success"} 1"#,
        r#"forkyard_tool_calls_total{result="ok",tool="Write"} 2"#,
        "forkyard_store_up 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let buckets = |name: &str| {
        let lines = text.lines().filter(|l| l.starts_with(&format!("{name}_bucket")));
        lines.filter_map(|l| l.split("le=\"").nth(1)?.split('"').next().map(String::from)).collect::<Vec<_>>()
    };
    assert_eq!(
        buckets("sandbox_fork_duration_seconds"),
        ["60", "300", "600", "1800", "3600", "7200", "+Inf"]
    );
    assert_eq!(buckets("sandbox_fork_cost_usd"), ["0.01", "0.05", "0.1", "0.5", "1", "5", "10", "+Inf"]);
}

/// What the SDK counts only when something goes wrong, or after a minute without work.
const RARE: [&str; 11] = [
    "temporal_workflow_failed",
    "temporal_workflow_continue_as_new",
    "temporal_workflow_task_execution_failed",
    "temporal_workflow_task_replay_latency_bucket",
    "temporal_workflow_task_queue_poll_empty",
    "temporal_activity_execution_failed",
    "temporal_activity_poll_no_task",
    "temporal_request_failure",
    "temporal_long_request_failure",
    "temporal_sticky_cache_miss",
    "temporal_sticky_cache_total_forced_eviction",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_for_temporal_tells_what_its_sdk_measures_beside_what_it_counts() {
    let Some(server) = tokio::task::block_in_place(Temporal::start) else { return };
    let w = World::with_commit();
    let port = free_port();
    w.user_file(&format!(
        "[engine]\nkind = \"temporal\"\n[temporal]\naddress = \"{}\"\n[metrics]\nport = {port}\n",
        server.address()
    ));
    let _worker = super::temporal::worker(&w);
    let Some(prometheus) = Prometheus::scrape(w.dir.path(), port) else { return };
    tokio::task::block_in_place(|| {
        let run = w.started();
        let ran = w.run(&["cancel", &run]);
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
        // By another name: a worker reads a script once.
        let script = w.dir.path().join("adds.toml");
        w.write(&script, super::SCRIPT);
        let model = format!("script:{}", script.display());
        let ran = w.run(&["fork", "-p", "add a line", "-m", &model, "--network", "none", "-f", "2"]);
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    });
    for (expr, at_least) in [
        // The runs and their forks.
        ("sum(temporal_workflow_completed)", 5),
        ("sum(temporal_workflow_canceled)", 1),
        ("sum(sandbox_fork_completed_total)", 4),
        ("sum(forkyard_run_completed_total)", 2),
        ("sum(forkyard_tool_calls_total)", 2),
        ("min(count_over_time(temporal_workflow_completed[1m]))", 3),
    ] {
        until(expr, async || {
            let found = prometheus.query(expr).await?;
            (found.first()?["value"][1].as_str()?.parse::<u32>().ok()? >= at_least).then_some(())
        })
        .await;
    }
    let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.unwrap().text().await.unwrap();
    for line in [
        r#"temporal_workflow_completed{namespace="default",task_queue="sandbox-orchestration",workflow_type="ForkyardRun"} 1"#,
        r#"activity_type="run_agent""#,
        r#"temporal_request{namespace="default",operation="RespondWorkflowTaskCompleted"}"#,
        r#"sandbox_fork_completed_total{model="script",status="cancelled"} 2"#,
        r#"forkyard_host_slots{kind="limit"} 100"#,
        "forkyard_store_up 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let families: Vec<&str> =
        text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let distinct: std::collections::BTreeSet<&str> = families.iter().copied().collect();
    assert_eq!(families.len(), distinct.len(), "told twice: {families:?}");
    for expr in queries("temporal-sdk.json") {
        let rest = &expr[expr.find("temporal_").unwrap_or_else(|| panic!("{expr}"))..];
        let name = rest.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next().unwrap();
        if !RARE.contains(&name) {
            // A rate needs more than one sample.
            until(&expr, async || (!prometheus.query(&expr).await?.is_empty()).then_some(())).await;
        }
    }
}

/// Whether somebody listens at this port, and where: as the kernel writes addresses.
fn listening(port: u16) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let all = table.lines().skip(1).filter_map(|l| {
        let mut words = l.split_whitespace();
        let local = words.nth(1)?.to_string();
        (words.nth(1)? == "0A" && local.ends_with(&format!(":{port:04X}"))).then_some(local)
    });
    all.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_port_is_loopback_s_may_be_taken_and_may_be_off() {
    let w = World::with_commit();
    let port = free_port();
    let at = port.to_string();
    let s = Server::start_env(&w, &["--port", "0"], &[("METRICS_PORT", &at), ("DISABLE_METRICS", "false")]);
    until("it listens", async || (!listening(port).is_empty()).then_some(())).await;
    assert_eq!(listening(port), [format!("0100007F:{port:04X}")]);
    assert_eq!(w.run_with(&["list"], &[("METRICS_ADDRESS", "everywhere")]).code, 2);
    // Other commands have no port, and do not miss it.
    let ran = w.run_with(&["list"], &[("METRICS_PORT", &at)]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    // A second one says so and works.
    let mut second = w
        .program(&["worker"])
        .env("METRICS_PORT", &at)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(second.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(
        said.contains("WARN") && said.contains("no metrics at") && said.contains("METRICS_PORT"),
        "{said}"
    );
    rustix::process::kill_process(rustix::process::Pid::from_child(&second), rustix::process::Signal::TERM)
        .unwrap();
    assert!(second.wait().unwrap().success());
    drop(s);
    let s = Server::start_env(&w, &["--port", "0"], &[("METRICS_PORT", &at), ("DISABLE_METRICS", "true")]);
    assert_eq!(s.get("/api/v1/ready").await["status"], "ok");
    a_run(&w, &s).await;
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "it is off");
}

/// What an OTLP collector received, decoded.
#[derive(Clone, Default)]
struct Collector {
    traces: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    metrics: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
    headers: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    async fn start() -> (Collector, String) {
        let c = Collector::default();
        let (traces, metrics) = (c.clone(), c.clone());
        let router = axum::Router::new()
            .route(
                "/v1/traces",
                axum::routing::post(async move |headers: axum::http::HeaderMap, body: bytes::Bytes| {
                    let header = headers.get("x-key").map(|v| v.to_str().unwrap().to_string());
                    traces.headers.lock().unwrap().extend(header);
                    traces.traces.lock().unwrap().push(ExportTraceServiceRequest::decode(body).unwrap());
                }),
            )
            .route(
                "/v1/metrics",
                axum::routing::post(async move |body: bytes::Bytes| {
                    metrics.metrics.lock().unwrap().push(ExportMetricsServiceRequest::decode(body).unwrap());
                }),
            );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = tokio_util::sync::CancellationToken::new();
        tokio::spawn(forkyard_server::serve(listener, router, None, stop));
        (c, url)
    }

    fn spans(&self) -> Vec<Span> {
        let all = self.traces.lock().unwrap();
        let scopes = all.iter().flat_map(|r| &r.resource_spans).flat_map(|r| &r.scope_spans);
        scopes.flat_map(|s| s.spans.clone()).collect()
    }

    fn metric_names(&self) -> Vec<String> {
        let all = self.metrics.lock().unwrap();
        let scopes = all.iter().flat_map(|r| &r.resource_metrics).flat_map(|r| &r.scope_metrics);
        scopes.flat_map(|s| s.metrics.iter().map(|m| m.name.clone())).collect()
    }
}

fn attributes(span: &Span) -> BTreeMap<String, String> {
    let text = |v: Option<Any>| match v {
        Some(Any::StringValue(s)) => s,
        Some(Any::IntValue(n)) => n.to_string(),
        other => format!("{other:?}"),
    };
    span.attributes.iter().map(|a| (a.key.clone(), text(a.value.clone().and_then(|v| v.value)))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_one_trace_by_the_conventions_of_generative_ai() {
    let w = World::with_commit();
    let (collector, url) = Collector::start().await;
    let mut s = Server::start_env(
        &w,
        &["--port", "0"],
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &url),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "200"),
            ("DISABLE_METRICS", "true"),
        ],
    );
    let run = a_run(&w, &s).await;
    until("metrics arrive", async || {
        collector.metric_names().contains(&"sandbox_fork_completed".to_string()).then_some(())
    })
    .await;
    // What is left is sent at the end.
    rustix::process::kill_process(rustix::process::Pid::from_child(&s.child), rustix::process::Signal::TERM)
        .unwrap();
    assert!(s.child.wait().unwrap().success());
    let spans = collector.spans();
    let named = |name: &str| spans.iter().filter(|s| s.name == name).collect::<Vec<_>>();
    let root = named("drive run");
    assert_eq!(root.len(), 1, "{:?}", spans.iter().map(|s| &s.name).collect::<Vec<_>>());
    assert_eq!(attributes(root[0])["run"], run);
    let by_id: BTreeMap<&[u8], &Span> = spans.iter().map(|s| (s.span_id.as_slice(), s)).collect();
    for (name, parent, count) in [
        ("prepare_base", "drive run", 1),
        ("create_sandbox", "drive run", 2),
        ("run_agent", "drive run", 2),
        ("invoke_agent forkyard", "run_agent", 2),
        ("chat script", "invoke_agent forkyard", 4),
        ("execute_tool Write", "invoke_agent forkyard", 2),
    ] {
        let found = named(name);
        assert_eq!(found.len(), count, "{name}");
        for span in found {
            assert_eq!(span.trace_id, root[0].trace_id, "{name}");
            assert_eq!(by_id[span.parent_span_id.as_slice()].name, parent, "{name}");
        }
    }
    let chat = attributes(named("chat script")[0]);
    for (key, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "script"),
        ("gen_ai.request.model", "script"),
    ] {
        assert_eq!(chat[key], value, "{chat:?}");
    }
    assert!(chat["gen_ai.usage.input_tokens"].parse::<u64>().unwrap() > 0, "{chat:?}");
    let tool = attributes(named("execute_tool Write")[0]);
    assert_eq!(
        (tool["gen_ai.operation.name"].as_str(), tool["gen_ai.tool.name"].as_str()),
        ("execute_tool", "Write")
    );
    for name in ["gen_ai.client.token.usage", "gen_ai.client.operation.duration", "forkyard_store_up"] {
        assert!(collector.metric_names().iter().any(|n| n == name), "{name}");
    }
    assert!(collector.headers.lock().unwrap().iter().all(|h| h == "abc"));
    // What was asked and said is nobody's business there.
    let all = format!("{spans:?}");
    assert!(!all.contains("add a line") && !all.contains("I add"), "contents are in a trace");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_logged_line_says_of_which_run_and_fork_it_is() {
    let w = World::with_commit();
    w.user_file("[[hooks]]\nevent = \"PreToolUse\"\ncommand = \"exit 7\"\n");
    let mut s = Server::start_env(&w, &["--port", "0"], &[("FORKYARD_LOG_FORMAT", "json")]);
    let run = a_run(&w, &s).await;
    s.child.kill().unwrap();
    let mut said = String::new();
    s.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let lines: Vec<Value> =
        said.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    let hook =
        lines.iter().find(|l| l["fields"]["message"] == "a hook failed").unwrap_or_else(|| panic!("{said}"));
    let has = |key: &str, value: Value| hook["spans"].as_array().unwrap().iter().any(|s| s[key] == value);
    assert!(has("run", json!(run)) && (has("fork", json!(0)) || has("fork", json!(1))), "{hook}");
}

#[test]
fn dashboards_are_where_they_should_be() {
    for name in ["sandbox-orchestration.json", "temporal-sdk.json"] {
        assert!(queries(name).len() > 15, "{name}");
    }
}
