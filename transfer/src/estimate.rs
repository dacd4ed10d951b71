//! When a transfer would end, were it started now: the model itself, run ahead on a copy of the
//! path's links and the flights on them.

use alloc::vec::Vec;

use baton_types::TransferId;

use crate::engine::TransferEngine;
use crate::flight::{Flight, Phase};
use crate::network::Network;
use crate::units::{NEVER, UNLIMITED, after, bytes_per_s, ns, us_ceil};
use crate::{LinkId, PathLinks, Priority, TransferRequest};

impl TransferEngine {
    /// How long after `now_us` a transfer of `bytes` would finish if it started then and nothing
    /// else started; `u64::MAX` if it would not (a link down, unknown or stalled).
    ///
    /// Exact while the other links of the flights that it meets do not change; see
    /// [`TransferEngine::predict_us`]. Bounds on flights are not looked at.
    #[must_use]
    pub fn estimate_us(&self, now_us: u64, links: PathLinks, bytes: u64, priority: Priority) -> u64 {
        let request = TransferRequest {
            transfer: TransferId(u64::MAX),
            links,
            bytes,
            priority,
            paced: None,
            deadline_us: None,
            rate_cap_bytes_per_s: None,
        };
        self.predict_us(now_us, &request).unwrap_or(u64::MAX)
    }

    /// How long after `now_us` the transfer `request` would finish, its pacing and cap included
    /// and its deadline left aside; `None` if it would not.
    ///
    /// What flights that share its path get on their *other* links is taken as it stands. After
    /// `max_predicted_events` starts, ends and changes of phase, rates are taken as lasting.
    #[must_use]
    pub fn predict_us(&self, now_us: u64, request: &TransferRequest) -> Option<u64> {
        let now_us = now_us.max(self.now_us);
        let links = request.links.as_slice();
        let usable = |link: &LinkId| self.network.links.get(link.index()).is_some_and(|l| l.up);
        if !links.iter().all(usable) {
            return None;
        }
        if request.bytes == 0 {
            return Some(0);
        }
        let mut copy = self.excerpt(links);
        if self.network.next_ns().is_some_and(|due_ns| due_ns <= ns(now_us)) {
            copy.reflow(ns(self.now_us));
            copy.advance(ns(now_us), &mut Vec::new());
        }
        let mut flight = Flight::new(request, now_us);
        flight.deadline_ns = NEVER;
        flight.path = renamed(links, links)?;
        let slot = copy.add(flight);
        copy.reflow(ns(now_us));
        let at_ns = self.landing_ns(copy, slot)?;
        Some(us_ceil(at_ns.saturating_sub(ns(now_us))))
    }

    /// The rate that an unpaced transfer would have at the start if it started now; 0 on a link
    /// that is down or unknown. It takes the present as lasting: flights that end make the transfer
    /// faster, paced ones that fall due make it slower. Costs one look at the flights of each link:
    /// for ranking many paths before the few best are predicted.
    #[must_use]
    pub fn share_bytes_per_s(&self, links: PathLinks, priority: Priority) -> u64 {
        let mut capped = Vec::new();
        let shares = links.as_slice().iter().map(|link| {
            let link = self.network.links.get(link.index()).filter(|link| link.up)?;
            Some(self.network.share_of_newcomer(link, priority, &mut capped))
        });
        let least = shares.min_by_key(|share| share.unwrap_or(0)).flatten();
        bytes_per_s(least.unwrap_or(0))
    }

    /// Runs `copy` ahead until the flight in `slot` has landed.
    fn landing_ns(&self, mut copy: Network, slot: u32) -> Option<u64> {
        let mut ended = Vec::new();
        for _ in 0..self.config.max_predicted_events {
            if !copy.advance_once(NEVER, &mut ended) {
                return None;
            }
            if let Some(end) = ended.iter().find(|end| end.slot == slot) {
                return Some(end.at_ns);
            }
            ended.clear();
        }
        let flight = &copy.flights[slot as usize];
        let drained_ns = match flight.phase {
            Phase::Landing { at_ns } => return Some(at_ns),
            Phase::Ended => return None,
            Phase::Elastic => after(flight.settled_ns, flight.remaining(), flight.rate),
            Phase::Keeping(production) | Phase::CatchingUp(production) => {
                // As if it went on at this rate, but no earlier than its producer allows.
                let flat_ns = after(flight.settled_ns, flight.remaining(), flight.rate);
                flat_ns.max(production.until_ns)
            }
        };
        let latency_ns = flight.path.as_slice().iter().map(|l| copy.links[l.index()].latency_ns);
        Some(latency_ns.fold(drained_ns, u64::saturating_add)).filter(|&at_ns| at_ns != NEVER)
    }

    /// A network of `links` alone, named by their position in it, with the flights on them, still to
    /// be reflowed.
    fn excerpt(&self, links: &[LinkId]) -> Network {
        let whole = &self.network;
        let copied = links.iter().map(|link| whole.links[link.index()].emptied());
        let mut copy = Network::new(whole.law.clone(), copied.collect());
        for link in links {
            for &slot in &whole.links[link.index()].members {
                let flight = &whole.flights[slot as usize];
                // A flight on several of the links is copied with the first of them on its path.
                let first = flight.path.as_slice().iter().find(|l| links.contains(l));
                if first == Some(link)
                    && let Some(path) = renamed(flight.path.as_slice(), links)
                {
                    let outside = self.outside(flight, links);
                    copy.add(Flight { path, outside, ..flight.clone() });
                }
            }
        }
        copy
    }

    /// The least share that `flight` has on links other than `links`.
    fn outside(&self, flight: &Flight, links: &[LinkId]) -> u64 {
        let others = flight.path.as_slice().iter().filter(|link| !links.contains(link));
        let class = flight.priority.index();
        let shares = others.map(|link| self.network.links[link.index()].shares[class]);
        shares.min().unwrap_or(UNLIMITED)
    }
}

/// The links of `path` that are among `links`, named by their position there.
fn renamed(path: &[LinkId], links: &[LinkId]) -> Option<PathLinks> {
    let mut ids = [LinkId(0); crate::MAX_PATH_LINKS];
    let mut len = 0;
    for (position, _) in links.iter().enumerate().filter(|(_, link)| path.contains(link)) {
        ids[len] = LinkId(u32::try_from(position).ok()?);
        len += 1;
    }
    PathLinks::new(&ids[..len]).ok()
}
