//! Announces a small cache in vLLM's form, a batch each tenth of a second, for any ZeroMQ subscriber to follow:
//! `cargo run -p baton-events --example announce -- tcp://127.0.0.1:5557 tcp://127.0.0.1:5558 100`

use baton_events::hash::Rolling;
use baton_events::{Change, EngineHash, Medium, Publisher, PublisherConfig, RemovedBlocks, StoredBlocks};
use std::time::Duration;

const BLOCK_TOKENS: u32 = 4;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let endpoint = args.next().unwrap_or_else(|| "tcp://127.0.0.1:5557".into());
    let config = PublisherConfig { topic: "kv@baton".into(), ..PublisherConfig::new(endpoint, args.next()) };
    let batches: u32 = args.next().map_or(Ok(100), |text| text.parse())?;
    let publisher = Publisher::bind(config).await?;
    println!("publishing on {}, repeating on {:?}", publisher.endpoint(), publisher.replay_endpoint());
    let mut chain = Rolling::new(0);
    let mut parent = None;
    for number in 0..batches {
        let tokens = vec![number, number + 100_000, 7, 300];
        let hash = EngineHash::Word(chain.push(&tokens));
        let (medium, block_tokens) = (Some(Medium::Gpu), BLOCK_TOKENS);
        let stored = StoredBlocks {
            hashes: vec![hash],
            parent,
            tokens,
            block_tokens,
            medium,
            ..StoredBlocks::default()
        };
        let mut changes = vec![Change::Stored(stored)];
        if number % 10 == 9 {
            changes.push(Change::Removed(RemovedBlocks { hashes: vec![hash], ..RemovedBlocks::default() }));
        } else {
            parent = Some(hash);
        }
        publisher.announce(changes);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
