//! etcd's keys, leases and watches through our client, and what goes wrong.

use std::time::Duration;

use baton_membership::etcd::{Act, Condition, Event, Keys, Outcome};
use baton_membership::{Etcd, EtcdConfig, Kind};
use baton_types::Secret;

use crate::forwarder::{Forwarder, Wire};
use crate::server::{Server, client, config, free_port};

fn put(value: &str, lease: u64) -> Act {
    Act::Put { value: value.to_owned().into(), lease }
}

fn absent(key: &str) -> [Condition; 1] {
    [Condition::Created { key: key.to_owned(), revision: 0 }]
}

async fn write(etcd: &Etcd, key: &str, value: &str) -> u64 {
    match etcd.act(key, &[], put(value, 0)).await {
        Ok(Outcome::Done { revision }) => revision,
        other => panic!("{key}: {other:?}"),
    }
}

#[tokio::test]
async fn a_write_is_carried_out_only_if_its_conditions_hold() {
    let server = Server::start().await;
    let etcd = server.client();
    let first = etcd.act("/a", &absent("/a"), put("one", 0)).await.expect("answered");
    let Outcome::Done { revision } = first else { panic!("{first:?}") };
    let again = etcd.act("/a", &absent("/a"), put("two", 0)).await.expect("answered");
    let Outcome::Refused { current: Some(entry), .. } = again else { panic!("{again:?}") };
    assert_eq!((&entry.value[..], entry.create_revision, entry.lease), (&b"one"[..], revision, 0));
    let modified = |revision| [Condition::Modified { key: "/a".into(), revision }];
    assert!(matches!(etcd.act("/a", &modified(revision), put("three", 0)).await, Ok(Outcome::Done { .. })));
    let late = etcd.act("/a", &modified(revision), Act::Delete).await;
    assert!(matches!(late, Ok(Outcome::Refused { current: Some(now), .. }) if &now.value[..] == b"three"));
    assert!(matches!(etcd.act("/a", &[], Act::Delete).await, Ok(Outcome::Done { .. })));
    assert_eq!(etcd.get("/a").await.expect("answered").0, None);
}

#[tokio::test]
async fn long_listings_are_read_page_by_page_as_of_one_revision() {
    let server = Server::start().await;
    let etcd = server.client();
    for n in 0..530 {
        write(&etcd, &format!("/many/{n:04}"), "x").await;
    }
    write(&etcd, "/manz", "not one of them").await;
    let all = etcd.list(&Keys::Under("/many/".into()), 10_000).await.expect("listed");
    assert_eq!((all.entries.len(), all.more), (530, false));
    assert!(all.entries.windows(2).all(|two| two[0].key < two[1].key));
    let some = etcd.list(&Keys::Under("/many/".into()), 520).await.expect("listed");
    assert_eq!((some.entries.len(), some.more), (520, true));
}

#[tokio::test]
async fn what_is_written_under_a_lease_goes_with_it() {
    let server = Server::start().await;
    let etcd = server.client();
    let lease = etcd.grant(1_000_000).await.expect("granted");
    assert!(lease.ttl_us >= 1_000_000, "{lease:?}");
    etcd.act("/l", &[], put("x", lease.id)).await.expect("written");
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(etcd.renew(lease.id).await.map(|l| l.id), Ok(lease.id));
    }
    assert_eq!(etcd.get("/l").await.expect("read").0.map(|entry| entry.lease), Some(lease.id));
    etcd.revoke(lease.id).await.expect("revoked");
    etcd.revoke(lease.id).await.expect("gone already");
    assert_eq!(etcd.get("/l").await.expect("read").0, None);
    assert_eq!(etcd.renew(lease.id).await.expect_err("gone").kind, Kind::LeaseLost);
    let late = etcd.act("/l", &[], put("x", lease.id)).await.expect_err("gone");
    assert_eq!(late.kind, Kind::LeaseLost, "{late}");
}

#[tokio::test]
async fn a_watch_tells_everything_from_its_revision_on_and_says_when_history_is_gone() {
    let server = Server::start().await;
    let etcd = server.client();
    let first = write(&etcd, "/w/a", "1").await;
    write(&etcd, "/w/b", "2").await;
    write(&etcd, "/x", "not watched").await;
    etcd.act("/w/a", &[], Act::Delete).await.expect("deleted");
    let mut watching = etcd.watch(&Keys::Under("/w/".into()), first).await.expect("watched");
    let mut seen = Vec::new();
    while seen.len() < 3 {
        let batch = tokio::time::timeout(crate::SOON, watching.next()).await.expect("in time").expect("told");
        seen.extend(batch.events.into_iter().map(|event| match event {
            Event::Put(entry) => format!("put {}", entry.key),
            Event::Deleted { key, .. } => format!("deleted {key}"),
        }));
    }
    assert_eq!(seen, ["put /w/a", "put /w/b", "deleted /w/a"]);
    // Longer than the silence that is borne: what asks for signs of life gets them.
    assert!(tokio::time::timeout(Duration::from_millis(1800), watching.next()).await.is_err());
    let last = write(&etcd, "/w/c", "3").await;
    let batch = tokio::time::timeout(crate::SOON, watching.next()).await.expect("in time").expect("told");
    assert_eq!(batch.revision, last);
    etcd.compact(last).await.expect("compacted");
    let mut late = etcd.watch(&Keys::Under("/w/".into()), first).await.expect("watched");
    assert_eq!(late.next().await.expect_err("gone").kind, Kind::Compacted);
    let old = etcd.watch(&Keys::Under("/w/".into()), last + 1).await;
    assert!(old.is_ok(), "from behind the compaction on it can be watched");
}

#[tokio::test]
async fn another_endpoint_is_used_when_one_is_down_or_silent() {
    let server = Server::start().await;
    let wire = Forwarder::to(server.port()).await;
    let dead = format!("http://127.0.0.1:{}", free_port());
    let etcd = client(vec![dead, wire.url(), server.address()]);
    write(&etcd, "/f", "1").await;
    wire.set(Wire::Silent);
    let read = etcd.get("/f").await.expect("over the third");
    assert_eq!(read.0.map(|entry| entry.value.to_vec()), Some(b"1".to_vec()));
    let mut watching = etcd.watch(&Keys::One("/f".into()), 1).await.expect("watched");
    assert!(watching.next().await.is_ok());
}

#[tokio::test]
async fn a_watch_over_a_silent_wire_ends_with_an_error() {
    let server = Server::start().await;
    let wire = Forwarder::to(server.port()).await;
    let etcd = client(vec![wire.url()]);
    let mut watching = etcd.watch(&Keys::One("/s".into()), 1).await.expect("watched");
    wire.set(Wire::Silent);
    let ended = tokio::time::timeout(crate::SOON, watching.next()).await.expect("in time");
    assert!(ended.is_err_and(|e| e.kind.passes()));
    assert!(etcd.get("/s").await.is_err_and(|e| e.kind.passes()));
    wire.set(Wire::Whole);
    assert!(etcd.get("/s").await.is_ok(), "it is used again once it is whole");
}

#[tokio::test]
async fn who_stops_waiting_leaves_no_silent_line_to_others() {
    let server = Server::start().await;
    let wire = Forwarder::to(server.port()).await;
    let etcd = client(vec![wire.url(), server.address()]);
    etcd.get("/c").await.expect("read");
    wire.set(Wire::Silent);
    assert!(tokio::time::timeout(Duration::from_millis(50), etcd.get("/c")).await.is_err());
    let lease = etcd.grant(5_000_000).await;
    assert!(lease.is_ok(), "{lease:?}: a write is tried once, and it was tried over the other line");
}

#[tokio::test]
async fn an_etcd_that_is_down_is_named_with_a_remedy() {
    let address = format!("http://127.0.0.1:{}", free_port());
    let error = client(vec![address.clone()]).get("/").await.expect_err("nobody there");
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.text.contains(&address) && error.text.contains("see whether it runs"), "{error}");
}

fn etcdctl(server: &Server, words: &[&str]) {
    let out = std::process::Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(["--endpoints", &server.address()])
        .args(words)
        .output()
        .unwrap_or_else(|e| panic!("etcdctl: {e}; install it with scripts/ready.sh etcd"));
    assert!(out.status.success(), "etcdctl {words:?}: {}", String::from_utf8_lossy(&out.stderr));
}

#[tokio::test]
async fn name_and_password_are_shown_where_they_are_asked_for_and_again_when_forgotten() {
    let mut server = Server::start().await;
    let with = |login: Option<(&str, &str)>| {
        let mut config: EtcdConfig = config(vec![server.address()]);
        config.request_timeout_us = 5_000_000;
        config.login = login.map(|(name, password)| (name.to_owned(), Secret::from(password)));
        Etcd::new(config).expect("a client")
    };
    let early = with(Some(("root", "secret")));
    early.get("/").await.expect("a login that is not asked for does no harm");
    for words in [
        &["user", "add", "root:secret"][..],
        &["role", "add", "root"],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "guest:guest"],
        &["auth", "enable"],
    ] {
        etcdctl(&server, words);
    }
    let root = with(Some(("root", "secret")));
    let lease = root.grant(10_000_000).await.expect("root may");
    root.renew(lease.id).await.expect("root may");
    let mut watching = root.watch(&Keys::One("/k".into()), 1).await.expect("root may");
    write(&root, "/k", "1").await;
    assert!(watching.next().await.is_ok());
    let refused = [
        with(None).get("/k").await,
        with(Some(("root", "wrong"))).get("/k").await,
        with(Some(("guest", "guest"))).get("/k").await,
    ];
    for one in refused {
        let error = one.expect_err("refused");
        assert!(error.kind == Kind::Denied && error.text.contains("check user"), "{error}");
    }
    // It forgets its tokens with its life.
    server.kill();
    server.go();
    crate::eventually("etcd is back", || std::net::TcpStream::connect(("127.0.0.1", server.port())).ok())
        .await;
    let deadline = tokio::time::Instant::now() + crate::SOON;
    while let Err(error) = root.get("/k").await {
        assert!(tokio::time::Instant::now() < deadline && error.kind != Kind::Denied, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    write(&root, "/k", "2").await;
}

#[tokio::test]
async fn tls_is_spoken_with_those_whose_certificate_is_trusted() {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let mut server = Server::with("https", Vec::new());
    let (certificate, key) = (server.folder().join("cert.pem"), server.folder().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).expect("written");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
    let words = ["--cert-file", &certificate.to_string_lossy(), "--key-file", &key.to_string_lossy()];
    server.set_more(words.iter().map(|word| (*word).to_owned()).collect());
    server.go();
    let mut trusting = config(vec![server.address()]);
    trusting.ca = Some(certificate.clone());
    let etcd = Etcd::new(trusting.clone()).expect("a client");
    let deadline = tokio::time::Instant::now() + crate::SOON;
    while let Err(error) = etcd.get("/").await {
        assert!(tokio::time::Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let elsewhere = server.folder().join("other.pem");
    std::fs::write(&elsewhere, other.cert.pem()).expect("written");
    trusting.ca = Some(elsewhere);
    let stranger = Etcd::new(trusting).expect("a client");
    let refused = stranger.get("/").await.expect_err("not the certificate that it trusts");
    assert!(
        refused.kind == Kind::Unavailable && refused.text.to_lowercase().contains("certificate"),
        "{refused}"
    );
}
