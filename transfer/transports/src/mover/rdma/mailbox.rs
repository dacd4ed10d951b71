//! Short messages on a queue pair: notices, signs of life, and their answers.
//!
//! Each end posts as many receives as the other may have messages without an answer, so that a message never
//! finds none: one asks, with at most [`SLOTS`] unanswered, and the other answers.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::verbs::{Domain, Mr, Remote};
use super::verbs_queue::{Qp, Verb, Work};
use crate::mover::{Location, Memory};

/// Messages that may be unanswered.
pub(super) const SLOTS: u32 = 16;
/// The largest text of a message.
pub(super) const TEXT_BYTES_MAX: usize = crate::mover::port::NOTICE_BYTES_MAX;
/// Messages that may wait for a slot to be sent from.
const WAITING_MAX: usize = 4 * SLOTS as usize;
const HEAD_BYTES: usize = 12;
const SLOT_BYTES: usize = 4_160;
/// Marks the number of a posted receive, and of a message under way.
pub(super) const RECEIVE: u64 = 1 << 63;
pub(super) const SENT: u64 = 1 << 62;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// For the program at the other end.
    Notice,
    /// Asks for an answer only.
    Probe,
    /// Answers the message of the same number.
    Answer,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub kind: Kind,
    pub number: u64,
    pub text: Vec<u8>,
}

impl Message {
    fn head(&self) -> [u8; HEAD_BYTES] {
        let kind: u32 = match self.kind {
            Kind::Notice => 1,
            Kind::Probe => 2,
            Kind::Answer => 3,
        };
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[4..].copy_from_slice(&self.number.to_le_bytes());
        head
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, text) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        let kind = match head[..4] {
            [1, 0, 0, 0] => Kind::Notice,
            [2, 0, 0, 0] => Kind::Probe,
            [3, 0, 0, 0] => Kind::Answer,
            _ => return None,
        };
        let number = u64::from_le_bytes(head[4..].try_into().expect("eight bytes"));
        Some(Self { kind, number, text: text.to_vec() })
    }
}

/// The buffers of one end: [`SLOTS`] to receive into, then as many to send from.
pub(super) struct Mailbox {
    memory: Arc<Memory>,
    region: Mr,
    free: Vec<u32>,
    /// Messages that wait for a slot.
    waiting: VecDeque<Message>,
}

impl Mailbox {
    pub(super) fn new(domain: &Arc<Domain>) -> io::Result<Self> {
        let bytes = 2 * SLOTS as usize * SLOT_BYTES;
        let memory = Memory::private(bytes, Location::Anywhere)?;
        let region = Mr::register(domain, &memory, 0, bytes as u64, Remote::default())?;
        Ok(Self { memory, region, free: (SLOTS..2 * SLOTS).collect(), waiting: VecDeque::new() })
    }

    /// Posts every receive.
    pub(super) fn open(&self, queue_pair: &Qp) -> io::Result<()> {
        (0..SLOTS).try_for_each(|slot| self.offer(queue_pair, slot))
    }

    fn offer(&self, queue_pair: &Qp, slot: u32) -> io::Result<()> {
        let key = self.region.local_key();
        queue_pair.receive(RECEIVE | u64::from(slot), self.address(slot), key, SLOT_BYTES as u32)
    }

    fn address(&self, slot: u32) -> u64 {
        self.memory.address(Self::place(slot), SLOT_BYTES as u64) as u64
    }

    fn place(slot: u32) -> u64 {
        u64::from(slot) * SLOT_BYTES as u64
    }

    /// Takes the bytes received under this number and posts the receive again; none if they are not a message.
    pub(super) fn take(&self, queue_pair: &Qp, id: u64, bytes: u32) -> io::Result<Option<Message>> {
        let slot = u32::try_from(id & !RECEIVE).map_err(io::Error::other)?;
        let mut text = vec![0; (bytes as usize).min(SLOT_BYTES)];
        self.memory.read(Self::place(slot), &mut text);
        self.offer(queue_pair, slot)?;
        Ok(Message::decode(&text))
    }

    /// Sends a message as soon as there is a slot.
    ///
    /// # Errors
    /// Also when too many wait: the other end sends on without taking what it gets.
    pub(super) fn send(&mut self, queue_pair: &Qp, message: Message) -> io::Result<()> {
        if self.waiting.len() >= WAITING_MAX {
            return Err(io::Error::other("the peer asks and does not take the answers"));
        }
        self.waiting.push_back(message);
        self.pump(queue_pair)
    }

    /// The message of this number has gone: its slot is free.
    pub(super) fn sent(&mut self, queue_pair: &Qp, id: u64) -> io::Result<()> {
        self.free.push(u32::try_from(id & !SENT).map_err(io::Error::other)?);
        self.pump(queue_pair)
    }

    fn pump(&mut self, queue_pair: &Qp) -> io::Result<()> {
        while let (Some(&slot), false) = (self.free.last(), self.waiting.is_empty()) {
            let Some(message) = self.waiting.pop_front() else { return Ok(()) };
            self.free.pop();
            self.memory.write(Self::place(slot), &message.head());
            self.memory.write(Self::place(slot) + HEAD_BYTES as u64, &message.text);
            let bytes = u32::try_from(HEAD_BYTES + message.text.len()).map_err(io::Error::other)?;
            queue_pair.post(&[Work {
                id: SENT | u64::from(slot),
                verb: Verb::Send,
                local_address: self.address(slot),
                local_key: self.region.local_key(),
                bytes,
                remote_address: 0,
                remote_key: 0,
                signalled: true,
            }])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were_and_others_are_none() {
        for kind in [Kind::Notice, Kind::Probe, Kind::Answer] {
            let message = Message { kind, number: 1 << 40, text: b"sealed".to_vec() };
            let bytes = [&message.head()[..], &message.text].concat();
            assert_eq!(Message::decode(&bytes), Some(message));
            assert_eq!(Message::decode(&bytes[..HEAD_BYTES - 1]), None);
        }
        assert_eq!(Message::decode(&[9; 40]), None);
        const { assert!(HEAD_BYTES + TEXT_BYTES_MAX <= SLOT_BYTES) }
    }
}
