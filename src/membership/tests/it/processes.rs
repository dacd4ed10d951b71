//! Candidates in processes of their own: killed, and frozen for longer than their lease.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use baton_membership::clock::now_us;

use crate::elections::{TTL_US, stand};
use crate::server::{Server, client};

const ADDRESS: &str = "BATON_TEST_CANDIDATE";

/// Acts for as long as it may, and says each time when it looked at the clock.
#[tokio::test]
#[ignore = "a process that other tests start"]
async fn candidate() {
    let etcd = client(vec![std::env::var(ADDRESS).expect("started by another test")]);
    let leadership = stand(&etcd, &format!("pid-{}", std::process::id()));
    loop {
        let now = now_us();
        if let Some(permit) = leadership.permit_at(now) {
            println!("act {} {now}", permit.token);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A candidate that runs elsewhere.
struct RemoteCandidate {
    child: Child,
    acts: mpsc::Receiver<(u64, u64)>,
}

impl RemoteCandidate {
    fn start(server: &Server) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--ignored", "--exact", "processes::candidate", "--nocapture"])
            .env(ADDRESS, server.address())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this test can be started once more");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (told, acts) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut words = line.split_whitespace().skip_while(|word| *word != "act").skip(1);
                let mut number = || words.next().and_then(|word| word.parse().ok());
                if let (Some(token), Some(at)) = (number(), number())
                    && told.send((token, at)).is_err()
                {
                    return;
                }
            }
        });
        Self { child, acts }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status().expect("kill is everywhere");
        assert!(sent.success());
    }

    /// Waits for an act with a token above `token`.
    fn acts_above(&self, token: u64) -> (u64, u64) {
        let deadline = Instant::now() + crate::SOON;
        while let Ok(act) = self.acts.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if act.0 > token {
                return act;
            }
        }
        panic!("it never acted with a token above {token}");
    }

    fn rest(&self) -> Vec<(u64, u64)> {
        self.acts.try_iter().collect()
    }
}

impl Drop for RemoteCandidate {
    fn drop(&mut self) {
        // It may be frozen; this ends it all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the order of the clock that both look at, tokens never fall.
fn judge(mut acts: Vec<(u64, u64)>) {
    acts.sort_by_key(|(token, at)| (*at, *token));
    let fell = acts.windows(2).find(|two| two[0].0 > two[1].0);
    assert_eq!(fell, None, "an older leader acted after a newer one");
}

#[tokio::test]
async fn a_frozen_leader_wakes_up_knowing_that_it_leads_no_more() {
    let server = Server::start().await;
    let first = RemoteCandidate::start(&server);
    let (token, _) = first.acts_above(0);
    let second = RemoteCandidate::start(&server);
    first.signal("-STOP");
    let mut acts = first.rest();
    let (next, taken) = second.acts_above(token);
    // Longer than a lease, and the other leads: now it wakes.
    first.signal("-CONT");
    std::thread::sleep(Duration::from_millis(1500));
    acts.extend(first.rest());
    let woken = acts.iter().filter(|(by, at)| *by == token && *at >= taken).count();
    assert_eq!(woken, 0, "it acted as the leader that it was no more");
    let others = second.rest();
    assert!(others.iter().any(|(by, _)| *by == next), "the second leads on");
    acts.extend(others);
    judge(acts);
    // And it stands again: when the second is killed it follows, after its lease and not before.
    drop(second);
    let (again, _) = first.acts_above(next);
    assert!(again > next);
}

#[tokio::test]
async fn a_killed_leader_is_followed_by_another_within_a_few_leases() {
    let server = Server::start().await;
    let first = RemoteCandidate::start(&server);
    let (token, _) = first.acts_above(0);
    let second = RemoteCandidate::start(&server);
    std::thread::sleep(Duration::from_millis(300));
    let mut acts = first.rest();
    assert!(second.rest().is_empty(), "one at a time");
    drop(first);
    let killed = now_us();
    let (next, at) = second.acts_above(token);
    acts.push((next, at));
    judge(acts);
    assert!(at > killed && at - killed < 15 * TTL_US, "it took {} µs", at - killed);
}
