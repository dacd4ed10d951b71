//! Where members come from.

mod dns;
mod etcd;
mod file;
mod kubernetes;
mod list;

use std::pin::Pin;

use tokio_util::sync::CancellationToken;

pub use dns::{DnsSource, NameLookup};
pub use etcd::EtcdSource;
pub(crate) use etcd::{check_cluster, members_prefix};
pub use file::FileSource;
pub use kubernetes::KubernetesSource;
pub use list::ListSource;

use crate::directory::{Board, listed};
use crate::error::{MembershipError, Result};
use crate::member::Member;
use crate::view::{ListedMember, MEMBERS_MAX, Revision};

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
    /// Members that registered themselves in etcd.
    Etcd(EtcdSource),
}

/// A whole list of members as a directory has it.
fn all_listed(members: Vec<Member>, revision: &Revision) -> Result<Vec<ListedMember>> {
    let wrong = |why: String| Err(MembershipError::invalid(why));
    if members.len() > MEMBERS_MAX {
        return wrong(format!("{} members, at most {MEMBERS_MAX}; split the cluster", members.len()));
    }
    let mut names = std::collections::BTreeSet::new();
    if let Some(twice) = members.iter().find(|one| !names.insert(one.name.as_str())) {
        return wrong(format!("'{}' is listed twice; give each member its own name", twice.name));
    }
    members.into_iter().map(|member| listed(member, revision)).collect()
}

pub(crate) type FollowFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Source {
    /// A future that follows the source and writes to `board` until `stop` is cancelled.
    pub(crate) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        match self {
            Self::List(source) => source.following(board, stop),
            Self::File(source) => source.following(board, stop),
            Self::Dns(source) => source.following(board, stop),
            Self::Kubernetes(source) => source.following(board, stop),
            Self::Etcd(source) => source.following(board, stop),
        }
    }
}
