//! Pairs: what the prefill leg hands over is what the decode leg answers from.

use std::time::Duration;

use baton_remote::testing::{FakeConnector, Fault, toy_next};
use baton_remote::{EngineRole, Handoff, Kind, NextStep, RemoteSettings, Side, Stage};
use baton_types::{Finish, Sampling};
use serde_json::{Value, json};

use crate::scene::{
    SglangPair, VllmPair, becomes, engine_with, greedy, handoff_of, ids, prompt, request, truth, with_body,
};

const BOTH: [FakeConnector; 2] = [FakeConnector::Nixl, FakeConnector::Mooncake];

#[tokio::test]
async fn a_pair_answers_as_a_single_engine_does() {
    for connector in BOTH {
        let pair = VllmPair::new(connector).await;
        for (seed, length) in [(1, 20), (2, 33), (3, 64), (4, 100), (5, 257), (6, 700), (7, 1_500)] {
            let asked = request(&prompt(seed, length), greedy(24));
            assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)), "{connector:?}, {length} tokens");
        }
        pair.assert_no_violation();
        assert_eq!((pair.p.held_blocks(), pair.d.held_blocks()), (0, 0));
    }
    for repeats in [true, false] {
        let pair = SglangPair::with(|spec| spec.repeats = repeats, |_| {}).await;
        for (seed, length) in [(1, 20), (2, 33), (6, 700)] {
            let asked = request(&prompt(seed, length), greedy(24));
            assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
        }
        pair.assert_no_violation();
        becomes("nothing held", || pair.held() == 0).await;
    }
}

#[tokio::test]
async fn many_pairs_at_once_do_not_mix() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    let rooms = SglangPair::with(|spec| spec.wait = Duration::from_secs(10), |_| {}).await;
    let one = async |seed: u32| {
        let asked = request(&prompt(seed, 40 + seed as usize), greedy(9));
        assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
        assert_eq!(rooms.serve(&asked).await, Ok(truth(&asked)));
    };
    tokio::join!(one(1), one(2), one(3), one(4), one(5), one(6), one(7), one(8));
    pair.assert_no_violation();
    rooms.assert_no_violation();
}

#[tokio::test]
async fn the_decode_leg_is_sent_what_the_prefill_said() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    pair.serve(&with_body(request(&prompt(1, 40), greedy(4)), r#"{"priority": 7}"#)).await.unwrap();
    let (p, d) = (pair.p.received(), pair.d.received());
    assert_eq!((&p[0].body["max_tokens"], &p[0].body["stream"]), (&json!(1), &json!(false)));
    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    assert_eq!(p[0].body["kv_transfer_params"], asked);
    let passed = &d[0].body["kv_transfer_params"];
    assert_eq!((&passed["do_remote_prefill"], &passed["remote_num_tokens"]), (&json!(true), &json!(40)));
    assert_eq!(passed["remote_prefill_cached_tokens"], json!(0), "fields that Baton does not read go along");
    assert_eq!((&p[0].body["priority"], &d[0].body["priority"]), (&json!(7), &json!(7)));
    assert_eq!(p[0].body["prompt"], d[0].body["prompt"]);
}

#[tokio::test]
async fn what_a_decode_leg_leaves_in_its_engines_cache_is_found_by_nobody() {
    for connector in [FakeConnector::Nixl, FakeConnector::Mooncake] {
        let pair = VllmPair::new(connector).await;
        let asked = with_body(request(&prompt(1, 40), greedy(4)), r#"{"cache_salt": "of the tenant"}"#);
        for _ in 0..3 {
            pair.serve(&asked).await.unwrap();
        }
        let salts =
            |received: Vec<baton_remote::testing::ReceivedRequest>| -> std::collections::BTreeSet<String> {
                received.iter().map(|one| one.body["cache_salt"].as_str().unwrap().to_owned()).collect()
            };
        assert_eq!(salts(pair.p.received()).into_iter().collect::<Vec<_>>(), ["of the tenant"]);
        let left = salts(pair.d.received());
        assert!(left.len() == 3 && !left.contains("of the tenant"), "{left:?}");
    }
}

#[tokio::test]
async fn both_legs_meet_in_one_room_with_one_prompt() {
    let pair = SglangPair::new().await;
    pair.serve(&request(&prompt(1, 40), greedy(4))).await.unwrap();
    pair.serve(&request(&prompt(1, 40), greedy(4))).await.unwrap();
    let (p, d) = (pair.p.received(), pair.d.received());
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "input_ids", "sampling_params"] {
        assert_eq!(p[0].body[name], d[0].body[name], "{name}");
    }
    assert_ne!(p[0].body["bootstrap_room"], p[1].body["bootstrap_room"], "no room is used twice");
    assert_eq!(p[0].body["bootstrap_host"], json!("127.0.0.1"));
    assert!(p[0].body["bootstrap_room"].as_u64().unwrap() <= i64::MAX as u64);
}

#[tokio::test]
async fn each_leg_names_its_rank_and_both_name_the_one_that_prefills() {
    let pair = SglangPair::with(|spec| spec.ranks = 3, |settings| settings.dp_rank = Some(2)).await;
    pair.prefill.probe().await.unwrap();
    for seed in 0..8 {
        let asked = request(&prompt(seed, 40), greedy(3));
        assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
    }
    for one in [&pair.p, &pair.d] {
        for received in one.received().iter().filter(|one| one.path == "/generate") {
            let of = |name: &str| received.body[name].as_u64().unwrap();
            assert_eq!(
                (of("routed_dp_rank"), of("disagg_prefill_dp_rank"), of("bootstrap_room") % 3),
                (2, 2, 2)
            );
        }
    }
    pair.assert_no_violation();
    let beyond = engine_with(pair.p.settings(), |settings| settings.dp_rank = Some(3));
    assert!(beyond.probe().await.unwrap_err().text.contains("3 data-parallel ranks"));
}

#[tokio::test]
async fn a_prefill_that_ends_by_stop_is_the_answer() {
    for connector in BOTH {
        let pair = VllmPair::new(connector).await;
        let tokens = prompt(5, 70);
        let stop = Sampling { stop_token_ids: vec![toy_next(&tokens)], ..greedy(24) };
        let asked = request(&tokens, stop);
        assert_eq!(pair.serve(&asked).await, Ok((vec![toy_next(&tokens)], Finish::Stop)));
        assert_eq!(pair.d.received(), vec![], "the decode engine hears nothing of it");
        // At random temperatures an end may only be drawn once, so the prefill does not draw it.
        let random = request(&tokens, Sampling { temperature: 1.0, ..(*asked.sampling).clone() });
        assert_eq!(pair.serve(&random).await, Ok((vec![toy_next(&tokens)], Finish::Stop)));
        assert_eq!(pair.d.received().len(), 1);
        pair.assert_no_violation();
    }
}

#[tokio::test]
async fn what_an_answer_of_one_end_token_leaves_lent_can_be_taken_back() {
    let tokens = prompt(5, 70);
    let stop = Sampling { stop_token_ids: vec![toy_next(&tokens)], ..greedy(24) };
    let asked = request(&tokens, stop);
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    let done = pair.prefill.prefill(asked.clone()).await.unwrap().run().await.unwrap();
    assert!(matches!(done.next, NextStep::Answer(Finish::Stop)));
    assert!(pair.p.held_blocks() > 0, "NixlConnector lends it all the same");
    let left = Handoff::from_bytes(&done.left.unwrap().into_bytes()).unwrap();
    ids(pair.decode.decode(request(&tokens, greedy(1)), left).await).await.unwrap();
    becomes("nothing is held", || pair.p.held_blocks() + pair.d.held_blocks() == 0).await;
    pair.assert_no_violation();
    let pair = VllmPair::new(FakeConnector::Mooncake).await;
    let done = pair.prefill.prefill(asked).await.unwrap().run().await.unwrap();
    assert!(done.left.is_none() && pair.p.held_blocks() == 0);
}

/// As vLLM has it for models with recurrent layers: it drops the last token of the prompt, and draws that one.
#[tokio::test]
async fn an_end_that_was_drawn_before_the_last_token_of_the_prompt_ends_nothing() {
    let tokens = prompt(5, 70);
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    for stop_token_ids in [vec![toy_next(&tokens)], vec![]] {
        pair.p.fault(Fault::Instead("remote_num_tokens", "69"), 1);
        let asked = request(&tokens, Sampling { stop_token_ids, ..greedy(24) });
        let done = pair.prefill.prefill(asked).await.unwrap().run().await.unwrap();
        assert!(done.left.is_none());
        let handoff = Handoff::from_bytes(&handoff_of(done).into_bytes()).unwrap();
        assert!(handoff.left_us(0) > 0);
    }
}

#[tokio::test]
async fn one_token_needs_no_handoff() {
    for connector in BOTH {
        let pair = VllmPair::new(connector).await;
        let asked = request(&prompt(5, 70), greedy(1));
        assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
        assert_eq!(pair.p.received()[0].body.get("kv_transfer_params"), None);
        assert_eq!((pair.p.held_blocks(), pair.d.received().len()), (0, 0));
    }
}

#[tokio::test]
async fn min_tokens_keep_the_prefill_from_ending() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    let tokens = prompt(5, 70);
    let asked =
        request(&tokens, Sampling { stop_token_ids: vec![toy_next(&tokens)], min_tokens: 3, ..greedy(6) });
    assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
    assert_eq!(pair.p.received()[0].body["min_tokens"], json!(1));
    assert_eq!(pair.d.received()[0].body["min_tokens"], json!(3));
}

#[tokio::test]
async fn prompt_logprobs_come_from_the_prefill() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    let asked = request(&prompt(5, 70), Sampling { prompt_logprobs: Some(1), ..greedy(6) });
    let done = pair.prefill.prefill(asked.clone()).await.unwrap().run().await.unwrap();
    assert_eq!(done.prompt_logprobs.as_ref().unwrap().len(), 69);
    let NextStep::Decode(handoff) = done.next else { panic!("no hand-off") };
    assert_eq!(ids(pair.decode.decode(asked.clone(), handoff).await).await, Ok(truth(&asked)));
    assert_eq!(pair.d.received()[0].body.get("prompt_logprobs"), None);
}

#[tokio::test]
async fn a_room_may_be_slower_than_a_lease() {
    let pair = SglangPair::with(
        |spec| {
            spec.prefill_time = Duration::from_millis(600);
            spec.wait = Duration::from_secs(20);
        },
        |settings| {
            settings.lease.lease_us = 500_000;
            settings.lease.margin_us = 1_000;
        },
    )
    .await;
    let asked = request(&prompt(5, 70), Sampling { prompt_logprobs: Some(0), ..greedy(6) });
    assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
    assert_eq!(
        pair.d.received()[0].body.get("logprob_start_len"),
        None,
        "the prefill tells the prompt's logprobs"
    );
}

#[tokio::test]
async fn a_handoff_is_used_once() {
    for connector in BOTH {
        let pair = VllmPair::new(connector).await;
        let asked = request(&prompt(3, 50), greedy(6));
        let bytes = pair.handoff(&asked).await.into_bytes();
        let again = Handoff::from_bytes(&bytes).unwrap();
        let first = Handoff::from_bytes(&bytes).unwrap();
        assert_eq!(ids(pair.decode.decode(asked.clone(), first).await).await, Ok(truth(&asked)));
        let error = pair.decode.decode(asked.clone(), again).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handoff));
        assert_eq!(pair.d.received().len(), 1, "nothing is sent");
        pair.assert_no_violation();
    }
}

#[tokio::test]
async fn a_handoff_of_another_prompt_or_another_way_is_not_sent() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    let asked = request(&prompt(3, 50), greedy(6));
    let longer = request(&[prompt(3, 50), vec![9]].concat(), greedy(6));
    let other = request(&prompt(4, 50), greedy(6));
    for wrong in [longer, other] {
        let error = pair.decode.decode(wrong, pair.handoff(&asked).await).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handoff));
    }
    let mooncake = VllmPair::new(FakeConnector::Mooncake).await;
    let error = pair.decode.decode(asked.clone(), mooncake.handoff(&asked).await).await.unwrap_err();
    assert!(error.text.contains("another way"), "{error}");
    assert_eq!(pair.d.received(), vec![]);
}

#[tokio::test]
async fn a_lease_that_is_nearly_over_is_not_used() {
    for connector in BOTH {
        let pair = VllmPair::with(
            connector,
            |_| {},
            |settings| {
                settings.lease.lease_us = 300_000;
                settings.lease.margin_us = 200_000;
            },
        )
        .await;
        let asked = request(&prompt(3, 50), greedy(6));
        let handoff = pair.handoff(&asked).await;
        tokio::time::sleep(Duration::from_millis(110)).await;
        let error = pair.decode.decode(asked, handoff).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Handoff));
        assert_eq!(pair.d.received(), vec![]);
    }
}

/// The lease's end as the engine reports it applies where it is sooner than that of the settings.
#[tokio::test]
async fn the_engines_own_expiry_is_kept() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    pair.p.fault(Fault::Instead("remote_blocks_expiry_time", "1.0e9"), 1);
    let asked = request(&prompt(3, 50), greedy(6));
    assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)), "another clock says nothing");
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let soon: &'static str = Box::leak((since + 2).to_string().into_boxed_str());
    pair.p.fault(Fault::Instead("remote_blocks_expiry_time", soon), 1);
    let error = pair.serve(&asked).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Handoff), "two seconds are within the margin");
}

/// The KV is read before the first token. A decode engine that is too slow for the lease is left before it reads.
#[tokio::test]
async fn a_decode_that_would_outlast_the_lease_is_left() {
    let pair = VllmPair::with(
        FakeConnector::Nixl,
        |spec| spec.lease = Duration::from_millis(900),
        |settings| {
            settings.lease.lease_us = 800_000;
            settings.lease.margin_us = 300_000;
        },
    )
    .await;
    let asked = request(&prompt(3, 50), greedy(6));
    let handoff = pair.handoff(&asked).await;
    pair.d.fault(Fault::Delay(Duration::from_secs(20)), 1);
    let error = ids(pair.decode.decode(asked.clone(), handoff).await).await.unwrap_err();
    assert_eq!(error.kind, Kind::Retry, "{error}");
    becomes("the decode engine is left", || pair.d.running() == 0).await;
    becomes("the lease is over", || pair.p.expired_leases() == 1).await;
    // The decode engine's cache is still correct.
    pair.assert_no_violation();
    pair.p.heal();
    assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
}

/// The real producer exits over it.
#[tokio::test]
async fn a_leg_for_the_other_role_is_not_sent() {
    let pair = VllmPair::new(FakeConnector::Mooncake).await;
    let asked = request(&prompt(3, 50), greedy(6));
    let handoff = pair.handoff(&asked).await;
    let of = |settings: RemoteSettings, role| engine_with(settings, |settings| settings.role = Some(role));
    let producer = of(pair.p.settings(), EngineRole::Prefill);
    let error = producer.decode(asked.clone(), handoff).await.unwrap_err();
    assert_eq!((error.kind, error.side, error.stage), (Kind::Invalid, Side::Us, Stage::Handoff));
    assert!(of(pair.d.settings(), EngineRole::Decode).prefill(asked.clone()).await.is_err());
    // SGLang says its role itself.
    let rooms = SglangPair::new().await;
    rooms.decode.probe().await.unwrap();
    assert!(rooms.decode.prefill(asked.clone()).await.is_err());
    let error = rooms.decode.generate(asked).await.unwrap_err();
    assert_eq!((error.kind, error.side), (Kind::Invalid, Side::Us), "not the client's mistake");
    pair.assert_no_violation();
    assert_eq!((pair.p.received().len(), pair.d.received().len(), rooms.d.received().len()), (1, 0, 0));
}

/// A first token that is read after the lease is not used, because nothing shows whether it came in time.
#[tokio::test]
async fn a_first_token_that_is_looked_at_after_the_lease_is_not_used() {
    let pair = VllmPair::with(
        FakeConnector::Nixl,
        |_| {},
        |settings| {
            settings.lease.lease_us = 2_000_000;
            settings.lease.margin_us = 200_000;
        },
    )
    .await;
    let asked = request(&prompt(3, 50), greedy(6));
    let mut generation = pair.decode.decode(asked.clone(), pair.handoff(&asked).await).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1_900)).await;
    let error = generation.next().await.unwrap().unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Handoff));
    assert!(generation.next().await.is_none());
}

#[tokio::test]
async fn a_prefill_whose_parameters_are_not_whole_is_not_decoded() {
    let names = [
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_num_tokens",
    ];
    let lacks = names.map(Fault::Lack);
    let wrong = [
        Fault::Instead("remote_block_ids", "[]"),
        Fault::Instead("remote_block_ids", "\"1\""),
        Fault::Instead("remote_num_tokens", "48"),
        Fault::Instead("do_remote_prefill", "false"),
        Fault::Instead("remote_host", "7"),
        Fault::Instead("transfer_mode", "\"push\""),
    ];
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    for fault in lacks.into_iter().chain(wrong) {
        pair.p.fault(fault.clone(), 1);
        let error = pair.serve(&request(&prompt(3, 50), greedy(6))).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Bug, Stage::Handoff), "{fault:?}");
    }
    assert_eq!(pair.d.received(), vec![]);
    pair.assert_no_violation();
}

#[tokio::test]
async fn too_few_blocks_are_noticed_once_the_block_size_is_known() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    pair.prefill.probe().await.unwrap();
    pair.p.fault(Fault::Instead("remote_block_ids", "[[1]]"), 1);
    let error = pair.serve(&request(&prompt(3, 50), greedy(6))).await.unwrap_err();
    assert!(error.text.contains("1 blocks do not hold 50 tokens"), "{error}");
    let asked = request(&prompt(3, 50), greedy(6));
    assert_eq!(pair.serve(&asked).await, Ok(truth(&asked)));
    assert_eq!(pair.p.received()[2].body["model"], Value::from("tiny"));
}
