//! How the driver is set up: which transports, in which order, over which devices.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_transfer::{MAX_RAILS, MoverConfig, RailNumber, RailSpec, Route};

use crate::mover::{Location, Transport};

/// Settings of a [`super::Mover`].
#[derive(Clone, Debug)]
pub struct MoverSettings {
    /// The core's; its rails and ranks are filled in from the transports.
    pub core: MoverConfig,
    /// Steps the core in a thread of its own. Without it a caller must poll or wait.
    pub background: bool,
    /// Threads that open paths, at least 1.
    pub openers: usize,
    /// Per transport: paths to a peer from each device, and what is believed of it. One path and
    /// [`RailSpec::default`] for one not named.
    pub lanes: BTreeMap<String, (u8, RailSpec)>,
    /// Per address of a peer: the transports to use, best first. For one not named, all, in the order in
    /// which they were given to [`super::Mover::new`].
    pub orders: BTreeMap<String, Vec<String>>,
    /// Per place of memory: transport and device, and how far the device is from it; 0 is nearest.
    pub ranks: BTreeMap<Location, Vec<(String, String, u8)>>,
    /// Outcomes kept for those who ask late; the oldest go first.
    pub outcomes_kept: usize,
    /// How long a shutdown waits for batches to end.
    pub shutdown_limit: Duration,
}

impl Default for MoverSettings {
    fn default() -> Self {
        Self {
            core: MoverConfig::default(),
            background: true,
            openers: 4,
            lanes: BTreeMap::new(),
            orders: BTreeMap::new(),
            ranks: BTreeMap::new(),
            outcomes_kept: 65_536,
            shutdown_limit: Duration::from_secs(5),
        }
    }
}

/// One device of one transport, and one lane over it.
#[derive(Clone, Debug)]
pub(super) struct RailPlace {
    /// The place of its transport in the list.
    pub(super) transport: usize,
    pub(super) device: String,
}

/// The rails, and the rows of ranks.
pub(super) struct Layout {
    pub(super) places: Vec<RailPlace>,
    pub(super) locations: BTreeMap<Location, u16>,
    pub(super) core: MoverConfig,
}

impl MoverSettings {
    /// Lays the transports' devices out as the core's rails.
    ///
    /// # Errors
    /// When there is no device or too many.
    pub(super) fn layout(&self, transports: &[Arc<dyn Transport>]) -> Result<Layout, String> {
        let mut core = self.core.clone();
        let mut places = Vec::new();
        core.rails.clear();
        for (index, transport) in transports.iter().enumerate() {
            let capabilities = transport.capabilities();
            core.slice_bytes_max = core.slice_bytes_max.min(capabilities.slice_bytes_max);
            let known = self.lanes.get(transport.name()).copied();
            let (lanes, mut spec) = known.unwrap_or((1, RailSpec::default()));
            spec.path_slices = spec.path_slices.min(capabilities.outstanding_max);
            spec.path_bytes_min = spec.path_bytes_min.min(spec.path_bytes);
            for device in transport.devices() {
                for _ in 0..lanes {
                    places.push(RailPlace { transport: index, device: device.clone() });
                    core.rails.push(spec);
                }
            }
        }
        core.slice_bytes = core.slice_bytes.min(core.slice_bytes_max);
        if !(1..=MAX_RAILS).contains(&places.len()) {
            return Err(format!("{} devices and lanes: use 1 to {MAX_RAILS}", places.len()));
        }
        let mut locations = BTreeMap::new();
        core.ranks.clear();
        for (row, (location, near)) in (0..).zip(&self.ranks) {
            locations.insert(*location, row);
            let rank = |place: &RailPlace| {
                let name = transports[place.transport].name();
                let found = near.iter().find(|(of, device, _)| of == name && *device == place.device);
                found.map_or(0, |&(_, _, rank)| rank)
            };
            core.ranks.push(places.iter().map(rank).collect());
        }
        if !locations.is_empty() {
            // A device that is not listed gets an empty row.
            core.ranks.push(Vec::new());
        }
        Ok(Layout { places, locations, core })
    }

    /// The routes to a peer, over the transports in `reach` (bits by place in the list).
    pub(super) fn routes(
        &self,
        address: &str,
        reach: u64,
        places: &[RailPlace],
        transports: &[Arc<dyn Transport>],
    ) -> Vec<Route> {
        let order = self.orders.get(address);
        let tier = |transport: usize| match order {
            Some(order) => order.iter().position(|name| name == transports[transport].name()),
            None => Some(transport),
        };
        let used = (0..).zip(places).filter(|(_, place)| reach >> place.transport & 1 == 1);
        let routes = used.filter_map(|(rail, place)| {
            let tier = u8::try_from(tier(place.transport)?).unwrap_or(u8::MAX);
            Some(Route { rail: RailNumber(rail), tier })
        });
        routes.collect()
    }
}
