//! Scripted peers: a master with a script, a segment's owner, and sockets that send wrong bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use baton_mooncake::pack::{Shape, Writer, pack};
use baton_mooncake::rpc::{ANSWER_HEAD_BYTES, REQUEST_HEAD_BYTES, function_id};
use baton_mooncake::{Buffer, DataSettings, Region, SegmentMeta};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The response of a scripted master to a call.
#[derive(Clone)]
pub enum Reply {
    /// This body.
    Body(Vec<u8>),
    /// This error byte, and this text.
    Error(u8, &'static str),
    /// Nothing, for ever.
    Silence,
    /// The connection is closed.
    Close,
    /// A head that announces so many bytes, and nothing more.
    Announce(u32),
    /// This body, to another request.
    Stray(Vec<u8>),
    /// Bytes that are no head.
    Noise,
}

/// A master with a script: what it says to each call, and what it was asked.
pub struct ScriptedMaster {
    pub address: String,
    script: Arc<Mutex<BTreeMap<u32, Reply>>>,
    asked: Arc<Mutex<Vec<u32>>>,
}

impl ScriptedMaster {
    /// One that is of the pinned release and says nothing else yet.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let master = Self { address, script: Arc::default(), asked: Arc::default() };
        let (script, asked) = (Arc::clone(&master.script), Arc::clone(&master.asked));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(converse(stream, Arc::clone(&script), Arc::clone(&asked)));
            }
        });
        master.on("ServiceReady", Reply::Body(text("2.0.0")));
        master.on("GetStorageConfig", Reply::Body(storage()));
        for call in ["MountSegment", "ReMountSegment", "UnmountSegment", "PutEnd", "PutRevoke", "Remove"] {
            master.on(call, Reply::Body(done()));
        }
        master
    }

    /// Sets its response to `call` from now on.
    pub fn on(&self, call: &str, reply: Reply) {
        self.script.lock().unwrap().insert(function_id(call), reply);
    }

    /// How often it was asked `call`.
    pub fn asked(&self, call: &str) -> usize {
        let wanted = function_id(call);
        self.asked.lock().unwrap().iter().filter(|function| **function == wanted).count()
    }
}

async fn converse(
    mut stream: TcpStream,
    script: Arc<Mutex<BTreeMap<u32, Reply>>>,
    asked: Arc<Mutex<Vec<u32>>>,
) {
    let mut head = [0; REQUEST_HEAD_BYTES];
    while stream.read_exact(&mut head).await.is_ok() {
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
        let (sequence, function, bytes) = (word(4), word(8), word(12));
        let mut body = vec![0; bytes as usize];
        stream.read_exact(&mut body).await.unwrap();
        asked.lock().unwrap().push(function);
        let reply = script.lock().unwrap().get(&function).cloned().unwrap_or(Reply::Silence);
        let answer = match reply {
            Reply::Body(body) => [answer_head(0, sequence, body.len() as u32), body].concat(),
            Reply::Error(code, text) => {
                let body = pack(&Shape::Text, |to| to.text(text));
                [answer_head(code, sequence, body.len() as u32), body].concat()
            }
            Reply::Announce(bytes) => answer_head(0, sequence, bytes),
            Reply::Stray(body) => {
                [answer_head(0, sequence.wrapping_add(7), body.len() as u32), body].concat()
            }
            Reply::Noise => b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            Reply::Silence => continue,
            Reply::Close => return,
        };
        if stream.write_all(&answer).await.is_err() {
            return;
        }
    }
}

fn answer_head(error: u8, sequence: u32, bytes: u32) -> Vec<u8> {
    let mut head = [0; ANSWER_HEAD_BYTES];
    head[0] = 0x15;
    head[2] = error;
    head[4..8].copy_from_slice(&sequence.to_le_bytes());
    head[8..12].copy_from_slice(&bytes.to_le_bytes());
    head.to_vec()
}

/// The answer of a call that gives nothing.
pub fn done() -> Vec<u8> {
    pack(&Shape::Expected(&Shape::Nothing), |to| to.bool(true))
}

/// The answer of a call that is refused.
pub fn refused(shape: &Shape, code: i32) -> Vec<u8> {
    pack(shape, |to| {
        to.bool(false);
        to.i32(code);
    })
}

/// The answer of a call that gives text.
pub fn text(text: &str) -> Vec<u8> {
    pack(&Shape::Expected(&Shape::Text), |to| {
        to.bool(true);
        to.text(text);
    })
}

fn storage() -> Vec<u8> {
    pack(&Shape::Expected(&Shape::Struct(&[Shape::Text, Shape::Bool, Shape::U64])), |to| {
        to.bool(true);
        to.text("");
        to.bool(true);
        to.u64(0);
    })
}

/// The answer of a ping.
pub fn standing(status: i32) -> Vec<u8> {
    pack(&Shape::Expected(&Shape::Struct(&[Shape::I64, Shape::I32])), |to| {
        to.bool(true);
        to.i64(0);
        to.i32(status);
    })
}

const BUFFER: Shape = Shape::Struct(&[Shape::U64, Shape::U64, Shape::Text, Shape::Text]);
const MEMORY: Shape = Shape::Struct(&[BUFFER]);
const DISK: Shape = Shape::Struct(&[Shape::Text, Shape::U64]);
const LOCAL: Shape = Shape::Struct(&[Shape::Plain(&[Shape::U64, Shape::U64], 8), Shape::U64, Shape::Text]);
const FILES: Shape = Shape::Struct(&[Shape::Text, Shape::U64, Shape::U64, Shape::U64, Shape::I32]);
const REPLICA: Shape =
    Shape::Struct(&[Shape::U64, Shape::Variant(&[MEMORY, MEMORY, DISK, LOCAL, FILES]), Shape::I32]);
/// The shape of what PutStart gives.
pub const REPLICAS: Shape = Shape::Expected(&Shape::List(&REPLICA));
/// The shape of what GetReplicaList gives.
pub const LOCATED: Shape =
    Shape::Expected(&Shape::Struct(&[Shape::List(&REPLICA), Shape::U64, Shape::Optional(&Shape::U64)]));

/// A replica in memory.
#[derive(Clone)]
pub struct InMemory {
    pub bytes: u64,
    pub address: u64,
    pub endpoint: String,
    pub status: i32,
}

impl InMemory {
    fn write(&self, to: &mut Writer) {
        to.u64(1);
        to.u8(0);
        to.u64(self.bytes);
        to.u64(self.address);
        to.text("tcp");
        to.text(&self.endpoint);
        to.i32(self.status);
    }
}

/// The answer of PutStart.
pub fn room(replicas: &[InMemory]) -> Vec<u8> {
    pack(&REPLICAS, |to| {
        to.bool(true);
        to.length(replicas.len());
        replicas.iter().for_each(|replica| replica.write(to));
    })
}

/// The answer of GetReplicaList.
pub fn located(replicas: &[InMemory], lease_ms: u64, checksum: Option<u64>) -> Vec<u8> {
    pack(&LOCATED, |to| {
        to.bool(true);
        to.length(replicas.len());
        replicas.iter().for_each(|replica| replica.write(to));
        to.u64(lease_ms);
        to.optional(checksum.as_ref(), |to, sum| to.u64(*sum));
    })
}

/// An engine with a segment: handshakes and data, as a real one.
pub struct Owner {
    pub endpoint: String,
    pub region: Arc<Region>,
    pub stop: CancellationToken,
}

impl Owner {
    pub async fn start(bytes: u64) -> Self {
        Self::with(bytes, |_| {}, DataSettings::default()).await
    }

    /// One that lies in what it says of itself.
    pub async fn with(bytes: u64, lie: impl FnOnce(&mut SegmentMeta), settings: DataSettings) -> Self {
        let region = Arc::new(Region::new(bytes).unwrap());
        let stop = CancellationToken::new();
        let handshakes = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let data = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = handshakes.local_addr().unwrap().to_string();
        let mut meta = SegmentMeta {
            name: endpoint.clone(),
            data_host: None,
            data_port: data.local_addr().unwrap().port(),
            timestamp: String::new(),
            buffers: vec![Buffer { name: "cpu:0".into(), address: region.base(), bytes }],
        };
        lie(&mut meta);
        tokio::spawn(baton_mooncake::handshake::serve_handshakes(meta, handshakes, stop.clone()));
        tokio::spawn(baton_mooncake::serve_data(Arc::clone(&region), data, settings, stop.clone()));
        Self { endpoint, region, stop }
    }
}

/// A listener that sends `bytes` on every connection, reads what arrives, and closes or stays silent.
pub async fn says(bytes: Vec<u8>, close: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let bytes = bytes.clone();
            tokio::spawn(async move {
                let mut first = [0; 9];
                let _ = stream.read_exact(&mut first).await;
                let _ = stream.write_all(&bytes).await;
                if !close {
                    let mut rest = vec![0; 1 << 16];
                    while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {}
                }
            });
        }
    });
    address
}

/// An address at which nobody listens.
pub async fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().to_string()
}
