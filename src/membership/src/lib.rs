//! Members of the cluster, and the conductor that leads.
//!
//! A [`Directory`] reports the members from a file, DNS, Kubernetes or etcd, and goes on reporting the last known ones
//! when its source fails. A [`Registration`] makes a process one of these members. [`Leadership`] ensures that at most
//! one conductor acts at a time. [`Policies`] hands the policy in force to all of them.

#[expect(clippy::all, reason = "generated from proto/etcd.proto")]
mod proto {
    tonic::include_proto!("etcdserverpb");
}

mod backoff;
pub mod clock;
mod directory;
pub mod election;
mod error;
pub mod etcd;
mod member;
mod policy;
mod registration;
mod source;
mod view;

pub use directory::{Changes, Directory};
pub use election::{Candidacy, Fence, Leader, Leaders, Leadership, Permit, Standing};
pub use error::{Kind, MembershipError, Result, Stage};
pub use etcd::{Etcd, EtcdConfig};
pub use member::{Member, MemberRole};
pub use policy::{POLICY_BYTES_MAX, Policies, Policy, PolicyFollower};
pub use registration::{Registration, RegistrationState};
pub use source::{DnsSource, EtcdSource, FileSource, KubernetesSource, ListSource, NameLookup, Source};
pub use view::{Change, ListedMember, MEMBERS_MAX, Revision, Snapshot, SourceFailure, changes};
