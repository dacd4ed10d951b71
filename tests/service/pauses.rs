//! Processes that are stopped for a while and go on: the conductor's own, and two that share a name.

use std::fs::File;
use std::process::Child;
use std::time::Duration;

use rustix::process::Signal;

use super::service::{Service, baton, completion, signal, until};

/// Lives of nodes that ended so far.
fn lost(service: &Service) -> String {
    let page = service.get("/metrics").ok().text;
    let line = page.lines().find(|line| line.starts_with("baton_nodes_lost_total"));
    line.map_or_else(|| "0".to_owned(), |line| line.rsplit(' ').next().unwrap_or_default().to_owned())
}

/// A laptop that was closed, a machine that was moved: every node lives on, and so does every answer.
#[test]
fn a_service_that_is_stopped_for_seconds_loses_no_node_and_no_answer() {
    let service = Service::up(&["--engine", "timed", "--nodes", "2p2d", "--processes"]);
    until(Duration::from_secs(20), "every node is attached", || {
        let status = service.status();
        (status["nodes"].as_array().unwrap().len() != 4).then(|| status.to_string())
    });
    let before = lost(&service);
    for seconds in [4, 11] {
        let mut body = completion("a prompt that is long enough to be one", 600);
        body["stream"] = true.into();
        let mut open: Vec<_> = (0..4).map(|_| service.open("/v1/completions", &body)).collect();
        open.iter_mut().for_each(|open| drop(open.event().unwrap().expect("the stream begins")));
        signal(service.pid(), Signal::STOP);
        std::thread::sleep(Duration::from_secs(seconds));
        signal(service.pid(), Signal::CONT);
        for open in &mut open {
            let (mut events, mut last) = (1, String::new());
            while let Some(data) = open.event().unwrap() {
                (events, last) = (events + 1, data);
            }
            assert_eq!(last, "[DONE]", "after {seconds} s and {events} events");
        }
        assert_eq!(lost(&service), before, "lives that ended, after {seconds} s: {}", service.errors());
    }
    service.quiet(Duration::from_secs(10));
}

/// A node of a test's own, gone with it.
struct Extra(Child);

impl Drop for Extra {
    fn drop(&mut self) {
        // One that has ended already is gone all the same.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The second process of a name waits and says so, and takes its place when the first is gone.
#[test]
fn two_processes_of_one_name_do_not_evict_each_other() {
    let service = Service::up(&["--engine", "zero", "--nodes", "1p1d", "--log", "info"]);
    let node = |log: &str| {
        let mut command = baton(service.folder());
        let args = ["node", "--name", "d7", "--role", "decode", "--engine", "zero"];
        command.args(args).args(["--conductor", &service.control, "--log", "info"]);
        command.stdout(File::create(service.path("node.out")).unwrap());
        command.stderr(File::create(service.path(log)).unwrap());
        Extra(command.spawn().unwrap())
    };
    let said = |log: &str| std::fs::read_to_string(service.path(log)).unwrap_or_default();
    let epoch = || {
        let status = service.status();
        let nodes = status["nodes"].as_array().unwrap();
        nodes.iter().find(|node| node["name"] == "d7").and_then(|node| node["epoch"].as_u64())
    };
    let first = node("first");
    until(Duration::from_secs(20), "the first is attached", || epoch().is_none().then(|| said("first")));
    let _second = node("second");
    let refused = "another process is attached as node d7";
    until(Duration::from_secs(20), "the second is refused", || {
        (!said("second").contains(refused)).then(|| said("second"))
    });
    until(Duration::from_secs(20), "it tries again", || {
        (said("second").matches(refused).count() < 3).then(|| said("second"))
    });
    assert_eq!(epoch(), Some(1), "the first one's life goes on");
    assert!(service.errors().contains(refused), "the conductor says so, too");
    drop(first);
    until(Duration::from_secs(20), "the second gets in", || (epoch() != Some(2)).then(|| said("second")));
}
