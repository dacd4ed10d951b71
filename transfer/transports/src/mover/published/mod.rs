//! Memory published by address. A process answers at `host:port` which of its ranges peers may reach and how. Peers
//! that know only an address there (an engine's own protocol carries it) thus find the window.
//!
//! [`Publisher`] is the side that answers, [`Directory`] the side that asks and caches. A connection stays open after
//! the answer, and the publisher closes it when anything changes; the kernel closes it when the process ends. The
//! directory uses a cached answer only while its connection stands. So nothing is ever sent to a life of the peer
//! that is known to be over, and a lookup costs one system call once the first has been made.
//!
//! Nothing is believed for what arrives: the receiver's [`super::Exposure`] checks every range again.

mod directory;
mod publisher;
mod records;
mod watcher;

pub use directory::{Directory, DirectoryAnswer, DirectoryConfig, Place, PublishedSegments};
pub use publisher::{Publisher, PublisherConfig};
