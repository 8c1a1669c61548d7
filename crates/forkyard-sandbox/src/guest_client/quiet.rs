//! Quiet, for a snapshot: nothing starts and nothing is written inside.

use std::time::Duration;

use super::GuestClient;
use crate::{ErrorKind, Result, SandboxError};

/// Until what is being written is written.
pub const QUIET_WITHIN: Duration = Duration::from_secs(120);

/// A quiet on a connection of its own: the guest ends it, and lets go on what was frozen in it, when that connection ends. So it
/// lasts no longer than this value, whoever gives up or is cut off, and nobody ends the quiet of another.
pub struct Quieted {
    pub guest: GuestClient,
    /// Processes are alive all the same.
    pub busy: bool,
}

impl Quieted {
    /// `guest`: a connection that nobody else has.
    pub async fn begin(guest: GuestClient) -> Result<Quieted> {
        let busy = match tokio::time::timeout(QUIET_WITHIN, guest.quiesce()).await {
            Ok(quiet) => quiet?.busy,
            Err(_) => {
                let message = "files are written inside all the time: there is no moment for a snapshot";
                return Err(SandboxError::new(ErrorKind::Timeout, message)
                    .hint("take it when the upload under way has ended"));
            }
        };
        Ok(Quieted { guest, busy })
    }

    /// Everything goes on when this returns.
    pub async fn end(self) -> Result<()> {
        self.guest.thaw().await
    }
}
