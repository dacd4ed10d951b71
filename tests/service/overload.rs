//! Overload: who cannot be served in time is told at once, and told the truth about when to come again.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::http::{self, Reply};
use super::service::{Service, completion};

/// First tokens within 2 s, on an engine that prefills a prompt of [`PROMPT`] bytes in a large part of that.
const CONFIG: &str = "[scheduler]\nblock_tokens = 16\n\n[[scheduler.classes]]\nname = \"default\"\n\
    ttft_us = 2_000_000\ntbt_us = 200_000\n";
const PROMPT: usize = 3_000;
const CLIENTS: usize = 24;
/// Times that a client comes back.
const ROUNDS: u32 = 6;

/// One client's story.
#[derive(Debug, Default)]
struct Story {
    refusals_ms: Vec<f64>,
    waits_ms: Vec<u64>,
    served: bool,
}

fn ask(service: &Service, client: usize) -> (Reply, f64) {
    // Nothing of a prompt is cached for the next one.
    let body =
        completion(&format!("{client} {}", char::from(b'a' + (client % 26) as u8)).repeat(PROMPT / 4), 1);
    let begun = Instant::now();
    let json_type = [("content-type", "application/json")];
    let reply = http::call(service.clients, "POST /v1/completions", &json_type, &body.to_string()).unwrap();
    (reply, begun.elapsed().as_secs_f64() * 1e3)
}

fn client(service: &Service, number: usize) -> Story {
    let mut story = Story::default();
    for _ in 0..ROUNDS {
        let (reply, took_ms) = ask(service, number);
        if reply.status == 200 {
            story.served = true;
            break;
        }
        assert_eq!(reply.status, 429, "{reply:?}");
        assert_eq!(reply.header("x-should-retry"), Some("true"), "{reply:?}");
        assert!(
            ["ttft", "tbt", "room", "costly", "queue_full"].contains(&reply.error_code().as_str()),
            "{reply:?}"
        );
        let number = |name: &str| reply.header(name).and_then(|v| v.parse::<u64>().ok());
        let (wait_ms, wait_s) = (number("retry-after-ms").unwrap(), number("retry-after").unwrap());
        assert!(wait_s >= 1 && wait_s * 1_000 >= wait_ms && wait_ms >= 1, "{reply:?}");
        story.refusals_ms.push(took_ms);
        story.waits_ms.push(wait_ms);
        std::thread::sleep(Duration::from_millis(wait_ms));
    }
    story
}

/// Clients that come when they were told to are served, most of them at the first return; refusals are
/// quick; and whoever is let in gets the first token in time.
#[test]
fn refusals_are_quick_and_tell_the_truth() {
    let service = Service::configured(CONFIG, &["--engine", "timed", "--nodes", "1p1d"]);
    let stories = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (service, stories) = (&service, &stories);
            scope.spawn(move || {
                let story = client(service, number);
                stories.lock().unwrap().push(story);
            });
        }
    });
    let stories = stories.into_inner().unwrap();
    let mut refusals: Vec<f64> = stories.iter().flat_map(|s| s.refusals_ms.clone()).collect();
    refusals.sort_by(f64::total_cmp);
    assert!(refusals.len() >= CLIENTS / 3, "this is no overload: {stories:?}");
    let median = refusals[refusals.len() / 2];
    println!(
        "{} refusals, median {median:.1} ms, worst {:.1} ms",
        refusals.len(),
        refusals[refusals.len() - 1]
    );
    assert!(median <= 50.0, "half of the refusals took longer than {median} ms: {refusals:?}");
    let refused: Vec<&Story> = stories.iter().filter(|s| !s.waits_ms.is_empty()).collect();
    let at_once = refused.iter().filter(|s| s.served && s.waits_ms.len() == 1).count();
    println!("{at_once} of {} refused clients were served when they came back first", refused.len());
    assert!(stories.iter().all(|s| s.served), "somebody was sent away {ROUNDS} times: {stories:?}");
    service.quiet(Duration::from_secs(10));
}

/// A single client that is refused and comes back when told is served then, and not much later than
/// it could have been.
#[test]
fn the_time_to_come_again_is_true() {
    let service = Service::configured(CONFIG, &["--engine", "timed", "--nodes", "1p1d"]);
    std::thread::scope(|scope| {
        for number in 0..12 {
            let service = &service;
            scope.spawn(move || ask(service, number));
        }
        // They are all there, and not one of them is done yet.
        std::thread::sleep(Duration::from_millis(60));
        let (refused, _) = ask(&service, 20);
        assert_eq!(refused.status, 429, "a dozen others fill the time there is: {refused:?}");
        let wait_ms: u64 = refused.header("retry-after-ms").unwrap().parse().unwrap();
        println!("told {wait_ms} ms");
        std::thread::sleep(Duration::from_millis(wait_ms + wait_ms / 5));
        let (later, _) = ask(&service, 20);
        assert_eq!(later.status, 200, "it was told {wait_ms} ms and came 20 % later: {later:?}");
    });
}
