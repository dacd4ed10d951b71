//! An engine whose announcements are wrong: its counts of cached tokens reveal that, and the index is corrected.

use std::time::Duration;

use baton_events::{
    BlockExtra, Change, EngineHash, ExtraKey, Publisher, PublisherConfig, StoredBlocks, SubscriberConfig,
};
use baton_remote::testing::{Cost, Fabric, FakeConnector, FakeRole, FakeVllm, VllmSpec};
use baton_types::{ChainHasher, Role, Sampling};

use super::cluster::{Cluster, listen};
use crate::node::EventSource;

/// Prompts that the engine announced and has evicted since, without a word: those events never came.
const PROMPTS: u32 = 20;
const BLOCKS: u32 = 4;

fn prompt(at: u32) -> Vec<u32> {
    // One token more than the blocks: an engine always has something to compute.
    (0..BLOCKS * 16 + 1).map(|token| 1 + (at * 131 + token * 7) % 900).collect()
}

fn announced(at: u32, root: u128) -> Change {
    let salt = ExtraKey::Text(format!("{root:032x}"));
    Change::Stored(StoredBlocks {
        hashes: (0..BLOCKS).map(|block| EngineHash::Word(u64::from(at * BLOCKS + block) + 1)).collect(),
        parent: None,
        base_block: None,
        tokens: prompt(at)[..(BLOCKS * 16) as usize].to_vec(),
        block_tokens: 16,
        lora: None,
        medium: None,
        extra: vec![BlockExtra { block: 0, keys: vec![salt] }],
        group: None,
        attention: None,
    })
}

fn counter(cluster: &Cluster, name: &str) -> u64 {
    let page = cluster.metrics.page();
    let line = page.lines().find_map(|line| line.strip_prefix(&format!("{name}{{node=\"w0\"}} ")));
    line.map_or(0, |value| value.parse().unwrap())
}

/// Cached tokens that the latest decision expects.
async fn expects(cluster: &Cluster, prompt: &[u32]) -> u64 {
    let sampling = Sampling { temperature: 0.0, max_tokens: 2, ..Sampling::default() };
    let answer = listen(cluster.submit(prompt, sampling)).await;
    assert_eq!(answer.trouble, None);
    let decision = &cluster.status().await.decisions[0];
    let tokens = decision.split("cached_tokens=").nth(1).and_then(|rest| rest.split(' ').next());
    tokens.and_then(|tokens| tokens.parse().ok()).unwrap_or_else(|| panic!("{decision}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_announced_and_does_not_find_is_forgotten_within_a_window() {
    let engine = super::cluster::small_model(baton_engine::PoolSpec::default());
    let mut cluster = Cluster::start("", &engine, |config| {
        config.scheduler.fetch = false;
        config.scheduler.classes[0].ttft_us = 60_000_000;
        config.scheduler.classes[0].tbt_us = 10_000_000;
    })
    .await;
    cluster.body = "{}".into();
    let publisher = Publisher::bind(PublisherConfig::new("tcp://127.0.0.1:0", None)).await.unwrap();
    // Its cache has room for two prompts.
    let cost = Cost { cache_blocks: 2 * BLOCKS, ..Cost::NONE };
    let whole = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
    let spec = VllmSpec { cost, block_tokens: 16, blocks: 4096, ..whole };
    let fake = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
    let subscriber = SubscriberConfig::new(publisher.endpoint(), None);
    let events = Some(EventSource { subscriber, dp_rank: None });
    cluster.add_announced("w0", Role::Both, fake.settings(), events);
    cluster.ready().await;
    let root = ChainHasher::new(*cluster.config.service.chain_seed.expose(), b"test").parent();
    // Published again and again until the subscription is there: a block is announced twice at most harmlessly.
    let mut expected = 0;
    for at in 0..100 {
        (0..PROMPTS).for_each(|at| _ = publisher.announce(vec![announced(at, root.0)]));
        tokio::time::sleep(Duration::from_millis(100)).await;
        expected = expects(&cluster, &prompt(at % PROMPTS)).await;
        if expected > 0 {
            break;
        }
    }
    assert_eq!(expected, u64::from(BLOCKS) * 16, "what was announced is expected");
    // Its first count: without any, none would mean that it counts nothing.
    expects(&cluster, &prompt(0)).await;
    expects(&cluster, &prompt(0)).await;
    let counted = counter(&cluster, "baton_cache_found_tokens_total");
    for at in (1..PROMPTS).rev() {
        expects(&cluster, &prompt(at)).await;
    }
    let found = counter(&cluster, "baton_cache_found_tokens_total");
    let wrong = counter(&cluster, "baton_cache_expected_tokens_total");
    assert!(found == counted && wrong >= 8 * u64::from(BLOCKS) * 16, "{found} of {wrong}");
    for _ in 0..100 {
        expected = expects(&cluster, &prompt(PROMPTS - 1)).await;
        if expected == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(expected, 0, "what is not there is expected no more");
    for _ in 0..100 {
        if counter(&cluster, "baton_cache_resyncs_total") == 1 {
            return cluster.stop().await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the node does not tell that it learnt anew: {}", cluster.metrics.page());
}
