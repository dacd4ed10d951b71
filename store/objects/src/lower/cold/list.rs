//! The keys that the bucket has. Its catalog knows names alone, so the head of each object is read for the key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use object_store::{GetOptions, GetRange, ObjectStore as _};

use super::bucket_worker::BucketWorker;
use super::label::{Kind, Label};
use super::{ColdTier, frame, short_name};
use crate::lower::{NoAnswerError, name_of};

/// Heads that are read at a time, of all lists together.
pub(super) const HEADS_MAX: usize = 32;
/// Names that one list looks at, whosever they are.
const LOOKS_MAX: usize = 1_000;
/// A list ends early after so long, and goes on where it was.
const LIST_WITHIN: Duration = Duration::from_secs(2);

/// Some keys of a tenant, and the name to go on after; none at the end.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) next: Option<u64>,
}

/// Hears a page.
pub(crate) type PageReply = Box<dyn FnOnce(Result<Page, NoAnswerError>) + Send>;

impl ColdTier {
    /// Lists keys of a tenant after a name, at most so many, except those whose name is `nearer`. `reply` is called
    /// once, at once or from another thread. A bucket that is another store's by now has nothing of ours.
    pub(crate) fn list(
        &self,
        (tenant, after): (String, Option<u64>),
        most: usize,
        nearer: impl Fn(u64) -> bool,
        reply: PageReply,
    ) {
        let Some(runtime) = self.runtime.as_ref().filter(|_| !self.worker.is_off()) else {
            return reply(Ok(Page::default()));
        };
        let looked = self.worker.catalog.after(after, LOOKS_MAX);
        let mut next = looked.last().map(|(label, _)| label.name).filter(|_| looked.len() == LOOKS_MAX);
        let his = short_name(&tenant);
        let mut wanted: Vec<(Label, u64)> =
            looked.into_iter().filter(|(label, _)| label.tenant == his && !nearer(label.name)).collect();
        if wanted.len() > most {
            wanted.truncate(most);
            next = wanted.last().map(|(label, _)| label.name);
        }
        if wanted.is_empty() {
            return reply(Ok(Page { keys: Vec::new(), next }));
        }
        let listed = Arc::clone(&self.worker).keys(tenant, wanted, next);
        runtime.spawn(async move { reply(listed.await) });
    }
}

impl BucketWorker {
    /// The keys of these objects, as many as there is time for.
    async fn keys(
        self: Arc<Self>,
        tenant: String,
        wanted: Vec<(Label, u64)>,
        next: Option<u64>,
    ) -> Result<Page, NoAnswerError> {
        let end = Instant::now() + LIST_WITHIN;
        let (mut keys, mut last) = (Vec::with_capacity(wanted.len()), None);
        for some in wanted.chunks(HEADS_MAX) {
            if Instant::now() > end {
                return Ok(Page { keys, next: last });
            }
            for key in join_all(some.iter().map(|one| self.key(&tenant, *one))).await {
                keys.extend(key?);
            }
            last = some.last().map(|(label, _)| label.name);
        }
        Ok(Page { keys, next })
    }

    /// The key that an object's head names; none when a read of its value would find that it is of no use.
    async fn key(
        &self,
        tenant: &str,
        (label, bytes): (Label, u64),
    ) -> Result<Option<Vec<u8>>, NoAnswerError> {
        let _permit = self.heads.acquire().await.map_err(|_| NoAnswerError)?;
        if !self.is_on() {
            return Err(NoAnswerError);
        }
        let head = self.health.record("list", self.head(label, bytes).await).ok_or(NoAnswerError)?;
        let names = head.as_deref().and_then(frame::names);
        let (whose, key) = names.filter(|(whose, key)| name_of(whose, key) == label.name).unwrap_or_default();
        Ok((whose == tenant && !key.is_empty()).then_some(key))
    }

    /// The first bytes of an object, if it has the expected length.
    async fn head(&self, label: Label, bytes: u64) -> Result<Option<Bytes>, String> {
        let end = bytes.min(frame::HEAD_MAX_BYTES as u64);
        if end == 0 {
            return Ok(None);
        }
        let (path, range) = (label.path(&self.prefix, Kind::Value), Some(GetRange::Bounded(0..end)));
        let read = async {
            let got = self.bucket.get_opts(&path, GetOptions { range, ..GetOptions::default() }).await?;
            if got.meta.size != bytes {
                return Ok(Bytes::new());
            }
            got.bytes().await
        };
        Self::within(self.time_limit, read).await
    }
}
