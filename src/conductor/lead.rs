//! Whether this conductor may take nodes: alone it always may, one of several only while it leads.

use std::sync::{Arc, OnceLock};

use baton_membership::Leadership;
use tonic::Status;

use crate::node::LEADER_METADATA;

/// See the module. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Lead {
    /// One of several.
    elected: bool,
    standing: Arc<OnceLock<Leadership>>,
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
        // Whoever stands already goes on: a second candidacy is dropped, and its lease ends.
        let _ = self.standing.set(leadership);
    }

    /// Its candidacy, once it stands.
    #[must_use]
    pub fn standing(&self) -> Option<&Leadership> {
        self.standing.get()
    }

    /// Whether a node may attach; if not, the refusal says who leads and where, if that is known.
    pub(super) fn check(&self) -> Result<(), Status> {
        let standing = self.standing.get();
        if !self.elected || standing.is_some_and(|leadership| leadership.permit().is_some()) {
            return Ok(());
        }
        let leader = standing.and_then(|leadership| leadership.leader().borrow().clone());
        let Some(leader) = leader else {
            return Err(Status::unavailable(
                "this conductor does not lead, and nobody is known to; try again",
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
        assert!(Lead::alone().check().is_ok());
        let refused = Lead::elected().check().expect_err("it does not lead");
        assert_eq!(refused.code(), tonic::Code::Unavailable, "the node tries again");
        assert!(refused.message().contains("nobody is known to"));
    }
}
