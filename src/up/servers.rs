//! Servers that a service drives by itself: a node within this process for each that is listed, for as long as it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_membership::{Change, Changes, Directory, Member};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::conductor::{Inbox, Lead, Question};
use crate::node::{Place, RemoteNode};

/// Makes the node of a server of the list, or says in words why there can be none.
pub type Making = Arc<dyn Fn(&Member) -> Result<RemoteNode, String> + Send + Sync>;

/// Between two looks at whether a server that left the list has answered what it was given.
const LOOK: Duration = Duration::from_millis(250);
/// Before a node that the conductor would not have, or that could not work, is tried anew.
const RETRY: Duration = Duration::from_secs(10);

/// See the module.
pub struct Servers {
    directory: Directory,
    making: Making,
    inbox: Inbox,
    lead: Lead,
    /// How long a server that left the list may take for what it was given.
    drain: Duration,
    nodes: BTreeMap<String, Node>,
}

struct Node {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Servers {
    /// Those that `directory` lists, as `making` makes them.
    #[must_use]
    pub fn new(directory: Directory, making: Making, conductor: (Inbox, Lead), drain: Duration) -> Self {
        let (inbox, lead) = conductor;
        Self { directory, making, inbox, lead, drain, nodes: BTreeMap::new() }
    }

    /// Follows the list until told to stop.
    pub async fn follow(mut self, stop: CancellationToken) {
        let mut changes: Changes = self.directory.changes();
        loop {
            let change = tokio::select! {
                change = changes.next() => change,
                () = stop.cancelled() => None,
            };
            match change {
                Some(change) => self.heed(change),
                None => break,
            }
        }
        for node in self.nodes.values() {
            node.stop.cancel();
        }
        for node in self.nodes.into_values() {
            // One that panicked has said so.
            let _ = node.task.await;
        }
    }

    fn heed(&mut self, change: Change) {
        match change {
            Change::Snapshot(all) => all.members.values().for_each(|one| self.start(&one.member)),
            Change::Joined(one) => self.start(&one.member),
            Change::Changed { before, now } => {
                self.leave(&before.member.name);
                self.start(&now.member);
            }
            Change::Left { was, .. } => self.leave(&was.member.name),
            Change::Stale(stale) => {
                tracing::warn!(why = stale.why, "the list of servers cannot be read: the last one counts");
            }
            Change::Fresh => tracing::info!("the list of servers can be read again"),
        }
    }

    fn start(&mut self, member: &Member) {
        // A conductor may be listed beside its servers.
        if member.role.instance().is_none() {
            return;
        }
        let node = match (self.making)(member) {
            Ok(node) => node,
            Err(why) => return tracing::error!(server = member.name, why, "this server is left out"),
        };
        let stop = CancellationToken::new();
        // One of this name that is still leaving goes first.
        let before = self.nodes.remove(&member.name).map(|node| node.task);
        let kept = keep(node, before, (self.inbox.clone(), self.lead.clone()), stop.clone());
        let task = tokio::spawn(kept);
        self.nodes.insert(member.name.clone(), Node { stop, task });
    }

    /// Lets a server finish what it was given, within bounds, and lets go of it.
    fn leave(&mut self, name: &str) {
        let Some(Node { stop, task }) = self.nodes.remove(name) else { return };
        tracing::info!(server = name, "the list does not have it any more: it drains");
        let (inbox, left, drain, leaving) = (self.inbox.clone(), name.to_owned(), self.drain, stop.clone());
        let task = tokio::spawn(async move {
            tokio::select! {
                // What is not done by then is done elsewhere.
                _ = tokio::time::timeout(drain, drained(&inbox, &left)) => leaving.cancel(),
                () = leaving.cancelled() => {}
            }
            // One that panicked has said so.
            let _ = task.await;
        });
        self.nodes.retain(|_, node| !node.task.is_finished());
        self.nodes.insert(name.to_owned(), Node { stop, task });
    }
}

/// Runs a node until told to stop, after the one before it has left; once more when it could not work.
async fn keep(
    node: RemoteNode,
    before: Option<JoinHandle<()>>,
    conductor: (Inbox, Lead),
    stop: CancellationToken,
) {
    if let Some(before) = before {
        let _ = before.await;
    }
    loop {
        let place = Place::Within(conductor.0.clone(), conductor.1.clone());
        let Err(why) = crate::node::run_remote(node.clone(), place, stop.clone()).await else { return };
        tracing::error!(server = node.name, why, "this server cannot be used; it is tried again");
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Waits until a node has nothing left to do, and gets nothing new.
async fn drained(inbox: &Inbox, name: &str) {
    let drain = |reply| Question::Drain { node: name.to_owned(), drain: true, reply };
    if !matches!(inbox.ask(drain).await, Some(Ok(()))) {
        // It is not attached: there is nothing to wait for.
        return;
    }
    loop {
        let Some(status) = inbox.ask(Question::Status).await else { return };
        let busy = |node: &crate::conductor::NodeStatus| node.name == name && node.state != "drained";
        if !status.nodes.iter().any(busy) {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}
