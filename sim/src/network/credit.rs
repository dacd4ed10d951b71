//! What may start: the bounds on flights (I9) and the state of the links.

use crate::network::model::Network;
use crate::network::{Failure, LinkId, Refusal, TransferRequest};

impl Network {
    /// Whether `request` may start now.
    ///
    /// # Errors
    /// The reason that the requester is told.
    pub(crate) fn admit(&self, request: &TransferRequest) -> Result<(), Failure> {
        let refuse = |refusal| Err(Failure::Refused(refusal));
        if self.slots.contains_key(&request.transfer) {
            return refuse(Refusal::Duplicate);
        }
        for &id in request.links.as_slice() {
            let Some(link) = self.flows.links.get(id.index()) else {
                return refuse(Refusal::UnknownLink(id));
            };
            if !link.up {
                return Err(Failure::LinkDown(id));
            }
            if link.members.len() >= self.config.max_flights_per_link as usize {
                return refuse(Refusal::LinkFull(id));
            }
        }
        if self.slots.len() >= self.config.max_flights as usize {
            return refuse(Refusal::TooManyFlights);
        }
        Ok(())
    }

    /// Flights in progress on `link`, those landing included; 0 for an unknown link.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "bounded by max_flights, a u32")]
    pub fn link_flights(&self, link: LinkId) -> u32 {
        self.flows.links.get(link.index()).map_or(0, |link| link.members.len() as u32)
    }
}
