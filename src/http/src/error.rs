//! Why a request has no answer.

use hyper_util::client::legacy::Error as ClientError;

/// Why a request has no answer. The message is that of the cause; the caller adds the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nobody answers there.
    #[error("{0}")]
    Connect(String),
    /// Somebody answers, and does not come to speak TLS with us.
    #[error("TLS: {0}")]
    Tls(String),
    /// The connection broke before the end of the answer.
    #[error("{0}")]
    Broken(String),
    /// The body is longer than this many bytes.
    #[error("more than {0} bytes")]
    TooLong(usize),
    /// It took too long.
    #[error("no answer in time")]
    Late,
}

impl Error {
    /// Whether there was no connection, so that nothing was sent.
    #[must_use]
    pub fn is_connect(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Tls(_))
    }
}

impl From<ClientError> for Error {
    fn from(error: ClientError) -> Self {
        let source = || std::error::Error::source(&error);
        // The client's own words say only that it was the client.
        let words = || source().map_or_else(|| error.to_string(), causes);
        match source().and_then(|source| source.downcast_ref::<Self>()) {
            Some(ours) => ours.clone(),
            None if error.is_connect() => Self::Connect(words()),
            None => Self::Broken(words()),
        }
    }
}

/// An error with its causes: the outermost alone often says little.
#[must_use]
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
