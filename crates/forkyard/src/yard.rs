//! From settings to a working Forkyard: store, sandboxes, models, git and the embedded engine.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkyard_core::pricing::PriceBook;
use forkyard_core::sandbox::ProviderKind;
use forkyard_core::{HostId, RunId, SandboxId};
use forkyard_engine::activities::{AgentSettings, Hands, HandsConfig, Inside as Placing};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig, Owner};
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::inside::Tokens;
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_engine::steer::{By, Steering};
use forkyard_sandbox::docker::{DockerOptions, DockerProvider, socket_path};
use forkyard_sandbox::egress::{DecisionLog, EgressConfig, EgressProxy, InternalRoute, TrafficLog};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{EgressFactory, ErrorKind, Provider, SandboxError};
use forkyard_server::inside::Inside;
use forkyard_store::Store;
use tokio_util::sync::CancellationToken;

use crate::commands::run_options::docker_image;
use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::internal::Internal;
use crate::settings::{Settings, environment};

#[derive(Clone)]
pub struct Yard {
    pub settings: Settings,
    pub store: Arc<dyn Store>,
    pub engine: Embedded,
    pub git: Arc<Git>,
    pub models: Arc<Models>,
    pub providers: BTreeMap<ProviderKind, Arc<dyn Provider>>,
    pub sandboxes: Sandboxes,
    /// Performs tasks on this host, whoever drives.
    pub hands: Arc<Hands>,
    /// This process, as other processes see it.
    pub owner: String,
    /// What the forks of this process do right now.
    pub doing: Arc<Doing>,
    /// This machine, as the store knows it.
    pub host: HostId,
    /// What agents inside sandboxes reach.
    pub inside: Inside,
    /// Whoever uses this process.
    pub user: By,
}

impl Yard {
    /// Nothing is started by this: the first sandbox starts what sandboxes need.
    pub async fn open(settings: Settings) -> Result<Yard> {
        make_home(&settings)?;
        let url = match &settings.store_url {
            Some(url) => url.expose().to_string(),
            None => settings.home.join("forkyard.db").display().to_string(),
        };
        let store = forkyard_store::open(&url).await.map_err(|e| CliError::failure(e.to_string()))?;
        let env = environment();
        let git = Arc::new(Git::new(GitConfig {
            dir: settings.home.join("git"),
            env: env.clone(),
            github_token: settings.github_token.as_ref().map(|s| s.expose().to_string()),
            timeout: settings.git_timeout.as_duration(),
        }));
        let models = Arc::new(Models::new(models_config(&settings)?));
        let host = host_id(&settings.home)?;
        let tokens = Tokens::open(store.clone(), host.clone(), &settings.home)
            .map_err(|e| CliError::failure(format!("the key of sandbox tokens: {e}")))?;
        let inside = Inside::new(
            store.clone(),
            models.clone(),
            tokens.clone(),
            Clock::system(),
            CancellationToken::new(),
        );
        let (providers, silent) = providers(&settings, &env, Some(&inside)).await?;
        let doing = Arc::new(Doing::default());
        let hands = Arc::new(Hands {
            store: store.clone(),
            providers: providers.clone(),
            git: git.clone(),
            models: models.clone(),
            host: host.clone(),
            config: HandsConfig {
                policy: settings.tables.policy.clone(),
                hooks: settings.tables.hooks.clone(),
                interceptors: vec![],
                skills_dir: Some(settings.home.join("skills")).filter(|d| d.is_dir()),
                log_dir: Some(settings.log_dir.clone().unwrap_or_else(|| settings.home.join("logs"))),
                agent: AgentSettings {
                    heartbeat: settings.heartbeat_interval.as_duration(),
                    keep_checkpoints: settings.checkpoints,
                    // SQLite is of one host.
                    travels: settings.store_url.is_some(),
                },
                inside: std::env::current_exe().ok().map(|program| Arc::new(Placing::new(tokens, program))),
            },
            onlooker: Some(doing.clone()),
        });
        let known = models.clone();
        let unique = random_text(8);
        let owner = match Owner::me() {
            Some(me) => me.name(&unique),
            None => format!("{}x{unique}", std::process::id()),
        };
        let mut config = EmbeddedConfig::new(host.clone(), owner.clone());
        config.host_limit = settings.host_concurrency as usize;
        config.places = Some(settings.home.join("places"));
        config.lost_after = settings.heartbeat_timeout.as_duration();
        let engine = Embedded::new(
            store.clone(),
            hands.clone(),
            Arc::new(move |m| known.known(m)),
            Clock::system(),
            config,
        );
        let sandboxes = Sandboxes::new(providers.clone()).without(silent);
        Ok(Yard {
            settings,
            store,
            engine,
            git,
            models,
            providers,
            sandboxes,
            hands,
            owner,
            doing,
            host,
            inside,
            user: By::local(&user_name()),
        })
    }

    /// For a process that stays: meanwhile its providers keep sandboxes ready, where they were told to.
    pub async fn staying<T>(&self, work: impl Future<Output = T>) -> T {
        let stop = CancellationToken::new();
        let keeping = self.providers.values().map(|provider| provider.keep_ready(stop.clone()));
        let work = async {
            let done = work.await;
            stop.cancel();
            done
        };
        tokio::join!(work, futures::future::join_all(keeping)).0
    }

    /// For what the user of this process does to runs, sandboxes and tokens.
    pub fn steering(&self) -> Steering<'_> {
        Steering { store: &*self.store, now: Clock::system().now(), by: &self.user }
    }

    pub fn new_run_id() -> RunId {
        RunId::new(format!("r{}", random_text(9))).expect("letters and digits")
    }
}

fn make_home(settings: &Settings) -> Result<()> {
    std::fs::create_dir_all(&settings.home)
        .map_err(|e| CliError::failure(format!("{}: {e}", settings.home.display())).hint("set FORKYARD_HOME"))
}

/// For who makes a sandbox that no run and no agent knows of: nobody but the provider it comes from is asked.
pub async fn sandboxes(settings: &Settings) -> Result<Sandboxes> {
    make_home(settings)?;
    let egress = egress(settings, None)?;
    let provider = match settings.provider {
        ProviderKind::Local => Some(local(settings, &environment(), egress)?),
        ProviderKind::Docker => Some(docker(settings, egress).await?),
        ProviderKind::E2b | ProviderKind::Daytona => None,
    };
    Ok(Sandboxes::new(provider.map(|provider| (settings.provider, provider)).into_iter().collect()))
}

fn models_config(s: &Settings) -> Result<ModelsConfig> {
    let prices =
        PriceBook::default().with(&s.tables.prices).map_err(|e| CliError::usage(format!("prices: {e}")))?;
    Ok(ModelsConfig {
        anthropic_key: s.anthropic_api_key.as_ref().map(|k| k.expose().to_string()),
        anthropic_url: Some(s.anthropic_base_url.clone()),
        openai_key: s.openai_api_key.as_ref().map(|k| k.expose().to_string()),
        openai_url: Some(s.openai_base_url.clone()),
        record: None,
        replay: None,
        prices,
    })
}

/// The providers that can work here: local ones always try, Docker's where its engine answers. Why it is left out, if it is there
/// and does not answer.
async fn providers(
    s: &Settings,
    env: &BTreeMap<String, String>,
    inside: Option<&Inside>,
) -> Result<(BTreeMap<ProviderKind, Arc<dyn Provider>>, Option<String>)> {
    let egress = egress(s, inside)?;
    let mut providers = BTreeMap::from([(ProviderKind::Local, local(s, env, egress.clone())?)]);
    let wanted = s.provider == ProviderKind::Docker;
    let mut silent = None;
    let left_out = |why: &str| {
        tracing::warn!("Docker's sandboxes are left out: {why}");
        Some(format!("Docker's sandboxes are left out: {why}"))
    };
    if wanted || socket_path(s.docker_host.as_deref()).is_some_and(Path::exists) {
        match docker(s, egress).await {
            Ok(docker) => {
                providers.insert(ProviderKind::Docker, docker);
            }
            Err(e) if wanted => return Err(e.into()),
            Err(e) if e.kind == ErrorKind::Timeout || has_docker_records(s) => {
                silent = left_out(&e.to_string());
            }
            Err(e) => tracing::debug!("no Docker here: {e}"),
        }
    } else if has_docker_records(s) {
        let host = s.docker_host.as_deref().unwrap_or("its usual socket");
        silent = left_out(&format!("no engine is there at {host} (DOCKER_HOST says where it is)"));
    }
    Ok((providers, silent))
}

/// Whether sandboxes of Docker were made from this home and not removed, as far as can be seen without asking it.
fn has_docker_records(s: &Settings) -> bool {
    let entries = std::fs::read_dir(s.home.join("docker/sandboxes"));
    // Ids have no dot; what has one is in the making.
    entries.is_ok_and(|mut all| all.any(|e| e.is_ok_and(|e| !e.file_name().to_string_lossy().contains('.'))))
}

/// Whether another provider than the chosen one has a sandbox of this name, as far as can be seen without asking it.
pub fn on_record(s: &Settings, id: &SandboxId) -> bool {
    let others = match s.provider {
        ProviderKind::Local => &["docker/sandboxes"][..],
        ProviderKind::Docker => &["sandboxes/sandboxes"],
        ProviderKind::E2b | ProviderKind::Daytona => &["sandboxes/sandboxes", "docker/sandboxes"],
    };
    others.iter().any(|dir| s.home.join(dir).join(id.as_str()).exists())
}

/// What sandboxes of this home reached, and what they were refused.
pub fn decisions(home: &Path) -> DecisionLog {
    DecisionLog::new(&egress_log(home))
}

/// What is old in there is forgotten, whatever it is.
fn egress_log(home: &Path) -> PathBuf {
    home.join("egress").join("decisions")
}

fn egress(s: &Settings, inside: Option<&Inside>) -> Result<Arc<dyn EgressFactory>> {
    let dir = s.home.join("egress");
    std::fs::create_dir_all(&dir)?;
    let mut config = EgressConfig::for_host(&dir, decisions(&s.home).sink())
        .map_err(|e| CliError::failure(e.to_string()))?;
    config.secrets = s.tables.secrets.clone();
    config.traffic = Some(TrafficLog::new(&egress_log(&s.home)));
    config.internal = inside.map(|inside| InternalRoute::Service(Arc::new(Internal::new(inside.clone()))));
    Ok(Arc::new(EgressProxy::new(config)))
}

/// What no folder that a sandbox gets may hold: Forkyard's keys, store and logs, and whatever is power over an engine.
fn private(s: &Settings) -> Vec<PathBuf> {
    let socket = socket_path(s.docker_host.as_deref()).map(Path::to_path_buf);
    std::iter::once(s.home.clone()).chain(socket).collect()
}

fn local(
    s: &Settings,
    env: &BTreeMap<String, String>,
    egress: Arc<dyn EgressFactory>,
) -> Result<Arc<dyn Provider>> {
    let home = env.get("HOME").map(PathBuf::from);
    let options = LocalOptions { egress: Some(egress), home, private: private(s), ..LocalOptions::default() };
    let provider = LocalProvider::new(&s.home.join("sandboxes"), options);
    Ok(Arc::new(provider?))
}

async fn docker(s: &Settings, egress: Arc<dyn EgressFactory>) -> Result<Arc<dyn Provider>, SandboxError> {
    let options = DockerOptions {
        host: s.docker_host.clone(),
        image: docker_image(s),
        egress: Some(egress),
        warm: s.docker_warm as usize,
        private: private(s),
        ..DockerOptions::default()
    };
    Ok(Arc::new(DockerProvider::connect(&s.home.join("docker"), options).await?))
}

/// This machine's name for the store: made once, kept in Forkyard's home.
fn host_id(home: &Path) -> Result<HostId> {
    let path = home.join("host-id");
    if let Ok(text) = std::fs::read_to_string(&path)
        && let Ok(id) = HostId::new(text.trim())
    {
        return Ok(id);
    }
    let id = HostId::new(format!("h{}", random_text(12))).expect("letters and digits");
    let temporary = home.join(format!(".host-id.{}", std::process::id()));
    std::fs::write(&temporary, id.as_str())?;
    // Whoever is first wins; everybody reads the same afterwards.
    let _ = std::fs::hard_link(&temporary, &path);
    std::fs::remove_file(&temporary)?;
    let text = std::fs::read_to_string(&path)?;
    HostId::new(text.trim()).map_err(|e| CliError::failure(format!("{}: {e}", path.display())))
}

/// Letters and digits that no other process comes upon.
pub fn random_text(len: usize) -> String {
    const DIGITS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut text = String::with_capacity(len);
    let mut n = 0;
    while text.len() < len {
        if n < DIGITS.len() as u64 {
            // Seeded by the system for each state.
            n = RandomState::new().hash_one(text.len());
        }
        text.push(DIGITS[(n % DIGITS.len() as u64) as usize] as char);
        n /= DIGITS.len() as u64;
    }
    text
}

/// Who runs this process, by the machine's own list; a number where that has no name. The environment could say anything.
fn user_name() -> String {
    let uid = rustix::process::getuid().as_raw();
    let list = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    named(&list, uid).unwrap_or_else(|| uid.to_string())
}

fn named(list: &str, uid: u32) -> Option<String> {
    let of = |line: &str| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        (number.parse() == Ok(uid) && !name.is_empty()).then(|| name.to_string())
    };
    list.lines().find_map(of)
}
