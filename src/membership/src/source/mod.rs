//! Where members come from.

mod dns;
mod etcd;
mod file;
mod kubernetes;
mod list;

use std::pin::Pin;

use tokio_util::sync::CancellationToken;

pub use dns::{DnsSource, Resolve};
pub use etcd::EtcdSource;
pub(crate) use etcd::{check_cluster, members_prefix};
pub use file::FileSource;
pub use kubernetes::KubernetesSource;
pub use list::ListSource;

use crate::directory::Board;
use crate::error::Result;

/// One of the sources, and how it is asked.
#[derive(Debug)]
pub enum Source {
    /// A list that does not change.
    List(ListSource),
    /// A list in a file, read again when it changes.
    File(FileSource),
    /// The addresses of a name, looked up again and again.
    Dns(DnsSource),
    /// The endpoints of a Kubernetes service.
    Kubernetes(KubernetesSource),
    /// What registered itself in etcd.
    Etcd(EtcdSource),
}

pub(crate) type Following = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Source {
    /// What follows the source and writes on `board` until told to stop.
    pub(crate) fn following(self, board: Board, stop: CancellationToken) -> Result<Following> {
        match self {
            Self::List(source) => source.following(board, stop),
            Self::File(source) => source.following(board, stop),
            Self::Dns(source) => source.following(board, stop),
            Self::Kubernetes(source) => source.following(board, stop),
            Self::Etcd(source) => source.following(board, stop),
        }
    }
}
