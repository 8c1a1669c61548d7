//! Errors as clients see them: a stable code, what is wrong, and what to do about it. All codes and their status stand here.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkyard_core::spec::{FieldError, InvalidSpec};
use forkyard_engine::EngineError;
use forkyard_engine::git::{GitError, GitErrorKind};
use forkyard_engine::sandboxes::types::{ErrorKind, SandboxError};
use forkyard_store::StoreError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub type Result<T, E = ApiError> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:tt $status:ident;)+) => {
        /// What went wrong, for programs. Names and meanings are for ever.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub enum Code { $($(#[doc = $doc])+ #[serde(rename = $text)] $name,)+ }

        impl Code {
            pub const ALL: &[Code] = &[$(Code::$name,)+];
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$name => $text,)+ }
            }
            pub fn status(self) -> StatusCode {
                match self { $(Code::$name => StatusCode::$status,)+ }
            }
            pub fn meaning(self) -> &'static str {
                match self { $(Code::$name => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

codes! {
    /// The request can't be read: malformed JSON, an unknown field, a wrong type, a bad query.
    BadRequest = "bad_request" BAD_REQUEST;
    /// There is no token, or nobody knows it.
    Unauthenticated = "unauthenticated" UNAUTHORIZED;
    /// The token's time is over.
    TokenExpired = "token_expired" UNAUTHORIZED;
    /// The token was revoked.
    TokenRevoked = "token_revoked" UNAUTHORIZED;
    /// The token's scope does not allow this.
    WrongScope = "wrong_scope" FORBIDDEN;
    /// The sandbox token is of another sandbox than the one asked about.
    OtherSandbox = "other_sandbox" FORBIDDEN;
    /// A newer attempt works on the fork; the sandbox token is of an older one.
    StaleAttempt = "stale_attempt" FORBIDDEN;
    /// A page of another site asked, or a page asked without saying where it is from.
    OriginRefused = "origin_refused" FORBIDDEN;
    /// The path is outside of the root that the server gives out, or is of a sandbox's own worker.
    PathRefused = "path_refused" FORBIDDEN;
    /// There is nothing at this address.
    NotFound = "not_found" NOT_FOUND;
    /// There is no such run.
    RunNotFound = "run_not_found" NOT_FOUND;
    /// The run has no such fork.
    ForkNotFound = "fork_not_found" NOT_FOUND;
    /// There is no such sandbox.
    SandboxNotFound = "sandbox_not_found" NOT_FOUND;
    /// There is no such file, folder or snapshot in the sandbox.
    FileNotFound = "file_not_found" NOT_FOUND;
    /// There is no such token.
    TokenNotFound = "token_not_found" NOT_FOUND;
    /// The fork has left no result, or not yet.
    NoResult = "no_result" NOT_FOUND;
    /// The address is there, but not for this method.
    MethodNotAllowed = "method_not_allowed" METHOD_NOT_ALLOWED;
    /// The run or the fork has ended: it can't be steered any more.
    Ended = "ended" CONFLICT;
    /// The idempotency key was used for another request.
    KeyReused = "idempotency_key_reused" CONFLICT;
    /// What is there stands against it.
    Conflict = "conflict" CONFLICT;
    /// The body, the answer or a file is larger than allowed.
    TooLarge = "too_large" PAYLOAD_TOO_LARGE;
    /// The body did not arrive in time.
    TooSlow = "too_slow" REQUEST_TIMEOUT;
    /// The body is not of the type that is read here.
    UnsupportedMediaType = "unsupported_media_type" UNSUPPORTED_MEDIA_TYPE;
    /// The request names another host than this server's.
    HostRefused = "host_refused" MISDIRECTED_REQUEST;
    /// The request is readable and can't be right; `fields` says what is wrong with which.
    Invalid = "invalid" UNPROCESSABLE_ENTITY;
    /// This machine or provider can't do that.
    Unsupported = "unsupported" UNPROCESSABLE_ENTITY;
    /// Too many streams are open, or too many messages wait.
    TooMany = "too_many" TOO_MANY_REQUESTS;
    /// A sandbox asked more often than it may in a minute.
    RateLimited = "rate_limited" TOO_MANY_REQUESTS;
    /// A fault of the server; its log says more.
    Internal = "internal" INTERNAL_SERVER_ERROR;
    /// The store, a sandbox or a remote does not answer; trying again may help.
    Unavailable = "unavailable" SERVICE_UNAVAILABLE;
}

/// An error's body.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    pub code: Code,
    /// For people.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub hint: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<WrongField>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WrongField {
    pub field: String,
    pub value: String,
    pub problem: String,
    pub fix: String,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: Code,
    pub message: String,
    pub hint: Option<String>,
    pub fields: Vec<WrongField>,
    /// Said where trying again may help.
    pub retry_after_s: u32,
}

impl ApiError {
    pub fn new(code: Code, message: impl Into<String>) -> ApiError {
        ApiError { code, message: message.into(), hint: None, fields: vec![], retry_after_s: 1 }
    }
    pub fn hint(mut self, hint: impl Into<String>) -> ApiError {
        self.hint = Some(hint.into());
        self
    }
    /// One field that can't be right.
    pub fn field(field: &str, value: impl Into<String>, problem: &str, fix: &str) -> ApiError {
        let error = FieldError {
            field: field.into(),
            value: value.into().chars().take(120).collect(),
            problem: problem.into(),
            fix: fix.into(),
        };
        InvalidSpec(vec![error]).into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.code == Code::Internal {
            tracing::error!("{}", self.message);
        }
        let status = self.code.status();
        let detail =
            ErrorDetail { code: self.code, message: self.message, hint: self.hint, fields: self.fields };
        let mut response = (status, axum::Json(ErrorBody { error: detail })).into_response();
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"forkyard\""));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(self.retry_after_s));
        }
        response
    }
}

impl From<InvalidSpec> for ApiError {
    fn from(e: InvalidSpec) -> ApiError {
        let mut error = ApiError::new(Code::Invalid, e.to_string());
        error.fields =
            e.0.into_iter()
                .map(|f| WrongField { field: f.field, value: f.value, problem: f.problem, fix: f.fix })
                .collect();
        error
    }
}

impl From<StoreError> for ApiError {
    fn from(e: StoreError) -> ApiError {
        let code = match &e {
            StoreError::Conflict { .. } | StoreError::LeaseLost | StoreError::StaleAttempt { .. } => {
                Code::Conflict
            }
            StoreError::NotFound { .. } => Code::NotFound,
            StoreError::Invalid(_) => Code::Invalid,
            StoreError::Full(_) | StoreError::Unavailable(_) => Code::Unavailable,
            StoreError::Corrupt(_) => Code::Internal,
        };
        ApiError::new(code, e.to_string())
    }
}

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> ApiError {
        match e {
            EngineError::Invalid(e) => e.into(),
            EngineError::NoSuchRun(run) => ApiError::new(Code::RunNotFound, format!("there is no run {run}")),
            EngineError::Refused(why) => ApiError::new(Code::Invalid, why),
            EngineError::Store(e) => e.into(),
            EngineError::OtherHost { .. } => ApiError::new(Code::Conflict, e.to_string()),
            EngineError::Unreadable { .. } => ApiError::new(Code::Internal, e.to_string()),
        }
    }
}

impl From<GitError> for ApiError {
    fn from(e: GitError) -> ApiError {
        let code = match e.kind {
            GitErrorKind::Invalid | GitErrorKind::NotFound | GitErrorKind::Auth => Code::Invalid,
            GitErrorKind::Conflict => Code::Conflict,
            GitErrorKind::TooLarge => Code::TooLarge,
            GitErrorKind::Corrupt => Code::Internal,
            GitErrorKind::Unavailable | GitErrorKind::Timeout => Code::Unavailable,
        };
        ApiError { hint: e.hint, ..ApiError::new(code, e.message) }
    }
}

impl From<SandboxError> for ApiError {
    fn from(e: SandboxError) -> ApiError {
        let code = match e.kind {
            ErrorKind::Invalid => Code::Invalid,
            // A sandbox itself is looked for by its own name before anything in it.
            ErrorKind::NotFound if e.message.starts_with("there is no sandbox") => Code::SandboxNotFound,
            ErrorKind::NotFound => Code::FileNotFound,
            ErrorKind::Denied | ErrorKind::Stale => Code::Conflict,
            ErrorKind::Auth | ErrorKind::Unsupported => Code::Unsupported,
            ErrorKind::TooLarge => Code::TooLarge,
            ErrorKind::Unavailable | ErrorKind::Timeout => Code::Unavailable,
        };
        ApiError { hint: e.hint, ..ApiError::new(code, e.message) }
    }
}

impl From<JsonRejection> for ApiError {
    fn from(e: JsonRejection) -> ApiError {
        let code = match e.status() {
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Code::UnsupportedMediaType,
            StatusCode::PAYLOAD_TOO_LARGE => Code::TooLarge,
            _ => Code::BadRequest,
        };
        ApiError::new(code, e.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(e: QueryRejection) -> ApiError {
        ApiError::new(Code::BadRequest, e.body_text())
    }
}

impl From<PathRejection> for ApiError {
    fn from(e: PathRejection) -> ApiError {
        ApiError::new(Code::NotFound, e.body_text())
    }
}

/// All codes as a table, for the documentation.
pub fn markdown() -> String {
    let mut out = String::from("| code | status | meaning |\n|---|---|---|\n");
    for code in Code::ALL {
        out.push_str(&format!("| `{}` | {} | {} |\n", code.as_str(), code.status().as_u16(), code.meaning()));
    }
    out
}
