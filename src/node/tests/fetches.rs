//! Blocks that a node brings from another: by the transfer engine, all of them, and the right ones.

use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use baton_wire::v1::order::Order;

use super::conductor::{BLOCK, Line, Stage, work};

/// The node at the other end, as orders name it to its peers.
fn peer_of(line: &Line) -> v1::Peer {
    let v1::Hello { kv_address, host, .. } = line.hello.clone();
    v1::Peer { instance: 1, epoch: 1, kv_address, host }
}

/// Waits until the node has reported that so many bytes came by the transfer engine.
async fn until_moved(line: &mut Line, bytes: u64) {
    while line.load.received_bytes != bytes {
        assert!(
            line.load.received_bytes < bytes,
            "more than the blocks that were asked for: {:?}",
            line.load
        );
        line.receive().await;
    }
}

#[tokio::test]
async fn a_fetch_and_a_replica_go_by_the_transfer_engine() {
    let (mut one, mut other) = (Stage::start().await, Stage::start().await);
    let (mut holder, mut asker) = (one.attach().await, other.attach().await);
    let (short, long) = (work(50), work(100));
    holder.serve(1, long.clone()).await;
    let block_bytes = asker.hello.fingerprint.as_ref().unwrap().block_bytes;
    let from = Some(peer_of(&holder));

    // Two of the three whole blocks of the short prompt are asked for.
    let prefill = v1::Prefill {
        work: Some(short.clone()),
        room_tokens: 16,
        fetch_from: from.clone(),
        fetch_blocks: 2,
        ..Default::default()
    };
    asker.order(1, 1, Order::Prefill(prefill)).await;
    assert_eq!(asker.fact(1).await, (1, Fact::Fetch(true)));
    let cached_tokens = loop {
        if let (1, Fact::Prefilled(done)) = asker.fact(1).await {
            break done.cached_tokens;
        }
    };
    assert_eq!(cached_tokens, u64::from(2 * BLOCK));
    until_moved(&mut asker, 2 * block_bytes).await;
    asker.release(1).await;

    // Blocks that the asking node already has are not sent again.
    let chain = baton_wire::unpack_keys(&long.chain);
    let held = baton_wire::unpack_keys(&short.chain).len();
    let order = v1::Replicate { from, chain: baton_wire::pack_keys(&chain) };
    asker.order(0, 0, Order::Replicate(order)).await;
    while !matches!(asker.fact(0).await, (_, Fact::Replicated(true))) {}
    until_moved(&mut asker, (2 + chain.len() - held) as u64 * block_bytes).await;
    let order = v1::Prefill { work: Some(long.clone()), room_tokens: 16, ..Default::default() };
    asker.order(2, 1, Order::Prefill(order)).await;
    let cached_tokens = loop {
        if let (1, Fact::Prefilled(done)) = asker.fact(2).await {
            break done.cached_tokens;
        }
    };
    assert_eq!(cached_tokens, chain.len() as u64 * u64::from(BLOCK), "the copy is used");
    asker.release(2).await;
    assert_eq!(asker.serve(3, long.clone()).await, holder.serve(3, long).await);
    assert_eq!(asker.serve(4, short.clone()).await, holder.serve(4, short).await);
    holder.idle().await;
    asker.idle().await;
    one.end().await;
    other.end().await;
}
