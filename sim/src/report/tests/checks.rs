//! Checks that every page must pass.

/// Elements without an end.
const VOID: [&str; 3] = ["meta", "input", "br"];

/// Panics unless every element is closed in order, attributes are quoted and ids occur once.
pub(super) fn assert_well_formed(html: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut ids: Vec<&str> = Vec::new();
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "a stray > in {:?}", &rest[..at]);
        let end = at + rest[at..].find('>').expect("a tag that never ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if tag.starts_with('!') {
            continue;
        }
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closed out of order");
            continue;
        }
        let (name, attributes) = tag.split_once(' ').unwrap_or((tag.trim_end_matches('/'), ""));
        check_attributes(tag, attributes.trim_end_matches('/'), &mut ids);
        if tag.ends_with('/') || VOID.contains(&name) {
            continue;
        }
        if name == "style" || name == "script" {
            rest = rest.split_once(&format!("</{name}>")).expect("raw text that never ends").1;
            continue;
        }
        open.push(name);
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all, "an id occurs twice");
}

fn check_attributes<'a>(tag: &str, attributes: &'a str, ids: &mut Vec<&'a str>) {
    let mut parts = attributes.split('"');
    while let Some(name) = parts.next() {
        let name = name.trim();
        let Some(value) = parts.next() else {
            assert!(name.is_empty() || name == "checked", "{name:?} is not quoted in <{tag}>");
            return;
        };
        let last = name.rsplit(' ').next().unwrap_or_default();
        assert!(last.ends_with('=') && !last.starts_with("on"), "{last:?} in <{tag}>");
        if last == "id=" {
            ids.push(value);
        }
    }
}

/// Panics if the page would fetch anything.
pub(super) fn assert_loads_nothing(html: &str) {
    for asks in [
        "src=", "href=", "@import", "url(", "http://", "https://", "//www", "<link", "<img", "<iframe",
        "<object", "fetch(", "import(",
    ] {
        assert!(!html.contains(asks), "the page contains {asks}");
    }
    assert!(html.contains("default-src 'none'"), "the policy forbids fetching");
    assert_eq!(html.matches("<script").count(), 1, "one script, ours");
}

#[test]
fn the_checker_finds_what_is_wrong() {
    let wrong = |html: &str| std::panic::catch_unwind(|| assert_well_formed(html)).is_err();
    for html in [
        "<p>",
        "<p></b>",
        "<a><b></a></b>",
        "<p id=x></p>",
        "<i id=\"a\"></i><b id=\"a\"></b>",
        "<p>a > b</p>",
        "<p onclick=\"x\"></p>",
    ] {
        assert!(wrong(html), "{html} passed");
    }
    assert_well_formed(
        "<!DOCTYPE html><p class=\"a\"><input type=\"x\" checked><svg><path d=\"M0\"/></svg></p><style>a>b{}</style>",
    );
}
