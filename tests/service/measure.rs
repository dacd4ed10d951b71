//! `baton profile measure` on an engine whose costs are known, and on what it cannot measure.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;

use super::service::{Service, baton, run};

/// KnownProfile in the order of a small model on one GPU, so that the test is short.
const TRUTH: &str = r#"
name = "truth"
source = "made up for a test"
kv_bytes_per_token = 2048
kv_capacity_tokens = 65536
layers = 4
shared_us = 4000.0

[fit]
prefill_points = 0
prefill_mape_pct = 0.0
prefill_worst_pct = 0.0
decode_points = 0
decode_mape_pct = 0.0
decode_worst_pct = 0.0

[valid]
max_prompt_tokens = 4096
max_batch = 16
max_context_tokens = 4096

[prefill]
knots_tokens = [0, 64, 256, 1024, 4096]
knots_us = [5000.0, 6000.0, 11000.0, 34000.0, 130000.0]
attention_ps_per_pair = 12000.0

[decode]
batches = [1, 2, 4, 8, 16]
base_us = [6000.0, 6200.0, 6600.0, 7400.0, 9000.0]
context_ps_per_token = [900000.0, 700000.0, 500000.0, 400000.0, 300000.0]
"#;

/// The facts of that engine that no request shows.
const SHAPE: [&str; 6] = ["--layers", "4", "--kv-bytes-per-token", "2048", "--kv-capacity-tokens", "65536"];

fn timed(nodes: &str) -> Service {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("truth.toml"), TRUTH).unwrap();
    let args = [
        "--nodes",
        nodes,
        "--engine",
        "timed",
        "--profile",
        "truth.toml",
        "--pass-tokens",
        "4096",
        "--blocks",
        "8192",
    ];
    Service::start(folder, &args)
}

/// Numbers of a profile, as the formulas need them.
struct KnownProfile(toml::Value);

impl KnownProfile {
    fn numbers(&self, section: &str, key: &str) -> Vec<f64> {
        let array = self.0[section][key].as_array().unwrap();
        array.iter().map(|v| v.as_float().or(v.as_integer().map(|n| n as f64)).unwrap()).collect()
    }

    fn prefill_us(&self, new: f64, prefix: f64) -> f64 {
        let pair_ps = self.0["prefill"]["attention_ps_per_pair"].as_float().unwrap();
        let dense = line(&self.numbers("prefill", "knots_tokens"), &self.numbers("prefill", "knots_us"), new);
        dense + pair_ps * new * (prefix + (new + 1.0) / 2.0) / 1e6
    }

    fn decode_us(&self, batch: f64, context: f64) -> f64 {
        let batches = self.numbers("decode", "batches");
        let slope = line(&batches, &self.numbers("decode", "context_ps_per_token"), batch);
        line(&batches, &self.numbers("decode", "base_us"), batch) + slope * context / 1e6
    }

    fn shared_us(&self) -> f64 {
        self.0["shared_us"].as_float().unwrap()
    }
}

/// Piecewise linear through the points.
fn line(x: &[f64], y: &[f64], at: f64) -> f64 {
    let upper = x.iter().position(|x| *x >= at).unwrap_or(x.len() - 1).max(1);
    let share = (at - x[upper - 1]) / (x[upper] - x[upper - 1]);
    y[upper - 1] + (y[upper] - y[upper - 1]) * share
}

#[test]
fn a_known_engine_is_measured_to_within_a_few_per_cent() {
    let service = timed("1b");
    let url = format!("http://{}", service.clients);
    let folder = service.folder().to_owned();
    let args =
        ["profile", "measure", "--url", &url, "--max-context", "2048", "--max-batch", "8", "--repeats", "2"];
    let files = ["--name", "mine", "--out", "mine.toml", "--table", "mine.csv"];
    let (ended, out, err) = run(&folder, &[&args[..], &SHAPE, &files].concat());
    assert_eq!((ended, out.as_str()), (Some(0), ""), "{err}");
    for words in ["plan: ", "prefill: ", "decode: ", "mixed: ", "p90", "wrote mine.toml"] {
        assert!(err.contains(words), "'{words}' is not said: {err}");
    }

    let read = |name: &str| {
        KnownProfile(toml::from_str(&std::fs::read_to_string(service.path(name)).unwrap()).unwrap())
    };
    let (truth, mine) = (read("truth.toml"), read("mine.toml"));
    let mut worst: Vec<(String, f64)> = Vec::new();
    let mut compare = |what: String, of: &dyn Fn(&KnownProfile) -> f64| {
        worst.push((what, 100.0 * (of(&mine) - of(&truth)).abs() / of(&truth)));
    };
    for (new, prefix) in
        [(64.0, 0.0), (300.0, 0.0), (1_000.0, 0.0), (2_000.0, 0.0), (128.0, 1_500.0), (512.0, 1_024.0)]
    {
        compare(format!("prefill {new} behind {prefix}"), &|c| c.prefill_us(new, prefix));
    }
    for (batch, context) in [(1.0, 100.0), (1.0, 1_500.0), (4.0, 1_000.0), (8.0, 1_000.0), (8.0, 4_000.0)] {
        compare(format!("decode {batch} at {context}"), &|c| c.decode_us(batch, context));
    }
    compare("mixed".into(), &|c| c.decode_us(8.0, 1_000.0) + c.prefill_us(256.0, 0.0) - c.shared_us());
    worst.sort_by(|a, b| b.1.total_cmp(&a.1));
    let middle = worst[worst.len() / 2].1;
    assert!(middle < 4.0 && worst[0].1 < 10.0, "{worst:?}\n{err}");

    // Its readers take it, and so does the fit of its table.
    std::fs::write(service.path("cluster.toml"), "[cluster]\nprofile = \"mine.toml\"\n").unwrap();
    for args in [
        &["profile", "show", "mine.toml"][..],
        &["config", "check", "cluster.toml"],
        &["profile", "fit", "mine.csv", "--system", "mine", "--backend", "measured", "--layers", "4"],
    ] {
        let (ended, _, err) = run(&folder, args);
        assert_eq!(ended, Some(0), "{args:?}: {err}");
    }
    let models: Value = service.get("/v1/models").ok().json();
    assert!(mine.0["source"].as_str().unwrap().contains(models["data"][0]["id"].as_str().unwrap()));
}

#[test]
fn what_cannot_be_measured_is_said_and_nothing_is_written() {
    let service = timed("2p2d");
    let folder = service.folder().to_owned();
    let url = format!("http://{}", service.clients);
    let refused = |url: &str, more: &[&str], words: &[&str]| {
        let args = ["profile", "measure", "--url", url, "--out", "mine.toml"];
        let (ended, out, err) = run(&folder, &[&args[..], more].concat());
        assert_eq!(ended, Some(1), "{more:?}: {out}{err}");
        assert!(!err.contains("panicked") && !service.path("mine.toml").exists(), "{err}");
        for word in words {
            assert!(err.contains(word), "{more:?}: '{word}' is not said: {err}");
        }
    };
    refused(&url, &SHAPE, &["4 nodes", "--nodes 1b"]);
    refused(&url, &[], &["--model-folder", "--kv-bytes-per-token"]);
    refused(&url, &["--model-folder", "nowhere"], &["nowhere/config.json"]);
    refused(&url, &[&SHAPE[..], &["--model", "gpt-x"]].concat(), &["gpt-x", "truth", "--model"]);
    refused(&url, &SHAPE[..4], &["--kv-capacity-tokens"]);
    refused("http://127.0.0.1:9", &SHAPE, &["127.0.0.1:9", "check the URL"]);
    refused("127.0.0.1", &SHAPE, &["http://host:8000"]);
    // Something that speaks HTTP and is no such API.
    refused(&service.control, &SHAPE, &["/v1/models"]);
}

/// A server with the API's shapes that answers at once and counts no tokens.
#[test]
fn a_server_without_a_model_is_refused() {
    let place = TempDir::new().unwrap();
    let mut server = baton(place.path()).args(["bench", "upstream"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").unwrap();
    let args = ["profile", "measure", "--url", url, "--out", "mine.toml"];
    let (ended, _, err) = run(place.path(), &[&args[..], &SHAPE].concat());
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(
        ended == Some(1) && err.contains("cannot be measured") && err.contains("/v1/completions"),
        "{err}"
    );
    assert!(!place.path().join("mine.toml").exists());
}

#[test]
fn a_key_is_asked_for() {
    let service = Service::configured(
        "[[service.api_keys]]\nkey = \"open-sesame\"\ntenant = \"t\"\n",
        &["--nodes", "1b", "--engine", "timed", "--time-scale", "0.1"],
    );
    let folder = service.folder().to_owned();
    let url = format!("http://{}", service.clients);
    let args = ["profile", "measure", "--url", &url, "--out", "mine.toml"];
    let (ended, _, err) = run(&folder, &[&args[..], &SHAPE].concat());
    assert!(ended == Some(1) && err.contains("401") && err.contains("BATON_API_KEY"), "{err}");
    assert!(!service.path("mine.toml").exists());
    let few = ["--api-key", "open-sesame", "--requests", "3"];
    let (ended, _, err) = run(&folder, &[&args[..], &SHAPE, &few].concat());
    assert!(ended == Some(1) && err.contains("--requests 3 is too few"), "{err}");
    assert!(!service.path("mine.toml").exists());
}
