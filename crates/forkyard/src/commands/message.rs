use clap::Args;
use forkyard_agent::ports::MessageKind;
use forkyard_core::ForkNum;
use forkyard_engine::ports::StoredText;
use serde_json::json;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::runs::{see_to, the_fork, the_live_run, with_place};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct MessageArgs {
    /// RUN/N, or RUN for all of its forks.
    #[arg(value_name = "RUN/N")]
    pub target: Target,
    /// What to say; `-` reads standard input.
    #[arg(value_name = "TEXT")]
    pub text: String,
    /// Stop what it is doing first.
    #[arg(long)]
    pub interrupt: bool,
}

impl MessageArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let content =
            if self.text == "-" { std::io::read_to_string(std::io::stdin())? } else { self.text.clone() };
        if content.trim().is_empty() {
            return Err(CliError::usage("the message is empty").hint("write what to say after RUN/N"));
        }
        let run = &self.target.run;
        let (forks, detached, notice) = with_place(global, async |place| {
            let forks = send(place, &self.target, &content, self.interrupt).await?;
            let view = the_live_run(place, run).await?;
            if !view.detached {
                see_to(place, global, run).await?;
            }
            Ok((forks, view.detached, temporal::waits_for(place, &view).await?))
        })?;
        if out.json {
            out.json(
                &json!({ "schema": "forkyard.message/1", "run": run, "forks": forks, "notice": notice }),
            )?;
        } else {
            let names: Vec<String> = forks.iter().map(|n| format!("{run}/{n}")).collect();
            out.line(&format!("Sent to {}.", names.join(", ")))?;
            if let Some(notice) = notice {
                out.line(&notice)?;
            }
            if detached {
                out.line(&format!(
                    "{run} is detached: it is read when the run goes on. Go on with: forkyard resume {run}"
                ))?;
            }
        }
        Ok(Exit::Success)
    }
}

/// Puts a message into the inbox of the fork, or of all forks that are at work; says of which.
pub async fn send(
    place: &dyn Place,
    target: &Target,
    content: &str,
    interrupt: bool,
) -> Result<Vec<ForkNum>> {
    let run = &target.run;
    let kind = if interrupt { MessageKind::Interrupt } else { MessageKind::UserMessage };
    let message = StoredText::new(kind, content);
    the_live_run(place, run).await?;
    let to = match target.fork {
        Some(n) => vec![the_fork(place, run, n).await?],
        None => place.forks(run).await?,
    };
    let to: Vec<ForkNum> = to.iter().filter(|f| f.outcome.is_none()).map(|f| f.fork).collect();
    if to.is_empty() {
        return Err(CliError::usage(format!("{target} has ended: nobody would read it"))
            .hint(format!("`forkyard status {run}` shows who is still at work")));
    }
    for n in &to {
        place.message(run, *n, &message).await?;
    }
    Ok(to)
}
