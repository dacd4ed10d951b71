//! One range to copy, between a device and the host or within a device.

use std::sync::Arc;

use super::driver_api::{DeviceMemory, Pinned};
use super::fault::DeviceFault;

/// Where a range starts.
#[derive(Clone, Debug)]
pub enum Place {
    /// In memory of a device.
    Device {
        /// Which.
        memory: Arc<DeviceMemory>,
        /// First byte.
        at: u64,
    },
    /// In pinned memory of the host.
    Host {
        /// Which.
        memory: Arc<Pinned>,
        /// First byte.
        at: u64,
    },
}

/// A copy whose ranges are known to be inside their memories. It keeps both memories alive.
#[derive(Clone, Debug)]
pub struct Transfer {
    from: Place,
    to: Place,
    bytes: u64,
}

impl Place {
    /// In device memory, from `at` on.
    pub fn device(memory: &Arc<DeviceMemory>, at: u64) -> Self {
        Self::Device { memory: memory.clone(), at }
    }

    /// In pinned host memory, from `at` on.
    pub fn host(memory: &Arc<Pinned>, at: u64) -> Self {
        Self::Host { memory: memory.clone(), at }
    }

    fn check(&self, bytes: u64) -> Result<(), DeviceFault> {
        let (held_bytes, at) = match self {
            Self::Device { memory, at } => (memory.bytes(), *at),
            Self::Host { memory, at } => (memory.memory().bytes() as u64, *at),
        };
        let inside = at.checked_add(bytes).is_some_and(|end| end <= held_bytes);
        if inside && bytes > 0 { Ok(()) } else { Err(DeviceFault::Outside { bytes, at, held_bytes }) }
    }

    fn further(&self, by: u64) -> Self {
        match self {
            Self::Device { memory, at } => Self::device(memory, at + by),
            Self::Host { memory, at } => Self::host(memory, at + by),
        }
    }
}

impl Transfer {
    /// `bytes` from one place to another. Within a device the ranges must not overlap.
    ///
    /// # Errors
    /// [`DeviceFault::Outside`] for a range that is empty or not inside its memory; [`DeviceFault::Unfit`]
    /// from host to host, and for ranges of one device memory that overlap.
    pub fn new(from: Place, to: Place, bytes: u64) -> Result<Self, DeviceFault> {
        from.check(bytes)?;
        to.check(bytes)?;
        match (&from, &to) {
            (Place::Host { .. }, Place::Host { .. }) => {
                return Err(DeviceFault::Unfit(
                    "a copy from host to host is no device's work: use Memory::copy",
                ));
            }
            (Place::Device { memory, at }, Place::Device { memory: target, at: target_at })
                if Arc::ptr_eq(memory, target) && at.abs_diff(*target_at) < bytes =>
            {
                return Err(DeviceFault::Unfit(
                    "the ranges of a copy within a device overlap: copy by a third",
                ));
            }
            _ => {}
        }
        Ok(Self { from, to, bytes })
    }

    /// Where the bytes are.
    pub fn from(&self) -> &Place {
        &self.from
    }

    /// Where they go.
    pub fn to(&self) -> &Place {
        &self.to
    }

    /// How many there are.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the bytes leave the device.
    pub fn leaves_device(&self) -> bool {
        matches!(self.to, Place::Host { .. })
    }

    /// The same copy in pieces of at most `piece_bytes`.
    pub(super) fn pieces(&self, piece_bytes: u64) -> impl Iterator<Item = Self> {
        let starts = (0..self.bytes).step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX));
        starts.map(move |at| Self {
            from: self.from.further(at),
            to: self.to.further(at),
            bytes: piece_bytes.min(self.bytes - at),
        })
    }
}
