//! Servers that answer with damaged replies: a value that is not what was stored is never given to the engine.
//! Seeded, so that a failure comes again.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_objects::resp::client::{Client, Reply};
use baton_python::raw::Buffers;
use baton_python::store::{GetMode, PutValue, Store};
use baton_types::Rng;

use crate::scene::{ForeignMemory, ServedStore, offer};

const VALUE: &[u8] = b"what was stored under this key";

/// A server that says what it is given to whatever it is asked, once a connection, and closes.
struct ScriptedServer {
    address: String,
    says: Arc<Mutex<Vec<u8>>>,
}

impl ScriptedServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let says = Arc::new(Mutex::new(Vec::new()));
        let said = says.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                // The question, and then the lie; a client that has left is none the worse for it.
                let _ = stream.read(&mut [0; 4_096]);
                let _ = stream.write_all(&said.lock().unwrap());
            }
        });
        Self { address, says }
    }
}

fn below(rng: &mut Rng, most: usize) -> usize {
    usize::try_from(rng.next_u64() % most as u64).unwrap()
}

/// A reply in which some bytes are others, are missing or come twice; or bytes by chance.
fn damaged(reply: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = reply.to_vec();
    for _ in 0..=below(rng, 3) {
        let at = below(rng, bytes.len());
        match rng.next_u64() % 5 {
            0 => bytes[at] ^= 1 << (rng.next_u64() % 8),
            1 => bytes[at] = b"$*+-:_%~0123456789\r\n"[below(rng, 20)],
            2 => bytes.truncate(at.max(1)),
            3 => {
                let part = bytes[at..].to_vec();
                bytes.extend(part);
            }
            _ => bytes.iter_mut().for_each(|byte| *byte = rng.next_u64().to_le_bytes()[0]),
        }
    }
    bytes
}

/// The reply of a real server to a get of the value.
fn reply() -> Vec<u8> {
    let served = ServedStore::start("127.0.0.1:0");
    let store = Store::open(&served.address, "default").unwrap();
    assert!(store.put(&["k".to_owned()], &[PutValue::Bytes(VALUE)])[0].is_ok());
    let url = format!("redis://{}", served.address).parse().unwrap();
    let Reply::Bulk(stored) =
        Client::connect(&url, Duration::from_secs(30)).unwrap().call(&[b"GET", b"k"]).unwrap()
    else {
        panic!("it was stored")
    };
    [format!("${}\r\n", stored.len()).as_bytes(), &stored, b"\r\n"].concat()
}

#[test]
fn no_damaged_reply_is_taken_for_a_value() {
    let (scripted, reply, mut rng) = (ScriptedServer::start(), reply(), Rng::new(18));
    let key = ["k".to_owned()];
    let buffers = Buffers::default();
    let mut room = ForeignMemory::new(VALUE.len(), 0);
    offer(&buffers, &mut room);
    let (mut whole, mut refused) = (0, 0);
    for turn in 0..300 {
        let says = if turn == 0 { reply.clone() } else { damaged(&reply, &mut rng) };
        *scripted.says.lock().unwrap() = says;
        // Another program each time: one that was lied to leaves the server alone for a while.
        let store = Store::open(&scripted.address, "default").unwrap();
        match store.get(&key).remove(0) {
            Ok(value) => {
                assert_eq!(value, VALUE);
                whole += 1;
            }
            Err(_) => refused += 1,
        }
        let store = Store::open(&scripted.address, "default").unwrap();
        let into = vec![vec![buffers.span(room.address(), VALUE.len() as u64).unwrap()]];
        if store.get_into(&key, &into, GetMode::UpTo)[0].is_ok() {
            assert_eq!(room.bytes(), VALUE);
        }
        room.fill(0);
        let store = Store::open(&scripted.address, "default").unwrap();
        // Numbers and refusals of any kind: they only must come to an end.
        store.sizes(&key);
        store.put(&key, &[PutValue::Bytes(VALUE)]);
    }
    assert!(whole >= 1 && refused >= 200, "{whole} whole, {refused} refused");
}

#[test]
fn no_reply_makes_the_client_panic_or_wait() {
    let (scripted, mut rng) = (ScriptedServer::start(), Rng::new(19));
    let url = format!("redis://{}", scripted.address).parse().unwrap();
    let replies: [&[u8]; 4] = [
        b"*3\r\n$1\r\na\r\n:12\r\n*2\r\n+OK\r\n_\r\n",
        b"%1\r\n$4\r\nname\r\n$3\r\nabc\r\n",
        b"-ERR no\r\n",
        b"$5\r\nhello\r\n",
    ];
    let deep = b"*1\r\n".repeat(10_000);
    *scripted.says.lock().unwrap() = deep;
    assert!(
        Client::connect(&url, Duration::from_secs(30)).unwrap().call(&[b"GET", b"k"]).is_err(),
        "too deep"
    );
    for turn in 0..300 {
        *scripted.says.lock().unwrap() = damaged(replies[turn % replies.len()], &mut rng);
        let mut client = Client::connect(&url, Duration::from_secs(30)).unwrap();
        client.queue(&[b"GET", b"k"]);
        // It ends by the end of the connection at the latest.
        while client.flush().and_then(|()| client.receive()).is_ok() {}
    }
}
