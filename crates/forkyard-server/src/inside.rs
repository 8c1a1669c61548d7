//! What a sandbox reaches under `forkyard.internal`, in every network mode: the worker protocol and the inference endpoint
//! of that one sandbox, with its own token. Nothing of the users' routes exists there, so nothing of them can be reached
//! from inside, whatever a token says.

use axum::Router;

use crate::routes;

/// The egress proxy passes requests on to it over a Unix socket, with the sandbox's id in a header that it vouches for.
pub fn router() -> Router {
    Router::new().fallback(routes::nowhere)
}
