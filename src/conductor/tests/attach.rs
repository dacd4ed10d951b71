//! Nodes over gRPC, the driver run as the service runs it.

use std::time::Duration;

use baton_router::{Backend as _, Event};
use baton_types::Sampling;
use baton_wire::v1;
use baton_wire::v1::control_client::ControlClient;
use baton_wire::v1::control_server::ControlServer;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};

use super::bench::{self, Bench};
use crate::conductor::{ControlService, Door, Driver, DriverConfig, Inbox, Question};
use crate::metrics::Metrics;
use crate::spans::Spans;

struct LiveConductor {
    inbox: Inbox,
    door: Door,
    control: String,
    server: tokio::task::JoinHandle<()>,
    driver: tokio::task::JoinHandle<()>,
}

impl LiveConductor {
    async fn start() -> Self {
        let (config, metrics) = (bench::config(), Metrics::new().unwrap());
        let with = DriverConfig { config, metrics, spans: Spans::off() };
        let (driver, inbox, door) = Driver::new(with).unwrap();
        let driver = tokio::spawn(driver.run());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = format!("http://{}", listener.local_addr().unwrap());
        let service = ControlService::hello_within(inbox.clone(), Duration::from_millis(200));
        let server = tonic::transport::Server::builder()
            .add_service(ControlServer::new(service))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self { inbox, door, control, server, driver }
    }

    /// Opens a line and says `first`, if anything.
    async fn call(&self, first: Option<v1::from_node::Message>) -> Result<Node, tonic::Status> {
        let mut client = ControlClient::connect(self.control.clone()).await.unwrap();
        let (facts, outgoing) = mpsc::channel(64);
        if let Some(message) = first {
            facts.send(v1::FromNode { message: Some(message) }).await.unwrap();
        }
        let orders = client.attach(ReceiverStream::new(outgoing)).await?.into_inner();
        let mut node = Node { facts, orders, life: v1::Welcome::default(), waiting: Default::default() };
        match node.orders.message().await?.unwrap().message {
            Some(v1::to_node::Message::Welcome(life)) => node.life = life,
            other => panic!("{other:?} instead of a welcome"),
        }
        Ok(node)
    }

    async fn join(&self, name: &str, role: &str) -> Node {
        let hello = v1::from_node::Message::Hello(bench::hello(name, role));
        self.call(Some(hello)).await.unwrap()
    }

    async fn nodes(&self) -> Vec<(String, u32)> {
        let status = self.inbox.ask(Question::Status).await.unwrap();
        status.nodes.iter().map(|n| (n.name.clone(), n.epoch)).collect()
    }

    async fn until(&self, what: &str, nodes: &[(&str, u32)]) {
        for _ in 0..300 {
            let now = self.nodes().await;
            if now.iter().map(|(name, epoch)| (name.as_str(), *epoch)).eq(nodes.iter().copied()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?}", self.nodes().await);
    }
}

struct Node {
    facts: mpsc::Sender<v1::FromNode>,
    orders: tonic::Streaming<v1::ToNode>,
    life: v1::Welcome,
    waiting: std::collections::VecDeque<v1::Order>,
}

impl Node {
    async fn send(&self, message: v1::from_node::Message) {
        self.facts.send(v1::FromNode { message: Some(message) }).await.unwrap();
    }

    async fn send_facts(&self, about: &v1::Order, facts: Vec<v1::fact::Fact>) {
        let fact = |fact| v1::Fact { request: about.request, attempt: about.attempt, fact: Some(fact) };
        let facts = v1::Facts { facts: facts.into_iter().map(fact).collect() };
        self.send(v1::from_node::Message::Facts(facts)).await;
    }

    /// The next order; `None` when the stream has ended.
    async fn order(&mut self) -> Option<v1::Order> {
        while self.waiting.is_empty() {
            let next = tokio::time::timeout(Duration::from_secs(10), self.orders.message()).await;
            match next.expect("an order in time").ok()??.message {
                Some(v1::to_node::Message::Orders(orders)) => self.waiting.extend(orders.orders),
                other => panic!("{other:?} where orders belong"),
            }
        }
        self.waiting.pop_front()
    }
}

/// Serves one request of two tokens on a pair.
async fn serve(prefill: &mut Node, decode: &mut Node, tokens: [u32; 2]) {
    let order = prefill.order().await.unwrap();
    assert!(matches!(&order.order, Some(v1::order::Order::Prefill(_))), "{order:?}");
    prefill.send_facts(&order, vec![bench::fact_token(0, tokens[0], 0), bench::prefilled()]).await;
    let expect = decode.order().await.unwrap();
    assert!(matches!(&expect.order, Some(v1::order::Order::Expect(_))), "{expect:?}");
    decode.send_facts(&expect, vec![v1::fact::Fact::Handoff(true)]).await;
    let start = decode.order().await.unwrap();
    let Some(v1::order::Order::StartDecode(start)) = start.order else { panic!("{start:?}") };
    assert_eq!(start.answer, [tokens[0]]);
    decode.send_facts(&expect, vec![bench::fact_token(1, tokens[1], 2)]).await;
}

#[tokio::test]
async fn a_pair_attaches_passes_the_canary_serves_and_leaves() {
    let live = LiveConductor::start().await;
    let (mut prefill, mut decode) = (live.join("p0", "prefill").await, live.join("d0", "decode").await);
    assert_eq!((prefill.life.instance, decode.life.instance), (0, 1));
    assert_eq!(prefill.life.heartbeat_us, 100_000);
    serve(&mut prefill, &mut decode, [70, 71]).await;
    for _ in 0..200 {
        if live.door.readiness().ready {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    let mut ticket = live.door.submit(Bench::submission("r", sampling));
    serve(&mut prefill, &mut decode, [8, 9]).await;
    let mut tokens = Vec::new();
    while let Some(event) = ticket.events.recv().await {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::Finished { .. } => break,
            Event::Admitted { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(tokens, [8, 9]);
    drop(prefill);
    live.until("the node that left", &[("d0", 1)]).await;
    let again = live.join("p0", "prefill").await;
    assert_eq!((again.life.instance, again.life.epoch), (0, 2), "the same instance in a new life");
}

#[tokio::test]
async fn who_does_not_say_hello_first_is_turned_away() {
    let live = LiveConductor::start().await;
    let silent = live.call(None).await.err().unwrap();
    assert_eq!(silent.code(), tonic::Code::DeadlineExceeded);
    assert!(silent.message().contains("did not say Hello"), "{silent}");
    let beat = v1::from_node::Message::Heartbeat(v1::Heartbeat::default());
    let beating = live.call(Some(beat)).await.err().unwrap();
    assert_eq!(beating.code(), tonic::Code::InvalidArgument);
    let mut old = bench::hello("p0", "prefill");
    old.protocol_version = 0;
    let refused = live.call(Some(v1::from_node::Message::Hello(old))).await.err().unwrap();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("control protocol 0"), "{refused}");
    assert_eq!(live.nodes().await, []);
}

/// A first message of protocol 6, which sent the role and the cost profile as text.
#[derive(Clone, PartialEq, prost::Message)]
struct Protocol6Message {
    #[prost(message, optional, tag = "1")]
    hello: Option<Protocol6Hello>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Protocol6Hello {
    #[prost(uint32, tag = "1")]
    protocol_version: u32,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    role: String,
    #[prost(string, tag = "13")]
    profile: String,
}

#[tokio::test]
async fn a_node_of_protocol_6_is_refused_with_both_versions() {
    let live = LiveConductor::start().await;
    let text = |text: &str| text.to_owned();
    let (role, profile) = (text("prefill"), text("name = \"scripted\"\n"));
    let old = Protocol6Hello { protocol_version: 6, name: text("p0"), role, profile };
    let sent = Protocol6Message { hello: Some(old) }.encode_to_vec();
    let received = v1::FromNode::decode(&sent[..]).expect("the conductor can decode it");
    let refused = live.call(received.message).await.err().unwrap();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    let words = format!("node p0 speaks control protocol 6, this conductor {}", baton_wire::PROTOCOL_VERSION);
    assert!(refused.message().starts_with(&words), "{refused}");
    // A conductor of protocol 6 can decode the Hello of this version, too, and refuses it by its version.
    let sent = v1::FromNode { message: Some(v1::from_node::Message::Hello(bench::hello("p0", "prefill"))) };
    let received = Protocol6Message::decode(&sent.encode_to_vec()[..]).expect("it can decode ours");
    let hello = received.hello.expect("a Hello");
    assert_eq!((hello.name.as_str(), hello.protocol_version), ("p0", baton_wire::PROTOCOL_VERSION));
}

#[tokio::test]
async fn a_second_hello_ends_the_life() {
    let live = LiveConductor::start().await;
    let mut node = live.join("p0", "prefill").await;
    node.send(v1::from_node::Message::Hello(bench::hello("p0", "prefill"))).await;
    live.until("a second Hello", &[]).await;
    assert!(node.order().await.is_none(), "its stream is ended");
}

#[tokio::test]
async fn a_name_that_attaches_again_ends_its_former_life() {
    let live = LiveConductor::start().await;
    let mut first = live.join("p0", "prefill").await;
    let second = live.join("p0", "prefill").await;
    assert_eq!((first.life.epoch, second.life.epoch), (1, 2));
    assert!(first.order().await.is_none());
    // The former one's end is no news of the present one.
    drop(first);
    tokio::time::sleep(Duration::from_millis(50)).await;
    live.until("the second life", &[("p0", 2)]).await;
}

#[tokio::test]
async fn a_silent_node_is_lost_and_its_stream_ended_while_a_beating_one_stays() {
    let live = LiveConductor::start().await;
    let mut silent = live.join("p0", "prefill").await;
    let beating = live.join("p1", "prefill").await;
    for _ in 0..25 {
        let beat = v1::Heartbeat { load: Some(v1::NodeLoad::default()) };
        beating.send(v1::from_node::Message::Heartbeat(beat)).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    live.until("silence", &[("p1", 1)]).await;
    assert!(silent.order().await.is_none());
}

#[tokio::test]
async fn a_conductor_ends_when_nobody_can_reach_it_any_more() {
    let live = LiveConductor::start().await;
    let node = live.join("p0", "prefill").await;
    drop(node);
    live.until("the node that left", &[]).await;
    live.server.abort();
    let _ = live.server.await;
    drop((live.inbox, live.door));
    tokio::time::timeout(Duration::from_secs(5), live.driver).await.expect("it ends").unwrap();
}
