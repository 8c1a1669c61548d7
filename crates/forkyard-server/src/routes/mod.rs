//! One file a resource. A route stands where its description stands, so neither can be without the other.

mod about;
mod audit;
mod chores;
mod docs;
mod events;
mod exec;
mod files;
mod forks;
mod health;
mod private;
mod runs;
mod sandbox_events;
mod sandboxes;
mod session;
mod tokens;
mod watch;

pub use about::Doctor;
use axum::Router;
use utoipa::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::access::{SANDBOX_SCHEME, SCHEME};
use crate::error::{ApiError, Code, ErrorBody};
use crate::inside::{self, AnthropicError};

pub(crate) use sandbox_events::{Task, task_of};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Forkyard",
        description = "Forks a repository into isolated sandboxes, runs a coding agent in each, keeps the best result."
    ),
    components(schemas(ErrorBody, AnthropicError)),
    tags(
        (name = "runs", description = "Submitted jobs"),
        (name = "forks", description = "Branches of a run: one agent in one sandbox each"),
        (name = "events", description = "What happened, as it happens"),
        (name = "sandboxes", description = "Isolated environments, of runs and by hand"),
        (name = "worker", description = "For whoever works inside a sandbox, with the sandbox's own token"),
        (name = "server", description = "This server: health, access, this description"),
    )
)]
struct Described;

fn all() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Described::openapi())
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(about::about))
        .routes(routes!(about::doctor))
        .routes(routes!(docs::openapi_json))
        .routes(routes!(docs::reference))
        .routes(routes!(docs::reference_script))
        .routes(routes!(session::login))
        .routes(routes!(session::whoami))
        .routes(routes!(session::logout))
        .routes(routes!(session::create_login_link))
        .routes(routes!(runs::list_runs, runs::create_run))
        .routes(routes!(runs::stream_runs))
        .routes(routes!(runs::get_run))
        .routes(routes!(runs::pause_run))
        .routes(routes!(runs::resume_run))
        .routes(routes!(runs::cancel_run))
        .routes(routes!(forks::run_results))
        .routes(routes!(forks::compare_run))
        .routes(routes!(forks::list_forks, forks::add_forks))
        .routes(routes!(forks::get_fork))
        .routes(routes!(forks::fork_diff))
        .routes(routes!(forks::fork_patch))
        .routes(routes!(forks::fork_pack))
        .routes(routes!(forks::fork_commits))
        .routes(routes!(forks::captured_file))
        .routes(routes!(forks::fork_files))
        .routes(routes!(forks::fork_file))
        .routes(routes!(forks::fork_logs))
        .routes(routes!(forks::fork_checkpoints))
        .routes(routes!(forks::send_message))
        .routes(routes!(forks::interrupt_fork))
        .routes(routes!(forks::cancel_fork))
        .routes(routes!(events::list_events))
        .routes(routes!(events::stream_events))
        .routes(routes!(watch::watch_events))
        .routes(routes!(sandboxes::list_sandboxes, sandboxes::create_sandbox))
        .routes(routes!(sandboxes::sandboxes_health))
        .routes(routes!(sandboxes::all_sandbox_stats))
        .routes(routes!(sandboxes::get_sandbox, sandboxes::delete_sandbox))
        .routes(routes!(sandboxes::start_sandbox))
        .routes(routes!(sandboxes::stop_sandbox))
        .routes(routes!(sandboxes::pause_sandbox))
        .routes(routes!(sandboxes::resume_sandbox))
        .routes(routes!(sandboxes::list_snapshots))
        .routes(routes!(sandboxes::delete_snapshot))
        .routes(routes!(sandboxes::sandbox_stats))
        .routes(routes!(sandboxes::sandbox_stats_history))
        .routes(routes!(sandboxes::sandbox_health))
        .routes(routes!(sandboxes::snapshot_sandbox))
        .routes(routes!(sandboxes::fork_sandbox))
        .routes(routes!(exec::exec))
        .routes(routes!(exec::exec_stream))
        .routes(routes!(exec::pty))
        .routes(routes!(files::list_files, files::remove_file))
        .routes(routes!(files::read_file, files::write_file))
        .routes(routes!(sandbox_events::sandbox_events))
        .routes(routes!(sandbox_events::sandbox_trajectory))
        .routes(routes!(sandbox_events::sandbox_task))
        .routes(routes!(sandbox_events::sandbox_message))
        .routes(routes!(sandbox_events::list_interventions, sandbox_events::intervene))
        .routes(routes!(tokens::list_tokens, tokens::create_token))
        .routes(routes!(tokens::revoke_token))
        .routes(routes!(audit::read_audit))
        .routes(routes!(chores::cleanup))
        .routes(routes!(chores::stop_cleanup))
        .routes(routes!(chores::gc))
        .merge(inside::described())
}

pub(crate) fn router() -> Router<App> {
    all().split_for_parts().0
}

/// As it is served.
pub fn openapi() -> serde_json::Value {
    let mut described = all().into_openapi();
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let components = described.components.get_or_insert_default();
    components.add_security_scheme(SCHEME, scheme.clone());
    components.add_security_scheme(SANDBOX_SCHEME, scheme);
    let mut json = serde_json::to_value(&described).unwrap_or_default();
    let error = |schema: &str| {
        serde_json::json!({
            "description": "What is wrong, by a stable code",
            "content": { "application/json": { "schema": { "$ref": format!("#/components/schemas/{schema}") } } }
        })
    };
    for (path, item) in json["paths"].as_object_mut().into_iter().flatten() {
        for (_, operation) in item.as_object_mut().into_iter().flatten() {
            let schema = if path.starts_with("/v1/") { "AnthropicError" } else { "ErrorBody" };
            operation["responses"]["default"] = error(schema);
        }
    }
    json
}

pub(crate) async fn nowhere() -> ApiError {
    ApiError::new(Code::NotFound, "there is nothing at this address").hint("see /api/v1/docs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_described_as_bytes() {
        let described = openapi();
        let operations =
            described["paths"].as_object().unwrap().values().flat_map(|i| i.as_object().unwrap());
        let mut bodies = 0;
        for (_, operation) in operations {
            let answers = operation["responses"].as_object().unwrap().values();
            for body in answers.chain(operation.get("requestBody")) {
                if let Some(content) = body["content"].get("application/octet-stream") {
                    let schema = &content["schema"];
                    assert_eq!((&schema["type"], &schema["format"]), (&"string".into(), &"binary".into()));
                    bodies += 1;
                }
            }
        }
        assert_eq!(bodies, 5);
    }
}
