//! Why a service cannot be started, or cannot go on.

use std::io;

use baton_http::IdentityError;
use metrics_exporter_prometheus::BuildError;
use tokio::task::JoinError;

use crate::conductor::DriverError;
use crate::config::ConfigError;
use crate::guard::GuardError;
use crate::node::NodeError;
use crate::shutdown::SignalError;
use crate::spans::SpansError;

/// What could not be started or ended too early, and the remedy where there is one.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// A port cannot be bound.
    #[error("{setting} = {address}: {error}; stop what listens there or give another port")]
    Port {
        /// The setting.
        setting: &'static str,
        /// Its address.
        address: String,
        /// The system's words.
        error: io::Error,
    },
    /// A bound port has no address.
    #[error("listener: {0}")]
    Listener(io::Error),
    /// The system gives the front door no threads.
    #[error("front door's threads: {0}")]
    Threads(io::Error),
    /// A task of the front door panicked.
    #[error("front door: {0}")]
    Front(JoinError),
    /// The cluster's secrets cannot be read.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// The metrics' exporter does not take a setting.
    #[error("metrics: {0}")]
    Metrics(BuildError),
    /// Spans cannot be sent.
    #[error(transparent)]
    Spans(#[from] SpansError),
    /// The conductor cannot start.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The tokenizer of the engines' model cannot be read.
    #[error("{0}")]
    Tokenization(String),
    /// It cannot be told from another one.
    #[error("tokenizer: its sample: {0}")]
    Sample(String),
    /// A setting of the front door is at fault.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The front door's certificate or key cannot be read.
    #[error("service.tls_cert, tls_key: {0}")]
    Identity(IdentityError),
    /// Signals cannot be listened to.
    #[error(transparent)]
    Signal(#[from] SignalError),
    /// This program does not find itself, to start nodes with.
    #[error("this program's own path: {0}")]
    Program(io::Error),
    /// A node's process cannot be started.
    #[error("node {name}: cannot be started: {error}")]
    Process {
        /// The node.
        name: String,
        /// The system's words.
        error: io::Error,
    },
    /// A node of this process cannot go on.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A node of this process panicked.
    #[error("a node ended: {0}")]
    NodeTask(JoinError),
}
