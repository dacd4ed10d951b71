//! Access control with a key and with TLS: an endpoint admits peers that have both, and only those.

use baton_transports::mover::{TcpTls, TlsPem};
use baton_transports::*;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::raw::{Head, frame, preface_now};
use crate::scene::*;

const WAYS: [Way; 2] = [Way::Shm, Way::Tcp];

fn keyed(text: &str) -> Guard {
    Guard { key: Some(ClusterKey::parse(text).unwrap()), tls: None }
}

fn ours() -> Guard {
    keyed("the key of this cluster, of 32 bytes")
}

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The TLS settings of a node that trusts this authority, with a certificate for `name`.
    fn tls(&self, name: &str, expects: Option<&str>) -> TcpTls {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        let (key, ca) = (key.serialize_pem(), self.0.pem());
        let pem = TlsPem { certificate: certificate.as_bytes(), key: key.as_bytes(), ca: ca.as_bytes() };
        TcpTls::mutual(&pem, expects.map(str::to_owned)).unwrap()
    }

    fn guard(&self) -> Guard {
        Guard { tls: Some(self.tls("127.0.0.1", None)), ..ours() }
    }
}

async fn flies(scene: &Scene) {
    let stats = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    assert_eq!(stats.bytes, 20 * 3000);
}

async fn refused(scene: &Scene) -> TransportError {
    let error = scene.start(ticket(1), PLAN).await.map(|_| ()).unwrap_err();
    assert_eq!(error.stage, Stage::Handshake, "{error}");
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_the_key_is_served_by_every_way() {
    for way in WAYS {
        let scene = Scene::guarded(way, quick(), [ours(), ours()]).await;
        flies(&scene).await;
        assert_eq!(scene.endpoint.stats().refused_peers, 0, "{way:?}");
    }
    let between = keyed("the next key of this cluster, of 32 bytes\nthe key of this cluster, of 32 bytes");
    let scene = Scene::guarded(Way::Tcp, quick(), [ours(), between]).await;
    let error = refused(&scene).await;
    assert!(error.text.contains("not this node's"), "the dialer does not know the next one: {error}");
}

#[tokio::test]
async fn who_has_another_key_or_none_is_told_so_and_gets_nothing() {
    let cases = [
        (
            keyed("the key of another cluster, of 32 bytes"),
            ours(),
            "the peer's cluster key is not this node's",
        ),
        (Guard::default(), ours(), "start the peer with --cluster-key"),
        (ours(), Guard::default(), "has no cluster key"),
    ];
    for (theirs, ours, words) in cases {
        let scene = Scene::guarded(Way::Tcp, quick(), [theirs, ours]).await;
        let error = refused(&scene).await;
        assert!(error.kind == Kind::Invalid && error.text.contains(words), "{error}");
        assert_eq!(scene.endpoint.stats().receiving_flights, 0);
    }
    let scene = Scene::guarded(Way::Tcp, quick(), [Guard::default(), ours()]).await;
    refused(&scene).await;
    assert_eq!(scene.endpoint.stats().refused_peers, 1);
}

/// Passes one connection on to `to`; what the dialer said comes back when both have ended.
async fn overheard(to: std::net::SocketAddr) -> (std::net::SocketAddr, tokio::task::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (near, _) = listener.accept().await.unwrap();
        let (mut from, mut back) = near.into_split();
        let (mut answers, mut on) = TcpStream::connect(to).await.unwrap().into_split();
        let answering = tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await.is_ok() });
        let (mut said, mut part) = (Vec::new(), vec![0; 64 << 10]);
        while let Ok(count @ 1..) = from.read(&mut part).await {
            said.extend(&part[..count]);
            on.write_all(&part[..count]).await.unwrap();
        }
        drop(on);
        answering.await.unwrap();
        said
    });
    (address, task)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_overheard_opens_nothing() {
    // The dialer hangs up when a flight is over.
    let limits = Limits { idle_connections: 0, ..quick() };
    let mut scene = Scene::guarded(Way::Tcp, limits, [ours(), ours()]).await;
    let (between, overheard) = overheard(scene.endpoint.address()).await;
    let listens = std::mem::replace(&mut scene.peer.kv_address, between.to_string());
    flies(&scene).await;
    let said = overheard.await.unwrap();
    assert!(said.len() > 20 * 8, "a whole flight was overheard");
    assert!(!said.windows(8).any(|part| part == b"the key "), "the key is not in it");
    let landed = scene.node.with(|book| book.completed.len());
    let mut stream = TcpStream::connect(listens).await.unwrap();
    // The endpoint may hang up before all is written.
    let _ = stream.write_all(&said).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert_eq!(scene.node.with(|book| book.completed.len()), landed);
    assert_eq!(scene.endpoint.stats().refused_peers, 1);
}

#[tokio::test]
async fn a_stranger_gets_a_random_number_and_no_proof() {
    const CHALLENGE: u8 = 32;
    const PROOF: u8 = 34;
    const HEADER_BYTES: usize = 40;
    let scene = Scene::guarded(Way::Tcp, quick(), [ours(), ours()]).await;
    let frame = |kind| frame(&Head { kind, body_bytes: 32, a: 0, b: 0, c: 0 }, &[7; 32]);
    let mut stream = TcpStream::connect(scene.endpoint.address()).await.unwrap();
    stream.write_all(&[preface_now(), frame(CHALLENGE), frame(PROOF)].concat()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let rest = &answer[preface_now().len()..];
    // A number, then the refusal: with its own challenge in it a proof would be there to try keys against.
    assert_eq!((rest[0], &rest[4..8]), (33, &32_u32.to_le_bytes()[..]));
    assert_eq!(rest[HEADER_BYTES + 32], 3, "refused");
    assert!(rest[HEADER_BYTES + 32..].windows(4).any(|part| part == b"not "), "with the reason");
    assert_eq!(scene.endpoint.stats().refused_peers, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_tls_both_must_come_from_the_ca_that_both_trust() {
    let (here, elsewhere) = (Authority::new(), Authority::new());
    for way in WAYS {
        let scene = Scene::guarded(way, quick(), [here.guard(), here.guard()]).await;
        flies(&scene).await;
        let stats = scene.endpoint.stats();
        assert_eq!(stats.kv.received_bytes, 60_000, "{stats:?}");
    }
    let named = |name: &str| Guard { tls: Some(here.tls("baton.cluster", Some(name))), ..ours() };
    flies(&Scene::guarded(Way::Tcp, quick(), [named("baton.cluster"), here_named(&here)]).await).await;
    for (theirs, ours) in [
        (elsewhere.guard(), here.guard()),
        (here.guard(), elsewhere.guard()),
        (here.guard(), ours()),
        (ours(), here.guard()),
        (named("another.name"), named("another.name")),
    ] {
        let scene = Scene::guarded(Way::Tcp, quick(), [theirs, ours]).await;
        scene.start(ticket(1), PLAN).await.map(|_| ()).unwrap_err();
        assert_eq!(scene.endpoint.stats().receiving_flights, 0);
    }
}

fn here_named(authority: &Authority) -> Guard {
    Guard { tls: Some(authority.tls("baton.cluster", None)), ..ours() }
}

#[test]
fn files_that_are_none_are_named() {
    let authority = Authority::new();
    let (ca, key) = (authority.0.pem(), KeyPair::generate().unwrap().serialize_pem());
    let told = |certificate: &str, key: &str, ca: &str| {
        let (certificate, key, ca) = (certificate.as_bytes(), key.as_bytes(), ca.as_bytes());
        TcpTls::mutual(&TlsPem { certificate, key, ca }, None).unwrap_err()
    };
    assert!(told("", &key, &ca).starts_with("certificate: "));
    assert!(told(&ca, "", &ca).starts_with("key: "));
    assert!(told(&ca, &key, "no PEM").starts_with("CA: "));
    assert!(told(&ca, &key, &ca).starts_with("certificate and key: "), "another's key");
}
