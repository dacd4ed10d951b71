//! The body of a response: bytes that are complete, or a stream of events.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_http::MemoryShare;
use bytes::Bytes;
use http_body::{Frame, SizeHint};

use crate::activity::UnderWay;
use crate::stream::EventStream;

/// A response of the router.
pub type Reply = http::Response<Body>;

/// A response's body.
pub struct Body {
    kind: Kind,
    /// Its connection is in use as long as this is there.
    _under_way: Option<UnderWay>,
    /// The memory share of its bytes, or of its request, unless the bytes hold it.
    room: Option<MemoryShare>,
}

enum Kind {
    Full(Option<Bytes>),
    Events(Box<EventStream>),
}

/// Why a stream was broken off instead of ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stream: the client did not read for too long; read faster, or ask for less")]
pub struct CutOffError;

impl Body {
    /// A body that is there already.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self { kind: Kind::Full(Some(bytes.into())), _under_way: None, room: None }
    }

    /// This body with the memory share of its bytes.
    pub(crate) fn holding(self, room: MemoryShare) -> Self {
        Self { room: Some(room), ..self }
    }

    pub(crate) fn events(stream: EventStream) -> Self {
        Self { kind: Kind::Events(Box::new(stream)), _under_way: None, room: None }
    }

    /// This body, marked as use of its connection and holding the memory share of its request.
    pub(crate) fn with(self, under_way: UnderWay, room: Option<MemoryShare>) -> Self {
        match (self.kind, room) {
            (Kind::Full(Some(bytes)), Some(mut room)) => {
                match self.room {
                    Some(own) => room.join(own),
                    None => room.add(bytes.len()),
                }
                // A later sender has them without this body.
                let bytes = Some(room.hold(bytes));
                Self { kind: Kind::Full(bytes), _under_way: Some(under_way), room: None }
            }
            (kind, room) => Self { kind, _under_way: Some(under_way), room },
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = CutOffError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOffError>>> {
        let this = self.get_mut();
        match &mut this.kind {
            Kind::Full(bytes) => {
                let whole = bytes.take().filter(|bytes| !bytes.is_empty());
                Poll::Ready(whole.map(|bytes| Ok(Frame::data(bytes))))
            }
            Kind::Events(stream) => {
                stream.poll_bytes(cx).map(|next| next.map(|bytes| bytes.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Full(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Kind::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Events(_) => SizeHint::default(),
        }
    }
}
