//! A value that came up from below, as long as a reader wants it.

use super::budget::BudgetShare;
use crate::reading::Reading;
use crate::refusal::Refusal;

/// A value that was brought up.
#[derive(Debug)]
pub struct BroughtValue(ValuePlace);

#[derive(Debug)]
enum ValuePlace {
    /// In memory, under a lease: it stays until those who wait for it have it.
    Memory(Reading),
    /// Beside it, for memory is full of what is held; of that there is a bound.
    Beside { value: Vec<u8>, _held: BudgetShare },
}

impl BroughtValue {
    pub(crate) fn in_memory(reading: Reading) -> Self {
        Self(ValuePlace::Memory(reading))
    }

    pub(crate) fn beside(value: Vec<u8>, held: BudgetShare) -> Self {
        Self(ValuePlace::Beside { value, _held: held })
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.0 {
            ValuePlace::Memory(reading) => reading.bytes(),
            ValuePlace::Beside { value, .. } => value.len(),
        }
    }

    /// Its bytes, where memory had no room for them.
    #[cfg(feature = "resp")]
    pub(crate) fn own(&self) -> Option<&[u8]> {
        if let ValuePlace::Beside { value, .. } = &self.0 { Some(value) } else { None }
    }

    /// The whole value.
    ///
    /// # Errors
    /// [`Refusal::Revoked`].
    pub fn to_vec(&self) -> Result<Vec<u8>, Refusal> {
        match &self.0 {
            ValuePlace::Memory(reading) => reading.to_vec(),
            ValuePlace::Beside { value, .. } => Ok(value.clone()),
        }
    }
}
