//! Engines that restart, and streams that lose: the index ends with what the engine holds.

use baton_events::{Publisher, PublisherConfig};

use crate::engine::{Engine, indexer, publisher};
use crate::wire::Proxy;

#[tokio::test]
async fn of_a_stream_that_loses_one_in_twenty_nothing_is_missing_in_the_end() {
    let (served, publisher) = (indexer().await, publisher().await);
    let proxy = Proxy::before(publisher.endpoint(), 20).await;
    let mut engine = Engine::new(1);
    engine.announce(&publisher, 1).await;
    served.register(&publisher, &proxy.endpoint, "i").await;
    for _ in 0..4 {
        let last = engine.announce(&publisher, 100).await;
        served.reach("i", last, |_| true).await;
        engine.agrees(&served, "i").await;
    }
    let lost = proxy.lost.load(std::sync::atomic::Ordering::SeqCst);
    assert!(lost > 5, "of four hundred batches {lost} were lost on the way");
}

#[tokio::test]
async fn after_a_restart_only_the_new_life_counts() {
    let (served, publisher) = (indexer().await, publisher().await);
    let again = PublisherConfig::new(publisher.endpoint(), publisher.replay_endpoint().map(str::to_owned));
    served.register(&publisher, publisher.endpoint(), "i").await;
    let last = Engine::new(2).announce(&publisher, 50).await;
    served.reach("i", last, |_| true).await;
    drop(publisher);
    let publisher = loop {
        match Publisher::bind(again.clone()).await {
            Ok(publisher) => break publisher,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
        }
    };
    let mut engine = Engine::new(3);
    let last = engine.announce(&publisher, 20).await;
    served.reach("i", last, |one| one["stream"]["restarts"] == 1).await;
    engine.agrees(&served, "i").await;
}
