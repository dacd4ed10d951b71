//! The arguments that name a cluster in etcd.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use baton_membership::{Etcd, EtcdConfig};
use baton_types::Secret;

/// Where several conductors and their nodes find each other.
#[derive(Clone, Debug, clap::Args)]
pub struct EtcdArgs {
    /// Endpoints of etcd, where conductors elect who leads, like http://10.0.0.2:2379,http://10.0.0.3:2379
    #[arg(long, env = "BATON_ETCD", value_name = "URL,...")]
    pub etcd: Option<String>,
    /// Name of the cluster in etcd
    #[arg(long, default_value = "default", requires = "etcd", value_name = "NAME")]
    pub cluster: String,
    /// User of etcd; its password is read from BATON_ETCD_PASSWORD
    #[arg(long, requires = "etcd", value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// Certificates to trust, PEM, where etcd speaks TLS
    #[arg(long, requires = "etcd", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
}

impl EtcdArgs {
    /// A client, if there is an etcd to use.
    ///
    /// # Errors
    /// In words: an endpoint, a file or the password is wrong or missing.
    pub fn client(&self) -> Result<Option<Etcd>> {
        let Some(endpoints) = &self.etcd else { return Ok(None) };
        let list = endpoints.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty());
        let mut config = EtcdConfig::new(list.collect());
        config.ca.clone_from(&self.etcd_ca);
        if let Some(user) = &self.etcd_user {
            let password = std::env::var("BATON_ETCD_PASSWORD")
                .ok()
                .context("--etcd-user needs its password in BATON_ETCD_PASSWORD")?;
            config.login = Some((user.clone(), Secret::new(password)));
        }
        Ok(Some(Etcd::new(config)?))
    }
}
