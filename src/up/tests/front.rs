//! The front door's threads: what they compute delays no heartbeat and no decision.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::{PoolSpec, TimedSpec};
use baton_router::{Submission, Tokenization};
use baton_transports::RdmaDevices;
use baton_types::{BlockKey, Role, Sampling};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::conductor::{Lead, Message, Question};
use crate::config::Config;
use crate::node::{EngineChoice, NodeConfig};
use crate::up::Service;

/// Longer than a node may be silent here.
const BUSY: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_front_door_that_computes_for_seconds_costs_no_node_and_delays_no_decision() {
    let mut config = Config::default();
    config.scheduler.block_tokens = 16;
    (config.service.heartbeat_us, config.service.lost_after_us) = (100_000, 500_000);
    config.service.listen = "127.0.0.1:0".into();
    let alone = (Lead::alone(), None);
    let service = Service::start_led(&config, Tokenization::bytes(), None, alone, Some(2)).await.unwrap();
    let stop = CancellationToken::new();
    let nodes: Vec<_> = [("p0", Role::Prefill), ("d0", Role::Decode)]
        .into_iter()
        .map(|(name, role)| tokio::spawn(crate::node::run(node(name, role, service.control), stop.clone())))
        .collect();
    service.ready().await;

    let begun = Instant::now();
    for _ in 0..2 {
        service.front.handle().spawn(async { std::thread::sleep(BUSY) });
    }
    let mut served = 0;
    while begun.elapsed() < BUSY {
        let (events, mut told) = mpsc::channel(64);
        let submission = submission(&format!("r{served}"));
        let request = service.inbox.name_request();
        assert!(service.inbox.send(Message::submit(request, submission, events)).await);
        let last = async {
            loop {
                if let Some(baton_router::Event::Finished { .. }) = told.recv().await {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(1), last)
            .await
            .expect("served while the front door computes");
        served += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(served > 5, "{served} were served meanwhile");
    let status = service.inbox.ask(Question::Status).await.unwrap();
    let mut lives: Vec<_> = status.nodes.iter().map(|node| (node.name.as_str(), node.epoch)).collect();
    // Whichever attached first.
    lives.sort_unstable();
    assert_eq!(lives, [("d0", 1), ("p0", 1)], "nobody was lost");
    stop.cancel();
    for node in nodes {
        node.await.unwrap().unwrap();
    }
    service.stop().await;
}

/// An engine of this program with a checkpoint reads tokens as its folder has them: what a front door of another folder
/// sends is another prompt to it.
#[tokio::test]
async fn a_node_of_another_tokenizer_is_refused() {
    let mut config = Config::default();
    config.scheduler.block_tokens = 16;
    config.service.listen = "127.0.0.1:0".into();
    let service = Service::start_led(&config, Tokenization::bytes(), None, (Lead::alone(), None), Some(1))
        .await
        .unwrap();
    let sample = Tokenization::bytes().sample().unwrap();
    let name = |tokens: &[u32]| crate::conductor::tokenizer_name(tokens, sample.chat_tokens.as_deref());
    let stop = CancellationToken::new();
    let start = |tokenizer| {
        let node = NodeConfig { tokenizer, ..node("n0", Role::Both, service.control) };
        tokio::spawn(crate::node::run(node, stop.clone()))
    };
    let refused = start(name(&sample.tokens[1..])).await.unwrap();
    let why = refused.expect_err("its tokens are others").to_string();
    assert!(why.contains("another tokenizer") && why.contains("--model"), "{why}");
    let taken = start(name(&sample.tokens));
    service.ready().await;
    stop.cancel();
    taken.await.unwrap().unwrap();
    service.stop().await;
}

fn node(name: &str, role: Role, control: SocketAddr) -> NodeConfig {
    let pool = PoolSpec { block_tokens: 16, blocks: 64, pass_tokens: 48, max_running: 16, threads: None };
    NodeConfig {
        name: name.into(),
        role,
        may_change_role: false,
        control: format!("http://{control}"),
        kv_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        rdma: RdmaDevices::default(),
        host: crate::up::host_name(),
        engine: EngineChoice::Timed { spec: Box::new(TimedSpec::zero_work()), pool },
        tokenizer: String::new(),
        dram_blocks: 64,
        ssd_blocks: 64,
        ssd_dir: None,
        store: Config::default().store,
        guard: crate::guard::ClusterGuard::default(),
        publish: None,
    }
}

fn submission(request_id: &str) -> Submission {
    Submission {
        request_id: request_id.into(),
        tokens: (0..40u32).collect(),
        root: BlockKey::default(),
        chain: [].into(),
        sampling: Arc::new(Sampling { max_tokens: 4, ignore_eos: true, ..Sampling::default() }),
        class: None,
        class_param: None,
        objectives: baton_types::RequestObjectives::default(),
        tenant: None,
        session: None,
        body: bytes::Bytes::new(),
        asked_tokens: None,
        explain: false,
        timeout_us: None,
        trace: None,
    }
}

/// A regression: each error on the way repeated its cause, and the command line prints the chain of causes.
#[tokio::test]
async fn what_could_not_be_started_is_said_once() {
    let mut config = Config::default();
    (config.service.listen, config.service.control) = ("127.0.0.1:0".into(), "127.0.0.1:0".into());
    config.service.capture = "/proc/none".into();
    let refused = Service::start(&config, Tokenization::bytes(), None).await.err();
    let text = format!("{:#}", anyhow::Error::from(refused.expect("nothing can be made there")));
    assert_eq!(text.matches("/proc/none").count(), 1, "{text}");
}
