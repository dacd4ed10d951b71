//! A streamed answer: events of the engines in, server-sent events out.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use crate::body::CutOffError;
use crate::choices::Choices;
use crate::error::ApiError;
use crate::stats::Counters;
use crate::write::{ChunkWriter, KEEP_ALIVE, Totals};

/// A frame is handed on when it has this much, even if there is more.
const FRAME_BYTES: usize = 16 << 10;

/// How long a stream may be silent, unread, or under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamTimes {
    pub(crate) keep_alive: Duration,
    pub(crate) stall_limit: Duration,
    pub(crate) deadline: Option<Instant>,
}

/// A response's body that is written as the answers arrive. The connection polls it, so a client that does not read
/// delays only its own engines, for a while. Dropping it cancels the open requests.
pub(crate) struct EventStream {
    shared: Arc<Mutex<Option<Flow>>>,
    watch: tokio::task::AbortHandle,
}

struct Flow {
    choices: Choices,
    writer: ChunkWriter,
    buffer: Vec<u8>,
    times: StreamTimes,
    counters: Arc<Counters>,
    alarm: Pin<Box<Sleep>>,
    /// When the last frame was handed on, and whether the client has yet to come for the next.
    handed_on: Instant,
    client_turn: bool,
    started: bool,
    ended: bool,
}

impl EventStream {
    /// Streams answers that are all admitted.
    pub(crate) fn new(choices: Choices, times: StreamTimes, counters: Arc<Counters>) -> Self {
        let writer = ChunkWriter::new(&choices.plan);
        let now = Instant::now();
        let flow = Flow {
            choices,
            writer,
            buffer: Vec::with_capacity(1024),
            alarm: Box::pin(tokio::time::sleep_until(first_alarm(now, &times))),
            times,
            counters,
            handed_on: now,
            client_turn: true,
            started: false,
            ended: false,
        };
        let shared = Arc::new(Mutex::new(Some(flow)));
        let watch =
            tokio::spawn(cut_off_when_stalled(Arc::downgrade(&shared), times.stall_limit)).abort_handle();
        Self { shared, watch }
    }

    /// The next bytes; `None` at the end, an error when the client was cut off.
    pub(crate) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, CutOffError>>> {
        match &mut *self.shared.lock() {
            Some(flow) => flow.poll_bytes(cx).map(|bytes| bytes.map(Ok)),
            None => Poll::Ready(Some(Err(CutOffError))),
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.watch.abort();
        if let Some(flow) = &*self.shared.lock()
            && !flow.ended
        {
            flow.counters.disconnected();
        }
    }
}

fn first_alarm(now: Instant, times: &StreamTimes) -> Instant {
    let silence = now + times.keep_alive;
    times.deadline.map_or(silence, |deadline| deadline.min(silence))
}

/// Frees what a client holds that does not come for what is there. Over HTTP/1 the socket's own limit
/// closes the connection, too; over HTTP/2 only this sees that one stream of many stands still.
async fn cut_off_when_stalled(shared: Weak<Mutex<Option<Flow>>>, limit: Duration) {
    loop {
        let Some(strong) = shared.upgrade() else { return };
        let due = {
            let mut flow = strong.lock();
            match &*flow {
                None => return,
                Some(it) if it.ended => return,
                Some(it) if it.client_turn && it.handed_on.elapsed() >= limit => {
                    it.counters.cut_off();
                    *flow = None;
                    return;
                }
                Some(it) if it.client_turn => it.handed_on + limit,
                Some(_) => Instant::now() + limit,
            }
        };
        drop(strong);
        tokio::time::sleep_until(due).await;
    }
}

impl Flow {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.client_turn = false;
        if self.ended {
            return Poll::Ready(None);
        }
        if !self.started {
            self.started = true;
            self.write_start();
        }
        if let Err(error) = self.write_next_event(cx) {
            return self.break_off(&error);
        }
        if self.choices.ended() {
            self.ended = true;
            let totals = self.totals();
            self.writer.end(&mut self.buffer, totals);
        }
        if self.buffer.is_empty() {
            return self.poll_alarm(cx);
        }
        self.hand_on()
    }

    fn write_start(&mut self) {
        let totals = self.totals_if_wanted();
        for index in 0..self.choices.answers.len() {
            self.writer.role(&mut self.buffer, index, (&self.choices.plan, totals));
        }
        for index in 0..self.choices.answers.len() {
            self.write_answer(index);
        }
    }

    /// Writes all that the engines have said, up to a full frame.
    fn write_next_event(&mut self, cx: &mut Context<'_>) -> Result<(), ApiError> {
        loop {
            let mut moved = false;
            for turn in 0..self.choices.answers.len() {
                match self.choices.poll_answer(cx, turn, 1) {
                    Poll::Ready(Ok(true)) => {
                        moved = true;
                        self.write_answer(turn);
                    }
                    Poll::Ready(Ok(false)) | Poll::Pending => {}
                    Poll::Ready(Err(error)) => return Err(error),
                }
            }
            if !moved || self.buffer.len() >= FRAME_BYTES {
                return Ok(());
            }
        }
    }

    fn write_answer(&mut self, index: usize) {
        let totals = self.totals_if_wanted();
        let Choices { plan, answers, .. } = &mut self.choices;
        self.writer.write_new(&mut self.buffer, index, &mut answers[index], (plan, totals));
    }

    fn totals(&self) -> Totals {
        Totals::of(&self.choices.plan, self.choices.answers.iter())
    }

    fn totals_if_wanted(&self) -> Option<Totals> {
        self.writer.wants_totals().then(|| self.totals())
    }

    fn hand_on(&mut self) -> Poll<Option<Bytes>> {
        self.handed_on = Instant::now();
        self.client_turn = true;
        let bytes = Bytes::copy_from_slice(&self.buffer);
        self.buffer.clear();
        Poll::Ready(Some(bytes))
    }

    /// The stream ends with an error, and without the word that says that it went well.
    fn break_off(&mut self, error: &ApiError) -> Poll<Option<Bytes>> {
        self.ended = true;
        self.choices.give_up();
        self.counters.failed_in_stream();
        self.writer.error(&mut self.buffer, error);
        self.hand_on()
    }

    /// Nothing was said: waits for the end of the silence that clients bear, or of their time limit.
    fn poll_alarm(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while self.alarm.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if self.times.deadline.is_some_and(|deadline| deadline <= now) {
                return self.break_off(&crate::call::timed_out());
            }
            if self.handed_on + self.times.keep_alive <= now {
                self.buffer.extend_from_slice(KEEP_ALIVE);
                let again = first_alarm(now, &self.times);
                self.alarm.as_mut().reset(again);
                return self.hand_on();
            }
            let due = first_alarm(self.handed_on, &self.times);
            self.alarm.as_mut().reset(due);
        }
        Poll::Pending
    }
}
