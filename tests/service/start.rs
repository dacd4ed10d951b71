//! A process that cannot start prints the reason and the remedy, in one line.

use tempfile::TempDir;

use super::service::{Service, run, run_with};

/// Asserts a refusal: the exit code, no panic, every one of `words` on standard error.
#[track_caller]
fn refused(place: &TempDir, args: &[&str], code: i32, words: &[&str]) {
    let (ended, out, err) = run(place.path(), args);
    assert_eq!(ended, Some(code), "{args:?}: {out}{err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    for word in words {
        assert!(err.contains(word), "{args:?}: '{word}' is not said: {err}");
    }
}

#[test]
fn wrong_words_are_explained() {
    let place = TempDir::new().unwrap();
    refused(&place, &["up", "--listne", "127.0.0.1:0"], 2, &["--listne", "--listen"]);
    refused(&place, &["up", "--nodes", "2p"], 2, &["2p", "2p2d"]);
    refused(&place, &["up", "--engine", "quantum"], 2, &["quantum", "builtin"]);
    refused(&place, &["up", "--listen", "nowhere"], 1, &["service.listen", "nowhere", "ADDRESS:PORT"]);
    refused(
        &place,
        &["up", "--listen", "127.0.0.1:0", "--engine", "timed", "--profile", "abacus"],
        1,
        &["abacus"],
    );
    refused(&place, &["up", "--listen", "127.0.0.1:0", "--model", "no-such-folder"], 1, &["no-such-folder"]);
    refused(&place, &["up", "--log", "baton=lots"], 1, &["baton=lots"]);
    refused(&place, &["up", "--config", "missing.toml"], 1, &["missing.toml"]);
    refused(
        &place,
        &["node", "--name", "n", "--role", "chef", "--conductor", "http://127.0.0.1:1"],
        1,
        &["chef", "prefill"],
    );
}

#[test]
fn a_wrong_configuration_is_explained() {
    let place = TempDir::new().unwrap();
    let cases = [
        ("[service]\nlisten_on = \"x\"\n", &["listen_on", "listen"][..]),
        ("[service]\nlost_after_us = 1\n", &["service.lost_after_us", "outside"]),
        ("[service]\ntls_cert = \"c.pem\"\n", &["tls_cert", "tls_key", "both"]),
        ("[service]\ntls_cert = \"c.pem\"\ntls_key = \"k.pem\"\n", &["c.pem"]),
        (
            "[service]\notlp_endpoint = \"http://collector/v1/traces\"\n",
            &["service.otlp_endpoint", "http://HOST:4317 for gRPC", "http://HOST:4318/v1/traces for HTTP"],
        ),
        ("[scheduler]\npolicy = \"moncake\"\n", &["moncake", "mooncake"]),
        ("[service]\njournal = \"/proc/nowhere\"\n", &["journal", "/proc/nowhere"]),
        ("[service]\ncapture = \"/proc/nowhere\"\n", &["capture", "/proc/nowhere"]),
        ("[service\n", &["baton.toml"]),
    ];
    for (text, words) in cases {
        std::fs::write(place.path().join("baton.toml"), text).unwrap();
        let args = ["up", "--listen", "127.0.0.1:0", "--config", "baton.toml", "--engine", "zero"];
        refused(&place, &args, 1, words);
    }
}

#[test]
fn wrong_words_of_the_environment_for_spans_are_explained() {
    let place = TempDir::new().unwrap();
    let text = "[service]\notlp_endpoint = \"http://127.0.0.1:4318/v1/traces\"\n";
    std::fs::write(place.path().join("baton.toml"), text).unwrap();
    for (variable, value, why) in [
        ("OTEL_RESOURCE_ATTRIBUTES", "team=kv,prod", "entry 2 has no ="),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=100%", "entry 1 has a % without"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "my key=hush", "\"my key\" is no name of a header"),
    ] {
        let args = ["up", "--listen", "127.0.0.1:0", "--config", "baton.toml", "--engine", "zero"];
        let (code, _, err) = run_with(place.path(), &args, &[(variable, value)]);
        assert!(code == Some(1) && err.contains(&format!("{variable}: {why}")), "{err}");
        assert!(
            err.contains("write KEY=VALUE") && !err.contains("hush") && !err.contains("panicked"),
            "{err}"
        );
    }
}

#[test]
fn a_taken_port_is_named() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let place = TempDir::new().unwrap();
    let taken = service.clients.to_string();
    refused(
        &place,
        &["up", "--engine", "zero", "--listen", &taken],
        1,
        &["service.listen", &taken, "another port"],
    );
    service.ask("/v1/completions", &super::service::completion("still there", 2)).ok();
}

/// A node that does not fit is refused for good, and says why.
#[test]
fn a_node_that_cannot_join_is_told_why() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1b"]);
    let node = |more: &[&str]| {
        let place = TempDir::new().unwrap();
        let args = ["node", "--name", "odd", "--role", "decode", "--conductor", &service.control];
        let (code, _, err) = run(place.path(), &[&args[..], more].concat());
        assert_eq!(code, Some(1), "{err}");
        err
    };
    let other_size = node(&["--engine", "zero", "--block-tokens", "32"]);
    assert!(other_size.contains("32") && other_size.contains("block_tokens = 16"), "{other_size}");
    let other_model = node(&["--engine", "builtin"]);
    assert!(other_model.contains("cannot share KV"), "{other_model}");
}
