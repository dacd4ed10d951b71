//! What the router answers with: bytes that are there already, or a stream of events.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use crate::stream::EventStream;

/// A response of the router.
pub type Reply = http::Response<Body>;

/// A response's body.
pub struct Body(Kind);

enum Kind {
    Full(Option<Bytes>),
    Events(Box<EventStream>),
}

/// Why a stream was broken off instead of ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOff;

impl std::fmt::Display for CutOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stream: the client did not read for too long; read faster, or ask for less")
    }
}

impl std::error::Error for CutOff {}

impl Body {
    /// A body that is there already.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self(Kind::Full(Some(bytes.into())))
    }

    pub(crate) fn events(stream: EventStream) -> Self {
        Self(Kind::Events(Box::new(stream)))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        match &mut self.0 {
            Kind::Full(bytes) => Poll::Ready(
                bytes.take().filter(|bytes| !bytes.is_empty()).map(|bytes| Ok(Frame::data(bytes))),
            ),
            Kind::Events(stream) => {
                stream.poll_bytes(cx).map(|next| next.map(|bytes| bytes.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Kind::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Events(_) => SizeHint::default(),
        }
    }
}
