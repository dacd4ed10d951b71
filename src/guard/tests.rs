use super::*;

fn guard(text: &str) -> ClusterGuard {
    ClusterGuard { key: Some(ClusterKey::parse(text).unwrap()), tls: None }
}

const OURS: &str = "the key of this cluster, of 32 bytes";

/// Plays both sides; what each says to the other's proof.
fn opened(node: &ClusterGuard, conductor: &ClusterGuard) -> Result<(), Status> {
    let (mut call, mut answer) = (MetadataMap::new(), MetadataMap::new());
    let ours = node.challenge(&mut call);
    let Some(opening) = conductor.open_call(&call)? else { return Ok(()) };
    conductor.answer(&opening, &mut answer);
    let (owed, proof) = node.answered(&ours.expect("the node has a key"), &answer)?;
    let proof = conductor.proven(&opening, &proof)?;
    node.welcomed(&owed, &proof)
}

#[test]
fn both_sides_must_have_the_same_key_or_none() {
    let open = ClusterGuard::default();
    assert!(opened(&open, &open).is_ok());
    assert!(opened(&guard(OURS), &guard(OURS)).is_ok());
    for (node, conductor, words) in [
        (&open, &guard(OURS), "start the node with --cluster-key"),
        (&guard(OURS), &open, "has no cluster key"),
        (&guard(OURS), &guard("the key of another one, of 32 bytes"), "the node has another"),
    ] {
        let status = opened(node, conductor).expect_err("refused");
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
        assert!(status.message().contains(words), "{status}");
    }
}

/// The dialling side proves its key first: an unknown peer gets nothing to test keys against.
#[test]
fn a_stranger_gets_no_proof_over_a_number_of_its_own() {
    let conductor = guard(OURS);
    let mut call = MetadataMap::new();
    insert_challenge(&[7; 32], &mut call);
    let opening = conductor.open_call(&call).expect("a challenge").expect("a key");
    let mut answer = MetadataMap::new();
    conductor.answer(&opening, &mut answer);
    // A challenge, and the version that everybody knows.
    assert_eq!(answer.len(), 2, "{answer:?}");
    assert_eq!(challenge_in(&answer), Some(opening.ours));
    for shown in [&b""[..], &[0; 32], &opening.ours, &opening.theirs] {
        assert!(conductor.proven(&opening, shown).is_err(), "{shown:?}");
    }
}

#[test]
fn what_was_overheard_opens_nothing() {
    let (node, conductor) = (guard(OURS), guard(OURS));
    let (mut call, mut answer) = (MetadataMap::new(), MetadataMap::new());
    let ours = node.challenge(&mut call).expect("a key");
    let first = conductor.open_call(&call).expect("a challenge").expect("a key");
    conductor.answer(&first, &mut answer);
    let (owed, proof) = node.answered(&ours, &answer).expect("the same version");
    let told = conductor.proven(&first, &proof).expect("proven");
    node.welcomed(&owed, &told).expect("proven");
    // A repetition of the call gets another challenge.
    let second = conductor.open_call(&call).expect("a challenge").expect("a key");
    assert!(conductor.proven(&second, &proof).is_err());
    // Nor does a proof of the other side, sent back.
    assert!(conductor.proven(&first, &told).is_err());
    assert!(node.welcomed(&owed, &proof).is_err());
    // Nor does what a conductor once said to another challenge.
    let other = node.challenge(&mut MetadataMap::new()).expect("a key");
    let (owed, _) = node.answered(&other, &answer).expect("the same version");
    assert!(node.welcomed(&owed, &told).is_err());
}

/// Up to version 5 the conductor proved itself first.
#[test]
fn other_versions_are_refused_by_name() {
    let (node, conductor) = (guard(OURS), guard(OURS));
    let mut call = MetadataMap::new();
    let ours = node.challenge(&mut call).expect("a key");
    for (told, words) in [(None, "an older control protocol"), (Some("8"), "control protocol \"8\"")] {
        let mut said = call.clone();
        said.remove(VERSION);
        if let Some(told) = told {
            said.insert(VERSION, told.parse().expect("text"));
        }
        for (whose, status) in [
            ("the node", conductor.open_call(&said).expect_err("refused")),
            ("the conductor", node.answered(&ours, &said).expect_err("refused")),
        ] {
            assert_eq!(status.code(), tonic::Code::FailedPrecondition);
            assert!(
                status.message().starts_with(&format!("{whose} speaks {words}, this side 7")),
                "{status}"
            );
            let port = status.message().contains("not the front door's");
            assert_eq!(port, told.is_none() && whose == "the conductor", "{status}");
        }
    }
}

#[test]
fn who_has_tls_never_goes_without() {
    let open = ClusterGuard::default();
    assert!(open.line("http://10.0.0.5:9090").is_ok());
    let status = open.line("https://10.0.0.5:9090").expect_err("no TLS here");
    assert!(status.message().contains("--cluster-tls-ca"), "{status}");
    for address in ["10.0.0.5:9090", "localhost", "ftp://10.0.0.5:9090", ""] {
        let status = open.line(address).expect_err("no address");
        assert!(status.message().contains("write it as http://"), "{status}");
    }
    assert!(open.line("http://").is_err_and(|e| e.code() == tonic::Code::Unavailable));
}

#[test]
fn ports_beyond_this_machine_want_a_key() {
    let told =
        |address: &str, guard: &ClusterGuard| open_port("control port", address.parse().unwrap(), guard);
    assert!(told("10.0.0.5:9090", &ClusterGuard::default()).is_some_and(|why| why.contains("--cluster-key")));
    assert!(told("0.0.0.0:9090", &ClusterGuard::default()).is_some());
    assert_eq!(told("127.0.0.1:9090", &ClusterGuard::default()), None);
    assert_eq!(told("[::1]:9090", &ClusterGuard::default()), None);
    assert_eq!(told("10.0.0.5:9090", &guard(OURS)), None);
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let service = |change: fn(&mut ServiceConfig)| {
        let mut service = ServiceConfig::default();
        change(&mut service);
        ClusterGuard::read(&service, None).map(|_| ())
    };
    assert!(service(|_| {}).is_ok());
    assert!(
        service(|s| s.cluster_key = "/nowhere/key".into())
            .is_err_and(|e| e.to_string().contains("/nowhere/key"))
    );
    assert!(
        service(|s| s.cluster_tls_cert = "/nowhere/cert".into())
            .is_err_and(|e| e.to_string().contains("/nowhere/cert"))
    );
}

#[test]
fn an_address_on_all_interfaces_is_written_as_others_can_use_it() {
    let attach = |address: &str| to_attach(&ServiceConfig::default(), address.parse().expect("an address"));
    assert_eq!(attach("0.0.0.0:9090"), "--conductor http://THIS_HOST:9090");
    assert_eq!(attach("[::]:9090"), "--conductor http://THIS_HOST:9090");
    assert_eq!(attach("10.0.0.5:9090"), "--conductor http://10.0.0.5:9090");
}
