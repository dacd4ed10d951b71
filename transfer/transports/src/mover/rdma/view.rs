//! The devices of this machine as libibverbs reports them, for `baton rdma doctor`.

use super::verbs::{Context, device_names};

/// A device as libibverbs sees it, or why it cannot be opened.
#[derive(Clone, Debug)]
pub struct DeviceView {
    /// Its name.
    pub name: String,
    /// The opened device, or the error of opening it.
    pub opened: Result<OpenedView, String>,
}

/// The properties of an opened device.
#[derive(Clone, Copy, Debug)]
pub struct OpenedView {
    /// Whether port 1 is active.
    pub active: bool,
    /// The largest packet in use now, and at most.
    pub mtu_bytes: (u32, u32),
    /// The largest message.
    pub message_bytes_max: u32,
    /// The largest registration.
    pub region_bytes_max: u64,
    /// Requests that a queue pair takes.
    pub queue_works_max: u32,
    /// Places for addresses.
    pub gids: u32,
}

/// Every device that libibverbs sees.
pub fn device_views() -> Vec<DeviceView> {
    let view = |name: String| {
        let opened = look(&name).map_err(|error| error.to_string());
        DeviceView { name, opened }
    };
    device_names().into_iter().map(view).collect()
}

fn look(name: &str) -> std::io::Result<OpenedView> {
    let context = Context::open(name)?;
    let (limits, port) = (context.limits()?, context.port(1)?);
    let bytes = |code: u8| if (1..=5).contains(&code) { 128 << code } else { 0 };
    Ok(OpenedView {
        active: port.active,
        mtu_bytes: (bytes(port.mtu_code), bytes(port.mtu_code_max)),
        message_bytes_max: port.message_bytes_max,
        region_bytes_max: limits.region_bytes,
        queue_works_max: limits.queue_works,
        gids: port.gids,
    })
}
