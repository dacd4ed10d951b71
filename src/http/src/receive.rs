//! Receiving the body of a request: within its size, its room and its time.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body::Body;
use tokio::time::timeout;

use crate::memory::{MemoryPool, PoolRefusal};
use crate::next_piece;

/// Bytes that are read of a body that is too large, so that its sender gets to read the error.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(2);
/// Memory that is reserved at once for a body with an announced length. Most bodies fit, and a false announcement costs
/// at most this much.
const RESERVED_BYTES: usize = 256 << 10;

/// Within what a body is received.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits<'a> {
    /// Bytes of it at most.
    pub bytes: usize,
    /// Time for all of it.
    pub within: Duration,
    /// Where it takes its room.
    pub pool: &'a Arc<MemoryPool>,
}

/// Why a body was not received.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// It has more bytes than these.
    #[error("the body has more than {0} bytes; send less")]
    TooLong(usize),
    /// There is no room for it.
    #[error(transparent)]
    NoRoom(#[from] PoolRefusal),
    /// It was not there in time.
    #[error("the body took too long; send it faster")]
    Late,
    /// Its end never came.
    #[error("the body broke off: {0}")]
    Broken(String),
}

impl BodyError {
    /// The status to answer with.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoRoom(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Late => StatusCode::REQUEST_TIMEOUT,
            Self::Broken(_) => StatusCode::BAD_REQUEST,
        }
    }
}

/// The whole body of a request, which has its room in the pool until it is dropped.
///
/// # Errors
/// When it does not keep to its limits, or breaks off. The rest of a body that is too large or has no room is read for a
/// while: its sender would see a reset connection in place of the error.
pub async fn receive<B>(headers: &HeaderMap, body: B, limits: BodyLimits<'_>) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error,
{
    timeout(limits.within, read(headers, body, limits)).await.unwrap_or(Err(BodyError::Late))
}

async fn read<B>(headers: &HeaderMap, body: B, limits: BodyLimits<'_>) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error,
{
    let (mut body, mut room) = (pin!(body), limits.pool.room());
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limits.bytes) {
        // Polling the body would ask for it.
        if !headers.contains_key(header::EXPECT) {
            discard(body).await;
        }
        return Err(BodyError::TooLong(limits.bytes));
    }
    let mut first: Option<Bytes> = None;
    let mut whole = BytesMut::new();
    while let Some(data) =
        next_piece(&mut body).await.map_err(|error| BodyError::Broken(error.to_string()))?
    {
        let held = whole.len() + first.as_ref().map_or(0, Bytes::len);
        let fits = if held + data.len() > limits.bytes {
            Err(BodyError::TooLong(limits.bytes))
        } else {
            room.grow(data.len()).map_err(BodyError::from)
        };
        if let Err(error) = fits {
            drop((data, first, whole, room));
            discard(body).await;
            return Err(error);
        }
        match first.take() {
            None if whole.is_empty() => first = Some(data),
            Some(before) => {
                whole.reserve(length.unwrap_or(0).min(RESERVED_BYTES).max(before.len() + data.len()));
                whole.extend_from_slice(&before);
                whole.extend_from_slice(&data);
            }
            None => whole.extend_from_slice(&data),
        }
    }
    // A body that came in one piece is not copied.
    Ok(room.hold(first.unwrap_or_else(|| whole.freeze())))
}

async fn discard<B>(mut body: Pin<&mut B>)
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error,
{
    let rest = async {
        let mut discarded = 0;
        while let Ok(Some(data)) = next_piece(&mut body).await {
            discarded += data.len();
            if discarded > DISCARD_BYTES {
                break;
            }
        }
    };
    // A slower client finds the connection closed.
    let _ = timeout(DISCARD_TIME, rest).await;
}
