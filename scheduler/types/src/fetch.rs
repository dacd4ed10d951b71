//! What is worth fetching, and from where.

use serde::{Deserialize, Serialize};

use crate::InstanceId;

/// Blocks to bring from another instance before a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchPlan {
    /// The holder.
    pub from: InstanceId,
    /// Leading blocks of the chain that the holder has; the driver brings those missing.
    pub blocks: u32,
}
