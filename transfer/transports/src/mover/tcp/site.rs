//! State shared by all connections of one transport.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::TcpConfig;
use crate::mover::greeting::{Greeting, Purpose};
use crate::mover::reactor::Pool;
use crate::mover::{Exposure, NoticeReceiver};

pub(super) struct Site {
    pub(super) config: TcpConfig,
    /// The address at which peers reach this node.
    pub(super) address: String,
    pub(super) pool: Arc<Pool>,
    pub(super) exposure: Arc<Exposure>,
    pub(super) inbound: Arc<dyn NoticeReceiver>,
    /// Connections that peers have opened.
    pub(super) served: AtomicUsize,
}

impl Site {
    /// A greeting from here.
    pub(super) fn greeting(&self, purpose: Purpose, to_epoch: u64, session: u128, text: String) -> Greeting {
        Greeting {
            purpose,
            to_epoch,
            from_epoch: self.config.epoch,
            session,
            slice_bytes_max: self.config.slice_bytes_max,
            outstanding_max: self.config.outstanding_max,
            credit_bytes: self.config.credit_bytes,
            text,
        }
    }
}
