//! Events of many runs over one WebSocket, with filters that a client can change as it goes.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use bytes::Bytes;
use forkyard_core::{ForkNum, RunId, SandboxId};
use forkyard_store::{RunQuery, Words};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use utoipa::IntoParams;

use crate::App;
use crate::access::Principal;
use crate::dto::event::kinds;
use crate::error::{ApiError, Code, Result};
use crate::extract::Query;
use crate::stream::{Filter, Line, Tail, Told};

/// Runs that one connection may watch: each keeps a reader and its last events in memory.
const MAX_RUNS: usize = 200;
/// What is on its way to one client; what it does not take stays in the store.
const ON_THE_WAY: usize = 64;
/// Where some runs are left out, this often for one that can be watched now.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const PING: Duration = Duration::from_secs(30);
/// A client that takes nothing for this long is gone.
const SEND: Duration = Duration::from_secs(60);
const MAX_MESSAGE: usize = 64 << 10;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Watch {
    /// For browsers, which can't set a header on a WebSocket.
    token: Option<String>,
    /// Only these kinds, with commas between them; `agent.*` takes a category.
    event_types: Option<String>,
    /// `run`: events of runs themselves; `fork`: of forks; `sandbox`: those that name a sandbox. With commas between them.
    entity_types: Option<String>,
    /// RUN, RUN/N or the id of a run's sandbox, with commas between them; left out: every run that is under way or begins.
    entity_ids: Option<String>,
    /// Also what agents say while they say it, as far as this server drives them; recorded nowhere.
    live: Option<bool>,
    /// Begin after this position; left out: with what happens from now on.
    after: Option<u64>,
}

/// What a client may say.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Said {
    Subscribe(Wish),
    Unsubscribe { run: String },
    Ping,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wish {
    #[serde(default)]
    run: Option<String>,
    #[serde(default)]
    fork: Option<ForkNum>,
    /// In place of a run.
    #[serde(default)]
    sandbox: Option<String>,
    #[serde(default)]
    types: Vec<String>,
    #[serde(default)]
    after: Option<u64>,
}

/// Events over a WebSocket.
///
/// The server sends `{"event": …}` for each, and `{"caught_up"}`, `{"catch_up"}`, `{"end"}` with run and position as SSE
/// does. A client may send `{"subscribe": {"run", "fork", "types", "after"}}` and `{"unsubscribe": {"run"}}` at any time, with
/// `"sandbox"` in place of run and fork; what it gets wrong is answered with `{"error": …}`.
///
/// One connection watches at most 200 runs. Where more are under way and none was named, the newest are told, and an
/// `{"error": {"code": "too_many", …}}` says how many are not: name runs by `entity_ids`, on several connections.
#[utoipa::path(get, path = "/api/v1/ws/events", tag = "events", params(Watch), security(("token" = ["read"])),
    responses((status = 101, description = "On to WebSocket")))]
pub(super) async fn watch_events(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Query(q): Query<Watch>,
    upgrade: std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let _ = &q.token;
    let kinds = kinds(q.event_types.as_deref())?;
    let only = Only::read(q.entity_types.as_deref())?;
    let (to_client, out) = mpsc::channel(ON_THE_WAY);
    let mut client = Client {
        app: app.clone(),
        live: q.live.unwrap_or(false),
        only,
        runs: BTreeMap::new(),
        all: None,
        to_client,
    };
    match &q.entity_ids {
        None => client.follow_all(kinds),
        Some(ids) => {
            // Parts of one run are watched together; with the run itself named, all of it is.
            let mut wanted: BTreeMap<RunId, Option<Vec<Part>>> = BTreeMap::new();
            for id in ids.split(',') {
                let (run, part) = entity(&app, id.trim()).await?;
                let parts = wanted.entry(run).or_insert_with(|| Some(vec![]));
                match part {
                    Some(part) => parts.iter_mut().for_each(|p| p.push(part.clone())),
                    None => *parts = None,
                }
            }
            for (run, parts) in wanted {
                client.subscribe(run, q.after, kinds.clone(), parts.unwrap_or_default()).await?;
            }
        }
    }
    let upgrade = upgrade.map_err(|e| ApiError::new(Code::BadRequest, e.body_text()))?;
    Ok(upgrade.max_message_size(MAX_MESSAGE).on_upgrade(move |socket| talk(app, by, socket, client, out)))
}

/// A run, with the part of it that was named.
async fn entity(app: &App, id: &str) -> Result<(RunId, Option<Part>)> {
    let fix = "write RUN, RUN/N or a sandbox's id";
    let wrong = || ApiError::field("entity_ids", id, "is not a run, a fork or a sandbox", fix);
    match id.split_once('/') {
        Some((run, fork)) => {
            let fork = fork.parse().map_err(|_| wrong())?;
            Ok((app.run(run).await?.id, Some(Part::Fork(fork))))
        }
        None if id.is_empty() => Err(wrong()),
        None => match app.run(id).await {
            Err(e) if e.code == Code::RunNotFound => match of_sandbox(app, id).await {
                Ok((run, part)) => Ok((run, Some(part))),
                Err(other) if other.code == Code::SandboxNotFound => Err(e),
                Err(other) => Err(other),
            },
            found => Ok((found?.id, None)),
        },
    }
}

async fn of_sandbox(app: &App, id: &str) -> Result<(RunId, Part)> {
    let (run, fork) = app.whose(id).await?;
    Ok((app.run(&run).await?.id, Part::Sandbox { id: App::sandbox_id(id)?, fork }))
}

/// What of a run is watched.
#[derive(Clone)]
enum Part {
    Fork(ForkNum),
    /// And the fork that works in it.
    Sandbox {
        id: SandboxId,
        fork: Option<ForkNum>,
    },
}

#[derive(Clone, Default)]
struct Wanted {
    only: Only,
    /// None named: all of it.
    parts: Vec<Part>,
}

impl Wanted {
    fn event(&self, line: &Line) -> bool {
        let named = |part: &Part| match part {
            Part::Fork(n) => line.fork == Some(*n),
            Part::Sandbox { id, .. } => line.sandbox.as_ref() == Some(id),
        };
        self.only.wants(line) && (self.parts.is_empty() || self.parts.iter().any(named))
    }

    fn live(&self, fork: ForkNum) -> bool {
        let named = |part: &Part| match part {
            Part::Fork(n) => fork == *n,
            Part::Sandbox { fork: of, .. } => *of == Some(fork),
        };
        self.parts.is_empty() || self.parts.iter().any(named)
    }

    /// What the store can leave out already.
    fn fork(&self) -> Option<ForkNum> {
        match self.parts[..] {
            [Part::Fork(n)] => Some(n),
            _ => None,
        }
    }
}

/// Which kinds of things events may be about; none set: all.
#[derive(Clone, Copy, Default)]
struct Only {
    run: bool,
    fork: bool,
    sandbox: bool,
}

impl Only {
    fn read(text: Option<&str>) -> Result<Only> {
        let mut only = Only::default();
        for word in text.into_iter().flat_map(|t| t.split(',')) {
            match word.trim() {
                "run" => only.run = true,
                "fork" => only.fork = true,
                "sandbox" => only.sandbox = true,
                other => {
                    return Err(ApiError::field(
                        "entity_types",
                        other,
                        "is not known",
                        "write run, fork, sandbox",
                    ));
                }
            }
        }
        Ok(only)
    }

    fn wants(self, line: &Line) -> bool {
        let all = !(self.run || self.fork || self.sandbox);
        all || (self.run && line.fork.is_none())
            || (self.fork && line.fork.is_some())
            || (self.sandbox && line.sandbox.is_some())
    }
}

/// A message for the client, and whether it is the last of its run.
struct Out {
    text: String,
    over: Option<RunId>,
}

struct Client {
    app: App,
    live: bool,
    only: Only,
    runs: BTreeMap<RunId, AbortOnDropHandle<()>>,
    /// Held for as long as the client is there.
    all: Option<AbortOnDropHandle<()>>,
    to_client: mpsc::Sender<Out>,
}

impl Client {
    async fn subscribe(
        &mut self,
        run: RunId,
        after: Option<u64>,
        kinds: Vec<String>,
        parts: Vec<Part>,
    ) -> Result<()> {
        if self.runs.len() >= MAX_RUNS && !self.runs.contains_key(&run) {
            return Err(ApiError::new(
                Code::TooMany,
                format!("one connection watches at most {MAX_RUNS} runs"),
            )
            .hint("unsubscribe from some, or use several connections"));
        }
        let after = match after {
            Some(after) => after,
            None => self.app.store().last_position(&run).await?,
        };
        let wanted = Wanted { only: self.only, parts };
        let filter = Filter { fork: wanted.fork(), kinds };
        let tail = Tail::open(&self.app, run.clone(), after, filter).await?.with_live(self.live);
        let task = tokio::spawn(pass_on(tail, run.clone(), wanted, self.to_client.clone()));
        self.runs.insert(run, AbortOnDropHandle::new(task));
        Ok(())
    }

    /// Every run that is under way, and every one that begins.
    fn follow_all(&mut self, kinds: Vec<String>) {
        let (app, to) = (self.app.clone(), self.to_client.clone());
        let (wanted, filter) = (Wanted { only: self.only, parts: vec![] }, Filter { fork: None, kinds });
        self.all = Some(AbortOnDropHandle::new(tokio::spawn(follow_all(app, self.live, wanted, filter, to))));
    }
}

/// Of more runs than one connection may watch, the client is told. They are watched as others end.
fn left_out(live: u64) -> Out {
    let message = format!(
        "{live} runs are under way, and one connection watches at most {MAX_RUNS}: the rest is not told"
    );
    let hint = "name runs by entity_ids, on several connections; GET /api/v1/runs?live=true lists them";
    let error = json!({ "error": { "code": Code::TooMany, "message": message, "hint": hint } });
    Out { text: error.to_string(), over: None }
}

async fn follow_all(app: App, with_live: bool, wanted: Wanted, filter: Filter, to: mpsc::Sender<Out>) {
    let mut watch = app.store().watch(None);
    let mut runs: BTreeMap<RunId, AbortOnDropHandle<()>> = BTreeMap::new();
    // Clocks are too coarse to tell: what the first look finds was there before the client came.
    let (begun, mut first) = (app.now(), true);
    // That some are left out is said once, until none is.
    let mut said = false;
    loop {
        runs.retain(|_, task| !task.is_finished());
        // Those that are watched may be the newest: behind them are as many as there could be room for.
        let limit = MAX_RUNS + runs.len() + 1;
        let query = RunQuery { live: true, limit, ..Default::default() };
        match app.store().runs(&query).await {
            Ok(live) => {
                let mut left = false;
                for view in live {
                    if runs.contains_key(&view.id) {
                        continue;
                    }
                    if runs.len() >= MAX_RUNS {
                        left = true;
                        break;
                    }
                    // One that began after this client came is told from its beginning.
                    let after = if first || view.created_at < begun {
                        app.store().last_position(&view.id).await
                    } else {
                        Ok(0)
                    };
                    let Ok(after) = after else { continue };
                    if let Ok(tail) = Tail::open(&app, view.id.clone(), after, filter.clone()).await {
                        let task = tokio::spawn(pass_on(
                            tail.with_live(with_live),
                            view.id.clone(),
                            wanted.clone(),
                            to.clone(),
                        ));
                        runs.insert(view.id, AbortOnDropHandle::new(task));
                    }
                }
                if left && !said {
                    // Where they can't be counted, more than are watched is what is known.
                    let live = app.store().count_runs(&Words::default()).await.map(|c| c.live);
                    if to.send(left_out(live.unwrap_or(MAX_RUNS as u64 + 1))).await.is_err() {
                        return;
                    }
                }
                said = left;
            }
            Err(e) => tracing::warn!("runs could not be listed: {e}"),
        }
        first = false;
        tokio::select! {
            () = watch.changed() => {}
            // One that ended may have been told to its end only after the last look.
            () = tokio::time::sleep(LOOK_AGAIN), if said => {}
        }
        // Changes come in bursts; new runs do not.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits for the client with each message: a slow one falls behind here, and is served from the store then.
async fn pass_on(mut tail: Tail, run: RunId, wanted: Wanted, to: mpsc::Sender<Out>) {
    while let Some(told) = tail.next().await {
        let control =
            |word: &str, position: u64| json!({ word: { "run": run, "position": position } }).to_string();
        let (text, over) = match told {
            Told::Event(line) if !wanted.event(&line) => continue,
            Told::Live { fork, .. } if !wanted.live(fork) => continue,
            Told::Event(line) => {
                let json = line.json.as_deref().and_then(|j| std::str::from_utf8(j).ok()).unwrap_or("null");
                (format!("{{\"event\":{json}}}"), None)
            }
            Told::Live { json, .. } => {
                let json = std::str::from_utf8(&json).unwrap_or("null");
                (format!("{{\"live\":{{\"run\":\"{run}\",\"said\":{json}}}}}"), None)
            }
            Told::CaughtUp { position } => (control("caught_up", position), None),
            Told::CatchUp { position } => (control("catch_up", position), None),
            Told::End { position } => (control("end", position), Some(run.clone())),
        };
        if to.send(Out { text, over }).await.is_err() {
            return;
        }
    }
}

async fn talk(
    app: App,
    by: Principal,
    mut socket: WebSocket,
    mut client: Client,
    mut out: mpsc::Receiver<Out>,
) {
    let mut ping = tokio::time::interval(PING);
    let mut void = pin!(by.until_void(app.clone()));
    loop {
        let answer: Message = tokio::select! {
            biased;
            () = app.parts().stop.cancelled() => return,
            () = &mut void => return,
            said = socket.recv() => match said {
                Some(Ok(Message::Text(text))) => match heed(&mut client, &text).await {
                    Ok(None) => continue,
                    Ok(Some(answer)) => Message::Text(answer.to_string().into()),
                    Err(e) => {
                        let error = json!({ "error": { "code": e.code, "message": e.message, "hint": e.hint } });
                        Message::Text(error.to_string().into())
                    }
                },
                Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => continue,
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
            },
            message = out.recv() => {
                let Some(message) = message else { return };
                if let Some(run) = message.over {
                    client.runs.remove(&run);
                }
                Message::Text(message.text.into())
            }
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        match tokio::time::timeout(SEND, socket.send(answer)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

async fn heed(client: &mut Client, text: &str) -> Result<Option<Value>> {
    let said: Said = serde_json::from_str(text).map_err(|e| {
        ApiError::new(Code::BadRequest, format!("the message is not understood: {e}"))
            .hint("send {\"subscribe\": {\"run\": \"…\"}}")
    })?;
    match said {
        Said::Ping => Ok(Some(json!({ "pong": {} }))),
        Said::Unsubscribe { run } => {
            if let Ok(run) = RunId::new(run) {
                client.runs.remove(&run);
            }
            Ok(None)
        }
        Said::Subscribe(w) => {
            let types = if w.types.is_empty() { None } else { Some(w.types.join(",")) };
            let kinds = kinds(types.as_deref())?;
            let (run, parts) = match (w.run, w.fork, w.sandbox) {
                (Some(run), fork, None) => {
                    (client.app.run(&run).await?.id, fork.map(Part::Fork).into_iter().collect())
                }
                (None, None, Some(sandbox)) => {
                    let (run, part) = of_sandbox(&client.app, &sandbox).await?;
                    (run, vec![part])
                }
                (_, _, _) => {
                    return Err(ApiError::new(
                        Code::BadRequest,
                        "a subscription is of a run or of a sandbox",
                    )
                    .hint(
                        "send {\"subscribe\": {\"run\": \"…\"}} or {\"subscribe\": {\"sandbox\": \"…\"}}",
                    ));
                }
            };
            client.subscribe(run, w.after, kinds, parts).await?;
            Ok(None)
        }
    }
}
