//! TLS towards the outside: the host's roots, one crypto provider.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};

use crate::{ErrorKind, SandboxError};

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Whom the proxy believes on the sandbox's behalf.
#[derive(Clone)]
pub struct UpstreamTls {
    config: Arc<ClientConfig>,
}

impl UpstreamTls {
    /// The host's own roots, and `extra` ones (a company's, a test's).
    pub fn from_host(extra: &[CertificateDer<'static>]) -> Result<UpstreamTls, SandboxError> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        let (usable, _) = roots.add_parsable_certificates(found.certs);
        if usable == 0 && extra.is_empty() {
            let why = found.errors.first().map(|e| format!(": {e}")).unwrap_or_default();
            return Err(SandboxError::new(
                ErrorKind::Unsupported,
                format!("this host has no CA certificates{why}"),
            )
            .hint("install ca-certificates, or set SSL_CERT_FILE"));
        }
        UpstreamTls::with_roots(roots, extra)
    }

    /// Only the given roots.
    pub fn only(roots: &[CertificateDer<'static>]) -> Result<UpstreamTls, SandboxError> {
        UpstreamTls::with_roots(RootCertStore::empty(), roots)
    }

    fn with_roots(
        mut roots: RootCertStore,
        extra: &[CertificateDer<'static>],
    ) -> Result<UpstreamTls, SandboxError> {
        let invalid =
            |e: rustls::Error| SandboxError::new(ErrorKind::Invalid, format!("CA certificate: {e}"));
        for certificate in extra {
            roots.add(certificate.clone()).map_err(invalid)?;
        }
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(invalid)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(UpstreamTls { config: Arc::new(config) })
    }

    pub(super) fn config(&self) -> Arc<ClientConfig> {
        self.config.clone()
    }
}
