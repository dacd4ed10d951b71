//! Members that are told once, on a command line.

use tokio_util::sync::CancellationToken;

use super::Following;
use crate::directory::{Board, listed};
use crate::error::{MembershipError, Result};
use crate::member::Member;
use crate::view::{Listed, MEMBERS_MAX};

/// Members that do not change.
#[derive(Clone, Debug)]
pub struct ListSource {
    /// Who there is.
    pub members: Vec<Member>,
}

impl ListSource {
    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<Following> {
        let mut names = std::collections::BTreeSet::new();
        if let Some(twice) = self.members.iter().find(|one| !names.insert(one.name.as_str())) {
            let text = format!("'{}' is listed twice; give each member its own name", twice.name);
            return Err(MembershipError::invalid(text));
        }
        if self.members.len() > MEMBERS_MAX {
            let text = format!("{} members, at most {MEMBERS_MAX}; split the cluster", self.members.len());
            return Err(MembershipError::invalid(text));
        }
        let each = self.members.into_iter().map(|member| listed(member, &"1".into()));
        let all = each.collect::<Result<Vec<Listed>>>()?;
        Ok(Box::pin(async move {
            board.replace(all, "1".into(), 0);
            stop.cancelled().await;
        }))
    }
}
