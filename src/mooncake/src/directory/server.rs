//! The directory over HTTP: bounded in connections, bodies and time.

use std::sync::Arc;
use std::time::Duration;

use baton_http::{BodyLimits, Bounds, Figure, MemoryPool, PAGE_TYPE, Page};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Directory, PutError};

/// Bytes of a request's head at most.
const HEAD_BYTES: usize = 16 << 10;
/// Bytes of all values that are on their way in at most; those that are there have the bound of the directory.
const HELD_BYTES: usize = 64 << 20;
/// Every exported figure, in the order of docs/metrics.md.
const FIGURES: [Figure; 4] = [
    Figure::gauge("baton_metadata_keys", "Keys of engines"),
    Figure::gauge("baton_metadata_bytes", "Bytes of these keys and their values"),
    Figure::gauge("baton_metadata_held_bytes", "Bytes of values that are on their way in"),
    Figure::counter(
        "baton_metadata_no_room_total",
        "Requests refused (503) because values on their way in took all the room that there is for them",
    ),
];
/// Time for the answers under way at the end: each is a look at a map.
const DRAIN: Duration = Duration::from_secs(1);

type Answer = Response<Full<Bytes>>;

/// Serves `directory` on `listener` until `stop`, then ends what is under way.
pub async fn serve_directory(directory: Arc<Directory>, listener: TcpListener, stop: CancellationToken) {
    let settings = *directory.settings();
    let bounds = Bounds {
        connections: settings.max_connections,
        head_bytes: HEAD_BYTES,
        head_timeout: Duration::from_micros(settings.receive_timeout_us),
        stall_timeout: Duration::from_micros(settings.receive_timeout_us),
        drain: DRAIN,
    };
    let held = MemoryPool::new(HELD_BYTES);
    baton_http::serve("mooncake: metadata", listener, bounds, stop, move |request| {
        let (directory, held) = (Arc::clone(&directory), Arc::clone(&held));
        async move { answer(&directory, request, &held).await }
    })
    .await;
}

async fn answer<B>(directory: &Directory, request: Request<B>, held: &Arc<MemoryPool>) -> Answer
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let (parts, body) = request.into_parts();
    if (&parts.method, parts.uri.path()) == (&Method::GET, "/metrics") {
        return baton_http::reply(StatusCode::OK, PAGE_TYPE, Full::from(page(directory, held)));
    }
    if parts.uri.path() != "/metadata" {
        return text_answer(StatusCode::NOT_FOUND, "there is only /metadata?key=...");
    }
    let Some(key) = key_of(parts.uri.query().unwrap_or_default()) else {
        return text_answer(StatusCode::BAD_REQUEST, "metadata key is required: /metadata?key=...");
    };
    match parts.method {
        Method::GET => match directory.get(&key) {
            Some(value) => with_body(StatusCode::OK, value),
            None => text_answer(StatusCode::NOT_FOUND, "metadata not found"),
        },
        Method::PUT => {
            let settings = directory.settings();
            let within = Duration::from_micros(settings.receive_timeout_us);
            let limits = BodyLimits { bytes: settings.value_bytes, within, pool: held };
            match baton_http::receive(&parts.headers, body, limits).await {
                Ok(value) => put(directory, &key, value),
                Err(e) => with_body(e.status(), e.to_string().into()),
            }
        }
        Method::DELETE if directory.remove(&key) => text_answer(StatusCode::OK, "metadata deleted"),
        Method::DELETE => text_answer(StatusCode::NOT_FOUND, "metadata not found"),
        _ => text_answer(StatusCode::METHOD_NOT_ALLOWED, "/metadata takes GET, PUT and DELETE"),
    }
}

fn page(directory: &Directory, held: &MemoryPool) -> String {
    let (keys, bytes) = directory.held();
    let mut page = Page::default();
    let values = [keys as u64, bytes as u64, held.taken_bytes() as u64, held.refused()];
    for (figure, value) in FIGURES.into_iter().zip(values) {
        page.value(figure, value);
    }
    page.into_text()
}

fn put(directory: &Directory, key: &str, value: Bytes) -> Answer {
    match directory.put(key, value) {
        Ok(()) => text_answer(StatusCode::OK, "metadata updated"),
        Err(PutError::Taken) => text_answer(
            StatusCode::BAD_REQUEST,
            "this rpc_meta key is another engine's: choose another name, or delete it",
        ),
        Err(PutError::Long) => text_answer(StatusCode::PAYLOAD_TOO_LARGE, "the key or the value is too long"),
        Err(PutError::Full) => text_answer(
            StatusCode::INSUFFICIENT_STORAGE,
            "the directory is full: delete what engines left behind",
        ),
    }
}

fn text_answer(status: StatusCode, text: &'static str) -> Answer {
    with_body(status, Bytes::from_static(text.as_bytes()))
}

/// Engines want this content type of every answer.
fn with_body(status: StatusCode, body: Bytes) -> Answer {
    baton_http::reply(status, "application/json", Full::new(body))
}

/// The key that a query names, if any.
fn key_of(query: &str) -> Option<String> {
    let raw = query.split('&').find_map(|field| field.strip_prefix("key="))?;
    let key = decoded(raw)?;
    let key = key.trim();
    (!key.is_empty()).then(|| key.to_owned())
}

/// Text of a query, its escapes undone; nothing where they are none.
fn decoded(raw: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(raw.len());
    let mut left = raw.bytes();
    while let Some(byte) = left.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(left.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_come_out_of_queries() {
        let long = "a=b&key=mooncake%2Fram%2F127.0.0.1%3A12%2b";
        assert_eq!(key_of(long).as_deref(), Some("mooncake/ram/127.0.0.1:12+"));
        assert_eq!(key_of("key=+a+b+").as_deref(), Some("a b"));
        for none in ["", "key=", "key=%20", "kay=1", "key=%", "key=%4", "key=%zz", "key=%ff"] {
            assert_eq!(key_of(none), None, "{none}");
        }
    }

    #[test]
    fn the_documentation_has_every_figure_and_no_other() {
        let expected: Vec<_> =
            FIGURES.iter().map(|f| format!("| `{}` | {} | {} |", f.name, f.kind.name(), f.help)).collect();
        let page = include_str!("../../../../docs/metrics.md");
        let documented: Vec<_> = page.lines().filter(|line| line.starts_with("| `baton_metadata_")).collect();
        assert_eq!(documented, expected, "docs/metrics.md has a row for each, in that order");
    }

    proptest! {
        #[test]
        fn any_query_is_read_or_refused(query in "\\PC*") {
            let _ = key_of(&query);
        }

        #[test]
        fn escaped_keys_come_back(key in "[a-z/:+ %é]{1,20}") {
            let escaped: String = key.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let trimmed = key.trim();
            let expected = (!trimmed.is_empty()).then(|| trimmed.to_owned());
            prop_assert_eq!(key_of(&format!("key={escaped}")), expected);
        }
    }
}
