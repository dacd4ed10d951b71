//! The bytes of all requests under way, and of whole answers that are yet to be read, within one bound.
//! The front door has one such bound, and each small port that reads bodies one of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

/// A body up to this size is small: the last eighth of the room is kept for such.
const SMALL_BYTES: usize = 256 << 10;
const LARGE_PART: usize = 8;
/// Bytes that a request counts beyond its headers and body: its task, its parsed form, and a frame of its answer.
const REQUEST_BYTES: usize = 16 << 10;
/// Bytes that a header counts beyond its name and value.
const HEADER_BYTES: usize = 64;

/// Room for requests and answers. For a body it is taken as it arrives, not as they are announced: who announces much and sends nothing takes
/// nothing.
#[derive(Debug)]
pub struct MemoryPool {
    limit_bytes: usize,
    taken_bytes: AtomicUsize,
    refused: AtomicU64,
}

/// There is no room for as much as was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the requests under way take all the room that there is for them; try again shortly")]
pub struct PoolRefusal;

/// The memory that one request, body or answer occupies until this is dropped.
#[derive(Debug)]
pub struct MemoryShare {
    pool: Arc<MemoryPool>,
    bytes: usize,
}

/// A body with its memory share, which is released once no part of the body is in use.
struct HeldBody {
    bytes: Bytes,
    _room: MemoryShare,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl MemoryPool {
    /// Room for so many bytes.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { limit_bytes, taken_bytes: AtomicUsize::new(0), refused: AtomicU64::new(0) })
    }

    /// Room for a body of which nothing is there yet.
    #[must_use]
    pub fn room(self: &Arc<Self>) -> MemoryShare {
        MemoryShare { pool: Arc::clone(self), bytes: 0 }
    }

    /// Room for a request with such headers.
    ///
    /// # Errors
    /// Where there is none.
    pub fn request(self: &Arc<Self>, headers: &HeaderMap) -> Result<MemoryShare, PoolRefusal> {
        let header =
            |(name, value): (&HeaderName, &HeaderValue)| HEADER_BYTES + name.as_str().len() + value.len();
        let bytes = REQUEST_BYTES + headers.iter().map(header).sum::<usize>();
        let mut room = self.room();
        room.take(bytes, 0).map(|()| room)
    }

    /// Bytes that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.taken_bytes.load(Ordering::Relaxed)
    }

    /// How often there was no room.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl MemoryShare {
    /// Takes `more` bytes.
    ///
    /// # Errors
    /// At once where they do not fit.
    pub fn grow(&mut self, more: usize) -> Result<(), PoolRefusal> {
        let kept = if self.bytes + more > SMALL_BYTES { self.pool.limit_bytes / LARGE_PART } else { 0 };
        self.take(more, kept)
    }

    /// Has `total` bytes at least.
    ///
    /// # Errors
    /// At once where they do not fit.
    pub fn grow_to(&mut self, total: usize) -> Result<(), PoolRefusal> {
        self.grow(total.saturating_sub(self.bytes))
    }

    /// Takes over what `other` has.
    pub fn join(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Takes `more` bytes whether they fit or not, for small answers: what is there already is counted, and others wait
    /// for it.
    pub fn add(&mut self, more: usize) {
        self.pool.taken_bytes.fetch_add(more, Ordering::Relaxed);
        self.bytes += more;
    }

    /// Takes `more` bytes but for the last `kept`.
    fn take(&mut self, more: usize, kept: usize) -> Result<(), PoolRefusal> {
        let pool = &*self.pool;
        let limit = pool.limit_bytes - kept;
        let fits = |taken: usize| taken.checked_add(more).filter(|&sum| sum <= limit);
        if pool.taken_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            pool.refused.fetch_add(1, Ordering::Relaxed);
            return Err(PoolRefusal);
        }
        self.bytes += more;
        Ok(())
    }

    /// The body, which keeps its room as long as somebody has a part of it.
    #[must_use]
    pub fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(HeldBody { bytes, _room: self })
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.pool.taken_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bodies_share_one_bound_and_small_ones_have_room_left() {
        let bodies = MemoryPool::new(8 << 20);
        let mut large = bodies.room();
        large.grow(7 << 20).unwrap();
        let mut other = bodies.room();
        assert_eq!((other.grow(300 << 10), bodies.refused()), (Err(PoolRefusal), 1));
        let small: Vec<MemoryShare> = std::iter::repeat_with(|| {
            let mut room = bodies.room();
            room.grow(SMALL_BYTES).map(|()| room)
        })
        .map_while(Result::ok)
        .collect();
        assert_eq!((small.len(), bodies.taken_bytes()), (4, 8 << 20), "the last eighth is for small bodies");
        drop((large, small));
        assert_eq!(bodies.taken_bytes(), 0);
    }

    #[test]
    fn requests_take_room_by_their_heads_and_wait_for_answers() {
        let bodies = MemoryPool::new(1 << 20);
        let mut headers = HeaderMap::new();
        headers.insert("x-long", "y".repeat(8 << 10).parse().unwrap());
        let clients: Vec<MemoryShare> =
            std::iter::repeat_with(|| bodies.request(&headers)).map_while(Result::ok).collect();
        assert_eq!(clients.len(), (1 << 20) / (REQUEST_BYTES + HEADER_BYTES + 6 + (8 << 10)));
        assert!(bodies.request(&headers).is_err());
        drop(clients);
        let mut client = bodies.request(&headers).unwrap();
        // An answer is there already: it is counted, and the next client waits.
        client.add(1 << 20);
        assert!(bodies.request(&HeaderMap::new()).is_err());
        drop(client);
        assert_eq!(bodies.taken_bytes(), 0);
    }

    #[test]
    fn a_growing_answer_takes_what_it_lacks_and_is_handed_on() {
        let bodies = MemoryPool::new(1 << 20);
        let (mut request, mut answer) = (bodies.room(), bodies.room());
        for total in [3, 3, 1, 5] {
            answer.grow_to(total).unwrap();
        }
        assert_eq!(bodies.taken_bytes(), 5);
        request.join(answer);
        assert_eq!(bodies.taken_bytes(), 5);
        drop(request);
        assert_eq!(bodies.taken_bytes(), 0);
    }

    #[test]
    fn a_body_has_its_room_until_its_last_part_is_gone() {
        let bodies = MemoryPool::new(1 << 20);
        let mut room = bodies.room();
        room.grow(4).unwrap();
        let body = room.hold(Bytes::from_static(b"abcd"));
        let part = body.slice(1..2);
        drop(body);
        assert_eq!((&part[..], bodies.taken_bytes()), (&b"b"[..], 4));
        drop(part);
        assert_eq!(bodies.taken_bytes(), 0);
    }
}
