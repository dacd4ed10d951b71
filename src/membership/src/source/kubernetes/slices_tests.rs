use super::*;
use serde_json::{Value, json};

fn slice(name: &str, revision: &str, endpoints: &Value) -> Value {
    json!({
        "metadata": {"name": name, "resourceVersion": revision, "labels": {"kubernetes.io/service-name": "nodes"}},
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "metrics", "port": 9}, {"name": "kv", "port": 7000, "protocol": "TCP"}]})
}

fn pod(name: &str, address: &str, ready: Option<bool>) -> Value {
    json!({"addresses": [address], "conditions": {"ready": ready}, "zone": "a", "nodeName": "host",
        "targetRef": {"kind": "Pod", "name": name, "uid": format!("uid-{name}")}})
}

fn line(kind: &str, object: &Value) -> Vec<u8> {
    json!({"type": kind, "object": object}).to_string().into_bytes()
}

fn slices(items: &[Value]) -> Slices {
    let mut slices = Slices::new(Some("kv".into()), MemberRole::Decode);
    let mut listing = slices.begin();
    let page = json!({"metadata": {"resourceVersion": "100"}, "items": items}).to_string();
    assert_eq!(listing.page(page.as_bytes()), Ok(None));
    slices.finish(listing);
    slices
}

fn members(slices: &Slices) -> Vec<(String, Vec<String>)> {
    let listed = slices.members().0;
    listed.iter().map(|one| (one.member.name.clone(), one.member.addresses.clone())).collect()
}

#[test]
fn ready_endpoints_are_members_named_after_their_pods() {
    let endpoints = json!([
        pod("p0", "10.0.0.1", Some(true)), pod("p1", "10.0.0.2", Some(false)), pod("p2", "10.0.0.3", None),
        {"addresses": ["10.0.0.4"], "conditions": {"ready": true, "terminating": true}},
        {"addresses": ["10.0.0.5"]}]);
    let slices = slices(&[slice("s", "90", &endpoints)]);
    let expected = [("10.0.0.5:7000", "10.0.0.5:7000"), ("p0", "10.0.0.1:7000"), ("p2", "10.0.0.3:7000")];
    let expected: Vec<_> = expected.iter().map(|(n, a)| ((*n).to_owned(), vec![(*a).to_owned()])).collect();
    assert_eq!(members(&slices), expected);
    let first = &slices.members().0[1];
    assert_eq!((&*first.revision, first.member.role), ("90", MemberRole::Decode));
    assert_eq!(first.member.labels.get("uid").map(String::as_str), Some("uid-p0"));
}

#[test]
fn a_pod_in_slices_of_two_families_is_one_member() {
    let four = slice("s-4", "90", &json!([pod("p0", "10.0.0.1", None)]));
    let six = slice("s-6", "91", &json!([pod("p0", "fd00::1", None)]));
    let both = vec!["10.0.0.1:7000".to_owned(), "[fd00::1]:7000".to_owned()];
    assert_eq!(members(&slices(&[four, six])), [("p0".to_owned(), both)]);
}

#[test]
fn a_service_says_what_its_members_do_and_other_ports_are_counted_as_left_out() {
    let mut one = slice("s", "90", &json!([pod("p0", "10.0.0.1", None)]));
    one["metadata"]["labels"]["baton.dev/role"] = json!("prefill");
    let mut other = slice("t", "91", &json!([pod("p1", "10.0.0.2", None)]));
    other["ports"] = Value::Null;
    let (listed, wrong) = slices(&[one, other]).members();
    assert_eq!((listed.len(), listed[0].member.role, wrong), (1, MemberRole::Prefill, 1));
}

#[test]
fn a_watch_adds_changes_and_deletes_and_bookmarks_move_the_revision_only() {
    let mut slices = slices(&[]);
    assert_eq!(slices.revision(), Some("100"));
    let added = slice("s", "101", &json!([pod("p0", "10.0.0.1", None)]));
    assert_eq!(slices.happened(&line("ADDED", &added)), Ok(Happened::Change));
    let changed = slice("s", "102", &json!([pod("p1", "10.0.0.2", None)]));
    assert_eq!(slices.happened(&line("MODIFIED", &changed)), Ok(Happened::Change));
    assert_eq!(members(&slices)[0].0, "p1");
    let mark = json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "110"}});
    assert_eq!(slices.happened(&line("BOOKMARK", &mark)), Ok(Happened::Nothing));
    assert_eq!(slices.revision(), Some("110"));
    let empty = slice("s", "111", &Value::Null);
    assert_eq!(slices.happened(&line("MODIFIED", &empty)), Ok(Happened::Change));
    assert_eq!(members(&slices), []);
    assert_eq!(slices.happened(&line("DELETED", &changed)), Ok(Happened::Change));
    assert!(slices.known.is_empty());
}

#[test]
fn refusals_within_a_watch_become_kinds_and_what_cannot_be_read_is_told() {
    let mut slices = slices(&[]);
    let mut kind = |code: u16| {
        let object = json!({"kind": "Status", "code": code, "message": "too old resource version"});
        slices.happened(&line("ERROR", &object)).expect_err("refused").kind
    };
    assert_eq!((kind(410), kind(403), kind(500)), (Kind::Compacted, Kind::Denied, Kind::Unavailable));
    for broken in ["", "{", "{}", r#"{"type":"ADDED","object":{}}"#, r#"{"type":"ADDED","object":3}"#] {
        assert_eq!(slices.happened(broken.as_bytes()).expect_err(broken).kind, Kind::Corrupt);
    }
}

#[test]
fn pages_and_slices_are_bounded() {
    let mut slices = Slices::new(None, MemberRole::Both);
    let mut listing = slices.begin();
    let endpoint = json!([pod("p", "10.0.0.1", None)]);
    let items: Vec<Value> = (0..SLICES_MAX + 2).map(|n| slice(&format!("s{n}"), "1", &endpoint)).collect();
    let page = json!({"metadata": {"resourceVersion": "5", "continue": "next"}, "items": items}).to_string();
    assert_eq!(listing.page(page.as_bytes()), Ok(Some("next".to_owned())));
    let last = json!({"metadata": {"resourceVersion": "5", "continue": ""}, "items": null}).to_string();
    assert_eq!(listing.page(last.as_bytes()), Ok(None));
    slices.finish(listing);
    assert_eq!((slices.known.len(), slices.left_out), (SLICES_MAX, 2));
    assert_eq!(slices.members().0[0].member.addresses, ["10.0.0.1:9"], "the first port, for want of a name");
}
