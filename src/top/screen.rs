//! The page on a terminal: looks in the background, keys at once.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use anyhow::{Result, anyhow};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;

use super::Sample;
use super::frame::{LISTS, Page, Show};
use super::history::History;
use crate::operator::OperatorClient;

/// How long a key may wait for its effect.
const GLANCE: Duration = Duration::from_millis(50);
/// Rows of a page up or down.
const LEAP: usize = 10;

/// The service to watch.
pub struct Watch {
    /// The service.
    pub client: OperatorClient,
    /// Time between two looks.
    pub every: Duration,
}

/// Watches until `q` is pressed. The terminal is put back as it was, after a panic too.
///
/// # Errors
/// In words: the first look fails, or the terminal cannot be used.
pub fn watch(runtime: &Runtime, watch: Watch) -> Result<()> {
    let mut screen = Screen::default();
    // A wrong address is reported on the usual screen.
    screen.history.push(runtime.block_on(Sample::of(&watch.client))?);
    let base = watch.client.base().to_owned();
    let (sender, looks) = sync_channel(1);
    runtime.spawn(look(watch, sender));
    let wrong = |e: std::io::Error| anyhow!("top: this terminal cannot be used ({e}); try --once");
    let mut terminal = ratatui::try_init().map_err(wrong)?;
    let outcome = screen.run(&base, &looks, &mut terminal).map_err(wrong);
    ratatui::restore();
    outcome
}

async fn look(watch: Watch, sender: SyncSender<Result<Sample>>) {
    loop {
        tokio::time::sleep(watch.every).await;
        // A screen that has not taken the last look does without this one.
        if let Err(TrySendError::Disconnected(_)) = sender.try_send(Sample::of(&watch.client).await) {
            return;
        }
    }
}

/// The action that a key triggers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    /// Nothing more.
    Quit,
    /// Show it.
    Draw,
    /// Do nothing.
    Stay,
}

/// The state of the screen.
#[derive(Default)]
pub(super) struct Screen {
    pub(super) history: History,
    pub(super) show: Show,
}

impl Screen {
    fn run(
        &mut self,
        base: &str,
        looks: &Receiver<Result<Sample>>,
        terminal: &mut DefaultTerminal,
    ) -> std::io::Result<()> {
        let mut stale = true;
        loop {
            while let Ok(look) = looks.try_recv() {
                stale |= self.take(look);
            }
            if stale {
                terminal.draw(|frame| {
                    let page = Page::new(base, &self.history).shown(&self.show);
                    page.draw(frame.area(), frame.buffer_mut());
                })?;
            }
            stale = false;
            if !event::poll(GLANCE)? {
                continue;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match self.key(base, key) {
                    KeyAction::Quit => return Ok(()),
                    action => stale = action == KeyAction::Draw,
                },
                Event::Resize(..) => stale = true,
                _ => {}
            }
        }
    }

    /// Takes a look in, unless paused; whether there is something new to show.
    pub(super) fn take(&mut self, look: Result<Sample>) -> bool {
        if self.show.paused {
            return false;
        }
        match look {
            Ok(sample) => {
                self.show.trouble = None;
                self.history.push(sample);
            }
            Err(why) => self.show.trouble = Some(format!("{why:#}")),
        }
        true
    }

    /// Does what a key says.
    pub(super) fn key(&mut self, base: &str, key: KeyEvent) -> KeyAction {
        let page = Page::new(base, &self.history);
        let last = page.length(self.show.chosen).saturating_sub(1);
        let from = &mut self.show.from[self.show.chosen];
        // Lists grow shorter by themselves.
        *from = (*from).min(last);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return KeyAction::Quit,
            KeyCode::Char('p') => self.show.paused = !self.show.paused,
            KeyCode::Tab | KeyCode::Right => self.show.chosen = (self.show.chosen + 1) % LISTS,
            KeyCode::BackTab | KeyCode::Left => self.show.chosen = (self.show.chosen + LISTS - 1) % LISTS,
            KeyCode::Up => *from = from.saturating_sub(1),
            KeyCode::Down => *from = (*from + 1).min(last),
            KeyCode::PageUp => *from = from.saturating_sub(LEAP),
            KeyCode::PageDown => *from = (*from + LEAP).min(last),
            KeyCode::Home => *from = 0,
            KeyCode::End => *from = last,
            _ => return KeyAction::Stay,
        }
        KeyAction::Draw
    }
}
