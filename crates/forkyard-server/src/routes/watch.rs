//! Events of many runs over one WebSocket, with filters that a client can change as it goes.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
use crate::dto::event::{MAX_TYPES, kinds};
use crate::error::{ApiError, Code, Result};
use crate::extract::Query;
use crate::stream::{Filter, Line, Tail, Told};

/// Runs that one connection may watch: each keeps a reader and its last events in memory.
const MAX_RUNS: usize = 200;
/// Parts of one run that are named: more forks and sandboxes than runs have.
const MAX_PARTS: usize = 200;
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
    /// RUN, RUN/N or the id of a run's sandbox, with commas between them, at most 200; left out: every run that is under way
    /// or begins.
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
    Unsubscribe(Left),
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

/// What is not watched any more: a run with all that was named of it, one of its forks, or a sandbox.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Left {
    #[serde(default)]
    run: Option<String>,
    #[serde(default)]
    fork: Option<ForkNum>,
    #[serde(default)]
    sandbox: Option<String>,
}

/// Events over a WebSocket.
///
/// The server sends `{"event": …}` for each, and `{"caught_up"}`, `{"catch_up"}`, `{"end"}` with run and position as SSE
/// does. A client may send `{"subscribe": {"run", "fork", "types", "after"}}` and `{"unsubscribe": {"run", "fork"}}` at any
/// time, with `"sandbox"` in place of run and fork; what it gets wrong is answered with `{"error": …}`. What is named of one
/// run is watched together, each with its own types, and one event is told once; the same named again is watched as it was
/// named last. To unsubscribe from a run ends all that was named of it.
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
            let ids: BTreeSet<&str> = ids.split(',').map(str::trim).collect();
            if ids.len() > MAX_RUNS {
                return Err(too_many(&format!("{} ids are too many: ", ids.len())));
            }
            // To find them may take a while; whoever may not look any more does not wait for it.
            tokio::select! {
                biased;
                () = app.parts().stop.cancelled() => {
                    return Err(ApiError::new(Code::Unavailable, "the server is going away"));
                }
                () = by.clone().until_void(app.clone()) => {
                    return Err(ApiError::new(Code::TokenRevoked, "the token was revoked meanwhile"));
                }
                watched = client.watch(ids, q.after, kinds) => watched?,
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

/// A part of a run.
#[derive(Clone, PartialEq, Eq)]
enum Part {
    Fork(ForkNum),
    /// And the fork that works in it.
    Sandbox {
        id: SandboxId,
        fork: Option<ForkNum>,
    },
}

/// One thing that a client has named: a run or a part of it.
struct Wanted {
    /// None: all of it.
    part: Option<Part>,
    filter: Filter,
    /// What is behind this position is told.
    after: u64,
}

impl Wanted {
    fn new(part: Option<Part>, kinds: Vec<String>, after: u64) -> Wanted {
        let fork = match part {
            Some(Part::Fork(n)) => Some(n),
            Some(Part::Sandbox { .. }) | None => None,
        };
        Wanted { part, filter: Filter { fork, kinds }, after }
    }

    fn event(&self, line: &Line) -> bool {
        let named = match &self.part {
            Some(Part::Sandbox { id, .. }) => line.sandbox.as_ref() == Some(id),
            Some(Part::Fork(_)) | None => true,
        };
        named && line.position > self.after && self.filter.wants(line)
    }

    fn live(&self, fork: ForkNum) -> bool {
        match self.part {
            Some(Part::Fork(n)) => fork == n,
            Some(Part::Sandbox { fork: of, .. }) => of == Some(fork),
            None => true,
        }
    }
}

/// All that a client wants of one run, and how far it was told. Clones share it.
#[derive(Clone)]
struct Wishes {
    only: Only,
    named: Arc<Mutex<Vec<Wanted>>>,
    told: Arc<AtomicU64>,
}

impl Wishes {
    fn new(only: Only, named: Vec<Wanted>) -> Wishes {
        Wishes { only, named: Arc::new(Mutex::new(named)), told: Arc::default() }
    }

    fn named(&self) -> MutexGuard<'_, Vec<Wanted>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> u64 {
        self.told.load(Ordering::Relaxed)
    }

    fn event(&self, line: &Line) -> bool {
        self.only.wants(line) && self.named().iter().any(|w| w.event(line))
    }

    fn live(&self, fork: ForkNum) -> bool {
        self.named().iter().any(|w| w.live(fork))
    }
}

/// What the store can leave out already.
fn common<'a>(wanted: impl Iterator<Item = &'a Filter>) -> Filter {
    let joined = wanted.cloned().reduce(|mut all, one| {
        all.fork = all.fork.filter(|n| one.fork == Some(*n));
        let any = all.kinds.is_empty() || one.kinds.is_empty();
        all.kinds.extend(one.kinds);
        all.kinds.sort_unstable();
        all.kinds.dedup();
        if any || all.kinds.len() > MAX_TYPES {
            all.kinds.clear();
        }
        all
    });
    joined.unwrap_or_default()
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
    runs: BTreeMap<RunId, Watched>,
    /// Held for as long as the client is there.
    all: Option<AbortOnDropHandle<()>>,
    to_client: mpsc::Sender<Out>,
}

/// A run that is told of.
struct Watched {
    wishes: Wishes,
    task: AbortOnDropHandle<()>,
}

impl Watched {
    /// What was wanted, each from where it was told to.
    async fn stop(self) -> Vec<Wanted> {
        self.task.abort();
        // Once it has ended it tells nothing more, however it ended.
        let _ = self.task.await;
        let told = self.wishes.told();
        let mut named = std::mem::take(&mut *self.wishes.named());
        named.iter_mut().for_each(|w| w.after = w.after.max(told));
        named
    }
}

fn too_many(what: &str) -> ApiError {
    ApiError::new(Code::TooMany, format!("{what}one connection watches at most {MAX_RUNS} runs"))
        .hint("unsubscribe from some, or use several connections")
}

impl Client {
    /// What these ids name.
    async fn watch(&mut self, ids: BTreeSet<&str>, after: Option<u64>, kinds: Vec<String>) -> Result<()> {
        let mut wanted: BTreeMap<RunId, Vec<Option<Part>>> = BTreeMap::new();
        for id in ids {
            let (run, part) = entity(&self.app, id).await?;
            wanted.entry(run).or_default().push(part);
        }
        for (run, parts) in wanted {
            self.subscribe(run, after, kinds.clone(), parts).await?;
        }
        Ok(())
    }

    /// Beside what is watched of the run already.
    async fn subscribe(
        &mut self,
        run: RunId,
        after: Option<u64>,
        kinds: Vec<String>,
        parts: Vec<Option<Part>>,
    ) -> Result<()> {
        let before = self.runs.get(&run);
        if self.runs.len() >= MAX_RUNS && before.is_none() {
            return Err(too_many(""));
        }
        let after = match after {
            Some(after) => after,
            None => self.app.store().last_position(&run).await?,
        };
        let (mut from, mut filters) = (after, vec![]);
        if let Some(before) = before {
            let named = before.wishes.named();
            let others: Vec<_> = named.iter().filter(|w| !parts.contains(&w.part)).collect();
            if others.len() + parts.len() > MAX_PARTS {
                return Err(ApiError::new(
                    Code::TooMany,
                    format!("at most {MAX_PARTS} parts of one run are watched"),
                )
                .hint("subscribe to the run"));
            }
            let told = before.wishes.told();
            from = others.iter().map(|w| w.after.max(told)).fold(from, u64::min);
            filters.extend(others.iter().map(|w| w.filter.clone()));
        }
        let mut named: Vec<Wanted> =
            parts.into_iter().map(|part| Wanted::new(part, kinds.clone(), after)).collect();
        let filter = common(filters.iter().chain(named.iter().map(|w| &w.filter)));
        // Opened first: what was watched before stays so if that fails.
        let tail = Tail::open(&self.app, run.clone(), from, filter).await?.with_live(self.live);
        if let Some(before) = self.runs.remove(&run) {
            let others = before.stop().await;
            for other in others {
                if named.iter().all(|w| w.part != other.part) {
                    named.push(other);
                }
            }
        }
        let wishes = Wishes::new(self.only, named);
        wishes.told.store(from, Ordering::Relaxed);
        let task = tokio::spawn(pass_on(tail, run.clone(), wishes.clone(), self.to_client.clone()));
        self.runs.insert(run, Watched { wishes, task: AbortOnDropHandle::new(task) });
        Ok(())
    }

    /// Ends what was named so; a run goes with the last of it.
    fn leave(&mut self, named: impl Fn(&RunId, &Option<Part>) -> bool) {
        self.runs.retain(|run, watched| {
            let mut wanted = watched.wishes.named();
            wanted.retain(|w| !named(run, &w.part));
            !wanted.is_empty()
        });
    }

    /// Every run that is under way, and every one that begins.
    fn follow_all(&mut self, kinds: Vec<String>) {
        let (app, to) = (self.app.clone(), self.to_client.clone());
        let all = follow_all(app, self.live, self.only, kinds, to);
        self.all = Some(AbortOnDropHandle::new(tokio::spawn(all)));
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

async fn follow_all(app: App, with_live: bool, only: Only, kinds: Vec<String>, to: mpsc::Sender<Out>) {
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
                    let whole = Wanted::new(None, kinds.clone(), after);
                    let filter = whole.filter.clone();
                    if let Ok(tail) = Tail::open(&app, view.id.clone(), after, filter).await {
                        let wishes = Wishes::new(only, vec![whole]);
                        let tail = tail.with_live(with_live);
                        let task = tokio::spawn(pass_on(tail, view.id.clone(), wishes, to.clone()));
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
async fn pass_on(mut tail: Tail, run: RunId, wishes: Wishes, to: mpsc::Sender<Out>) {
    while let Some(told) = tail.next().await {
        let control =
            |word: &str, position: u64| json!({ word: { "run": run, "position": position } }).to_string();
        let position = match &told {
            Told::Event(line) => Some(line.position),
            Told::CaughtUp { position } | Told::CatchUp { position } | Told::End { position } => {
                Some(*position)
            }
            Told::Live { .. } => None,
        };
        let out = match told {
            Told::Event(line) if !wishes.event(&line) => None,
            Told::Live { fork, .. } if !wishes.live(fork) => None,
            Told::Event(line) => {
                let json = line.json.as_deref().and_then(|j| std::str::from_utf8(j).ok()).unwrap_or("null");
                Some((format!("{{\"event\":{json}}}"), None))
            }
            Told::Live { json, .. } => {
                let json = std::str::from_utf8(&json).unwrap_or("null");
                Some((format!("{{\"live\":{{\"run\":\"{run}\",\"said\":{json}}}}}"), None))
            }
            Told::CaughtUp { position } => Some((control("caught_up", position), None)),
            Told::CatchUp { position } => Some((control("catch_up", position), None)),
            Told::End { position } => Some((control("end", position), Some(run.clone()))),
        };
        if let Some((text, over)) = out
            && to.send(Out { text, over }).await.is_err()
        {
            return;
        }
        // Nothing is waited for in between: who stops this task knows what is on its way.
        if let Some(position) = position {
            wishes.told.fetch_max(position, Ordering::Relaxed);
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
                Some(Ok(Message::Text(text))) => {
                    // What is asked for may have to be looked for.
                    let heeded = tokio::select! {
                        biased;
                        () = app.parts().stop.cancelled() => return,
                        () = &mut void => return,
                        heeded = heed(&mut client, &text) => heeded,
                    };
                    match heeded {
                        Ok(None) => continue,
                        Ok(Some(answer)) => Message::Text(answer.to_string().into()),
                        Err(e) => {
                            let error = json!({ "error": { "code": e.code, "message": e.message, "hint": e.hint } });
                            Message::Text(error.to_string().into())
                        }
                    }
                }
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
        Said::Unsubscribe(left) => {
            match (left.run, left.fork, left.sandbox) {
                (Some(run), None, None) => client.leave(|id, _| id.as_str() == run),
                (Some(run), Some(fork), None) => {
                    client.leave(|id, part| id.as_str() == run && *part == Some(Part::Fork(fork)));
                }
                (None, None, Some(sandbox)) => client.leave(
                    |_, part| matches!(part, Some(Part::Sandbox { id, .. }) if id.as_str() == sandbox),
                ),
                (_, _, _) => return Err(neither("unsubscribe")),
            }
            Ok(None)
        }
        Said::Subscribe(w) => {
            let types = if w.types.is_empty() { None } else { Some(w.types.join(",")) };
            let kinds = kinds(types.as_deref())?;
            let (run, part) = match (w.run, w.fork, w.sandbox) {
                (Some(run), fork, None) => (client.app.run(&run).await?.id, fork.map(Part::Fork)),
                (None, None, Some(sandbox)) => {
                    let (run, part) = of_sandbox(&client.app, &sandbox).await?;
                    (run, Some(part))
                }
                (_, _, _) => return Err(neither("subscribe")),
            };
            client.subscribe(run, w.after, kinds, vec![part]).await?;
            Ok(None)
        }
    }
}

fn neither(word: &str) -> ApiError {
    ApiError::new(Code::BadRequest, "a subscription is of a run or of a sandbox")
        .hint(format!("send {{\"{word}\": {{\"run\": \"…\"}}}} or {{\"{word}\": {{\"sandbox\": \"…\"}}}}"))
}
