//! Memory of a device, and memory of the host that devices reach.
#![allow(
    unsafe_code,
    reason = "calls the CUDA driver through pointers that it gave us; each block is argued"
)]

use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use super::Device;
use crate::mover::Memory;
use crate::mover::device::DeviceFault;

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every device.
const PIN_FOR_ALL: u32 = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const AS_DMA_BUF: i32 = 1;
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i32 = 801;

/// Memory of a device, freed when the last user is gone. Taking and freeing make drivers wait for the device:
/// take much once, and use ranges of it.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    bytes: u64,
}

/// Host memory that the driver has pinned, so that devices reach it. It is unpinned when the last user is gone,
/// and only then can the memory be unmapped.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    /// Dropped last by [`Pinned::drop`], or never where the driver would not unpin it.
    memory: ManuallyDrop<Arc<Memory>>,
}

impl Device {
    /// Takes memory of the device. What is in it is anything.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`], [`DeviceFault::Outside`] for none.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<Arc<DeviceMemory>, DeviceFault> {
        let size = usize::try_from(bytes).ok().filter(|size| *size > 0);
        let size = size.ok_or(DeviceFault::Outside { bytes, at: 0, held_bytes: self.bytes })?;
        let functions = self.enter()?;
        let mut address = 0;
        // SAFETY: writes one number to where a number is; `drop` frees what this takes.
        self.judge("cuMemAlloc_v2", unsafe { (functions.allocate)(&raw mut address, size) })?;
        Ok(Arc::new(DeviceMemory { device: self.clone(), address, bytes }))
    }

    /// Pins the whole of a host memory, for this device and all others of the driver. Once for each memory:
    /// share what comes back.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`], as where the limit of locked memory is too low or it is pinned already.
    pub fn pin(self: &Arc<Self>, memory: &Arc<Memory>) -> Result<Arc<Pinned>, DeviceFault> {
        let functions = self.enter()?;
        let start = memory.address(0, memory.bytes() as u64).cast();
        // SAFETY: the range is the whole of a mapping that the `Arc` keeps until it is unpinned. The device
        // touches only what copies name.
        let code = unsafe { (functions.host_register)(start, memory.bytes(), PIN_FOR_ALL) };
        self.judge("cuMemHostRegister_v2", code)?;
        Ok(Arc::new(Pinned { device: self.clone(), memory: ManuallyDrop::new(memory.clone()) }))
    }
}

impl DeviceMemory {
    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// On which device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Exports a range for devices of other makers, as a NIC that registers it: a dma-buf. Start and length
    /// must be multiples of the host's page.
    ///
    /// # Errors
    /// [`DeviceFault::Outside`], [`DeviceFault::Unfit`] where the driver is older than 11.7,
    /// [`DeviceFault::Cuda`] where the device or the kernel cannot do it.
    pub fn dma_buf(&self, at: u64, bytes: u64) -> Result<OwnedFd, DeviceFault> {
        if bytes == 0 || at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(DeviceFault::Outside { bytes, at, held_bytes: self.bytes });
        }
        let export = self.device.enter()?.range_handle;
        let remedy = "this driver has no cuMemGetHandleForAddressRange: dma-buf needs CUDA 11.7 or later";
        let export = export.ok_or(DeviceFault::Unfit(remedy))?;
        let mut file = -1_i32;
        let (from, size) = self.range(at, bytes);
        // SAFETY: for this kind of handle the driver writes one file descriptor, an `int`, to where one is;
        // the range is inside memory of ours.
        let code = unsafe { export((&raw mut file).cast(), from, size, AS_DMA_BUF, 0) };
        self.device.judge("cuMemGetHandleForAddressRange", code)?;
        if file < 0 {
            self.device.judge("cuMemGetHandleForAddressRange", NOT_SUPPORTED)?;
        }
        // SAFETY: the driver has just opened it for us, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// A range as the driver counts it.
    ///
    /// # Panics
    /// When it is not inside: a [`Transfer`] has checked it.
    pub(super) fn range(&self, at: u64, bytes: u64) -> (u64, usize) {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at {at} of a device memory of {}", self.bytes);
        (self.address + at, usize::try_from(bytes).expect("the whole was counted in a usize"))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(functions) = self.device.enter() {
            // SAFETY: taken by `allocate`, freed once, and no copy under way names it, for each would hold it.
            // Where it fails the context is lost, and the memory with it.
            let _ = unsafe { (functions.free)(self.address) };
        }
    }
}

impl Pinned {
    /// Through which device it was pinned.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.memory.address(0, self.memory.bytes() as u64).cast();
        let unpinned = self.device.enter().and_then(|functions| {
            // SAFETY: pinned by `pin`, unpinned once, still mapped, and no copy under way names it, for each
            // would hold it.
            self.device.judge("cuMemHostUnregister", unsafe { (functions.host_unregister)(start) })
        });
        if unpinned.is_ok() {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
        // Else the driver still knows the range: it stays mapped until the process ends, for another mapping
        // at its address would be taken for it.
    }
}
