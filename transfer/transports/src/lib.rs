//! Bytes on the wire: KV between the nodes of a cluster.
//!
//! A *flight* hands the KV of one request from a prefill node to a decode node, slice by slice (one layer of
//! one block), while the prefill is still computing. A *fetch* asks another node for blocks that it holds.
//! Offers, wants and their answers go over one port; KV goes by the transfer engine ([`mover`]) into a window that
//! the receiving side lends, over shared memory, RDMA or TCP, straight from the memory that it lies in.
//!
//! **Guarantees.** [`Flight::finish`] returns `Ok`, and [`Receiver::complete`] is called, only when every slice of
//! the plan has landed exactly once and equal to what was sent (I7). The sender reports position and checksum of each
//! slice that it writes. The receiver keeps a bitmap and computes the checksum of the bytes where they have landed.
//! Every accepted flight ends at the receiver by exactly one of `complete` and `abort`, even if the sender dies
//! (I13).
//!
//! **Bounds.** [`Limits`] bounds connections, flights, slices, sizes, unconfirmed bytes and every wait. A full
//! endpoint refuses with [`Kind::Retry`].
//!
//! **Access.** By default the endpoint serves every peer. With a [`Guard`] it serves only peers that show the
//! required credentials: the cluster's key, a certificate, or both.

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
pub use data_plane::{ArrivedPieces, DataPlaneConfig, Piece, RdmaDevices};
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
    AcceptedFlight, FetchedBlock, FlightRefusal, HandoffTicket, PeerAddress, Plan, Receiver, Serving,
    SlicePosition, Want,
};
pub use stats::{KvStats, SentBytes, TransportStats};
