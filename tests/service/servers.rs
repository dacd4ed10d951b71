//! `baton serve --servers`: the real process before stand-ins of vLLM and SGLang, over real HTTP.

use std::fs::File;
use std::net::SocketAddr;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_remote::testing::{
    Cost, Fabric, FakeConnector, FakeRole, FakeSglang, FakeTokenizer, FakeVllm, Fault, SglangSpec, VllmSpec,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::http::{self, OpenAnswer, Reply};
use super::service::{baton, chat, run, signal, until};

const LONG: Duration = Duration::from_secs(60);

/// `baton serve`, where it listens, and its folder. It is gone when this is.
struct Serve {
    child: Child,
    folder: TempDir,
    clients: SocketAddr,
}

impl Serve {
    #[track_caller]
    fn start(folder: TempDir, args: &[&str], env: &[(&str, &str)]) -> Self {
        let out = |end: &str| File::create(folder.path().join(end)).unwrap();
        let mut command = baton(folder.path());
        command.args(["serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"]).args(args);
        let child = command.envs(env.iter().copied()).stdout(out("out")).stderr(out("err")).spawn().unwrap();
        let mut serve = Self { child, folder, clients: SocketAddr::from(([0, 0, 0, 0], 0)) };
        until(LONG, "it greets", || {
            let said = serve.said("out");
            let at = said.split_once("front door on http://").and_then(|(_, rest)| rest.split_once(','));
            serve.clients = at.and_then(|(at, _)| at.parse().ok()).unwrap_or(serve.clients);
            let gone = serve.child.try_wait().unwrap();
            assert!(gone.is_none(), "{gone:?}: {}", serve.said("err"));
            (serve.clients.port() == 0).then_some(said)
        });
        serve
    }

    fn said(&self, end: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(end)).unwrap_or_default()
    }

    #[track_caller]
    fn ready(&self) {
        until(LONG, "it is ready", || (self.get("/ready").status != 200).then(|| self.said("err")));
    }

    #[track_caller]
    fn get(&self, path: &str) -> Reply {
        http::call(self.clients, &format!("GET {path}"), &[], "").unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    #[track_caller]
    fn chat(&self, text: &str, tokens: u32) -> Reply {
        let json = [("content-type", "application/json")];
        let body = chat(text, tokens).to_string();
        http::call(self.clients, "POST /v1/chat/completions", &json, &body).unwrap()
    }

    /// Names and states of the nodes that are attached.
    fn nodes(&self) -> Vec<String> {
        let status: Value = self.get("/admin/status").ok().json();
        let nodes = status["nodes"].as_array().unwrap().iter();
        let mut names: Vec<String> = nodes.map(|node| node["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    #[track_caller]
    fn attached(&self, names: &[&str]) {
        until(LONG, "the nodes are attached", || {
            let there = self.nodes();
            (there != names).then(|| format!("{there:?}, not {names:?}: {}", self.said("err")))
        });
    }

    /// Ends it as systemd does; the exit code.
    #[track_caller]
    fn stop(&mut self) -> Option<i32> {
        signal(self.child.id(), Signal::TERM);
        let mut code = None;
        until(LONG, "it ends", || match self.child.try_wait().unwrap() {
            Some(status) => {
                code = status.code();
                None
            }
            None => Some(self.said("err")),
        });
        code
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("it said:\n{}", self.said("err"));
        }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn vllm(on: &Runtime, fabric: &Fabric, role: FakeRole, port: u16) -> FakeVllm {
    let whole = role == FakeRole::Whole;
    let connector = if whole { FakeConnector::None } else { FakeConnector::Nixl };
    let spec = VllmSpec::new(role, connector);
    let token_time = Duration::from_millis(2);
    on.block_on(FakeVllm::start(VllmSpec { letters: true, token_time, port, ..spec }, fabric)).unwrap()
}

/// Writes a list: name, role, address, label.
fn list(folder: &TempDir, servers: &[(&str, &str, &str, &str)]) {
    let one = |(name, role, url, labels): &(&str, &str, &str, &str)| {
        format!(
            "[[member]]\nname = \"{name}\"\nrole = \"{role}\"\naddresses = [\"{url}\"]\nlabels = {{ {labels} }}\n"
        )
    };
    let text: String = servers.iter().map(one).collect();
    std::fs::write(folder.path().join("new"), text).unwrap();
    std::fs::rename(folder.path().join("new"), folder.path().join("servers.toml")).unwrap();
}

/// The text of an answer.
fn words(reply: Reply) -> String {
    reply.ok().json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// The text of a streamed answer.
fn streamed(serve: &Serve, text: &str, tokens: u32) -> String {
    let mut body = chat(text, tokens);
    body["stream"] = json!(true);
    let json = [("content-type", "application/json")];
    let mut open =
        OpenAnswer::new(serve.clients, "POST /v1/chat/completions", &json, &body.to_string()).unwrap();
    assert_eq!(open.status(), 200);
    let mut answer = String::new();
    while let Some(event) = open.event().unwrap() {
        if event == "[DONE]" {
            return answer;
        }
        let event: Value = serde_json::from_str(&event).unwrap();
        answer += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
    }
    panic!("the stream broke off after {answer:?}");
}

#[test]
fn listed_servers_answer_are_shown_and_come_back() {
    let (on, fabric) = (runtime(), Fabric::new());
    let one = vllm(&on, &fabric, FakeRole::Whole, 0);
    let url = one.url();
    let each = ["--servers", &url, "--each", "--engine vllm --model bytes --pass-tokens 4096"];
    let mut serve = Serve::start(TempDir::new().unwrap(), &each, &[]);
    serve.ready();
    let name = url.strip_prefix("http://").unwrap();
    serve.attached(&[name]);
    let answer = words(serve.chat("hello", 12));
    assert_eq!((answer.len(), streamed(&serve, "hello", 12)), (12, answer.clone()));
    assert!(serve.get("/metrics").ok().text.contains(name), "the node is in the metrics");
    let at = format!("http://{}", serve.clients);
    let (code, said, wrong) = run(serve.folder.path(), &["top", "--once", "--url", &at]);
    assert!(code == Some(0) && said.contains(name), "{said}{wrong}");
    // The only server dies. A client gets an error meanwhile, and the server is used again as soon as it is back.
    let port = name.rsplit_once(':').unwrap().1.parse().unwrap();
    one.kill();
    drop(one);
    serve.attached(&[]);
    assert_eq!(serve.chat("nobody there", 3).status, 503);
    let one = vllm(&on, &fabric, FakeRole::Whole, port);
    serve.attached(&[name]);
    serve.ready();
    assert_eq!(words(serve.chat("hello", 12)), answer);
    assert_eq!((serve.stop(), one.violations()), (Some(0), Vec::new()));
}

/// Such a request once failed within milliseconds: its retries were all refused at once.
#[test]
fn a_request_outlasts_a_moment_in_which_every_engine_is_busy() {
    let on = runtime();
    let engines = [(); 2].map(|()| vllm(&on, &Fabric::new(), FakeRole::Whole, 0));
    let urls = engines.iter().map(FakeVllm::url).collect::<Vec<_>>().join(",");
    let each = ["--servers", &urls, "--each", "--engine vllm --model bytes"];
    let mut serve = Serve::start(TempDir::new().unwrap(), &each, &[]);
    until(LONG, "both are attached", || (serve.nodes().len() != 2).then(|| serve.said("err")));
    serve.ready();
    for status in [503, 429] {
        let calls = || engines.iter().map(|engine| engine.received().len()).sum::<usize>();
        let before = calls();
        engines.iter().for_each(|engine| engine.fault(Fault::Busy(status, 1), 1_000));
        let began = Instant::now();
        let answer = std::thread::scope(|scope| {
            let asked = scope.spawn(|| serve.chat("hello", 12));
            std::thread::sleep(Duration::from_millis(900));
            engines.iter().for_each(|engine| engine.heal());
            asked.join().unwrap()
        });
        assert_eq!(words(answer).len(), 12, "after {status}");
        assert!(began.elapsed() >= Duration::from_secs(1), "none was asked before its time");
        assert_eq!(calls() - before, 3, "each refuses once, and one serves");
    }
    assert_eq!(serve.stop(), Some(0));
}

#[test]
fn a_list_in_a_file_is_followed_and_no_client_notices() {
    let (on, fabric, folder) = (runtime(), Fabric::new(), TempDir::new().unwrap());
    let [a, b] = [(); 2].map(|()| vllm(&on, &fabric, FakeRole::Whole, 0));
    let (a_url, b_url) = (a.url(), b.url());
    let (first, second) = (("a", "both", &*a_url, ""), ("b", "both", &*b_url, "zone = \"east\""));
    list(&folder, &[first]);
    let each = ["--servers", "servers.toml", "--each", "--engine vllm --model=bytes"];
    let mut serve = Serve::start(folder, &each, &[]);
    serve.ready();
    let (over, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|client| {
                let (serve, over, served) = (&serve, &over, &served);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let text = words(serve.chat(&format!("client {client}"), 40));
                        assert_eq!(text.len(), 40);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let changes: [(&[_], &[&str]); 4] = [
            (&[first, second], &["a", "b"]),
            (&[second], &["b"]),
            (&[first, second], &["a", "b"]),
            (&[first], &["a"]),
        ];
        for (listed, names) in changes {
            list(&serve.folder, listed);
            serve.attached(names);
            let before = served.load(Ordering::Relaxed);
            let moved = || (served.load(Ordering::Relaxed) < before + 6).then(|| "no answers".to_owned());
            until(LONG, "clients are served", moved);
            // A file that is just being written says nothing.
            File::create(serve.folder.path().join("servers.toml")).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    assert_eq!(serve.nodes(), ["a"], "an empty file changes nothing");
    assert_eq!((serve.stop(), a.violations(), b.violations()), (Some(0), Vec::new(), Vec::new()));
}

#[test]
fn a_pair_is_made_of_roles_and_labels() {
    let (on, fabric, folder) = (runtime(), Fabric::new(), TempDir::new().unwrap());
    let (p, d) = (vllm(&on, &fabric, FakeRole::Prefill, 0), vllm(&on, &fabric, FakeRole::Decode, 0));
    let alone = vllm(&on, &Fabric::new(), FakeRole::Whole, 0);
    let nixl = "engine = \"vllm\", handoff = \"nixl\", rack = \"7\"";
    list(&folder, &[("p0", "prefill", &p.url(), nixl), ("d0", "decode", &d.url(), nixl)]);
    let mut pair = Serve::start(folder, &["--servers", "servers.toml", "--model", "bytes"], &[]);
    pair.ready();
    pair.attached(&["d0", "p0"]);
    let url = alone.url();
    let mut single = Serve::start(
        TempDir::new().unwrap(),
        &["--servers", &url, "--each", "--engine=vllm", "--model=bytes"],
        &[("BATON_ENGINE_KEY", "a-key")],
    );
    single.ready();
    for text in
        ["one", "a rather longer prompt that fills more than a single block of the engine's cache, I hope"]
    {
        assert_eq!(words(pair.chat(text, 20)), words(single.chat(text, 20)));
        assert_eq!(streamed(&pair, text, 20), streamed(&single, text, 20));
    }
    let keys: Vec<_> = alone.received().into_iter().filter_map(|call| call.authorization).collect();
    assert!(!keys.is_empty() && keys.iter().all(|key| key == "Bearer a-key"), "{keys:?}");
    assert_eq!((pair.stop(), single.stop()), (Some(0), Some(0)));
    assert_eq!((p.violations(), d.violations()), (Vec::new(), Vec::new()));
}

/// An idle engine's prefill was once costed in whole mixed steps, so that what it had cached saved nothing, and later turns
/// of a conversation went past their prefix; how many did depended on `tbt`.
#[test]
fn later_turns_find_their_prefix_on_whole_engines_whatever_the_objective() {
    let on = runtime();
    for tbt_us in [40_000, 200_000, 5_000_000] {
        let cost = Cost { cache_blocks: 2_000, prompt_token_time: Duration::from_micros(400), ..Cost::NONE };
        let spec = VllmSpec { cost, ..VllmSpec::new(FakeRole::Whole, FakeConnector::None) };
        let engines = [(); 2].map(|()| {
            let spec = VllmSpec {
                letters: true,
                blocks: 2_000,
                token_time: Duration::from_millis(10),
                ..spec.clone()
            };
            on.block_on(FakeVllm::start(spec, &Fabric::new())).unwrap()
        });
        let folder = TempDir::new().unwrap();
        let config = format!(
            "[scheduler]\nblock_tokens = 32\nfetch = false\n[[scheduler.classes]]\nname = \"standard\"\nttft_us = 60_000_000\n\
             tbt_us = {tbt_us}\n"
        );
        std::fs::write(folder.path().join("baton.toml"), config).unwrap();
        let urls = engines.iter().map(FakeVllm::url).collect::<Vec<_>>().join(",");
        let each = ["-c", "baton.toml", "--servers", &urls, "--each", "--engine vllm --model bytes"];
        let mut serve = Serve::start(folder, &each, &[]);
        until(LONG, "both are attached", || (serve.nodes().len() != 2).then(|| serve.said("err")));
        serve.ready();
        let missed = conversations(&serve);
        assert_eq!(missed, [""; 0], "of 36 later turns, with tbt_us = {tbt_us}");
        // Hits on a prefix prove nothing if one engine served all turns.
        let used = engines.iter().filter(|engine| engine.received().iter().any(|call| is_turn(&call.body)));
        assert_eq!(used.count(), 2, "with tbt_us = {tbt_us}");
        assert_eq!(serve.stop(), Some(0));
    }
}

/// Whether a call that an engine received is longer than what Baton asks by itself.
fn is_turn(body: &Value) -> bool {
    body["prompt"].as_array().is_some_and(|tokens| tokens.len() > 300)
}

/// Twelve conversations of four turns; the later turns that did not find all that their engine had been sent of them before.
/// The first turns come all at once, so that both engines have some; then it is one at a time, and both are idle.
fn conversations(serve: &Serve) -> Vec<String> {
    let mut all: Vec<Conversation> = (0..12).map(Conversation::new).collect();
    std::thread::scope(|scope| {
        for one in &mut all {
            scope.spawn(|| one.turn(serve));
        }
    });
    let turns = (0..3).flat_map(|_| 0..12);
    turns.filter_map(|at| all[at].turn(serve)).collect()
}

/// A client that asks again with all that it has said before.
struct Conversation {
    number: usize,
    turns: usize,
    said: String,
    /// Tokens of its last prompt.
    tokens: u64,
}

impl Conversation {
    fn new(number: usize) -> Self {
        Self { number, turns: 0, said: format!("{number}"), tokens: 0 }
    }

    /// Asks; what it says when the engine did not have what it was sent before.
    #[track_caller]
    fn turn(&mut self, serve: &Serve) -> Option<String> {
        let words = if self.turns == 0 { 60 + 40 * (self.number % 3) } else { 30 };
        let word = |word: usize| format!(" {}", (self.number * 7_919 + self.turns * 613 + word * 31) % 9_973);
        self.said += &(0..words).map(word).collect::<String>();
        let usage = serve.chat(&self.said, 2).ok().json()["usage"].clone();
        let [prompt, cached] = [&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]]
            .map(|count| count.as_u64().unwrap());
        // Template tokens between the text and the answer. The next turn's text goes on before them, so they are not
        // reused.
        let close = 1 + "\n".len() + 1 + "assistant\n".len();
        let there = self.tokens.saturating_sub(close as u64) / 32 * 32;
        (self.turns, self.tokens) = (self.turns + 1, prompt);
        (cached < there)
            .then(|| format!("turn {} of {}: {cached} of {there} tokens", self.turns, self.number))
    }
}

/// Its vocabulary is as large, and its tokens are others: what it answered would be an answer to another prompt.
#[test]
fn a_server_of_another_tokenizer_stays_out_and_is_told_of() {
    let on = runtime();
    let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
    let tokenizer = FakeTokenizer { turned: 3, ..FakeTokenizer::default() };
    let other = on.block_on(FakeVllm::start(VllmSpec { tokenizer, ..spec }, &Fabric::new())).unwrap();
    let url = other.url();
    let mut serve = Serve::start(
        TempDir::new().unwrap(),
        &["--servers", &url, "--each", "--engine vllm", "--model", "bytes"],
        &[],
    );
    let name = url.strip_prefix("http://").unwrap().to_owned();
    let why = "its tokens are not those of --model";
    until(LONG, "it is kept out", || {
        let ready = serve.get("/ready");
        let status: Value = serve.get("/admin/status").ok().json();
        let told = status["outside"][&name].as_str().unwrap_or_default();
        let says = ready.status == 503 && ready.text.contains(why) && told.contains(why);
        (!says).then(|| format!("{}: {status}", ready.text))
    });
    assert_eq!(serve.nodes(), [""; 0]);
    let refused = serve.chat("hello", 3);
    assert_eq!(refused.status, 503, "{}", refused.text);
    assert!(serve.said("err").contains(why), "{}", serve.said("err"));
    assert!(!other.received().iter().any(|call| call.path.contains("chat")));
    assert_eq!(serve.stop(), Some(0));
}

/// Prompts become tokens at the front door: what a node knows of them is of no use if the front door does not.
#[test]
fn a_front_door_of_another_tokenizer_takes_no_server() {
    let on = runtime();
    let server = vllm(&on, &Fabric::new(), FakeRole::Whole, 0);
    let folder = TempDir::new().unwrap();
    // As the stand-in has it, but that a chat reads otherwise: this front door has no chats.
    let words = ["--servers", &server.url(), "--each", "--engine vllm --model bytes", "--model", "words"];
    std::fs::create_dir(folder.path().join("words")).unwrap();
    let tokenizer = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null, "truncation": null, "padding": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}});
    std::fs::write(folder.path().join("words/tokenizer.json"), tokenizer.to_string()).unwrap();
    let mut serve = Serve::start(folder, &words, &[]);
    until(LONG, "it is kept out", || {
        let said = serve.get("/ready").text;
        (!said.contains("another tokenizer or chat template than the front door")).then_some(said)
    });
    assert_eq!((serve.nodes(), serve.stop()), (Vec::new(), Some(0)));
}

#[test]
fn a_list_that_cannot_be_read_is_told_of_by_ready() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("servers.toml"), "member = 3").unwrap();
    let each = ["--servers", "servers.toml", "--each", "--engine vllm --model=bytes"];
    let mut serve = Serve::start(folder, &each, &[]);
    until(LONG, "it says what is wrong", || {
        let said = serve.get("/ready").text;
        (!said.contains("list of servers") || !said.contains("servers.toml")).then_some(said)
    });
    assert_eq!(serve.stop(), Some(0));
}

#[test]
fn sglang_is_driven_too() {
    let on = runtime();
    let spec = SglangSpec { letters: true, ..SglangSpec::new(FakeRole::Whole) };
    let server = on.block_on(FakeSglang::start(spec, &Fabric::new())).unwrap();
    let url = server.url();
    let mut serve = Serve::start(
        TempDir::new().unwrap(),
        &["--servers", &url, "--each", "--engine sglang --model bytes"],
        &[],
    );
    serve.ready();
    let answer = words(serve.chat("hello", 9));
    assert_eq!((answer.len(), streamed(&serve, "hello", 9)), (9, answer.clone()));
    assert_eq!((serve.stop(), server.violations()), (Some(0), Vec::new()));
}

/// An etcd that the environment names elects who leads; what this process drives is attached to it all the same.
#[test]
fn one_that_stands_for_election_takes_its_servers_for_its_own() {
    let each = ["--servers", "http://127.0.0.1:1", "--each", "--engine vllm --model bytes"];
    let etcd = [("BATON_ETCD", "http://127.0.0.1:1")];
    let mut serve = Serve::start(TempDir::new().unwrap(), &each, &etcd);
    serve.attached(&[]);
    assert_eq!(serve.stop(), Some(0));
}

#[test]
fn what_cannot_be_driven_is_explained_before_anything_is_served() {
    let place = TempDir::new().unwrap();
    let one = "http://127.0.0.1:1";
    let twice = format!("{one},{one}");
    let cases: [(&[&str], i32, &[&str]); 10] = [
        (&["--servers", one], 1, &["--engine vllm"]),
        (&["--servers", one, "--each", "--engine vllm"], 1, &["--engine vllm needs --model", "folder"]),
        (
            &["--servers", "127.0.0.1:1", "--each", "--engine vllm"],
            1,
            &["no list of servers", "http://HOST:PORT"],
        ),
        (&["--servers", "http://127.0.0.1", "--each", "--engine vllm"], 1, &["no port"]),
        (&["--servers", "ftp://127.0.0.1:1", "--each", "--engine vllm --model bytes"], 1, &["ftp"]),
        (&["--servers", &twice, "--each", "--engine vllm --model bytes"], 1, &["listed twice"]),
        (&["--servers", one, "--each", "--engine vllm --colour red"], 1, &["--colour", "--pass-tokens"]),
        (&["--servers", "list.toml", "--each", "--name x"], 1, &["--name", "--each"]),
        (&["--servers", "list.toml", "--each", "--engine vlm"], 1, &["vlm", "vllm"]),
        (&["--each", "--engine vllm"], 2, &["--servers"]),
    ];
    for (args, code, words) in cases {
        let (ended, out, err) = run(place.path(), &[&["serve", "--listen", "127.0.0.1:0"], args].concat());
        assert_eq!(ended, Some(code), "{args:?}: {out}{err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: '{word}' is not said: {err}");
        }
    }
}
