//! One HTTP request: checked against what was granted, cleaned, completed with secrets, passed on.

use std::error::Error;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Body;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode, Uri};

use super::decision::{Decision, Reason, Refusal};
use super::dial::Target;
use super::host::Host;
use super::internal::SANDBOX_HEADER;
use super::policy::{Grant, RequestFacts};
use super::upstream::Upstream;

/// A streamed body, of either direction.
pub type EgressBody = http_body_util::combinators::BoxBody<Bytes, Box<dyn Error + Send + Sync>>;

/// Any body in the proxy's shape.
pub fn egress_body<B>(body: B) -> EgressBody
where
    B: Body<Data = Bytes> + Send + Sync + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    body.map_err(Into::into).boxed()
}

fn text(text: String) -> EgressBody {
    egress_body(Full::new(Bytes::from(text)))
}

/// Why nothing came of a request, for whoever reads the output of a tool inside.
const REASON_HEADER: HeaderName = HeaderName::from_static("x-forkyard-egress");

pub fn refused(refusal: &Refusal) -> Response<EgressBody> {
    let status = match refusal.reason.decision() {
        Decision::Denied if refusal.reason == Reason::Malformed => StatusCode::BAD_REQUEST,
        Decision::Allowed | Decision::Denied => StatusCode::FORBIDDEN,
        Decision::Failed => StatusCode::BAD_GATEWAY,
    };
    let mut response = Response::new(text(format!("forkyard egress: {}\n", refusal.detail)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(REASON_HEADER, HeaderValue::from_static(refusal.reason.as_str()));
    response
}

/// Headers that concern one hop, which is not passed on.
const HOP_BY_HOP: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    // A protocol that nobody judges must not follow a judged request.
    header::UPGRADE,
    // The body is sent at once; hyper has asked the sandbox for it already.
    header::EXPECT,
];

/// Ways to say another method or another path than the one that was judged.
const OVERRIDES: [HeaderName; 5] = [
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-original-url"),
    HeaderName::from_static("x-rewrite-url"),
];

/// Headers that a sandbox can't have dropped by naming them in `Connection`: they decide where a request goes and ends.
const KEPT: [HeaderName; 2] = [header::HOST, header::CONTENT_LENGTH];

fn clean(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !KEPT.contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// The host that a request names in its Host header; exactly one is accepted.
pub fn host_header(headers: &HeaderMap) -> Result<(Host, Option<u16>), Refusal> {
    let bad = |why: &str| Refusal::new(Reason::HostMismatch, format!("Host header: {why}"));
    let mut values = headers.get_all(header::HOST).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(bad("there must be exactly one"));
    };
    let value = value.to_str().map_err(|_| bad("not text"))?;
    Host::parse_with_port(value).map_err(|_| bad("not a host"))
}

/// The Host header must be the judged host, or a shared server would take the request for another one's.
pub fn check_host(headers: &HeaderMap, target: &Target, default_port: u16) -> Result<(), Refusal> {
    let (host, port) = host_header(headers)?;
    if host == target.host && port.unwrap_or(default_port) == target.port {
        return Ok(());
    }
    Err(Refusal::new(
        Reason::HostMismatch,
        format!("the Host header says {}, the connection is to {target}", host.in_uri()),
    ))
}

/// Judges and prepares a request in place: origin form, one hop's headers gone, secrets put in.
pub fn prepare<B: Body>(
    request: &mut Request<B>,
    target: &Target,
    grant: &Grant,
    tls: bool,
) -> Result<(), Refusal> {
    let facts = RequestFacts {
        method: request.method(),
        path: request.uri().path(),
        query: request.uri().query(),
        content_type: request.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes),
        has_body: !request.body().is_end_stream(),
        tls,
    };
    let secrets = grant.judge(&facts)?;
    strip(request)?;
    let headers = request.headers_mut();
    if grant.terminated() {
        for name in &OVERRIDES {
            headers.remove(name);
        }
    }
    let default_port = if tls { 443 } else { 80 };
    let host = if target.port == default_port { target.host.in_uri() } else { target.to_string() };
    let host = HeaderValue::from_str(&host)
        .map_err(|_| Refusal::new(Reason::BadHost, "the host can't stand in a header"))?;
    headers.insert(header::HOST, host);
    for secret in secrets {
        secret.put_in(headers);
    }
    Ok(())
}

/// Origin form, and the headers of this hop gone.
pub fn strip<B>(request: &mut Request<B>) -> Result<(), Refusal> {
    let path = request.uri().path_and_query().map_or("/", |p| p.as_str()).to_string();
    *request.uri_mut() = Uri::try_from(path)
        .map_err(|_| Refusal::new(Reason::Malformed, "the request's path can't be passed on"))?;
    // The other side is spoken to in HTTP/1.1 whatever the tool inside speaks.
    *request.version_mut() = hyper::Version::HTTP_11;
    clean(request.headers_mut());
    request.headers_mut().remove(&SANDBOX_HEADER);
    Ok(())
}

/// Sends a prepared request and brings the answer into shape.
pub async fn exchange<B>(
    upstream: &mut Upstream,
    request: Request<B>,
) -> Result<Response<EgressBody>, Refusal>
where
    B: Body<Data = Bytes> + Send + Sync + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let mut response = upstream.send(request.map(egress_body)).await?;
    clean(response.headers_mut());
    Ok(response.map(egress_body))
}
