use clap::Args;
use forkyard_core::view::{ForkView, RunStatus, RunView};
use forkyard_engine::git::CommitInfo;
use serde_json::json;

use super::list::state as run_state;
use super::target::Target;
use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::follow::overhear;
use crate::output::Output;
use crate::render::board::{diff_text, state};
use crate::render::closing::{closing, table};
use crate::render::session::day;
use crate::render::{plain, plain_block};
use crate::results::{ForkResult, RunResult};
use crate::runs::{collected, is_abandoned, the_fork, the_run, the_target, with_place};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// RUN or RUN/N [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
}

impl StatusArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let target = the_target(place, self.target.as_ref()).await?;
            let mut view = the_run(place, &target.run).await?;
            let notice = temporal::notice(place, std::slice::from_mut(&mut view)).await?;
            if let Some(notice) = &notice {
                eprintln!("{notice}");
            }
            if view.status != RunStatus::Ended {
                overhear(place, &view.id, false).await?;
            }
            let (result, forks) = RunResult::read_with_forks(place, &view).await?;
            if let Some(n) = target.fork {
                let fork = match forks.into_iter().find(|f| f.fork == n) {
                    Some(fork) => fork,
                    None => the_fork(place, &view.id, n).await?,
                };
                let result = result.results.iter().find(|r| r.fork_num == n);
                let collected = collected(place, &view.id, n).await?;
                let left_out = collected.as_ref().and_then(|c| c.commits_left_out.clone());
                let commits = match collected {
                    Some(c) if c.commits > 0 => place.commits(&view, n).await?,
                    Some(_) | None => vec![],
                };
                if out.json {
                    out.json(&json!({
                        "schema": "forkyard.fork/1", "fork": fork, "result": result, "commits": commits,
                        "commits_left_out": left_out, "notice": notice,
                    }))?;
                } else {
                    out.text(&one_fork(&fork, result, &commits, left_out.as_deref()))?;
                }
                return Ok(Exit::Success);
            }
            let abandoned = is_abandoned(place, &view).await?;
            if out.json {
                let mut json = serde_json::to_value(&result).map_err(std::io::Error::from)?;
                json["repo"] = forkyard_engine::git::shown_url(&view.repo).into();
                json["progress"] = json!(view.progress);
                json["notice"] = json!(notice);
                for (key, on) in [
                    ("paused", view.paused),
                    ("detached", view.detached),
                    ("cancelling", view.cancelling),
                    ("abandoned", abandoned),
                ] {
                    json[key] = on.into();
                }
                out.json(&json)?;
                return Ok(Exit::Success);
            }
            out.text(&head(&view))?;
            let style = out.style;
            let body = if view.status == RunStatus::Ended {
                closing(&view, &forks, &result, &style)
            } else {
                table(&forks, &view.ranking, None).render(&style)
            };
            out.text(&body)?;
            if abandoned || view.detached {
                out.line(&format!("\nNobody drives it; go on with: forkyard resume {}", view.id))?;
            }
            Ok(Exit::Success)
        })
    }
}

fn head(view: &RunView) -> String {
    let branch = view.branch.as_ref().map(|b| format!(" ({})", plain(b))).unwrap_or_default();
    format!(
        "{}  {}, started {} UTC\n{}{branch}\n{}\n\n",
        view.id,
        run_state(view).0,
        day(view.created_at),
        plain(&forkyard_engine::git::shown_url(&view.repo)),
        plain_block(view.prompt.trim()),
    )
}

fn one_fork(
    f: &ForkView,
    result: Option<&ForkResult>,
    commits: &[CommitInfo],
    left_out: Option<&str>,
) -> String {
    let mut out = format!("{}/{}  {}\n", f.run, f.fork, state(f).0);
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|v| !v.is_empty()) {
            out.push_str(&format!("{name:<10} {}\n", plain(&value)));
        }
    };
    line("name", f.name.clone());
    line("phase", Some(f.phase.clone()));
    line("model", Some(f.model.clone()));
    line("sandbox", f.sandbox.as_ref().map(ToString::to_string));
    line("attempt", Some(f.attempt.to_string()));
    line("verified", f.verified.map(|v| if v { "yes" } else { "no" }.to_string()));
    let no_score = result.and_then(|r| r.score_error.as_deref()).map(|why| format!("failed: {why}"));
    line("score", f.score.map(|s| s.to_string()).or(no_score));
    line("turns", Some(format!("{} ({} calls)", f.turns, f.tool_calls)));
    line("cost", Some(format!("{} ({} tokens)", f.cost, f.tokens)));
    line("time", Some(f.driven.to_string()));
    line("diff", f.diff.map(diff_text));
    line("error", f.error.clone());
    for (i, c) in commits.iter().enumerate() {
        let name = if i == 0 { "commits" } else { "" };
        line(name, Some(format!("{} {} ({})", &c.id[..10.min(c.id.len())], c.subject, c.author)));
    }
    line("commits", left_out.map(|why| format!("those made inside were left out: {why}")));
    line("captured", result.map(|r| r.captured.join(", ")));
    line(
        "tests",
        result
            .filter(|r| !r.edited_tests.is_empty())
            .map(|r| format!("edited {}", r.edited_tests.join(", "))),
    );
    line(
        "put back",
        result.filter(|r| !r.put_back.is_empty()).map(|r| format!("protected {}", r.put_back.join(", "))),
    );
    for (title, text) in [
        ("It said:", result.and_then(|r| r.final_response.as_deref())),
        ("Verify said:", result.and_then(|r| r.verify_output.as_deref())),
    ] {
        if let Some(text) = text.map(str::trim).filter(|t| !t.is_empty()) {
            out.push_str(&format!("\n{title}\n{}\n", plain_block(text)));
        }
    }
    out
}
