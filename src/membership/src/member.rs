//! One member of the cluster, and what may be said about it.

use std::collections::BTreeMap;

use baton_types::Role;
use serde::{Deserialize, Serialize};

use crate::error::{MembershipError, Result};

/// Longest name of a member, bytes: that of a DNS name.
pub const NAME_BYTES_MAX: usize = 253;
/// Addresses that a member may have.
pub const ADDRESSES_MAX: usize = 16;
/// Longest address, bytes.
pub const ADDRESS_BYTES_MAX: usize = 300;
/// Labels that a member may have.
pub const LABELS_MAX: usize = 32;
/// Longest key or value of a label, bytes.
pub const LABEL_BYTES_MAX: usize = 256;

/// The role of a member in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberRole {
    /// Decides, or stands by to decide.
    Conductor,
    /// An instance with [`Role::Prefill`].
    Prefill,
    /// An instance with [`Role::Decode`].
    Decode,
    /// An instance with [`Role::Both`].
    Both,
    /// An instance with [`Role::Store`].
    Store,
}

impl MemberRole {
    /// The part of an instance; none of a conductor.
    #[must_use]
    pub const fn instance(self) -> Option<Role> {
        match self {
            Self::Conductor => None,
            Self::Prefill => Some(Role::Prefill),
            Self::Decode => Some(Role::Decode),
            Self::Both => Some(Role::Both),
            Self::Store => Some(Role::Store),
        }
    }

    /// Reads `conductor`, `prefill`, `decode`, `both` or `store`.
    ///
    /// # Errors
    /// For any other word.
    pub fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "conductor" => Self::Conductor,
            "prefill" => Self::Prefill,
            "decode" => Self::Decode,
            "both" => Self::Both,
            "store" => Self::Store,
            _ => {
                return Err(MembershipError::invalid(format!(
                    "there is no role '{word}'; give conductor, prefill, decode, both or store"
                )));
            }
        })
    }
}

impl From<Role> for MemberRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Both => Self::Both,
            Role::Store => Self::Store,
        }
    }
}

/// The member. Written as JSON where a source stores it; fields that this version does not know are skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name: the same name is the same member in a later life.
    pub name: String,
    /// Its role.
    pub role: MemberRole,
    /// Where it is reached, the main one first: for a conductor where nodes attach, for a node where peers reach
    /// its KV.
    pub addresses: Vec<String>,
    /// Which life: grows whenever a member of this name starts anew; 0 where the source does not tell lives apart.
    #[serde(default)]
    pub epoch: u64,
    /// Anything else worth telling, like a zone.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl Member {
    /// A member without labels, in a life that nobody has numbered.
    #[must_use]
    pub fn new(name: impl Into<String>, role: MemberRole, addresses: Vec<String>) -> Self {
        Self { name: name.into(), role, addresses, epoch: 0, labels: BTreeMap::new() }
    }

    /// Checks names and bounds.
    ///
    /// # Errors
    /// Names the member and what is wrong with it.
    pub fn validate(&self) -> Result<()> {
        let wrong = |why: String| Err(MembershipError::invalid(format!("member '{}': {why}", self.name)));
        let plain = |c: char| c.is_ascii_graphic() && c != '/';
        if self.name.is_empty() || self.name.len() > NAME_BYTES_MAX || !self.name.chars().all(plain) {
            return wrong(format!(
                "a name is 1 to {NAME_BYTES_MAX} visible ASCII characters without '/'; choose another"
            ));
        }
        if self.addresses.is_empty() || self.addresses.len() > ADDRESSES_MAX {
            let count = self.addresses.len();
            return wrong(format!("it has {count} addresses; give 1 to {ADDRESSES_MAX}"));
        }
        for address in &self.addresses {
            if let Some(why) = address_fault(address) {
                return wrong(format!("address '{address}': {why}"));
            }
        }
        let long =
            |(key, value): (&String, &String)| key.is_empty() || key.len().max(value.len()) > LABEL_BYTES_MAX;
        if self.labels.len() > LABELS_MAX || self.labels.iter().any(long) {
            return wrong(format!(
                "at most {LABELS_MAX} labels of at most {LABEL_BYTES_MAX} bytes, none without a key; drop some"
            ));
        }
        Ok(())
    }

    /// Reads what [`Member::to_json`] wrote, and checks it.
    ///
    /// # Errors
    /// When it is no member, or none that [`Member::validate`] accepts.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let member: Self = serde_json::from_slice(text).map_err(|e| {
            MembershipError::new(
                crate::Kind::Corrupt,
                crate::Stage::Read,
                format!("no member as JSON: {e}; see who wrote it"),
            )
        })?;
        member.validate()?;
        Ok(member)
    }

    /// As JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings, numbers and a map of strings always have a JSON form")
    }
}

/// A description of what is wrong with an address: host and port, perhaps after a scheme.
fn address_fault(address: &str) -> Option<&'static str> {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let Some((host, port)) = rest.rsplit_once(':') else {
        return Some("no port; write HOST:PORT");
    };
    if address.len() > ADDRESS_BYTES_MAX || host.is_empty() || !address.chars().all(|c| c.is_ascii_graphic())
    {
        return Some("no host name or IP address; write HOST:PORT");
    }
    if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
        return Some("an IPv6 address stands in brackets; write [ADDRESS]:PORT");
    }
    port.parse::<u16>().is_err().then_some("no port number; write HOST:PORT")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Member {
        Member::new("p0", MemberRole::Prefill, vec!["10.0.0.6:7000".to_owned()])
    }

    fn fault(change: impl FnOnce(&mut Member)) -> String {
        let mut member = node();
        change(&mut member);
        member.validate().expect_err("it is wrong").text
    }

    #[test]
    fn what_is_written_is_read_back_and_unknown_fields_are_skipped() {
        let mut member = node();
        member.epoch = 7;
        member.labels.insert("zone".into(), "a".into());
        assert_eq!(Member::from_json(&member.to_json()), Ok(member));
        let later = br#"{"name":"d0","role":"decode","addresses":["[::1]:1"],"colour":"red"}"#;
        assert_eq!(Member::from_json(later).map(|m| (m.epoch, m.role)), Ok((0, MemberRole::Decode)));
    }

    #[test]
    fn wrong_members_are_told_what_is_wrong() {
        assert!(node().validate().is_ok());
        assert!(fault(|m| m.name.clear()).contains("a name is 1 to 253"));
        assert!(fault(|m| m.name = "a/b".into()).contains("without '/'"));
        assert!(fault(|m| m.addresses.clear()).contains("0 addresses"));
        assert!(fault(|m| m.addresses = vec!["a:1".into(); 17]).contains("17 addresses"));
        assert!(fault(|m| m.addresses = vec!["host".into()]).contains("no port"));
        assert!(fault(|m| m.addresses = vec!["host:99999".into()]).contains("no port number"));
        assert!(fault(|m| m.addresses = vec![":1".into()]).contains("no host"));
        assert!(fault(|m| m.addresses = vec!["::1:80".into()]).contains("brackets"));
        let many = (0..33).map(|i| (format!("k{i}"), String::new())).collect();
        assert!(fault(|m| m.labels = many).contains("32 labels"));
        assert!(Member::from_json(b"{}").is_err_and(|e| e.kind == crate::Kind::Corrupt));
        assert!(Member::from_json(br#"{"name":"","role":"both","addresses":["a:1"]}"#).is_err());
    }

    #[test]
    fn roles_of_instances_are_those_of_the_scheduler() {
        for role in [Role::Prefill, Role::Decode, Role::Both, Role::Store] {
            assert_eq!(MemberRole::from(role).instance(), Some(role));
        }
        for word in ["conductor", "prefill", "decode", "both", "store"] {
            let role = MemberRole::parse(word).expect("a role");
            assert_eq!(serde_json::to_string(&role).ok(), Some(format!("\"{word}\"")));
        }
        assert!(MemberRole::parse("king").is_err_and(|e| e.text.contains("conductor, prefill")));
        assert_eq!(MemberRole::Conductor.instance(), None);
    }
}
