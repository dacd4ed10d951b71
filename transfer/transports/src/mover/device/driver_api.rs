//! The driver's C interface, loaded when the program runs, behind owners that cannot be misused.
//!
//! Every owner keeps alive what it stands on: memories, streams and events their device, a device the driver,
//! copies under way their stream and both their memories. The library is never unloaded: drivers leave threads
//! and exit hooks of their own behind. Handles of the driver are opaque to us and kept as numbers.
#![allow(
    unsafe_code,
    reason = "calls the CUDA driver through pointers that it gave us; each block is argued"
)]

use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use libloading::Library;

use super::fault::DeviceFault;

mod memory;
mod stream;

pub use memory::{DeviceMemory, Pinned};
pub(super) use stream::{Event, Running, Stream};

/// What Linux calls the driver's library.
const LIBRARY: &str = "libcuda.so.1";
/// Room for a device's name.
const NAME_BYTES: usize = 128;

/// Declares the table of the driver's functions, and how it is filled from the library.
macro_rules! functions {
    ($($field:ident = $symbol:literal ( $($argument:ty),* );)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> i32,)*
            /// Absent before CUDA 11.7.
            range_handle: Option<unsafe extern "C" fn(*mut c_void, u64, usize, i32, u64) -> i32>,
        }

        impl Functions {
            fn of(library: &Library, path: &Path) -> Result<Self, DeviceFault> {
                Ok(Self {
                    // SAFETY: the types in the table are those of the driver's documented C interface, and
                    // the pointers outlive the borrow because the library is never unloaded.
                    $($field: *unsafe { library.get(concat!($symbol, "\0")) }.map_err(|_| {
                        DeviceFault::MissingSymbol { library: path.to_owned(), symbol: $symbol }
                    })?,)*
                    // SAFETY: as above.
                    range_handle: unsafe { library.get("cuMemGetHandleForAddressRange\0") }.ok().map(|it| *it),
                })
            }
        }
    };
}

functions! {
    init = "cuInit"(u32);
    device_count = "cuDeviceGetCount"(*mut i32);
    device_get = "cuDeviceGet"(*mut i32, i32);
    device_name = "cuDeviceGetName"(*mut c_char, i32, i32);
    device_bytes = "cuDeviceTotalMem_v2"(*mut usize, i32);
    context_retain = "cuDevicePrimaryCtxRetain"(*mut usize, i32);
    context_release = "cuDevicePrimaryCtxRelease_v2"(i32);
    context_current = "cuCtxSetCurrent"(usize);
    allocate = "cuMemAlloc_v2"(*mut u64, usize);
    free = "cuMemFree_v2"(u64);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, u32);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    copy_to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, usize);
    copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, usize);
    copy_on_device = "cuMemcpyDtoDAsync_v2"(u64, u64, usize, usize);
    stream_create = "cuStreamCreate"(*mut usize, u32);
    stream_destroy = "cuStreamDestroy_v2"(usize);
    stream_wait = "cuStreamSynchronize"(usize);
    event_create = "cuEventCreate"(*mut usize, u32);
    event_record = "cuEventRecord"(usize, usize);
    event_query = "cuEventQuery"(usize);
    event_wait = "cuEventSynchronize"(usize);
    event_destroy = "cuEventDestroy_v2"(usize);
    error_name = "cuGetErrorName"(i32, *mut *const c_char);
    error_text = "cuGetErrorString"(i32, *mut *const c_char);
}

/// The CUDA driver of this machine, loaded and initialised.
pub struct Driver {
    functions: Functions,
    library: PathBuf,
}

/// A device and its primary context, which it retains while anything of it lives.
pub struct Device {
    driver: Arc<Driver>,
    number: i32,
    context: usize,
    ordinal: u32,
    name: String,
    bytes: u64,
}

impl Driver {
    /// Loads the driver that the system has.
    ///
    /// # Errors
    /// [`DeviceFault::NoDriver`], [`DeviceFault::MissingSymbol`], or [`DeviceFault::Cuda`] where it finds no
    /// device that it can drive.
    pub fn load() -> Result<Arc<Self>, DeviceFault> {
        Self::load_from(Path::new(LIBRARY))
    }

    /// Loads the driver from a library of another name or place.
    ///
    /// # Errors
    /// As [`Driver::load`].
    pub fn load_from(library: &Path) -> Result<Arc<Self>, DeviceFault> {
        // SAFETY: loading runs the library's own start-up code; that of a CUDA driver is made to be loaded
        // so, and whoever names another library answers for it as for a program that he starts.
        let loaded = unsafe { Library::new(library) }.map_err(|error| DeviceFault::NoDriver {
            library: library.to_owned(),
            why: error.source().map_or_else(|| error.to_string(), ToString::to_string),
        })?;
        let loaded = ManuallyDrop::new(loaded);
        let functions = Functions::of(&loaded, library)?;
        let driver = Self { functions, library: library.to_owned() };
        // SAFETY: takes a number only, and may be called any number of times.
        driver.judge("cuInit", unsafe { (driver.functions.init)(0) })?;
        Ok(Arc::new(driver))
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`].
    pub fn devices(&self) -> Result<u32, DeviceFault> {
        let mut count = 0;
        // SAFETY: writes one number to where a number is.
        self.judge("cuDeviceGetCount", unsafe { (self.functions.device_count)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn judge(&self, call: &'static str, code: i32) -> Result<(), DeviceFault> {
        if code == 0 {
            return Ok(());
        }
        let name = self.say(self.functions.error_name, code);
        let text = self.say(self.functions.error_text, code);
        Err(DeviceFault::Cuda { call, code, name, text })
    }

    /// What the driver calls an error; its number where it does not know it.
    fn say(&self, ask: unsafe extern "C" fn(i32, *mut *const c_char) -> i32, code: i32) -> String {
        let mut words: *const c_char = ptr::null();
        // SAFETY: writes one pointer to where a pointer is.
        let answer = unsafe { ask(code, &raw mut words) };
        if answer != 0 || words.is_null() {
            return format!("error {code}");
        }
        // SAFETY: the driver answers with a constant string of its own, which ends in a zero.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("library", &self.library).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a device by its number, counted from 0, and retains its primary context, which other libraries
    /// in the process use as well.
    ///
    /// # Errors
    /// [`DeviceFault::NoDevice`], [`DeviceFault::Cuda`].
    pub fn open(driver: &Arc<Driver>, ordinal: u32) -> Result<Arc<Self>, DeviceFault> {
        let count = driver.devices()?;
        let index = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let index = index.ok_or(DeviceFault::NoDevice { ordinal, count })?;
        let (mut number, mut bytes, mut context) = (0, 0_usize, 0);
        let mut name = [0_u8; NAME_BYTES];
        let functions = &driver.functions;
        // SAFETY: writes one number to where a number is.
        driver.judge("cuDeviceGet", unsafe { (functions.device_get)(&raw mut number, index) })?;
        let room = i32::try_from(NAME_BYTES - 1).expect("a small constant");
        // SAFETY: writes at most `room` bytes to where there is one more, which stays zero.
        let code = unsafe { (functions.device_name)(name.as_mut_ptr().cast(), room, number) };
        driver.judge("cuDeviceGetName", code)?;
        // SAFETY: as for the number.
        let code = unsafe { (functions.device_bytes)(&raw mut bytes, number) };
        driver.judge("cuDeviceTotalMem_v2", code)?;
        // SAFETY: as for the number; `drop` releases what this retains.
        let code = unsafe { (functions.context_retain)(&raw mut context, number) };
        driver.judge("cuDevicePrimaryCtxRetain", code)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        Ok(Arc::new(Self { driver: driver.clone(), number, context, ordinal, name, bytes: bytes as u64 }))
    }

    /// Its number, as it was opened.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How much memory it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether memory pinned by the other is pinned for this one.
    pub(super) fn shares_driver(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.driver, &other.driver)
    }

    /// Makes its context the thread's, which most calls ask for.
    fn enter(&self) -> Result<&Functions, DeviceFault> {
        let functions = &self.driver.functions;
        // SAFETY: the context is retained as long as this device lives.
        self.judge("cuCtxSetCurrent", unsafe { (functions.context_current)(self.context) })?;
        Ok(functions)
    }

    fn judge(&self, call: &'static str, code: i32) -> Result<(), DeviceFault> {
        self.driver.judge(call, code)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.ordinal)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`, and all that needs the context holds this device. Where it fails
        // there is nothing left to do.
        let _ = unsafe { (self.driver.functions.context_release)(self.number) };
    }
}
