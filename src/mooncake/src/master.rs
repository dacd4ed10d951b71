//! The calls of a master, as far as a storage node and a client of objects need them.

mod bodies;
mod model;
mod refusal;

pub use model::{Located, MountedSegment, Place, PlacementOptions, Replica, Standing, Uuid};
pub use refusal::Code;

use crate::error::Result;
use crate::pack::{Reader, Shape};
use crate::release::{STORE_VERSION, other_release};
use crate::rpc::{CallTimes, Caller};
use model::{LOCATED, REPLICA};

const NOTHING: Shape = Shape::Expected(&Shape::Nothing);
const YES_OR_NO: Shape = Shape::Expected(&Shape::Bool);
const VERSION: Shape = Shape::Expected(&Shape::Text);
const STORAGE: Shape = Shape::Expected(&Shape::Struct(&[Shape::Text, Shape::Bool, Shape::U64]));
const STANDING: Shape = Shape::Expected(&Shape::Struct(&[Shape::I64, Shape::I32]));
const REPLICAS: Shape = Shape::Expected(&Shape::List(&REPLICA));
const WHERE: Shape = Shape::Expected(&LOCATED);

/// A master, called as one client.
pub struct Master {
    caller: Caller,
    client: Uuid,
}

impl Master {
    /// The master at `address`, HOST:PORT, called as a new client; it is not asked yet.
    #[must_use]
    pub fn new(address: &str, times: CallTimes) -> Self {
        Self { caller: Caller::new(address, times), client: Uuid::new() }
    }

    /// The caller.
    #[must_use]
    pub const fn client(&self) -> Uuid {
        self.client
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &str {
        self.caller.address()
    }

    /// Asks for its version, before anything else.
    ///
    /// # Errors
    /// When it is of another release than the pinned one.
    pub async fn ready(&self) -> Result<()> {
        let stage = "ServiceReady";
        let version = self.query(stage, &[], &VERSION, |from| from.text()).await?;
        if version == STORE_VERSION {
            return Ok(());
        }
        let version: String = version.chars().filter(char::is_ascii_graphic).take(40).collect();
        let what = format!("the master is of store version {version}, not {STORE_VERSION}");
        Err(other_release(stage, self.address(), &what))
    }

    /// Asks how it wants storage to be configured; what it says is for clients that keep files.
    ///
    /// # Errors
    /// As every call.
    pub async fn storage_config(&self) -> Result<()> {
        self.query("GetStorageConfig", &[], &STORAGE, |from| {
            from.text()?;
            from.bool()?;
            from.u64()?;
            Ok(())
        })
        .await
    }

    /// Lends it a segment.
    ///
    /// # Errors
    /// As every call; when it has one of that name.
    pub async fn mount(&self, segment: &MountedSegment) -> Result<()> {
        let body = bodies::mount(self.client, segment);
        self.command("MountSegment", &body).await
    }

    /// Lends it a segment that it forgot.
    ///
    /// # Errors
    /// As every call.
    pub async fn mount_again(&self, segment: &MountedSegment) -> Result<()> {
        let body = bodies::remount(self.client, segment);
        self.command("ReMountSegment", &body).await
    }

    /// Takes a segment back, and with it what is in it.
    ///
    /// # Errors
    /// As every call.
    pub async fn unmount(&self, segment: Uuid) -> Result<()> {
        let body = bodies::unmount(self.client, segment);
        self.command("UnmountSegment", &body).await
    }

    /// Says that this client lives.
    ///
    /// # Errors
    /// As every call.
    pub async fn ping(&self) -> Result<Standing> {
        let body = bodies::ping(self.client);
        self.query("Ping", &body, &STANDING, |from| {
            from.i64()?;
            from.i32().map(Standing::of)
        })
        .await
    }

    /// Whether there is a whole object under `key`.
    ///
    /// # Errors
    /// As every call.
    pub async fn exists(&self, key: &str) -> Result<bool> {
        self.query("ExistKey", &bodies::key(key), &YES_OR_NO, |from| from.bool()).await
    }

    /// Where the object under `key` is.
    ///
    /// # Errors
    /// As every call; [`crate::Kind::Absent`] when there is none.
    pub async fn locate(&self, key: &str) -> Result<Located> {
        self.query("GetReplicaList", &bodies::key(key), &WHERE, Located::read).await
    }

    /// Removes the object under `key`; `force` does so while others read it.
    ///
    /// # Errors
    /// As every call; [`crate::Kind::Absent`] when there is none.
    pub async fn remove(&self, key: &str, force: bool) -> Result<()> {
        let body = bodies::remove(key, force);
        self.command("Remove", &body).await
    }

    /// Asks for room for `bytes` under `key`: where they are to be written. [`Master::put_end`] or
    /// [`Master::put_revoke`] follows.
    ///
    /// # Errors
    /// As every call; when there is such an object, or no room.
    pub async fn put_start(&self, key: &str, bytes: u64, placing: &PlacementOptions) -> Result<Vec<Replica>> {
        let body = bodies::put_start(self.client, key, bytes, placing);
        let read = |from: &mut Reader<'_>| from.list(Replica::LEAST_BYTES, Replica::read);
        self.query("PutStart", &body, &REPLICAS, read).await
    }

    /// Says that all bytes are written: from now on the object is there.
    ///
    /// # Errors
    /// As every call.
    pub async fn put_end(&self, key: &str, checksum: Option<u64>) -> Result<()> {
        let body = bodies::put_end(self.client, key, checksum);
        self.command("PutEnd", &body).await
    }

    /// Says that the bytes will not be written: the room is free again.
    ///
    /// # Errors
    /// As every call.
    pub async fn put_revoke(&self, key: &str) -> Result<()> {
        let body = bodies::put_revoke(self.client, key);
        self.command("PutRevoke", &body).await
    }

    async fn command(&self, name: &'static str, body: &[u8]) -> Result<()> {
        self.query(name, body, &NOTHING, |_| Ok(())).await
    }

    async fn query<T>(
        &self,
        name: &'static str,
        body: &[u8],
        shape: &Shape,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T>,
    ) -> Result<T> {
        let answer = self.caller.call(name, body).await?;
        let decoded = decode(name, shape, &answer, read).map_err(|e| e.named(self.address()))?;
        decoded.map_err(|code| Code(code).refusal(name, self.address()))
    }
}

fn decode<T>(
    stage: &'static str,
    shape: &Shape,
    bytes: &[u8],
    read: impl FnOnce(&mut Reader<'_>) -> Result<T>,
) -> Result<std::result::Result<T, i32>> {
    let mut reader = Reader::open(shape, bytes, stage)?;
    let value = reader.expected(read)?;
    reader.end()?;
    Ok(value)
}

#[cfg(test)]
mod tests;
