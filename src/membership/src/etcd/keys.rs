//! Reading keys, and writing one under conditions.

use bytes::Bytes;
use tonic::transport::Channel;

use super::client::{ANSWER_BYTES_MAX, Etcd, Line, Repeat};
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::proto::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::kv_client::KvClient;
use crate::proto::request_op::Request as Op;
use crate::proto::response_op::Response as Answer;
use crate::proto::{
    CompactionRequest, Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest,
};

/// Keys that one call brings.
const PAGE: i64 = 512;
/// Longest key, bytes.
const KEY_BYTES_MAX: usize = 1024;
/// Longest value, bytes: etcd refuses requests of more than 1.5 MiB.
pub(crate) const VALUE_BYTES_MAX: usize = 1 << 20;

/// One key or all that begin alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// This one.
    One(String),
    /// Every one that begins so; not empty.
    Under(String),
}

impl Keys {
    /// First key, and the first behind the range; empty for a single key.
    pub(super) fn range(&self) -> (Bytes, Bytes) {
        match self {
            Self::One(key) => (Bytes::copy_from_slice(key.as_bytes()), Bytes::new()),
            Self::Under(prefix) => {
                let mut end = prefix.clone().into_bytes();
                // UTF-8 knows no byte 0xff: the last byte can always grow.
                if let Some(last) = end.last_mut() {
                    *last += 1;
                }
                (Bytes::copy_from_slice(prefix.as_bytes()), end.into())
            }
        }
    }
}

/// A key as etcd keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: String,
    /// Its value.
    pub value: Bytes,
    /// The store's revision when it came into being.
    pub create_revision: u64,
    /// The store's revision at its last write.
    pub mod_revision: u64,
    /// The lease that it ends with; 0: none.
    pub lease: u64,
}

impl Entry {
    pub(super) fn read(kv: KeyValue) -> Self {
        Self {
            key: String::from_utf8_lossy(&kv.key).into_owned(),
            value: kv.value,
            create_revision: kv.create_revision.cast_unsigned(),
            mod_revision: kv.mod_revision.cast_unsigned(),
            lease: kv.lease.cast_unsigned(),
        }
    }
}

/// Keys as they all were at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// In the order of their names.
    pub entries: Vec<Entry>,
    /// The store's.
    pub revision: u64,
    /// There are more than were asked for.
    pub more: bool,
}

/// A condition for a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key came into being at this revision; 0: it is not there.
    Created {
        /// The key.
        key: String,
        /// The revision.
        revision: u64,
    },
    /// The key was last written at this revision; 0: it is not there.
    Modified {
        /// The key.
        key: String,
        /// The revision.
        revision: u64,
    },
}

impl Condition {
    fn compare(&self) -> Compare {
        let (key, target, union) = match self {
            Self::Created { key, revision } => {
                (key, CompareTarget::Create, TargetUnion::CreateRevision(revision.cast_signed()))
            }
            Self::Modified { key, revision } => {
                (key, CompareTarget::Mod, TargetUnion::ModRevision(revision.cast_signed()))
            }
        };
        Compare {
            result: CompareResult::Equal.into(),
            target: target.into(),
            key: Bytes::copy_from_slice(key.as_bytes()),
            target_union: Some(union),
        }
    }
}

/// An operation on a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Write it.
    Put {
        /// The new value.
        value: Bytes,
        /// The lease that it shall end with; 0: none.
        lease: u64,
    },
    /// Delete it.
    Delete,
}

/// The outcome of a write under conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The conditions held and it was carried out, at this revision of the store.
    Done {
        /// The store's.
        revision: u64,
    },
    /// They did not hold.
    Refused {
        /// The key as it is; none: it is not there.
        current: Option<Entry>,
        /// The store's revision at that moment.
        revision: u64,
    },
}

impl Etcd {
    /// The key as it is now, agreed by the cluster; `None` where there is none. With the store's revision.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses.
    pub async fn get(&self, key: &str) -> Result<(Option<Entry>, u64)> {
        let listing = self.list(&Keys::One(key.to_owned()), 1).await?;
        Ok((listing.entries.into_iter().next(), listing.revision))
    }

    /// Up to `most` keys, as they all were at one revision.
    ///
    /// # Errors
    /// When no endpoint answers, it refuses, or the revision was compacted between two pages.
    pub async fn list(&self, keys: &Keys, most: usize) -> Result<Listing> {
        let (mut key, range_end) = keys.range();
        let mut listing = Listing { entries: Vec::new(), revision: 0, more: true };
        while listing.more && listing.entries.len() < most {
            let left = i64::try_from(most - listing.entries.len()).unwrap_or(PAGE);
            let revision = listing.revision.cast_signed();
            let page = RangeRequest {
                key: key.clone(),
                range_end: range_end.clone(),
                limit: left.min(PAGE),
                revision,
            };
            let answer = self
                .call(Stage::Read, Repeat::Safe, |line| {
                    let request = line.request(page.clone());
                    async move { client(line).range(request).await.map(tonic::Response::into_inner) }
                })
                .await?;
            if listing.revision == 0 {
                listing.revision = answer.header.map_or(0, |header| header.revision.cast_unsigned());
            }
            listing.more = answer.more && !answer.kvs.is_empty();
            if let Some(last) = answer.kvs.last() {
                // The next page begins right behind.
                key = [&last.key[..], &[0]].concat().into();
            }
            listing.entries.extend(answer.kvs.into_iter().map(Entry::read));
        }
        Ok(listing)
    }

    /// Carries out `act` on `key` if all of `conditions` hold, with nothing of anybody else's in between.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses. [`Kind::Unavailable`] and [`Kind::TimedOut`] do not tell whether it
    /// was carried out: look before trying again.
    pub async fn act(&self, key: &str, conditions: &[Condition], act: Act) -> Result<Outcome> {
        self.act_on_all(conditions, vec![(key, act)]).await
    }

    /// Like [`Etcd::act`] for several keys, all of them or none. A refusal returns the first key.
    ///
    /// # Errors
    /// As [`Etcd::act`].
    pub async fn act_on_all(&self, conditions: &[Condition], acts: Vec<(&str, Act)>) -> Result<Outcome> {
        acts.iter().try_for_each(|(key, act)| check(key, act))?;
        let first = acts.first().map(|(key, _)| *key).unwrap_or_default();
        let key = Bytes::copy_from_slice(first.as_bytes());
        let success = acts.into_iter().map(|(key, act)| RequestOp { request: Some(op(key, act)) }).collect();
        let look = Op::RequestRange(RangeRequest { key, range_end: Bytes::new(), limit: 1, revision: 0 });
        let request = TxnRequest {
            compare: conditions.iter().map(Condition::compare).collect(),
            success,
            failure: vec![RequestOp { request: Some(look) }],
        };
        let answer = self
            .call(Stage::Write, Repeat::Never, |line| {
                let request = line.request(request.clone());
                async move { client(line).txn(request).await.map(tonic::Response::into_inner) }
            })
            .await?;
        let revision = answer.header.map_or(0, |header| header.revision.cast_unsigned());
        if answer.succeeded {
            return Ok(Outcome::Done { revision });
        }
        let seen = answer.responses.into_iter().find_map(|one| match one.response {
            Some(Answer::ResponseRange(range)) => range.kvs.into_iter().next(),
            _ => None,
        });
        Ok(Outcome::Refused { current: seen.map(Entry::read), revision })
    }

    /// Forgets the store's history before `revision`; the operator's business, here for tests of what follows.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses.
    pub async fn compact(&self, revision: u64) -> Result<()> {
        let request = CompactionRequest { revision: revision.cast_signed(), physical: true };
        self.call(Stage::Write, Repeat::Never, |line| {
            let request = line.request(request);
            async move { client(line).compact(request).await.map(|_| ()) }
        })
        .await
    }
}

fn op(key: &str, act: Act) -> Op {
    let key = Bytes::copy_from_slice(key.as_bytes());
    match act {
        Act::Put { value, lease } => Op::RequestPut(PutRequest { key, value, lease: lease.cast_signed() }),
        Act::Delete => Op::RequestDeleteRange(DeleteRangeRequest { key, range_end: Bytes::new() }),
    }
}

fn client(line: Line) -> KvClient<Channel> {
    KvClient::new(line.channel).max_decoding_message_size(ANSWER_BYTES_MAX)
}

fn check(key: &str, act: &Act) -> Result<()> {
    let wrong = |why: String| Err(MembershipError::new(Kind::Invalid, Stage::Write, why));
    if key.is_empty() || key.len() > KEY_BYTES_MAX {
        return wrong(format!("a key of {} bytes; give 1 to {KEY_BYTES_MAX}", key.len()));
    }
    match act {
        Act::Put { value, .. } if value.len() > VALUE_BYTES_MAX => {
            wrong(format!("{key}: a value of {} bytes; at most {VALUE_BYTES_MAX} are kept", value.len()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_covers_what_begins_with_it_and_nothing_else() {
        let (from, to) = Keys::Under("/baton/".into()).range();
        assert_eq!((&from[..], &to[..]), (&b"/baton/"[..], &b"/baton0"[..]));
        let inside = |key: &[u8]| key >= &from[..] && key < &to[..];
        assert!(inside(b"/baton/") && inside("/baton/\u{10ffff}".as_bytes()));
        assert!(!inside(b"/baton") && !inside(b"/baton0") && !inside(b"/batoN/a"));
        assert_eq!(Keys::One("a".into()).range().1.len(), 0);
    }

    #[test]
    fn keys_and_values_are_bounded() {
        let put = |bytes: usize| Act::Put { value: vec![0; bytes].into(), lease: 0 };
        assert!(check("a", &put(VALUE_BYTES_MAX)).is_ok());
        assert!(check("a", &put(VALUE_BYTES_MAX + 1)).is_err_and(|e| e.text.contains("1048577 bytes")));
        assert!(check("", &Act::Delete).is_err() && check(&"k".repeat(1025), &Act::Delete).is_err());
    }
}
