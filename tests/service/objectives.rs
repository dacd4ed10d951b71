//! Objectives that calls name themselves: the service judges each call by its own, refuses what it cannot promise, and
//! writes them into its capture, whose replays judge alike. And classes that calls get by rules.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::http::Reply;
use super::service::{Service, completion, run, until};

const COMPLETIONS: &str = "/v1/completions";
const KEY: &str = "sesame";
const OUTCOMES: [&str; 7] = ["in_slo", "late_ttft", "late_tbt", "late_e2e", "refused", "failed", "cancelled"];
/// Prefills of some tens of ms, steps of some ms.
const ENGINE: [&str; 6] = ["--engine", "timed", "--nodes", "1p1d", "--time-scale", "0.2"];
/// Objectives that every call here keeps, and no refusals.
const CONFIG: &str = "[scheduler]\nadmission = \"none\"\nlocal_prefill = false\n\
                      [[scheduler.classes]]\nname = \"chat\"\nttft = \"60s\"\ntbt = \"2s\"\n\
                      [service]\nadmin_key = \"sesame\"\ncapture = \"capture\"\n";

/// Requests by how they ended.
type Counts = BTreeMap<String, u64>;

/// Calls with their headers, and how each ends.
const CALLS: [(&[(&str, &str)], &str); 5] = [
    (&[], "in_slo"),
    (&[("x-slo-ttft-ms", "1")], "late_ttft"),
    (&[("x-slo-tbt-ms", "1")], "late_tbt"),
    (&[("x-slo-ttft-ms", "50000"), ("x-slo-tbt-ms", "5000")], "in_slo"),
    (&[("x-slo-ttft-ms", "1"), ("x-slo-tbt-ms", "1")], "late_ttft"),
];

fn ask(service: &Service, number: usize, headers: &[(&str, &str)]) -> Reply {
    let prompt = format!("{number}{}", " a word and another".repeat(40));
    let headers = [headers, &[("content-type", "application/json")]].concat();
    service.post(COMPLETIONS, &headers, &completion(&prompt, 8).to_string())
}

fn counted(service: &Service) -> Counts {
    counted_in(service, "chat")
}

/// The counters of a class that are not zero.
fn counted_in(service: &Service, class: &str) -> Counts {
    let page = service.get("/metrics").ok().text;
    let count = |outcome: &str| {
        let series = format!("baton_slo_requests_total{{class=\"{class}\",outcome=\"{outcome}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&series)?.parse::<u64>().ok()).unwrap_or(0)
    };
    let counts = OUTCOMES.iter().map(|outcome| ((*outcome).to_owned(), count(outcome)));
    counts.filter(|(_, count)| *count > 0).collect()
}

fn wait_for(service: &Service, expected: &Counts) {
    until(Duration::from_secs(20), "every request is counted", || {
        let counts = counted(service);
        (counts != *expected).then(|| format!("{expected:?} were meant: {counts:?}"))
    });
}

/// The only class of the only run of a report.
fn reported(service: &Service, args: &[&str]) -> Counts {
    let args = [args, &["--time-unit", "ms", "--config", "baton.toml", "--json", "out.json"]].concat();
    let (code, said, why) = run(service.folder(), &args);
    assert_eq!(code, Some(0), "{said}{why}");
    let report = std::fs::read_to_string(service.path("out.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    let class = &report["runs"][0]["classes"][0];
    let count = |outcome: &str| class[if outcome == "refused" { "rejected" } else { outcome }].as_u64();
    let counts = OUTCOMES.iter().map(|outcome| ((*outcome).to_owned(), count(outcome).unwrap()));
    counts.filter(|(_, count)| *count > 0).collect()
}

#[test]
fn calls_are_judged_by_the_objectives_that_they_name_live_and_replayed() {
    let mut service = Service::configured(CONFIG, &ENGINE);
    let mut expected = Counts::new();
    for (number, (headers, outcome)) in CALLS.iter().enumerate() {
        ask(&service, number, headers).ok();
        *expected.entry((*outcome).to_owned()).or_default() += 1;
    }
    wait_for(&service, &expected);

    // With admission control, what cannot be promised is refused at once.
    let url = format!("http://{}", service.clients);
    let operate = ["policy", "set", "admission=slo", "--key", KEY, "--url", &url];
    let (code, said, why) = run(service.folder(), &operate);
    assert_eq!(code, Some(0), "{said}{why}");
    for header in ["x-slo-ttft-ms", "x-slo-tbt-ms"] {
        let refused = ask(&service, 9, &[(header, "1")]);
        assert_eq!((refused.status, refused.error_code().as_str()), (400, "objective_unreachable"));
        assert_eq!(refused.json()["error"]["param"], header, "{refused:?}");
        assert!(refused.text.contains("1 ms"), "it names what was asked for: {refused:?}");
        let wrong = ask(&service, 9, &[(header, "1.5")]);
        assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &header.into()), "{wrong:?}");
    }
    ask(&service, 9, &[("x-slo-ttft-ms", "50000"), ("x-slo-tbt-ms", "2000")]).ok();
    *expected.entry("in_slo".into()).or_default() += 1;
    expected.insert("refused".into(), 2);
    wait_for(&service, &expected);

    assert_eq!(service.stop(), Some(0), "{}", service.errors());
    let files: Vec<_> =
        std::fs::read_dir(service.path("capture")).unwrap().map(|f| f.unwrap().path()).collect();
    let [capture] = files.as_slice() else { panic!("one file of a trace: {files:?}") };
    let capture = capture.display().to_string();
    // The two that were refused were asked of a policy that refuses; the replay admits them, and they are late.
    let late = Counts::from([("in_slo".into(), 3), ("late_ttft".into(), 3), ("late_tbt".into(), 2)]);
    assert_eq!(reported(&service, &["replay", &capture]), late);

    let again = Service::configured(CONFIG, &ENGINE);
    let url = format!("http://{}", again.clients);
    assert_eq!(reported(&again, &["replay", &capture, "--live", &url]), late, "as the client measures it");
    wait_for(&again, &late);
}

/// Two classes, and a rule for each kind of field.
const RULES: &str = "[[scheduler.classes]]\nname = \"chat\"\n[[scheduler.classes]]\nname = \"batch\"\n\
                     [service]\nclass_rules = [\n{ priority = 5, class = \"batch\" },\n\
                     { tenant = \"lab\", class = \"batch\" },\n{ model = \"tiny\", class = \"batch\" },\n]\n";

#[test]
fn rules_give_calls_their_class_and_follow_the_file() {
    let service = Service::configured(RULES, &ENGINE);
    let call = |body: Value, headers: &[(&str, &str)]| {
        let mut whole = completion("a few words", 2);
        body.as_object().unwrap().iter().for_each(|(name, value)| whole[name] = value.clone());
        let headers = [headers, &[("content-type", "application/json")]].concat();
        service.post(COMPLETIONS, &headers, &whole.to_string())
    };
    let lab = ("x-tenant-id", "lab");
    call(json!({"priority": 5}), &[]).ok();
    call(json!({}), &[lab]).ok();
    call(json!({"priority": 0}), &[]).ok();
    call(json!({"priority": 5}), &[("x-slo-class", "chat")]).ok();
    let refused = call(json!({"priority": 6}), &[lab]);
    assert_eq!((refused.status, refused.error_code().as_str()), (400, "unsupported_parameter"));
    assert!(refused.text.contains("there are classes for: 5"), "{refused:?}");
    let is = |chat, batch| {
        until(Duration::from_secs(20), "each call counts in its class", || {
            let count = |class| counted_in(&service, class).values().sum::<u64>();
            let counts = (count("chat"), count("batch"));
            (counts != (chat, batch)).then(|| format!("{chat} and {batch} were meant: {counts:?}"))
        });
    };
    is(2, 2);
    // The file is followed: the priority has no rule any more, and the tenant another class.
    let other = RULES.replace("{ priority = 5, class = \"batch\" },\n", "").replace("\"lab\"", "\"other\"");
    std::fs::write(service.path("baton.toml"), other).unwrap();
    until(Duration::from_secs(20), "the file is followed", || {
        let refused = call(json!({"priority": 5}), &[]);
        (!refused.text.contains("priority is not served here")).then(|| format!("{refused:?}"))
    });
    // A call is counted when its answer is out.
    std::thread::sleep(Duration::from_millis(300));
    let before = counted_in(&service, "batch").values().sum::<u64>();
    call(json!({}), &[("x-tenant-id", "other")]).ok();
    until(Duration::from_secs(20), "the call counts", || {
        let now = counted_in(&service, "batch").values().sum::<u64>();
        (now != before + 1).then(|| format!("{before} and then {now}"))
    });
}
