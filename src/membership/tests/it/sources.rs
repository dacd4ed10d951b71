//! Files that change and names that are looked up.

use std::io::{Error, ErrorKind};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_membership::{Directory, DnsSource, FileSource, MemberRole, NameLookup, Source};

use crate::eventually;

fn names(directory: &Directory) -> Vec<String> {
    directory.snapshot().members.keys().cloned().collect()
}

async fn stale(directory: &Directory, word: &str) {
    eventually(&format!("it is stale: {word}"), || {
        directory.snapshot().stale.clone().filter(|stale| stale.why.contains(word))
    })
    .await;
}

#[tokio::test]
async fn a_file_is_followed_and_a_wrong_one_leaves_what_is_known() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("members.toml");
    let source = FileSource { every_us: 10_000, ..FileSource::new(&path) };
    let directory = Directory::start(Source::File(source)).expect("a directory");
    stale(&directory, "members.toml").await;
    let member =
        |name: &str| format!("[[member]]\nname = \"{name}\"\nrole = \"both\"\naddresses = [\"{name}:1\"]\n");
    std::fs::write(&path, member("a")).expect("written");
    eventually("a", || (names(&directory) == ["a"]).then_some(())).await;
    std::fs::write(&path, format!("{}{}", member("a"), member("b"))).expect("written");
    eventually("a and b", || (names(&directory) == ["a", "b"]).then_some(())).await;
    std::fs::write(&path, "[[member]]\nname = 3\n").expect("written");
    stale(&directory, "no members as TOML").await;
    assert_eq!(names(&directory), ["a", "b"]);
    std::fs::remove_file(&path).expect("removed");
    stale(&directory, "give a readable list").await;
    assert_eq!(names(&directory), ["a", "b"]);
    // As a ConfigMap changes: another file takes the name.
    std::fs::write(folder.path().join("next"), member("c")).expect("written");
    std::fs::rename(folder.path().join("next"), &path).expect("renamed");
    eventually("c", || (names(&directory) == ["c"]).then_some(())).await;
    assert_eq!(directory.snapshot().stale, None);
    assert!(Directory::start(Source::File(FileSource { every_us: 0, ..FileSource::new(path) })).is_err());
}

#[tokio::test]
async fn a_name_is_looked_up_again_and_again() {
    let answer: Arc<Mutex<Result<Vec<IpAddr>, ErrorKind>>> = Arc::new(Mutex::new(Ok(Vec::new())));
    let asked = answer.clone();
    let resolve = NameLookup::by(move |name| {
        assert_eq!(name, "nodes.test");
        let answer = asked.lock().expect("whole").clone();
        Box::pin(async move { answer.map_err(Error::from) })
    });
    let source =
        DnsSource { every_us: 5_000, resolve, ..DnsSource::new("nodes.test", 7000, MemberRole::Decode) };
    let directory = Directory::start(Source::Dns(source)).expect("a directory");
    let say = |now: Result<Vec<IpAddr>, ErrorKind>| *answer.lock().expect("whole") = now;
    stale(&directory, "no addresses").await;
    say(Ok(vec![IpAddr::from([10, 0, 0, 1]), "fd00::1".parse().expect("an address")]));
    let both = ["10.0.0.1:7000", "[fd00::1]:7000"];
    eventually("both", || (names(&directory) == both).then_some(())).await;
    assert_eq!(directory.snapshot().members["10.0.0.1:7000"].member.role, MemberRole::Decode);
    say(Err(ErrorKind::TimedOut));
    stale(&directory, "check the name and the resolver").await;
    assert_eq!(names(&directory), both);
    say(Ok(vec![IpAddr::from([10, 0, 0, 2])]));
    eventually("the other", || (names(&directory) == ["10.0.0.2:7000"]).then_some(())).await;
    assert_eq!(directory.snapshot().stale, None);
}

#[tokio::test]
async fn the_system_resolves_localhost_and_a_silent_resolver_is_given_up_on() {
    let directory = Directory::start(Source::Dns(DnsSource::new("localhost", 1, MemberRole::Both)));
    let directory = directory.expect("a directory");
    let first = tokio::time::timeout(crate::SOON, directory.read_once()).await.expect("in time");
    assert!(first.members.keys().any(|name| name == "127.0.0.1:1" || name == "[::1]:1"), "{first:?}");
    let resolve = NameLookup::by(|_| Box::pin(std::future::pending()));
    let source = DnsSource { timeout_us: 10_000, resolve, ..DnsSource::new("a", 1, MemberRole::Both) };
    let silent = Directory::start(Source::Dns(source)).expect("a directory");
    stale(&silent, "no answer in time").await;
    assert!(tokio::time::timeout(Duration::from_millis(20), silent.read_once()).await.is_err());
    assert!(Directory::start(Source::Dns(DnsSource::new("", 1, MemberRole::Both))).is_err());
}
