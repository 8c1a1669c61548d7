//! The Temporal service: how it is reached, and the runs that are started there.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::run::Run;
use forkyard_core::view::EngineKind;
use forkyard_core::{ForkNum, Millis, RunId};
use forkyard_engine::sweep::SweepStats;
use forkyard_engine::{EngineError, log};
use forkyard_store::Store;
use temporalio_client::errors::{ClientConnectError, WorkflowInteractionError, WorkflowStartError};
use temporalio_client::{
    Client, ClientOptions, ClientTlsOptions, Connection, ConnectionOptions, TlsOptions, Url,
    WorkflowExecutionInfo, WorkflowExecutionStatus, WorkflowHandle, WorkflowIdConflictPolicy,
    WorkflowIdReusePolicy, WorkflowSignalOptions, WorkflowStartOptions,
};
use temporalio_common::MemoValues;
use temporalio_common::data_converters::{DataConverter, DefaultFailureConverter, PayloadConverter};
use temporalio_common::protos::temporal::api::enums::v1::IndexedValueType;
use temporalio_common::protos::temporal::api::operatorservice::v1::{
    AddSearchAttributesRequest, ListSearchAttributesRequest,
};
use temporalio_common::telemetry::metrics::{CoreMeter, NewAttributes, TemporalMeter};
use temporalio_common::telemetry::{TaskQueueLabelStrategy, TelemetryOptions};
use tonic::IntoRequest;

use crate::cleanup::{CleanupFlow, CleanupStart, cleanup_workflow_id};
use crate::codec::Sealed;
use crate::fork::ForkFlow;
use crate::run::RunFlow;
use crate::search;
use crate::wire::{LOGIC, Pace, RunStart, fork_workflow_id, run_workflow_id, summary};

/// An address that does not answer for this long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a cleanup may take to end: that of one look.
const STOP_WAIT: Duration = Duration::from_secs(60);
/// A worker answers a question about a workflow within this, if there is one.
const QUERY_WAIT: Duration = Duration::from_secs(5);

/// Where the service is and who asks. Secrets are values here: settings read them.
#[derive(Clone, Default)]
pub struct ServiceConfig {
    /// `host:port`, or a URL with http or https.
    pub address: String,
    pub namespace: String,
    pub task_queue: String,
    /// PEM.
    pub tls_cert: Option<Vec<u8>>,
    pub tls_key: Option<Vec<u8>>,
    /// PEM of the authority that the service's certificate is from; None: those that the system trusts.
    pub tls_ca: Option<Vec<u8>>,
    pub api_key: Option<String>,
    /// 64 hexadecimal digits: what Temporal keeps is encrypted with it.
    pub payload_key: Option<String>,
    /// Shown to other users of the service.
    pub identity: String,
    pub pace: Pace,
    /// Where the SDK's own metrics go; None: nowhere.
    pub meter: Option<Arc<dyn CoreMeter>>,
}

/// By what the caller does.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// A setting is wrong: tell the user which, and what to write.
    #[error("{0}")]
    Invalid(String),
    #[error("Temporal at {address} does not answer: {why}")]
    Unreachable { address: String, why: String },
    #[error("Temporal refused: {0}")]
    Refused(String),
    /// Of a run's start, and it would be refused again: the run fails by it.
    #[error("{0}")]
    Unstartable(String),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<forkyard_store::StoreError> for ServiceError {
    fn from(e: forkyard_store::StoreError) -> ServiceError {
        ServiceError::Engine(e.into())
    }
}

/// The cleanup that is under way now.
pub struct CleanupStarted {
    /// There was none before.
    pub anew: bool,
    /// How often it looks; None: nobody is there to say.
    pub interval: Option<Millis>,
}

/// A connection to the service.
#[derive(Clone)]
pub struct Service {
    client: Client,
    address: String,
    task_queue: String,
    pace: Pace,
    searchable: bool,
    sealed: bool,
    meter: Option<Arc<dyn CoreMeter>>,
}

/// The URL that is connected to, and whether it is encrypted.
fn target(config: &ServiceConfig) -> Result<Url, ServiceError> {
    let wants_tls = config.tls_cert.is_some() || config.tls_ca.is_some() || config.api_key.is_some();
    let text = match config.address.split_once("://") {
        Some(("http" | "https", _)) => config.address.clone(),
        Some((scheme, _)) => {
            return Err(ServiceError::Invalid(format!(
                "temporal.address: {scheme}:// can't be used; write HOST:PORT, or a URL with http or https"
            )));
        }
        None if wants_tls => format!("https://{}", config.address),
        None => format!("http://{}", config.address),
    };
    let url: Url = text.parse().map_err(|e| {
        ServiceError::Invalid(format!(
            "temporal.address: {:?} can't be used ({e}); write HOST:PORT",
            config.address
        ))
    })?;
    if url.port().is_none()
        && url.host_str().is_some()
        && !text.rsplit('/').next().unwrap_or("").contains(':')
    {
        return Err(ServiceError::Invalid(format!(
            "temporal.address: {:?} has no port; write HOST:PORT, such as {}:7233",
            config.address, config.address
        )));
    }
    if url.scheme() == "http" && config.api_key.is_some() {
        return Err(ServiceError::Invalid(format!(
            "temporal.api_key would be sent unencrypted to {}; write https:// before temporal.address, or leave the key \
             out",
            config.address
        )));
    }
    if url.scheme() == "http" && wants_tls {
        return Err(ServiceError::Invalid(format!(
            "temporal.address: {} is not encrypted, but a certificate is set; write https://",
            config.address
        )));
    }
    Ok(url)
}

impl Service {
    pub async fn connect(config: &ServiceConfig) -> Result<Service, ServiceError> {
        let url = target(config)?;
        let converter = match &config.payload_key {
            Some(key) => {
                let sealed = Sealed::from_hex(key).map_err(|fix| {
                    ServiceError::Invalid(format!("temporal.payload_key can't be used; {fix}"))
                })?;
                DataConverter::new(PayloadConverter::default(), DefaultFailureConverter::default(), sealed)
            }
            None => DataConverter::default(),
        };
        let encrypted = url.scheme() == "https";
        let client_tls = match (&config.tls_cert, &config.tls_key) {
            (Some(cert), Some(key)) => Some(
                ClientTlsOptions::builder().client_cert(cert.clone()).client_private_key(key.clone()).build(),
            ),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                return Err(ServiceError::Invalid(
                    "temporal.tls_cert and temporal.tls_key go together: set both or neither".into(),
                ));
            }
        };
        let tls = encrypted.then(|| {
            TlsOptions::builder()
                .maybe_server_root_ca_cert(config.tls_ca.clone())
                .maybe_client_tls_options(client_tls)
                .build()
        });
        let options = ConnectionOptions::new(url)
            .identity(config.identity.clone())
            .maybe_tls_options(tls)
            .maybe_api_key(config.api_key.clone())
            .maybe_metrics_meter(config.meter.clone().map(|meter| {
                TemporalMeter::new(meter, NewAttributes::default(), TaskQueueLabelStrategy::UseNormal)
            }))
            .connect_timeout(CONNECT_TIMEOUT)
            .build();
        let unreachable = |why: String| ServiceError::Unreachable { address: config.address.clone(), why };
        let connecting = Connection::connect(options);
        let connection = match tokio::time::timeout(CONNECT_TIMEOUT * 2, connecting).await {
            Err(_) => return Err(unreachable(format!("nothing within {} s", CONNECT_TIMEOUT.as_secs() * 2))),
            Ok(Err(e @ (ClientConnectError::InvalidUri(_) | ClientConnectError::InvalidHeaders(_)))) => {
                return Err(ServiceError::Invalid(format!("temporal.address: {e}")));
            }
            Ok(Err(e)) => return Err(unreachable(crate::wheel::said(&e))),
            Ok(Ok(connection)) => connection,
        };
        let options = ClientOptions::new(config.namespace.clone()).data_converter(converter).build();
        let client = Client::new(connection, options).map_err(|e| ServiceError::Invalid(e.to_string()))?;
        let mut service = Service {
            client,
            address: config.address.clone(),
            task_queue: config.task_queue.clone(),
            pace: config.pace,
            searchable: false,
            sealed: config.payload_key.is_some(),
            meter: config.meter.clone(),
        };
        service.searchable = service.known_attributes(&config.namespace).await;
        Ok(service)
    }

    pub fn client(&self) -> &Client {
        &self.client
    }
    /// The meter names its instruments itself.
    pub(crate) fn telemetry(&self) -> TelemetryOptions {
        TelemetryOptions::builder()
            .maybe_metrics(self.meter.clone())
            .attach_service_name(false)
            .metric_prefix(String::new())
            .build()
    }
    pub fn task_queue(&self) -> &str {
        &self.task_queue
    }
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether the service knows what runs are listed by; adds it where that is allowed.
    async fn known_attributes(&self, namespace: &str) -> bool {
        let names = [search::RUN.name(), search::STATUS.name()];
        let mut operator = self.client.connection().operator_service();
        for add in [true, false] {
            let request = ListSearchAttributesRequest { namespace: namespace.into() };
            let Ok(list) = operator.list_search_attributes(request.into_request()).await else {
                return false;
            };
            let known = list.into_inner().custom_attributes;
            if names.iter().all(|n| known.contains_key(*n)) {
                return true;
            }
            if add {
                let keyword = IndexedValueType::Keyword as i32;
                let search_attributes = names.iter().map(|n| (n.to_string(), keyword)).collect();
                let request = AddSearchAttributesRequest { search_attributes, namespace: namespace.into() };
                if let Err(e) = operator.add_search_attributes(request.into_request()).await {
                    tracing::info!("search attributes could not be added, runs go without: {e}");
                    return false;
                }
            }
        }
        false
    }

    /// Starts the workflow of a run that the store knows. Ok if it was started before.
    pub async fn start(&self, store: &dyn Store, run: &RunId) -> Result<(), ServiceError> {
        let Some((state, _)) = log::load_run(store, run).await? else {
            return Err(EngineError::NoSuchRun(run.clone()).into());
        };
        let start = RunStart {
            logic: LOGIC,
            run: run.clone(),
            spec: state.spec().clone(),
            submitted_at: state.view().created_at,
            store: store.identity().await?,
            pace: self.pace,
            searchable: self.searchable,
            sealed: self.sealed,
        };
        self.start_workflow(&state, start).await
    }

    async fn start_workflow(&self, state: &Run, start: RunStart) -> Result<(), ServiceError> {
        let view = state.view();
        if view.engine != EngineKind::Temporal {
            return Err(EngineError::Refused(format!("run {} is driven by Forkyard itself", view.id)).into());
        }
        let mut memo = MemoValues::new();
        memo.insert("repo", forkyard_engine::git::shown_url(&view.repo));
        memo.insert("forks", view.progress.total_forks);
        let prompt = if self.sealed { "" } else { &view.prompt };
        let prompt = summary(prompt);
        let id = run_workflow_id(&view.id);
        let options = WorkflowStartOptions::new(self.task_queue.clone(), id)
            .id_reuse_policy(WorkflowIdReusePolicy::RejectDuplicate)
            .memo(memo)
            .static_summary(prompt.to_string());
        let options = match start.searchable {
            true => options.search_attributes(search::at_start(&view.id)).build(),
            false => options.build(),
        };
        match self.client.start_workflow(RunFlow::run, start, options).await {
            Ok(_) | Err(WorkflowStartError::AlreadyStarted { .. }) => Ok(()),
            Err(WorkflowStartError::Rpc(status)) if is_final(&status) => {
                Err(ServiceError::Unstartable(format!("Temporal refused to start it: {}", status.message())))
            }
            Err(e) => Err(self.failed(&e)),
        }
    }

    fn failed(&self, e: &(dyn std::error::Error + 'static)) -> ServiceError {
        let why = crate::wheel::said(e);
        match is_away(e) {
            true => ServiceError::Unreachable { address: self.address.clone(), why },
            false => ServiceError::Refused(why),
        }
    }

    pub fn run_handle(&self, run: &RunId) -> WorkflowHandle<Client, RunFlow> {
        self.handle(run_workflow_id(run))
    }
    pub fn fork_handle(&self, run: &RunId, fork: ForkNum) -> WorkflowHandle<Client, ForkFlow> {
        self.handle(fork_workflow_id(run, fork))
    }
    fn handle<W: temporalio_common::HasWorkflowDefinition>(&self, id: String) -> WorkflowHandle<Client, W> {
        let namespace = self.client.options().namespace.clone();
        let info = WorkflowExecutionInfo::builder().namespace(namespace).workflow_id(id).build();
        WorkflowHandle::new(self.client.clone(), info)
    }

    /// Tells a run's workflow that commands wait for it. False if it has ended.
    pub async fn nudge_run(&self, run: &RunId) -> Result<bool, ServiceError> {
        let options = WorkflowSignalOptions::default();
        match self.run_handle(run).signal(RunFlow::commands_waiting, (), options).await {
            Ok(()) => Ok(true),
            Err(WorkflowInteractionError::NotFound(_)) => Ok(false),
            Err(e) => Err(self.failed(&e)),
        }
    }
    /// Whether a workflow has ended; None if the service knows of none.
    pub async fn has_ended(&self, id: String) -> Result<Option<bool>, ServiceError> {
        let handle: WorkflowHandle<Client, RunFlow> = self.handle(id);
        match handle.describe(Default::default()).await {
            Ok(description) => {
                use WorkflowExecutionStatus::{Canceled, Completed, Failed, Terminated, TimedOut};
                let status = description.status();
                Ok(Some(matches!(status, Completed | Failed | Canceled | Terminated | TimedOut)))
            }
            Err(WorkflowInteractionError::NotFound(_)) => Ok(None),
            Err(e) => Err(self.failed(&e)),
        }
    }
    /// Tells a fork's workflow that messages wait for its agent.
    pub async fn nudge_fork(&self, run: &RunId, fork: ForkNum) -> Result<(), ServiceError> {
        let options = WorkflowSignalOptions::default();
        self.forgive(self.fork_handle(run, fork).signal(ForkFlow::message_waiting, (), options).await)
    }
    pub async fn tell_spent(
        &self,
        run: &RunId,
        balance: forkyard_core::budget::Balance,
    ) -> Result<(), ServiceError> {
        let options = WorkflowSignalOptions::default();
        self.forgive(self.run_handle(run).signal(RunFlow::spent, balance, options).await)
    }
    /// A workflow that has ended needs to know nothing more.
    fn forgive(&self, sent: Result<(), WorkflowInteractionError>) -> Result<(), ServiceError> {
        match sent {
            Ok(()) | Err(WorkflowInteractionError::NotFound(_)) => Ok(()),
            Err(e) => Err(self.failed(&e)),
        }
    }

    /// The workflow that looks for orphans on every host. One that is under way stays as it is.
    pub async fn start_cleanup(
        &self,
        interval: Millis,
        max_age: Millis,
    ) -> Result<CleanupStarted, ServiceError> {
        let start = CleanupStart { logic: LOGIC, interval, max_age, stats: SweepStats::default() };
        let options =
            WorkflowStartOptions::new(self.task_queue.clone(), cleanup_workflow_id(&self.task_queue))
                .id_conflict_policy(WorkflowIdConflictPolicy::Fail)
                .static_summary("looks for orphaned sandboxes".to_string())
                .build();
        match self.client.start_workflow(CleanupFlow::run, start, options).await {
            Ok(_) => Ok(CleanupStarted { anew: true, interval: Some(interval) }),
            Err(WorkflowStartError::AlreadyStarted { .. }) => {
                let handle = self.cleanup_handle();
                let asked = handle.query(CleanupFlow::interval, (), Default::default());
                let answer = tokio::time::timeout(QUERY_WAIT, asked).await;
                Ok(CleanupStarted { anew: false, interval: answer.ok().and_then(Result::ok) })
            }
            Err(e) => Err(self.failed(&e)),
        }
    }

    fn cleanup_handle(&self) -> WorkflowHandle<Client, CleanupFlow> {
        self.handle(cleanup_workflow_id(&self.task_queue))
    }

    /// False if none is under way.
    pub async fn tell_cleanup_to_stop(&self) -> Result<bool, ServiceError> {
        let options = WorkflowSignalOptions::default();
        match self.cleanup_handle().signal(CleanupFlow::stop, (), options).await {
            Ok(()) => Ok(true),
            Err(WorkflowInteractionError::NotFound(_)) => Ok(false),
            Err(e) => Err(self.failed(&e)),
        }
    }

    /// What a cleanup that was told to stop has done, once it has ended.
    pub async fn cleanup_result(&self) -> Result<SweepStats, ServiceError> {
        let handle = self.cleanup_handle();
        match tokio::time::timeout(STOP_WAIT, handle.get_result(Default::default())).await {
            Ok(Ok(stats)) => Ok(stats),
            Ok(Err(e)) => Err(self.failed(&e)),
            Err(_) => Err(ServiceError::Refused(format!(
                "the cleanup was told to stop, but no worker has heard of it within {} s",
                STOP_WAIT.as_secs()
            ))),
        }
    }
}

/// Whether the same would be refused again: it is too large, or something in it can't be.
fn is_final(status: &tonic::Status) -> bool {
    match status.code() {
        tonic::Code::InvalidArgument => true,
        // The other thing that this code means is a quota, which passes.
        tonic::Code::ResourceExhausted => status.message().contains("larger than max"),
        _ => false,
    }
}

/// Whether nobody answered at all, which is not about what was asked.
fn is_away(e: &(dyn std::error::Error + 'static)) -> bool {
    let mut e = Some(e);
    while let Some(error) = e {
        if let Some(status) = error.downcast_ref::<tonic::Status>() {
            return status.code() == tonic::Code::Unavailable;
        }
        e = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(address: &str) -> ServiceConfig {
        ServiceConfig { address: address.into(), ..ServiceConfig::default() }
    }

    #[test]
    fn a_key_never_leaves_unencrypted() {
        let mut c = config("http://example.com:7233");
        c.api_key = Some("sk-secret".into());
        let e = target(&c).unwrap_err().to_string();
        assert!(e.contains("temporal.api_key") && e.contains("https://") && !e.contains("sk-secret"), "{e}");
        c.address = "example.com:7233".into();
        assert_eq!(target(&c).unwrap().scheme(), "https");
        c.api_key = None;
        c.tls_cert = Some(vec![]);
        c.address = "http://example.com:7233".into();
        assert!(target(&c).is_err());
    }

    #[test]
    fn addresses_are_understood_or_refused_with_the_fix() {
        assert_eq!(target(&config("localhost:7233")).unwrap().as_str(), "http://localhost:7233/");
        assert_eq!(target(&config("https://a.tmprl.cloud:7233")).unwrap().scheme(), "https");
        for (bad, expected) in
            [("ftp://x:1", "http or https"), ("localhost", "no port"), ("a b:1", "HOST:PORT")]
        {
            let e = target(&config(bad)).unwrap_err().to_string();
            assert!(e.contains(expected), "{bad}: {e}");
        }
    }
}
