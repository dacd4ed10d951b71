//! I/O threads of the transports that wait for sockets. Each sleeps in one epoll over its connections and
//! gives a connection a bounded turn when there is something to do; one that is idle costs nothing.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll};

/// How often limits of time are looked at while any is running.
const TICK: Duration = Duration::from_millis(25);
/// Turns of spinning connections between two looks at the sockets.
const SPINS_PER_LOOK: u32 = 128;
/// The token of a thread's own wake-up.
const WAKE: u64 = 0;
/// Files of a connection; its token and the file's number go to the kernel as one.
const FILES_MAX: u64 = 4;
/// Events taken from the kernel at a time.
const EVENTS: usize = 64;

/// The next step that a connection wants after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Another turn, when others have had theirs.
    Again,
    /// Nothing until its files are ready or it is nudged.
    Wait,
    /// It has more files than before; then as [`Turn::Again`].
    Files,
    /// To be cut.
    End,
}

/// A connection, owned by one I/O thread.
pub(super) trait Connection: Send {
    /// Files whose readiness gives it a turn; at most [`FILES_MAX`].
    fn files(&self) -> Vec<BorrowedFd<'_>>;
    /// File number `file` of its files has become ready; `hung` when the other end is going or gone. A turn
    /// follows.
    fn event(&mut self, file: usize, hung: bool);
    /// Moves what can be moved without waiting, up to a bound.
    fn turn(&mut self) -> Turn;
    /// Looks at its limits of time; called every [`TICK`] while it [`Connection::waits`].
    fn tick(&mut self, now: Instant) -> Turn;
    /// Whether a limit of time is running.
    fn waits(&self) -> bool;
    /// The thread is about to sleep: whether it may, as far as this connection goes.
    fn rest(&mut self) -> bool {
        true
    }
    /// Whether it wants turn after turn, never sleeping.
    fn spins(&self) -> bool {
        false
    }
    /// Whether it is of this session, which is being fenced.
    fn serves(&self, _session: u128) -> bool {
        false
    }
    /// Ends the connection and its work. The thread has let go of it and gives it no further turn.
    fn cut(self: Box<Self>);
}

/// A socket that others connect to.
pub(super) trait Accepts: Send {
    /// The socket, ready when a peer waits.
    fn file(&self) -> BorrowedFd<'_>;
    /// Takes the next one that waits, and gives it a thread or turns it away.
    ///
    /// # Errors
    /// The errors of accepting: an aborted connection, no waiting peer, or no file descriptor left.
    fn accept(&mut self) -> io::Result<()>;
}

/// Accepts connecting peers. Not the acceptor of `baton-http`, which needs tokio: these threads wait by epoll.
pub(super) struct Listener<A> {
    socket: A,
    /// The system had no room for one that waits.
    starved: bool,
}

impl<A: Accepts> Listener<A> {
    pub(super) const fn new(socket: A) -> Self {
        Self { socket, starved: false }
    }
}

impl<A: Accepts> Connection for Listener<A> {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.file()]
    }

    fn event(&mut self, _file: usize, _hung: bool) {}

    fn turn(&mut self) -> Turn {
        loop {
            match self.socket.accept() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Where the system is out of files, `tick` retries the waiting peers later.
                    self.starved = error.kind() != io::ErrorKind::WouldBlock;
                    return Turn::Wait;
                }
            }
        }
    }

    fn tick(&mut self, _now: Instant) -> Turn {
        Turn::Again
    }

    fn waits(&self) -> bool {
        self.starved
    }

    fn cut(self: Box<Self>) {}
}

/// Where a connection lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReactorSlot {
    thread: usize,
    token: u64,
}

enum Command {
    Adopt(u64, Box<dyn Connection>),
    Nudge(u64),
    Cut(u64),
    CutSession(u128, Arc<Countdown>),
    Stop,
}

/// Wakes a connection when every thread has done its part.
struct Countdown {
    left: AtomicUsize,
    done: Arc<AtomicBool>,
    pool: Arc<Pool>,
    slot: ReactorSlot,
}

impl Countdown {
    fn one_is_done(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.store(true, Ordering::Release);
            self.pool.nudge(self.slot);
        }
    }
}

/// One thread's door.
struct Door {
    inbox: Mutex<Vec<Command>>,
    asleep: AtomicBool,
    wake: OwnedFd,
    epoll: OwnedFd,
}

impl Door {
    fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { inbox: Mutex::default(), asleep: AtomicBool::new(false), wake, epoll })
    }

    fn put(&self, command: Command) {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // Pairs with the thread's own swap before it sleeps: either it sees the command or we see it asleep.
        if self.asleep.swap(false, Ordering::SeqCst) {
            ring(&self.wake);
        }
    }

    fn take(&self) -> Vec<Command> {
        std::mem::take(&mut *self.inbox.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Wakes the thread that waits for an eventfd.
pub(super) fn ring(wake: impl AsFd) {
    // The write fails only at the maximal count, and then the waiting thread is awake.
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
}

/// Takes the wake-ups off an eventfd.
pub(super) fn quiet(wake: impl AsFd) {
    let mut count = [0; 8];
    // Empty is what is wanted.
    let _ = rustix::io::read(wake, &mut count);
}

/// A fixed number of I/O threads.
pub(super) struct Pool {
    doors: Vec<Door>,
    tokens: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    /// Starts `threads` of them.
    pub(super) fn start(name: &str, threads: usize) -> io::Result<Arc<Self>> {
        let doors = (0..threads).map(|_| Door::new()).collect::<io::Result<_>>()?;
        let pool = Arc::new(Self { doors, tokens: AtomicU64::new(WAKE + 1), threads: Mutex::default() });
        for number in 0..threads {
            let ours = pool.clone();
            let thread = std::thread::Builder::new().name(format!("baton-{name}-{number}"));
            let started = thread.spawn(move || Thread::new(ours, number).run());
            match started {
                Ok(thread) => pool.joins().push(thread),
                Err(error) => {
                    pool.stop();
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    fn joins(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A seat for a connection yet to be made; seats go round the threads.
    pub(super) fn slot(&self) -> ReactorSlot {
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let threads = u64::try_from(self.doors.len()).expect("few threads");
        ReactorSlot { thread: usize::try_from(token % threads).expect("few threads"), token }
    }

    /// Gives a connection to the thread of its seat, for a first turn at once.
    pub(super) fn adopt(&self, slot: ReactorSlot, connection: Box<dyn Connection>) {
        self.doors[slot.thread].put(Command::Adopt(slot.token, connection));
    }

    /// Gives it a turn.
    pub(super) fn nudge(&self, slot: ReactorSlot) {
        self.doors[slot.thread].put(Command::Nudge(slot.token));
    }

    /// Cuts it, if it is still there.
    pub(super) fn cut(&self, slot: ReactorSlot) {
        self.doors[slot.thread].put(Command::Cut(slot.token));
    }

    /// Cuts every connection of a session on every thread, then sets `done` and nudges `slot`.
    pub(super) fn cut_session(self: &Arc<Self>, session: u128, slot: ReactorSlot, done: Arc<AtomicBool>) {
        let left = AtomicUsize::new(self.doors.len());
        let countdown = Arc::new(Countdown { left, done, pool: self.clone(), slot });
        for door in &self.doors {
            door.put(Command::CutSession(session, countdown.clone()));
        }
    }

    /// Cuts every connection and ends the threads; returns when they have ended.
    pub(super) fn stop(&self) {
        for door in &self.doors {
            door.put(Command::Stop);
        }
        let threads = std::mem::take(&mut *self.joins());
        for thread in threads {
            // One that panicked has ended too.
            let _ = thread.join();
        }
        // Cuts connections that arrived after their thread had stopped.
        for command in self.doors.iter().flat_map(Door::take) {
            match command {
                Command::Adopt(_, connection) => connection.cut(),
                Command::CutSession(..) | Command::Nudge(_) | Command::Cut(_) | Command::Stop => {}
            }
        }
    }
}

struct Guest {
    connection: Box<dyn Connection>,
    /// Whether it is in the list of those that get a turn.
    queued: bool,
    /// Whether it is in the list of those to be asked before the thread sleeps.
    awake: bool,
}

struct Thread {
    pool: Arc<Pool>,
    number: usize,
    guests: BTreeMap<u64, Guest>,
    ready: Vec<u64>,
    /// Had a turn since the thread last slept.
    awake: Vec<u64>,
    /// Whether a limit of time may be running.
    armed: bool,
    next_tick: Instant,
    looks: u32,
}

impl Thread {
    fn new(pool: Arc<Pool>, number: usize) -> Self {
        Self {
            pool,
            number,
            guests: BTreeMap::new(),
            ready: Vec::new(),
            awake: Vec::new(),
            armed: false,
            next_tick: Instant::now(),
            looks: 0,
        }
    }

    fn run(mut self) {
        while self.commands() {
            let spinning = self.turns();
            self.ticks();
            self.look(spinning);
        }
        for guest in std::mem::take(&mut self.guests).into_values() {
            guest.connection.cut();
        }
    }

    fn door(&self) -> &Door {
        &self.pool.doors[self.number]
    }

    /// Whether to go on.
    fn commands(&mut self) -> bool {
        for command in self.door().take() {
            match command {
                Command::Adopt(token, connection) => self.admit(token, connection),
                Command::Nudge(token) => self.queue(token),
                Command::Cut(token) => self.cut(token),
                Command::CutSession(session, countdown) => {
                    let of =
                        |(token, guest): (&u64, &Guest)| guest.connection.serves(session).then_some(*token);
                    let tokens: Vec<u64> = self.guests.iter().filter_map(of).collect();
                    tokens.into_iter().for_each(|token| self.cut(token));
                    countdown.one_is_done();
                }
                Command::Stop => return false,
            }
        }
        true
    }

    fn admit(&mut self, token: u64, connection: Box<dyn Connection>) {
        self.guests.insert(token, Guest { connection, queued: false, awake: false });
        self.watch(token);
    }

    /// Watches the files of a connection, and gives it a turn.
    fn watch(&mut self, token: u64) {
        use epoll::EventFlags as F;
        let Some(guest) = self.guests.get(&token) else { return };
        let interest = F::IN | F::OUT | F::RDHUP | F::ET;
        let add = |(number, file): (u64, BorrowedFd<'_>)| {
            let data = epoll::EventData::new_u64(token * FILES_MAX + number);
            match epoll::add(&self.door().epoll, file, data, interest) {
                // It is watched already.
                Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
                Err(error) => Err(error),
            }
        };
        match (0..).zip(guest.connection.files()).try_for_each(add) {
            Ok(()) => self.queue(token),
            Err(_) => self.cut(token),
        }
    }

    fn queue(&mut self, token: u64) {
        if let Some(guest) = self.guests.get_mut(&token).filter(|guest| !guest.queued) {
            guest.queued = true;
            self.ready.push(token);
        }
    }

    fn cut(&mut self, token: u64) {
        if let Some(guest) = self.guests.remove(&token) {
            for file in guest.connection.files() {
                // A closed file has left the epoll by itself.
                let _ = epoll::delete(&self.door().epoll, file);
            }
            guest.connection.cut();
        }
    }

    /// Gives each that is ready a turn, and says whether any spins.
    fn turns(&mut self) -> bool {
        let mut spinning = false;
        for token in std::mem::take(&mut self.ready) {
            let Some(guest) = self.guests.get_mut(&token) else { continue };
            guest.queued = false;
            let turn = guest.connection.turn();
            let spins = guest.connection.spins();
            self.armed |= guest.connection.waits();
            match turn {
                Turn::End => self.cut(token),
                Turn::Again => self.queue(token),
                Turn::Files => self.watch(token),
                Turn::Wait if spins => {
                    spinning = true;
                    self.queue(token);
                }
                Turn::Wait => self.waits(token),
            }
        }
        spinning
    }

    fn ticks(&mut self) {
        if !self.armed {
            return;
        }
        let now = Instant::now();
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        self.armed = false;
        let (mut ended, mut more, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        for (token, guest) in &mut self.guests {
            if !guest.connection.waits() {
                continue;
            }
            self.armed = true;
            match guest.connection.tick(now) {
                Turn::End => ended.push(*token),
                Turn::Wait => waiting.push(*token),
                Turn::Again | Turn::Files => more.push(*token),
            }
        }
        ended.into_iter().for_each(|token| self.cut(token));
        more.into_iter().for_each(|token| self.queue(token));
        waiting.into_iter().for_each(|token| self.waits(token));
    }

    /// It has nothing to do; before the thread sleeps it is asked once, however often it said so.
    fn waits(&mut self, token: u64) {
        if let Some(guest) = self.guests.get_mut(&token)
            && !std::mem::replace(&mut guest.awake, true)
        {
            self.awake.push(token);
        }
    }

    /// Waits for events as long as nothing else is to be done.
    fn look(&mut self, spinning: bool) {
        self.looks = self.looks.wrapping_add(1);
        if spinning && !self.looks.is_multiple_of(SPINS_PER_LOOK) {
            std::hint::spin_loop();
            return;
        }
        let sleeps = self.may_sleep();
        let limit = match (sleeps, self.armed) {
            (false, _) => Some(Timespec { tv_sec: 0, tv_nsec: 0 }),
            (true, true) => Timespec::try_from(TICK).ok(),
            (true, false) => None,
        };
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; EVENTS];
        // A signal interrupts; the loop comes back.
        let came = epoll::wait(&self.door().epoll, &mut events[..], limit.as_ref()).unwrap_or(0);
        self.door().asleep.store(false, Ordering::SeqCst);
        for event in &events[..came] {
            match event.data.u64() {
                WAKE => quiet(&self.door().wake),
                data => {
                    use epoll::EventFlags as F;
                    let token = data / FILES_MAX;
                    let file = usize::try_from(data % FILES_MAX).expect("below 4");
                    let flags = event.flags;
                    let hung = flags.intersects(F::RDHUP | F::HUP | F::ERR);
                    if let Some(guest) = self.guests.get_mut(&token) {
                        guest.connection.event(file, hung);
                    }
                    self.queue(token);
                }
            }
        }
    }

    fn may_sleep(&mut self) -> bool {
        if !self.ready.is_empty() {
            return false;
        }
        for token in std::mem::take(&mut self.awake) {
            let Some(guest) = self.guests.get_mut(&token) else { continue };
            guest.awake = false;
            if !guest.connection.rest() {
                self.queue(token);
            }
        }
        self.door().asleep.store(true, Ordering::SeqCst);
        let empty = self.door().inbox.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        empty && self.ready.is_empty()
    }
}
