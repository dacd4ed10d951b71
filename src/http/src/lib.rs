//! The edge over HTTP: one client and one bounded server, shared by all that ask or answer beside the front door.
//!
//! [`Client`] sends requests, over TLS where the URL says so, with the certificates of [`Trust`]. [`serve`] answers
//! within [`Bounds`], and [`receive`] reads bodies within [`BodyLimits`], the front door's included. The caller sets time
//! limits: [`by`] ends a call that takes too long. [`Page`] is the text that Prometheus reads. [`Acceptor`],
//! [`ConnectionSlots`] and [`Identity`] are for ports of any protocol, the front door's included.

mod client;
mod connect;
mod error;
mod identity;
mod listen;
mod memory;
mod metrics;
mod places;
mod receive;
mod server;
mod stall;
mod trust;
mod url;

pub use client::{Client, Options, bearer};
pub use error::{Error, causes};
pub use hyper::body::Incoming;
pub use identity::{Identity, IdentityError};
pub use listen::{AcceptFailure, Acceptor, accept_each};
pub use memory::{MemoryPool, MemoryShare, PoolRefusal};
pub use metrics::{Figure, Kind, PAGE_TYPE, Page, label};
pub use places::{ConnectionSlot, ConnectionSlots};
pub use receive::{BodyError, BodyLimits, receive};
pub use server::{Bounds, reply, serve};
pub use stall::StallGuard;
pub use trust::{Trust, TrustError};
pub use url::{Url, UrlError};

use std::future::Future;

use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::time::{Instant, timeout_at};

/// The result of `work`, or [`Error::Late`] when it has not ended by `until`.
///
/// # Errors
/// Those of `work` too.
pub async fn by<T>(until: Instant, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    timeout_at(until, work).await.unwrap_or(Err(Error::Late))
}

/// The whole of a body, which has at most `most_bytes`.
///
/// # Errors
/// When it is longer, or breaks off.
pub async fn whole<B>(body: B, most_bytes: usize) -> Result<Bytes, Error>
where
    B: Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match Limited::new(body, most_bytes).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Error::TooLong(most_bytes)),
        Err(error) => Err(Error::Broken(causes(&*error))),
    }
}

/// The next piece of a body; `None` at its end. Nothing is lost when the caller stops waiting.
///
/// # Errors
/// When it breaks off.
pub async fn next_piece<B>(body: &mut B) -> Result<Option<B::Data>, Error>
where
    B: Body + Unpin,
    B::Error: std::error::Error,
{
    loop {
        match body.frame().await {
            None => return Ok(None),
            Some(Err(error)) => return Err(Error::Broken(causes(&error))),
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    return Ok(Some(piece));
                }
            }
        }
    }
}
