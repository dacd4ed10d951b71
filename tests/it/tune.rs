//! `baton tune`: the answer, the files that it writes, and what it refuses.

use crate::program::Place;
use std::fmt::Write as _;

/// Chats with a short prompt and documents for the batch, all at once more than four nodes serve.
fn two_classes(rows: u64) -> String {
    mixed(rows, ("batch", 40), ("chat", 4))
}

/// Every third request of the first class, the others of the second, with prompts of so many blocks.
fn mixed(rows: u64, third: (&str, u64), others: (&str, u64)) -> String {
    (0..rows).fold(String::new(), |mut text, at| {
        let (class, blocks) = if at % 3 == 0 { third } else { others };
        let ids: Vec<u64> = (0..blocks).map(|block| at * 100 + block).collect();
        let tokens = blocks * 512;
        writeln!(
            text,
            r#"{{"timestamp": {}, "input_length": {tokens}, "output_length": 60, "hash_ids": {ids:?}, "class": "{class}"}}"#,
            at * 250
        )
        .unwrap();
        text
    })
}

const CLASSES: [&str; 4] = ["--class", "chat=2s/60ms@95%", "--class", "batch=60s/200ms@90%"];

fn tune<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["tune", "t.jsonl", "--nodes", "4"], &CLASSES[..], more].concat()
}

#[test]
fn the_answer_is_the_same_again_and_its_file_is_a_valid_configuration() {
    let place = Place::new();
    place.write("t.jsonl", &two_classes(480));
    let files = ["--out", "policy.toml", "--json", "a.json", "--html", "a.html", "--state", "a.state"];
    let first = place.baton(&tune(&[&files[..], &["--what-if", "traffic=2,nodes=+2"]].concat())).succeeded();
    let answer = place.json("a.json");
    let sentence = answer["sentence"].as_str().unwrap();
    assert!(first.stdout.starts_with(sentence) && sentence.contains("chat ") && sentence.contains("(now "));
    assert_eq!(answer["requests"], serde_json::json!([240, 240]));
    assert_eq!((answer["nodes_now"].as_str(), answer["gpus"].as_u64()), (Some("2P2D"), Some(32)));
    for class in answer["classes"].as_array().unwrap() {
        let of = |side: &str, bound: &str| class[side][bound].as_f64().unwrap();
        for side in ["now", "tuned"] {
            assert!(
                of(side, "low") <= of(side, "figure") && of(side, "figure") <= of(side, "high"),
                "{class}"
            );
        }
    }
    assert_eq!(answer["what_if"].as_array().unwrap().len(), 2);
    place.baton(&["config", "check", "policy.toml"]).succeeded();
    assert!(
        std::fs::read_to_string(place.path("a.html")).unwrap().contains(sentence.split(':').next().unwrap())
    );

    // Another start does none of the runs again, and a start without the file comes to the same.
    let state = std::fs::read_to_string(place.path("a.state")).unwrap();
    let kept: Vec<_> =
        ["policy.toml", "a.json", "a.html"].map(|f| std::fs::read(place.path(f)).unwrap()).into();
    let again = place.baton(&tune(&[&files[..], &["--what-if", "traffic=2,nodes=+2"]].concat())).succeeded();
    assert_eq!(again.stdout, first.stdout);
    for line in again.stderr.lines().filter(|line| line.ends_with("of them known")) {
        let counts: Vec<&str> = line.split(' ').filter(|word| word.parse::<u64>().is_ok()).collect();
        assert_eq!(counts[0], counts[1], "{line}");
    }
    assert_eq!(std::fs::read_to_string(place.path("a.state")).unwrap(), state);
    for (file, before) in ["policy.toml", "a.json", "a.html"].iter().zip(kept) {
        assert!(std::fs::read(place.path(file)).unwrap() == before, "{file} is another");
    }
    let fresh = place.baton(&tune(&["--jobs", "1", "--what-if", "traffic=2,nodes=+2"])).succeeded();
    assert_eq!(fresh.stdout, first.stdout);
}

#[test]
fn long_chats_are_set_apart_from_short_batches() {
    let place = Place::new();
    place.write("t.jsonl", &mixed(480, ("chat", 16), ("batch", 8)));
    let classes = ["--class", "chat=5s/60ms@95%", "--class", "batch=10s/200ms@60%"];
    let args = ["tune", "t.jsonl", "--nodes", "4", "--speed", "2.5", "--json", "a.json"];
    place.baton(&[&args[..], &classes].concat()).succeeded();
    let answer = place.json("a.json");
    let chat = &answer["classes"][0];
    let (now, tuned) = (chat["now"]["figure"].as_f64().unwrap(), chat["tuned"]["figure"].as_f64().unwrap());
    assert!(tuned > now + 0.5, "{answer:#}");
    let raised = |change: &serde_json::Value| change == "scheduler.classes[0].priority: 0 -> 1";
    assert!(answer["changes"].as_array().unwrap().iter().any(raised), "{answer:#}");
}

#[test]
fn the_fewest_nodes_keep_the_targets() {
    let place = Place::new();
    place.write("t.jsonl", &two_classes(240));
    let args =
        ["tune", "t.jsonl", "--nodes", "8", "--goal", "nodes", "--hold-out", "50%", "--json", "a.json"];
    let few = [&args[..], &["--class", "chat=30s/200ms@90%", "--class", "batch=60s/200ms@90%"]].concat();
    let out = place.baton(&few);
    let answer = place.json("a.json");
    let nodes = answer["gpus"].as_u64().unwrap() / 8;
    assert!((2..8).contains(&nodes), "{nodes}");
    // They keep them in the part held out, too.
    assert_eq!((out.code, &answer["meets_targets"]), (Some(0), &true.into()), "{out:#?}");
    assert!(answer["gain"]["figure"].as_f64().unwrap() > 0.0, "fewer nodes, more for each: {answer:#}");
}

#[test]
fn nodes_that_never_suffice_are_not_sold_as_an_answer() {
    let place = Place::new();
    place.write("t.jsonl", &two_classes(240));
    // No prompt of forty blocks is computed within 100 ms.
    let classes = ["--class", "chat=30s/200ms@90%", "--class", "batch=100ms/200ms@90%"];
    let args = ["tune", "t.jsonl", "--nodes", "4", "--goal", "nodes", "--json", "a.json"];
    let out = place.baton(&[&args[..], &classes].concat());
    assert_eq!((out.code, &place.json("a.json")["too_few_nodes"]), (Some(1), &true.into()), "{out:#?}");
    assert!(out.stdout.starts_with("not even all nodes keep every target"), "{out:#?}");
}

#[test]
fn what_cannot_be_tuned_is_refused_with_the_remedy() {
    let place = Place::new();
    place.write("t.jsonl", &two_classes(480));
    let refused = |args: &[&str], code: i32, words: &[&str]| {
        place.baton(&[&["tune", "t.jsonl"], args].concat()).refused(code, words);
    };
    refused(&["--class", "chat=2s/60ms@95%"], 1, &["class batch", "--class batch=TTFT/TBT@SHARE"]);
    refused(&["--class", "chat=2/60ms@95%"], 2, &["ttft: give a time with its unit"]);
    refused(&["--class", "chat=2s@95%"], 2, &["NAME=TTFT/TBT@SHARE"]);
    refused(&[&CLASSES[..], &["--class", "rest=2s/60ms"]].concat(), 1, &["no row", "class rest"]);
    refused(&[&CLASSES[..], &["--gpus", "20"]].concat(), 1, &["20 GPUs", "whole nodes of 8", "16 or 24"]);
    refused(&[&CLASSES[..], &["--nodes", "1"]].concat(), 2, &["--nodes"]);
    refused(&[&CLASSES[..], &["--hold-out", "0.99"]].concat(), 2, &["--hold-out", "0.1 to 0.9"]);
    refused(&[&CLASSES[..], &["--out", "no/such/p.toml"]].concat(), 1, &["no/such/p.toml", "folder"]);
    refused(&[&CLASSES[..], &["--what-if", "disk=2"]].concat(), 2, &["traffic=FACTOR"]);
    refused(&[&CLASSES[..], &["--what-if", "dram=0.5"]].concat(), 1, &["no KV in DRAM", "--dram-tokens"]);
    place.write("t.jsonl", &two_classes(150));
    refused(&CLASSES, 1, &["75 rows to tune on", "longer trace"]);
    place.write("both.toml", "[[cluster.pools]]\nrole = \"both\"\ncount = 4\n");
    place.write("t.jsonl", &two_classes(480));
    refused(&[&CLASSES[..], &["--config", "both.toml"]].concat(), 1, &["prefill to decode"]);
}
