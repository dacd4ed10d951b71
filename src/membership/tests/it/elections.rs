//! Conductors that stand for election against a real etcd.

use std::time::Duration;

use baton_membership::clock::now_us;
use baton_membership::election::state::EndReason;
use baton_membership::etcd::Act;
use baton_membership::{
    Candidacy, Etcd, Fence, Kind, Leaders, Leadership, Member, MemberRole, Policies, Standing,
};

use crate::eventually;
use crate::forwarder::{Forwarder, Wire};
use crate::server::{Server, client};

/// The shortest that leaves room for a busy machine.
pub const TTL_US: u64 = 2_000_000;

pub fn stand(etcd: &Etcd, name: &str) -> Leadership {
    let member = Member::new(name, MemberRole::Conductor, vec![format!("{name}:9090")]);
    Leadership::start(etcd, Candidacy::new("test", member, TTL_US)).expect("a candidacy that can work")
}

async fn leads(one: &Leadership) -> u64 {
    eventually("it leads", || one.permit()).await.token
}

#[tokio::test]
async fn who_resigns_hands_over_at_once_and_tokens_grow() {
    let server = Server::start().await;
    let observer = Leaders::follow(&server.client(), "test").expect("followed");
    let mut tokens = Vec::new();
    let mut leader = stand(&server.client(), "c0");
    for n in 1..5 {
        tokens.push(leads(&leader).await);
        let next = stand(&server.client(), &format!("c{n}"));
        let mut told = observer.latest();
        let told = tokio::time::timeout(
            crate::SOON,
            told.wait_for(|leader| {
                leader.as_ref().is_some_and(|leader| leader.member.name == format!("c{}", n - 1))
            }),
        );
        let told = told.await.expect("in time").expect("followed").clone().expect("somebody");
        assert_eq!((told.token, told.member.epoch), (tokens[n - 1], tokens[n - 1]));
        assert_eq!(told.member.addresses, [format!("c{}:9090", n - 1)]);
        let standing = leader.standing();
        assert_eq!(next.permit(), None, "one at a time");
        leader.resign().await;
        assert_eq!(*standing.borrow(), Standing::Resigned);
        leader = next;
    }
    tokens.push(leads(&leader).await);
    assert!(tokens.windows(2).all(|two| two[0] < two[1]), "{tokens:?}");
    let fence = Fence::new();
    assert!(tokens.iter().all(|token| fence.pass(*token).is_ok()) && fence.pass(tokens[0]).is_err());
}

#[tokio::test]
async fn a_leader_cut_off_from_etcd_stops_before_another_leads() {
    let server = Server::start().await;
    let wire = Forwarder::to(server.port()).await;
    let first = stand(&client(vec![wire.url()]), "first");
    let token = leads(&first).await;
    let second = stand(&server.client(), "second");
    wire.set(Wire::Silent);
    let deadline = tokio::time::Instant::now() + crate::SOON;
    let next = loop {
        let now = now_us();
        let (one, two) = (first.permit_at(now), second.permit_at(now));
        assert!(one.is_none() || two.is_none(), "both act");
        if let Some(permit) = two {
            break permit.token;
        }
        assert!(tokio::time::Instant::now() < deadline, "nobody took over");
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    assert!(next > token);
    let why = eventually("the first was told", || match *first.standing().borrow() {
        Standing::Deposed { why, .. } => Some(why),
        _ => None,
    });
    assert_eq!(why.await, EndReason::TimeUp);
    wire.set(Wire::Whole);
    second.resign().await;
    assert!(leads(&first).await > next, "it stands again once it is back");
}

#[tokio::test]
async fn without_etcd_nobody_leads_for_longer_than_a_lease_and_afterwards_one_does() {
    let mut server = Server::start().await;
    let two = [stand(&server.client(), "a"), stand(&server.client(), "b")];
    let before = eventually("one leads", || two.iter().find_map(Leadership::permit)).await;
    server.kill();
    let gone = now_us();
    eventually("nobody leads", || two.iter().all(|one| one.permit().is_none()).then_some(())).await;
    let until = gone + TTL_US;
    assert!(now_us() < until || two.iter().all(|one| one.permit_at(until).is_none()));
    server.go();
    let after = eventually("one leads again", || two.iter().find_map(Leadership::permit)).await;
    assert!(after.token > before.token);
}

#[tokio::test]
async fn a_leader_whose_key_was_deleted_steps_down_and_stands_again() {
    let server = Server::start().await;
    let (etcd, one) = (server.client(), stand(&server.client(), "one"));
    let token = leads(&one).await;
    etcd.act("/baton/test/leader", &[], Act::Delete).await.expect("deleted");
    let next = eventually("a new term", || one.permit().filter(|permit| permit.token > token)).await;
    assert!(next.token > token);
}

#[tokio::test]
async fn candidacies_that_cannot_work_are_refused() {
    let etcd = client(vec!["http://127.0.0.1:1".into()]);
    let member = Member::new("a", MemberRole::Conductor, vec!["a:1".into()]);
    let refused = |candidacy| Leadership::start(&etcd, candidacy).expect_err("refused").text;
    assert!(refused(Candidacy::new("a/b", member.clone(), TTL_US)).contains("no name of a cluster"));
    assert!(refused(Candidacy::new("a", member.clone(), 10)).contains("at least 1000000"));
    let nowhere = Member { addresses: Vec::new(), ..member };
    assert!(refused(Candidacy::new("a", nowhere, TTL_US)).contains("0 addresses"));
    assert!(Leaders::follow(&etcd, "").is_err() && Policies::new(&etcd, "/").is_err());
}

#[tokio::test]
async fn a_policy_is_changed_by_who_knows_the_last_one_and_all_follow() {
    let mut server = Server::start().await;
    let policies = Policies::new(&server.client(), "test").expect("a cluster");
    let following = policies.follow();
    assert_eq!(policies.get().await, Ok(None));
    let first = policies.put("a = 1", 0).await.expect("the first");
    let second = policies.put("a = 2", first).await.expect("the next");
    assert!(second > first);
    let late = policies.put("a = 3", first).await.expect_err("not the last");
    assert!(
        late.kind == Kind::Conflict && late.text.contains(&format!("version {second} is in force")),
        "{late}"
    );
    let told = |text: &'static str| {
        let mut latest = following.latest();
        async move {
            let told = latest.wait_for(|policy| policy.as_ref().is_some_and(|policy| policy.text == text));
            tokio::time::timeout(crate::SOON, told).await.expect("in time").expect("followed").clone()
        }
    };
    assert_eq!(told("a = 2").await.map(|policy| policy.version), Some(second));
    let long = "x".repeat(baton_membership::POLICY_BYTES_MAX + 1);
    assert!(policies.put(&long, second).await.is_err_and(|e| e.text.contains("shorten")));
    // A leader writes as long as it leads.
    let leader = stand(&server.client(), "leader");
    let permit = eventually("it leads", || leader.permit()).await;
    let third = policies.put_as_leader("a = 3", second, permit).await.expect("it leads");
    leader.resign().await;
    let late = policies.put_as_leader("a = 4", third, permit).await.expect_err("it no longer leads");
    assert!(late.kind == Kind::Conflict && late.text.contains("no longer leads"), "{late}");
    // The last policy stays while etcd is down, and a later write is reported afterwards.
    server.kill();
    server.go();
    server.answers().await;
    assert_eq!(told("a = 3").await.map(|policy| policy.version), Some(third));
    policies.put("a = 5", third).await.expect("it is back");
    told("a = 5").await;
}

#[tokio::test]
async fn the_policy_before_comes_back_by_one_call_and_goes_by_another() {
    let server = Server::start().await;
    let policies = Policies::new(&server.client(), "test").expect("a cluster");
    let back = async || policies.rollback(None, None).await.map(|policy| policy.map(|policy| policy.text));
    assert!(back().await.is_err_and(|e| e.kind == Kind::Conflict && e.text.contains("none before")));
    let first = policies.put("a = 1", 0).await.expect("the first");
    policies.put("a = 2", first).await.expect("the second");
    assert_eq!(back().await, Ok(Some("a = 1".into())));
    assert_eq!(back().await, Ok(Some("a = 2".into())));
    assert_eq!(policies.get().await.map(|policy| policy.map(|p| p.text)), Ok(Some("a = 2".into())));
    // Before the first there was none, and that comes back, too.
    let alone = Policies::new(&server.client(), "other").expect("a cluster");
    alone.put("b = 1", 0).await.expect("the first");
    assert_eq!(alone.rollback(None, None).await, Ok(None));
    assert_eq!(alone.get().await, Ok(None));
    assert!(alone.rollback(None, None).await.is_ok_and(|policy| policy.is_some_and(|p| p.text == "b = 1")));
    // A former leader cannot roll back.
    let leader = stand(&server.client(), "leader");
    let permit = eventually("it leads", || leader.permit()).await;
    assert!(policies.rollback(None, Some(permit)).await.is_ok());
    leader.resign().await;
    assert!(policies.rollback(None, Some(permit)).await.is_err_and(|e| e.text.contains("no longer leads")));
}
