//! Records of a service: a journal that replays to the same effects, a trace that replays.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::service::{Service, chat, run, until};

const CHAT: &str = "/v1/chat/completions";
const CONFIG: &str =
    "[scheduler]\nblock_tokens = 16\n[service]\njournal = \"journal\"\ncapture = \"capture\"\n";

fn files(service: &Service, folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(service.path(folder)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Talks of three turns, a client that leaves, a node that is drained.
fn traffic(service: &Service) {
    for talk in 0..6 {
        let mut body =
            chat(&format!("Talk {talk}. {}", "It goes on for more than one block. ".repeat(4)), 20);
        for _ in 0..3 {
            let answer: Value = service.ask(CHAT, &body).ok().json();
            let messages = body["messages"].as_array_mut().unwrap();
            messages.push(answer["choices"][0]["message"].clone());
            messages.push(json!({"role": "user", "content": "Go on."}));
        }
    }
    let mut endless = chat("The secret word is aardvark.", 4_000);
    endless["stream"] = json!(true);
    drop(service.open(CHAT, &endless));
    // The service is ready with its first pair: the others may come later on a busy machine.
    until(Duration::from_secs(30), "all four nodes are attached", || {
        let nodes = service.status()["nodes"].as_array().map_or(0, Vec::len);
        (nodes < 4).then(|| format!("{nodes} are"))
    });
    service.post("/admin/nodes/p1/drain", &[], "").ok();
    service.ask(CHAT, &chat("One more", 4)).ok();
    service.quiet(Duration::from_secs(10));
}

#[test]
fn journal_and_capture_can_be_replayed() {
    let mut service = Service::configured(CONFIG, &["--engine", "zero", "--nodes", "2p2d"]);
    traffic(&service);
    assert_eq!(service.stop(), Some(0), "{}", service.errors());
    let place = TempDir::new().unwrap();
    let journal = files(&service, "journal");
    let [journal] = journal.as_slice() else { panic!("one file of a journal: {journal:?}") };
    let (code, out, err) = run(place.path(), &["replay", "--journal", &journal.display().to_string()]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("identical effects"), "{out}");
    assert!(out.contains("the service stopped after the last step"), "the journal is closed: {out}");
    let capture = files(&service, "capture");
    let [capture] = capture.as_slice() else { panic!("one file of a trace: {capture:?}") };
    let rows = std::fs::read_to_string(capture).unwrap();
    assert!(!capture.display().to_string().ends_with(".partial"), "{capture:?} is complete");
    assert!(!rows.contains("aardvark") && rows.lines().count() >= 19, "{rows}");
    let capture = capture.display().to_string();
    let (code, out, err) = run(place.path(), &["trace", "lint", "--time-unit", "ms", &capture]);
    assert_eq!(code, Some(0), "{out}{err}");
    let (code, out, err) =
        run(place.path(), &["replay", &capture, "--time-unit", "ms", "--json", "replayed.json"]);
    assert_eq!(code, Some(0), "{out}{err}");
    // Another history does not step to the same effects.
    let text = std::fs::read_to_string(journal).unwrap();
    let forged = text.replacen("\"prompt_tokens\":", "\"prompt_tokens\":1", 2);
    assert_ne!(forged, text);
    std::fs::write(place.path().join("forged.jsonl"), forged).unwrap();
    let (code, out, err) = run(place.path(), &["replay", "--journal", "forged.jsonl"]);
    assert_eq!(code, Some(1), "{out}{err}");
}

/// The journal of a crashed service is readable up to its last whole line.
#[test]
fn a_killed_service_leaves_a_journal_that_replays() {
    let mut service = Service::configured(CONFIG, &["--engine", "zero", "--nodes", "2p2d"]);
    traffic(&service);
    // The journal is written behind the service: a moment is enough for what was served.
    std::thread::sleep(Duration::from_millis(500));
    super::service::signal(service.pid(), rustix::process::Signal::KILL);
    assert_eq!(service.wait(Duration::from_secs(5)), None);
    let journal = files(&service, "journal");
    let place = TempDir::new().unwrap();
    let (code, out, err) = run(place.path(), &["replay", "--journal", &journal[0].display().to_string()]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("identical effects") && !out.contains("the service stopped"), "{out}");
    // The next start completes the trace that was under way.
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("baton.toml"), CONFIG).unwrap();
    std::fs::rename(service.path("capture"), folder.path().join("capture")).unwrap();
    let mut next = Service::start(folder, &["--engine", "zero", "--nodes", "1b"]);
    next.stop();
    let found = files(&next, "capture");
    assert!(found.iter().all(|file| file.extension().is_some_and(|e| e == "jsonl")), "{found:?}");
    let (code, out, err) =
        run(place.path(), &["trace", "lint", "--time-unit", "ms", &found[0].display().to_string()]);
    assert_eq!(code, Some(0), "{out}{err}");
}
