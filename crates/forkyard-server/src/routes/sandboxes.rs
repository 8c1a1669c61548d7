//! Sandboxes by hand: made, looked at, forked, ended. What is done in them is next door: exec, files, pty.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use forkyard_core::sandbox::LimitsOverride;
use forkyard_core::{Millis, SandboxId, SnapshotId, Timestamp};
use forkyard_engine::sandboxes::types::{
    self, Labels, Lifetime, Limits, NetworkSpec, Provider, Root, SandboxInfo, SandboxSpec,
};
use serde_json::json;
use std::sync::Arc;

use crate::App;
use crate::access::Principal;
use crate::dto::sandbox::{
    AllStats, Children, CreateSandbox, ForkSandbox, ListSandboxes, ReadHistory, Sample, Sandbox,
    SandboxHealth, SandboxPage, SandboxStats, Snapshot, SnapshotRequest, Snapshots, Stats, StatsHistory,
};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::once::{Key, id_for};
use crate::page;

const DEFAULT_LIFETIME: Millis = Millis::minutes(120);
const LIFETIME_MS: std::ops::RangeInclusive<u64> = 1000..=7 * 24 * 3_600_000;
const MAX_CHILDREN: u32 = 100;
/// What keys of sandboxes to be made are about.
const CREATE: &str = "sandboxes";

impl App {
    pub(super) fn sandbox_id(text: &str) -> Result<SandboxId> {
        SandboxId::new(text).map_err(|_| {
            let shown: String = text.chars().take(64).collect();
            ApiError::new(Code::SandboxNotFound, format!("there is no sandbox {shown:?}"))
        })
    }

    pub(super) async fn find_sandbox(&self, id: &str) -> Result<(Arc<dyn Provider>, SandboxInfo)> {
        Ok(self.parts().sandboxes.find(&App::sandbox_id(id)?).await?)
    }

    /// For those who only look.
    pub(super) async fn observe(&self, id: &str) -> Result<Arc<dyn types::Sandbox>> {
        let (provider, info) = self.find_sandbox(id).await?;
        Ok(provider.observe(&info.id, info.attempt).await?)
    }

    async fn stats(&self, info: &SandboxInfo) -> std::result::Result<types::Stats, types::SandboxError> {
        self.figures().ask(&self.parts().sandboxes, &self.parts().clock, info).await
    }

    pub(super) async fn attach(&self, id: &str) -> Result<Arc<dyn types::Sandbox>> {
        let (provider, info) = self.find_sandbox(id).await?;
        Ok(provider.attach(&info.id, info.attempt).await?)
    }

    fn sandbox_spec(&self, r: &CreateSandbox) -> Result<SandboxSpec> {
        let plan = &self.parts().defaults.sandbox;
        let root = match (&r.image, &r.snapshot) {
            (Some(_), Some(s)) => {
                return Err(ApiError::field(
                    "snapshot",
                    s,
                    "can't stand beside an image",
                    "give one of the two",
                ));
            }
            (Some(image), None) => Root::Image(self.image(image)?),
            (None, Some(s)) => Root::Snapshot(snapshot_id(s)?),
            (None, None) => plan.root.clone(),
        };
        let usual = Limits::default().with(plan.limits);
        let limits = Limits {
            memory_bytes: within(
                "memory_bytes",
                r.memory_bytes.unwrap_or(usual.memory_bytes),
                16 << 20,
                1 << 50,
            )?,
            disk_bytes: within("disk_bytes", r.disk_bytes.unwrap_or(usual.disk_bytes), 16 << 20, 1 << 50)?,
            processes: within("processes", u64::from(r.processes.unwrap_or(usual.processes)), 4, 1 << 22)?
                as u32,
            cpus: r.cpus.unwrap_or(usual.cpus),
            network_bytes_per_s: r.network_bytes_per_s.or(usual.network_bytes_per_s),
        };
        if !(0.01..=1024.0).contains(&limits.cpus) {
            return Err(ApiError::field(
                "cpus",
                limits.cpus.to_string(),
                "is out of range",
                "give 0.01 to 1024",
            ));
        }
        let network = &plan.network;
        self.check_secrets("secrets", r.secrets.as_deref())?;
        Ok(SandboxSpec {
            root,
            limits,
            network: NetworkSpec {
                mode: r.network.map_or(network.mode, Into::into),
                allow: r.allow.clone().unwrap_or_else(|| network.allow.clone()),
                no_default_allow: r.no_default_allow.unwrap_or(network.no_default_allow),
                secrets: r.secrets.clone().unwrap_or_else(|| network.secrets.clone()),
                internal: false,
            },
            env: r.env.clone().unwrap_or_else(|| plan.env.clone()),
            // Folders of the host are the configuration's to give.
            volumes: plan.volumes.clone(),
            labels: Labels::new(),
            lifetime: lifetime(r.lifetime_ms)?,
            strict: r.strict.unwrap_or(plan.strict),
            disk_image: r.disk_image.unwrap_or(plan.disk_image),
        })
    }
}

fn within(field: &str, n: u64, min: u64, max: u64) -> Result<u64> {
    if (min..=max).contains(&n) {
        return Ok(n);
    }
    Err(ApiError::field(field, n.to_string(), "is out of range", &format!("give {min} to {max}")))
}

fn lifetime(ms: Option<u64>) -> Result<Lifetime> {
    let ms = ms.unwrap_or(DEFAULT_LIFETIME.0);
    Ok(Lifetime(Millis(within("lifetime_ms", ms, *LIFETIME_MS.start(), *LIFETIME_MS.end())?)))
}

fn snapshot_id(text: &str) -> Result<SnapshotId> {
    SnapshotId::new(text).map_err(|e| ApiError::field("snapshot", text, &e.to_string(), "name a snapshot"))
}

/// Sandboxes of the server's machine, those of runs included, oldest first.
#[utoipa::path(get, path = "/api/v1/sandboxes", tag = "sandboxes", params(ListSandboxes), security(("token" = ["read"])),
    responses((status = 200, body = SandboxPage)))]
pub(super) async fn list_sandboxes(
    State(app): State<App>,
    Query(q): Query<ListSandboxes>,
) -> Result<Json<SandboxPage>> {
    let limit = page::limit(q.limit)?;
    let after = q.cursor.as_deref().map(page::read_sandbox_cursor).transpose()?;
    let mut all = app.parts().sandboxes.list().await?;
    all.retain(|s| q.run.as_ref().is_none_or(|run| s.labels.get("run") == Some(run)));
    all.retain(|s| after.as_ref().is_none_or(|(at, id)| (s.created_at, &s.id) > (*at, id)));
    let more = all.len() > limit;
    all.truncate(limit);
    let next_cursor = all.last().filter(|_| more).map(|s| page::sandbox_cursor(s.created_at, &s.id));
    Ok(Json(SandboxPage { sandboxes: all.into_iter().map(Into::into).collect(), next_cursor }))
}

/// Makes a sandbox. With an `id` or an `Idempotency-Key`, making it twice is making it once.
#[utoipa::path(post, path = "/api/v1/sandboxes", tag = "sandboxes", request_body = CreateSandbox, security(("token" = ["steer"])),
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one sandbox")),
    responses((status = 201, body = Sandbox)))]
pub(super) async fn create_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    headers: HeaderMap,
    Json(request): Json<CreateSandbox>,
) -> Result<(StatusCode, Json<Sandbox>)> {
    let key = Key::read(&headers, &by)?;
    let act = create(&app, &by, &request, key.as_ref());
    let done = app.once(key.as_ref(), CREATE, None, &request, act).await?;
    Ok((StatusCode::CREATED, Json(done.answer)))
}

async fn create(app: &App, by: &Principal, request: &CreateSandbox, key: Option<&Key>) -> Result<Sandbox> {
    let id = match &request.id {
        Some(id) => SandboxId::new(id.as_str())
            .map_err(|e| ApiError::field("id", id, &e.to_string(), "use 1 to 63 of a-z and 0-9"))?,
        None => new_id(key, CREATE),
    };
    let spec = app.sandbox_spec(request)?;
    // What a run has made is the run's.
    if let Ok((_, there)) = app.parts().sandboxes.find(&id).await
        && there.labels.contains_key("run")
    {
        return Err(ApiError::new(Code::Conflict, format!("sandbox {id} belongs to a run")));
    }
    let detail = json!({ "image": request.image, "snapshot": request.snapshot });
    app.record(by, "sandbox.create", id.as_str(), detail).await?;
    let kind = request.provider.map_or(app.parts().defaults.sandbox.provider, Into::into);
    let sandbox = app.parts().sandboxes.create(kind, &id, &spec).await?;
    Ok(sandbox.info().await?.into())
}

/// What was half done under a key is gone on with under the same name.
fn new_id(key: Option<&Key>, what: &str) -> SandboxId {
    SandboxId::new(format!("s{}", id_for(key, what))).expect("letters and digits")
}

/// Whether sandboxes can be asked after here. For everybody, so it says no more.
#[utoipa::path(get, path = "/api/v1/sandboxes/health", tag = "sandboxes", security(()),
    responses((status = 200, body = SandboxHealth)))]
pub(super) async fn sandboxes_health(State(app): State<App>) -> Result<Json<SandboxHealth>> {
    match app.parts().sandboxes.list().await {
        Ok(_) => Ok(Json(SandboxHealth { healthy: true, detail: "sandboxes can be listed".into() })),
        Err(_) => Err(ApiError::new(Code::Unavailable, "sandboxes can't be listed")),
    }
}

/// What each sandbox uses, and how it is.
#[utoipa::path(get, path = "/api/v1/sandboxes/stats", tag = "sandboxes", security(("token" = ["read"])),
    responses((status = 200, body = AllStats)))]
pub(super) async fn all_sandbox_stats(State(app): State<App>) -> Result<Json<AllStats>> {
    let all = app.parts().sandboxes.list().await?;
    let sandboxes = futures::future::join_all(all.into_iter().map(|info| stats_of(app.clone(), info))).await;
    Ok(Json(AllStats { sandboxes }))
}

async fn stats_of(app: App, info: SandboxInfo) -> SandboxStats {
    let asked = async {
        let sandbox = app.parts().sandboxes.provider(info.provider)?.observe(&info.id, info.attempt).await?;
        Ok::<_, types::SandboxError>((sandbox.health().await?, app.stats(&info).await?))
    };
    let (healthy, detail, stats) = match asked.await {
        Ok((health, stats)) => (health.healthy, health.detail, Some(stats.into())),
        Err(e) => (false, e.message, None),
    };
    SandboxStats { sandbox_id: info.id.to_string(), healthy, detail, stats }
}

/// One sandbox.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = Sandbox)))]
pub(super) async fn get_sandbox(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Sandbox>> {
    Ok(Json(app.find_sandbox(&id).await?.1.into()))
}

/// Ends a sandbox and removes everything of it.
#[utoipa::path(delete, path = "/api/v1/sandboxes/{sandbox}", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["steer"])), responses((status = 204)))]
pub(super) async fn delete_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let (provider, info) = app.find_sandbox(&id).await?;
    app.record(&by, "sandbox.delete", &id, json!(info.labels)).await?;
    provider.destroy(&info.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a stopped sandbox on the files that it had.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/start", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["steer"])), responses((status = 200, body = Sandbox)))]
pub(super) async fn start_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Sandbox>> {
    let (provider, info) = app.find_sandbox(&id).await?;
    app.record(&by, "sandbox.start", &id, serde_json::Value::Null).await?;
    provider.start(&info.id, info.attempt).await?;
    Ok(Json(app.find_sandbox(&id).await?.1.into()))
}

/// Ends a sandbox's processes and keeps its files.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/stop", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["steer"])), responses((status = 200, body = Sandbox)))]
pub(super) async fn stop_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Sandbox>> {
    let (provider, info) = app.find_sandbox(&id).await?;
    app.record(&by, "sandbox.stop", &id, serde_json::Value::Null).await?;
    provider.stop(&info.id).await?;
    Ok(Json(app.find_sandbox(&id).await?.1.into()))
}

/// Freezes all processes of a sandbox.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/pause", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["steer"])), responses((status = 200, body = Sandbox)))]
pub(super) async fn pause_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Sandbox>> {
    let sandbox = app.attach(&id).await?;
    app.record(&by, "sandbox.pause", &id, serde_json::Value::Null).await?;
    sandbox.pause().await?;
    Ok(Json(app.find_sandbox(&id).await?.1.into()))
}

/// Lets a paused sandbox go on.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/resume", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["steer"])), responses((status = 200, body = Sandbox)))]
pub(super) async fn resume_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Sandbox>> {
    let sandbox = app.attach(&id).await?;
    app.record(&by, "sandbox.resume", &id, serde_json::Value::Null).await?;
    sandbox.resume().await?;
    Ok(Json(app.find_sandbox(&id).await?.1.into()))
}

/// Snapshots of the server's machine, those of runs included.
#[utoipa::path(get, path = "/api/v1/snapshots", tag = "sandboxes", security(("token" = ["read"])),
    responses((status = 200, body = Snapshots)))]
pub(super) async fn list_snapshots(State(app): State<App>) -> Result<Json<Snapshots>> {
    let all = app.parts().sandboxes.measured_snapshots().await?;
    Ok(Json(Snapshots { snapshots: all.into_iter().map(Into::into).collect() }))
}

/// Removes a snapshot; sandboxes that were made from it keep working.
#[utoipa::path(delete, path = "/api/v1/snapshots/{snapshot}", tag = "sandboxes", params(("snapshot" = String, Path)),
    security(("token" = ["steer"])), responses((status = 204)))]
pub(super) async fn delete_snapshot(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let sandboxes = &app.parts().sandboxes;
    let found = sandboxes.snapshots().await?.into_iter().find(|s| s.id.as_str() == id);
    let missing = || ApiError::new(Code::FileNotFound, "there is no such snapshot");
    let found = found.ok_or_else(missing)?;
    app.record(&by, "snapshot.delete", &id, json!(found.labels)).await?;
    sandboxes.provider(found.provider)?.remove_snapshot(&found.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What a sandbox uses.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/stats", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = Stats)))]
pub(super) async fn sandbox_stats(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Stats>> {
    let (_, info) = app.find_sandbox(&id).await?;
    Ok(Json(app.stats(&info).await?.into()))
}

/// What a sandbox used until now, or until it ended. Of one that this server knows nothing about there is nothing.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/stats/history", tag = "sandboxes",
    params(("sandbox" = String, Path), ReadHistory), security(("token" = ["read"])),
    responses((status = 200, body = StatsHistory)))]
pub(super) async fn sandbox_stats_history(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(q): Query<ReadHistory>,
) -> Result<Json<StatsHistory>> {
    let id = App::sandbox_id(&id)?;
    let found = app.parts().sandboxes.list().await?.into_iter().find(|s| s.id == id);
    let running = found.as_ref().is_some_and(|s| s.status == types::SandboxStatus::Running);
    if let Some(info) = found.filter(|_| running)
        && let Err(e) = app.stats(&info).await
    {
        // It may have ended just now; what is known is an answer.
        tracing::debug!(sandbox = %id, "no figures: {e}");
    }
    let history = app.figures().history(&id, Timestamp(q.after.unwrap_or(0)));
    let (limits, samples) = history.map(|h| (h.limits, h.samples)).unzip();
    let samples = samples.into_iter().flatten();
    Ok(Json(StatsHistory {
        running,
        limits: limits.map(Into::into),
        samples: samples.map(|s| Sample { at: s.at.0, stats: s.stats.into() }).collect(),
    }))
}

/// How a sandbox is.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/health", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = SandboxHealth)))]
pub(super) async fn sandbox_health(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<SandboxHealth>> {
    let health = app.observe(&id).await?.health().await?;
    Ok(Json(SandboxHealth { healthy: health.healthy, detail: health.detail }))
}

/// Freezes a sandbox's files under a name, from which others can start.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/snapshot", tag = "sandboxes",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one")),
    request_body = SnapshotRequest, security(("token" = ["steer"])), responses((status = 201, body = Snapshot)))]
pub(super) async fn snapshot_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(request): Json<SnapshotRequest>,
) -> Result<(StatusCode, Json<Snapshot>)> {
    let (key, what) = (Key::read(&headers, &by)?, format!("snapshot/{id}"));
    let act = async {
        let name = request.id.clone().unwrap_or_else(|| format!("n{}", id_for(key.as_ref(), &what)));
        let name = snapshot_id(&name)?;
        let sandbox = app.attach(&id).await?;
        app.record(&by, "sandbox.snapshot", &id, json!({ "snapshot": name })).await?;
        Ok(sandbox.snapshot(&name, &Labels::new()).await?.into())
    };
    let done = app.once(key.as_ref(), &what, None, &request, act).await?;
    Ok((StatusCode::CREATED, Json(done.answer)))
}

/// Makes copy-on-write children of a sandbox; it goes on as it is.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/fork", tag = "sandboxes",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one")),
    request_body = ForkSandbox, security(("token" = ["steer"])), responses((status = 201, body = Children)))]
pub(super) async fn fork_sandbox(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(request): Json<ForkSandbox>,
) -> Result<(StatusCode, Json<Children>)> {
    let (key, what) = (Key::read(&headers, &by)?, format!("fork/{id}"));
    let act = async {
        let count = within("count", u64::from(request.count.unwrap_or(1)), 1, u64::from(MAX_CHILDREN))?;
        let limits = LimitsOverride {
            memory_bytes: request.memory_bytes,
            cpus: request.cpus,
            disk_bytes: request.disk_bytes,
            processes: request.processes,
            network_bytes_per_s: request.network_bytes_per_s,
        };
        let like = CreateSandbox {
            memory_bytes: limits.memory_bytes,
            cpus: limits.cpus,
            disk_bytes: limits.disk_bytes,
            processes: limits.processes,
            lifetime_ms: request.lifetime_ms,
            ..Default::default()
        };
        // In the same bounds as those of any other sandbox.
        let lifetime = app.sandbox_spec(&like)?.lifetime;
        let (_, parent) = app.find_sandbox(&id).await?;
        let children: Vec<SandboxId> =
            (0..count).map(|n| new_id(key.as_ref(), &format!("{what}/{n}"))).collect();
        app.record(&by, "sandbox.fork", &id, json!({ "children": children })).await?;
        let between = snapshot_id(&format!("n{}", id_for(key.as_ref(), &what)))?;
        let made = app.parts().sandboxes.fork(&parent.id, &between, &children, lifetime, limits).await?;
        let sandboxes = made.iter().map(ToString::to_string).collect();
        Ok(Children { parent: id.clone(), sandboxes })
    };
    let done = app.once(key.as_ref(), &what, None, &request, act).await?;
    Ok((StatusCode::CREATED, Json(done.answer)))
}
