//! The line to a conductor of the same process: what goes over the wire otherwise is handed over, as it is.

use std::time::Duration;

use baton_types::{Epoch, InstanceId};
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::attach::{FACTS_WAITING, NodeRuntime, WorkerGoneError};
use super::error::NodeError;
use crate::conductor::{AttachRefusal, Inbox, Lead, Loss, Message, ORDERS_PER_NODE};

/// Between two tries to attach, where the conductor does not lead or has lost this node.
const RETRY: Duration = Duration::from_millis(200);

/// A node's connection to a conductor in the same process.
pub(super) struct InProcessSession<S> {
    pub(super) inbox: Inbox,
    pub(super) lead: Lead,
    pub(super) hello: v1::Hello,
    pub(super) runtime: S,
}

impl<S: NodeRuntime> InProcessSession<S> {
    /// Keeps the session up until `stop` is cancelled.
    ///
    /// # Errors
    /// When the conductor will not have this node; trying again would not help.
    pub(super) async fn keep(&self, stop: &CancellationToken) -> Result<(), NodeError> {
        loop {
            if self.lead.check().is_ok() {
                let ended = tokio::select! {
                    ended = self.once() => ended,
                    () = stop.cancelled() => Ok(()),
                };
                if self.runtime.detached().is_err() {
                    return Err(NodeError::Gone { name: self.hello.name.clone(), what: "work ended" });
                }
                ended.map_err(|why| NodeError::Refused(why.to_string()))?;
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = stop.cancelled() => return Ok(()),
            }
        }
    }

    /// One life, until the conductor lets go of it or is gone. When this is dropped in the middle the conductor hears of
    /// it all the same.
    async fn once(&self) -> Result<(), String> {
        let (orders, mut ordered) = mpsc::channel(ORDERS_PER_NODE);
        let (reply, answer) = oneshot::channel();
        let joined = Message::Joined { hello: Box::new(self.hello.clone()), orders, reply };
        if !self.inbox.send(joined).await {
            return Ok(());
        }
        let mut asked = JoinRequest { answer: Some(answer), inbox: self.inbox.clone() };
        let Some((welcome, life)) = asked.welcomed().await? else { return Ok(()) };
        let (facts, received) = mpsc::channel(FACTS_WAITING);
        if self.runtime.attached(&welcome, facts).is_err() {
            return Ok(());
        }
        let (node, instance, epoch) = (&self.hello.name, welcome.instance, welcome.epoch);
        tracing::info!(node, instance, epoch, "attached within this process");
        let beat = Duration::from_micros(welcome.heartbeat_us.max(10_000));
        // An end of any of the three ends this life: the next one begins anew.
        tokio::select! {
            _ = self.obey(&mut ordered) => {}
            () = life.forward(received) => {}
            () = life.beat(&self.runtime, beat) => {}
        }
        Ok(())
    }

    async fn obey(&self, ordered: &mut mpsc::Receiver<v1::ToNode>) -> Result<(), WorkerGoneError> {
        while let Some(message) = ordered.recv().await {
            if let Some(v1::to_node::Message::Orders(orders)) = message.message {
                self.runtime.ordered(orders)?;
            }
        }
        Ok(())
    }
}

/// A pending attach request. If its future is dropped before the conductor's reply is read, an attachment that was
/// granted is given up.
struct JoinRequest {
    answer: Option<oneshot::Receiver<Result<v1::Welcome, AttachRefusal>>>,
    inbox: Inbox,
}

impl JoinRequest {
    /// The place; none when the conductor is gone.
    async fn welcomed(&mut self) -> Result<Option<(v1::Welcome, Life)>, String> {
        let Some(answer) = &mut self.answer else { return Ok(None) };
        let answer = answer.await;
        self.answer = None;
        let Ok(welcome) = answer else { return Ok(None) };
        let welcome = welcome.map_err(|why| why.to_string())?;
        let life = Life::of(&welcome, &self.inbox);
        Ok(Some((welcome, life)))
    }
}

impl Drop for JoinRequest {
    fn drop(&mut self) {
        let Some(mut answer) = self.answer.take() else { return };
        answer.close();
        if let Ok(Ok(welcome)) = answer.try_recv() {
            drop(Life::of(&welcome, &self.inbox));
        }
    }
}

/// A node's place at the conductor, given up when this is dropped.
struct Life {
    instance: InstanceId,
    epoch: Epoch,
    inbox: Inbox,
}

impl Life {
    fn of(welcome: &v1::Welcome, inbox: &Inbox) -> Self {
        Self { instance: InstanceId(welcome.instance), epoch: Epoch(welcome.epoch), inbox: inbox.clone() }
    }

    /// Passes on what the node says.
    async fn forward(&self, mut facts: mpsc::Receiver<v1::FromNode>) {
        let (instance, epoch) = (self.instance, self.epoch);
        while let Some(message) = facts.recv().await {
            let Some(v1::from_node::Message::Facts(facts)) = message.message else { continue };
            if !self.inbox.send(Message::Facts { instance, epoch, facts: facts.facts }).await {
                return;
            }
        }
    }

    async fn beat(&self, runtime: &impl NodeRuntime, every: Duration) {
        let (instance, epoch) = (self.instance, self.epoch);
        loop {
            tokio::time::sleep(every).await;
            let load = Box::new(runtime.load());
            if !self.inbox.send(Message::Beat { instance, epoch, load }).await {
                return;
            }
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let (instance, epoch) = (self.instance, self.epoch);
        let loss = Loss::Left("it left".to_owned());
        let Err(gone) = self.inbox.offer(Message::Gone { instance, epoch, loss }) else { return };
        // A conductor whose inbox is full has to hear of it too; one that has ended does not.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let inbox = self.inbox.clone();
            runtime.spawn(async move { inbox.send(gone).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn welcome() -> v1::Welcome {
        v1::Welcome { instance: 3, epoch: 4, ..v1::Welcome::default() }
    }

    #[tokio::test]
    async fn a_place_that_came_when_nobody_waited_any_more_is_given_up() {
        let (inbox, mut received) = crate::conductor::inbox();
        let (reply, answer) = oneshot::channel();
        let asked = JoinRequest { answer: Some(answer), inbox: inbox.clone() };
        // The conductor counts on it from here on.
        reply.send(Ok(welcome())).expect("it waits");
        drop(asked);
        let Ok(Message::Gone { instance, epoch, .. }) = received.try_recv() else {
            panic!("it is not given up")
        };
        assert_eq!((instance, epoch), (InstanceId(3), Epoch(4)));
        // One that was refused, and one that nobody answered, have nothing to give up.
        let (reply, answer) = oneshot::channel();
        reply.send(Err(AttachRefusal::NoName)).expect("it waits");
        drop(JoinRequest { answer: Some(answer), inbox: inbox.clone() });
        drop(JoinRequest { answer: Some(oneshot::channel().1), inbox });
        assert!(received.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_full_inbox_hears_of_the_end_as_soon_as_there_is_room() {
        let (inbox, mut received) = crate::conductor::inbox();
        let beat = || Message::Beat { instance: InstanceId(9), epoch: Epoch(1), load: Box::default() };
        while inbox.offer(beat()).is_ok() {}
        drop(Life::of(&welcome(), &inbox));
        let gone = async {
            while let Some(message) = received.recv().await {
                if let Message::Gone { instance, .. } = message {
                    return Some(instance);
                }
            }
            None
        };
        assert_eq!(tokio::time::timeout(Duration::from_secs(60), gone).await, Ok(Some(InstanceId(3))));
    }
}
