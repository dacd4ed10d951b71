//! As much of S3's API as a store needs, on a port of this machine, and strict about it: whole objects by path-style
//! address, signed requests, lists of a prefix by pages.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Keys of one page of a list.
const PAGE: usize = 7;

/// Objects by key, with the second of the day in which each was written: one for each write.
#[derive(Default)]
struct KeptObjects {
    values: BTreeMap<String, (u32, Vec<u8>)>,
    writes: u32,
}

/// A server for as much of S3's API as a store needs.
pub struct Bucket {
    pub endpoint: String,
    kept: Arc<Mutex<KeptObjects>>,
    broken: Arc<AtomicBool>,
    /// Requests that no store should send, in words.
    wrong: Arc<Mutex<Vec<String>>>,
}

struct Request {
    method: String,
    /// Key in the bucket; empty for the bucket itself.
    key: String,
    query: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    second: u32,
    body: Vec<u8>,
    /// Whether the answer omits the body, though it states its length.
    is_bare: bool,
}

impl Answer {
    fn of(status: u16) -> Self {
        Self { status, second: 0, body: Vec::new(), is_bare: false }
    }
}

impl Bucket {
    /// A bucket of this name with nothing in it.
    pub fn start(name: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (kept, broken, wrong) = (Arc::default(), Arc::default(), Arc::default());
        let bucket = Self { endpoint, kept, broken, wrong };
        let (kept, broken) = (Arc::clone(&bucket.kept), Arc::clone(&bucket.broken));
        let wrong = Arc::clone(&bucket.wrong);
        // It ends with the process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (kept, broken, wrong) = (Arc::clone(&kept), Arc::clone(&broken), Arc::clone(&wrong));
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap());
                    while let Some(asked) = read(&mut lines, name) {
                        let answer = match asked {
                            Ok(_) if broken.load(Ordering::SeqCst) => Answer::of(503),
                            Ok(request) => answer(&request, &mut kept.lock().unwrap()),
                            Err(why) => {
                                wrong.lock().unwrap().push(why);
                                Answer::of(400)
                            }
                        };
                        if reply(&stream, answer).is_none() {
                            return;
                        }
                    }
                });
            }
        });
        bucket
    }

    pub fn keys(&self) -> Vec<String> {
        self.kept.lock().unwrap().values.keys().cloned().collect()
    }

    /// From now on every request is answered with 503, or served again.
    pub fn be_broken(&self, broken: bool) {
        self.broken.store(broken, Ordering::SeqCst);
    }

    /// Requests that should not have come.
    pub fn wrong(&self) -> Vec<String> {
        self.wrong.lock().unwrap().clone()
    }
}

fn unescaped(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
        match (first, hex) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            (other, _) => {
                bytes.push(*other);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// The next request of a connection, or what is wrong with it; none at the end.
fn read(lines: &mut BufReader<TcpStream>, bucket: &str) -> Option<Result<Request, String>> {
    let mut first = String::new();
    lines.read_line(&mut first).ok().filter(|bytes| *bytes > 0)?;
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(Some(0), |length| length.parse().ok())?;
    let mut body = vec![0; length];
    lines.read_exact(&mut body).ok()?;
    Some(understood(first.trim_end(), &headers, body, bucket))
}

fn understood(
    first: &str,
    headers: &BTreeMap<String, String>,
    body: Vec<u8>,
    bucket: &str,
) -> Result<Request, String> {
    let wrong = |what: &str| format!("{first}: {what}");
    let [method, target, "HTTP/1.1"] = first.split(' ').collect::<Vec<_>>()[..] else {
        return Err(wrong("no request of HTTP 1.1"));
    };
    let signed = headers.get("authorization").is_some_and(|signature| {
        signature.starts_with("AWS4-HMAC-SHA256 Credential=who/")
            && signature.contains("/here/s3/aws4_request")
            && signature.contains("host;x-amz-content-sha256;x-amz-date")
    });
    if !signed || !headers.contains_key("host") {
        return Err(wrong("not signed by who for here"));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let within = path.strip_prefix('/').and_then(|path| path.strip_prefix(bucket));
    let key = within.filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let key = key.ok_or_else(|| wrong("another bucket"))?;
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = pairs.map(|(name, value)| (unescaped(name), unescaped(value))).collect();
    let (method, key) = (method.to_owned(), unescaped(key.trim_start_matches('/')));
    Ok(Request { method, key, query, body })
}

fn answer(request: &Request, kept: &mut KeptObjects) -> Answer {
    let Request { method, key, query, body } = request;
    match (method.as_str(), key.is_empty()) {
        ("GET", true) if query.get("list-type").is_some_and(|kind| kind == "2") => {
            Answer { body: list(query, kept), ..Answer::of(200) }
        }
        ("PUT", false) => {
            kept.writes += 1;
            kept.values.insert(key.clone(), (kept.writes, body.clone()));
            Answer::of(200)
        }
        ("GET" | "HEAD", false) => match kept.values.get(key) {
            Some((second, value)) => {
                Answer { status: 200, second: *second, body: value.clone(), is_bare: method == "HEAD" }
            }
            None => Answer { is_bare: method == "HEAD", ..Answer::of(404) },
        },
        ("DELETE", false) => {
            kept.values.remove(key);
            Answer::of(204)
        }
        _ => Answer::of(501),
    }
}

fn list(query: &BTreeMap<String, String>, kept: &KeptObjects) -> Vec<u8> {
    let prefix = query.get("prefix").map_or("", String::as_str);
    let after = query.get("continuation-token").map_or("", String::as_str);
    let mut found = kept.values.iter().filter(|(key, _)| key.starts_with(prefix) && key.as_str() > after);
    let page: Vec<_> = found.by_ref().take(PAGE).collect();
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult>");
    for (key, (second, value)) in &page {
        let (size, time) = (value.len(), time(*second));
        write!(
            text,
            "<Contents><Key>{key}</Key><LastModified>2026-01-02T{time}.000Z</LastModified>\
             <ETag>\"1\"</ETag><Size>{size}</Size></Contents>"
        )
        .unwrap();
    }
    if let (Some(_), Some((last, _))) = (found.next(), page.last()) {
        write!(text, "<NextContinuationToken>{last}</NextContinuationToken>").unwrap();
    }
    text.push_str("</ListBucketResult>");
    text.into_bytes()
}

fn time(second: u32) -> String {
    format!("{:02}:{:02}:{:02}", second / 3_600 % 24, second / 60 % 60, second % 60)
}

/// None when the connection is broken.
fn reply(mut stream: &TcpStream, answer: Answer) -> Option<()> {
    let Answer { status, second, body, is_bare } = answer;
    let head = format!(
        "HTTP/1.1 {status} S\r\ncontent-length: {}\r\netag: \"1\"\r\n\
         last-modified: Fri, 02 Jan 2026 {} GMT\r\n\r\n",
        body.len(),
        time(second)
    );
    let body = if is_bare { Vec::new() } else { body };
    stream.write_all(&[head.as_bytes(), &body].concat()).ok()
}
