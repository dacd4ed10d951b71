//! Bytes on the wire: KV between the nodes of a cluster.
//!
//! A *flight* hands the KV of one request from a prefill node to a decode node, slice by slice (one layer of
//! one block), while the prefill is still computing. A *fetch* asks another node for blocks that it holds.
//! Offers, wants and their answers go over one port; KV goes by the transfer engine ([`mover`]) into a window that
//! the receiving side lends, over shared memory, RDMA or TCP, straight from the memory that it lies in.
//!
//! **What is promised.** [`Flight::finish`] returns `Ok`, and [`Receiver::complete`] is called, only when
//! every slice of the plan has landed exactly once and equal to what was sent (I7): the sender tells position and
//! checksum of all that it writes, and the receiver keeps a bitmap and sums up what has come to lie in its place.
//! Every accepted flight ends at the receiver by exactly one of `complete` and `abort`, whatever becomes of the
//! sender (I13).
//!
//! **What is bounded.** Connections, flights, slices, sizes, unconfirmed bytes, and every wait: see
//! [`Limits`]. What is full refuses with [`Kind::Retry`].
//!
//! **Who is let in.** By default everybody; with a [`Guard`] who has the cluster's key, and a certificate.

mod arena;
mod data_plane;
mod dialer;
mod endpoint;
mod error;
mod fetch;
mod flight;
mod frame;
#[cfg(test)]
mod fuzz;
mod guard;
mod handshake;
mod landing;
mod limits;
mod message;
pub mod mover;
mod proof;
mod random;
mod receiver;
mod serve;
mod stats;
mod tls;
mod wire;

pub use baton_transfer::Priority;
pub use data_plane::{Arrived, DataPlaneConfig, Piece, RdmaDevices};
pub use dialer::Dialer;
pub use endpoint::{Endpoint, EndpointConfig};
pub use error::{Kind, Stage, TransportError};
pub use fetch::fetch;
pub use flight::{Flight, FlightStats};
pub use frame::{Checksum, checksum};
pub use guard::{Challenge, ClusterKey, Guard, PROOF_BYTES, Proof, Prover, challenge};
pub use limits::Limits;
pub use message::PROTOCOL_VERSION;
pub use receiver::{
    Accepted, FetchedBlock, PeerAddress, Plan, Receiver, Refused, Serving, SliceAt, Ticket, Want,
};
pub use stats::{FailureStats, KvStats, SentBytes, TransportStats};
