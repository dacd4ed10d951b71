//! Operator requests: the status, an explanation, a policy change, and a node's new role. Also the canary.

use std::time::{Duration, Instant};

use baton_router::{Backend as _, Submission};
use baton_scheduler::AdmissionMode;
use baton_types::{Role, Sampling, Secret};
use baton_wire::v1;
use tokio::sync::oneshot;

use super::bench::{Bench, failure, hello};
use crate::audit::Audit;
use crate::cli::reference::{self, ReloadMode};
use crate::conductor::inbox::Message;
use crate::conductor::{PolicyChange, Question};
use crate::config::Config;

async fn ask<T>(bench: &mut Bench, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> T {
    let (reply, mut answer) = oneshot::channel();
    bench.inbox.send(Message::Ask(question(reply))).await;
    bench.pump().await;
    answer.try_recv().expect("every question is answered")
}

async fn change(bench: &mut Bench, config: Config) -> Result<Vec<String>, String> {
    let change = Box::new(PolicyChange::confirmed(config));
    let changed = ask(bench, |reply| Question::Policy(change, reply)).await;
    changed.map(|outcome| outcome.changes).map_err(|refusal| refusal.to_string())
}

async fn roll_back(bench: &mut Bench) -> Result<Vec<String>, String> {
    let changed = ask(bench, |reply| Question::Rollback(None, reply)).await;
    changed.map(|outcome| outcome.changes).map_err(|refusal| refusal.to_string())
}

#[tokio::test]
async fn a_policy_is_changed_refused_and_taken_back() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    let before = *ask(&mut bench, Question::Config).await;
    assert!(roll_back(&mut bench).await.is_err_and(|e| e.contains("no change")));

    let mut strict = before.clone();
    strict.scheduler.classes[0].ttft_us = 5_000_000;
    let changes = change(&mut bench, strict.clone()).await.unwrap();
    assert_eq!(changes, ["scheduler.classes[0].ttft_us: 2000000 -> 5000000"]);

    let mut other = before.clone();
    other.service.heartbeat_us *= 2;
    assert!(change(&mut bench, other).await.is_err_and(|e| e.contains("service.heartbeat_us")));
    let mut renamed = before.clone();
    renamed.scheduler.classes[0].name = "silver".into();
    let mut gold = renamed.scheduler.classes[0].clone();
    gold.name = "default".into();
    renamed.scheduler.classes.push(gold);
    let refused = change(&mut bench, renamed).await;
    assert!(refused.as_ref().is_err_and(|e| e.contains("live requests")), "{refused:?}");
    assert_eq!(*ask(&mut bench, Question::Config).await, strict, "none of it is in force");

    roll_back(&mut bench).await.unwrap();
    assert_eq!(*ask(&mut bench, Question::Config).await, before);
    roll_back(&mut bench).await.unwrap();
    assert_eq!(*ask(&mut bench, Question::Config).await, strict, "the way back has a way back");
    bench.serve("r").await;
    bench.quiet();
}

/// The column "hot" of docs/config.md, tried on a conductor that serves: each setting of a service is given another valid
/// value.
#[tokio::test]
async fn a_setting_is_taken_on_while_serving_if_the_reference_says_so() {
    let mut tried = [0, 0];
    for section in reference::sections().unwrap().into_iter().filter(|section| !section.simulated) {
        for setting in section.settings {
            let what = format!("{} {}", section.heading, setting.name);
            let others = reference::others(&section.heading, &setting.name, &setting.words).unwrap();
            let mut taken = Vec::new();
            for other in &others {
                if other.validate().is_err() {
                    continue;
                }
                let mut bench = Bench::tuned(&["p0", "d0"], |config| *config = reference::base()).await;
                let mut new = other.clone();
                let before = *ask(&mut bench, Question::Config).await;
                let answer = change(&mut bench, other.clone()).await;
                let after = *ask(&mut bench, Question::Config).await;
                crate::policy::as_served(&mut new.scheduler);
                // Of what the command line may have set, the file's is passed over here, and refused by who reads it.
                let fixed = !crate::policy::fixed_at_start(&before, &new).is_empty();
                match &answer {
                    Ok(_) if fixed => assert_eq!(after, before, "{what} is passed over"),
                    Ok(_) => assert_eq!(after, new, "{what} is taken on"),
                    Err(why) => {
                        assert!(why.contains("restart") && why.contains(&setting.name), "{what}: {why}");
                        assert_eq!(after, before, "{what} is refused");
                    }
                }
                taken.push(answer.is_ok() && !fixed);
            }
            let hot = match (taken.contains(&true), taken.contains(&false)) {
                (true, false) => ReloadMode::Always,
                (true, true) => ReloadMode::Sometimes,
                (false, true) => ReloadMode::Never,
                // A pair of settings of which one alone is not valid.
                (false, false) => continue,
            };
            assert_eq!(setting.hot, hot, "{what}: {taken:?}");
            tried[usize::from(hot == ReloadMode::Never)] += 1;
        }
    }
    assert!(tried[0] >= 25 && tried[1] >= 15, "{tried:?}");
}

#[tokio::test]
async fn keys_follow_the_file_and_a_rollback_leaves_them() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let keys = bench.driver.keys();
    assert!(keys.operator().is_none());
    let mut guarded = *ask(&mut bench, Question::Config).await;
    guarded.scheduler.max_retries = 3;
    guarded.service.admin_key = "sesame".into();
    change(&mut bench, guarded.clone()).await.unwrap();
    assert_eq!(keys.operator(), Some("sesame".into()));
    roll_back(&mut bench).await.unwrap();
    let now = *ask(&mut bench, Question::Config).await;
    assert_eq!((now.scheduler.max_retries, keys.operator()), (2, Some("sesame".into())));
    // A file that nobody confirmed does not open the door.
    let mut open = now;
    open.service.admin_key = Secret::default();
    for confirmed in [false, true] {
        let change = Box::new(PolicyChange { config: open.clone(), basis: None, confirmed });
        let answer = ask(&mut bench, |reply| Question::Policy(change, reply)).await;
        assert_eq!(answer.is_ok(), confirmed, "{answer:?}");
        assert_eq!(keys.operator().is_none(), confirmed);
    }
}

#[tokio::test]
async fn orders_bring_the_target_of_the_policy_in_force() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let mut config = *ask(&mut bench, Question::Config).await;
    for (name, tbt_us, step_target_us) in [("a", 100_000, 90_000), ("b", 60_000, 54_000)] {
        config.scheduler.classes[0].tbt_us = tbt_us;
        change(&mut bench, config.clone()).await.unwrap();
        bench.submit(name, 3).await;
        bench.serve(name).await;
        assert_eq!(bench.lines["d0"].step_target_us, Some(step_target_us));
        assert_eq!(bench.lines["p0"].step_target_us, None, "nobody decodes there");
    }
    bench.quiet();
}

#[tokio::test]
async fn what_a_shadow_mode_would_refuse_is_counted() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let mut shadowed = *ask(&mut bench, Question::Config).await;
    shadowed.scheduler.shadow = vec![AdmissionMode::Slo, AdmissionMode::Early];
    change(&mut bench, shadowed).await.unwrap();
    for name in ["a", "b"] {
        bench.submit(name, 2).await;
        bench.serve(name).await;
    }
    let page = bench.driver.metrics.page();
    let status = ask(&mut bench, Question::Status).await;
    for mode in ["slo", "early"] {
        for (what, count) in [("judged", 2), ("refused", 0)] {
            let series = format!("\nbaton_shadow_{what}_total{{mode=\"{mode}\"}} {count}\n");
            assert!(page.contains(&series), "no {series} in {page}");
            assert_eq!(status.counters.get(&format!("shadow_{mode}_{what}")), Some(&count));
        }
    }
}

/// A way back that cannot be taken now is still there later.
#[tokio::test]
async fn a_rollback_that_is_refused_can_be_asked_for_again() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let before = *ask(&mut bench, Question::Config).await;
    let mut more = before.clone();
    let mut gold = more.scheduler.classes[0].clone();
    gold.name = "gold".into();
    more.scheduler.classes.push(gold);
    change(&mut bench, more).await.unwrap();
    for class in ["default", "gold"] {
        let series = format!("\nbaton_slo_requests_total{{class=\"{class}\",outcome=\"in_slo\"}} 0\n");
        assert!(bench.driver.metrics.page().contains(&series), "{class} begins at zero");
    }
    let mut of_gold = Bench::submission("r", Sampling { max_tokens: 2, ..Sampling::default() });
    of_gold.class = Some("gold".into());
    bench.send(of_gold).await;
    assert!(roll_back(&mut bench).await.is_err_and(|e| e.contains("gold")));
    bench.serve("r").await;
    roll_back(&mut bench).await.unwrap();
    assert_eq!(*ask(&mut bench, Question::Config).await, before);
}

/// Who attached last set the limit of all, and shorter engines answered 400 by chance.
#[tokio::test]
async fn the_shortest_context_of_the_engines_that_serve_is_the_limit() {
    let mut bench = Bench::with(&["b0"]).await;
    let limit = |bench: &Bench| bench.door.model().map(|model| model.max_model_tokens);
    bench.send_hello(v1::Hello { max_model_tokens: 8_000, ..hello("b1", "both") }).await.unwrap();
    bench.join("b2").await;
    assert_eq!(limit(&bench), Some(8_000));
    for (drain, tokens) in [(true, 60_000), (false, 8_000)] {
        let node = "b1".to_owned();
        ask(&mut bench, |reply| Question::Drain { node, drain, reply }).await.unwrap();
        assert_eq!(limit(&bench), Some(tokens));
    }
    bench.let_leave("b1").await;
    assert_eq!(limit(&bench), Some(60_000));
    for name in ["b0", "b2"] {
        bench.let_leave(name).await;
        assert_eq!(limit(&bench), Some(60_000), "without engines it stays");
    }
}

/// A client that trusted the published length was refused as too long.
#[tokio::test]
async fn no_longer_context_is_published_than_a_decode_node_holds() {
    let mut bench = Bench::with(&["p0"]).await;
    let limit = |bench: &Bench| bench.door.model().map(|model| model.max_model_tokens);
    assert_eq!(limit(&bench), Some(60_000), "no decode node is there yet");
    // Whole blocks of 16.
    for (name, capacity_tokens, tokens) in [("d0", 4_015, 4_000), ("d1", 8_000, 8_000), ("d2", 4_015, 8_000)]
    {
        bench.send_hello(v1::Hello { capacity_tokens, ..hello(name, "decode") }).await.unwrap();
        assert_eq!(limit(&bench), Some(tokens), "{name}");
    }
    bench.let_leave("d1").await;
    assert_eq!(limit(&bench), Some(4_000));
}

#[tokio::test]
async fn a_draining_node_finishes_what_it_has_and_gets_nothing_new() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("a", 3).await;
    let drained = bench.prefill("a").node;
    let order = |node: &str, drain| {
        let node = node.to_owned();
        move |reply| Question::Drain { node, drain, reply }
    };
    ask(&mut bench, order(&drained, true)).await.unwrap();
    for name in ["b", "c", "d"] {
        bench.submit(name, 2).await;
        assert_ne!(bench.prefill(name).node, drained);
    }
    for name in ["a", "b", "c", "d"] {
        bench.serve(name).await;
    }
    let status = bench.status();
    let state = |name: &str| status.nodes.iter().find(|n| n.name == name).unwrap().state.clone();
    assert_eq!(state(&drained), "drained");
    let other = if drained == "p0" { "p1" } else { "p0" };
    ask(&mut bench, order(other, true)).await.unwrap();
    assert!(!bench.driver.core.has_pair());
    ask(&mut bench, order(&drained, false)).await.unwrap();
    bench.drop_canaries().await;
    bench.submit("e", 2).await;
    assert_eq!(bench.prefill("e").node, drained);
    bench.serve("e").await;
    assert!(
        ask(&mut bench, order("nobody", true)).await.is_err_and(|e| e.to_string().contains("p0, p1, d0"))
    );
    bench.quiet();
}

/// The last report of a node may be older than what it was given since.
#[tokio::test]
async fn a_node_is_drained_when_what_the_conductor_gave_it_is_done() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("a", 3).await;
    for node in ["p0", "d0"] {
        let node = node.to_owned();
        ask(&mut bench, |reply| Question::Drain { node, drain: true, reply }).await.unwrap();
    }
    let states = |bench: &mut Bench| -> Vec<String> {
        bench.status().nodes.into_iter().map(|node| node.state).collect()
    };
    assert_eq!(states(&mut bench), ["draining", "draining"], "its decode is promised");
    bench.do_prefill("a").await;
    bench.do_handoff("a").await;
    assert_eq!(states(&mut bench), ["drained", "draining"]);
    bench.do_decode("a", 3).await;
    assert_eq!(states(&mut bench), ["drained", "drained"]);
    bench.quiet();
}

#[tokio::test]
async fn a_node_takes_another_part_and_keeps_what_it_has() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("a", 3).await;
    bench.do_prefill("a").await;
    let node = bench.prefill("a").node;
    let role = |role| {
        let node = node.clone();
        move |reply| Question::Role { node, role, reply }
    };
    ask(&mut bench, role(Role::Decode)).await.unwrap();
    bench.submit("b", 2).await;
    assert_ne!(bench.prefill("b").node, node);
    for name in ["a", "b"] {
        bench.serve(name).await;
    }
    let status = bench.status();
    assert_eq!(status.nodes.iter().find(|n| n.name == node).unwrap().role, "decode");
    bench.quiet();
}

/// One prefill node has 1.2 s of work a second. One of the two decode nodes may take that part, and only that one does.
#[tokio::test]
async fn a_node_that_may_takes_the_part_that_demand_asks_for() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.send_hello(v1::Hello { may_change_role: true, ..hello("d1", "decode") }).await.unwrap();
    assert!(bench.status().roles.is_none(), "nothing was seen yet");
    for half_second in 0..80 {
        let name = format!("long {half_second}");
        let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
        let tokens = (0..59_000).map(|at| at + 3).collect();
        bench.send(Submission { tokens, ..Bench::submission(&name, sampling) }).await;
        bench.leave(&name).await;
        bench.wait_alive_us(500_000, &[]).await;
    }
    let status = bench.status();
    let role = |name: &str| status.nodes.iter().find(|n| n.name == name).unwrap().role.clone();
    assert_eq!((role("p0"), role("d0"), role("d1")), ("prefill".into(), "decode".into(), "prefill".into()));
    let roles = status.roles.expect("more than half a minute was seen");
    assert!(roles.prefill_pressure > roles.decode_pressure, "{roles:?}");
    // Its driver knows the new part, too: it prefills and hands over.
    for name in ["a", "b"] {
        bench.submit(name, 3).await;
    }
    assert!(["a", "b"].iter().any(|name| bench.prefill(name).node == "d1"));
    for name in ["a", "b"] {
        assert_eq!(bench.decode(name).node, "d0");
        bench.serve(name).await;
    }
    bench.quiet();
}

#[tokio::test]
async fn a_request_is_explained_by_its_clients_name() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("r", 2).await;
    let explained = ask(&mut bench, |reply| Question::Explain("r".into(), reply)).await.unwrap();
    let explained: serde_json::Value = serde_json::from_str(&explained).unwrap();
    let candidates = explained["decisions"][0]["candidates"].as_array().unwrap().clone();
    let chosen: Vec<_> = candidates.iter().filter(|c| c["chosen"] == true).collect();
    assert_eq!((candidates.len(), chosen.len()), (2, 1));
    assert_eq!(chosen[0]["node"], bench.prefill("r").node.as_str());
    assert_eq!(
        (&explained["decisions"][0]["decode"], &explained["decisions"][0]["refused"]),
        (&"d0".into(), &().into())
    );
    assert_eq!(ask(&mut bench, |reply| Question::Explain("s".into(), reply)).await, None);
    let line = bench.status().decisions[0].clone();
    assert!(line.starts_with("r prefill=p") && line.ends_with(" decode=d0"), "{line}");
    bench.serve("r").await;
}

/// Two versions of engines that move KV themselves: each in pairs of its own, and nobody else beside them.
#[tokio::test]
async fn two_versions_serve_side_by_side_in_pairs_of_their_own() {
    let of = |name: &str, role: &str, engine: &str| {
        let mut hello = hello(name, role);
        hello.fingerprint.as_mut().unwrap().engine = engine.into();
        hello
    };
    let mut bench = Bench::new(super::bench::config());
    bench.send_hello(of("p0x", "prefill", "vllm nixl 1")).await.unwrap();
    bench.send_hello(of("d0x", "decode", "vllm nixl 2")).await.unwrap();
    assert!(bench.open_legs.open.is_empty() && !bench.driver.core.has_pair(), "no pair of two versions");
    for engine in ["vllm mooncake 1", "sglang nixl 1", "vllm"] {
        let refused = bench.send_hello(of("p1x", "prefill", engine)).await;
        assert!(refused.is_err_and(|why| why.contains("cannot share KV")), "{engine}");
    }
    // A node whose KV goes through Baton must be of one kind with all others.
    let refused = bench.send_hello(of("p1", "prefill", "vllm nixl 3")).await;
    assert!(refused.is_err_and(|why| why.contains("cannot share KV")));
    bench.send_hello(of("d1x", "decode", "vllm nixl 1 a")).await.unwrap();
    assert!(!bench.driver.core.has_pair(), "another revision");
    bench.send_hello(of("p1x", "prefill", "vllm nixl 1 a")).await.unwrap();
    assert!(bench.driver.core.has_pair());
    let canary = bench.open_legs.open.values().find(|leg| leg.prefills).unwrap();
    assert_eq!(canary.node, "p1x", "it goes through the pair");
    let builds: Vec<_> = bench.status().nodes.into_iter().map(|node| node.build).collect();
    assert_eq!(builds, ["vllm nixl 1", "vllm nixl 2", "vllm nixl 1 a", "vllm nixl 1 a"]);
}

#[tokio::test]
async fn a_canary_that_fails_is_sent_again_and_then_passes() {
    let mut bench = Bench::new(super::bench::config());
    bench.join("p0").await;
    assert!(bench.open_legs.open.is_empty(), "there is no pair yet");
    bench.join("d0").await;
    use baton_router::Backend as _;
    let first = bench.open_legs.open.values().find(|leg| leg.prefills).unwrap().clone();
    assert!(first.name.starts_with("canary-"));
    bench.send_facts(&first, vec![failure(true)]).await;
    assert!(bench.open_legs.open.is_empty() && !bench.door.readiness().ready);
    assert!(bench.door.readiness().detail.contains("waiting for a canary"));
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while bench.open_legs.open.is_empty() {
        assert!(std::time::Instant::now() < until, "no other canary is sent");
        tokio::time::sleep(Duration::from_millis(5)).await;
        bench.pump().await;
    }
    bench.pass_canary().await;
    assert!(bench.door.readiness().ready);
    // It takes a pair to be ready, and a canary for each time that there is one again.
    bench.kill("d0").await;
    assert!(!bench.door.readiness().ready);
    bench.join("d0").await;
    assert!(!bench.door.readiness().ready);
    bench.pass_canary().await;
    assert!(bench.door.readiness().ready);
    bench.quiet();
}

#[tokio::test]
async fn a_hello_that_does_not_fit_is_refused_with_the_reason() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    type HelloMutator = fn(&mut baton_wire::v1::Hello);
    let cases: [(HelloMutator, &str); 12] = [
        (|h| h.protocol_version = 9, "speaks control protocol 9"),
        (|h| h.fingerprint.as_mut().unwrap().block_tokens = 8, "blocks of 8 tokens"),
        (|h| h.fingerprint.as_mut().unwrap().revision = "other".into(), "its revision is 'other', not '"),
        (|h| h.fingerprint = None, "blocks of 0 tokens"),
        (|h| h.role = 9, "a role that is none"),
        (|h| h.profile = None, "cost profile"),
        (|h| h.profile.as_mut().unwrap().decode.as_mut().unwrap().batches[1] = 0, "cost profile"),
        (|h| h.capacity_tokens = 0, "no room"),
        (|h| h.pass_tokens = 0, "computes nothing"),
        (|h| h.max_running = Some(0), "runs no request"),
        (|h| h.name = String::new(), "name"),
        (|h| h.name = "n".repeat(300), "name"),
    ];
    for (at, (spoil, reason)) in cases.into_iter().enumerate() {
        // As a newcomer, and under the name of a node that is doing well.
        for name in ["p9", "p0"] {
            let mut hello = hello(name, "prefill");
            spoil(&mut hello);
            let refused = bench.send_hello(hello).await;
            assert!(refused.as_ref().is_err_and(|why| why.contains(reason)), "case {at}: {refused:?}");
        }
    }
    let status = bench.status();
    assert_eq!(
        status.nodes.iter().map(|n| (n.name.as_str(), n.epoch)).collect::<Vec<_>>(),
        [("p0", 1), ("d0", 1)]
    );
    bench.submit("r", 2).await;
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_lone_node_may_come_back_with_another_model() {
    let mut bench = Bench::new(super::bench::config());
    bench.join("p0").await;
    let mut other = hello("p0", "prefill");
    other.fingerprint.as_mut().unwrap().revision = "next".into();
    assert_eq!(bench.send_hello(other).await.unwrap().epoch, 2);
    let refused = bench.send_hello(hello("d0", "decode")).await;
    assert!(refused.is_err_and(|why| why.contains("cannot share KV")));
}

#[tokio::test]
async fn a_node_that_is_gone_before_it_is_welcome_is_not_kept() {
    let mut bench = Bench::new(super::bench::config());
    let (orders, receiver) = tokio::sync::mpsc::channel(4);
    let (reply, answer) = oneshot::channel();
    drop((receiver, answer));
    let hello = Box::new(hello("p0", "prefill"));
    bench.inbox.send(Message::Joined { hello, orders, reply }).await;
    bench.pump().await;
    assert_eq!(bench.status().nodes.len(), 0);
}

#[tokio::test]
async fn the_books_are_looked_over_while_it_serves() {
    let mut bench = Bench::with(&["p", "d"]).await;
    bench.submit("a", 5).await;
    assert_eq!(bench.driver.audit.looks(), 0, "not before it is time");
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    bench.driver.audit = Audit::new(long_ago);
    bench.pump().await;
    assert_eq!((bench.driver.audit.looks(), bench.driver.audit.failures()), (1, 0));
    bench.serve("a").await;
}
