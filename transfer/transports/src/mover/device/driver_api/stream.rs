//! Streams, the copies that they have taken, and the events that tell of their end.
#![allow(
    unsafe_code,
    reason = "calls the CUDA driver through pointers that it gave us; each block is argued"
)]

use std::sync::Arc;

use super::Device;
use crate::mover::device::{DeviceFault, Place, Transfer};

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream, which others of the process may use.
const STREAM_OF_ITS_OWN: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: who waits sleeps, and no clock is read.
const EVENT_TO_SLEEP_ON: u32 = 1 | 2;
/// `CUDA_ERROR_NOT_READY`: no error, but "not yet".
const NOT_READY: i32 = 600;

/// A queue of copies of a device, which carries them out one after the other.
pub(in crate::mover::device) struct Stream {
    device: Arc<Device>,
    handle: usize,
}

/// A mark in a stream that can be waited for.
pub(in crate::mover::device) struct Event {
    device: Arc<Device>,
    handle: usize,
}

/// Copies that a stream has taken. Their memories stay until they have ended.
pub(in crate::mover::device) struct Running {
    stream: Arc<Stream>,
    /// Taken when they have ended; else dropping waits.
    copies: Vec<Transfer>,
    event: Option<Event>,
    /// Whether the event stands behind the last copy.
    marked: bool,
    /// Whether the driver took every copy without a fault. Where it did not, the fault may be that of an earlier
    /// copy and this one under way all the same: only the end of the whole stream tells that none is.
    whole: bool,
}

/// How copies under way have ended.
pub(in crate::mover::device) struct Settled {
    /// For the next ones.
    pub(in crate::mover::device) event: Option<Event>,
    /// The fault, and whether it is certain that the device touches their ranges no more.
    pub(in crate::mover::device) failure: Option<(DeviceFault, bool)>,
}

impl Device {
    pub(in crate::mover::device) fn stream(self: &Arc<Self>) -> Result<Arc<Stream>, DeviceFault> {
        let functions = self.enter()?;
        let mut handle = 0;
        // SAFETY: writes one handle to where there is room for one; `drop` destroys it.
        let code = unsafe { (functions.stream_create)(&raw mut handle, STREAM_OF_ITS_OWN) };
        self.judge("cuStreamCreate", code)?;
        Ok(Arc::new(Stream { device: self.clone(), handle }))
    }

    pub(in crate::mover::device) fn event(self: &Arc<Self>) -> Result<Event, DeviceFault> {
        let functions = self.enter()?;
        let mut handle = 0;
        // SAFETY: as for a stream.
        let code = unsafe { (functions.event_create)(&raw mut handle, EVENT_TO_SLEEP_ON) };
        self.judge("cuEventCreate", code)?;
        Ok(Event { device: self.clone(), handle })
    }
}

impl Stream {
    /// Queues copies and a mark behind them, up to the first that the driver refuses, and tells its fault.
    pub(in crate::mover::device) fn run(
        self: &Arc<Self>,
        copies: Vec<Transfer>,
        event: Event,
    ) -> (Running, Option<DeviceFault>) {
        let queued = copies.iter().try_for_each(|copy| self.queue(copy));
        let marked = self.mark(&event);
        let running = Running {
            stream: self.clone(),
            copies,
            event: Some(event),
            marked: marked.is_ok(),
            whole: queued.is_ok() && marked.is_ok(),
        };
        (running, queued.err().or(marked.err()))
    }

    fn queue(&self, copy: &Transfer) -> Result<(), DeviceFault> {
        let functions = self.device.enter()?;
        let stream = self.handle;
        match (copy.from(), copy.to()) {
            (Place::Host { memory: host, at }, Place::Device { memory, at: to_at }) => {
                let (to, size) = memory.range(*to_at, copy.bytes());
                let from = host.memory().address(*at, copy.bytes()).cast_const().cast();
                // SAFETY: both ranges are inside (checked by `range` and `address`) and `Running` keeps both
                // memories, pinned, until the copy has ended.
                let code = unsafe { (functions.copy_to_device)(to, from, size, stream) };
                self.device.judge("cuMemcpyHtoDAsync_v2", code)
            }
            (Place::Device { memory, at }, Place::Host { memory: host, at: to_at }) => {
                let (from, size) = memory.range(*at, copy.bytes());
                let to = host.memory().address(*to_at, copy.bytes()).cast();
                // SAFETY: as above; Rust holds no reference into a `Memory`.
                let code = unsafe { (functions.copy_to_host)(to, from, size, stream) };
                self.device.judge("cuMemcpyDtoHAsync_v2", code)
            }
            (Place::Device { memory, at }, Place::Device { memory: target, at: to_at }) => {
                let (from, size) = memory.range(*at, copy.bytes());
                let (to, _) = target.range(*to_at, copy.bytes());
                // SAFETY: as above.
                let code = unsafe { (functions.copy_on_device)(to, from, size, stream) };
                self.device.judge("cuMemcpyDtoDAsync_v2", code)
            }
            (Place::Host { .. }, Place::Host { .. }) => unreachable!("a Transfer is not made so"),
        }
    }

    fn mark(&self, event: &Event) -> Result<(), DeviceFault> {
        let functions = self.device.enter()?;
        // SAFETY: both handles are alive, and of one device.
        self.device.judge("cuEventRecord", unsafe { (functions.event_record)(event.handle, self.handle) })
    }

    /// Sleeps until all that was queued has ended.
    fn wait(&self) -> Result<(), DeviceFault> {
        let functions = self.device.enter()?;
        // SAFETY: the handle is alive.
        self.device.judge("cuStreamSynchronize", unsafe { (functions.stream_wait)(self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(functions) = self.device.enter() {
            // SAFETY: destroyed once; copies under way hold the stream, so there are none.
            let _ = unsafe { (functions.stream_destroy)(self.handle) };
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(functions) = self.device.enter() {
            // SAFETY: destroyed once, and nobody waits for it, for that would borrow it.
            let _ = unsafe { (functions.event_destroy)(self.handle) };
        }
    }
}

impl Running {
    /// Whether [`Running::settle`] would return at once, or nearly. Where the driver refused the mark there is
    /// nothing to ask, and settling waits.
    pub(in crate::mover::device) fn is_over(&self) -> bool {
        let (true, Some(event)) = (self.marked, &self.event) else { return true };
        let Ok(functions) = self.stream.device.enter() else { return true };
        // SAFETY: the handle is alive.
        let code = unsafe { (functions.event_query)(event.handle) };
        code != NOT_READY
    }

    /// Sleeps until the copies have ended, and lets go of their memories.
    pub(in crate::mover::device) fn settle(mut self) -> Settled {
        let failure = self.end();
        Settled { event: self.event.take(), failure }
    }

    fn end(&mut self) -> Option<(DeviceFault, bool)> {
        let copies = std::mem::take(&mut self.copies);
        if copies.is_empty() {
            return None;
        }
        let marked = self.event.as_ref().filter(|_| self.marked);
        let fault = match marked.map(Event::wait) {
            Some(Ok(())) if self.whole => return None,
            Some(Err(fault)) => Some(fault),
            _ => None,
        };
        match self.stream.wait() {
            Ok(()) => fault.map(|fault| (fault, true)),
            Err(later) => {
                // The device may still be at it: its ranges are never given back.
                std::mem::forget(copies);
                Some((fault.unwrap_or(later), false))
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

impl Event {
    /// Sleeps until the stream has come to the mark.
    fn wait(&self) -> Result<(), DeviceFault> {
        let functions = self.device.enter()?;
        // SAFETY: the handle is alive.
        self.device.judge("cuEventSynchronize", unsafe { (functions.event_wait)(self.handle) })
    }
}
