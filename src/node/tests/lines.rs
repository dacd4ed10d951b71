//! Lines that lead to something that is no conductor.

use std::sync::Arc;
use std::time::Duration;

use baton_wire::v1;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::guard::ClusterGuard;
use crate::node::attach::{GrpcSession, NodeRuntime, WorkerGoneError};
use crate::node::leader_locator::LeaderLocator;
use crate::node::pulse::Pulse;

/// Nothing is ever wanted of it. Its thread has turned so often, where it has one.
struct IdleRuntime {
    turns: Option<u64>,
}

impl NodeRuntime for IdleRuntime {
    fn attached(&self, _: &v1::Welcome, _: mpsc::Sender<v1::FromNode>) -> Result<(), WorkerGoneError> {
        Ok(())
    }

    fn detached(&self) -> Result<(), WorkerGoneError> {
        Ok(())
    }

    fn ordered(&self, _: v1::Orders) -> Result<(), WorkerGoneError> {
        Ok(())
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    fn turns(&self) -> Option<u64> {
        self.turns
    }
}

/// The result of a session with `address`.
async fn tried(address: String) -> String {
    let line = GrpcSession {
        leader: Arc::new(LeaderLocator::new(address, None)),
        guard: ClusterGuard::default(),
        hello: v1::Hello::default(),
        runtime: IdleRuntime { turns: None },
        welcome_within: Duration::from_millis(300),
        pulse: Pulse::default(),
    };
    let tried =
        tokio::time::timeout(Duration::from_secs(20), line.once(&mut false, &CancellationToken::new())).await;
    tried.expect("it does not wait without end").expect_err("no conductor is there").message().to_owned()
}

#[tokio::test]
async fn a_port_that_gives_no_answer_is_named_with_the_remedy() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let why = tried(address.clone()).await;
    assert!(why.contains(&address) && why.contains("control port") && why.contains("front door"), "{why}");
}

#[tokio::test]
async fn a_node_at_the_front_door_is_told_where_nodes_attach() {
    let mut config = crate::config::Config::default();
    config.service.listen = "127.0.0.1:0".into();
    let tokenization = baton_router::Tokenization::bytes();
    let service = crate::up::Service::start(&config, tokenization, None).await.unwrap();
    let why = tried(format!("http://{}", service.clients)).await;
    assert!(why.contains("control port"), "{why}");
    service.stop().await;
}

/// The session goes on trying, and ends when it is stopped.
#[tokio::test]
async fn a_line_that_gets_no_answer_still_stops() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let line = GrpcSession {
        leader: Arc::new(LeaderLocator::new(format!("http://{}", silent.local_addr().unwrap()), None)),
        guard: ClusterGuard::default(),
        hello: v1::Hello::default(),
        runtime: IdleRuntime { turns: None },
        welcome_within: Duration::from_secs(60),
        pulse: Pulse::default(),
    };
    let stop = CancellationToken::new();
    stop.cancel();
    let kept = tokio::time::timeout(Duration::from_secs(20), line.keep(&stop)).await;
    kept.expect("it stops").unwrap();
}

#[tokio::test]
async fn a_node_whose_thread_stands_still_does_not_go_on_beating() {
    let line = GrpcSession {
        leader: Arc::new(LeaderLocator::new("http://127.0.0.1:1".into(), None)),
        guard: ClusterGuard::default(),
        hello: v1::Hello::default(),
        runtime: IdleRuntime { turns: Some(7) },
        welcome_within: Duration::from_secs(1),
        pulse: Pulse::default(),
    };
    let (facts, mut told) = mpsc::channel(64);
    // It has stood still for nearly as long as it may.
    line.pulse.turns(Some(7), Duration::ZERO);
    line.pulse.turns(Some(7), Duration::from_millis(29_970));
    let ended =
        tokio::time::timeout(Duration::from_secs(20), line.beat(&facts, Duration::from_millis(10))).await;
    let why = ended.expect("it ends").expect_err("it does not beat for ever");
    assert!(why.message().contains("stands still"), "{why}");
    drop(facts);
    let mut beats = 0;
    while told.recv().await.is_some() {
        beats += 1;
    }
    assert_eq!(beats, 2, "and not for longer than half a minute");
}
