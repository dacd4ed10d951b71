//! Configurations tried against stand-ins that are well, and that are not.

use baton_events::{Publisher, PublisherConfig};
use baton_remote::testing::{
    Cost, Fabric, FakeConnector, FakeRole, FakeSglang, FakeTokenizer, FakeVllm, Fault, SglangSpec, VllmSpec,
};
use clap::Parser as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::report::{Line, State};
use super::*;

#[derive(clap::Parser)]
#[command(no_binary_name = true)]
struct Check {
    #[command(flatten)]
    args: CheckArgs,
}

/// Ports that nobody has, blocks as the stand-ins have them.
const GOOD: &str = "[scheduler]\nblock_tokens = 32\nfetch = false\n\
    [service]\nlisten = \"127.0.0.1:0\"\ncontrol = \"127.0.0.1:CONTROL\"\n";

struct CheckTrial {
    report: Report,
}

impl CheckTrial {
    /// The one line of a check that begins so.
    #[track_caller]
    fn line(&self, check: &str) -> &Line {
        let found: Vec<&Line> = self.report.lines().iter().filter(|l| l.check.contains(check)).collect();
        assert_eq!(found.len(), 1, "{check}: {}", self.report.table());
        found[0]
    }

    #[track_caller]
    fn is(&self, check: &str, state: State, word: &str) {
        let line = self.line(check);
        assert!(line.state == state && line.found.contains(word), "{check}: {line:?}");
        assert!(line.state != State::Wrong || !line.remedy.is_empty(), "no remedy: {line:?}");
    }

    #[track_caller]
    fn all_good(&self) {
        assert!(self.report.good(), "{}", self.report.table());
    }
}

async fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("its address").port()
}

async fn check(config: &str, engines: &[String]) -> CheckTrial {
    let place = tempfile::tempdir().expect("a temporary folder");
    let path = place.path().join("baton.toml");
    let config = config.replace("CONTROL", &free_port().await.to_string());
    std::fs::write(&path, config).expect("written");
    let mut words = vec!["-c".to_owned(), path.display().to_string(), "--model=bytes".to_owned()];
    words.extend(engines.iter().flat_map(|engine| ["--engine".to_owned(), engine.clone()]));
    let args = Check::try_parse_from(words).unwrap_or_else(|e| panic!("{e}")).args;
    CheckTrial { report: examine(&args).await }
}

async fn vllm(role: FakeRole, connector: FakeConnector, fabric: &Fabric) -> FakeVllm {
    let cost = Cost { cache_blocks: 341, ..Cost::NONE };
    let spec = VllmSpec { cost, ..VllmSpec::new(role, connector) };
    FakeVllm::start(spec, fabric).await.expect("a stand-in")
}

#[tokio::test]
async fn an_engine_that_keeps_no_prefixes_is_a_surprise() {
    let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
    let engine = FakeVllm::start(spec, &Fabric::new()).await.expect("a stand-in");
    let tried = check(GOOD, &[format!("vllm={}", engine.url())]).await;
    assert!(tried.report.good());
    assert!(tried.report.table().contains("keeps no prefixes"), "{}", tried.report.table());
}

#[tokio::test]
async fn a_file_that_cannot_be_read_ends_the_check() {
    let tried = check("[scheduler]\nadmision = \"early\"\n", &[]).await;
    tried.is("config", State::Wrong, "did you mean `admission`");
    tried.is("all else", State::NotTried, "");
    assert!(!tried.report.good());
}

#[tokio::test]
async fn an_engine_alone_is_asked_for_everything() {
    let fabric = Fabric::new();
    let engine = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let publisher = Publisher::bind(PublisherConfig::new("tcp://127.0.0.1:0", None)).await.expect("a port");
    let spec = format!("vllm={},events={}", engine.url(), publisher.endpoint());
    let tried = check(GOOD, &[spec]).await;
    tried.all_good();
    for (check, word) in [
        ("config", "valid"),
        ("service.control", "free"),
        (": health", "well"),
        (": probe", "context 4096"),
        (": blocks", "32 tokens"),
        (": canary", "ms"),
        (": tokenizer", "a text and a chat have the same tokens"),
        (": events", "can be followed"),
        ("together: roles", "1 both"),
    ] {
        tried.is(check, State::Ok, word);
    }
    let told: serde_json::Value = serde_json::from_str(&tried.report.json()).expect("JSON");
    assert_eq!(told["ok"], true);
    assert_eq!(told["checks"].as_array().map(Vec::len), Some(tried.report.lines().len()));
    assert_eq!(told["checks"][0]["state"], "ok");
    assert!(tried.report.table().contains("0 wrong, 0 not tried"));
    assert!(engine.violations().is_empty(), "{:?}", engine.violations());
}

#[tokio::test]
async fn an_engine_of_another_tokenizer_or_without_one_is_wrong() {
    let fabric = Fabric::new();
    let tokenizer = FakeTokenizer { turned: 1, ..FakeTokenizer::default() };
    let spec = VllmSpec { tokenizer, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
    let engine = FakeVllm::start(spec, &fabric).await.expect("a stand-in");
    let tried = check(GOOD, &[format!("vllm={}", engine.url())]).await;
    tried.is(": canary", State::Ok, "ms");
    tried.is(": tokenizer", State::Wrong, "its tokens are not those of --model");
    assert!(!tried.report.good());
    let config = crate::config::parse(&GOOD.replace("CONTROL", "0")).expect("valid");
    let why = Target::parse("openai=http://127.0.0.1:1", &config, None).err().expect("no folder");
    assert!(why.to_string().contains("--engine openai needs --model"), "{why}");
    let engine = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let more = ",capacity-tokens=4096,max-model-tokens=4096";
    let tried = check(GOOD, &[format!("openai={}{more}", engine.url())]).await;
    tried.is(": health", State::Ok, "well");
    assert!(tried.line(": health").check.starts_with("openai "), "by the name that was given");
}

#[tokio::test]
async fn a_pair_is_alike_and_complete() {
    let fabric = Fabric::new();
    let prefill = vllm(FakeRole::Prefill, FakeConnector::Nixl, &fabric).await;
    let decode = vllm(FakeRole::Decode, FakeConnector::Nixl, &fabric).await;
    let spec = |engine: &FakeVllm, role: &str| format!("vllm={},role={role}", engine.url());
    let both = [spec(&prefill, "prefill"), spec(&decode, "decode")];
    let tried = check(GOOD, &both).await;
    tried.all_good();
    tried.is("together: model", State::Ok, "");
    tried.is("together: handoff", State::Ok, "nixl");
    let tried = check(GOOD, &both[..1]).await;
    tried.is("together: roles", State::Wrong, "nobody is served");
    let other = [both[0].clone(), format!("{},handoff=mooncake", both[1])];
    let tried = check(GOOD, &other).await;
    tried.is("together: handoff", State::Wrong, "mooncake at");
    let other = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let tried = check(GOOD, &[both[0].clone(), spec(&other, "both")]).await;
    tried.is("together: roles", State::Warning, "no peer");
    tried.is("together: handoff", State::Wrong, "none at");
}

#[tokio::test]
async fn engines_of_another_longest_context_set_the_limit_of_all() {
    let fabric = Fabric::new();
    let long = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let spec = VllmSpec { max_model_tokens: 1_024, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
    let short = FakeVllm::start(spec, &fabric).await.expect("a stand-in");
    let tried = check(GOOD, &[&long, &short].map(|engine| format!("vllm={}", engine.url()))).await;
    tried.is("together: context", State::Warning, "1024 to 4096 tokens: 1024 is the limit");
    tried.all_good();
}

#[tokio::test]
async fn an_engine_that_is_away_or_ill_does_not_hide_the_next() {
    let fabric = Fabric::new();
    let well = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let ill = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let away = format!("http://127.0.0.1:{}", free_port().await);
    ill.fault(Fault::NoTokenIds, 9);
    let engines = [&away, &ill.url(), &well.url()].map(|url| format!("vllm={url}"));
    let tried = check(GOOD, &engines).await;
    tried.is(&format!("{away}: health"), State::Wrong, "connect");
    tried.is(&format!("{away}: all else"), State::NotTried, "");
    tried.is(&format!("{}: probe", ill.url()), State::Ok, "version");
    tried.is(&format!("{}: canary", ill.url()), State::Wrong, "canary");
    tried.is(&format!("{}: canary", well.url()), State::Ok, "ms");
    tried.is("engines together", State::NotTried, "1 of 3");
}

#[tokio::test]
async fn blocks_that_differ_are_wrong_where_events_are_followed() {
    let fabric = Fabric::new();
    let engine = vllm(FakeRole::Whole, FakeConnector::None, &fabric).await;
    let sixteen = GOOD.replace("32", "16").replace("fetch = false", "fetch = true");
    let dead = format!("tcp://127.0.0.1:{}", free_port().await);
    let with = format!("vllm={},events={dead}", engine.url());
    let tried = check(&sixteen, &[with]).await;
    tried.is(": blocks", State::Wrong, "cannot be followed");
    tried.is(": events", State::Wrong, &dead);
    tried.is("scheduler.fetch", State::Warning, "true");
    let tried = check(&sixteen, &[format!("vllm={}", engine.url())]).await;
    tried.is(": blocks", State::Warning, "guessed");
    tried.all_good();
    let tried = check(&sixteen, &[format!("vllm={},block-tokens=32", engine.url())]).await;
    tried.is(": blocks", State::Wrong, "scheduler.block_tokens is 16");
}

#[tokio::test]
async fn an_sglang_prefill_needs_its_bootstrap_server() {
    let fabric = Fabric::new();
    let bootstrap = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = bootstrap.local_addr().expect("its address").port();
    let spec = |role| SglangSpec { bootstrap_port: port, repeats: false, ..SglangSpec::new(role) };
    let prefill = FakeSglang::start(spec(FakeRole::Prefill), &fabric).await.expect("a stand-in");
    let decode = FakeSglang::start(spec(FakeRole::Decode), &fabric).await.expect("a stand-in");
    let pair = |port: u16| {
        [
            format!("sglang={},role=prefill,bootstrap-port={port}", prefill.url()),
            format!("sglang={},role=decode", decode.url()),
        ]
    };
    let tried = check(GOOD, &pair(port)).await;
    tried.is(": bootstrap", State::Ok, "answers");
    tried.all_good();
    let swapped = pair(port).map(|one| one.replace("role=decode", "role=prefill"));
    let tried = check(GOOD, &swapped).await;
    assert!(
        tried.report.lines().iter().any(|l| l.state == State::Wrong && l.found.contains("for decode legs"))
    );
    drop(bootstrap);
    let tried = check(GOOD, &pair(port)).await;
    tried.is(": bootstrap", State::Wrong, "cannot connect");
}

#[tokio::test]
async fn engines_that_cannot_be_meant_are_named() {
    for (words, why) in [
        ("http://a:1", "KIND=URL"),
        ("vllm=http://a:1,role", "KIND=URL"),
        ("builtin=http://a:1", "KIND=URL"),
        ("vlm=http://a:1", "vlm"),
        ("vllm=http://a:1,rolle=both", "--rolle"),
        ("vllm=http://a:1,role=chief", "chief"),
        ("vllm=http://a:1,role=prefill,handoff=mooncake", "bootstrap-url"),
        ("openai=http://a:1,events=tcp://a:2", "sglang's announcements"),
    ] {
        let tried = check(GOOD, &[words.to_owned()]).await;
        tried.is("--engine", State::Wrong, why);
    }
}

/// Answers whatever is said with these bytes, for ever.
async fn answering(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut said = [0; 256];
            if stream.read(&mut said).await.is_ok_and(|count| count > 0) {
                let _ = stream.write_all(answer).await;
            }
        }
    });
    address
}

#[tokio::test]
async fn a_port_that_is_taken_is_fine_when_it_is_ours() {
    let ours = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"status\":\"ok\"}").await;
    let control = answering(b"\0\0\0\x04\0\0\0\0\0").await;
    let other = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let at =
        |listen: &str, control: &str| format!("[service]\nlisten = \"{listen}\"\ncontrol = \"{control}\"\n");
    let tried = check(&at(&ours, &control), &[]).await;
    tried.is("service.listen", State::Ok, "running Baton");
    tried.is("service.control", State::Ok, "reached");
    let tried = check(&at(&other, &other), &[]).await;
    tried.is("service.listen", State::Wrong, "something else");
    tried.is("service.control", State::Wrong, "no control port");
    // A proxy before ours may send the answer in chunks, and what is not found is nobody's health.
    let chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{\"status\"\r\n6\r\n:\"ok\"}\r\n0\r\n\r\n";
    let missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 15\r\n\r\n{\"status\":\"ok\"}";
    for (answer, state, word) in
        [(&chunks[..], State::Ok, "running Baton"), (&missing[..], State::Wrong, "something else")]
    {
        let tried = check(&at(&answering(answer).await, &control), &[]).await;
        tried.is("service.listen", state, word);
    }
}

#[tokio::test]
async fn keys_and_folders_are_read_and_tried() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| place.path().join(name).display().to_string();
    let own = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("a certificate");
    let other = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("a certificate");
    std::fs::write(at("cert.pem"), own.cert.pem()).expect("written");
    std::fs::write(at("key.pem"), own.signing_key.serialize_pem()).expect("written");
    std::fs::write(at("other.pem"), other.signing_key.serialize_pem()).expect("written");
    std::fs::write(at("empty.pem"), "").expect("written");
    let with = |certificate: &str, key: &str, folder: &str| {
        format!(
            "{GOOD}tls_cert = \"{}\"\ntls_key = \"{}\"\njournal = \"{}\"\ncapture = \"{}\"\n",
            at(certificate),
            at(key),
            at(folder),
            at("deep/capture")
        )
    };
    let tried = check(&with("cert.pem", "key.pem", "journal"), &[]).await;
    tried.is("service.tls_cert", State::Ok, "1 certificates");
    for setting in ["service.journal", "service.capture"] {
        assert!(tried.line(setting).found.contains("needed"), "{}", tried.report.table());
    }
    assert!(!place.path().join("journal").exists(), "nothing is made");
    let left: Vec<_> = std::fs::read_dir(place.path()).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 4, "{left:?}");
    for (certificate, key) in [("cert.pem", "other.pem"), ("empty.pem", "key.pem"), ("cert.pem", "none.pem")]
    {
        let tried = check(&with(certificate, key, "journal"), &[]).await;
        tried.is(
            "service.tls_cert",
            State::Wrong,
            if certificate == "empty.pem" { "no certificate" } else { key },
        );
    }
    let tried = check(&with("cert.pem", "key.pem", "key.pem/journal"), &[]).await;
    tried.is("service.journal", State::Wrong, "key.pem");
}

#[tokio::test]
async fn ports_that_strangers_reach_want_a_key() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| place.path().join(name).display().to_string();
    std::fs::write(at("cluster.key"), "a key that is long enough, for it has 32\n").expect("written");
    std::fs::write(at("short.key"), "short\n").expect("written");
    let keyed = |control: &str, key: &str| {
        let key = if key.is_empty() { String::new() } else { at(key) };
        format!(
            "[service]\nlisten = \"127.0.0.1:0\"\ncontrol = \"{control}:CONTROL\"\ncluster_key = \"{key}\"\n"
        )
    };
    let tried = check(&keyed("0.0.0.0", ""), &[]).await;
    tried.is("service.cluster_key", State::Warning, "lets in anyone who reaches it");
    tried.all_good();
    check(&keyed("0.0.0.0", "cluster.key"), &[]).await.is("service.cluster_key", State::Ok, "a key");
    check(&keyed("127.0.0.1", "short.key"), &[]).await.is("service.cluster_key", State::Wrong, "5 bytes");
    check(&keyed("127.0.0.1", "none.key"), &[]).await.is("service.cluster_key", State::Wrong, "none.key");
    let quiet = check(&keyed("127.0.0.1", ""), &[]).await;
    assert!(quiet.report.lines().iter().all(|line| !line.check.contains("cluster_key")));
}
