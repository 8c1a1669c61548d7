//! `forkyard.internal`: from the proxy of a sandbox to the routes that are made for it, in this very process.

use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll};

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use forkyard_core::SandboxId;
use forkyard_sandbox::egress::{EgressBody, InternalService, egress_body};
use forkyard_server::inside::{self, Inside, Vouched};
use hyper::body::{Frame, SizeHint};
use hyper::{Request, Response};
use tower::ServiceExt;

pub struct Internal(Router);

impl Internal {
    pub fn new(inside: Inside) -> Internal {
        Internal(inside::router(inside))
    }
}

#[async_trait]
impl InternalService for Internal {
    async fn call(&self, sandbox: &SandboxId, request: Request<EgressBody>) -> Response<EgressBody> {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Vouched(sandbox.clone()));
        let response = match self.0.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        response.map(|body| egress_body(Shared(Mutex::new(body))))
    }
}

/// A body that threads may share, which nobody does: the proxy asks for it. The lock is never taken.
struct Shared(Mutex<Body>);

impl hyper::body::Body for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let body = self.get_mut().0.get_mut().unwrap_or_else(|e| e.into_inner());
        Pin::new(body).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
