//! The keys that clients and operators show, as they are now: the file may change them while the service serves.

use std::sync::Arc;

use baton_router::{ApiKey, ApiKeys};
use baton_types::Secret;
use parking_lot::RwLock;

use crate::config::ServiceConfig;

/// The keys in force. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct AccessKeys {
    clients: ApiKeys,
    /// None admits every operator.
    operator: Arc<RwLock<Option<Secret<String>>>>,
}

impl AccessKeys {
    /// Those of a configuration.
    pub fn new(service: &ServiceConfig) -> Self {
        let keys = Self::default();
        keys.set(service);
        keys
    }

    /// Puts those of a configuration into force. Calls that are let in already go on.
    pub fn set(&self, service: &ServiceConfig) {
        // Where clients need a key, operators do too: without one of their own nobody gets in.
        let needed = service.admin_key.is_set() || !service.api_keys.is_empty();
        *self.operator.write() = needed.then(|| service.admin_key.clone());
        let clients = service.api_keys.iter().map(|key| ApiKey {
            key: key.key.clone(),
            tenant: Some(key.tenant.clone()),
            classes: key.classes.iter().map(|class| class.as_str().into()).collect(),
        });
        self.clients.set(clients.collect());
    }

    /// The clients' keys, which follow every later change.
    pub fn clients(&self) -> ApiKeys {
        self.clients.clone()
    }

    /// The key that an operator sends as `Authorization: Bearer KEY`; with `None`, all callers are admitted.
    pub fn operator(&self) -> Option<Secret<String>> {
        self.operator.read().clone()
    }
}
