//! `forkyard worker --in-sandbox`: the agent of the sandbox that it runs in.
//!
//! Its tools act on the files around it. Everything else is the server's: the model, the journal, messages, and who may go
//! on. A server that is away is waited for; what was sent twice counts once; a token of a newer attempt is taken up from
//! its file, so that the work goes on through restarts of the server without a break.

mod client;
mod model;
mod ports;
mod variables;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use forkyard_agent::inference::{Inference, InferenceSettings, SessionSpec};
use forkyard_agent::ports::MemoryBudget;
use forkyard_agent::{Agent, AgentError};
use forkyard_core::pricing::PriceBook;
use forkyard_sandbox::here::Here;

use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::runs::stop_on_signals;
use crate::settings::environment;
use crate::yard::random_text;

use client::Client;
use model::ServedModel;
use ports::{CountingSink, ServedInbox, ServedJournal};
use variables::Variables;

pub fn run() -> Result<Exit> {
    let env = environment();
    let variables = Variables::read(&env)?;
    log_to_stderr(env.get("FORKYARD_LOG").map_or("warn", String::as_str));
    crate::runtime()?.block_on(work(variables))
}

/// Whoever started it keeps the end of what it says.
fn log_to_stderr(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // Fails only if somebody listens already.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}

async fn work(v: Variables) -> Result<Exit> {
    let stop = stop_on_signals()?;
    let client = Arc::new(Client::new(&v.callback_url, v.task.sandbox.clone(), v.token)?);
    ports::announce(&client).await.map_err(|e| CliError::failure(e.to_string()))?;
    let config = v.task.config();
    let events = Arc::new(AtomicU64::new(0));
    let _heart = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(ports::beat(
        client.clone(),
        config.heartbeat,
        events.clone(),
    )));
    let here = Here::open(
        v.task.sandbox.clone(),
        v.task.attempt,
        &v.dir,
        &v.commands_env,
        format!("{}{}", random_text(32), random_text(32)),
    )
    .await?;
    let inbox = ServedInbox::open(client.clone()).await.map_err(|e| CliError::failure(e.to_string()))?;
    let journal = ServedJournal::new(client.clone(), inbox.clone());
    let inference =
        Inference::new(model::backend(client.clone()), PriceBook::default(), InferenceSettings::default());
    // Money is counted and bounded on the other side.
    let ledger = MemoryBudget::unlimited().ledger(config.fork, config.attempt);
    let session = inference.session(SessionSpec {
        key: v.task.task_id(),
        fork: Some(config.fork),
        ledger: Arc::new(ledger),
        cancel: stop.clone(),
    });
    let agent = Agent {
        model: Arc::new(ServedModel::new(session, client.clone())),
        sandbox: here.clone(),
        journal: Arc::new(journal),
        inbox,
        checkpoints: None,
        events: Arc::new(CountingSink(events)),
        policy: v.task.policy.clone(),
        interceptors: vec![],
        config,
    };
    match agent.run(stop).await {
        Ok(outcome) => {
            ports::report(&client, &outcome).await.map_err(|e| CliError::failure(e.to_string()))?;
            here.close().await;
            Ok(Exit::Success)
        }
        // Commands under way go on: the next worker takes them over.
        Err(AgentError::Cancelled) => Ok(Exit::Interrupted),
        Err(e) => Err(CliError::failure(e.to_string())),
    }
}
