//! What a sandbox needs inside so that allowed hosts just work: variables and files, as a pure function.
//!
//! Tools are told by variables first, since these hold in every image and for every user; files are for those that read
//! nothing else.

use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::internal::INTERNAL_HOST;
use crate::{InsideFile, PROXY_ADDRESS};

/// The bundle's place inside, which no image has: an image's own bundle may hide the other one.
pub const CA_BUNDLE_PATH: &str = "/etc/forkyard/ca-bundle.crt";
/// Debian's place for it, where tools look that heed no variable.
const DEBIAN_BUNDLE_PATH: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Forkyard's certificate alone, for tools that add to their own roots.
pub const CA_CERTIFICATE_PATH: &str = "/etc/forkyard/ca.crt";
const GIT_CONFIG_PATH: &str = "/etc/gitconfig";

/// `host_bundle` is where the host's own CA bundle (PEM) is, `certificate` Forkyard's.
pub fn files(host_bundle: Option<&Path>, certificate: &str) -> Vec<InsideFile> {
    let certificate = Bytes::from(certificate.to_string());
    let file = |path: &str, begins_with: Option<&Path>, data: &Bytes| InsideFile {
        path: path.into(),
        begins_with: begins_with.map(PathBuf::from),
        data: data.clone(),
        mode: 0o644,
    };
    vec![
        file(CA_BUNDLE_PATH, host_bundle, &certificate),
        file(DEBIAN_BUNDLE_PATH, host_bundle, &certificate),
        file(CA_CERTIFICATE_PATH, None, &certificate),
        file(GIT_CONFIG_PATH, None, &git_config().into()),
    ]
}

/// Variables of every command; they depend on nothing.
pub fn environment() -> Vec<(&'static str, String)> {
    let proxy = format!("http://{PROXY_ADDRESS}");
    let mut env = Vec::new();
    // Both spellings: curl reads only the lower one for http, others only the upper. SOCKS in ALL_PROXY would break Python
    // programs without a SOCKS library, though they never need it.
    for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        env.push((name, proxy.clone()));
    }
    for name in ["NO_PROXY", "no_proxy"] {
        env.push((name, "localhost,127.0.0.1,::1".to_string()));
    }
    for name in [
        "SSL_CERT_FILE",      // OpenSSL, Go, Ruby, uv, rustls-native-certs
        "CURL_CA_BUNDLE",     // curl
        "GIT_SSL_CAINFO",     // git
        "REQUESTS_CA_BUNDLE", // Python requests
        "PIP_CERT",
        "CARGO_HTTP_CAINFO",
        "AWS_CA_BUNDLE",
        "DENO_CERT",
        "NIX_SSL_CERT_FILE",
        "npm_config_cafile",
        "YARN_HTTPS_CA_FILE_PATH",
    ] {
        env.push((name, CA_BUNDLE_PATH.to_string()));
    }
    // Node adds to its own roots.
    env.push(("NODE_EXTRA_CA_CERTS", CA_CERTIFICATE_PATH.to_string()));
    let fixed = [
        // Node's own fetch knows the proxy variables only when told so.
        ("NODE_USE_ENV_PROXY", "1"),
        // The git program knows the settings above; cargo's built-in one does not know all of them.
        ("CARGO_NET_GIT_FETCH_WITH_CLI", "true"),
        // POSTs to registries, which are read-only.
        ("npm_config_audit", "false"),
        ("npm_config_fund", "false"),
        ("npm_config_update_notifier", "false"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
        ("YARN_ENABLE_TELEMETRY", "0"),
        ("NEXT_TELEMETRY_DISABLED", "1"),
        // Nobody is there to answer.
        ("GIT_TERMINAL_PROMPT", "0"),
        ("FORKYARD_INTERNAL", INTERNAL_HOST),
    ];
    env.extend(fixed.map(|(name, value)| (name, value.to_string())));
    let (host, port) = (PROXY_ADDRESS.ip(), PROXY_ADDRESS.port());
    // Java reads no variable of these; its build tools pass their own options on.
    let java = format!(
        "-Dhttp.proxyHost={host} -Dhttp.proxyPort={port} -Dhttps.proxyHost={host} -Dhttps.proxyPort={port}"
    );
    env.push(("MAVEN_OPTS", java.clone()));
    env.push(("GRADLE_OPTS", java));
    env
}

/// SSH has no way out, so addresses in its style mean HTTPS.
fn git_config() -> String {
    let mut config = format!("[http]\n\tproxy = http://{PROXY_ADDRESS}\n\tsslCAInfo = {CA_BUNDLE_PATH}\n");
    for host in ["github.com", "gitlab.com", "bitbucket.org", "codeberg.org"] {
        config.push_str(&format!(
            "[url \"https://{host}/\"]\n\tinsteadOf = git@{host}:\n\tinsteadOf = ssh://git@{host}/\n\tinsteadOf = git://{host}/\n"
        ));
    }
    config
}

/// The places where distributions keep the CA bundle, the likeliest first.
const HOST_BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The host's own CA bundle; without one, sandboxes trust terminated hosts only.
pub fn host_bundle() -> Option<&'static Path> {
    HOST_BUNDLES.iter().map(Path::new).find(|path| std::fs::File::open(path).is_ok())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_bundle_holds_both_and_names_are_unique() {
        let mut host = tempfile::NamedTempFile::new().unwrap();
        host.write_all(b"HOST").unwrap();
        let files = files(Some(host.path()), "OURS\n");
        assert_eq!(files[0].content().unwrap(), "HOST\nOURS\n");
        assert_eq!(files[1].content().unwrap(), "HOST\nOURS\n");
        assert_eq!(files[2].content().unwrap(), "OURS\n");
        // Half of it would leave sandboxes without those whom the host trusts.
        drop(host);
        assert!(files[0].content().is_err());
        let env = environment();
        let names: std::collections::BTreeSet<_> = env.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), env.len());
    }
}
