//! The independent witness: counts the ends of requests and decides when to audit whole cores.

use crate::metrics::Status;

/// Counts how requests end, and says when the cores are audited.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    every: u64,
    steps: u64,
    ends: [u64; 5],
    complaint: Option<String>,
    digest: u64,
}

impl Oracle {
    /// An oracle that audits every `every` moments; 0 audits only at rest.
    #[must_use]
    pub const fn new(every: u64) -> Self {
        Self { every, steps: 0, ends: [0; 5], complaint: None, digest: 0 }
    }

    /// Whether this moment is audited.
    pub const fn is_due(&mut self) -> bool {
        self.steps += 1;
        self.every > 0 && self.steps.is_multiple_of(self.every)
    }

    /// A request ended.
    pub const fn ended(&mut self, status: Status) {
        self.ends[status as usize] += 1;
    }

    /// Takes an order in, if the run is audited.
    pub fn ordered(&mut self, order: &impl std::fmt::Debug) {
        if self.every > 0 {
            let text = format!("{order:?}");
            let mix = |digest: u64, byte: u8| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
            self.digest = text.bytes().fold(self.digest, mix).rotate_left(17);
        }
    }

    /// A digest of every order taken in (I10).
    #[must_use]
    pub const fn orders_digest(&self) -> u64 {
        self.digest
    }

    /// Something that must hold was looked at; the first that does not is kept.
    pub fn witness(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds && self.complaint.is_none() {
            self.complaint = Some(otherwise());
        }
    }

    /// The first thing witnessed that did not hold.
    #[must_use]
    pub fn complaint(&self) -> Option<&str> {
        self.complaint.as_deref()
    }

    /// Conservation: accepted = completed + rejected + failed + cancelled (I5).
    ///
    /// # Errors
    /// When the sum is off.
    pub fn at_rest(&self, arrived: u64) -> Result<(), String> {
        let ended: u64 = self.ends.iter().sum();
        if ended == arrived {
            Ok(())
        } else {
            Err(format!("oracle at rest: I5: {arrived} requests arrived, {ended} ended ({:?})", self.ends))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_or_doubled_end_is_noticed() {
        let mut oracle = Oracle::new(2);
        oracle.ended(Status::Completed);
        assert_eq!(oracle.at_rest(1), Ok(()));
        assert!(oracle.at_rest(2).is_err());
        oracle.ended(Status::Rejected);
        assert!(oracle.at_rest(1).is_err());
        assert!(!oracle.is_due() && oracle.is_due());
        assert!(!Oracle::new(0).is_due());
    }

    #[test]
    fn the_digest_tells_orders_and_their_order_apart() {
        let digest = |orders: &[u32]| {
            let mut oracle = Oracle::new(1);
            orders.iter().for_each(|o| oracle.ordered(o));
            oracle.orders_digest()
        };
        assert_eq!(digest(&[1, 2]), digest(&[1, 2]));
        assert!(digest(&[1, 2]) != digest(&[2, 1]) && digest(&[1, 2]) != digest(&[1, 3]));
        assert_ne!(digest(&[12]), digest(&[1, 2]));
    }

    #[test]
    fn the_first_complaint_is_kept() {
        let mut oracle = Oracle::new(0);
        oracle.witness(true, || "never".into());
        assert_eq!(oracle.complaint(), None);
        oracle.witness(false, || "first".into());
        oracle.witness(false, || "second".into());
        assert_eq!(oracle.complaint(), Some("first"));
    }
}
