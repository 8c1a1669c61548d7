//! Who was killed for memory. The guest sees only a SIGKILL; the engine hears of it from the kernel.

use std::collections::HashMap;

use bollard::Docker;
use bollard::query_parameters::EventsOptionsBuilder;
use forkyard_core::{Millis, Timestamp};
use futures::StreamExt;
use tokio::sync::mpsc;

use crate::{Exec, ExecEvent, ExecResult, now};

/// The engine's word may come a little after the command's end.
const WORD_WITHIN: Millis = Millis(300);
/// Events on their way; the rest waits in the guest.
const EVENT_QUEUE: usize = 16;

/// Passes events on, and says of a killed command whether memory was why.
pub fn attributed(exec: Exec, docker: Docker, container: String, since: Timestamp) -> Exec {
    let Exec { mut events, control } = exec;
    let (sender, passed_on) = mpsc::channel(EVENT_QUEUE);
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                // Dropping ours tells the guest that nobody reads.
                () = sender.closed() => return,
            };
            let Some(mut event) = event else { return };
            if let Ok(ExecEvent::Exit(result)) = &mut event
                && was_killed(result)
            {
                result.oom_killed = ran_out(&docker, &container, since).await;
            }
            if sender.send(event).await.is_err() {
                return;
            }
        }
    });
    Exec { events: passed_on.into(), control }
}

/// 137 is a shell's word for a child that was killed.
fn was_killed(result: &ExecResult) -> bool {
    let killed = result.signal == Some(libc::SIGKILL) || result.exit_code == 128 + libc::SIGKILL;
    killed && !result.timed_out && !result.oom_killed
}

async fn ran_out(docker: &Docker, container: &str, since: Timestamp) -> bool {
    let filters =
        HashMap::from([("type", vec!["container"]), ("event", vec!["oom"]), ("container", vec![container])]);
    let options = EventsOptionsBuilder::default()
        .since(&seconds(since))
        .until(&seconds(now() + WORD_WITHIN))
        .filters(&filters)
        .build();
    let mut events = Box::pin(docker.events(Some(options)));
    // The stream ends at `until`. An engine that does not answer can't be asked who was to blame.
    matches!(events.next().await, Some(Ok(_)))
}

/// As the engine reads it: seconds and a fraction.
fn seconds(at: Timestamp) -> String {
    format!("{}.{:03}000000", at.0 / 1000, at.0 % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engines_time() {
        assert_eq!(seconds(Timestamp(1_700_000_000_007)), "1700000000.007000000");
    }
}
