//! The conductor at work: the scheduler core behind an inbox, the nodes that are attached to it, and
//! the requests under way, each a pair of legs that live and end together (I13).

mod attach;
mod away;
mod backend;
mod block_keys;
mod canary;
mod core;
mod counters;
mod discreet;
mod driver;
mod ending;
mod facts;
mod fleet;
mod forget;
mod gap_tally;
mod gauges;
mod inbox;
mod instance_ids;
pub mod journal;
mod lead;
mod node_error;
mod orders;
mod policy;
mod refusals;
mod session;
mod slo;
mod status;
mod tenants;
#[cfg(test)]
mod tests;

pub(crate) use attach::ORDERS_PER_NODE;
pub use attach::{AttachPeer, ControlService};
pub use backend::Door;
pub use driver::{Driver, DriverConfig, DriverError};
pub(crate) use gap_tally::GapTally;
#[cfg(test)]
pub(crate) use inbox::inbox;
pub use inbox::{Inbox, Question};
pub(crate) use inbox::{Loss, Message};
pub use lead::Lead;
pub use node_error::{AttachRefusal, NodeChangeError};
pub use policy::{PolicyChange, PolicyOutcome, PolicyRefusal};
pub use slo::SloStatus;
pub use status::{NodeStatus, RequestStatus, Status, under_way};

pub(crate) use fleet::{parse_role, tokenizer_name};
