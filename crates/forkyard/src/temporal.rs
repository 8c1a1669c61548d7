//! Runs that Temporal drives, as the command line starts and serves them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::spec::RunSpec;
use forkyard_core::view::{EngineKind, RunStatus, RunView};
use forkyard_core::{Millis, RunId};
use forkyard_engine::activities::HostYard;
use forkyard_engine::embedded::is_gone;
use forkyard_engine::sweep::{SweepConfig, SweepStats};
use forkyard_server::dto::chores::CleanupStopped;
use forkyard_store::ProcessKind;
use forkyard_temporal::service::CleanupStarted;
use forkyard_temporal::wire::run_workflow_id;
use forkyard_temporal::{Pace, Service, ServiceConfig, ServiceError, TemporalEngine, WorkerConfig};
use tokio_util::sync::CancellationToken;

use crate::error::{CliError, Result};
use crate::follow::{engine_error, store_error};
use crate::observe::Watched;
use crate::output::Output;
use crate::place::Place;
use crate::settings::Settings;
use crate::yard::Yard;

/// What a task that was stopped may take to come to a safe point.
const GRACE: Millis = Millis::secs(10);
/// How long whoever looks at runs waits for the service.
const NOTICE_WAIT: Duration = Duration::from_secs(2);
/// Runs that are looked at for one list: those on a screen.
const MAX_NOTICED: usize = 50;

fn service_error(e: ServiceError) -> CliError {
    match e {
        ServiceError::Invalid(_) => CliError::usage(e.to_string()),
        ServiceError::Unreachable { .. } => CliError::failure(e.to_string()).hint(
            "start the service, or say where it is: --set temporal.address=HOST:PORT, or TEMPORAL_ADDRESS",
        ),
        ServiceError::Refused(_) | ServiceError::Unstartable(_) => {
            CliError::failure(e.to_string()).hint("look at temporal.namespace and at the service's own log")
        }
        ServiceError::Engine(e) => engine_error(e),
    }
}

fn read(key: &str, path: &Option<PathBuf>) -> Result<Option<Vec<u8>>> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path).map_err(|e| {
        CliError::usage(format!("{key} = {}: {e}", path.display())).hint("name a readable PEM file")
    })?;
    Ok(Some(bytes))
}

fn config(s: &Settings, owner: &str) -> Result<ServiceConfig> {
    Ok(ServiceConfig {
        address: s.temporal_address.clone(),
        namespace: s.temporal_namespace.clone(),
        task_queue: s.temporal_task_queue.clone(),
        tls_cert: read("temporal.tls_cert", &s.temporal_tls_cert)?,
        tls_key: read("temporal.tls_key", &s.temporal_tls_key)?,
        tls_ca: read("temporal.tls_ca", &s.temporal_tls_ca)?,
        api_key: s.temporal_api_key.as_ref().map(|k| k.expose().to_string()),
        payload_key: s.temporal_payload_key.as_ref().map(|k| k.expose().to_string()),
        identity: format!("forkyard/{owner}"),
        pace: Pace { lost_after: s.heartbeat_timeout, host_lost_after: s.heartbeat_timeout, grace: GRACE },
        meter: None,
    })
}

pub async fn connect(yard: &Yard) -> Result<Service> {
    Service::connect(&config(&yard.settings, &yard.owner)?).await.map_err(service_error)
}

/// Stores a run with the engine that it asks for, and says what its user should know. Temporal has to answer before anything
/// is stored.
pub async fn submit(yard: &Yard, spec: RunSpec) -> Result<(RunId, Option<String>)> {
    let id = Yard::new_run_id();
    match spec.engine {
        EngineKind::Embedded => {
            let submitted = yard.steering().submit(&yard.engine, id, spec, None).await;
            Ok((submitted.map_err(engine_error)?, None))
        }
        EngineKind::Temporal => {
            let service = connect(yard).await?;
            let engine = TemporalEngine::new(yard.engine.clone(), service);
            let submitted = yard.steering().submit(&engine, id, spec, None).await;
            let id = submitted.map_err(engine_error)?;
            let notice = match has_worker(yard).await? {
                true => None,
                false => Some(unattended(&format!("{id} begins"), &yard.settings)),
            };
            Ok((id, notice))
        }
    }
}

/// `what` happens as soon as there is a worker.
fn unattended(what: &str, s: &Settings) -> String {
    format!(
        "No worker polls the task queue {}: {what} as soon as one does. On any host with this store:\n\n  \
         forkyard worker --engine temporal\n",
        s.temporal_task_queue
    )
}

fn silent(s: &Settings) -> String {
    format!("Temporal at {} does not answer", s.temporal_address)
}

/// What a command that was stored for this run waits for; None: it is heard at once.
pub async fn waits_for(place: &dyn Place, view: &RunView) -> Result<Option<String>> {
    let Some(yard) = place.here().filter(|_| view.engine == EngineKind::Temporal) else { return Ok(None) };
    let s = &yard.settings;
    match tokio::time::timeout(NOTICE_WAIT, connect(yard)).await {
        Ok(Ok(_)) if has_worker(yard).await? => Ok(None),
        Ok(Ok(_)) => Ok(Some(format!("It is stored. {}", unattended("it is heard", s)))),
        Ok(Err(_)) | Err(_) => Ok(Some(format!(
            "{}: it is stored; it will be heard when Temporal at {} is back.",
            silent(s),
            s.temporal_address
        ))),
    }
}

/// A run whose workflow somebody has ended is not live any more. It is called off, as a worker does that notices, and shown so.
/// Says why what is shown may be old: the service does not answer, or there is no worker.
pub async fn notice(place: &dyn Place, views: &mut [RunView]) -> Result<Option<String>> {
    let Some(yard) = place.here() else { return Ok(None) };
    let live = views.iter_mut().filter(|v| v.engine == EngineKind::Temporal && v.status != RunStatus::Ended);
    let live: Vec<&mut RunView> = live.take(MAX_NOTICED).collect();
    if live.is_empty() {
        return Ok(None);
    }
    let look = async {
        let service = connect(yard).await?;
        let looks = live.into_iter().map(|view| look_at(yard, &service, view));
        futures::future::try_join_all(looks).await
    };
    match tokio::time::timeout(NOTICE_WAIT, look).await {
        Ok(Ok(_)) if has_worker(yard).await? => Ok(None),
        Ok(Ok(_)) => Ok(Some(unattended("what is live there goes on", &yard.settings))),
        Ok(Err(e)) => {
            tracing::debug!("Temporal was not asked: {}", e.message);
            Ok(Some(format!("{}: shown as last recorded", silent(&yard.settings))))
        }
        Err(_) => Ok(Some(format!("{}: shown as last recorded", silent(&yard.settings)))),
    }
}

async fn look_at(yard: &Yard, service: &Service, view: &mut RunView) -> Result<()> {
    let ended = service.has_ended(run_workflow_id(&view.id)).await.map_err(service_error)?;
    if ended != Some(true) {
        return Ok(());
    }
    // It may have ended in the meantime, as it should.
    if let Some(now) = yard.store.run(&view.id).await.map_err(store_error)? {
        *view = now;
    }
    if view.status != RunStatus::Ended {
        yard.engine.call_off(&view.id).await.map_err(engine_error)?;
        view.cancelling = true;
    }
    Ok(())
}

/// Whether a worker of some host serves this store's runs on Temporal. The service itself remembers polls of dead workers for
/// minutes; the store forgets them in seconds, and this host's own at once.
async fn has_worker(yard: &Yard) -> Result<bool> {
    let processes = yard.store.processes().await.map_err(store_error)?;
    Ok(processes.iter().any(|p| p.kind == ProcessKind::Temporal && !(p.host == yard.host && is_gone(&p.id))))
}

/// Has every host look for orphans, again and again. Says how often, whether that was so before, and what it waits for.
pub async fn start_cleanup(yard: &Yard) -> Result<(CleanupStarted, Option<String>)> {
    let s = &yard.settings;
    let service = connect(yard).await?;
    let started =
        service.start_cleanup(s.cleanup_interval, s.cleanup_max_age).await.map_err(service_error)?;
    let notice = match has_worker(yard).await? {
        true => None,
        false => Some(unattended("it begins", s)),
    };
    Ok((started, notice))
}

/// With what it waits for, where nobody is there to hear it.
pub async fn stop_cleanup(yard: &Yard) -> Result<CleanupStopped> {
    let service = connect(yard).await?;
    if !service.tell_cleanup_to_stop().await.map_err(service_error)? {
        return Err(CliError::usage("no cleanup is under way on this task queue")
            .hint("`forkyard cleanup --engine temporal` starts one"));
    }
    if !has_worker(yard).await? {
        let notice = format!("The cleanup is told to stop. {}", unattended("it stops", &yard.settings));
        return Ok(CleanupStopped { stats: None, notice: Some(notice) });
    }
    let stats: SweepStats = service.cleanup_result().await.map_err(service_error)?;
    Ok(CleanupStopped { stats: Some(stats.into()), notice: None })
}

/// A worker of the service, until stopped.
pub async fn work(
    yard: &Yard,
    watched: Watched,
    stop: CancellationToken,
    out: &mut Output<'_>,
) -> Result<()> {
    let s = &yard.settings;
    let config = ServiceConfig { meter: watched.meter, ..config(s, &yard.owner)? };
    let service = Service::connect(&config).await.map_err(service_error)?;
    if !out.json {
        out.line(&format!(
            "Working for Temporal at {} (namespace {}, task queue {}) until stopped by ctrl-C or SIGTERM.",
            service.address(),
            s.temporal_namespace,
            s.temporal_task_queue
        ))?;
    }
    let config = WorkerConfig {
        host: yard.host.clone(),
        owner: yard.owner.clone(),
        host_limit: s.host_concurrency as usize,
        heir: yard.engine.clone(),
        counted: watched.counted,
        beat: s.heartbeat_interval.as_duration(),
        grace: GRACE.as_duration(),
        sweep: SweepConfig { interval: s.cleanup_interval.as_duration(), max_age: s.cleanup_max_age },
    };
    let host = Arc::new(HostYard(yard.providers.values().cloned().collect()));
    forkyard_temporal::work(service, yard.store.clone(), yard.hands.clone(), host, config, stop)
        .await
        .map_err(service_error)
}
