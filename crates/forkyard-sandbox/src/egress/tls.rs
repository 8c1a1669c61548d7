//! TLS towards the outside: the host's roots, one crypto provider.

use std::sync::{Arc, LazyLock};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};

use crate::{ErrorKind, SandboxError};

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

type Make = Box<dyn FnOnce() -> Arc<ClientConfig> + Send>;

/// Whom the proxy believes on the sandbox's behalf.
#[derive(Clone)]
pub struct UpstreamTls {
    config: Arc<LazyLock<Arc<ClientConfig>, Make>>,
}

impl UpstreamTls {
    /// The host's own roots, and `extra` ones (a company's, a test's). They are read when the first sandbox needs them: that
    /// takes longer than to make one. A host without any believes nobody.
    pub fn from_host(extra: &[CertificateDer<'static>]) -> Result<UpstreamTls, SandboxError> {
        let mut roots = with(extra)?;
        Ok(UpstreamTls::lazy(move || {
            let found = rustls_native_certs::load_native_certs();
            let (usable, _) = roots.add_parsable_certificates(found.certs);
            if usable == 0 {
                let why = found.errors.first().map(ToString::to_string).unwrap_or_default();
                tracing::warn!(
                    why,
                    "this host has no CA certificates: install ca-certificates, or set SSL_CERT_FILE"
                );
            }
            roots
        }))
    }

    /// Only the given roots.
    pub fn only(roots: &[CertificateDer<'static>]) -> Result<UpstreamTls, SandboxError> {
        let roots = with(roots)?;
        Ok(UpstreamTls::lazy(move || roots))
    }

    fn lazy(roots: impl FnOnce() -> RootCertStore + Send + 'static) -> UpstreamTls {
        let make = move || {
            let mut config = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .expect("the provider has the versions that are the default")
                .with_root_certificates(roots())
                .with_no_client_auth();
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Arc::new(config)
        };
        UpstreamTls { config: Arc::new(LazyLock::new(Box::new(make))) }
    }

    pub(super) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(LazyLock::force(&self.config))
    }
}

fn with(extra: &[CertificateDer<'static>]) -> Result<RootCertStore, SandboxError> {
    let mut roots = RootCertStore::empty();
    for certificate in extra {
        roots
            .add(certificate.clone())
            .map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("CA certificate: {e}")))?;
    }
    Ok(roots)
}
