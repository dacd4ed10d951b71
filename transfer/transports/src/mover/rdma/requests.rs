//! Makes a device's requests of slices.

use std::sync::Arc;

use super::NAME;
use super::regions::{Regions, grants, remote};
use super::verbs_queue::{Verb, Work};
use crate::mover::{Direction, Fault, Slice};

/// The data to check a path's slices and to translate them to work requests.
pub(super) struct Requests {
    pub regions: Arc<Regions>,
    /// The device here, among those that memory is registered with.
    pub device: usize,
    /// The device there, among the keys of a window.
    pub peer_device: usize,
    pub slice_bytes_max: u32,
}

impl Requests {
    /// The requests of a slice, one for each pair of registrations that it crosses, numbered from `id` on.
    pub(super) fn of(&self, slice: &Slice, id: u64) -> Result<Vec<Work>, Fault> {
        let access = self.check(slice)?;
        let total = u64::from(slice.bytes);
        let mut works = Vec::with_capacity(1);
        let mut at = 0;
        while at < total {
            let here = self.regions.local(&slice.local.memory, self.device, slice.local.at + at)?;
            let there = remote(access, self.peer_device, slice.remote_at + at)?;
            let bytes = here.bytes.min(there.bytes).min(total - at);
            works.push(Work {
                id: id + works.len() as u64,
                verb: match slice.direction {
                    Direction::Read => Verb::Read,
                    Direction::Write => Verb::Write,
                },
                local_address: here.address,
                local_key: here.key,
                bytes: u32::try_from(bytes).expect("no more than the slice"),
                remote_address: there.address,
                remote_key: there.key,
                signalled: false,
            });
            at += bytes;
        }
        Ok(works)
    }

    /// The access to the slice's window, where the slice can be right.
    fn check<'a>(&self, slice: &'a Slice) -> Result<&'a [u8], Fault> {
        if let Some(fault) = slice.fault(self.slice_bytes_max) {
            return Err(fault);
        }
        let access = slice.remote.access.iter().find(|(name, _)| name == NAME);
        let text = match access {
            Some((_, access)) if grants(access, slice.direction) => return Ok(access),
            Some(_) => format!("window {} does not grant a {:?}", slice.remote.window.0, slice.direction),
            None => "the window has no RDMA access".into(),
        };
        Err(Fault::Invalid(text))
    }
}
