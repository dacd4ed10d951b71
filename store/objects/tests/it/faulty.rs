//! A bucket in memory that fails, hangs or delays writes on request.

use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The behaviour of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketFault {
    Good,
    /// Every request is refused.
    Fails,
    /// No request is ever answered.
    Hangs,
    /// Values that are written are not answered, and are there once [`FaultyBucket::arrive`] is called.
    Late,
}

/// A bucket in memory that fails, hangs or delays writes on request.
#[derive(Debug)]
pub struct FaultyBucket {
    inner: Arc<InMemory>,
    fault: Mutex<BucketFault>,
    late: Mutex<Vec<(Path, PutPayload)>>,
    asked: AtomicU64,
    /// The bucket reports ages in whole seconds, as services do.
    in_seconds: AtomicBool,
}

fn in_seconds(mut meta: ObjectMeta) -> ObjectMeta {
    let micros = meta.last_modified.timestamp_subsec_micros();
    meta.last_modified -= Duration::from_micros(u64::from(micros));
    let nanos = meta.last_modified.timestamp_subsec_nanos();
    meta.last_modified -= Duration::from_nanos(u64::from(nanos));
    meta
}

fn down() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "it is down".into() }
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

impl FaultyBucket {
    pub fn new() -> Arc<Self> {
        let (fault, late, asked) = (Mutex::new(BucketFault::Good), Mutex::default(), AtomicU64::new(0));
        let in_seconds = AtomicBool::new(false);
        Arc::new(Self { inner: Arc::new(InMemory::new()), fault, late, asked, in_seconds })
    }

    /// Reports ages in whole seconds from now on.
    pub fn tell_seconds(&self) {
        self.in_seconds.store(true, Ordering::SeqCst);
    }

    fn aged(&self, meta: ObjectMeta) -> ObjectMeta {
        if self.in_seconds.load(Ordering::SeqCst) { in_seconds(meta) } else { meta }
    }

    pub fn be(&self, fault: BucketFault) {
        *self.fault.lock().unwrap() = fault;
    }

    fn fault(&self) -> BucketFault {
        *self.fault.lock().unwrap()
    }

    /// Requests so far.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    /// Paths and lengths of values.
    pub fn values(&self) -> Vec<(String, u64)> {
        let listed: Vec<ObjectMeta> = wait(self.inner.list(None).map(std::result::Result::unwrap).collect());
        let named = listed.into_iter().map(|meta| (meta.location.to_string(), meta.size));
        named.filter(|(path, _)| path.ends_with(".kv")).collect()
    }

    /// Lets the late writes arrive. Returns their number.
    pub fn arrive(&self) -> usize {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        let count = late.len();
        for (path, payload) in late {
            wait(self.inner.put(&path, payload)).unwrap();
        }
        count
    }

    /// Writes that have not arrived.
    pub fn late(&self) -> usize {
        self.late.lock().unwrap().len()
    }

    async fn pass(&self) -> Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.fault() {
            BucketFault::Fails => Err(down()),
            BucketFault::Hangs => pending().await,
            BucketFault::Good | BucketFault::Late => Ok(()),
        }
    }

    fn stream<T: Send + 'static>(
        &self,
        good: impl FnOnce() -> BoxStream<'static, Result<T>>,
    ) -> BoxStream<'static, Result<T>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.fault() {
            BucketFault::Fails => stream::once(async { Err(down()) }).boxed(),
            BucketFault::Hangs => stream::pending().boxed(),
            BucketFault::Good | BucketFault::Late => good(),
        }
    }
}

impl fmt::Display for FaultyBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a bucket with moods")
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

impl ObjectStore for FaultyBucket {
    fn put_opts<'a, 'b, 'c>(
        &'a self,
        at: &'b Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Answer<'c, PutResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.pass().await?;
            if self.fault() == BucketFault::Late && at.as_ref().ends_with(".kv") {
                self.late.lock().unwrap().push((at.clone(), payload));
                return pending().await;
            }
            self.inner.put_opts(at, payload, options).await
        })
    }

    fn put_multipart_opts<'a, 'b, 'c>(
        &'a self,
        at: &'b Path,
        options: PutMultipartOptions,
    ) -> Answer<'c, Box<dyn MultipartUpload>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move { self.inner.put_multipart_opts(at, options).await })
    }

    fn get_opts<'a, 'b, 'c>(&'a self, at: &'b Path, options: GetOptions) -> Answer<'c, GetResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.pass().await?;
            let mut got = self.inner.get_opts(at, options).await?;
            got.meta = self.aged(got.meta);
            Ok(got)
        })
    }

    fn delete_stream(&self, places: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.stream(|| self.inner.delete_stream(places))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let whole = self.in_seconds.load(Ordering::SeqCst);
        let listed = self.inner.list(prefix);
        self.stream(|| if whole { listed.map_ok(in_seconds).boxed() } else { listed })
    }

    fn list_with_delimiter<'a, 'b, 'c>(&'a self, prefix: Option<&'b Path>) -> Answer<'c, ListResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move { self.inner.list_with_delimiter(prefix).await })
    }

    fn copy_opts<'a, 'b, 'c, 'd>(
        &'a self,
        from: &'b Path,
        to: &'c Path,
        options: CopyOptions,
    ) -> Answer<'d, ()>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
        Self: 'd,
    {
        Box::pin(async move { self.inner.copy_opts(from, to, options).await })
    }
}
