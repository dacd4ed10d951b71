//! Which conductor leads: a lease, one key that the first to come creates under it, and a deadline of one's own.
//!
//! [`state`] decides and reads no clock; [`Leadership`] carries out what it decides. The token of a leadership is
//! the revision of etcd at which the key came into being: it grows from one leader to the next, and [`Fence`] lets
//! those who take orders refuse an older leader's.

mod fence;
mod lead;
pub mod state;

pub use fence::Fence;
pub(crate) use lead::leader_key;
pub use lead::{Candidacy, Leader, Leaders, Leadership, Permit, Standing};
