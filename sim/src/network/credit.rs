//! Admission of transfers: the bounds on flights (I9) and the state of the links.

use crate::network::model::Network;
use crate::network::{Failure, Refusal, TransferRequest};

impl Network {
    /// Checks whether `request` may start now.
    ///
    /// # Errors
    /// The reason that the requester receives.
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
}
