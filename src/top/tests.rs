//! The page on a terminal that is none, and what keys do to it.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::frame::{Page, Show};
use super::history::History;
use super::scrape::Scrape;
use super::screen::{KeyAction, Screen};
use super::{Objectives, Sample};
use crate::conductor::{NodeStatus, RequestStatus, SloStatus, Status};

const BASE: &str = "http://127.0.0.1:8080";

fn status(requests: usize) -> Status {
    let node = |instance: u32, name: &str, role: &str| NodeStatus {
        name: name.into(),
        instance,
        epoch: 2,
        role: role.into(),
        state: "serving".into(),
        heard_us_ago: 120_000,
        backlog_us: 2_500_000,
        waiting: 3,
        dispatched: 1,
        decodes: 4,
        reserved_tokens: 900,
        running: 4,
        tiers: vec![("hbm".into(), 50, 1, 2048, 33, 0), ("ssd".into(), 0, 0, 0, 0, 0)],
        handoff_bytes: 4_200_000,
        received_bytes: 4_100_000,
        integrity_rejects: 1,
        ..NodeStatus::default()
    };
    let request = |at: usize| RequestStatus {
        request_id: format!("req-{at}"),
        stage: "decode".into(),
        age_us: 1_500_000,
        prompt_tokens: 640,
        answer_tokens: 17,
        attempts: 1,
        prefill: Some(0),
        decode: Some(9),
    };
    Status {
        uptime_us: 187_000_000,
        ready: true,
        detail: "2 nodes; a canary passed through a pair".into(),
        nodes: vec![node(0, "p0", "prefill"), node(1, "d0", "decode")],
        requests: (0..requests).map(request).collect(),
        live_requests: 250,
        decisions: (0..5).map(|at| format!("req-{at} prefill=p0 ttft_ms=12.0")).collect(),
        ..Status::default()
    }
}

fn sample(at: Instant, tokens: u32, requests: usize) -> Sample {
    let page = format!(
        "baton_requests_total {tokens}\nbaton_ttft_seconds_bucket{{le=\"0.1\"}} {tokens}\n\
         baton_ttft_seconds_bucket{{le=\"+Inf\"}} {tokens}\nbaton_tbt_seconds_bucket{{le=\"0.1\"}} 0\n\
         baton_tbt_seconds_bucket{{le=\"0.2\"}} {tokens}\nbaton_tbt_seconds_bucket{{le=\"+Inf\"}} {tokens}\n\
         baton_requests_refused_total{{reason=\"ttft\"}} 7\nbaton_requests_failed_total{{stage=\"decode_lost\"}} 1\n"
    );
    let objectives = Some(Objectives { ttft_s: 30.0, tbt_s: 0.1 });
    Sample { at, status: status(requests), scrape: Scrape::read(&page), objectives }
}

fn history(requests: usize) -> History {
    let (mut history, now) = (History::default(), Instant::now());
    history.push(sample(now, 100, requests));
    history.push(sample(now + Duration::from_secs(2), 120, requests));
    history
}

fn screen(requests: usize) -> Screen {
    Screen { history: history(requests), show: Show::default() }
}

/// The rows of a terminal of this size.
fn draw(screen: &Screen, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let page = Page::new(BASE, &screen.history).shown(&screen.show);
    terminal.draw(|frame| page.draw(frame.area(), frame.buffer_mut())).unwrap();
    let buffer = terminal.backend().buffer();
    (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>()).collect()
}

#[track_caller]
fn has(rows: &[String], words: &str) {
    assert!(rows.iter().any(|row| row.contains(words)), "no '{words}' in\n{}", rows.join("\n"));
}

fn press(screen: &mut Screen, code: KeyCode) -> KeyAction {
    screen.key(BASE, KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn the_page_tells_every_figure_with_its_unit() {
    let rows = draw(&screen(3), 150, 40);
    for words in [
        "READY: 2 nodes; a canary passed through a pair  up 3:07",
        "live 250  requests 10.0/s  tokens 20.0/s  refused 0.0/s  failed 0.0/s",
        "TTFT p50 50.0 ms p99 99.0 ms  TBT p50 150.0 ms p99 199.0 ms",
        "(last 2 s, 20 first tokens)",
        "first tokens within 30.0 s: 100 %  gaps within 100.0 ms: 0.0 %",
        "refused: ttft 7; failed: decode_lost 1; cancelled: none",
        "Nodes (2)",
        "Requests under way (250, the oldest 3 shown)",
        "hbm 50/2048 h33",
        "4.2 MB",
        "p0 > #9",
        "req-4 prefill=p0 ttft_ms=12.0",
    ] {
        has(&rows, words);
    }
    let node = rows.iter().find(|row| row.starts_with("p0")).unwrap();
    let cells: Vec<&str> = node.split_whitespace().collect();
    let expected = ["p0", "prefill", "serving", "2", "120.0", "ms", "2.5", "s", "3/1", "4", "4", "900"];
    assert_eq!(cells[..12], expected, "{node}");
    assert!(!node.contains("ssd"), "a tier without room is not shown: {node}");
}

#[test]
fn classes_have_lines_if_there_are_several_or_one_breaks_its_promise() {
    let page = |slo: Vec<SloStatus>| {
        let (mut history, mut looked) = (History::default(), sample(Instant::now(), 100, 3));
        looked.status.slo = slo;
        history.push(looked);
        super::text(&Page::new(BASE, &history))
    };
    let class = |name: &str, attained: f64| {
        let (requests, in_slo, target) = (400, 398, 0.99);
        let (attained_5m, attained_1h) = (None, Some(attained));
        let class = name.into();
        SloStatus { class, requests, in_slo, target, attained_5m, attained_1h, ..SloStatus::default() }
    };
    assert!(!page(vec![class("only", 1.0)]).contains("SLO"));
    let late = SloStatus {
        late_ttft: 1,
        late_tbt: 1,
        late_e2e: 2,
        ttft_attained: Some(0.9975),
        ..class("only", 0.995)
    };
    let words = "SLO only: 5 min -, 1 h 99.5 %; of 400 requests 398 in SLO, late TTFT 1 TBT 1 E2E 2, refused 0, failed 0, \
                 cancelled 0; TTFT of admitted 99.7 %, target 99.0 %\nsince the start: finished";
    let text = page(vec![late]);
    assert!(text.contains(words), "{text}");
    let many = (0..20).map(|at| class(&format!("c{at}"), 1.0 - f64::from(at) / 100.0)).collect();
    let text = page(many);
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("SLO ")).collect();
    assert!(lines[0].starts_with("SLO c19: ") && lines[7].starts_with("SLO c12: "), "{text}");
    assert_eq!(lines[8..], ["SLO of 12 further classes: see slo in /admin/status"], "{text}");
    assert!(text.contains("Nodes (2)") && text.contains("req-4 prefill=p0"), "{text}");
}

#[test]
fn nothing_of_a_page_is_drawn_outside_a_small_terminal() {
    for (width, height) in [(1, 1), (20, 3), (40, 6), (80, 12), (150, 2)] {
        assert_eq!(draw(&screen(100), width, height).len(), usize::from(height));
    }
    let rows = draw(&screen(100), 150, 24);
    ["Nodes (2)", "Requests under way", "Latest decisions", "req-0 prefill"]
        .iter()
        .for_each(|words| has(&rows, words));
}

#[test]
fn what_clients_call_themselves_cannot_steer_the_terminal() {
    let mut screen = screen(1);
    let mut evil = sample(Instant::now() + Duration::from_secs(9), 130, 1);
    evil.status.requests[0].request_id = "a\u{1b}[2Jb\r\nc".into();
    evil.status.decisions = vec!["\u{1b}]0;owned\u{7}".into()];
    screen.history.push(evil);
    let text = super::text(&Page::new(BASE, &screen.history));
    assert!(text.contains("a[2Jb") && text.contains("]0;owned"), "{text}");
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

#[test]
fn text_has_a_row_for_everything() {
    let history = history(60);
    let text = super::text(&Page::new(BASE, &history));
    for at in [0, 30, 59] {
        assert!(text.contains(&format!("req-{at} ")), "{text}");
    }
    assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
    let empty = History::default();
    assert!(super::text(&Page::new(BASE, &empty)).contains("asking"));
}

#[test]
fn arrows_scroll_the_chosen_list_and_stop_at_its_ends() {
    let mut screen = screen(100);
    assert_eq!(press(&mut screen, KeyCode::Tab), KeyAction::Draw);
    (0..3).for_each(|_| assert_eq!(press(&mut screen, KeyCode::Down), KeyAction::Draw));
    let rows = draw(&screen, 150, 40);
    has(&rows, "(3 above)");
    has(&rows, "req-3 ");
    assert!(!rows.iter().any(|row| row.contains("req-2   ")), "{}", rows.join("\n"));
    press(&mut screen, KeyCode::End);
    assert_eq!(screen.show.from, [0, 99, 0]);
    press(&mut screen, KeyCode::Down);
    press(&mut screen, KeyCode::PageUp);
    assert_eq!(screen.show.from, [0, 89, 0]);
    let shorter = sample(Instant::now() + Duration::from_secs(9), 130, 2);
    assert!(screen.take(Ok(shorter)));
    has(&draw(&screen, 150, 40), "req-1 ");
    press(&mut screen, KeyCode::Up);
    assert_eq!(screen.show.from, [0, 0, 0], "from the end of the list as it is now");
    press(&mut screen, KeyCode::Left);
    press(&mut screen, KeyCode::Left);
    press(&mut screen, KeyCode::PageDown);
    assert_eq!((screen.show.chosen, screen.show.from), (2, [0, 0, 4]));
    assert_eq!(press(&mut screen, KeyCode::Char('x')), KeyAction::Stay);
}

#[test]
fn a_pause_holds_the_page_and_q_ends_it() {
    let mut screen = screen(1);
    press(&mut screen, KeyCode::Char('p'));
    assert!(!screen.take(Err(anyhow::Error::msg("gone"))), "paused");
    has(&draw(&screen, 150, 20), "[paused: p goes on]");
    press(&mut screen, KeyCode::Char('p'));
    assert!(screen.take(Err(anyhow::Error::msg("gone; start it again"))));
    let rows = draw(&screen, 150, 20);
    has(&rows, "NO ANSWER: gone; start it again");
    assert!(!rows[0].contains("READY"), "what does not answer is not ready: {}", rows[0]);
    has(&rows, "Nodes (2)");
    assert!(screen.take(Ok(sample(Instant::now() + Duration::from_secs(9), 130, 1))));
    has(&draw(&screen, 150, 20), "since the start: finished");
    assert_eq!(press(&mut screen, KeyCode::Char('q')), KeyAction::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(screen.key(BASE, interrupt), KeyAction::Quit);
    assert_eq!(press(&mut screen, KeyCode::Char('c')), KeyAction::Stay);
}
