//! Memory published by address: a process tells whoever asks at `host:port` which of its ranges may be reached
//! and how, so that peers that know only an address there (an engine's own protocol carries it) find the window.
//!
//! [`Publisher`] is the side that tells, [`Directory`] the side that asks and remembers. A connection stays open
//! after the answer, and the publisher closes it when anything changes; so does the kernel when its process ends.
//! Hence an answer that is remembered is used only while its connection stands: nothing is ever sent to a life of
//! the peer that is known to be over, and a lookup costs one system call once the first has been made.
//!
//! Nothing is believed for what arrives: the receiver's [`super::Exposure`] checks every range again.

mod directory;
mod publisher;
mod records;
mod watcher;

pub use directory::{Directory, DirectoryConfig, Found, Place, Published};
pub use publisher::{Publisher, PublisherConfig};
