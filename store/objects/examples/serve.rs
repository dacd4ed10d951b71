//! The smallest server: `cargo run --release -p baton-objects --features resp --example serve -- 127.0.0.1:6390 512`
//! serves 512 MiB. The whole thing is `baton store serve`.

use baton_objects::resp::{RespConfig, Server};
use baton_objects::{Clock, ObjectStore, StoreConfig};

fn main() -> Result<(), String> {
    let mut words = std::env::args().skip(1);
    let address = words.next().unwrap_or_else(|| "127.0.0.1:6390".into());
    let mib: u64 = words.next().map_or(Ok(512), |word| word.parse()).map_err(|e| format!("MiB: {e}"))?;
    let config =
        StoreConfig { capacity_bytes: mib << 20, value_max_bytes: (mib << 20) / 2, ..StoreConfig::default() };
    let store = ObjectStore::new(&config, Clock::machine())?;
    let server = Server::new(store, RespConfig { allow_flush: true, ..RespConfig::default() })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|e| format!("runtime: {e}"))?.block_on(async {
        let listener =
            tokio::net::TcpListener::bind(&address).await.map_err(|e| format!("{address}: {e}"))?;
        server.serve(listener, std::future::pending()).await;
        Ok(())
    })
}
