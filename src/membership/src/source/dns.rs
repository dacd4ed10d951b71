//! The addresses behind a name, like those of a headless service.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::FollowFuture;
use crate::directory::{Board, listed};
use crate::error::{MembershipError, Result};
use crate::member::{Member, MemberRole};
use crate::view::MEMBERS_MAX;

type Answer = Pin<Box<dyn Future<Output = std::io::Result<Vec<IpAddr>>> + Send>>;

/// How a name is looked up: by the system, or by something else, as tests do.
#[derive(Clone, Default)]
pub struct NameLookup(Option<Arc<dyn Fn(String) -> Answer + Send + Sync>>);

impl NameLookup {
    /// Asks `look_up` instead of the system.
    pub fn by(look_up: impl Fn(String) -> Answer + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(look_up)))
    }

    async fn ask(&self, name: &str) -> std::io::Result<Vec<IpAddr>> {
        match &self.0 {
            Some(look_up) => look_up(name.to_owned()).await,
            None => Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect()),
        }
    }
}

impl fmt::Debug for NameLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Resolve(own)" } else { "Resolve(system)" })
    }
}

/// A name whose A and AAAA records are the members: each is named after its address, all have one role and port.
#[derive(Clone, Debug)]
pub struct DnsSource {
    /// The name to look up.
    pub name: String,
    /// The port of every member.
    pub port: u16,
    /// The role of every member.
    pub role: MemberRole,
    /// Time between two look-ups, µs.
    pub every_us: u64,
    /// Time limit of one look-up, µs.
    pub timeout_us: u64,
    /// So many answers in a row must lack an address before its member has left: servers that rotate long lists
    /// leave some out each time.
    pub absences: u32,
    /// How it is looked up.
    pub resolve: NameLookup,
}

impl DnsSource {
    /// `name`, looked up every five seconds; an address that two answers lack has left.
    #[must_use]
    pub fn new(name: impl Into<String>, port: u16, role: MemberRole) -> Self {
        let (every_us, timeout_us) = (5_000_000, 5_000_000);
        Self {
            name: name.into(),
            port,
            role,
            every_us,
            timeout_us,
            absences: 2,
            resolve: NameLookup::default(),
        }
    }

    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        let wrong = |why: &str| Err(MembershipError::invalid(format!("DNS name '{}': {why}", self.name)));
        if self.name.is_empty() || self.name.len() > 253 {
            return wrong("a name has 1 to 253 characters; give that of the service");
        }
        if self.every_us == 0 || self.timeout_us == 0 || self.absences == 0 {
            return wrong("pause, timeout and absences cannot be 0; give at least 1");
        }
        Ok(Box::pin(self.follow(board, stop)))
    }

    async fn follow(self, board: Board, stop: CancellationToken) {
        let mut known = Absences::default();
        let mut readings = 0u64;
        loop {
            let asked = self.resolve.ask(&self.name);
            let answer = tokio::select! {
                answer = tokio::time::timeout(Duration::from_micros(self.timeout_us), asked) => answer,
                () = stop.cancelled() => return,
            };
            match answer {
                Ok(Ok(addresses)) if !addresses.is_empty() => {
                    readings += 1;
                    let left_out = known.take(addresses, self.absences);
                    self.write(&board, &known, readings, left_out);
                }
                // An empty service looks like a resolver that lost its zone, so the known members stay.
                Ok(Ok(_)) => board.stale(&self.fault("it has no addresses")),
                Ok(Err(e)) => board.stale(&self.fault(&e.to_string())),
                Err(_) => board.stale(&self.fault("no answer in time")),
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_micros(self.every_us)) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    fn fault(&self, why: &str) -> String {
        format!("DNS name '{}': {why}; check the name and the resolver", self.name)
    }

    fn write(&self, board: &Board, known: &Absences, readings: u64, left_out: usize) {
        let revision = readings.to_string().into();
        let members = known.0.keys().filter_map(|ip| {
            let address = std::net::SocketAddr::new(*ip, self.port).to_string();
            listed(Member::new(address.clone(), self.role, vec![address]), &revision).ok()
        });
        board.replace(members, revision.clone(), left_out);
    }
}

/// Addresses, and how many answers in a row have lacked each.
#[derive(Debug, Default)]
struct Absences(BTreeMap<IpAddr, u32>);

impl Absences {
    /// Takes an answer; how many addresses found no room.
    fn take(&mut self, answer: Vec<IpAddr>, most: u32) -> usize {
        self.0.values_mut().for_each(|absent| *absent += 1);
        let mut left_out = 0;
        for ip in answer {
            if self.0.len() < MEMBERS_MAX || self.0.contains_key(&ip) {
                self.0.insert(ip, 0);
            } else {
                left_out += 1;
            }
        }
        self.0.retain(|_, absent| *absent < most);
        left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(last: &[u8]) -> Vec<IpAddr> {
        last.iter().map(|n| IpAddr::from([10, 0, 0, *n])).collect()
    }

    #[test]
    fn an_address_leaves_after_as_many_absences_as_agreed() {
        let mut known = Absences::default();
        let of = |known: &Absences| known.0.keys().copied().collect::<Vec<_>>();
        known.take(ips(&[1, 2]), 2);
        known.take(ips(&[2, 3]), 2);
        assert_eq!(of(&known), ips(&[1, 2, 3]), "one answer without it is not enough");
        known.take(ips(&[1, 3]), 2);
        known.take(ips(&[1, 3]), 2);
        assert_eq!(of(&known), ips(&[1, 3]));
        known.take(ips(&[3]), 1);
        assert_eq!(of(&known), ips(&[3]));
    }

    #[test]
    fn surplus_addresses_are_counted() {
        let many: Vec<IpAddr> = (0..MEMBERS_MAX as u32 + 2).map(|n| IpAddr::from(n.to_be_bytes())).collect();
        let mut known = Absences::default();
        assert_eq!(known.take(many.clone(), 2), 2);
        assert_eq!(known.take(many, 2), 2);
        assert_eq!(known.0.len(), MEMBERS_MAX);
    }
}
