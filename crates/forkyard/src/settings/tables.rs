//! Settings that are tables of their own: secrets bound to hosts, prices of models, the policy, hooks. They come from the user's file,
//! or from a project's file that the user trusts, and from nowhere else.

use std::collections::BTreeMap;

use forkyard_agent::HookConfig;
use forkyard_core::policy::PolicyConfig;
use forkyard_core::pricing::ModelSpec;
use forkyard_core::sandbox;
use serde::Deserialize;

use super::error::{Origin, Problem};

/// The tables' names.
pub(super) const NAMES: &[&str] = &["secrets", "prices", "policy", "hooks"];

#[derive(Debug, Clone, Default)]
pub struct Tables {
    /// By the name that a run asks for.
    pub secrets: BTreeMap<String, sandbox::Secret>,
    /// By model; over the built-in list.
    pub prices: BTreeMap<String, ModelSpec>,
    pub policy: PolicyConfig,
    /// Run on the host, in this order.
    pub hooks: Vec<HookConfig>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    secrets: BTreeMap<String, toml::Spanned<SecretTable>>,
    #[serde(default)]
    prices: BTreeMap<String, ModelSpec>,
    policy: Option<PolicyConfig>,
    #[serde(default)]
    hooks: Vec<HookConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SecretTable {
    /// Header that it is sent in.
    header: String,
    /// The header's value; or
    value: Option<String>,
    /// the variable that has it.
    env: Option<String>,
    hosts: Vec<String>,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    path_prefixes: Vec<String>,
}

pub(super) fn is_table_key(key: &str) -> bool {
    NAMES.contains(&key.split('.').next().unwrap_or(key))
}

impl Tables {
    /// Adds what a file says to what is here; a later file replaces entries of the same name.
    pub(super) fn read(
        &mut self,
        text: &str,
        env: &BTreeMap<String, String>,
        origin: impl Fn(usize) -> Origin,
    ) -> Result<(), Problem> {
        let line_at = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let file: File = toml::from_str(text).map_err(|e| Problem {
            origin: origin(e.span().map_or(1, |s| line_at(s.start))),
            what: e.message().trim().replace('\n', " "),
            fix: "see docs/configuration.md for what the table takes".into(),
        })?;
        for (name, spanned) in file.secrets {
            let line = line_at(spanned.span().start);
            let secret = spanned.into_inner();
            let problem = |what: String, fix: &str| Problem {
                origin: origin(line),
                what: format!("`secrets.{name}`: {what}"),
                fix: fix.into(),
            };
            if secret.hosts.is_empty() {
                return Err(problem("it has no hosts".into(), "name the hosts that it may be sent to"));
            }
            let value = match (secret.value, secret.env) {
                (Some(value), None) => value,
                (None, Some(var)) => {
                    env.get(&var).filter(|v| !v.is_empty()).cloned().ok_or_else(|| {
                        problem(format!("${var} is not set"), "set it, or remove the secret")
                    })?
                }
                (Some(_), Some(_)) | (None, None) => {
                    return Err(problem("it needs a value".into(), "give exactly one of `value` and `env`"));
                }
            };
            let odd = |s: &str| s.is_empty() || s.chars().any(char::is_control);
            if odd(&value) || odd(&secret.header) || secret.header.contains([':', ' ']) {
                return Err(problem(
                    "its header or value can't be sent".into(),
                    "use one line without control characters",
                ));
            }
            let secret = sandbox::Secret {
                header: secret.header,
                value,
                hosts: secret.hosts,
                methods: secret.methods,
                path_prefixes: secret.path_prefixes,
            };
            self.secrets.insert(name, secret);
        }
        self.prices.extend(file.prices);
        if let Some(policy) = file.policy {
            self.policy = policy;
        }
        self.hooks.extend(file.hooks);
        Ok(())
    }
}
