use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use forkyard_core::Millis;
use forkyard_core::spec::RepoSpec;
use forkyard_core::view::EngineKind;
use forkyard_engine::clock::Clock;
use forkyard_server::access::generated_token;
use forkyard_server::chores::Chores;
use forkyard_server::dto::chores::{Cleaned, CleanupStopped, Freed};
use forkyard_server::error::{ApiError, Code, Result as ApiResult};
use forkyard_server::routes::Doctor;
use forkyard_server::{App, Parts, Tls};
use forkyard_store::ProcessKind;
use futures::future::BoxFuture;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::run_options::RunOptions;
use super::{cleanup, doctor, gc};
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::observe::Observer;
use crate::output::Output;
use crate::runs::{stop_on_signals, with_flags};
use crate::yard::Yard;

#[derive(Debug, Clone, Default, Args)]
pub struct ServeArgs {
    /// Address to listen on [default: 127.0.0.1].
    #[arg(long, value_name = "ADDRESS")]
    pub host: Option<String>,
    /// Port to listen on; 0 takes any [default: 4610].
    #[arg(short, long, value_name = "PORT")]
    pub port: Option<String>,
    /// Repositories of this machine may be used if they lie below this folder [default: none].
    #[arg(long, value_name = "DIR")]
    pub root: Option<String>,
    /// Certificate for HTTPS (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<String>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<String>,
    /// Listen beyond this machine without TLS: tokens and code travel readable.
    #[arg(long)]
    pub insecure_http: bool,
    /// Only serve: leave runs to workers.
    #[arg(long)]
    pub no_work: bool,
}

/// The owner's token, in Forkyard's home.
pub const TOKEN_FILE: &str = "api-token";

impl ServeArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut flags = global.flags()?;
        for (key, flag, value) in [
            ("server.address", "--host", &self.host),
            ("server.port", "--port", &self.port),
            ("server.root", "--root", &self.root),
            ("server.tls_cert", "--tls-cert", &self.tls_cert),
            ("server.tls_key", "--tls-key", &self.tls_key),
        ] {
            flags.set_option(key, flag, value.as_ref());
        }
        // It serves many repositories: the one around it says nothing about them.
        let global = Global { no_project_file: true, ..global.clone() };
        with_flags(&global, flags, async |yard| self.serve(yard, out).await)
    }

    async fn serve(&self, yard: &Yard, out: &mut Output<'_>) -> Result<Exit> {
        let s = &yard.settings;
        let observer = Observer::start(s, true)?;
        let address: IpAddr = match s.server_address.as_str() {
            "localhost" => IpAddr::from([127, 0, 0, 1]),
            text => text.parse().map_err(|_| {
                CliError::usage(format!("--host {text:?} is not an address"))
                    .hint("write a number such as 127.0.0.1, ::1 or 0.0.0.0")
            })?,
        };
        let tls = tls(s.server_tls_cert.as_deref(), s.server_tls_key.as_deref())?;
        if !address.is_loopback() && tls.is_none() && !self.insecure_http {
            return Err(CliError::usage(format!(
                "{address} can be reached from other machines, and without TLS tokens and code travel readable"
            ))
            .hint("give --tls-cert and --tls-key, or --insecure-http where the network itself is trusted"));
        }
        let stop = stop_on_signals()?;
        let listener = TcpListener::bind(SocketAddr::new(address, s.server_port)).await.map_err(|e| {
            CliError::failure(format!("{address} port {}: {e}", s.server_port))
                .hint("choose another with --port")
        })?;
        let token_file = s.home.join(TOKEN_FILE);
        let clock = Clock::system();
        let (token, _) = generated_token(&*yard.store, clock.now(), &token_file)
            .await
            .map_err(|e| CliError::failure(format!("{}: {e}", token_file.display())))?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let settings = s.clone();
        let doctor: Doctor = Arc::new(move || doctor::examined(&settings));
        let app = App::with_doctor(parts(yard, clock, tls.is_some(), stop.clone())?, Some(doctor));
        yard.doing.pass_on_to(Arc::new(app.clone()));
        let url = format!("{scheme}://{}", listener.local_addr()?);
        let login = app.login_link(&url, &token.id);
        if out.json {
            out.json_line(&json!({
                "schema": "forkyard.serve/1", "url": url, "login": login, "token_file": token_file,
            }))?;
        } else {
            out.line(&format!(
                "Forkyard is at {url}\n\n  log in (once)   {login}\n  token           {}\n  API             {url}/api/v1/docs\n",
                token_file.display()
            ))?;
        }
        let work = async {
            if !self.no_work {
                yard.engine.work(ProcessKind::Server, stop.clone()).await;
            }
        };
        let serving =
            async { tokio::join!(forkyard_server::serve(listener, app.router(), tls, stop.clone()), work) };
        let until_stopped = async {
            tokio::select! {
                _ = serving => {}
                () = gc::keep_in_time(yard) => {}
                () = app.keep_figures() => {}
            }
        };
        observer.over(yard, yard.staying(until_stopped)).await;
        Ok(Exit::Success)
    }
}

fn parts(yard: &Yard, clock: Clock, secure: bool, stop: CancellationToken) -> Result<Parts> {
    let s = &yard.settings;
    // Of no repository and no prompt: what every run is that says nothing else.
    let nowhere = RepoSpec { source: String::new(), branch: None, dirty: false };
    let defaults = RunOptions::default().spec(s, nowhere, &[String::new()])?;
    Ok(Parts {
        store: yard.store.clone(),
        engine: Arc::new(yard.engine.clone()),
        git: yard.git.clone(),
        models: yard.models.clone(),
        sandboxes: yard.sandboxes.clone(),
        inside: yard.inside.clone(),
        clock,
        defaults,
        prompt_prefix: s.prompt_prefix.clone(),
        root: s.server_root.clone(),
        secrets: s.tables.secrets.keys().cloned().collect(),
        chores: Some(Arc::new(OfMachine(yard.clone()))),
        hosts: s.server_hosts.iter().map(|h| h.to_ascii_lowercase()).collect(),
        secure,
        stop,
    })
}

/// Chores as the same commands do them here; the route records who asked.
struct OfMachine(Yard);

impl Chores for OfMachine {
    fn cleanup(&self, max_age: Millis, dry_run: bool) -> BoxFuture<'_, ApiResult<Cleaned>> {
        Box::pin(async move { cleanup::once(&self.0, max_age, dry_run).await.map_err(undone) })
    }
    fn stop_cleanup(&self, engine: EngineKind) -> BoxFuture<'_, ApiResult<CleanupStopped>> {
        Box::pin(async move {
            // Where its own runs are not there, nobody has said which service it would be.
            if engine == EngineKind::Temporal && self.0.settings.engine != EngineKind::Temporal {
                return Err(ApiError::new(Code::Unsupported, "this server knows of no Temporal service")
                    .hint("stop it on a host with a worker, or set engine.kind and temporal.address for the server"));
            }
            cleanup::stop(&self.0, engine).await.map_err(undone)
        })
    }
    fn gc(&self, older_than: Millis, dry_run: bool) -> BoxFuture<'_, ApiResult<Freed>> {
        Box::pin(async move { gc::collect(&self.0, older_than, dry_run).await.map_err(undone) })
    }
}

fn undone(e: CliError) -> ApiError {
    // What was asked for is not there, or could not be done.
    let code = if e.exit == Exit::Usage { Code::NotFound } else { Code::Unavailable };
    ApiError { hint: e.hint, ..ApiError::new(code, e.message) }
}

fn tls(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<Tls>> {
    let (cert, key) = match (cert, key) {
        (None, None) => return Ok(None),
        (Some(cert), Some(key)) => (cert, key),
        (Some(_), None) | (None, Some(_)) => {
            return Err(CliError::usage("TLS needs a certificate and its key")
                .hint("give both --tls-cert and --tls-key, or neither"));
        }
    };
    let wrong = |path: &Path, e: &dyn std::fmt::Display| CliError::usage(format!("{}: {e}", path.display()));
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(cert).and_then(Iterator::collect).map_err(|e| wrong(cert, &e))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, &e))?;
    let mut config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|e| wrong(cert, &e))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(Tls::new(config)))
}
