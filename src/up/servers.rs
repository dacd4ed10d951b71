//! Servers that a service drives by itself: a node within this process for each that is listed, for as long as it is.
//!
//! Each name has one task and one wanted state, so changes of the list do not pile up. A server that is listed again
//! while it drains continues. A server also continues if its entry changes without changing its node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_membership::{Change, Changes, Directory, Member};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::conductor::{Inbox, Lead, NodeStatus, Question, Status};
use crate::node::{Place, Prompts, RemoteNode};

/// Makes the node of a server of the list, or says in words why there can be none. It may read files.
pub type NodeFactory = Arc<dyn Fn(&Member) -> Result<RemoteNode, String> + Send + Sync>;

/// Between two looks at whether servers that left the list have answered what they were given: one look is for all of
/// them, and costs as much as there are nodes.
const LOOK: Duration = Duration::from_millis(250);
/// Before a node that the conductor would not have, or that could not work, is tried anew; twice as long every time.
const RETRY: Duration = Duration::from_secs(10);
const RETRY_MOST: Duration = Duration::from_secs(60);

/// Nodes that are made at a time: each may read files.
const MADE_AT_A_TIME: usize = 16;

/// The name of an unreadable list among the detached servers; no server has such a name.
const LIST: &str = "list of servers";

/// Between two looks at whether the list can be read.
const LOOK_AT_LIST: Duration = Duration::from_millis(500);

/// The wanted state of a server: this member, or none.
type WantedMember = Option<Arc<Member>>;
/// The states of all nodes by name, and when they were asked for.
type Look = (Instant, Arc<BTreeMap<String, State>>);

/// Where a node stands, for who waits for its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It takes work.
    Serving,
    /// It takes none and has some.
    Draining,
    /// It has none.
    Drained,
}

/// The servers that this service drives, by name.
pub struct Servers {
    directory: Directory,
    driving: Arc<ServerContext>,
    servers: BTreeMap<String, Server>,
}

/// The state that all servers share.
struct ServerContext {
    making: NodeFactory,
    inbox: Inbox,
    lead: Lead,
    prompts: Prompts,
    /// How long a server that left the list may take for what it was given.
    drain: Duration,
    retry: Duration,
    /// To make a node.
    turn: Semaphore,
    looked: Mutex<Option<Look>>,
}

/// One name.
struct Server {
    wanted: watch::Sender<WantedMember>,
    /// Set while nothing runs.
    idle: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Servers {
    /// Those that `directory` lists, as `making` makes them.
    #[must_use]
    pub fn new(directory: Directory, making: NodeFactory, conductor: (Inbox, Lead), drain: Duration) -> Self {
        let (inbox, lead) = conductor;
        let (turn, looked) = (Semaphore::new(MADE_AT_A_TIME), Mutex::default());
        let prompts = Prompts::default();
        let driving = ServerContext { making, inbox, lead, prompts, drain, retry: RETRY, turn, looked };
        Self { directory, driving: Arc::new(driving), servers: BTreeMap::new() }
    }

    /// The servers with another pause before a failed one is retried.
    #[cfg(test)]
    #[must_use]
    pub fn retrying(mut self, retry: Duration) -> Self {
        Arc::get_mut(&mut self.driving).expect("nothing runs yet").retry = retry;
        self
    }

    /// Follows the list until `stop` is cancelled.
    pub async fn follow(mut self, stop: CancellationToken) {
        let mut changes: Changes = self.directory.changes();
        loop {
            let change = tokio::select! {
                change = changes.next() => change,
                () = tokio::time::sleep(LOOK_AT_LIST) => {
                    // One that could never be read is no change.
                    let stale = self.directory.snapshot().stale.clone();
                    self.driving.inbox.kept_out(LIST, stale.map(|stale| stale.why));
                    continue;
                }
                () = stop.cancelled() => break,
            };
            let Some(change) = change else {
                tracing::error!(
                    "the list of servers is followed no more: the last one counts; please report this"
                );
                stop.cancelled().await;
                break;
            };
            self.apply_change(change);
        }
        // Dropping the senders stops the tasks at once.
        let tasks: Vec<_> = self.servers.into_values().map(|server| server.task).collect();
        for task in tasks {
            // One that panicked has said so.
            let _ = task.await;
        }
    }

    fn apply_change(&mut self, change: Change) {
        match change {
            Change::Snapshot(all) => all.members.values().for_each(|one| self.want(&one.member)),
            Change::Joined(one) | Change::Changed { now: one, .. } => self.want(&one.member),
            Change::Left { was, .. } => self.retire(&was.member.name),
            Change::Stale(stale) => {
                tracing::warn!(why = stale.why, "the list of servers cannot be read: the last one counts");
            }
            Change::Fresh => tracing::info!("the list of servers can be read again"),
        }
    }

    fn want(&mut self, member: &Arc<Member>) {
        // A conductor may be listed beside its servers.
        if member.role.instance().is_none() {
            return self.retire(&member.name);
        }
        if let Some(server) = self.servers.get(&member.name) {
            server.wanted.send_replace(Some(Arc::clone(member)));
            return;
        }
        let (wanted, seen) = watch::channel(Some(Arc::clone(member)));
        let idle = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(Arc::clone(&self.driving).run_server(seen, Arc::clone(&idle)));
        self.servers.insert(member.name.clone(), Server { wanted, idle, task });
    }

    /// Lets a server finish what it was given, within bounds, and lets go of it.
    fn retire(&mut self, name: &str) {
        if let Some(server) = self.servers.get(name) {
            server.wanted.send_replace(None);
        }
        // It left before and has ended since: only this says that it is wanted again.
        let over = |server: &Server| server.idle.load(Ordering::Acquire) && server.wanted.borrow().is_none();
        self.servers.retain(|_, server| !over(server));
    }
}

impl ServerContext {
    /// Runs the server of one name as wanted, until the sender of wanted states is gone.
    async fn run_server(self: Arc<Self>, mut wanted: watch::Receiver<WantedMember>, idle: Arc<AtomicBool>) {
        loop {
            let now = wanted.borrow_and_update().clone();
            let goes_on = match now {
                Some(member) => self.serve(&member, &mut wanted).await,
                None => {
                    idle.store(true, Ordering::Release);
                    let goes_on = wanted.changed().await.is_ok();
                    idle.store(false, Ordering::Release);
                    goes_on
                }
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Runs a server's node until something else is wanted of its name, and lets it finish. False: all is over.
    async fn serve(
        self: &Arc<Self>,
        member: &Arc<Member>,
        wanted: &mut watch::Receiver<WantedMember>,
    ) -> bool {
        let stop = CancellationToken::new();
        let _over = stop.clone().drop_guard();
        let node = tokio::spawn(Arc::clone(self).keep(Arc::clone(member), stop.clone()));
        let (name, mut listed) = (&member.name, Arc::clone(member));
        let goes_on = loop {
            if self.other(&mut listed, wanted).await.is_none() {
                break false;
            }
            tracing::info!(server = name, "the list does not have it any more as it was: it drains");
            tokio::select! {
                // Requests that are not finished by then are finished elsewhere.
                _ = tokio::time::timeout(self.drain, self.drained(name)) => break true,
                back = self.again(&mut listed, wanted) => if back.is_none() {
                    break false;
                }
            }
            tracing::info!(server = name, "the list has it again: it goes on");
            let resume = |reply| Question::Drain { node: name.clone(), drain: false, reply };
            // One that is not attached drains nothing.
            let _ = self.inbox.ask(resume).await;
        };
        stop.cancel();
        // It catches what panics within it.
        let _ = node.await;
        goes_on
    }

    /// Waits until a node other than that of `listed` is wanted, or none. It adopts an entry that makes the same node.
    /// `None`: the sender of wanted states is gone.
    async fn other(
        &self,
        listed: &mut Arc<Member>,
        wanted: &mut watch::Receiver<WantedMember>,
    ) -> Option<()> {
        loop {
            let now = wanted.wait_for(|now| now.as_ref() != Some(listed)).await.ok()?.clone();
            let Some(now) = now else { return Some(()) };
            if !self.alike(listed, &now).await {
                return Some(());
            }
            tracing::debug!(server = now.name, "it is listed in other words: nothing changes for its node");
            *listed = now;
        }
    }

    /// Waits until the node of `listed` is wanted again. `None`: the sender of wanted states is gone.
    async fn again(
        &self,
        listed: &mut Arc<Member>,
        wanted: &mut watch::Receiver<WantedMember>,
    ) -> Option<()> {
        loop {
            let now = wanted.borrow_and_update().clone();
            if let Some(now) = now
                && (now == *listed || self.alike(listed, &now).await)
            {
                *listed = now;
                return Some(());
            }
            wanted.changed().await.ok()?;
        }
    }

    /// Whether the same node would be made of both.
    async fn alike(&self, one: &Arc<Member>, other: &Arc<Member>) -> bool {
        let (making, both) = (Arc::clone(&self.making), [Arc::clone(one), Arc::clone(other)]);
        let _turn = self.turn.acquire().await;
        let made = tokio::task::spawn_blocking(move || both.map(|member| making(&member)));
        // Of what panics, nothing is known to be the same.
        matches!(made.await, Ok([Ok(one), Ok(other)]) if one.is_like(&other))
    }

    /// Runs a node until `stop` is cancelled, and retries when it could not work.
    async fn keep(self: Arc<Self>, member: Arc<Member>, stop: CancellationToken) {
        let (mut pause, mut said) = (self.retry, String::new());
        loop {
            let Err(why) = self.run(&member, &stop).await else { return };
            if why != said {
                tracing::error!(server = member.name, why, "this server cannot be used; it is tried again");
                said = why;
            }
            self.inbox.kept_out(&member.name, Some(said.clone()));
            let again = tokio::select! {
                () = tokio::time::sleep(pause) => true,
                () = stop.cancelled() => false,
            };
            self.inbox.kept_out(&member.name, None);
            if !again {
                return;
            }
            pause = (pause * 2).min(RETRY_MOST);
        }
    }

    async fn run(&self, member: &Arc<Member>, stop: &CancellationToken) -> Result<(), String> {
        let broke = |_| "its node panicked; please report this".to_owned();
        let making = (Arc::clone(&self.making), Arc::clone(member));
        let node = {
            let _turn = self.turn.acquire().await;
            tokio::task::spawn_blocking(move || making.0(&making.1)).await.map_err(broke)??
        };
        let place = Place::Within(self.inbox.clone(), self.lead.clone(), self.prompts.clone());
        // On a task of its own, so that what panics in it ends nothing else.
        let ended = tokio::spawn(crate::node::run_remote(node, place, stop.clone())).await.map_err(broke)?;
        ended.map_err(|why| why.to_string())
    }

    /// Waits until a node has nothing left to do, and gets nothing new.
    async fn drained(&self, name: &str) {
        loop {
            let drain = |reply| Question::Drain { node: name.to_owned(), drain: true, reply };
            if !matches!(self.inbox.ask(drain).await, Some(Ok(()))) {
                // It is not attached: there is nothing to wait for.
                return;
            }
            let mut since = Instant::now();
            loop {
                let Some((at, states)) = self.look(since).await else { return };
                match states.get(name) {
                    None | Some(State::Drained) => return,
                    // It lost its place and has another, where nobody knows that it drains.
                    Some(State::Serving) => break,
                    Some(State::Draining) => since = at + Duration::from_nanos(1),
                }
                tokio::time::sleep(LOOK).await;
            }
        }
    }

    /// How all nodes stand, asked for at `since` or later; `None` when the conductor is gone.
    async fn look(&self, since: Instant) -> Option<Look> {
        let mut looked = self.looked.lock().await;
        if let Some((at, states)) = looked.as_ref() {
            if *at >= since {
                return Some((*at, Arc::clone(states)));
            }
            // Others that wait by then share it.
            tokio::time::sleep_until(*at + LOOK).await;
        }
        let at = Instant::now();
        let status = self.inbox.ask(Question::Status).await?;
        let states = states(&status);
        Some(looked.insert((at, Arc::new(states))).clone())
    }
}

/// The states of the nodes.
fn states(status: &Status) -> BTreeMap<String, State> {
    let state = |node: &NodeStatus| match node.state.as_str() {
        "serving" => State::Serving,
        "drained" => State::Drained,
        _ => State::Draining,
    };
    status.nodes.iter().map(|node| (node.name.clone(), state(node))).collect()
}
