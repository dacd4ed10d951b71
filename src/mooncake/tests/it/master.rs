//! Calls of a master with a script: what it says is believed only as far as it can be true.

use std::time::Duration;

use baton_mooncake::pack::Shape;
use baton_mooncake::{
    CallTimes, DataTimes, Kind, Master, NodeSettings, Objects, ObjectsSettings, PlacementOptions, RELEASE,
    StorageNode,
};
use tokio_util::sync::CancellationToken;

use crate::peers::{
    InMemory, LOCATED, Owner, REPLICAS, Reply, ScriptedMaster, located, nobody, refused, room, standing, text,
};

const QUICK: CallTimes = CallTimes { connect_us: 2_000_000, call_us: 300_000 };
const EXISTS: Shape = Shape::Expected(&Shape::Bool);
const COMPLETE: i32 = 3;

fn quick(master: &ScriptedMaster) -> ObjectsSettings {
    let data = DataTimes { connect_us: 2_000_000, quiet_us: 500_000 };
    ObjectsSettings { calls: QUICK, data, object_bytes: 1 << 20, ..ObjectsSettings::new(&master.address) }
}

fn at(owner: &Owner, offset: u64, bytes: u64) -> InMemory {
    InMemory {
        bytes,
        address: owner.region.base() + offset,
        endpoint: owner.endpoint.clone(),
        status: COMPLETE,
    }
}

#[tokio::test]
async fn masters_of_another_release_are_refused_by_name() {
    let scripted = ScriptedMaster::start().await;
    let replies = [
        Reply::Body(text("3.1.0")),
        Reply::Error(4, "invalid rpc arg"),
        Reply::Error(11, "the rpc function not registered"),
        Reply::Body(refused(&EXISTS, -1)),
    ];
    for reply in replies {
        scripted.on("ServiceReady", reply);
        let refused = Objects::connect(quick(&scripted)).await.map(drop).unwrap_err();
        assert_eq!(refused.kind, Kind::Release, "{refused}");
        assert!(refused.to_string().contains(RELEASE), "{refused}");
        assert!(refused.to_string().contains(&scripted.address), "{refused}");
    }
}

#[tokio::test]
async fn masters_that_are_dead_silent_or_noisy_are_told_apart() {
    let gone = Master::new(&nobody().await, QUICK).ready().await.unwrap_err();
    assert!(gone.kind == Kind::Unavailable && gone.to_string().contains("running"), "{gone}");
    let scripted = ScriptedMaster::start().await;
    let master = Master::new(&scripted.address, QUICK);
    for (reply, kind) in [
        (Reply::Silence, Kind::Unavailable),
        (Reply::Close, Kind::Unavailable),
        (Reply::Announce(10), Kind::Unavailable),
        (Reply::Announce(u32::MAX), Kind::Corrupt),
        (Reply::Stray(text("2.0.0")), Kind::Corrupt),
        (Reply::Noise, Kind::Corrupt),
        (Reply::Error(5, "busy"), Kind::Unavailable),
        (Reply::Body(Vec::new()), Kind::Corrupt),
        (Reply::Body([text("2.0.0"), vec![0]].concat()), Kind::Corrupt),
    ] {
        scripted.on("ServiceReady", reply);
        let refused = master.ready().await.unwrap_err();
        assert_eq!(refused.kind, kind, "{refused}");
        // Whatever was left in the connection does not answer the next call.
        scripted.on("ServiceReady", Reply::Body(text("2.0.0")));
        master.ready().await.unwrap();
    }
}

#[tokio::test]
async fn an_object_is_put_got_and_told() {
    let (scripted, owner) = (ScriptedMaster::start().await, Owner::start(10_000).await);
    let objects = Objects::connect(quick(&scripted)).await.unwrap();
    scripted.on("PutStart", Reply::Body(room(&[at(&owner, 10, 5), at(&owner, 500, 5)])));
    objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap();
    assert_eq!((scripted.asked("PutEnd"), scripted.asked("PutRevoke")), (1, 0));
    for offset in [10, 500] {
        scripted.on("GetReplicaList", Reply::Body(located(&[at(&owner, offset, 5)], 5000, None)));
        assert_eq!(objects.get("key").await.unwrap(), b"bytes");
    }
}

#[tokio::test]
async fn a_put_that_fails_is_revoked() {
    let (scripted, owner) = (ScriptedMaster::start().await, Owner::start(10_000).await);
    let objects = Objects::connect(quick(&scripted)).await.unwrap();
    let outside = InMemory { address: 1, ..at(&owner, 0, 5) };
    let dead = InMemory { endpoint: nobody().await, ..at(&owner, 0, 5) };
    let mut revoked = 0;
    for replicas in [vec![], vec![at(&owner, 0, 4)], vec![outside], vec![at(&owner, 0, 5), dead]] {
        scripted.on("PutStart", Reply::Body(room(&replicas)));
        objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap_err();
        revoked += 1;
        assert_eq!((scripted.asked("PutEnd"), scripted.asked("PutRevoke")), (0, revoked));
    }
    scripted.on("PutStart", Reply::Body(room(&[at(&owner, 0, 5)])));
    scripted.on("PutEnd", Reply::Body(refused(&Shape::Expected(&Shape::Nothing), -704)));
    objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap_err();
    assert_eq!(scripted.asked("PutRevoke"), revoked + 1);
    scripted.on("PutStart", Reply::Body(refused(&REPLICAS, -705)));
    let there = objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap_err();
    assert_eq!(there.kind, Kind::Refused(-705), "{there}");
    assert_eq!(scripted.asked("PutRevoke"), revoked + 1, "there was nothing to revoke");
    // It is unknown whether the master reserved space. The error reports a put that could not be revoked.
    scripted.on("PutStart", Reply::Close);
    scripted.on("PutRevoke", Reply::Body(refused(&Shape::Expected(&Shape::Nothing), -704)));
    let lost = objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap_err();
    assert_eq!(scripted.asked("PutRevoke"), revoked + 2);
    assert!(lost.kind == Kind::Unavailable && lost.to_string().contains("taken until"), "{lost}");
}

#[tokio::test]
async fn a_get_takes_the_first_copy_that_is_whole() {
    let (scripted, owner) = (ScriptedMaster::start().await, Owner::start(10_000).await);
    let objects = Objects::connect(quick(&scripted)).await.unwrap();
    owner.region.write(owner.region.base(), b"bytes");
    let dead = InMemory { endpoint: nobody().await, ..at(&owner, 0, 5) };
    let unfinished = InMemory { status: 2, ..at(&owner, 100, 5) };
    let lying = InMemory { bytes: u64::MAX, ..at(&owner, 0, 5) };
    let long = at(&owner, 0, 1 << 21);
    let copies = [unfinished.clone(), lying.clone(), long, dead.clone(), at(&owner, 0, 5)];
    scripted.on("GetReplicaList", Reply::Body(located(&copies, 5000, None)));
    assert_eq!(objects.get("key").await.unwrap(), b"bytes");
    for (copies, lease_ms) in
        [(vec![unfinished], 5000), (vec![], 5000), (vec![lying, dead], 5000), (vec![at(&owner, 0, 5)], 0)]
    {
        scripted.on("GetReplicaList", Reply::Body(located(&copies, lease_ms, None)));
        assert_ne!(objects.get("key").await.unwrap_err().kind, Kind::Absent);
    }
    for (checksum, right) in [(0x6c40_df5f_0b49_7347, true), (1, false)] {
        owner.region.write(owner.region.base(), b"123456789");
        scripted.on("GetReplicaList", Reply::Body(located(&[at(&owner, 0, 9)], 5000, Some(checksum))));
        let got = objects.get("key").await;
        assert_eq!(
            got.map_err(|e| e.kind),
            if right { Ok(b"123456789".to_vec()) } else { Err(Kind::Corrupt) }
        );
    }
    scripted.on("GetReplicaList", Reply::Body(refused(&LOCATED, -704)));
    assert_eq!(objects.get("key").await.unwrap_err().kind, Kind::Absent);
}

#[tokio::test]
async fn a_segment_whose_owner_was_started_anew_is_opened_anew() {
    let (scripted, owner) = (ScriptedMaster::start().await, Owner::start(10_000).await);
    let objects = Objects::connect(quick(&scripted)).await.unwrap();
    for _ in 0..3 {
        scripted.on("PutStart", Reply::Body(room(&[at(&owner, 0, 5)])));
        objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap();
    }
    owner.stop.cancel();
    let second = Owner::start(10_000).await;
    let moved =
        InMemory { address: second.region.base(), endpoint: second.endpoint.clone(), ..at(&owner, 0, 5) };
    scripted.on("PutStart", Reply::Body(room(&[moved])));
    objects.put("key", b"bytes", &PlacementOptions::default()).await.unwrap();
}

#[tokio::test]
async fn keys_and_sizes_that_cannot_be_are_not_asked_about() {
    let scripted = ScriptedMaster::start().await;
    let objects = Objects::connect(quick(&scripted)).await.unwrap();
    for key in [String::new(), "k".repeat(5000)] {
        assert_eq!(objects.exists(&key).await.unwrap_err().kind, Kind::Invalid);
        assert_eq!(objects.get(&key).await.unwrap_err().kind, Kind::Invalid);
        assert_eq!(
            objects.put(&key, b"b", &PlacementOptions::default()).await.unwrap_err().kind,
            Kind::Invalid
        );
        assert_eq!(objects.remove(&key, false).await.unwrap_err().kind, Kind::Invalid);
    }
    for size in [0, (1 << 20) + 1] {
        let refused = objects.put("key", &vec![0; size], &PlacementOptions::default()).await.unwrap_err();
        assert_eq!(refused.kind, Kind::Invalid);
    }
    assert_eq!(scripted.asked("PutStart"), 0);
}

async fn node(
    scripted: &ScriptedMaster,
) -> (CancellationToken, tokio::task::JoinHandle<baton_mooncake::Result<()>>) {
    let settings = NodeSettings {
        ping_every_us: 10_000,
        calls: QUICK,
        ..NodeSettings::new(&scripted.address, "127.0.0.1", 1 << 20)
    };
    let node = StorageNode::start(settings).await.unwrap();
    let stop = CancellationToken::new();
    (stop.clone(), tokio::spawn(node.run(stop)))
}

async fn until(check: impl Fn() -> bool) {
    tokio::time::timeout(Duration::from_secs(20), async {
        while !check() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it does not come to pass");
}

#[tokio::test]
async fn a_node_mounts_again_when_it_is_forgotten_and_unmounts_at_the_end() {
    let scripted = ScriptedMaster::start().await;
    scripted.on("Ping", Reply::Body(standing(1)));
    let (stop, running) = node(&scripted).await;
    until(|| scripted.asked("Ping") > 2).await;
    assert_eq!((scripted.asked("MountSegment"), scripted.asked("ReMountSegment")), (1, 0));
    scripted.on("Ping", Reply::Body(standing(2)));
    until(|| scripted.asked("ReMountSegment") > 0).await;
    // Whatever the master says or does not say, the node goes on.
    for reply in [Reply::Silence, Reply::Close, Reply::Noise, Reply::Body(standing(9))] {
        scripted.on("Ping", reply);
        let before = scripted.asked("Ping");
        until(|| scripted.asked("Ping") > before + 1).await;
    }
    scripted.on("Ping", Reply::Body(standing(1)));
    stop.cancel();
    running.await.unwrap().unwrap();
    assert_eq!(scripted.asked("UnmountSegment"), 1);
}

#[tokio::test]
async fn a_node_ends_when_its_master_becomes_another_release() {
    let scripted = ScriptedMaster::start().await;
    scripted.on("Ping", Reply::Error(4, "invalid rpc arg"));
    let (_stop, running) = node(&scripted).await;
    assert_eq!(running.await.unwrap().unwrap_err().kind, Kind::Release);
    scripted.on("Ping", Reply::Body(standing(2)));
    scripted.on("ServiceReady", Reply::Body(text("2.0.0")));
    let (_stop, running) = node(&scripted).await;
    scripted.on("ServiceReady", Reply::Body(text("9.0.0")));
    assert_eq!(running.await.unwrap().unwrap_err().kind, Kind::Release);
}

#[tokio::test]
async fn a_node_that_is_refused_says_so() {
    let scripted = ScriptedMaster::start().await;
    scripted.on("MountSegment", Reply::Body(refused(&Shape::Expected(&Shape::Nothing), -102)));
    let settings = NodeSettings::new(&scripted.address, "127.0.0.1", 1 << 20);
    let refused = StorageNode::start(settings).await.map(drop).unwrap_err();
    assert_eq!(refused.kind, Kind::Refused(-102), "{refused}");
    let elsewhere = NodeSettings::new(&scripted.address, "192.0.2.1", 1 << 20);
    assert_eq!(StorageNode::start(elsewhere).await.map(drop).unwrap_err().kind, Kind::Invalid);
    let nothing = NodeSettings::new(&scripted.address, "127.0.0.1", 0);
    assert_eq!(StorageNode::start(nothing).await.map(drop).unwrap_err().kind, Kind::Invalid);
}
