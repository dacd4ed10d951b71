//! Random trouble by seed, with an oracle: never two leaders at one time, tokens grow, and in the calm afterwards
//! one leads and everybody knows who is there.
//!
//! `BATON_SEED` and `BATON_MEMBERSHIP_ROUNDS` try more than the default does.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_membership::clock::now_us;
use baton_membership::{Directory, EtcdSource, Leadership, Member, MemberRole, Registration, Source};
use baton_types::Rng;

use crate::elections::{TTL_US, stand};
use crate::eventually;
use crate::forwarder::{Forwarder, Wire};
use crate::server::{Server, client};

const CANDIDATES: usize = 3;

struct Party {
    wire: Forwarder,
    leadership: Option<Leadership>,
    registration: Option<Registration>,
    directory: Directory,
    lives: u64,
}

impl Party {
    async fn new(server: &Server, at: usize) -> Self {
        let wire = Forwarder::to(server.port()).await;
        let source = EtcdSource { etcd: client(vec![wire.url()]), cluster: "test".into() };
        let directory = Directory::start(Source::Etcd(source)).expect("a directory");
        let mut party = Self { wire, leadership: None, registration: None, directory, lives: 0 };
        party.begin(at);
        party
    }

    /// A new life: whatever the last one left behind ends by itself.
    fn begin(&mut self, at: usize) {
        self.lives += 1;
        let etcd = client(vec![self.wire.url()]);
        let member = Member::new(format!("n{at}"), MemberRole::Both, vec![format!("n{at}:{}", self.lives)]);
        let registration = Registration::start(&etcd, "test", member, TTL_US).expect("a registration");
        self.registration = Some(registration);
        self.leadership = Some(stand(&etcd, &format!("n{at}")));
    }
}

/// One look at everybody: who may act.
fn judge(parties: &[Party], last: &mut u64) {
    let now = now_us();
    let permits = parties.iter().filter_map(|party| party.leadership.as_ref()?.permit_at(now));
    let permits: Vec<u64> = permits.map(|permit| permit.token).collect();
    assert!(permits.len() <= 1, "two act at one time: {permits:?}");
    if let [token] = permits[..] {
        assert!(token >= *last, "the token fell from {last} to {token}");
        *last = token;
    }
}

async fn trouble(rng: &mut Rng, server: &mut Server, parties: &mut [Party]) {
    let at = usize::try_from(rng.below(CANDIDATES as u64)).expect("small");
    match rng.below(8) {
        0 | 1 => parties[at].wire.set(Wire::Silent),
        2 => parties[at].wire.set(Wire::Broken),
        3 | 4 => parties[at].wire.set(Wire::Whole),
        5 => {
            // Killed without a word, and started anew.
            parties[at].leadership = None;
            parties[at].registration = None;
            parties[at].begin(at);
        }
        6 => {
            server.kill();
            server.go();
        }
        _ => {
            let etcd = server.client();
            if let Ok((_, revision)) = etcd.get("/").await {
                // It may go down meanwhile; then nothing is compacted this time.
                let _ = etcd.compact(revision).await;
            }
        }
    }
}

async fn round(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut server = Server::start().await;
    let mut parties = Vec::new();
    for at in 0..CANDIDATES {
        parties.push(Party::new(&server, at).await);
    }
    let mut last = 0;
    for _ in 0..10 {
        let until = now_us() + rng.below(TTL_US / 2);
        while now_us() < until {
            judge(&parties, &mut last);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        trouble(&mut rng, &mut server, &mut parties).await;
        judge(&parties, &mut last);
    }
    parties.iter().for_each(|party| party.wire.set(Wire::Whole));
    server.answers().await;
    eventually(&format!("seed {seed}: one leads"), || {
        judge(&parties, &mut last);
        parties.iter().find_map(|party| party.leadership.as_ref()?.permit())
    })
    .await;
    let expected: BTreeMap<String, String> = parties
        .iter()
        .enumerate()
        .map(|(at, party)| (format!("n{at}"), format!("n{at}:{}", party.lives)))
        .collect();
    eventually(&format!("seed {seed}: everybody knows who is there"), || {
        judge(&parties, &mut last);
        let known = parties.iter().map(|party| {
            let snapshot = party.directory.snapshot();
            let members = snapshot.members.values();
            let known: BTreeMap<_, _> =
                members.map(|one| (one.member.name.clone(), one.member.addresses[0].clone())).collect();
            (known, snapshot.stale.is_some())
        });
        known.into_iter().all(|(known, stale)| known == expected && !stale).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_two_leaders_and_members_converge_whatever_the_trouble() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let (first, rounds) = (number("BATON_SEED", 1), number("BATON_MEMBERSHIP_ROUNDS", 2));
    for seed in first..first + rounds {
        println!("seed {seed}");
        round(seed).await;
    }
}
