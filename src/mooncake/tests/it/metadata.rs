//! The directory over HTTP, and segments that are found by it or by handshake.

use std::sync::Arc;

use baton_mooncake::handshake::{Topic, encode, receive};
use baton_mooncake::{
    DataTimes, Directory, DirectorySettings, Kind, OpenSegment, SegmentMeta, Way, lookup, serve_directory,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::peers::{Owner, nobody, says};

const SECONDS_US: u64 = 5_000_000;

async fn directory(settings: DirectorySettings) -> (String, Arc<Directory>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let directory = Arc::new(Directory::new(settings));
    tokio::spawn(serve_directory(Arc::clone(&directory), listener, CancellationToken::new()));
    (address, directory)
}

/// One request; the status and the body.
async fn http(address: &str, method: &str, target: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn values_are_put_got_and_deleted() {
    let (address, _) = directory(DirectorySettings::default()).await;
    let key = "/metadata?key=mooncake%2Fram%2Fa%3A1";
    assert_eq!(http(&address, "GET", key, "").await.0, 404);
    assert_eq!(http(&address, "PUT", key, "{\"one\":1}").await.0, 200);
    assert_eq!(http(&address, "GET", key, "").await, (200, "{\"one\":1}".into()));
    assert_eq!(http(&address, "PUT", key, "{\"two\":2}").await.0, 200);
    assert_eq!(
        lookup(&format!("http://{address}/metadata"), "mooncake/ram/a:1", SECONDS_US).await.unwrap(),
        "{\"two\":2}"
    );
    assert_eq!(http(&address, "DELETE", key, "").await.0, 200);
    assert_eq!(http(&address, "DELETE", key, "").await.0, 404);
}

#[tokio::test]
async fn an_engines_address_is_not_taken_over() {
    let (address, _) = directory(DirectorySettings::default()).await;
    let key = "/metadata?key=mooncake/rpc_meta/a:1";
    assert_eq!(http(&address, "PUT", key, "{\"rpc_port\":1}").await.0, 200);
    assert_eq!(http(&address, "PUT", key, "{\"rpc_port\":1}").await.0, 200, "the same again");
    assert_eq!(http(&address, "PUT", key, "{\"rpc_port\":2}").await.0, 400);
    assert_eq!(http(&address, "GET", key, "").await.1, "{\"rpc_port\":1}");
}

#[tokio::test]
async fn requests_that_cannot_be_meant_are_refused() {
    let settings = DirectorySettings { value_bytes: 10, max_keys: 1, ..Default::default() };
    let (address, directory) = directory(settings).await;
    for (method, target, status) in [
        ("GET", "/metadata", 400),
        ("GET", "/metadata?key=", 400),
        ("GET", "/metadata?key=%zz", 400),
        ("POST", "/metadata?key=a", 405),
        ("GET", "/other?key=a", 404),
    ] {
        assert_eq!(http(&address, method, target, "").await.0, status, "{method} {target}");
    }
    assert_eq!(http(&address, "PUT", "/metadata?key=a", "eleven byte").await.0, 413);
    assert_eq!(http(&address, "PUT", "/metadata?key=a", "ten bytes!").await.0, 200);
    assert_eq!(http(&address, "PUT", "/metadata?key=b", "").await.0, 507);
    assert_eq!(directory.held(), (1, 11));
}

#[tokio::test]
async fn values_on_their_way_in_share_one_bound() {
    let (address, _) = directory(DirectorySettings::default()).await;
    let mut slow = JoinSet::new();
    for _ in 0..70 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream
            .write_all(b"PUT /metadata?key=a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000001\r\n\r\n")
            .await
            .unwrap();
        slow.spawn(async move {
            // A client without room is answered before it has sent all.
            let _ = stream.write_all(&vec![b'x'; 1_000_000]).await;
            let mut answer = vec![0; 12];
            stream.read_exact(&mut answer).await.map(|_| answer)
        });
    }
    assert_eq!(slow.join_next().await.unwrap().unwrap().unwrap(), b"HTTP/1.1 503");
    let (status, page) = http(&address, "GET", "/metrics", "").await;
    let refused =
        page.lines().find_map(|line| line.strip_prefix("baton_metadata_no_room_total ")?.parse().ok());
    assert!(status == 200 && refused > Some(0), "{page}");
    assert_eq!(http(&address, "PUT", "/metadata?key=b", "small").await.0, 200);
}

#[tokio::test]
async fn a_segment_is_found_in_a_directory() {
    let (address, directory) = directory(DirectorySettings::default()).await;
    let owner = Owner::start(1000).await;
    let meta = baton_mooncake::handshake::ask(&owner.endpoint).await.unwrap();
    directory.put("mooncake/c/ram/engine", meta.to_json().to_string().into()).unwrap();
    let way = Way::Metadata { url: format!("http://{address}/metadata"), cluster: "c/".into() };
    let absent = OpenSegment::open("engine", &way, DataTimes::default()).await.map(drop).unwrap_err();
    assert_eq!(absent.kind, Kind::Absent, "its host is nowhere: {absent}");
    let host = json!({ "ip_or_host_name": "127.0.0.1", "rpc_port": 1 });
    directory.put("mooncake/c/rpc_meta/engine", host.to_string().into()).unwrap();
    let mut segment = OpenSegment::open("engine", &way, DataTimes::default()).await.unwrap();
    segment.write(owner.region.base(), b"found").await.unwrap();
    let mut there = [0; 5];
    owner.region.read(owner.region.base(), &mut there);
    assert_eq!(&there, b"found");
}

#[tokio::test]
async fn metadata_servers_that_are_dead_silent_or_wrong_are_told() {
    for (url, kind) in [
        (format!("http://{}/metadata", nobody().await), Kind::Unavailable),
        (format!("http://{}/metadata", says(Vec::new(), false).await), Kind::Unavailable),
        (format!("http://{}/metadata", says(b"noise".to_vec(), true).await), Kind::Unavailable),
        ("etcd://127.0.0.1".to_owned(), Kind::Invalid),
        ("not a url".to_owned(), Kind::Invalid),
    ] {
        let refused = lookup(&url, "key", 500_000).await.unwrap_err();
        assert_eq!(refused.kind, kind, "{url}: {refused}");
    }
}

fn said(change: impl FnOnce(&mut Value)) -> Value {
    let mut said = json!({
        "name": "a:1", "protocol": "tcp", "tcp_data_port": 12, "tcp_proto_version": 2, "timestamp": "now",
        "devices": [], "buffers": [{ "name": "cpu:0", "addr": 4096, "length": 100 }], "priority_matrix": {}
    });
    change(&mut said);
    said
}

/// A word of the refusal, and what is wrong.
type Change = (&'static str, fn(&mut Value));

#[test]
fn segments_that_cannot_be_used_are_refused() {
    let meta = SegmentMeta::parse(said(|_| {})).unwrap();
    assert_eq!(SegmentMeta::parse(meta.to_json()).unwrap(), meta);
    assert!(meta.holds(4096, 100) && !meta.holds(4096, 101) && !meta.holds(u64::MAX, 2));
    let changes: [Change; 9] = [
        ("rdma", |said| said["protocol"] = json!("rdma")),
        ("silent", |said| said["tcp_proto_version"] = json!(1)),
        ("silent", |said| drop(said.as_object_mut().unwrap().remove("tcp_proto_version"))),
        ("name", |said| said["name"] = json!(7)),
        ("tcp_data_port", |said| said["tcp_data_port"] = json!(0)),
        ("tcp_data_port", |said| said["tcp_data_port"] = json!(70_000)),
        ("buffers", |said| said["buffers"] = json!({})),
        ("addr", |said| said["buffers"][0]["addr"] = json!(-1)),
        ("length", |said| said["buffers"][0]["length"] = json!("x")),
    ];
    for (word, change) in changes {
        let refused = SegmentMeta::parse(said(change)).unwrap_err().to_string();
        assert!(refused.contains(word), "{word}: {refused}");
    }
}

#[tokio::test]
async fn handshakes_that_lie_are_told() {
    let long = [&(2u64 << 20).to_le_bytes()[..], &[1]].concat();
    let other = encode(Topic::Connection, &json!({}));
    let not_json = [&4u64.to_le_bytes()[..], b"\x01{{{"].concat();
    for (bytes, word) in [
        (long, "2097152 bytes"),
        (0u64.to_le_bytes().to_vec(), "0 bytes"),
        (other, "Connection"),
        (not_json, "not JSON"),
        ([&2u64.to_le_bytes()[..], &[9, b'1']].concat(), "kind 9"),
        (vec![1, 2], "broke"),
    ] {
        let refused = baton_mooncake::handshake::ask(&says(bytes, true).await).await.unwrap_err().to_string();
        assert!(refused.contains(word), "{word}: {refused}");
    }
}

#[tokio::test]
async fn other_handshakes_are_answered_and_notes_are_refused() {
    let owner = Owner::start(1000).await;
    let ask = |topic| {
        let endpoint = owner.endpoint.clone();
        async move {
            let mut stream = TcpStream::connect(&endpoint).await.unwrap();
            stream.write_all(&encode(topic, &json!({ "name": "x" }))).await.unwrap();
            receive(&mut stream).await
        }
    };
    let (topic, answer) = ask(Topic::Connection).await.unwrap();
    assert!(topic == Topic::Connection && answer["reply_msg"].as_str().unwrap().contains("TCP"));
    assert_eq!(ask(Topic::Probe).await.unwrap().1["status"], "success");
    assert!(ask(Topic::Note).await.is_err(), "nobody would read it: it must not look delivered");
}
