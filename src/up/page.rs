//! The page for people at `/`: four files written by hand, in the binary. It reads and changes only what other clients can,
//! by the same paths.

use baton_router::{Body, Reply};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HOST, IF_NONE_MATCH, ORIGIN, USER_AGENT};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// A file of the page.
pub(super) struct PageFile {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

const FILES: [PageFile; 4] = [
    PageFile { path: "/", kind: "text/html; charset=utf-8", text: include_str!("page/index.html") },
    PageFile { path: "/page/page.css", kind: "text/css; charset=utf-8", text: include_str!("page/page.css") },
    PageFile {
        path: "/page/page.js",
        kind: "text/javascript; charset=utf-8",
        text: include_str!("page/page.js"),
    },
    PageFile { path: "/page/icon.svg", kind: "image/svg+xml", text: include_str!("page/icon.svg") },
];

/// Nothing from another host, nothing inline, and no other page's frame around it.
const SECURITY_POLICY: &str =
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The file at a path.
pub(super) fn file_at(path: &str) -> Option<&'static PageFile> {
    FILES.iter().find(|file| file.path == path)
}

impl PageFile {
    /// Another text has another tag, so that a browser never mixes files of two versions.
    fn tag(&self) -> String {
        format!("\"{:016x}\"", xxhash_rust::xxh3::xxh3_64(self.text.as_bytes()))
    }

    /// The file, or that the browser has it already.
    pub(super) fn reply(&self, asked: &HeaderMap) -> Reply {
        let tag = self.tag();
        let known = asked.get(IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let unchanged = known.is_some_and(|tags| tags.split(',').any(|known| known.trim() == tag));
        let mut reply = Reply::new(Body::full(if unchanged { "" } else { self.text }));
        if unchanged {
            *reply.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let fixed = [
            (CONTENT_TYPE, self.kind),
            (CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("content-security-policy"), SECURITY_POLICY),
            (HeaderName::from_static("x-content-type-options"), "nosniff"),
            (HeaderName::from_static("referrer-policy"), "no-referrer"),
        ];
        let headers = reply.headers_mut();
        headers.extend(fixed.map(|(name, value)| (name, HeaderValue::from_static(value))));
        headers.extend(HeaderValue::from_str(&tag).ok().map(|tag| (ETAG, tag)));
        reply
    }
}

/// Whether a page of another site asks through a browser. Pages anywhere can post to this host, and rebind their own
/// name to it; so the page of this service is known by a host that no name service answers for: an address, or localhost.
///
/// Browsers say where a request comes from, but for a page that reads its own origin by a plain HTTP name. That one is
/// known by the browser's own name alone.
pub(super) fn is_of_another_site(parts: &Parts) -> bool {
    let headers = &parts.headers;
    let named = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = named.or_else(|| parts.uri.authority().map(Authority::as_str));
    let host = host.filter(|host| is_fixed(host));
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().unwrap_or_default();
        let origin = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        origin.is_some() && origin == host
    };
    let is_own_site = |site: &HeaderValue| match site.as_bytes() {
        // An address that a person typed in.
        b"none" => true,
        b"same-origin" => host.is_some(),
        _ => false,
    };
    let is_browser = headers.get(USER_AGENT).is_some_and(|agent| agent.as_bytes().starts_with(b"Mozilla/"));
    let site = headers.get("sec-fetch-site");
    headers.get(ORIGIN).is_some_and(|origin| !is_own(origin))
        || site.map_or(is_browser && host.is_none(), |site| !is_own_site(site))
}

/// Whether a host, with or without a port, is an address or localhost.
fn is_fixed(host: &str) -> bool {
    let Ok(host) = host.parse::<Authority>() else { return false };
    let name = host.host().trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(headers: &[(&'static str, &str)]) -> Parts {
        let mut request = http::Request::new(());
        let headers =
            headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
        request.headers_mut().extend(headers);
        request.into_parts().0
    }

    #[test]
    fn pages_of_other_sites_are_known_by_what_browsers_say() {
        let other = |headers: &[(&'static str, &str)]| is_of_another_site(&parts(headers));
        for host in ["127.0.0.1:8080", "[::1]:8080", "localhost:8080", "LOCALHOST", "10.0.0.2"] {
            let own = format!("http://{host}");
            assert!(!other(&[("host", host), ("origin", &own), ("sec-fetch-site", "same-origin")]), "{host}");
            assert!(other(&[("host", host), ("origin", "http://evil.example")]), "{host}");
            assert!(other(&[("host", host), ("origin", "http://127.0.0.1:9")]), "{host}");
            assert!(other(&[("host", host), ("origin", "null")]), "{host}");
            assert!(other(&[("host", host), ("origin", &own), ("sec-fetch-site", "same-site")]), "{host}");
        }
        // A name that its owner pointed at this host.
        assert!(other(&[("host", "evil.example"), ("origin", "http://evil.example")]));
        assert!(other(&[("host", "evil.example"), ("sec-fetch-site", "same-origin")]));
        assert!(other(&[("host", "127.0.0.1.evil.example"), ("sec-fetch-site", "same-origin")]));
        assert!(other(&[("sec-fetch-site", "same-origin")]) && other(&[("origin", "http://")]));
        // A browser says nothing of a page that reads its own origin by a plain HTTP name.
        let browser = ("user-agent", "Mozilla/5.0 (X11; Linux x86_64)");
        assert!(other(&[("host", "evil.example:8080"), browser]) && other(&[browser]));
        assert!(!other(&[("host", "127.0.0.1:8080"), browser]) && !other(&[("host", "localhost"), browser]));
        assert!(!other(&[("host", "a.example"), browser, ("sec-fetch-site", "none")]));
        // An address that was typed in, and what is no browser.
        assert!(!other(&[("host", "a.example"), ("sec-fetch-site", "none")]));
        assert!(!other(&[("host", "a.example"), ("user-agent", "curl/8.0")]));
    }

    #[test]
    fn a_file_is_sent_once_a_version() {
        let file = file_at("/").expect("the page");
        let tag = file.tag();
        let status = |tags: &str| file.reply(&parts(&[("if-none-match", tags)]).headers).status();
        assert_eq!(status(&format!("\"older\", {tag}")), StatusCode::NOT_MODIFIED);
        assert_eq!((status("\"older\""), status("")), (StatusCode::OK, StatusCode::OK));
        let tags = FILES.iter().map(PageFile::tag).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(tags.len(), FILES.len());
    }
}
