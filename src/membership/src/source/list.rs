//! A fixed list of members, from a command line.

use tokio_util::sync::CancellationToken;

use super::{FollowFuture, all_listed};
use crate::directory::Board;
use crate::error::Result;
use crate::member::Member;

/// Members that do not change.
#[derive(Clone, Debug)]
pub struct ListSource {
    /// The members.
    pub members: Vec<Member>,
}

impl ListSource {
    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        let all = all_listed(self.members, &"1".into())?;
        Ok(Box::pin(async move {
            board.replace(all, "1".into(), 0);
            stop.cancelled().await;
        }))
    }
}
