//! Processes that are killed, stopped and started again, as a plan drawn from a seed has it.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_types::Rng;
use rustix::process::Signal;

use super::crowd::Door;
use super::service::{signal, until};

/// A process, and how to start it again. It is gone when this is.
pub(super) struct Actor<'a> {
    pub(super) name: String,
    place: PathBuf,
    command: Box<dyn Fn() -> Command + Send + 'a>,
    child: Child,
    /// Where it serves clients, if it does.
    door: Option<&'a Door>,
}

impl<'a> Actor<'a> {
    /// Starts it; what it says is in the folder, under its name.
    pub(super) fn start(
        place: &Path,
        name: &str,
        door: Option<&'a Door>,
        command: impl Fn() -> Command + Send + 'a,
    ) -> Self {
        let (name, place) = (name.to_owned(), place.to_owned());
        let child = spawned(&place, &name, command());
        Self { name, place, command: Box::new(command), child, door }
    }

    /// Starts it again; where it serves clients it listens before this returns, and they may be refused until then.
    fn again(&mut self) {
        self.child = spawned(&self.place, &self.name, (self.command)());
        if let Some(door) = self.door {
            let gone = || TcpStream::connect(door.at).err().map(|e| format!("{e}: {}", self.said()));
            until(Duration::from_secs(60), "it listens", gone);
        }
        self.told();
    }

    /// Its clients may be cut off from now on.
    fn told(&self) {
        if let Some(door) = self.door {
            door.troubles.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn suffer(&mut self, how: ProcessFault) {
        self.told();
        match how {
            ProcessFault::Stop => signal(self.child.id(), Signal::STOP),
            ProcessFault::Kill => {
                signal(self.child.id(), Signal::KILL);
                let _ = self.child.wait();
            }
        }
    }

    fn recover(&mut self, how: ProcessFault) {
        match how {
            ProcessFault::Stop => {
                signal(self.child.id(), Signal::CONT);
                self.told();
            }
            ProcessFault::Kill => self.again(),
        }
    }

    /// Restarts it if it ended by itself, as a supervisor does.
    fn kept_up(&mut self) -> bool {
        let ended = self.child.try_wait().unwrap().is_some();
        if ended {
            self.told();
            self.again();
        }
        ended
    }

    /// The last lines of its log.
    pub(super) fn said(&self) -> String {
        let text = std::fs::read_to_string(self.place.join(format!("{}.err", self.name)));
        let text = text.unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

fn spawned(place: &Path, name: &str, mut command: Command) -> Child {
    let log = OpenOptions::new().create(true).append(true).open(place.join(format!("{name}.err"))).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap_or_else(|e| panic!("{name}: {e}; scripts/ready.sh etcd installs what is missing"))
}

impl Drop for Actor<'_> {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{} said:\n{}", self.name, self.said());
        }
    }
}

/// The trouble of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessFault {
    Kill,
    Stop,
}

/// One trouble: its process, its kind, its length, and the time to the next trouble.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trouble {
    pub(super) who: usize,
    pub(super) how: ProcessFault,
    pub(super) lasts: Duration,
    pub(super) then: Duration,
}

/// Every one of `count` processes is killed once and stopped once a round, in an order by lot.
pub(super) fn plan(seed: u64, count: usize, rounds: u64) -> Vec<Trouble> {
    let mut rng = Rng::fork(seed, 2);
    let mut plan = Vec::new();
    for _ in 0..rounds {
        let mut round: Vec<(usize, ProcessFault)> =
            (0..count).flat_map(|who| [(who, ProcessFault::Kill), (who, ProcessFault::Stop)]).collect();
        while !round.is_empty() {
            let (who, how) = round.swap_remove(rng.below(round.len() as u64) as usize);
            let [lasts, then] = [100 + rng.below(1_200), 50 + rng.below(450)].map(Duration::from_millis);
            plan.push(Trouble { who, how, lasts, then });
        }
    }
    plan
}

/// Carries a plan out, and ends with all of them up.
pub(super) fn trouble(actors: &mut [Actor<'_>], plan: &[Trouble]) {
    let begun = Instant::now();
    let mut due: BTreeMap<usize, (Instant, ProcessFault)> = BTreeMap::new();
    for trouble in plan {
        // One thing at a time befalls a process.
        if let Some((until, how)) = due.remove(&trouble.who) {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            actors[trouble.who].recover(how);
        }
        println!(
            "{:.1?}: {} {:?} {:?}",
            begun.elapsed(),
            actors[trouble.who].name,
            trouble.how,
            trouble.lasts
        );
        actors[trouble.who].suffer(trouble.how);
        due.insert(trouble.who, (Instant::now() + trouble.lasts, trouble.how));
        let next = Instant::now() + trouble.then;
        while Instant::now() < next {
            recovered(actors, &mut due, Instant::now());
            keep_up(actors, &due);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    recovered(actors, &mut due, Instant::now() + Duration::from_secs(3_600));
}

fn recovered(actors: &mut [Actor<'_>], due: &mut BTreeMap<usize, (Instant, ProcessFault)>, by: Instant) {
    due.retain(|who, (until, how)| {
        let over = *until <= by;
        if over {
            actors[*who].recover(*how);
        }
        !over
    });
}

/// Those that ended by themselves are started again.
fn keep_up(actors: &mut [Actor<'_>], due: &BTreeMap<usize, (Instant, ProcessFault)>) {
    for (at, actor) in actors.iter_mut().enumerate() {
        if !due.contains_key(&at) && actor.kept_up() {
            println!("{} ended by itself", actor.name);
        }
    }
}

/// Keeps all of them up while `what` goes on.
pub(super) fn kept_up(actors: &mut [Actor<'_>]) {
    keep_up(actors, &BTreeMap::new());
}
