//! Peers that follow no rules: lossy replays, numbers that fall, bytes that are no batch, frames without end.

use baton_events::{Batch, Change, EpochReason, Feed, Form, Speaker, Subscriber, SubscriberConfig, encode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::wire::{answering, saying, written};

const END: u64 = u64::MAX;

/// A batch that clears. Its time distinguishes the engine's lives.
fn batch(sequence: u64, time_us: u64) -> Vec<u8> {
    let events = vec![Change::Cleared(None).into()];
    encode(&Batch { sequence, time_us, dp_rank: None, events }, Form::Vllm, &Speaker::default())
}

fn live(sequences: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let one = |sequence: u64| written(&[b"kv", &sequence.to_be_bytes(), &batch(sequence, sequence)]);
    sequences.into_iter().flat_map(one).collect()
}

fn repeated(sequences: impl IntoIterator<Item = u64>, ended: bool) -> Vec<u8> {
    let one = |sequence: u64| written(&[b"", &sequence.to_be_bytes(), &batch(sequence, sequence)]);
    let mut bytes: Vec<u8> = sequences.into_iter().flat_map(one).collect();
    if ended {
        bytes.extend(written(&[b"", b"", &END.to_be_bytes(), b""]));
    }
    bytes
}

fn start(endpoint: String, replay: Option<String>) -> Subscriber {
    let config = SubscriberConfig {
        backoff_min_us: 1000,
        backoff_max_us: 5000,
        replay_timeout_us: 50_000,
        probe_min_us: 20_000_000,
        ..SubscriberConfig::new(endpoint, replay)
    };
    Subscriber::start(config).unwrap()
}

/// The consumer's items until number `last`: numbers, and the reasons of epochs.
async fn heard(subscriber: &mut Subscriber, last: u64) -> Vec<Result<u64, EpochReason>> {
    let mut all = Vec::new();
    while all.last() != Some(&Ok(last)) {
        let next = tokio::time::timeout(Duration::from_secs(20), subscriber.next()).await;
        all.push(match next.unwrap_or_else(|_| panic!("{all:?}, {:?}", subscriber.status())).unwrap() {
            Feed::Cleared { why, .. } => Err(why),
            Feed::Batch { batch, .. } => Ok(batch.sequence),
        });
    }
    all
}

fn numbers(range: std::ops::RangeInclusive<u64>) -> Vec<Result<u64, EpochReason>> {
    range.map(Ok).collect()
}

#[tokio::test]
async fn holes_in_a_replay_are_asked_for_until_they_are_filled() {
    // Of each answer only every third batch is followed by the next, and no end marker comes.
    let replay = answering(|from| {
        let told = (from..from + 2).chain([from + 4]).filter(|n| *n < 10);
        repeated(told, false)
    })
    .await;
    let mut subscriber = start(saying(vec![live([10, 11])]).await, Some(replay));
    assert_eq!(heard(&mut subscriber, 11).await, [vec![Err(EpochReason::Started)], numbers(0..=11)].concat());
    let status = subscriber.status();
    assert!(status.replays >= 5 && status.lost == 0, "{status:?}");
}

#[tokio::test]
async fn a_hole_that_nobody_can_fill_ends_the_epoch() {
    let replay = answering(|from| repeated((from..=from).filter(|n| *n < 3), true)).await;
    let mut subscriber = start(saying(vec![live([0, 1, 2, 9, 10])]).await, Some(replay));
    let expected =
        [vec![Err(EpochReason::Started)], numbers(0..=2), vec![Err(EpochReason::Lost)], numbers(9..=10)]
            .concat();
    assert_eq!(heard(&mut subscriber, 10).await, expected);
    assert_eq!((subscriber.status().lost, subscriber.status().gaps), (6, 1));
}

#[tokio::test]
async fn what_the_publisher_no_longer_has_is_lost_and_the_rest_is_not() {
    let replay = answering(|from| repeated(from.max(6)..9, true)).await;
    let mut subscriber = start(saying(vec![live([9])]).await, Some(replay));
    assert_eq!(heard(&mut subscriber, 9).await, [vec![Err(EpochReason::Started)], numbers(6..=9)].concat());
}

#[tokio::test]
async fn numbers_that_fall_are_a_new_life() {
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    // Before the restart there is nothing to repeat, after it the new life's first batch.
    let replay = answering(move |from| {
        let new_life = count.fetch_add(1, Ordering::SeqCst) > 0;
        repeated((from..1).filter(|_| new_life), true)
    })
    .await;
    let mut subscriber = start(saying(vec![live([0, 1, 2, 1, 2, 3])]).await, Some(replay));
    let expected =
        [vec![Err(EpochReason::Started)], numbers(0..=2), vec![Err(EpochReason::Restarted)], numbers(0..=3)]
            .concat();
    assert_eq!(heard(&mut subscriber, 3).await, expected);
}

#[tokio::test]
async fn without_a_replay_every_hole_and_every_connection_is_a_loss() {
    let mut first = live([5, 6, 9]);
    first.extend([0xff; 3]);
    let mut subscriber = start(saying(vec![first, live([10, 11])]).await, None);
    let lost = || vec![Err(EpochReason::Lost)];
    let expected =
        [vec![Err(EpochReason::Started)], numbers(5..=6), lost(), numbers(9..=9), lost(), numbers(10..=11)];
    assert_eq!(heard(&mut subscriber, 11).await, expected.concat());
    let status = subscriber.status();
    assert_eq!((status.connections, status.lost), (2, 2));
    assert!(status.last_error.unwrap().contains("starts no ZMTP frame"));
}

#[tokio::test]
async fn what_is_no_batch_is_skipped_and_what_was_known_is_void() {
    let mut bytes = live([0]);
    bytes.extend(written(&[b"kv"]));
    bytes.extend(written(&[b"kv", b"short", b"x"]));
    bytes.extend(written(&[b"kv", &1u64.to_be_bytes(), b"no batch"]));
    bytes.extend(live([2]));
    let mut subscriber = start(saying(vec![bytes]).await, None);
    let heard = heard(&mut subscriber, 2).await;
    assert_eq!(heard, [Err(EpochReason::Started), Ok(0), Err(EpochReason::Lost), Ok(2)]);
    assert_eq!(subscriber.status().malformed, 3);
}

#[tokio::test]
async fn a_frame_without_end_costs_a_connection_and_nothing_else() {
    let mut endless = vec![2];
    endless.extend(u64::MAX.to_be_bytes());
    let mut subscriber = start(saying(vec![endless, live([0])]).await, None);
    assert_eq!(heard(&mut subscriber, 0).await, [Err(EpochReason::Started), Ok(0)]);
    assert!(subscriber.status().last_error.unwrap().contains("longer than"));
}

#[tokio::test]
async fn an_engine_that_is_not_there_yet_is_waited_for() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    drop(listener);
    let mut subscriber = start(endpoint.clone(), None);
    while subscriber.status().last_error.is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(subscriber.status().last_error.unwrap().contains("connect"));
    let publisher = loop {
        match baton_events::Publisher::bind(baton_events::PublisherConfig::new(&endpoint, None)).await {
            Ok(publisher) => break publisher,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    while subscriber.status().batches == 0 {
        publisher.announce(vec![]);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(matches!(subscriber.next().await, Some(Feed::Cleared { epoch: 1, why: EpochReason::Started })));
    let bad = Subscriber::start(SubscriberConfig::new("ipc://x", None)).unwrap_err();
    assert!(bad.message.contains("tcp://HOST:PORT"));
}
