//! Publisher and subscriber over the loopback: late joiners, losses, restarts, cut histories, slow consumers.

use baton_events::{EpochReason, Form, Publisher, PublisherConfig, Subscriber, SubscriberConfig};

use crate::engine::{Engine, Follower};
use crate::wire::Proxy;

pub fn anywhere() -> PublisherConfig {
    PublisherConfig::new("tcp://127.0.0.1:0", Some("tcp://127.0.0.1:0".into()))
}

/// Impatient, so that no test waits long for a second try.
pub fn quick(endpoint: &str, replay: Option<&str>) -> SubscriberConfig {
    SubscriberConfig {
        backoff_min_us: 5_000,
        backoff_max_us: 50_000,
        probe_min_us: 50_000,
        probe_max_us: 200_000,
        ..SubscriberConfig::new(endpoint, replay.map(str::to_owned))
    }
}

fn follow(config: SubscriberConfig) -> Follower {
    Follower::new(Subscriber::start(config).unwrap())
}

fn follow_directly(publisher: &Publisher) -> Follower {
    follow(quick(publisher.endpoint(), publisher.replay_endpoint()))
}

/// Publishes some steps, now and then letting others run; returns the number that comes next.
pub async fn publish(publisher: &Publisher, engine: &mut Engine, steps: usize) -> u64 {
    let mut next = 0;
    for step in 0..steps {
        next = publisher.announce(engine.step()) + 1;
        if step % 16 == 0 {
            tokio::task::yield_now().await;
        }
    }
    next
}

#[tokio::test]
async fn a_late_joiner_hears_everything_in_either_form() {
    for form in [Form::Vllm, Form::Standard] {
        let publisher = Publisher::bind(PublisherConfig { form, ..anywhere() }).await.unwrap();
        let mut engine = Engine::new(1);
        let next = publish(&publisher, &mut engine, 300).await;
        let mut follower = follow_directly(&publisher);
        follower.reach(next).await;
        assert_eq!(follower.index, engine.truth());
        let next = publish(&publisher, &mut engine, 100).await;
        follower.reach(next).await;
        assert_eq!((follower.index, follower.epochs), (engine.truth(), vec![EpochReason::Started]));
    }
}

#[tokio::test]
async fn of_a_lossy_stream_nothing_is_missing_in_the_end() {
    let publisher = Publisher::bind(anywhere()).await.unwrap();
    let proxy = Proxy::before(publisher.endpoint(), 20).await;
    let mut follower = follow(quick(&proxy.endpoint, publisher.replay_endpoint()));
    let mut engine = Engine::new(2);
    publish(&publisher, &mut engine, 1).await;
    follower.reach(1).await;
    for _ in 0..10 {
        let next = publish(&publisher, &mut engine, 100).await;
        follower.reach(next).await;
        assert_eq!(follower.index, engine.truth());
    }
    let status = follower.subscriber.status();
    let lost = proxy.lost.load(std::sync::atomic::Ordering::SeqCst);
    assert!(lost > 20, "of a thousand batches {lost} were lost on the way");
    assert!(status.gaps > 10 && status.replays >= status.gaps, "{status:?}");
    assert_eq!((status.lost, status.batches, follower.epochs), (0, 1001, vec![EpochReason::Started]));
}

#[tokio::test]
async fn the_last_message_is_missed_even_if_nothing_follows_it() {
    let publisher = Publisher::bind(anywhere()).await.unwrap();
    let proxy = Proxy::before(publisher.endpoint(), 1).await;
    let mut follower = follow(quick(&proxy.endpoint, publisher.replay_endpoint()));
    let mut engine = Engine::new(3);
    let next = publish(&publisher, &mut engine, 5).await;
    follower.reach(next).await;
    let next = publish(&publisher, &mut engine, 5).await;
    follower.reach(next).await;
    assert_eq!(follower.index, engine.truth());
    assert_eq!(follower.subscriber.status().gaps, 0, "it was silence that made it ask");
    proxy.lose_no_more();
}

#[tokio::test]
async fn a_cut_connection_is_no_restart() {
    let publisher = Publisher::bind(anywhere()).await.unwrap();
    let proxy = Proxy::before(publisher.endpoint(), 0).await;
    let mut follower = follow(quick(&proxy.endpoint, publisher.replay_endpoint()));
    let mut engine = Engine::new(4);
    for cuts in 1..=3 {
        let next = publish(&publisher, &mut engine, 50).await;
        follower.reach(next).await;
        while follower.subscriber.status().connections < cuts {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        proxy.cut();
        let next = publish(&publisher, &mut engine, 50).await;
        follower.reach(next).await;
        assert_eq!(follower.index, engine.truth());
    }
    assert_eq!((follower.epochs, follower.subscriber.status().lost), (vec![EpochReason::Started], 0));
}

#[tokio::test]
async fn a_restart_is_seen_however_far_the_new_life_has_come() {
    for steps in [3, 40, 200] {
        let publisher = Publisher::bind(anywhere()).await.unwrap();
        let again =
            PublisherConfig::new(publisher.endpoint(), publisher.replay_endpoint().map(str::to_owned));
        let mut follower = follow_directly(&publisher);
        let next = publish(&publisher, &mut Engine::new(5), 40).await;
        follower.reach(next).await;
        drop(publisher);
        let publisher = loop {
            match Publisher::bind(again.clone()).await {
                Ok(publisher) => break publisher,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            }
        };
        let mut engine = Engine::new(6);
        let next = publish(&publisher, &mut engine, steps).await;
        follower.until(|follower| follower.epochs.len() > 1).await;
        follower.reach(next).await;
        assert_eq!(follower.index, engine.truth(), "{steps} steps");
        assert_eq!(follower.epochs[1], EpochReason::Restarted);
        assert_eq!(follower.subscriber.status().restarts, 1);
    }
}

#[tokio::test]
async fn who_comes_after_the_history_was_cut_gets_a_snapshot() {
    let publisher = Publisher::bind(PublisherConfig { history_batches: 7, ..anywhere() }).await.unwrap();
    let mut engine = Engine::new(7);
    let next = publish(&publisher, &mut engine, 300).await;
    let mut follower = follow_directly(&publisher);
    follower.reach(next).await;
    assert_eq!(follower.index, engine.truth());
    assert!(follower.subscriber.status().replays >= 2, "asked twice, to be sure that it is no loss");
    let next = publish(&publisher, &mut engine, 5).await;
    follower.reach(next).await;
    assert_eq!((follower.index, follower.epochs), (engine.truth(), vec![EpochReason::Started]));
}

#[tokio::test]
async fn a_slow_consumer_loses_nothing_but_time() {
    let publisher = Publisher::bind(PublisherConfig { queue_batches: 8, ..anywhere() }).await.unwrap();
    let slow =
        SubscriberConfig { queue_batches: 2, ..quick(publisher.endpoint(), publisher.replay_endpoint()) };
    let mut follower = follow(slow);
    let mut engine = Engine::new(8);
    publish(&publisher, &mut engine, 1).await;
    follower.reach(1).await;
    let mut next = 0;
    for _ in 0..3000 {
        next = publisher.announce(engine.step()) + 1;
    }
    assert!(follower.subscriber.waiting() <= 2);
    follower.reach(next).await;
    assert_eq!(follower.index, engine.truth());
    assert_eq!(follower.subscriber.status().lost, 0);
}

#[tokio::test]
async fn a_topic_that_is_not_wanted_is_not_sent() {
    let config = PublisherConfig { topic: "kv@one".into(), ..anywhere() };
    let publisher = Publisher::bind(config).await.unwrap();
    let other = SubscriberConfig { topic: "kv@two".into(), ..quick(publisher.endpoint(), None) };
    let mut wanted = follow(SubscriberConfig { topic: "kv@".into(), ..quick(publisher.endpoint(), None) });
    let mut unwanted = follow(other);
    let mut engine = Engine::new(9);
    while wanted.subscriber.status().batches < 5 || !unwanted.subscriber.status().connected {
        publisher.announce(engine.step());
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    wanted.take().await;
    unwanted.take().await;
    let after = publish(&publisher, &mut engine, 5).await;
    wanted.reach(after).await;
    assert_eq!(unwanted.subscriber.status().batches, 0);
}
