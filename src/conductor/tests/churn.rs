//! Names that never stop coming: who left for good is forgotten, and nothing of it is taken for another's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use baton_types::{BlockHash, CacheChange, Epoch, InstanceId, Tier};
use baton_wire::v1;

use super::bench::{Bench, of};
use crate::conductor::Question;
use crate::conductor::inbox::{Loss, Message};
use crate::conductor::instance_ids::{MAX_INSTANCES, REMEMBERED_US};
use crate::conductor::journal::replay;

/// Nobody is late, whatever the clock does.
fn patient(config: &mut crate::config::Config) {
    (config.service.lost_after_us, config.service.stage_floor_us) = (1 << 50, 1 << 50);
}

impl Bench {
    fn pass_us(&self, us: u64) {
        self.clock_us.fetch_add(us, Ordering::Relaxed);
    }

    async fn beat(&mut self, life: &v1::Welcome) {
        let (instance, epoch) = of(life);
        let load = Box::new(v1::NodeLoad { resyncs: 1, ..v1::NodeLoad::default() });
        self.inbox.send(Message::Beat { instance, epoch, load }).await;
        self.pump().await;
    }

    async fn explained(&mut self, name: &str) -> String {
        let (reply, mut answer) = tokio::sync::oneshot::channel();
        self.inbox.send(Message::Ask(Question::Explain(name.to_owned(), reply))).await;
        self.pump().await;
        answer.try_recv().unwrap().unwrap()
    }

    /// Number of nodes that the metrics page lists.
    fn counted(&self) -> usize {
        let page = self.driver.metrics.page();
        page.lines().filter(|line| line.starts_with("baton_cache_resyncs_total{node=")).count()
    }
}

fn stored(hash: u64) -> v1::fact::Fact {
    let change = CacheChange::Stored { parent: None, hashes: vec![BlockHash(hash)], tier: Tier::Hbm };
    v1::fact::Fact::Cache(v1::CacheChange::from(&change))
}

#[tokio::test]
async fn twenty_thousand_names_pass_through_one_conductor_and_its_journal_replays() {
    let place = tempfile::tempdir().unwrap();
    let mut bench = Bench::tuned(&["p0", "d0"], |config| {
        patient(config);
        config.service.journal = place.path().display().to_string();
    })
    .await;
    let mut here: VecDeque<(String, v1::Welcome)> = VecDeque::new();
    let (mut lives, mut most) = (BTreeMap::<u32, u32>::new(), 0);
    let mut first = None;
    for at in 0..20_000_u32 {
        // Most of them pass in half a day, the last ones in no time.
        let quick = at >= 15_500;
        bench.pass_us(if quick { 0 } else { 3_000_000 });
        let name = format!("{}-{at}", if at % 2 == 0 { "p" } else { "d" });
        let life = bench.join(&name).await;
        let before = lives.insert(life.instance, life.epoch);
        assert!(before < Some(life.epoch), "{name} has the life of another: {life:?}");
        first.get_or_insert_with(|| life.clone());
        here.push_back((name, life.clone()));
        if at % 100 == 0 {
            bench.beat(&life).await;
        }
        if at % 1_000 == 999 {
            let request = format!("r{at}");
            bench.submit(&request, 2).await;
            bench.serve(&request).await;
        }
        if here.len() > 4 {
            let (gone, _) = here.pop_front().unwrap();
            bench.kill(&gone).await;
        }
        most = lives.len();
        assert!(quick || most <= 2 + 4 + 202, "{most} numbers at name {at}");
    }
    assert!(most > 1_000 && most <= MAX_INSTANCES, "{most} numbers");
    assert!(bench.driver.core.snapshot().instances.len() <= MAX_INSTANCES);
    // A late message from the very first node must not affect the node that has its number now.
    let first = first.unwrap();
    assert!(lives[&first.instance] > first.epoch, "its number was used again");
    let before = bench.total("stale_messages");
    bench.send_facts_in(&first, (0, 0), vec![stored(7)]).await;
    bench.beat(&first).await;
    let (instance, epoch) = of(&first);
    bench.inbox.send(Message::Gone { instance, epoch, loss: Loss::Left("late".into()) }).await;
    bench.pump().await;
    assert_eq!(bench.total("stale_messages"), before + 2);
    assert_eq!(bench.driver.core.index().held_blocks(instance), 0);
    bench.quiet();
    // When they have been gone for long, nothing is left of them.
    let (name, life) = here[0].clone();
    bench.beat(&life).await;
    assert!(bench.counted() > 10, "those who left a moment ago are told of");
    bench.pass_us(REMEMBERED_US + 1);
    bench.pump().await;
    assert_eq!(bench.status().nodes.len(), 6);
    assert_eq!(bench.counted(), 1);
    let page = bench.driver.metrics.page();
    let told = page.lines().filter(|line| line.contains("{node=\""));
    // Gauges are of the nodes that are attached, counts of those that have any.
    let attached: Vec<String> = bench.status().nodes.into_iter().map(|node| node.name).collect();
    let named = |line: &str, name: &str| line.contains(&format!("\"{name}\""));
    let is_gauge =
        |line: &str| line.starts_with("baton_node_") || line.contains("role=") || line.contains("tier=");
    let known = |line: &str| match is_gauge(line) {
        true => attached.iter().any(|name| named(line, name)),
        false => ["p0", "d0", &name].iter().any(|name| named(line, name)),
    };
    told.for_each(|line| assert!(known(line), "{line}"));
    let file = place.path().join("journal-000001.jsonl");
    drop(bench);
    let replayed = replay(std::io::BufReader::new(std::fs::File::open(file).unwrap())).unwrap();
    assert!(replayed.steps > 40_000 && replayed.lost_steps == 0, "{replayed:?}");
}

#[tokio::test]
async fn a_number_of_which_a_request_speaks_is_nobody_elses() {
    let mut bench = Bench::tuned(&["p0", "d0"], patient).await;
    bench.begin_decode("r", 9).await;
    bench.do_decode("r", 3).await;
    let old = bench.lines["p0"].life.clone();
    bench.beat(&old).await;
    bench.kill("p0").await;
    // Its decode goes on, and it names its prefill leg.
    bench.pass_us(2 * REMEMBERED_US);
    bench.pump().await;
    assert_eq!(bench.counted(), 1, "it is remembered");
    let new = bench.join("p1").await;
    assert_ne!(new.instance, old.instance);
    assert!(bench.explained("r").await.contains("\"p0\""), "who is gone and remembered has its name");
    bench.serve("r").await;
    bench.pass_us(2_000_000);
    bench.pump().await;
    assert_eq!(bench.counted(), 0, "it is forgotten with what was counted for it");
    assert!(bench.explained("r").await.contains(&format!("\"#{}\"", old.instance)));
    let newer = bench.join("p2").await;
    assert_eq!((newer.instance, newer.epoch), (old.instance, old.epoch + 1));
    assert!(!bench.explained("r").await.contains("p2"), "what was decided before is not said of it");
    bench.drop_canaries().await;
    // Back under its old name, it is another instance, in a life above all of its own.
    let back = bench.join("p0").await;
    assert!(back.instance != old.instance && back.epoch > old.epoch, "{back:?}");
    bench.quiet();
}

#[tokio::test]
async fn where_all_are_here_one_more_is_refused_in_words() {
    let mut bench = Bench::tuned(&[], patient).await;
    // Straight into the books: what 4,096 joins cost is not the point.
    for at in 0..MAX_INSTANCES {
        let hello = super::bench::hello(&format!("p{at}"), "prefill");
        let checked = bench.driver.fleet.check(&hello, 16).unwrap();
        let (orders, _) = tokio::sync::mpsc::channel(1);
        let spec = bench.driver.fleet.admit(hello, orders, checked, 0).unwrap();
        assert_eq!((spec.id.index(), spec.epoch), (at, Epoch(1)));
    }
    let refused = bench.send_hello(super::bench::hello("one more", "decode")).await.unwrap_err();
    assert!(
        refused.contains("4096 instances are attached") && refused.contains("another conductor"),
        "{refused}"
    );
    bench.driver.fleet.remove(InstanceId(9), 0);
    let life = bench.join("d-one-more").await;
    assert_eq!((life.instance, life.epoch), (9, 2));
}
