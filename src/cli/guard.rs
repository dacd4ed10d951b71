//! The arguments that name what the processes of one cluster have in common.

use std::path::PathBuf;

use crate::config::ServiceConfig;

/// The protection of control and KV ports.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GuardArgs {
    /// The cluster's key, which all its processes have: one a line, the first is shown, any is taken
    /// [default: the configuration's service.cluster_key]
    #[arg(long, env = "BATON_CLUSTER_KEY", value_name = "FILE")]
    cluster_key: Option<PathBuf>,
    /// Certificate chain, PEM, for control and KV ports; with the other two it turns TLS on there
    /// [default: the configuration's service.cluster_tls_cert]
    #[arg(long, value_name = "FILE")]
    cluster_tls_cert: Option<PathBuf>,
    /// Its private key, PEM [default: the configuration's service.cluster_tls_key]
    #[arg(long, value_name = "FILE")]
    cluster_tls_key: Option<PathBuf>,
    /// Certificates that those of the other processes must come from, PEM
    /// [default: the configuration's service.cluster_tls_ca]
    #[arg(long, value_name = "FILE")]
    cluster_tls_ca: Option<PathBuf>,
}

impl GuardArgs {
    /// Puts what the command line says over what the file says.
    pub fn put(&self, service: &mut ServiceConfig) {
        let pairs = [
            (&self.cluster_key, &mut service.cluster_key),
            (&self.cluster_tls_cert, &mut service.cluster_tls_cert),
            (&self.cluster_tls_key, &mut service.cluster_tls_key),
            (&self.cluster_tls_ca, &mut service.cluster_tls_ca),
        ];
        for (given, setting) in pairs {
            if let Some(path) = given {
                *setting = path.to_string_lossy().into_owned();
            }
        }
    }
}
