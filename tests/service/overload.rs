//! Overload: the service rejects at once each request that it cannot serve in time, with a true time for the retry.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::http::{self, Reply};
use super::service::{Service, completion};

/// First tokens within 2 s, on an engine that prefills a prompt of [`PROMPT`] bytes in a large part of that.
const CONFIG: &str = "[scheduler]\nblock_tokens = 16\n\n[[scheduler.classes]]\nname = \"default\"\n\
    ttft_us = 2_000_000\ntbt_us = 200_000\n";
const PROMPT: usize = 3_000;
const CLIENTS: usize = 24;
/// So many clients come at once, and again when these are served.
const FLOODS: usize = 3;
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

/// Clients that retry at the given time are served, 85 % of them at the first retry. Refusals are quick. An admitted
/// client gets the first token in time.
#[test]
fn refusals_are_quick_and_tell_the_truth() {
    let service = Service::configured(CONFIG, &["--engine", "timed", "--nodes", "1p1d"]);
    let stories = Mutex::new(Vec::new());
    for flood in 0..FLOODS {
        std::thread::scope(|scope| {
            for number in flood * CLIENTS..(flood + 1) * CLIENTS {
                let (service, stories) = (&service, &stories);
                scope.spawn(move || {
                    let story = client(service, number);
                    stories.lock().unwrap().push(story);
                });
            }
        });
    }
    let stories = stories.into_inner().unwrap();
    let mut refusals: Vec<f64> = stories.iter().flat_map(|s| s.refusals_ms.clone()).collect();
    refusals.sort_by(f64::total_cmp);
    assert!(refusals.len() >= FLOODS * CLIENTS / 3, "this is no overload: {stories:?}");
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
    assert!(at_once * 100 >= refused.len() * 85, "{at_once} of {}: {stories:?}", refused.len());
    assert!(stories.iter().all(|s| s.served), "somebody was sent away {ROUNDS} times: {stories:?}");
    service.quiet(Duration::from_secs(10));
}

/// A single refused client that retries at the given time is served then. The given time is not much later than
/// necessary.
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

/// Far more long answers than there is room for. A refused client that retries at the given time is admitted then. An
/// admitted client is served to the end, within the tries that every configuration has.
#[test]
fn who_is_refused_for_room_is_let_in_when_told() {
    let config = "[scheduler]\nblock_tokens = 16\n\n[[scheduler.classes]]\nname = \"default\"\n\
        ttft_us = 3_000_000\ntbt_us = 500_000\n";
    let pools = ["--blocks", "256", "--dram-blocks", "0", "--ssd-blocks", "0", "--time-scale", "0.1"];
    let args = [&["--engine", "timed", "--nodes", "1p1d"][..], &pools].concat();
    let service = Service::configured(config, &args);
    let ask = |name: String| {
        let mut body = completion(&format!("{name} {}", "x".repeat(60)), 500);
        body["ignore_eos"] = true.into();
        let json_type = [("content-type", "application/json")];
        http::call(service.clients, "POST /v1/completions", &json_type, &body.to_string()).unwrap()
    };
    // How long answers are is learnt from these.
    for at in 0..10 {
        assert_eq!(ask(format!("lesson {at}")).status, 200);
    }
    let tries = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..60 {
            let (ask, tries) = (&ask, &tries);
            scope.spawn(move || {
                for attempt in 1..=10 {
                    let reply = ask(format!("client {number}"));
                    if reply.status == 200 {
                        tries.lock().unwrap().push(attempt);
                        return;
                    }
                    // When its turn comes its room may be gone all the same: then it would be late.
                    let refused = (reply.status, reply.error_code());
                    assert!([(429, "room".into()), (429, "costly".into())].contains(&refused), "{reply:?}");
                    let wait_ms = reply.header("retry-after-ms").and_then(|v| v.parse().ok()).unwrap();
                    std::thread::sleep(Duration::from_millis(wait_ms));
                }
                tries.lock().unwrap().push(u32::MAX);
            });
        }
    });
    let tries = tries.into_inner().unwrap();
    let refused = tries.iter().filter(|tries| **tries > 1).count();
    let at_once = tries.iter().filter(|tries| **tries == 2).count();
    println!("{refused} of {} were refused, {at_once} of them let in when they came back first", tries.len());
    assert!(refused >= 10, "there is room for all: {tries:?}");
    // The accuracy of a wait depends on the machine: all were admitted on a quiet one. With waits unrelated to room, which
    // this test guards against, 1 of 104 was admitted.
    assert!(at_once * 100 >= refused * 50, "{at_once} of {refused}: {tries:?}");
    service.quiet(Duration::from_secs(10));
}

/// A request that this cluster could not serve in time even when idle gets no time for a retry.
#[test]
fn what_can_never_be_in_time_is_not_told_to_come_again() {
    let config = CONFIG.replace("ttft_us = 2_000_000", "ttft_us = 100_000");
    let service = Service::configured(&config, &["--engine", "timed", "--nodes", "1p1d"]);
    let (reply, _) = ask(&service, 1);
    assert_eq!((reply.status, reply.error_code().as_str()), (400, "objective_unreachable"), "{reply:?}");
    assert_eq!(
        (reply.header("x-should-retry"), reply.header("retry-after")),
        (Some("false"), None),
        "{reply:?}"
    );
    let predicted_ms = reply.header("x-baton-predicted-ttft-ms").and_then(|v| v.parse::<u64>().ok());
    assert!(predicted_ms.is_some_and(|ms| (100..10_000).contains(&ms)), "{reply:?}");
}
