//! The keys that clients and operators show and the classes that clients get by rules, as they are now: the file may
//! change them while the service serves.

use std::sync::Arc;

use baton_router::{ApiKey, ApiKeys, ClassRule, ClassRules};
use baton_types::Secret;
use parking_lot::RwLock;

use crate::config::Config;

/// The keys in force. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct AccessKeys {
    clients: ApiKeys,
    class_rules: ClassRules,
    /// None admits every operator.
    operator: Arc<RwLock<Option<Secret<String>>>>,
}

impl AccessKeys {
    /// Those of a configuration.
    pub fn new(config: &Config) -> Self {
        let keys = Self::default();
        keys.set(config);
        keys
    }

    /// Puts those of a configuration into force. Calls that are let in already go on.
    pub fn set(&self, config: &Config) {
        let service = &config.service;
        // Where clients need a key, operators do too: without one of their own nobody gets in.
        let needed = service.admin_key.is_set() || !service.api_keys.is_empty();
        *self.operator.write() = needed.then(|| service.admin_key.clone());
        let clients = service.api_keys.iter().map(|key| ApiKey {
            key: key.key.clone(),
            tenant: Some(key.tenant.clone()),
            classes: key.classes.iter().map(|class| class.as_str().into()).collect(),
        });
        self.clients.set(clients.collect());
        let rules = service.class_rules.iter().map(|rule| ClassRule {
            tenant: rule.tenant.clone(),
            model: rule.model.clone(),
            priority: rule.priority,
            class: rule.class.as_str().into(),
        });
        let classes = config.scheduler.classes.iter().map(|class| class.name.as_str().into());
        self.class_rules.set(rules.collect(), classes.collect());
    }

    /// The rules that give calls their classes, which follow every later change.
    pub fn class_rules(&self) -> ClassRules {
        self.class_rules.clone()
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
