//! Whether this conductor may take nodes: alone it always may, one of several only while it leads.

use std::sync::{Arc, OnceLock};

use baton_membership::{Leadership, Permit};
use tonic::Status;

use crate::node::LEADER_METADATA;

/// Whether this conductor may accept nodes. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Lead {
    /// One of several.
    elected: bool,
    standing: Arc<OnceLock<Leadership>>,
    /// Of its first leadership: it has no second, for what it knows is of the first.
    token: Arc<OnceLock<u64>>,
}

impl Lead {
    /// The only conductor.
    #[must_use]
    pub fn alone() -> Self {
        Self::default()
    }

    /// One of several; it takes no nodes before it [`stands`](Self::stands) and is elected.
    #[must_use]
    pub fn elected() -> Self {
        Self { elected: true, ..Self::default() }
    }

    /// It stands for election from now on; once is enough.
    pub fn stands(&self, leadership: Leadership) {
        // A running candidacy goes on: a second one is dropped, and its lease ends.
        let _ = self.standing.set(leadership);
    }

    /// Its candidacy, once it stands.
    #[must_use]
    pub fn standing(&self) -> Option<&Leadership> {
        self.standing.get()
    }

    /// Leave to give orders at this moment, and under which leadership; 0 for the only conductor.
    #[must_use]
    pub fn token(&self) -> Option<u64> {
        if !self.elected {
            return Some(0);
        }
        let permit = self.standing.get()?.permit()?;
        (*self.token.get_or_init(|| permit.token) == permit.token).then_some(permit.token)
    }

    /// Leave to write what all conductors follow, for the one that leads.
    ///
    /// # Errors
    /// In words: it does not lead; and who does, if that is known.
    pub fn permit(&self) -> Result<Permit, String> {
        let permit = self.standing.get().and_then(Leadership::permit).filter(|_| self.token().is_some());
        permit.ok_or_else(|| match self.check() {
            Err(status) if status.metadata().contains_key(LEADER_METADATA) => {
                format!("{}: ask there", status.message())
            }
            Err(status) => status.message().to_owned(),
            Ok(()) => "nobody elects this conductor".to_owned(),
        })
    }

    /// Whether a node may attach; if not, the refusal says who leads and where, if that is known.
    pub(crate) fn check(&self) -> Result<(), Status> {
        let standing = self.standing.get();
        if !self.elected || self.token().is_some() {
            return Ok(());
        }
        let leader = standing.and_then(|leadership| leadership.leader().borrow().clone());
        let Some(leader) = leader else {
            return Err(Status::unavailable(
                "this conductor does not lead, and nobody is known to; try again in a moment",
            ));
        };
        let address = &leader.member.addresses[0];
        let mut status = Status::unavailable(format!(
            "this conductor does not lead; {} does, at {address}",
            leader.member.name
        ));
        if let Ok(value) = address.parse() {
            status.metadata_mut().insert(LEADER_METADATA, value);
        }
        Err(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_conductor_always_may_and_a_candidate_not_before_it_leads() {
        assert!(Lead::alone().check().is_ok() && Lead::alone().token() == Some(0));
        assert_eq!(Lead::elected().token(), None);
        let refused = Lead::elected().check().expect_err("it does not lead");
        assert_eq!(refused.code(), tonic::Code::Unavailable, "the node tries again");
        assert!(refused.message().contains("nobody is known to"));
        let told = Lead::elected().permit().expect_err("it does not lead");
        assert!(told.ends_with("try again in a moment"), "{told}");
    }
}
