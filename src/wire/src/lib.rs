//! The control plane between a conductor and its nodes: versioned gRPC messages and their
//! translation from and to the words of `baton-types`.

/// The generated messages and services; their documentation is `proto/control.proto`.
#[expect(missing_docs, clippy::pedantic, reason = "generated from proto/control.proto")]
pub mod v1 {
    tonic::include_proto!("baton.control.v1");
}

/// The version that both sides must speak.
pub const PROTOCOL_VERSION: u32 = 1;
