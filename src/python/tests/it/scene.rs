//! Memory, engines and servers for the tests.

use baton_objects::resp::{RespConfig, Server};
use baton_objects::{Clock, ObjectStore, Parts, StoreConfig};
use baton_python::Failure;
use baton_python::engine::Engine;
use baton_python::raw::Buffers;

/// Memory as another language would own it: known by address, and looked into when nothing moves.
pub struct ForeignMemory(Vec<u8>);

impl ForeignMemory {
    pub fn new(bytes: usize, seed: u8) -> Self {
        Self((0..bytes).map(|at| seed.wrapping_add(u8::try_from(at % 251).unwrap())).collect())
    }

    pub fn address(&mut self) -> u64 {
        self.0.as_mut_ptr().expose_provenance() as u64
    }

    pub fn bytes(&self) -> &[u8] {
        std::hint::black_box(&self.0)
    }

    pub fn fill(&mut self, byte: u8) {
        self.0.fill(byte);
    }

    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }
}

pub fn engine() -> Engine {
    Engine::start("127.0.0.1", "tcp", true).unwrap()
}

/// Registers memory that lives as long as the test.
#[allow(unsafe_code, reason = "what engines of other languages do")]
pub fn register(engine: &Engine, address: u64, bytes: u64) -> Result<(), Failure> {
    // SAFETY: tests register what they own until their end, or what is no memory and refused.
    unsafe { engine.register(address, bytes) }
}

/// Registers several ranges.
#[allow(unsafe_code, reason = "what engines of other languages do")]
pub fn register_all(engine: &Engine, ranges: &[(u64, u64)]) -> Result<(), Failure> {
    // SAFETY: as in `register`.
    unsafe { engine.register_all(ranges) }
}

/// Registers a range with the store.
#[allow(unsafe_code, reason = "what engines of other languages do")]
pub fn offer(buffers: &Buffers, held: &mut ForeignMemory) {
    // SAFETY: as in `register`.
    unsafe { buffers.register(held.address(), held.len()) }.unwrap();
}

pub fn target(engine: &Engine) -> String {
    format!("127.0.0.1:{}", engine.port())
}

/// A store as `baton store serve` runs it, on a runtime of its own.
pub struct ServedStore {
    pub address: String,
    pub store: ObjectStore,
    /// The server runs as long as it lives.
    _runtime: tokio::runtime::Runtime,
}

impl ServedStore {
    /// At an address, which one that comes back is given.
    pub fn start(address: &str) -> Self {
        Self::start_with(address, None)
    }

    /// With a rule for parts of one object.
    pub fn start_with(address: &str, parts: Option<Parts>) -> Self {
        let limits =
            StoreConfig { capacity_bytes: 64 << 20, value_max_bytes: 16 << 20, ..StoreConfig::default() };
        let config = StoreConfig { parts, ..limits };
        let store = ObjectStore::new(&config, Clock::machine()).unwrap();
        let resp = RespConfig { allow_flush: true, ..RespConfig::default() };
        let server = Server::new(store.clone(), resp).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        runtime.spawn(async move { server.serve(listener, std::future::pending()).await });
        Self { address, store, _runtime: runtime }
    }
}
