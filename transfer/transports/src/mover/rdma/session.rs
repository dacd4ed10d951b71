//! The accepting end of a path. It moves no data itself (the device does that). It takes messages, answers them, and
//! ends when the other end is gone.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::link::Link;
use super::mailbox::{Kind, Message, RECEIVE, SENT};
use super::rail::{Rail, WatchedEnd};
use super::threads::Bell;
use super::verbs_queue::WorkCompletion;
use crate::mover::{Notice, NoticeReceiver, PeerId};

/// Looks at the queue before others have their turn.
const LOOKS: u32 = 16;

struct State {
    link: Option<Link>,
    /// Why it is to end.
    ending: Option<String>,
}

/// The accepting end of a path.
pub(super) struct Session {
    rail: Arc<Rail>,
    from: PeerId,
    inbound: Arc<dyn NoticeReceiver>,
    bell: Bell,
    state: Mutex<State>,
}

impl Session {
    pub(super) fn new(
        rail: &Arc<Rail>,
        from: PeerId,
        inbound: &Arc<dyn NoticeReceiver>,
        link: Link,
    ) -> io::Result<Arc<Self>> {
        let token = link.token();
        link.arm()?;
        let session = Arc::new(Self {
            rail: rail.clone(),
            from,
            inbound: inbound.clone(),
            bell: Bell::new()?,
            state: Mutex::new(State { link: Some(link), ending: None }),
        });
        let watched: Arc<dyn WatchedEnd> = session.clone();
        rail.watch(token, Arc::downgrade(&watched));
        Ok(session)
    }

    /// Rings when it is to end.
    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Asks it to end.
    pub(super) fn end(&self, why: String) {
        self.state().ending.get_or_insert(why);
        self.bell.ring();
    }

    /// Why it is to end; none while it is not.
    pub(super) fn ending(&self) -> Option<String> {
        self.state().ending.clone()
    }

    /// Destroys the queue pairs. After that nothing of this path lands here.
    pub(super) fn cut(&self) {
        let link = self.state().link.take();
        if let Some(link) = link {
            link.stop();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Books what has finished; gives the messages that have come.
    fn settle(link: &mut Link, finished: &[WorkCompletion]) -> io::Result<Vec<Message>> {
        let mut come = Vec::new();
        for one in finished {
            if one.status != 0 {
                return Err(io::Error::other(format!("a message failed with status {}", one.status)));
            }
            let (mailbox, queue_pair) = link.mail();
            if one.id & RECEIVE != 0 {
                let message = mailbox.take(queue_pair, one.id, one.bytes)?;
                come.push(message.ok_or_else(|| io::Error::other("what came is not a message"))?);
            } else if one.id & SENT != 0 {
                mailbox.sent(queue_pair, one.id)?;
            }
        }
        Ok(come)
    }

    fn look(&self) -> io::Result<Option<Vec<Message>>> {
        let mut state = self.state();
        let Some(link) = &mut state.link else { return Ok(None) };
        let mut finished = Vec::new();
        if link.poll(&mut finished)? == 0 {
            link.arm()?;
            if link.poll(&mut finished)? == 0 {
                return Ok(None);
            }
        }
        Self::settle(link, &finished).map(Some)
    }

    /// Delivers a message, then answers it: the answer says that it has been delivered.
    fn deliver(&self, message: Message) -> io::Result<()> {
        if message.kind == Kind::Answer {
            return Err(io::Error::other("an answer that nobody has asked for"));
        }
        let Message { kind, number, text } = message;
        if kind == Kind::Notice {
            self.inbound.notice(&self.from, Notice { bytes: text });
        }
        let mut state = self.state();
        let Some(link) = &mut state.link else { return Ok(()) };
        let (mailbox, queue_pair) = link.mail();
        mailbox.send(queue_pair, Message { kind: Kind::Answer, number, text: Vec::new() })
    }

    fn turn(&self) -> io::Result<bool> {
        for _ in 0..LOOKS {
            let Some(messages) = self.look()? else { return Ok(false) };
            messages.into_iter().try_for_each(|message| self.deliver(message))?;
        }
        Ok(true)
    }
}

impl WatchedEnd for Session {
    fn serve(&self) -> bool {
        self.turn().unwrap_or_else(|error| {
            self.end(format!("{}: {error}", self.rail.name));
            false
        })
    }

    fn trouble(&self, why: &str) {
        self.end(why.to_owned());
    }
}
