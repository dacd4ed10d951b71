//! How many connections the process may have: what the system lets it open, and how that is shared out.

use std::net::SocketAddr;

use crate::config::ServiceConfig;

/// Clients' connections at once, where the system allows as many.
const CLIENTS: usize = 16_384;
/// Nodes' connections at once: one for each of the largest fleet, even if all come by one address.
const NODES: usize = 8_192;

/// Connections that the ports have places for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connections {
    pub(super) clients: usize,
    pub(super) nodes: usize,
}

impl Connections {
    /// Raises the limit of open files as far as it goes without a privilege, and shares out what there is.
    pub(super) fn fit() -> Self {
        let files = raise();
        let all = Self::within(files);
        if all.clients < CLIENTS {
            // Nobody asked for more.
            tracing::info!(
                files,
                clients = all.clients,
                "this process may open {files} files: {} clients at once instead of {CLIENTS}; raise the hard limit (ulimit -Hn, LimitNOFILE)",
                all.clients
            );
        }
        all
    }

    /// Half of the files for clients, an eighth for nodes: what is left is for KV, journals, data and engines.
    fn within(files: usize) -> Self {
        Self { clients: CLIENTS.min(files / 2).max(1), nodes: NODES.min(files / 8).max(1) }
    }
}

/// Open files that the process may have from now on.
fn raise() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: now.maximum, maximum: now.maximum };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => now.maximum,
        Err(error) => {
            tracing::warn!(%error, "the limit of open files stays as it was");
            now.current
        }
    };
    current.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// The warning for a front door without keys that other machines can reach; `None` where all is well.
pub(super) fn open_door(service: &ServiceConfig, address: SocketAddr) -> Option<String> {
    if address.ip().is_loopback() || !service.api_keys.is_empty() {
        return None;
    }
    let admin = if service.admin_key.is_set() {
        ":"
    } else {
        ", and its /admin paths let in anyone who reaches them: set service.admin_key, and"
    };
    Some(format!(
        "the front door {address} serves anyone who reaches it{admin} give clients keys ([[service.api_keys]]), or listen on 127.0.0.1"
    ))
}

/// What is said of a service whose clients have keys while its operators have none: nobody gets in there.
pub(super) fn closed_admin(service: &ServiceConfig) -> Option<&'static str> {
    (!service.api_keys.is_empty() && !service.admin_key.is_set()).then_some(
        "clients have keys and there is no service.admin_key: /admin, the page and baton top are closed to \
         everybody; set it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn few_files_make_few_places() {
        assert_eq!(Connections::within(1_048_576), Connections { clients: CLIENTS, nodes: NODES });
        assert_eq!(Connections::within(1_024), Connections { clients: 512, nodes: 128 });
        assert_eq!(Connections::within(0), Connections { clients: 1, nodes: 1 });
    }

    #[test]
    fn the_limit_of_open_files_is_raised_to_the_hard_one() {
        use rustix::process::{Resource, getrlimit};
        Connections::fit();
        let now = getrlimit(Resource::Nofile);
        assert_eq!(now.current, now.maximum);
    }

    #[test]
    fn a_door_without_keys_is_spoken_of_where_others_can_reach_it() {
        let mut service = Config::default().service;
        let (here, all) = ("127.0.0.1:8080".parse().unwrap(), "0.0.0.0:8080".parse().unwrap());
        assert_eq!(open_door(&service, here), None);
        let said = open_door(&service, all).unwrap();
        assert!(said.contains("service.admin_key") && said.contains("api_keys"), "{said}");
        service.admin_key = "k".into();
        let said = open_door(&service, all).unwrap();
        assert!(!said.contains("admin") && said.contains("api_keys"), "{said}");
        let key = "[[service.api_keys]]\nkey = \"a\"\ntenant = \"b\"\n";
        let keyed = crate::config::parse(key).unwrap().service;
        assert_eq!(open_door(&keyed, all), None);
        assert!(closed_admin(&keyed).is_some() && closed_admin(&service).is_none());
        assert_eq!(closed_admin(&ServiceConfig { admin_key: "k".into(), ..keyed }), None);
    }
}
