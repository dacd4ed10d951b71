//! Servers that a service drives by itself: they come and go with a list.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_membership::{Directory, FileSource, Member, Source};
use baton_remote::RemoteSettings;
use baton_remote::testing::{Fabric, FakeConnector, FakeRole, FakeVllm, VllmSpec, toy_answer};
use baton_types::{Finish, Role, Sampling};
use tokio_util::sync::CancellationToken;

use super::cluster::{Cluster, listen, small_model};
use crate::conductor::Lead;
use crate::up::Making;
use crate::up::servers::Servers;

const PROMPT: [u32; 4] = [5, 6, 7, 8];

fn greedy(max_tokens: u32) -> Sampling {
    Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() }
}

async fn fake(token_ms: u64) -> FakeVllm {
    let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
    let spec = VllmSpec { token_time: Duration::from_millis(token_ms), ..spec };
    FakeVllm::start(spec, &Fabric::new()).await.unwrap()
}

/// Writes a list of names and addresses, as a whole.
fn list(path: &Path, servers: &[(&str, &str)]) {
    let one = |(name, url): &(&str, &str)| {
        format!("[[member]]\nname = \"{name}\"\nrole = \"both\"\naddresses = [\"{url}\"]\n")
    };
    let beside = path.with_extension("new");
    std::fs::write(&beside, servers.iter().map(one).collect::<String>()).unwrap();
    std::fs::rename(beside, path).unwrap();
}

/// A cluster that drives the servers of the list at `path`; of one named `wrong` nothing can be made.
async fn driving(path: &Path, drain: Duration) -> (Cluster, CancellationToken, tokio::task::JoinHandle<()>) {
    let mut cluster = Cluster::start("", &small_model(Default::default()), |config| {
        config.scheduler.fetch = false;
        config.scheduler.classes[0].ttft_us = 60_000_000;
        config.scheduler.classes[0].tbt_us = 10_000_000;
    })
    .await;
    cluster.body = "{}".into();
    let source = FileSource { every_us: 20_000, ..FileSource::new(path) };
    let directory = Directory::start(Source::File(source)).unwrap();
    let example = RemoteSettings::new(baton_remote::Dialect::Vllm, "http://127.0.0.1:1");
    let template = cluster.remote("", Role::Both, example, None);
    let making: Making = Arc::new(move |member: &Member| {
        if member.name == "wrong" {
            return Err("nothing can be made of it".to_owned());
        }
        let engine = RemoteSettings::new(baton_remote::Dialect::Vllm, &member.addresses[0]);
        Ok(crate::node::RemoteNode { name: member.name.clone(), engine, ..template.clone() })
    });
    let stop = CancellationToken::new();
    let servers = Servers::new(directory, making, (cluster.inbox.clone(), Lead::alone()), drain);
    let task = tokio::spawn(servers.follow(stop.clone()));
    (cluster, stop, task)
}

/// Waits until just these nodes are attached.
async fn attached(cluster: &Cluster, names: &[&str]) {
    let mut last = Vec::new();
    for _ in 0..400 {
        last = cluster.status().await.nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>();
        last.sort();
        if last == names {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("{last:?} are attached, not {names:?}");
}

async fn answers(cluster: &Cluster, tokens: u32) {
    let answer = listen(cluster.submit(&PROMPT, greedy(tokens))).await;
    assert_eq!((answer.finish, answer.trouble), (Some(Finish::Length), None));
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(tokens)).0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_come_and_go_with_the_list() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("servers.toml");
    let (a, b) = (fake(30).await, fake(0).await);
    list(&path, &[("v0", &a.url()), ("wrong", "127.0.0.1:1")]);
    let (cluster, stop, task) = driving(&path, Duration::from_secs(20)).await;
    cluster.ready().await;
    attached(&cluster, &["v0"]).await;
    // It is in the middle of an answer when it leaves the list: that is given to the end.
    let running = listen(cluster.submit(&PROMPT, greedy(40)));
    let leaving = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        list(&path, &[("v1", &b.url())]);
        attached(&cluster, &["v1"]).await;
    };
    let (answer, ()) = tokio::join!(running, leaving);
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(40)).0, "{:?}", answer.trouble);
    let before = a.received().len();
    for _ in 0..10 {
        answers(&cluster, 3).await;
    }
    assert_eq!(a.received().len(), before, "who is not on the list gets nothing");
    // Back under its old name, elsewhere.
    list(&path, &[("v1", &b.url()), ("v0", &b.url())]);
    attached(&cluster, &["v0", "v1"]).await;
    answers(&cluster, 3).await;
    // What cannot be read changes nothing.
    std::fs::write(&path, "member = 3").unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    attached(&cluster, &["v0", "v1"]).await;
    cluster.quiet().await;
    stop.cancel();
    task.await.unwrap();
    attached(&cluster, &[]).await;
    assert_eq!((a.violations().len(), b.violations().len()), (0, 0));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_does_not_finish_in_time_is_let_go_and_its_answers_go_on_elsewhere() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("servers.toml");
    let (slow, other) = (fake(50).await, fake(0).await);
    list(&path, &[("v0", &slow.url())]);
    let (cluster, stop, task) = driving(&path, Duration::from_millis(300)).await;
    cluster.ready().await;
    let running = listen(cluster.submit(&PROMPT, greedy(60)));
    let leaving = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        list(&path, &[("v0", &slow.url()), ("v1", &other.url())]);
        attached(&cluster, &["v0", "v1"]).await;
        list(&path, &[("v1", &other.url())]);
        attached(&cluster, &["v1"]).await;
    };
    let (answer, ()) = tokio::join!(running, leaving);
    assert_eq!((answer.finish, answer.trouble), (Some(Finish::Length), None));
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(60)).0, "no token is lost or given twice");
    cluster.quiet().await;
    stop.cancel();
    task.await.unwrap();
    cluster.stop().await;
}
