//! Members that register themselves in etcd, and those who look on.

use std::time::Duration;

use baton_membership::etcd::{Act, Keys};
use baton_membership::{
    Change, Directory, EtcdSource, Member, MemberRole, Registration, RegistrationState, Snapshot, Source,
};

use crate::eventually;
use crate::forwarder::{Forwarder, Wire};
use crate::server::{Server, client};

const TTL_US: u64 = 2_000_000;

fn directory(endpoint: String) -> Directory {
    let source = EtcdSource { etcd: client(vec![endpoint]), cluster: "test".into() };
    Directory::start(Source::Etcd(source)).expect("a directory")
}

fn register(server: &Server, name: &str) -> Registration {
    let member = Member::new(name, MemberRole::Decode, vec![format!("{name}:1")]);
    Registration::start(&server.client(), "test", member, TTL_US).expect("a registration")
}

async fn epoch_of(registration: &Registration) -> u64 {
    eventually("it is registered", || match *registration.standing().borrow() {
        RegistrationState::Yes { epoch } => Some(epoch),
        _ => None,
    })
    .await
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.members.keys().map(String::as_str).collect()
}

async fn shows(directory: &Directory, expected: &[&str]) {
    eventually(&format!("{expected:?} are there"), || {
        let snapshot = directory.snapshot();
        (snapshot.stale.is_none() && names(&snapshot) == expected).then_some(())
    })
    .await;
}

#[tokio::test]
async fn members_come_change_and_go_before_everybodys_eyes() {
    let server = Server::start().await;
    let directory = directory(server.address());
    let mut changes = directory.changes();
    let mut next = async || tokio::time::timeout(crate::SOON, changes.next()).await.expect("in time");
    assert!(matches!(next().await, Some(Change::Snapshot(empty)) if empty.members.is_empty()));
    let a = register(&server, "a");
    let epoch = epoch_of(&a).await;
    let Some(Change::Joined(joined)) = next().await else { panic!("it joined") };
    assert_eq!((joined.member.name.as_str(), joined.member.epoch), ("a", epoch));
    let next_life = register(&server, "a");
    let next_epoch = epoch_of(&next_life).await;
    let Some(Change::Changed { before, now }) = next().await else { panic!("it changed") };
    assert_eq!((before.member.epoch, now.member.epoch), (epoch, next_epoch));
    assert_ne!(before.revision, now.revision);
    next_life.leave().await;
    assert!(matches!(next().await, Some(Change::Left { was, .. }) if was.member.name == "a"));
}

#[tokio::test]
async fn who_goes_without_a_word_is_gone_when_its_lease_ends() {
    let server = Server::start().await;
    let directory = directory(server.address());
    let (a, b) = (register(&server, "a"), register(&server, "b"));
    shows(&directory, &["a", "b"]).await;
    drop(a);
    shows(&directory, &["b"]).await;
    assert!(matches!(*b.standing().borrow(), RegistrationState::Yes { .. }));
}

#[tokio::test]
async fn a_lost_lease_is_replaced_and_a_deleted_entry_is_written_again() {
    let server = Server::start().await;
    let (etcd, directory) = (server.client(), directory(server.address()));
    let a = register(&server, "a");
    let epoch = epoch_of(&a).await;
    let key = "/baton/test/members/a";
    for revoked in [true, false] {
        let (entry, _) = etcd.get(key).await.expect("read");
        let lease = entry.expect("registered").lease;
        if revoked {
            etcd.revoke(lease).await.expect("revoked");
        } else {
            etcd.act(key, &[], Act::Delete).await.expect("deleted");
        }
        shows(&directory, &[]).await;
        shows(&directory, &["a"]).await;
        assert_eq!(directory.snapshot().members["a"].member.epoch, epoch, "the same life");
    }
}

#[tokio::test]
async fn a_restart_takes_its_name_over_at_once_and_the_older_life_knows() {
    let server = Server::start().await;
    let directory = directory(server.address());
    let older = register(&server, "a");
    let first = epoch_of(&older).await;
    let newer = register(&server, "a");
    let second = epoch_of(&newer).await;
    assert!(second > first);
    let superseded = eventually("it is superseded", || match *older.standing().borrow() {
        RegistrationState::Superseded { epoch } => Some(epoch),
        _ => None,
    });
    assert_eq!(superseded.await, second);
    tokio::time::sleep(Duration::from_micros(TTL_US / 2)).await;
    assert_eq!(epoch_of(&newer).await, second, "and the newer stays");
    eventually("all see the newer", || {
        directory.snapshot().members.get("a").filter(|one| one.member.epoch == second).map(|_| ())
    })
    .await;
}

#[tokio::test]
async fn of_many_that_start_with_one_name_at_once_one_stays() {
    let server = Server::start().await;
    let many: Vec<Registration> = (0..4).map(|_| register(&server, "a")).collect();
    let settled = eventually("one stays", || {
        let standings: Vec<RegistrationState> =
            many.iter().map(|one| one.standing().borrow().clone()).collect();
        let yes = standings.iter().filter(|one| matches!(one, RegistrationState::Yes { .. })).count();
        let out = standings.iter().filter(|one| matches!(one, RegistrationState::Superseded { .. })).count();
        (yes == 1 && out == 3).then_some(standings)
    })
    .await;
    let epochs = settled.iter().map(|one| match one {
        RegistrationState::Yes { epoch } | RegistrationState::Superseded { epoch } => *epoch,
        other => panic!("{other:?}"),
    });
    let (server_says, _) = server.client().get("/baton/test/members/a").await.expect("read");
    let member = Member::from_json(&server_says.expect("there").value).expect("a member");
    assert_eq!(epochs.max(), Some(member.epoch));
}

#[tokio::test]
async fn who_looks_on_keeps_what_is_known_while_cut_off_and_catches_up_even_after_compaction() {
    let server = Server::start().await;
    let wire = Forwarder::to(server.port()).await;
    let directory = directory(wire.url());
    let (_a, b) = (register(&server, "a"), register(&server, "b"));
    shows(&directory, &["a", "b"]).await;
    wire.set(Wire::Silent);
    eventually("it says so", || directory.snapshot().stale.clone()).await;
    assert_eq!(names(&directory.snapshot()), ["a", "b"], "what is known stays known");
    b.leave().await;
    let c = register(&server, "c");
    epoch_of(&c).await;
    let etcd = server.client();
    let (_, revision) = etcd.get("/").await.expect("read");
    etcd.compact(revision).await.expect("compacted");
    wire.set(Wire::Broken);
    tokio::time::sleep(Duration::from_millis(100)).await;
    wire.set(Wire::Whole);
    shows(&directory, &["a", "c"]).await;
}

#[tokio::test]
async fn an_etcd_that_restarts_is_followed_on_and_what_cannot_be_read_is_counted() {
    let mut server = Server::start().await;
    let directory = directory(server.address());
    let a = register(&server, "a");
    shows(&directory, &["a"]).await;
    let epoch = epoch_of(&a).await;
    server.kill();
    eventually("it says so", || directory.snapshot().stale.clone()).await;
    server.go();
    server.answers().await;
    shows(&directory, &["a"]).await;
    assert_eq!(epoch_of(&a).await, epoch);
    let put = Act::Put { value: b"not a member".to_vec().into(), lease: 0 };
    server.client().act("/baton/test/members/x", &[], put).await.expect("written");
    eventually("it is counted", || (directory.snapshot().left_out == 1).then_some(())).await;
    shows(&directory, &["a"]).await;
    let all = server.client().list(&Keys::Under("/baton/test/members/".into()), 10).await.expect("listed");
    assert_eq!(all.entries.len(), 2);
}

#[tokio::test]
async fn registrations_that_cannot_work_are_refused() {
    let etcd = client(vec!["http://127.0.0.1:1".into()]);
    let member = || Member::new("a", MemberRole::Both, vec!["a:1".into()]);
    let refused = |cluster: &str, member, ttl_us| {
        Registration::start(&etcd, cluster, member, ttl_us).expect_err("refused").text
    };
    assert!(refused("", member(), TTL_US).contains("no name of a cluster"));
    assert!(refused("a", member(), 1).contains("at least 1000000"));
    assert!(refused("a", Member { name: "a b".into(), ..member() }, TTL_US).contains("visible ASCII"));
    let down = Registration::start(&etcd, "a", member(), TTL_US).expect("it goes on trying");
    eventually("it says why", || match &*down.standing().borrow() {
        RegistrationState::No { why } if why.contains("see whether it runs") => Some(()),
        _ => None,
    })
    .await;
    tokio::time::timeout(crate::SOON, down.leave()).await.expect("leaving is bounded");
}
