//! A value that came up from below, as long as a reader wants it.

use super::budget::Held;
use crate::reading::Reading;
use crate::refusal::Refusal;

/// A value that was brought up.
#[derive(Debug)]
pub struct Brought(Where);

#[derive(Debug)]
enum Where {
    /// In memory, under a lease: it stays until those who wait for it have it.
    Memory(Reading),
    /// Beside it, for memory is full of what is held; of that there is a bound.
    Beside { value: Vec<u8>, _held: Held },
}

impl Brought {
    pub(crate) fn in_memory(reading: Reading) -> Self {
        Self(Where::Memory(reading))
    }

    pub(crate) fn beside(value: Vec<u8>, held: Held) -> Self {
        Self(Where::Beside { value, _held: held })
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Where::Memory(reading) => reading.bytes(),
            Where::Beside { value, .. } => value.len(),
        }
    }

    /// Its bytes, where memory had no room for them.
    #[cfg(feature = "resp")]
    pub(crate) fn own(&self) -> Option<&[u8]> {
        if let Where::Beside { value, .. } = &self.0 { Some(value) } else { None }
    }

    /// The whole value.
    ///
    /// # Errors
    /// [`Refusal::Revoked`].
    pub fn to_vec(&self) -> Result<Vec<u8>, Refusal> {
        match &self.0 {
            Where::Memory(reading) => reading.to_vec(),
            Where::Beside { value, .. } => Ok(value.clone()),
        }
    }
}
