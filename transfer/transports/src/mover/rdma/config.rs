//! Settings of the RDMA transport.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of the RDMA transport; the defaults suit a data centre's network.
#[derive(Clone, Debug)]
pub struct RdmaConfig {
    /// Devices to use, in this order; none means all whose port is active.
    pub devices: Vec<String>,
    /// The port of each device.
    pub port: u8,
    /// The place in the GID table; none chooses by kind (see `baton rdma doctor`).
    pub gid_index: Option<u8>,
    /// The largest packet; the smaller of both ends' and of what the ports carry is used.
    pub mtu_bytes_max: u32,
    /// How far the port of a peer's RDMA handshake is above the port in its address.
    pub handshake_port_offset: u16,
    /// Queue pairs of a path; more than one pays where one cannot fill the link.
    pub queue_pairs: u32,
    /// Slices that a path takes.
    pub outstanding_max: u32,
    /// The largest slice.
    pub slice_bytes_max: u32,
    /// Memory is registered in pieces of this size, several at a time.
    pub region_bytes: u64,
    /// How long a device waits for an answer: 4.096 µs times two to the power of this.
    pub ack_timeout_exponent: u8,
    /// How often it repeats before it gives the path up. Not 7, which some devices take for "without end".
    pub retries: u8,
    /// The service level of InfiniBand.
    pub service_level: u8,
    /// The traffic class of RoCE: the DSCP times four.
    pub traffic_class: u8,
    /// How long opening a path may take.
    pub open_timeout_us: u64,
    /// How long the peer may take to answer a notice or a probe.
    pub answer_timeout_us: u64,
    /// How long the peer may take to confirm the end of a path.
    pub fence_timeout_us: u64,
    /// Paths of both kinds, opened here and by peers.
    pub paths_max: u32,
    /// Where sysfs is; another place in tests.
    pub sysfs: PathBuf,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            mtu_bytes_max: 4_096,
            handshake_port_offset: 0,
            queue_pairs: 1,
            outstanding_max: 128,
            slice_bytes_max: 64 << 20,
            region_bytes: 1 << 30,
            ack_timeout_exponent: 14,
            retries: 6,
            service_level: 0,
            traffic_class: 0,
            open_timeout_us: 5_000_000,
            answer_timeout_us: 5_000_000,
            fence_timeout_us: 2_000_000,
            paths_max: 1_024,
            sysfs: PathBuf::from("/sys"),
        }
    }
}

impl RdmaConfig {
    /// The code by which verbs name the largest packet.
    pub(super) fn mtu_code_max(&self) -> u8 {
        (1..=5).rev().find(|code| 128 << *code <= self.mtu_bytes_max).unwrap_or(1)
    }

    pub(super) fn open_timeout(&self) -> Duration {
        Duration::from_micros(self.open_timeout_us)
    }

    pub(super) fn answer_timeout(&self) -> Duration {
        Duration::from_micros(self.answer_timeout_us)
    }

    pub(super) fn fence_timeout(&self) -> Duration {
        Duration::from_micros(self.fence_timeout_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_named_by_the_largest_code_that_fits() {
        let code = |mtu_bytes_max| RdmaConfig { mtu_bytes_max, ..RdmaConfig::default() }.mtu_code_max();
        assert_eq!([256, 1_023, 1_024, 4_096].map(code), [1, 2, 3, 5]);
    }
}
