//! Objects under keys: a master says where, and the bytes go to and come from the segments themselves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::checksum::checksum;
use crate::data::DataTimes;
use crate::error::{Kind, MooncakeError, Result};
use crate::master::{Located, Master, Place, PlacementOptions, Replica};
use crate::reach::{OpenSegment, Way};
use crate::rpc::CallTimes;

/// Bytes of a key at most.
pub const KEY_BYTES_MAX: usize = 4096;
/// Bytes of an object at most, where nothing else is said.
pub const OBJECT_BYTES_MAX: u64 = 4 << 30;
/// Segments that are kept open at most.
const OPEN_SEGMENTS: usize = 64;

/// How a client of objects behaves.
#[derive(Clone, Debug)]
pub struct ObjectsSettings {
    /// Address of the master, HOST:PORT.
    pub master: String,
    /// How segments are found.
    pub way: Way,
    /// Times of calls of the master.
    pub calls: CallTimes,
    /// Times of segments.
    pub data: DataTimes,
    /// Maximum size of an object, bytes. The client rejects a larger size in a master's reply.
    pub object_bytes: u64,
}

impl ObjectsSettings {
    /// Those for a master, with segments found by handshake.
    #[must_use]
    pub fn new(master: &str) -> Self {
        Self {
            master: master.to_owned(),
            way: Way::Handshake,
            calls: CallTimes::default(),
            data: DataTimes::default(),
            object_bytes: OBJECT_BYTES_MAX,
        }
    }
}

/// A client of objects.
pub struct Objects {
    master: Master,
    settings: ObjectsSettings,
    open: Mutex<BTreeMap<String, OpenSegment>>,
}

impl Objects {
    /// Connects to the master, and makes sure that it is of the pinned release.
    ///
    /// # Errors
    /// When it does not answer, or is of another release.
    pub async fn connect(settings: ObjectsSettings) -> Result<Self> {
        let master = Master::new(&settings.master, settings.calls);
        master.ready().await?;
        Ok(Self { master, settings, open: Mutex::default() })
    }

    /// Puts `bytes` under `key`. Once this returns, a get finds them. A failed put leaves no object under the key.
    ///
    /// # Errors
    /// When there is such an object, no room, or a segment does not take its bytes.
    pub async fn put(&self, key: &str, bytes: &[u8], placing: &PlacementOptions) -> Result<()> {
        check_key(key)?;
        if bytes.is_empty() || bytes.len() as u64 > self.settings.object_bytes {
            let message =
                format!("an object has 1 to {} bytes, not {}", self.settings.object_bytes, bytes.len());
            return Err(MooncakeError::invalid("put", message));
        }
        let put = async {
            let replicas = self.master.put_start(key, bytes.len() as u64, placing).await?;
            self.write_all(&replicas, bytes).await?;
            self.master.put_end(key, Some(checksum(bytes))).await
        };
        match put.await {
            // The master said no, and changed nothing; another's put under this key is not to be revoked.
            Err(refused)
                if refused.stage == "PutStart"
                    && matches!(refused.kind, Kind::Refused(_) | Kind::Release) =>
            {
                Err(refused)
            }
            Err(failed) => Err(self.revoked(key, failed).await),
            Ok(()) => Ok(()),
        }
    }

    /// Revokes a put that failed, and returns the error to report.
    async fn revoked(&self, key: &str, mut failed: MooncakeError) -> MooncakeError {
        if let Err(e) = self.master.put_revoke(key).await {
            failed.message += &format!(" (and the key is taken until the master gives it up by itself: {e})");
        }
        failed
    }

    async fn write_all(&self, replicas: &[Replica], bytes: &[u8]) -> Result<()> {
        if replicas.is_empty() {
            return Err(self.wrong("put", "it names no place to write to"));
        }
        for replica in replicas {
            let (address, endpoint) = self.in_memory("put", replica, bytes.len() as u64)?;
            self.with_segment(endpoint, async |segment| segment.write(address, bytes).await).await?;
        }
        Ok(())
    }

    /// The bytes under `key`.
    ///
    /// # Errors
    /// [`Kind::Absent`] when there is no such object; when no copy can be read whole, in time and as its checksum says.
    pub async fn get(&self, key: &str) -> Result<Vec<u8>> {
        check_key(key)?;
        let began = Instant::now();
        let located = self.master.locate(key).await?;
        let mut last = self.wrong("get", "no copy of the object is whole; try again");
        for replica in located.replicas.iter().filter(|replica| replica.complete()) {
            match self.read(replica, &located, began).await {
                Ok(bytes) => return Ok(bytes),
                Err(e) => {
                    tracing::debug!("mooncake: get: {key}: {e}");
                    last = e;
                }
            }
        }
        Err(last)
    }

    async fn read(&self, replica: &Replica, located: &Located, began: Instant) -> Result<Vec<u8>> {
        let Place::Memory { bytes: size, .. } = replica.place else {
            return Err(self.in_memory("get", replica, 0).expect_err("it is not in memory"));
        };
        let (address, endpoint) = self.in_memory("get", replica, size)?;
        if size > self.settings.object_bytes {
            let message = format!(
                "an object of {size} bytes is announced, at most {} are read",
                self.settings.object_bytes
            );
            return Err(self.wrong("get", &message));
        }
        let mut bytes = vec![0; size as usize];
        self.with_segment(endpoint, async |segment| segment.read(address, &mut bytes).await).await?;
        // Once the lease is over the room may be another object's, whose bytes these would then be.
        if began.elapsed() > Duration::from_millis(located.lease_ms) {
            let message =
                format!("the bytes came after the lease of {} ms was over; try again", located.lease_ms);
            return Err(MooncakeError::new(Kind::Unavailable, "get", self.master.address(), message));
        }
        if located.checksum.is_some_and(|said| said != checksum(&bytes)) {
            return Err(self.wrong(
                "get",
                "the bytes are not those that were put: their checksum differs; put them again",
            ));
        }
        Ok(bytes)
    }

    /// Whether there is a whole object under `key`.
    ///
    /// # Errors
    /// When the master does not say.
    pub async fn exists(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        self.master.exists(key).await
    }

    /// Removes the object under `key`; `force` does so while others read it.
    ///
    /// # Errors
    /// [`Kind::Absent`] when there is no such object; when somebody reads it.
    pub async fn remove(&self, key: &str, force: bool) -> Result<()> {
        check_key(key)?;
        self.master.remove(key, force).await
    }

    /// The address and the segment of a replica that should have `bytes` bytes.
    fn in_memory<'a>(&self, stage: &'static str, replica: &'a Replica, bytes: u64) -> Result<(u64, &'a str)> {
        match &replica.place {
            Place::Memory { bytes: room, address, protocol, endpoint } if protocol == "tcp" => {
                if *room == bytes {
                    return Ok((*address, endpoint));
                }
                Err(self.wrong(stage, &format!("it gives room for {room} bytes, not for {bytes}")))
            }
            Place::Memory { protocol, endpoint, .. } => {
                let message =
                    format!("segment {endpoint} is reached over {protocol:?}, only tcp is spoken here");
                Err(MooncakeError::new(Kind::Invalid, stage, self.master.address(), message))
            }
            Place::Elsewhere(place) => {
                let message = format!("a copy is {place}, which is not read here; use segments in memory");
                Err(MooncakeError::new(Kind::Invalid, stage, self.master.address(), message))
            }
        }
    }

    /// Does `work` with the open segment `endpoint`; one that was kept open and failed is opened anew, once.
    async fn with_segment<T>(
        &self,
        endpoint: &str,
        mut work: impl AsyncFnMut(&mut OpenSegment) -> Result<T>,
    ) -> Result<T> {
        let kept = self.open.lock().await.remove(endpoint);
        if let Some(mut segment) = kept
            && let Ok(done) = work(&mut segment).await
        {
            self.keep(endpoint, segment).await;
            return Ok(done);
        }
        let mut segment = OpenSegment::open(endpoint, &self.settings.way, self.settings.data).await?;
        let done = work(&mut segment).await?;
        self.keep(endpoint, segment).await;
        Ok(done)
    }

    async fn keep(&self, endpoint: &str, segment: OpenSegment) {
        let mut open = self.open.lock().await;
        if open.len() < OPEN_SEGMENTS {
            open.insert(endpoint.to_owned(), segment);
        }
    }

    fn wrong(&self, stage: &'static str, message: &str) -> MooncakeError {
        MooncakeError::new(Kind::Corrupt, stage, self.master.address(), message)
    }
}

fn check_key(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > KEY_BYTES_MAX {
        let message = format!("a key has 1 to {KEY_BYTES_MAX} bytes, not {}", key.len());
        return Err(MooncakeError::invalid("key", message));
    }
    Ok(())
}
