//! A peer that asks, as the publisher sees it: a question of one size, one answer, then silence until either ends.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::publisher::Shared;
use crate::mover::greeting::{GREETING_BYTES, Greeting, Purpose, may_begin};
use crate::mover::reactor::{Connection, ReactorSlot, Turn};
use crate::mover::sockets::never_waiting;

enum Stage {
    Asking { record: Box<[u8; GREETING_BYTES]>, came: usize },
    Answering { answer: Vec<u8>, written: usize, then_ends: bool },
    Told,
}

/// The publisher's side of one peer's connection.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    socket: TcpStream,
    slot: ReactorSlot,
    stage: Stage,
    until: Instant,
}

impl Watcher {
    /// Takes a socket. Where `busy`, the answer says that there are too many.
    pub(super) fn new(
        shared: Arc<Shared>,
        socket: TcpStream,
        slot: ReactorSlot,
        busy: bool,
    ) -> io::Result<Self> {
        never_waiting(&socket)?;
        let until = Instant::now() + shared.config.time_limit;
        let stage = if busy {
            let text = "as many peers ask here as may; raise watchers_max".to_owned();
            Stage::Answering { answer: shared.greeting(Purpose::Busy, 0, text), written: 0, then_ends: true }
        } else {
            Stage::Asking { record: Box::new([0; GREETING_BYTES]), came: 0 }
        };
        Ok(Self { shared, socket, slot, stage, until })
    }

    fn go(&mut self) -> io::Result<Turn> {
        loop {
            match &mut self.stage {
                Stage::Asking { record, came } => {
                    *came += some(self.socket.read(&mut record[*came..]))?;
                    if !may_begin(&record[..*came]) {
                        return Ok(Turn::End);
                    }
                    if *came == GREETING_BYTES {
                        let record = record.clone();
                        self.stage = self.asked(&record);
                    }
                }
                Stage::Answering { answer, written, then_ends } => {
                    *written += some(self.socket.write(&answer[*written..]))?;
                    if *written == answer.len() {
                        if *then_ends {
                            return Ok(Turn::End);
                        }
                        self.stage = Stage::Told;
                    }
                }
                // Neither side sends anything further on this connection.
                Stage::Told => {
                    some(self.socket.read(&mut [0; 1]))?;
                    return Ok(Turn::End);
                }
            }
        }
    }

    fn asked(&self, record: &[u8; GREETING_BYTES]) -> Stage {
        let refusal = match Greeting::decode(record) {
            Ok(greeting) if greeting.purpose == Purpose::Look => None,
            Ok(_) => Some("this port tells what is published; paths go to the port that it tells".to_owned()),
            Err(fault) => Some(format!("{fault:?}")),
        };
        let then_ends = refusal.is_some();
        let answer = match refusal {
            None => self.shared.answer(self.slot),
            Some(text) => self.shared.greeting(Purpose::Invalid, 0, text),
        };
        Stage::Answering { answer, written: 0, then_ends }
    }
}

/// How much was moved; nothing is the end.
fn some(moved: io::Result<usize>) -> io::Result<usize> {
    moved.and_then(|bytes| if bytes == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) })
}

impl Connection for Watcher {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn event(&mut self, _file: usize, _hung: bool) {}

    fn turn(&mut self) -> Turn {
        loop {
            match self.go() {
                Ok(turn) => return turn,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Turn::Wait,
                Err(_) => return Turn::End,
            }
        }
    }

    fn tick(&mut self, now: Instant) -> Turn {
        if now < self.until { Turn::Wait } else { Turn::End }
    }

    fn waits(&self) -> bool {
        !matches!(self.stage, Stage::Told)
    }

    fn cut(self: Box<Self>) {
        self.shared.gone(self.slot);
    }
}
