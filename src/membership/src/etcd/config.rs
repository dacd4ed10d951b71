//! Where etcd is and how it is spoken to.

use std::path::PathBuf;
use std::time::Duration;

use baton_types::Secret;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::error::{MembershipError, Result};

/// Endpoints of one cluster: etcd itself advises against more members than seven.
const ENDPOINTS_MAX: usize = 16;
/// A certificate file longer than this is none.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT` of each member; the first that answers is used.
    pub endpoints: Vec<String>,
    /// Name and password, where the cluster asks for them.
    pub login: Option<(String, Secret<String>)>,
    /// Certificates to trust, PEM; needed for `https`.
    pub ca: Option<PathBuf>,
    /// Certificate and key to show, PEM, where the cluster asks for them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// How long reaching one endpoint may take.
    pub connect_timeout_us: u64,
    /// How long one endpoint may take to answer a call.
    pub request_timeout_us: u64,
    /// A watch that says nothing for so long, though asked, is broken.
    pub silence_us: u64,
}

impl EtcdConfig {
    /// The usual time limits for `endpoints`, no login, nothing to trust.
    #[must_use]
    pub fn new(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            login: None,
            ca: None,
            identity: None,
            connect_timeout_us: 500_000,
            request_timeout_us: 1_000_000,
            silence_us: 6_000_000,
        }
    }

    /// Reads `http://a:2379,http://b:2379`.
    ///
    /// # Errors
    /// When one of them is no such address.
    pub fn parse(endpoints: &str) -> Result<Self> {
        let list = endpoints.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty());
        let config = Self::new(list.collect());
        config.check()?;
        Ok(config)
    }

    pub(super) const fn connect_timeout(&self) -> Duration {
        Duration::from_micros(self.connect_timeout_us)
    }

    pub(super) const fn request_timeout(&self) -> Duration {
        Duration::from_micros(self.request_timeout_us)
    }

    fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(MembershipError::invalid(format!("etcd: {why}")));
        if self.endpoints.is_empty() || self.endpoints.len() > ENDPOINTS_MAX {
            let count = self.endpoints.len();
            return wrong(format!(
                "{count} endpoints; give 1 to {ENDPOINTS_MAX}, like http://127.0.0.1:2379"
            ));
        }
        for one in &self.endpoints {
            let uri: Option<http::Uri> = one.parse().ok();
            let scheme = uri.as_ref().and_then(|uri| uri.scheme_str());
            let host = uri.as_ref().and_then(|uri| uri.host()).filter(|host| !host.is_empty());
            if host.is_none() || !matches!(scheme, Some("http" | "https")) {
                return wrong(format!("'{one}' is no endpoint; write http://HOST:PORT or https://HOST:PORT"));
            }
            if scheme == Some("https") && self.ca.is_none() {
                return wrong(format!("{one}: TLS needs the certificates to trust; give their PEM file"));
            }
        }
        if self.connect_timeout_us == 0 || self.request_timeout_us == 0 || self.silence_us < 1000 {
            return wrong("a timeout of nothing never succeeds; give some microseconds".to_owned());
        }
        Ok(())
    }

    /// The tonic endpoints of all addresses.
    pub(super) fn lines(&self) -> Result<Vec<Endpoint>> {
        self.check()?;
        let tls = self.tls()?;
        self.endpoints.iter().map(|one| self.line(one, tls.as_ref())).collect()
    }

    fn line(&self, address: &str, tls: Option<&ClientTlsConfig>) -> Result<Endpoint> {
        let wrong = |e: tonic::transport::Error| {
            MembershipError::invalid(format!("etcd: {address}: {e}; check the address and the PEM files"))
        };
        let line = Endpoint::from_shared(address.to_owned())
            .map_err(wrong)?
            .connect_timeout(self.connect_timeout())
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_micros(self.silence_us))
            .keep_alive_timeout(Duration::from_micros(self.silence_us));
        match tls.filter(|_| address.starts_with("https://")) {
            Some(tls) => line.tls_config(tls.clone()).map_err(wrong),
            None => Ok(line),
        }
    }

    fn tls(&self) -> Result<Option<ClientTlsConfig>> {
        let Some(ca) = &self.ca else { return Ok(None) };
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem(ca)?));
        if let Some((certificate, key)) = &self.identity {
            tls = tls.identity(Identity::from_pem(pem(certificate)?, pem(key)?));
        }
        Ok(Some(tls))
    }
}

/// The text of a PEM file.
fn pem(path: &std::path::Path) -> Result<Vec<u8>> {
    let wrong = |why: String| MembershipError::invalid(format!("{}: {why}", path.display()));
    let length = std::fs::metadata(path).map_err(|e| wrong(format!("{e}; give a PEM file")))?.len();
    if length > PEM_BYTES_MAX {
        return Err(wrong(format!("{length} bytes are no PEM file of certificates; give one")));
    }
    std::fs::read(path).map_err(|e| wrong(format!("{e}; give a PEM file")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_checked() {
        let two = EtcdConfig::parse("http://a:2379, http://b:2379,").expect("two");
        assert_eq!(two.endpoints, ["http://a:2379", "http://b:2379"]);
        assert!(two.lines().is_ok_and(|lines| lines.len() == 2));
        let told = |text: &str| EtcdConfig::parse(text).expect_err("wrong").text;
        assert!(told("").contains("0 endpoints"));
        assert!(told("a:2379").contains("'a:2379' is no endpoint"));
        assert!(told("ftp://a:2379").contains("is no endpoint"));
        assert!(told("https://a:2379").contains("certificates to trust"));
        assert!(told(&"http://a:1,".repeat(17)).contains("17 endpoints"));
    }

    #[test]
    fn missing_files_and_empty_time_limits_are_refused() {
        let mut config = EtcdConfig::new(vec!["https://a:1".into()]);
        config.ca = Some("/nowhere/ca.pem".into());
        assert!(config.lines().is_err_and(|e| e.text.contains("/nowhere/ca.pem")));
        let mut config = EtcdConfig::new(vec!["http://a:1".into()]);
        config.request_timeout_us = 0;
        assert!(config.lines().is_err_and(|e| e.text.contains("timeout")));
    }

    #[test]
    fn a_password_does_not_show() {
        let mut config = EtcdConfig::new(Vec::new());
        config.login = Some(("root".into(), Secret::from("hush")));
        assert!(!format!("{config:?}").contains("hush"));
    }
}
