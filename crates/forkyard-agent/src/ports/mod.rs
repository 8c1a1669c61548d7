//! What the agent needs from outside. Implemented over the store by the engine.

mod ledger;

pub use ledger::{Ask, Grant, Ledger, LedgerError, ReservationId, Sent};
