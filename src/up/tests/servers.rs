//! Servers that a service drives by itself: they come and go with a list.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_membership::{Directory, FileSource, Member, Source};
use baton_remote::testing::{Fabric, FakeConnector, FakeRole, FakeVllm, VllmSpec, toy_answer};
use baton_remote::{EngineRole, HandoffWay, RemoteSettings};
use baton_types::{DecodeCost, Finish, PrefillCost, Role, Sampling};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::cluster::{Cluster, listen, small_model};
use crate::conductor::Lead;
use crate::config::Config;
use crate::up::NodeFactory;
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
    let text = servers.iter().map(one).collect::<String>();
    write(path, if text.is_empty() { "member = []" } else { &text });
}

/// Writes a list as it is given, in one piece.
fn write(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(beside, path).unwrap();
}

/// A cluster that drives the servers of a list.
struct Scene {
    cluster: Cluster,
    path: PathBuf,
    made: MadeNodes,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    _place: TempDir,
}

/// Of what nodes were made, also of those that were only compared: address and zone.
#[derive(Clone, Default)]
struct MadeNodes(Arc<Mutex<Vec<String>>>);

impl MadeNodes {
    fn note(&self, member: &Member) {
        let zone = member.labels.get("zone").map_or("", String::as_str);
        self.0.lock().push(format!("{} {zone}", member.addresses[0]));
    }

    /// Waits until there was one whose words have this.
    async fn of(&self, words: &str) {
        for _ in 0..4_000 {
            if self.0.lock().iter().any(|made| made.contains(words)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("nothing was made of {words}: {:?}", self.0.lock());
    }
}

impl Scene {
    /// One that drives these, and gives who leaves so long.
    async fn of(servers: &[(&str, &str)], drain: Duration) -> Self {
        Self::tuned(servers, drain, |_| {}).await
    }

    async fn tuned(servers: &[(&str, &str)], drain: Duration, tune: impl FnOnce(&mut Config)) -> Self {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("servers.toml");
        list(&path, servers);
        let made = MadeNodes::default();
        let (cluster, stop, task) = driving((&path, made.clone()), drain, tune).await;
        Self { cluster, path, made, stop, task, _place: place }
    }

    /// Lists others.
    fn list(&self, servers: &[(&str, &str)]) {
        list(&self.path, servers);
    }

    /// Lets go of all servers, within a bound; the cluster is left.
    async fn let_go(self) -> Cluster {
        self.stop.cancel();
        tokio::time::timeout(Duration::from_secs(60), self.task).await.expect("it ends").unwrap();
        self.cluster
    }

    async fn end(self) {
        self.let_go().await.stop().await;
    }
}

/// A cluster that drives the servers of the list at `path`; of some names something else or nothing is made.
async fn driving(
    (path, made): (&Path, MadeNodes),
    drain: Duration,
    tune: impl FnOnce(&mut Config),
) -> (Cluster, CancellationToken, tokio::task::JoinHandle<()>) {
    let mut cluster = Cluster::start("", &small_model(Default::default()), |config| {
        tune(config);
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
    let making: NodeFactory = Arc::new(move |member: &Member| {
        made.note(member);
        if member.name == "wrong" {
            return Err("nothing can be made of it".to_owned());
        }
        if member.name == "panics" {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        if member.name == "another" {
            // Another kind of engine shares no KV with the others.
            let engine = RemoteSettings::new(baton_remote::Dialect::Plain, &member.addresses[0]);
            let name = member.name.clone();
            let (capacity_tokens, max_model_tokens) = (Some(10_000), Some(4_096));
            let node = crate::node::RemoteNode { name, engine, ..template.clone() };
            return Ok(crate::node::RemoteNode { capacity_tokens, max_model_tokens, ..node });
        }
        let mut engine = RemoteSettings::new(baton_remote::Dialect::Vllm, &member.addresses[0]);
        let role = member.role.instance().expect("no conductor is listed");
        if role != Role::Both {
            engine = engine.with_handoff(HandoffWay::Nixl);
            let prefills = role == Role::Prefill;
            engine.role = Some(if prefills { EngineRole::Prefill } else { EngineRole::Decode });
        }
        let (name, revision) = (member.name.clone(), member.labels.get("revision").cloned());
        let mut node = crate::node::RemoteNode { name, role, engine, revision, ..template.clone() };
        if role != Role::Both {
            // Work costs something, so that it is spread.
            let knots_us = vec![100.0, 300_100.0];
            node.profile.prefill =
                PrefillCost { knots_tokens: vec![0, 1000], knots_us, attention_ps_per_pair: 0.0 };
            let (batches, base_us, context_ps_per_token) = (vec![1, 64], vec![3e3, 3e4], vec![0.0, 0.0]);
            node.profile.decode = DecodeCost { batches, base_us, context_ps_per_token };
        }
        Ok(node)
    });
    let stop = CancellationToken::new();
    let servers = Servers::new(directory, making, (cluster.inbox.clone(), Lead::alone()), drain)
        .retrying(Duration::from_millis(50));
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

/// Waits until its only node is in this epoch and state.
async fn stands(cluster: &Cluster, epoch: u32, state: &str) {
    for _ in 0..4_000 {
        let status = cluster.status().await;
        if status.nodes.first().is_some_and(|node| (node.epoch, node.state.as_str()) == (epoch, state)) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it is not {state} in epoch {epoch}: {:?}", cluster.status().await.nodes);
}

/// Waits until the conductor says why this stays outside.
async fn outside(cluster: &Cluster, name: &str) {
    for _ in 0..4_000 {
        if cluster.inbox.outside().contains_key(name) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{name} is not outside: {:?}", cluster.inbox.outside());
}

/// Waits until a server was asked for more completions than `before`.
async fn asked_more(server: &FakeVllm, before: usize) {
    for _ in 0..4_000 {
        if asked(server) > before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it was asked for {before} completions and no more");
}

async fn answers(cluster: &Cluster, tokens: u32) {
    let answer = listen(cluster.submit(&PROMPT, greedy(tokens))).await;
    assert_eq!((answer.finish, answer.trouble), (Some(Finish::Length), None));
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(tokens)).0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_come_and_go_with_the_list() {
    let (a, b) = (fake(30).await, fake(0).await);
    let scene = Scene::of(&[("v0", &a.url()), ("wrong", "127.0.0.1:1")], Duration::from_secs(20)).await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    attached(cluster, &["v0"]).await;
    // It is in the middle of an answer when it leaves the list: that is given to the end.
    let before = asked(&a);
    let running = listen(cluster.submit(&PROMPT, greedy(40)));
    let leaving = async {
        asked_more(&a, before).await;
        scene.list(&[("v1", &b.url())]);
        attached(cluster, &["v1"]).await;
    };
    let (answer, ()) = tokio::join!(running, leaving);
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(40)).0, "{:?}", answer.trouble);
    let before = a.received().len();
    for _ in 0..10 {
        answers(cluster, 3).await;
    }
    assert_eq!(a.received().len(), before, "who is not on the list gets nothing");
    // Back under its old name, elsewhere.
    scene.list(&[("v1", &b.url()), ("v0", &b.url())]);
    attached(cluster, &["v0", "v1"]).await;
    answers(cluster, 3).await;
    // An unreadable list changes nothing.
    std::fs::write(&scene.path, "member = 3").unwrap();
    outside(cluster, "list of servers").await;
    attached(cluster, &["v0", "v1"]).await;
    cluster.quiet().await;
    let cluster = scene.let_go().await;
    attached(&cluster, &[]).await;
    assert_eq!((a.violations().len(), b.violations().len()), (0, 0));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_does_not_finish_in_time_is_let_go_and_its_answers_go_on_elsewhere() {
    let (slow, other) = (fake(50).await, fake(0).await);
    let scene = Scene::of(&[("v0", &slow.url())], Duration::from_millis(300)).await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    let before = asked(&slow);
    let running = listen(cluster.submit(&PROMPT, greedy(60)));
    let leaving = async {
        asked_more(&slow, before).await;
        scene.list(&[("v0", &slow.url()), ("v1", &other.url())]);
        attached(cluster, &["v0", "v1"]).await;
        scene.list(&[("v1", &other.url())]);
        attached(cluster, &["v1"]).await;
    };
    let (answer, ()) = tokio::join!(running, leaving);
    assert_eq!((answer.finish, answer.trouble), (Some(Finish::Length), None));
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(60)).0, "no token is lost or given twice");
    cluster.quiet().await;
    scene.end().await;
}

/// How many completions a server was asked for.
fn asked(server: &FakeVllm) -> usize {
    server.received().iter().filter(|call| call.path.contains("completions")).count()
}

/// Its last heartbeat reported no work, but the work it got since counts all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_has_just_got_its_first_request_finishes_it() {
    let only = fake(50).await;
    let scene = Scene::tuned(&[("v0", &only.url())], Duration::from_secs(30), |config| {
        (config.service.heartbeat_us, config.service.lost_after_us) = (20_000_000, 60_000_000);
    })
    .await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    let before = asked(&only);
    let running = listen(cluster.submit(&PROMPT, greedy(40)));
    let leaving = async {
        asked_more(&only, before).await;
        scene.list(&[]);
    };
    let (answer, ()) = tokio::join!(running, leaving);
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(40)).0, "{:?}", answer.trouble);
    assert_eq!(asked(&only), before + 1, "it was not broken off");
    attached(cluster, &[]).await;
    scene.end().await;
}

/// A server that is listed again while it drains continues at once, however often that happens. The end waits for no
/// drain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_flaps_takes_nobody_out_of_service() {
    let only = fake(100).await;
    let scene = Scene::of(&[("v0", &only.url())], Duration::from_secs(3_600)).await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    let before = asked(&only);
    let mut long = Box::pin(listen(cluster.submit(&PROMPT, greedy(200))));
    let flapping = async {
        asked_more(&only, before).await;
        for _ in 0..10 {
            scene.list(&[]);
            stands(cluster, 1, "draining").await;
            scene.list(&[("v0", &only.url())]);
            stands(cluster, 1, "serving").await;
        }
        // The long answer is still under way.
        answers(cluster, 2).await;
        let status = cluster.status().await;
        assert_eq!((status.nodes[0].epoch, status.live_requests), (1, 1), "it is the same life");
        // Gone and wanted in another form: what comes waits for what leaves, the end for neither.
        scene.list(&[]);
        stands(cluster, 1, "draining").await;
        scene.list(&[("v0", &only.url().replace("127.0.0.1", "localhost"))]);
        scene.made.of("localhost").await;
    };
    tokio::select! {
        answer = &mut long => panic!("it was broken off: {answer:?}"),
        () = flapping => {}
    }
    let cluster = tokio::select! {
        answer = &mut long => panic!("it was broken off: {answer:?}"),
        // The end waits for no drain.
        cluster = scene.let_go() => cluster,
    };
    drop(long);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_panics_or_is_refused_disturbs_nobody_and_is_tried_again() {
    let (ours, other) = (fake(0).await, fake(0).await);
    let scene = Scene::of(&[("v0", &ours.url())], Duration::from_secs(20)).await;
    let cluster = &scene.cluster;
    attached(cluster, &["v0"]).await;
    scene.list(&[("v0", &ours.url()), ("panics", &ours.url()), ("another", &other.url())]);
    cluster.ready().await;
    for name in ["panics", "another"] {
        outside(cluster, name).await;
    }
    for _ in 0..20 {
        answers(cluster, 2).await;
    }
    attached(cluster, &["v0"]).await;
    // The way is free as soon as nobody is left to share KV with.
    scene.list(&[("another", &other.url()), ("panics", &ours.url())]);
    attached(cluster, &["another"]).await;
    cluster.ready().await;
    answers(cluster, 2).await;
    scene.end().await;
}

/// One dead at the start, and as many as a large cluster has: heeding them holds nobody up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_dead_servers_hold_up_nobody() {
    let only = fake(0).await;
    // A port that is free for the moment.
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let names: Vec<String> = (0..1_000).map(|at| format!("d{at:03}")).collect();
    let mut all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), dead.as_str())).collect();
    let url = only.url();
    all.push(("v0", &url));
    let scene = Scene::of(&all, Duration::from_secs(20)).await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    answers(cluster, 3).await;
    scene.list(&[("v0", &url)]);
    answers(cluster, 3).await;
    scene.end().await;
}

/// Labels that no node reads, addresses behind the one that is called: nothing of it takes a server out of service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_listed_in_other_words_goes_on() {
    let only = fake(50).await;
    let scene = Scene::of(&[("v0", &only.url())], Duration::from_secs(3_600)).await;
    let cluster = &scene.cluster;
    cluster.ready().await;
    let in_words = |zone: usize| {
        let other = if zone.is_multiple_of(2) { "" } else { ", \"127.0.0.1:9\"" };
        let addresses = format!("addresses = [\"{}\"{other}]", only.url());
        let labels = format!("labels = {{ zone = \"z{zone}\" }}");
        write(&scene.path, &format!("[[member]]\nname = \"v0\"\nrole = \"both\"\n{addresses}\n{labels}\n"));
    };
    let before = asked(&only);
    let running = listen(cluster.submit(&PROMPT, greedy(60)));
    let changing = async {
        asked_more(&only, before).await;
        for zone in 0..8 {
            in_words(zone);
            scene.made.of(&format!("z{zone}")).await;
            stands(cluster, 1, "serving").await;
        }
        assert_eq!(asked(&only), before + 1, "it was not broken off");
        // It leaves, and comes back in words that it never had.
        scene.list(&[]);
        stands(cluster, 1, "draining").await;
        in_words(9);
        stands(cluster, 1, "serving").await;
    };
    let (answer, ()) = tokio::join!(running, changing);
    assert_eq!(answer.tokens, toy_answer(&PROMPT, &greedy(60)).0, "{:?}", answer.trouble);
    // Called elsewhere it is another.
    scene.list(&[("v0", &only.url().replace("127.0.0.1", "localhost"))]);
    stands(cluster, 2, "serving").await;
    scene.end().await;
}

/// A prefill and a decode server that reach each other, and nobody else.
struct Pair {
    prefill: FakeVllm,
    decode: FakeVllm,
}

impl Pair {
    /// Of a fabric: KV does not go from one to another.
    async fn within(fabric: &Fabric) -> Self {
        let start = async |role| {
            let spec = VllmSpec::new(role, FakeConnector::Nixl);
            let (token_time, prefill_time) = (Duration::from_millis(3), Duration::from_millis(20));
            let spec = VllmSpec { token_time, prefill_time, blocks: 4096, ..spec };
            FakeVllm::start(spec, fabric).await.unwrap()
        };
        Self { prefill: start(FakeRole::Prefill).await, decode: start(FakeRole::Decode).await }
    }

    /// As the list has it.
    fn words(&self, number: usize, revision: &str) -> String {
        let one = |name: &str, role: &str, url: String| {
            format!(
                "[[member]]\nname = \"{name}{number}\"\nrole = \"{role}\"\naddresses = [\"{url}\"]\n\
                 labels = {{ revision = \"{revision}\" }}\n"
            )
        };
        one("p", "prefill", self.prefill.url()) + &one("d", "decode", self.decode.url())
    }

    fn asked(&self) -> [usize; 2] {
        [asked(&self.prefill), asked(&self.decode)]
    }

    fn violations(&self) -> Vec<String> {
        [self.prefill.violations(), self.decode.violations()].concat()
    }
}

/// Asks for one answer after the other, each of which must be whole and right; how many there were.
async fn ask_until(cluster: &Cluster, number: u32, over: &AtomicBool) -> u32 {
    let mut count = 0;
    while !over.load(Ordering::Relaxed) {
        let prompt: Vec<u32> = (0..70).map(|at| 5 + (number * 31 + count * 7 + at) % 90).collect();
        let answer = listen(cluster.submit(&prompt, greedy(12))).await;
        let right = toy_answer(&prompt, &greedy(12));
        assert_eq!((answer.trouble, answer.finish), (None, Some(right.1)), "client {number}, answer {count}");
        assert_eq!(answer.tokens, right.0, "client {number}, answer {count}");
        count += 1;
    }
    count
}

/// KV of two revisions does not go together: two pairs are replaced one after the other while clients ask, and nobody
/// notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_are_upgraded_one_after_the_other_under_load() {
    let (before, after) = (Fabric::new(), Fabric::new());
    let old = [Pair::within(&before).await, Pair::within(&before).await];
    let new = [Pair::within(&after).await, Pair::within(&after).await];
    let scene = Scene::of(&[], Duration::from_secs(60)).await;
    let cluster = &scene.cluster;
    let listed = |pairs: &[String]| write(&scene.path, &pairs.concat());
    listed(&[old[0].words(0, "a"), old[1].words(1, "a")]);
    attached(cluster, &["d0", "d1", "p0", "p1"]).await;
    cluster.ready().await;
    let over = AtomicBool::new(false);
    let clients = futures_util::future::join_all((0..6).map(|number| ask_until(cluster, number, &over)));
    let more = async |pair: &Pair| {
        let asked = pair.asked();
        for _ in 0..800 {
            let now = pair.asked();
            if now[0] > asked[0] + 3 && now[1] > asked[1] + 3 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("a pair gets nothing: {asked:?}, {:?}", cluster.status().await.nodes);
    };
    let upgrade = async {
        more(&old[0]).await;
        // Both legs of a pair leave together, and come back together.
        listed(&[old[1].words(1, "a")]);
        attached(cluster, &["d1", "p1"]).await;
        listed(&[new[0].words(0, "b"), old[1].words(1, "a")]);
        attached(cluster, &["d0", "d1", "p0", "p1"]).await;
        // Old and new serve side by side, each with its own.
        more(&new[0]).await;
        more(&old[1]).await;
        let builds: Vec<_> = cluster.status().await.nodes.into_iter().map(|n| (n.name, n.build)).collect();
        for (name, build) in builds {
            assert!(build.ends_with(if name.ends_with('0') { " b" } else { " a" }), "{name}: {build}");
        }
        listed(&[new[0].words(0, "b")]);
        attached(cluster, &["d0", "p0"]).await;
        let left = [old[0].asked(), old[1].asked()];
        listed(&[new[0].words(0, "b"), new[1].words(1, "b")]);
        attached(cluster, &["d0", "d1", "p0", "p1"]).await;
        more(&new[1]).await;
        assert_eq!([old[0].asked(), old[1].asked()], left, "nothing goes to who has left");
        over.store(true, Ordering::Relaxed);
    };
    let (answers, ()) = tokio::join!(clients, upgrade);
    assert!(answers.iter().all(|count| *count > 10), "{answers:?}");
    cluster.quiet().await;
    for pair in old.iter().chain(&new) {
        assert_eq!(pair.violations(), Vec::<String>::new());
    }
    scene.end().await;
}
