//! The per-install certificate authority. Its key stays in the state directory of the host (mode 0600); sandboxes get the
//! certificate alone, and trust it only inside.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::host::Host;
use crate::{ErrorKind, SandboxError};

const FILE_NAME: &str = "egress-ca.pem";
const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Short: a leaf never leaves this process, and is made again when asked for.
const LEAF_LIFETIME: Duration = Duration::from_secs(30 * 86_400);
const LEAF_REUSE: Duration = Duration::from_secs(86_400);
/// A sandbox may run on a clock that is a little behind.
const BACKDATE: Duration = Duration::from_secs(86_400);
/// A wildcard entry could otherwise grow the cache without end. About 4 KiB each.
const MAX_CACHED_LEAVES: usize = 1024;

pub struct CertAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    /// One key for all leaves of this process: making one costs more than signing.
    leaf_key: KeyPair,
    leaves: Mutex<HashMap<Host, (Instant, Arc<ServerConfig>)>>,
}

fn failed(what: &str, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, format!("egress certificate authority: {what}: {e}"))
}

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Forkyard egress (this machine)");
    params.distinguished_name.push(DnType::OrganizationName, "Forkyard");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = SystemTime::now();
    params.not_before = (now - BACKDATE).into();
    params.not_after = (now + CA_LIFETIME).into();
    params
}

impl CertAuthority {
    /// Loads the authority of this install, or makes it. Safe to call from several processes at once: the first one's stays.
    pub fn open(state_dir: &Path) -> Result<CertAuthority, SandboxError> {
        let path = state_dir.join(FILE_NAME);
        let shown = path.display();
        let pem = match fs::read_to_string(&path) {
            Ok(pem) => pem,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                create(state_dir, &path).map_err(|e| failed(&format!("can't make {shown}"), e))?;
                fs::read_to_string(&path).map_err(|e| failed(&format!("can't read {shown}"), e))?
            }
            Err(e) => return Err(failed(&format!("can't read {shown}"), e)),
        };
        CertAuthority::from_pem(&pem).map_err(|e| e.hint(format!("remove {shown} and a new one is made")))
    }

    fn from_pem(pem: &str) -> Result<CertAuthority, SandboxError> {
        let key = KeyPair::from_pem(pem).map_err(|e| failed("bad key", e))?;
        let certificate =
            CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| failed("bad certificate", e))?;
        let start =
            pem.find("-----BEGIN CERTIFICATE-----").ok_or_else(|| failed("bad file", "no certificate"))?;
        Ok(CertAuthority {
            // The leaf's issuer fields come from these parameters' subject and from the key, which are the certificate's.
            issuer: Issuer::new(ca_params(), key),
            certificate,
            certificate_pem: pem[start..].to_string(),
            leaf_key: KeyPair::generate().map_err(|e| failed("can't make a key", e))?,
            leaves: Mutex::new(HashMap::new()),
        })
    }

    /// What a sandbox has to trust.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// How to be `host` towards a sandbox. HTTP/1.1 only: that is what the proxy judges.
    pub(crate) fn server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, SandboxError> {
        // A panic while the map was held leaves it whole.
        let mut leaves = self.leaves.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((made, config)) = leaves.get(host)
            && made.elapsed() < LEAF_REUSE
        {
            return Ok(config.clone());
        }
        let config = self.make_server_config(host).map_err(|e| failed(&format!("leaf for {host}"), e))?;
        if leaves.len() >= MAX_CACHED_LEAVES {
            leaves.clear();
        }
        leaves.insert(host.clone(), (Instant::now(), config.clone()));
        Ok(config)
    }

    fn make_server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, Box<dyn std::error::Error>> {
        // rcgen reads an address as an address, and anything else as a name.
        let mut params = CertificateParams::new(vec![host.to_string()])?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let now = SystemTime::now();
        params.not_before = (now - BACKDATE).into();
        params.not_after = (now + LEAF_LIFETIME).into();
        let leaf = params.signed_by(&self.leaf_key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(super::tls::provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone(), self.certificate.clone()], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Key and certificate in one file, so that no reader ever sees a pair that does not fit; linked into place, so that of two
/// makers one wins whole.
fn create(state_dir: &Path, path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir)?;
    let key = KeyPair::generate().map_err(io::Error::other)?;
    let certificate = ca_params().self_signed(&key).map_err(io::Error::other)?;
    let temporary =
        state_dir.join(format!(".{FILE_NAME}.{}.{:?}", std::process::id(), std::thread::current().id()));
    let _ = fs::remove_file(&temporary);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(format!("{}{}", key.serialize_pem(), certificate.pem()).as_bytes())?;
    file.sync_all()?;
    let linked = fs::hard_link(&temporary, path);
    fs::remove_file(&temporary)?;
    match linked {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_key_is_private_and_the_authority_stays() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let makers: Vec<_> = (0..4)
            .map(|_| {
                let state = state.clone();
                std::thread::spawn(move || CertAuthority::open(&state).unwrap().certificate_pem().to_string())
            })
            .collect();
        let pems: std::collections::BTreeSet<_> = makers.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(pems.len(), 1);
        assert_eq!(fs::metadata(state.join(FILE_NAME)).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "no temporary file stays");
        let ca = CertAuthority::open(&state).unwrap();
        assert!(pems.contains(ca.certificate_pem()));
        assert!(!ca.certificate_pem().contains("PRIVATE"));
    }

    #[test]
    fn a_broken_file_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE_NAME), "nonsense").unwrap();
        let e = CertAuthority::open(dir.path()).err().unwrap();
        assert!(e.hint.unwrap().contains("remove"));
    }
}
