//! Leases: what is written under one goes when nobody renews it.

use super::client::{Etcd, Line, Repeat};
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::proto::lease_client::LeaseClient;
use crate::proto::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest};
use tonic::Status;

/// A lease, and how long it lasts from the moment that the server answered; the server may have begun to count
/// earlier, but never before it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: u64,
    /// Time to live unless renewed, µs.
    pub ttl_us: u64,
}

impl Lease {
    fn read(id: i64, ttl_s: i64) -> Self {
        Self { id: id.cast_unsigned(), ttl_us: ttl_s.max(0).cast_unsigned().saturating_mul(1_000_000) }
    }
}

impl Etcd {
    /// A new lease of at least `ttl_us`, in whole seconds. One whose answer was lost ends by itself.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses.
    pub async fn grant(&self, ttl_us: u64) -> Result<Lease> {
        let ttl_s = i64::try_from(ttl_us.div_ceil(1_000_000).max(1)).unwrap_or(i64::MAX);
        let request = LeaseGrantRequest { ttl: ttl_s, id: 0 };
        let answer = self
            .call(Stage::Lease, Repeat::Never, |line| async move {
                let request = line.request(request);
                LeaseClient::new(line.channel).lease_grant(request).await.map(tonic::Response::into_inner)
            })
            .await?;
        if answer.error.is_empty() {
            return Ok(Lease::read(answer.id, answer.ttl));
        }
        let text = format!("etcd gives no lease: {}; see its log", answer.error);
        Err(MembershipError::new(Kind::Unavailable, Stage::Lease, text))
    }

    /// Lets `lease` last anew, from now.
    ///
    /// # Errors
    /// [`Kind::LeaseLost`] when it has ended; otherwise when no endpoint answers, or it refuses.
    pub async fn renew(&self, lease: u64) -> Result<Lease> {
        let id = lease.cast_signed();
        let answer = self.call(Stage::Lease, Repeat::Safe, |line| renew_over(line, id)).await?;
        if answer.ttl_us > 0 {
            return Ok(answer);
        }
        let text = format!("etcd knows no lease {lease:x} any more; take a new one");
        Err(MembershipError::new(Kind::LeaseLost, Stage::Lease, text))
    }

    /// Ends `lease` and what is written under it; one that has ended already is no error.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses.
    pub async fn revoke(&self, lease: u64) -> Result<()> {
        let request = LeaseRevokeRequest { id: lease.cast_signed() };
        let ended = self
            .call(Stage::Lease, Repeat::Safe, |line| async move {
                let request = line.request(request);
                LeaseClient::new(line.channel).lease_revoke(request).await.map(|_| ())
            })
            .await;
        match ended {
            Err(error) if error.kind == Kind::LeaseLost => Ok(()),
            ended => ended,
        }
    }
}

/// One question and one answer: a stream that stays open would hide which question went unanswered.
async fn renew_over(line: Line, id: i64) -> std::result::Result<Lease, Status> {
    let question = line.request(tokio_stream::once(LeaseKeepAliveRequest { id }));
    let mut answers = LeaseClient::new(line.channel).lease_keep_alive(question).await?.into_inner();
    match answers.message().await? {
        Some(answer) => Ok(Lease::read(answer.id, answer.ttl)),
        None => Err(Status::unavailable("it closed the stream without renewing the lease")),
    }
}
