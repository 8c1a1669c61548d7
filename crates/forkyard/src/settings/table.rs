//! Every setting, once: its key, type, default, bounds, variables, flag and meaning. The struct, the resolution, `forkyard
//! config` and docs/configuration.md all come from this table.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use forkyard_core::policy::PermissionMode;
use forkyard_core::sandbox::{NetworkMode, ProviderKind};
use forkyard_core::spec::Effort;
use forkyard_core::view::EngineKind;
use forkyard_core::{Millis, Usd};

use super::resolve::Resolver;
use super::tables::Tables;
use super::value::{ByteSize, Secret, Value, choice};

/// A variable of the environment.
#[derive(Debug, Clone, Copy)]
pub struct Var {
    pub name: &'static str,
    pub reads: Reads,
}

/// How a variable's text becomes the setting's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    AsIs,
    /// A bare number counts in this unit.
    InUnit(&'static str),
    /// It is true when the setting is false.
    Negated,
}

const fn var(name: &'static str) -> Var {
    Var { name, reads: Reads::AsIs }
}
const fn in_gib(name: &'static str) -> Var {
    Var { name, reads: Reads::InUnit("GiB") }
}
const fn in_ms(name: &'static str) -> Var {
    Var { name, reads: Reads::InUnit("ms") }
}
const fn negated(name: &'static str) -> Var {
    Var { name, reads: Reads::Negated }
}

/// What is known of a setting apart from its value.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub key: &'static str,
    pub doc: &'static str,
    pub kind: &'static str,
    /// As one would write it; None: unset.
    pub default: Option<&'static str>,
    /// Least and most, as one would write them.
    pub range: Option<(&'static str, &'static str)>,
    /// The first one that is set counts.
    pub env: &'static [Var],
    pub flag: Option<&'static str>,
    /// A project's own file may set it without being trusted: it acts inside the sandbox alone, within bounds.
    pub project: bool,
}

impl Setting {
    const fn new(key: &'static str, doc: &'static str, kind: &'static str) -> Self {
        Setting { key, doc, kind, default: None, range: None, env: &[], flag: None, project: false }
    }
    /// Its text must not be shown, not even when it is wrong.
    pub fn is_secret(&self) -> bool {
        self.kind == Secret::KIND || self.kind == StoreUrl::KIND
    }
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $field:ident: $ty:ty = $key:literal { $($part:ident: $value:expr),* $(,)? })+) => {
        /// All settings, resolved. Made once, in main, and passed on as values.
        #[derive(Debug, Clone)]
        pub struct Settings {
            /// Where Forkyard keeps everything: `$FORKYARD_HOME`.
            pub home: PathBuf,
            /// Secrets, prices, policy.
            pub tables: Tables,
            $($(#[doc = $doc])+ pub $field: $ty,)+
        }

        /// In the order of the reference.
        pub const TABLE: &[Setting] = &[
            $(Setting {
                $($part: $value,)*
                ..Setting::new($key, concat!($($doc),+), <$ty as Value>::KIND)
            },)+
        ];

        /// The names of the struct's fields, in the same order.
        #[cfg(test)]
        pub(super) const FIELDS: &[&str] = &[$(stringify!($field)),+];

        impl Settings {
            pub(super) fn take(home: PathBuf, tables: Tables, r: &mut Resolver) -> Option<Settings> {
                $(let $field: Option<$ty> = r.take($key);)+
                Some(Settings { home, tables, $($field: $field?,)+ })
            }
        }
    };
}

settings! {
    /// Model that forks use: a short name (haiku, sonnet, opus), a full model id, or `script:FILE` for one that needs no key.
    model: String = "model" { default: Some("sonnet"), env: &[var("FORKYARD_MODEL")], flag: Some("-m, --model") }

    /// Forks of a run.
    forks: u32 = "run.forks" { default: Some("1"), range: Some(("1", "100")), env: &[var("FORKYARD_FORKS")], flag: Some("-f, --forks") }
    /// Most forks that a run may ever have, added ones included.
    max_forks: u32 = "run.max_forks" { default: Some("100"), range: Some(("1", "100")), env: &[var("FORKYARD_MAX_FORKS")], flag: Some("--max-forks") }
    /// Forks that work at the same time.
    max_concurrent: u32 = "run.max_concurrent" { default: Some("5"), range: Some(("1", "100")), env: &[var("FORKYARD_MAX_CONCURRENT")], flag: Some("--max-concurrent") }
    /// Time that a fork may take; paused time does not count.
    timeout: Millis = "run.timeout" { default: Some("2h"), range: Some(("1s", "7d")), env: &[var("FORKYARD_TIMEOUT")], flag: Some("-t, --timeout") }
    /// Most that a run may cost, all forks together. Unset: no limit.
    budget: Option<Usd> = "run.budget" { range: Some(("0", "1000000")), env: &[var("FORKYARD_BUDGET")], flag: Some("--budget") }
    /// Turns that an agent may take.
    max_turns: u32 = "run.max_turns" { default: Some("100"), range: Some(("1", "10000")), env: &[var("FORKYARD_MAX_TURNS")], flag: Some("--max-turns"), project: true }
    /// Tool calls that a model may make in one turn.
    max_tool_calls: u32 = "run.max_tool_calls" { default: Some("50"), range: Some(("1", "1000")), project: true }
    /// How long an agent that is done waits for messages before its fork ends.
    linger: Millis = "run.linger" { default: Some("0s"), range: Some(("0s", "24h")), flag: Some("--linger") }
    /// Command that prepares the base, once, inside the sandbox: installing dependencies, say.
    setup: Option<String> = "run.setup" { flag: Some("--setup"), project: true }
    /// Command that judges a result, in a sandbox of its own: exit status 0 is verified.
    verify: Option<String> = "run.verify" { flag: Some("--verify"), project: true }
    /// Command whose last line of output is a number; a higher one ranks better.
    score: Option<String> = "run.score" { flag: Some("--score"), project: true }
    /// Patterns of files that are made equal to the base before verify: tests that a fork may not edit to win.
    protect: Vec<String> = "run.protect" { default: Some(""), flag: Some("--protect"), project: true }
    /// Patterns of files that are brought back beside the commit.
    capture: Vec<String> = "run.capture" { default: Some(""), flag: Some("--capture"), project: true }
    /// Text put before the prompt of every fork.
    prompt_prefix: Option<String> = "run.prompt_prefix" { project: true }
    /// Folder for one log file a fork.
    log_dir: Option<PathBuf> = "run.log_dir" { env: &[var("FORKYARD_LOG_DIR")], flag: Some("--log-dir") }

    /// Tools that the agent may use. Empty: all.
    allowed_tools: Vec<String> = "agent.allowed_tools" { default: Some(""), flag: Some("--allowed-tools") }
    /// What the agent may do without being asked about it.
    permission_mode: PermissionMode = "agent.permission_mode" { default: Some("acceptEdits"), flag: Some("--permission-mode") }
    /// How much the model should think, where it can be told. Unset: as the model decides.
    effort: Option<Effort> = "agent.effort" { flag: Some("--effort") }
    /// Tokens that one answer may have. Fewer are asked for when money is short.
    max_output_tokens: u32 = "agent.max_output_tokens" { default: Some("32000"), range: Some(("1024", "1000000")) }
    /// Checkpoints of a fork that are kept: after the loss of a sandbox its agent goes on from the last one. 0: none is made.
    checkpoints: u32 = "agent.checkpoints" { default: Some("3"), range: Some(("0", "1000")) }

    /// Who makes the sandboxes.
    provider: ProviderKind = "sandbox.provider" { default: Some("local"), env: &[var("FORKYARD_PROVIDER")], flag: Some("--provider") }
    /// Image that sandboxes start from: a registry reference, `oci:PATH`, `archive:PATH` or `dir:PATH` (a folder of this machine). Unset: the host's own system, read-only.
    image: Option<String> = "sandbox.image" { env: &[var("FORKYARD_IMAGE"), var("SANDBOX_IMAGE")], flag: Some("--image") }
    /// Snapshot that sandboxes start from.
    snapshot: Option<String> = "sandbox.snapshot" { env: &[var("SANDBOX_SNAPSHOT")], flag: Some("--snapshot") }
    /// Memory of a sandbox.
    memory: ByteSize = "sandbox.memory" { default: Some("4GiB"), range: Some(("16MiB", "1TiB")), env: &[in_gib("SANDBOX_MEMORY_GB")], flag: Some("--memory"), project: true }
    /// Processors of a sandbox; may be fractional.
    cpus: f64 = "sandbox.cpus" { default: Some("2"), range: Some(("0.05", "512")), env: &[var("SANDBOX_CPU")], flag: Some("--cpus"), project: true }
    /// Disk that a sandbox may fill.
    disk: ByteSize = "sandbox.disk" { default: Some("8GiB"), range: Some(("16MiB", "16TiB")), env: &[in_gib("SANDBOX_DISK_GB")], flag: Some("--disk"), project: true }
    /// Processes and threads of a sandbox.
    processes: u32 = "sandbox.processes" { default: Some("512"), range: Some(("8", "1000000")), flag: Some("--processes"), project: true }
    /// Variables inside the sandbox.
    sandbox_env: BTreeMap<String, String> = "sandbox.env" { default: Some(""), flag: Some("--env"), project: true }
    /// Folders of the host that sandboxes see: `HOST:PATH` (read-only) or `HOST:PATH:rw`.
    volumes: Vec<String> = "sandbox.volumes" { default: Some(""), flag: Some("--volume") }
    /// Where the Docker engine listens: `unix:///path`. Unset: its usual socket.
    docker_host: Option<String> = "docker.host" { env: &[var("DOCKER_HOST")] }
    /// Docker containers that `serve` and `worker` keep started for the next sandboxes, of each image with its limits. 0: none.
    docker_warm: u32 = "docker.warm" { default: Some("0"), range: Some(("0", "50")), env: &[var("FORKYARD_DOCKER_WARM")] }
    /// Refuse a limit that the kernel itself can't enforce here.
    strict: bool = "sandbox.strict" { default: Some("false"), env: &[var("FORKYARD_STRICT")], flag: Some("--strict") }
    /// A disk of its own for each sandbox, whose limit the kernel keeps. Costs some speed, and snapshots are copies.
    disk_image: bool = "sandbox.disk_image" { default: Some("false"), flag: Some("--disk-image") }

    /// What a sandbox can reach: nothing; the allow-list; any public address.
    network: NetworkMode = "network.mode" { default: Some("isolated"), env: &[var("FORKYARD_NETWORK")], flag: Some("--network") }
    /// Hosts that a sandbox may reach besides the default list: `host`, `*.host`, `host:port`, `host:ro`. Data can leave there unless `:ro`.
    allow: Vec<String> = "network.allow" { default: Some(""), flag: Some("--allow") }
    /// Leave the default list (package registries, the run's git host) out.
    no_default_allow: bool = "network.no_default_allow" { default: Some("false"), flag: Some("--no-default-allow") }
    /// Bytes a second and direction that a sandbox may send or receive. Unset: no limit.
    network_rate: Option<ByteSize> = "network.rate" { range: Some(("1KiB", "1TiB")), flag: Some("--network-rate"), project: true }

    /// Key for Anthropic's models. It stays on the host.
    anthropic_api_key: Option<Secret> = "anthropic.api_key" { env: &[var("ANTHROPIC_API_KEY")] }
    /// Where Anthropic's API is.
    anthropic_base_url: String = "anthropic.base_url" { default: Some("https://api.anthropic.com"), env: &[var("ANTHROPIC_BASE_URL")] }
    /// Key for an OpenAI-compatible endpoint. It stays on the host.
    openai_api_key: Option<Secret> = "openai.api_key" { env: &[var("OPENAI_API_KEY")] }
    /// Where the OpenAI-compatible endpoint is.
    openai_base_url: String = "openai.base_url" { default: Some("https://api.openai.com/v1"), env: &[var("OPENAI_BASE_URL")] }
    /// Key for E2B sandboxes.
    e2b_api_key: Option<Secret> = "e2b.api_key" { env: &[var("E2B_API_KEY")] }
    /// Key for Daytona sandboxes.
    daytona_api_key: Option<Secret> = "daytona.api_key" { env: &[var("DAYTONA_API_KEY")] }
    /// Token for fetching from GitHub over HTTPS. It stays on the host.
    github_token: Option<Secret> = "github.token" { env: &[var("GITHUB_TOKEN")] }

    /// Time that one git command on the host may take.
    git_timeout: Millis = "git.timeout" { default: Some("5m"), range: Some(("1s", "24h")) }

    /// Where runs are recorded: a PostgreSQL URL for many hosts. Unset: SQLite in Forkyard's home.
    store_url: Option<StoreUrl> = "store.url" { env: &[var("FORKYARD_STORE")], flag: Some("--store") }

    /// Who drives runs.
    engine: EngineKind = "engine.kind" { default: Some("embedded"), env: &[var("FORKYARD_ENGINE")], flag: Some("--engine") }
    /// How often work that goes on says so.
    heartbeat_interval: Millis = "engine.heartbeat_interval" { default: Some("30s"), range: Some(("100ms", "10m")) }
    /// Work that was silent for this long is lost.
    heartbeat_timeout: Millis = "engine.heartbeat_timeout" { default: Some("90s"), range: Some(("300ms", "1h")) }
    /// Forks that work at the same time on this host, all runs and all processes of this home together.
    host_concurrency: u32 = "engine.host_concurrency" { default: Some("100"), range: Some(("1", "10000")), env: &[var("FORKYARD_HOST_CONCURRENCY")] }

    /// Where the Temporal frontend is.
    temporal_address: String = "temporal.address" { default: Some("localhost:7233"), env: &[var("TEMPORAL_ADDRESS")] }
    /// Namespace of Temporal.
    temporal_namespace: String = "temporal.namespace" { default: Some("default"), env: &[var("TEMPORAL_NAMESPACE")] }
    /// Task queue of Temporal.
    temporal_task_queue: String = "temporal.task_queue" { default: Some("sandbox-orchestration"), env: &[var("TEMPORAL_TASK_QUEUE")] }
    /// Client certificate for Temporal (PEM).
    temporal_tls_cert: Option<PathBuf> = "temporal.tls_cert" { env: &[var("TEMPORAL_TLS_CERT")] }
    /// Its key (PEM).
    temporal_tls_key: Option<PathBuf> = "temporal.tls_key" { env: &[var("TEMPORAL_TLS_KEY")] }
    /// Certificate of the authority that Temporal's own is from (PEM). Unset: those that the system trusts.
    temporal_tls_ca: Option<PathBuf> = "temporal.tls_ca" { env: &[var("TEMPORAL_TLS_CA")] }
    /// Key for Temporal Cloud, or another service that asks for one. Sent over TLS alone.
    temporal_api_key: Option<Secret> = "temporal.api_key" { env: &[var("TEMPORAL_API_KEY")] }
    /// 64 hexadecimal digits (`openssl rand -hex 32`): what Temporal keeps is encrypted with it. The same for all workers and clients.
    temporal_payload_key: Option<Secret> = "temporal.payload_key" { env: &[var("TEMPORAL_PAYLOAD_KEY")] }

    /// Serve Prometheus metrics, where runs are driven: by `serve` and `worker`.
    metrics: bool = "metrics.enabled" { default: Some("true"), env: &[negated("DISABLE_METRICS")] }
    /// Address that metrics are served at. Whoever reaches it reads them: leave it on loopback unless the network is your own.
    metrics_address: IpAddr = "metrics.address" { default: Some("127.0.0.1"), env: &[var("METRICS_ADDRESS")] }
    /// Port of the metrics.
    metrics_port: u16 = "metrics.port" { default: Some("9090"), range: Some(("1", "65535")), env: &[var("METRICS_PORT")] }

    /// Where traces and metrics are sent by OTLP over HTTP: `http://localhost:4318`, say. Unset: nowhere.
    otlp_endpoint: Option<String> = "otlp.endpoint" { env: &[var("OTEL_EXPORTER_OTLP_ENDPOINT")] }
    /// Headers for it: `name=value`, with commas between them.
    otlp_headers: Option<Secret> = "otlp.headers" { env: &[var("OTEL_EXPORTER_OTLP_HEADERS")] }
    /// What this service is called there.
    otlp_service: String = "otlp.service_name" { default: Some("forkyard"), env: &[var("OTEL_SERVICE_NAME")] }
    /// How often metrics are sent.
    otlp_interval: Millis = "otlp.interval" { default: Some("60s"), range: Some(("100ms", "1h")), env: &[in_ms("OTEL_METRIC_EXPORT_INTERVAL")] }

    /// Address that `forkyard serve` listens on.
    server_address: String = "server.address" { default: Some("127.0.0.1"), env: &[var("FORKYARD_SERVER_ADDRESS")], flag: Some("--host") }
    /// Port of the HTTP API; 0 takes any.
    server_port: u16 = "server.port" { default: Some("4610"), range: Some(("0", "65535")), env: &[var("FORKYARD_SERVER_PORT")], flag: Some("-p, --port") }
    /// Folder below which the API takes paths of this machine, for repositories, say. Unset: none.
    server_root: Option<PathBuf> = "server.root" { env: &[var("FORKYARD_SERVER_ROOT")], flag: Some("--root") }
    /// Names that the server is reached by, besides localhost and numbers.
    server_hosts: Vec<String> = "server.hosts" { default: Some("") }
    /// Certificate of the server (PEM).
    server_tls_cert: Option<PathBuf> = "server.tls_cert" { flag: Some("--tls-cert") }
    /// Its key (PEM).
    server_tls_key: Option<PathBuf> = "server.tls_key" { flag: Some("--tls-key") }

    /// Another Forkyard that commands work on: where its `forkyard serve` is. Unset: this machine.
    remote_url: Option<String> = "remote.url" { env: &[var("FORKYARD_SERVER")], flag: Some("--server") }
    /// Token for it.
    remote_token: Option<Secret> = "remote.token" { env: &[var("FORKYARD_TOKEN")] }

    /// How often orphans are looked for.
    cleanup_interval: Millis = "cleanup.interval" { default: Some("15m"), range: Some(("1s", "7d")), flag: Some("--interval") }
    /// A sandbox older than this with no live run is an orphan.
    cleanup_max_age: Millis = "cleanup.max_age" { default: Some("3h"), range: Some(("0s", "365d")), flag: Some("--max-age") }

    /// How long `forkyard serve` keeps runs that have ended, with their events and results. Unset: for ever.
    retention_runs: Option<Millis> = "retention.runs" { range: Some(("1s", "3650d")), env: &[var("FORKYARD_RETENTION_RUNS")] }
    /// How long `forkyard serve` keeps the audit trail: who steered what, and what was said to agents.
    retention_audit: Millis = "retention.audit" { default: Some("365d"), range: Some(("1s", "36500d")), env: &[var("FORKYARD_RETENTION_AUDIT")] }
    /// How long `forkyard serve` still lists tokens that were revoked or have expired.
    retention_tokens: Millis = "retention.tokens" { default: Some("30d"), range: Some(("1s", "36500d")), env: &[var("FORKYARD_RETENTION_TOKENS")] }

    /// What is logged to standard error: a level, or `target=level` filters.
    log: String = "log" { default: Some("warn"), env: &[var("FORKYARD_LOG")] }
    /// How it is written: text for people, or a JSON object a line, with the run and the fork that it is about.
    log_format: LogFormat = "log_format" { default: Some("text"), env: &[var("FORKYARD_LOG_FORMAT")] }
    /// Colour on the terminal. `NO_COLOR` set to anything means never.
    color: ColorMode = "color" { default: Some("auto"), env: &[var("FORKYARD_COLOR")], flag: Some("--color") }
}

choice!(EngineKind { "embedded" => EngineKind::Embedded, "temporal" => EngineKind::Temporal });

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColorMode {
    Auto,
    Always,
    Never,
}
choice!(ColorMode { "auto" => ColorMode::Auto, "always" => ColorMode::Always, "never" => ColorMode::Never });

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}
choice!(LogFormat { "text" => LogFormat::Text, "json" => LogFormat::Json });

choice!(PermissionMode {
    "default" => PermissionMode::Default,
    "acceptEdits" => PermissionMode::AcceptEdits,
    "plan" => PermissionMode::Plan,
    "bypassPermissions" => PermissionMode::BypassPermissions,
});

choice!(Effort {
    "low" => Effort::Low,
    "medium" => Effort::Medium,
    "high" => Effort::High,
    "max" => Effort::Max,
});

choice!(ProviderKind {
    "local" => ProviderKind::Local,
    "docker" => ProviderKind::Docker,
    "e2b" => ProviderKind::E2b,
    "daytona" => ProviderKind::Daytona,
});

choice!(NetworkMode {
    "none" => NetworkMode::None,
    "isolated" => NetworkMode::Isolated,
    "bridge" => NetworkMode::Bridge,
});

/// A PostgreSQL URL; its password is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// With the password: for the connection alone.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.show())
    }
}

impl Value for StoreUrl {
    const KIND: &'static str = "postgres URL";
    fn parse(raw: &super::Raw) -> Result<Self, String> {
        let text = String::parse(raw)?;
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            Ok(StoreUrl(text))
        } else {
            Err("write postgres://USER@HOST/DATABASE, or leave it out for SQLite".into())
        }
    }
    fn show(&self) -> String {
        let Some((scheme, rest)) = self.0.split_once("://") else { return "***".into() };
        // The last `@` before the path ends the user's part; a password may itself hold an `@`.
        let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
        let shown = match rest[..authority_end].rsplit_once('@') {
            Some((user, host)) => match user.split_once(':') {
                Some((name, _)) => format!("{name}:***@{host}{}", &rest[authority_end..]),
                None => rest.to_string(),
            },
            None => rest.to_string(),
        };
        // Query parameters can carry a password too.
        let shown = shown
            .split_once("password=")
            .map_or(shown.clone(), |(before, _)| format!("{before}password=***"));
        format!("{scheme}://{shown}")
    }
}
