//! Containers that are started before anybody asks for their sandbox, so that `create` takes one instead of waiting for the
//! engine. What an image and limits decide is in the container; what only a sandbox knows (its labels, environment, lifetime,
//! attempt) its guest is told when it is taken.
//!
//! | here | it is |
//! |---|---|
//! | no file | being made by its keeper |
//! | a file in `ready` | anybody's of this install |
//! | a file in `taken` | about to become the taker's sandbox |
//! | a link of the sandbox's id to its folder | that sandbox, from then on like any other |
//!
//! Each step is one rename or one link. Whoever dies between two of them leaves its name behind, and a sweep removes the
//! container.

use std::collections::BTreeMap;
use std::time::Duration;

use forkyard_core::{Attempt, Millis, SandboxId, SnapshotId};
use tokio_util::sync::CancellationToken;

use super::Inner;
use super::image::Prepared;
use super::lifecycle::token;
use super::record::{Ready, Record, digest, is_at_work, maker};
use crate::guest_client::GuestClient;
use crate::{
    Achieved, ErrorKind, Labels, Lifetime, Limits, NetworkMode, NetworkSpec, Result, SandboxError,
    SandboxSpec, now,
};

/// Carried by what waits for its sandbox; `list` shows those only to who asks for this label.
pub const WARM_LABEL: &str = "forkyard.warm";
const WARM_VALUE: &str = "ready";
/// It ends by itself if nobody comes and nobody cleans up.
const WARM_LIFETIME: Millis = Millis::minutes(60);
/// Older ones are replaced: whoever takes one must find it alive.
const WARM_FRESH: Millis = Millis::minutes(50);
/// How often a keeper looks for what others took and what is too old: at names in a folder.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Images with limits that are kept ready at the same time: those that were asked for last.
const MAX_KINDS: usize = 4;
/// No owner has it: the first attempt of a sandbox is newer.
const NOBODYS: Attempt = Attempt(0);

/// What containers are made from ahead of time.
#[derive(Clone)]
pub struct Want {
    kind: String,
    image: String,
    prepared: Prepared,
    limits: Limits,
    achieved: Achieved,
}

impl Inner {
    /// Which of the containers that are kept ready this sandbox could be; None if it needs one of its own. Keepers will have
    /// some for the next.
    pub(super) fn kind(
        &self,
        prepared: &Prepared,
        image: &str,
        spec: &SandboxSpec,
        achieved: &Achieved,
    ) -> Option<String> {
        // A folder of the host is mounted when a container is made.
        if !spec.volumes.is_empty() {
            return None;
        }
        let limits = serde_json::to_string(&spec.limits).ok()?;
        let made_of = format!("{} {} {:?} {limits} {achieved:?}", prepared.id, self.guest, self.files);
        let kind = digest(made_of.as_bytes());
        if self.warm > 0 {
            let want = Want {
                kind: kind.clone(),
                image: image.to_string(),
                prepared: prepared.clone(),
                limits: spec.limits,
                achieved: achieved.clone(),
            };
            // A panic while it was held leaves a whole list.
            let mut wants = self.wants.lock().unwrap_or_else(|e| e.into_inner());
            wants.retain(|w| w.kind != kind);
            wants.insert(0, want);
            wants.truncate(MAX_KINDS);
            self.wanted.notify_one();
        }
        Some(kind)
    }

    /// The first of that kind that nobody else takes and that is of use.
    pub(super) async fn take(
        &self,
        kind: &str,
        record: &Record,
        env: &BTreeMap<String, String>,
        from: Option<&SnapshotId>,
    ) -> Result<Option<(Record, GuestClient)>> {
        for ready in self.home.ready()?.iter().filter(|r| r.kind == kind && is_at_work(&r.maker)) {
            let Some(taken) = self.home.take(ready)? else { continue };
            match self.adopt(&taken.id, record, env, from).await {
                Ok(adopted) => {
                    self.home.settle_taken(&taken)?;
                    self.wanted.notify_one();
                    return Ok(Some(adopted));
                }
                Err(e) => {
                    tracing::debug!(container = %taken.id, error = %e, "what was kept ready is of no use");
                    self.discard(&taken).await?;
                }
            }
        }
        Ok(None)
    }

    /// The container becomes the sandbox of `record`. Until the link at the end nobody else sees it.
    async fn adopt(
        &self,
        made_as: &SandboxId,
        record: &Record,
        env: &BTreeMap<String, String>,
        from: Option<&SnapshotId>,
    ) -> Result<(Record, GuestClient)> {
        let ready = self.home.read(made_as)?.filter(is_fresh).ok_or_else(|| {
            SandboxError::new(ErrorKind::NotFound, format!("container {made_as} is too old"))
        })?;
        let record = Record { token: ready.token, adopted: Some(env.clone()), ..record.clone() };
        if let Some(snapshot) = from {
            self.offer(made_as, snapshot)?;
        }
        self.home.write_as(made_as, &record)?;
        let client = self.greet(made_as, &record).await?;
        self.home.link(&record.id, made_as)?;
        Ok((record, client))
    }

    /// Takes what is kept ready away. Ok if somebody else took it meanwhile.
    async fn withdraw(&self, ready: &Ready) -> Result<()> {
        match self.home.take(ready)? {
            Some(taken) => self.discard(&taken).await,
            None => Ok(()),
        }
    }

    async fn discard(&self, taken: &Ready) -> Result<()> {
        self.destroy(&taken.id).await?;
        self.home.settle_taken(taken)
    }

    /// Keeps as many ready as was asked for, until `stop`; then nothing of it is left.
    pub(super) async fn keep_ready(&self, stop: CancellationToken) {
        if self.warm == 0 {
            return;
        }
        while !stop.is_cancelled() {
            let wants = self.wants.lock().unwrap_or_else(|e| e.into_inner()).clone();
            for want in &wants {
                if let Err(e) = self.fill(want, &stop).await {
                    tracing::warn!(image = want.image, error = %e, "no container could be kept ready");
                }
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.wanted.notified() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
        let me = maker();
        for ready in self.home.ready().unwrap_or_default().iter().filter(|r| r.maker == me) {
            if let Err(e) = self.withdraw(ready).await {
                tracing::warn!(container = %ready.id, error = %e, "what was kept ready is left to a sweep");
            }
        }
    }

    async fn fill(&self, want: &Want, stop: &CancellationToken) -> Result<()> {
        let mut there = 0;
        for ready in self.home.ready()?.iter().filter(|r| r.kind == want.kind) {
            if is_at_work(&ready.maker) && self.home.read(&ready.id)?.is_some_and(|r| is_fresh(&r)) {
                there += 1;
            } else {
                self.withdraw(ready).await?;
            }
        }
        for _ in there..self.warm {
            if !stop.is_cancelled() {
                self.make_ready(want).await?;
            }
        }
        Ok(())
    }

    async fn make_ready(&self, want: &Want) -> Result<()> {
        let id = SandboxId::new(format!("warm{}", &token()?[..16]))
            .map_err(|e| SandboxError::new(ErrorKind::Invalid, e.to_string()))?;
        let spec = SandboxSpec {
            limits: want.limits,
            network: NetworkSpec { mode: NetworkMode::None, ..Default::default() },
            labels: Labels::from([(WARM_LABEL.to_string(), WARM_VALUE.to_string())]),
            lifetime: Lifetime(WARM_LIFETIME),
            ..SandboxSpec::default()
        };
        let created_at = now();
        let record = Record {
            id: id.clone(),
            attempt: NOBODYS,
            token: token()?,
            image: want.image.clone(),
            achieved: want.achieved.clone(),
            created_at,
            deadline: created_at + WARM_LIFETIME,
            spec,
            paused: false,
            maker: maker(),
            adopted: None,
        };
        let made = async {
            self.home.make(&record, self.user.0, self.user.1)?;
            // Empty: whoever takes it may start from a snapshot.
            let from = self.home.make_from(&id)?;
            self.make(&record, &want.prepared, &BTreeMap::new(), Some(from)).await?;
            self.begin(&record).await
        };
        match made.await {
            Ok(_) => self.home.offer_ready(&Ready { kind: want.kind.clone(), maker: maker(), id }),
            Err(error) => {
                if let Err(e) = self.destroy(&id).await {
                    tracing::warn!(container = %id, error = %e, "leftovers of a container that was to be kept ready");
                }
                Err(error)
            }
        }
    }

    /// Containers whose keeper or taker is gone, and those that have ended.
    pub(super) async fn sweep_ready(&self) -> Result<()> {
        for ready in self.home.ready()? {
            if !is_at_work(&ready.maker) || !self.is_running(&ready.id).await? {
                self.withdraw(&ready).await?;
            }
        }
        for taken in self.home.taken()?.iter().filter(|taken| !is_at_work(&taken.maker)) {
            match self.home.read(&taken.id)? {
                // It is a sandbox; its taker only did not live to say so.
                Some(record) if self.is_taken_by(&taken.id, &record) => self.home.settle_taken(taken)?,
                Some(_) | None => self.discard(taken).await?,
            }
        }
        Ok(())
    }

    fn is_taken_by(&self, made_as: &SandboxId, record: &Record) -> bool {
        record.id != *made_as && self.home.made_as(&record.id) == *made_as
    }

    /// A container that is no sandbox, and that nobody will make one of now that whoever was at it is gone.
    pub(super) fn is_nobodys(&self, made_as: &SandboxId) -> Result<bool> {
        let Some(record) = self.home.read(made_as)? else { return Ok(false) };
        let is_warm = record.id != *made_as || record.spec.labels.contains_key(WARM_LABEL);
        if !is_warm || self.is_taken_by(made_as, &record) {
            return Ok(false);
        }
        let waits = self.home.ready()?.iter().any(|r| r.id == *made_as);
        let is_being_taken = self.home.taken()?.iter().any(|t| t.id == *made_as && is_at_work(&t.maker));
        Ok(!waits && !is_being_taken)
    }
}

fn is_fresh(record: &Record) -> bool {
    now().since(record.created_at) < WARM_FRESH
}
