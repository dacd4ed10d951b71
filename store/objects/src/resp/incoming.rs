//! Commands out of a stream of bytes. A large value is not gathered here: its place in the arena is filled.

use crate::refusal::Refusal;
use crate::ticket::PutTicket;

/// Values from this size on go straight into the arena.
const LARGE_BYTES: usize = 16 * 1024;
/// Values from this size on do so too once the command is as long as the other.
const MEDIUM_BYTES: usize = 1024;
const LONG_COMMAND_BYTES: usize = 1 << 20;
/// Largest argument that is gathered here.
const GATHERED_MAX_BYTES: usize = 64 * 1024;
/// Largest command without its large values.
const COMMAND_MAX_BYTES: usize = 16 << 20;
/// Largest command of a client that has not logged in, and most arguments of it: as many as a login needs.
const STRANGER_MAX_BYTES: usize = 4 * 1024;
const STRANGER_ARGUMENTS_MAX: usize = 16;
/// Longest line: that of a command typed by hand.
const LINE_MAX_BYTES: usize = 16 * 1024;
/// Most arguments of a command.
const ARGUMENTS_MAX: usize = 1 << 20;
/// Room for a read, and most bytes of one.
pub(super) const READ_BYTES: usize = 64 * 1024;
const READ_MAX_BYTES: usize = 256 * 1024;
/// Room for a read of a client that has not logged in.
const STRANGER_READ_BYTES: usize = 4 * 1024;
/// Arguments that the list keeps room for between commands.
const ARGUMENTS_KEPT: usize = 256;

/// An argument.
#[derive(Debug)]
enum Argument {
    /// Bytes of the buffer, counted from the command's start.
    Gathered { from: usize, bytes: usize },
    /// A large value on its way, or why it was only passed over; apart, so that other arguments stay small.
    Large(Box<Result<PutTicket, Refusal>>),
}

/// The next step of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Read more.
    Read,
    /// A command is whole: see [`CommandParser::text`].
    Command,
    /// The next argument is a large value of this many bytes: reserve it and call [`CommandParser::begin_large`].
    Large(u64),
}

/// The client broke the protocol: tell it and close.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProtocolError(pub(super) &'static str);

/// Bytes received and what they say so far.
#[derive(Debug)]
pub(super) struct CommandParser {
    buffer: Vec<u8>,
    /// Where the command begins, where parsing goes on, where the received end.
    begin: usize,
    at: usize,
    end: usize,
    arguments: Vec<Argument>,
    /// Arguments still to come; none between commands.
    left: Option<usize>,
    /// Length of the argument whose bytes come next.
    expected: Option<usize>,
    /// Bytes of a large value still to come.
    large_left: usize,
    /// The argument whose bytes come next is gathered, though it is a large value.
    gathers: bool,
    /// The last argument is a large value whose end of line has not come.
    large_open: bool,
    /// Whether the client has logged in.
    pub(super) known: bool,
}

impl CommandParser {
    pub(super) fn new() -> Self {
        Self {
            buffer: Vec::new(),
            begin: 0,
            at: 0,
            end: 0,
            arguments: Vec::new(),
            left: None,
            expected: None,
            large_left: 0,
            gathers: false,
            large_open: false,
            known: false,
        }
    }

    /// How many arguments the command has, its name included.
    pub(super) fn count(&self) -> usize {
        self.arguments.len()
    }

    /// An argument's bytes; those of a large value are not here.
    pub(super) fn text(&self, argument: usize) -> &[u8] {
        match self.arguments.get(argument) {
            Some(Argument::Gathered { from, bytes }) => {
                &self.buffer[self.begin + from..self.begin + from + bytes]
            }
            _ => b"",
        }
    }

    /// Takes a large value out of the command, if it is one.
    pub(super) fn take_large(&mut self, argument: usize) -> Option<Result<PutTicket, Refusal>> {
        match self.arguments.get_mut(argument) {
            Some(Argument::Large(ticket)) => Some(std::mem::replace(&mut **ticket, Err(Refusal::TakenOver))),
            _ => None,
        }
    }

    /// Forgets the command that was whole.
    pub(super) fn finish(&mut self) {
        self.arguments.clear();
        self.arguments.shrink_to(ARGUMENTS_KEPT);
        (self.left, self.begin) = (None, self.at);
        if self.begin == self.end {
            (self.begin, self.at, self.end) = (0, 0, 0);
            if self.buffer.len() > READ_BYTES {
                self.buffer = Vec::new();
            }
        }
    }

    /// Bytes of memory that this has.
    pub(super) fn weight(&self) -> usize {
        self.buffer.len() + self.arguments.capacity() * size_of::<Argument>()
    }

    /// Bytes of memory that the next read takes beside what there is.
    pub(super) fn growth(&self) -> usize {
        if self.large_left > 0 || self.space() >= self.read_bytes() / 4 {
            return 0;
        }
        if self.begin > 0 && self.space() + self.begin >= self.read_bytes() / 4 {
            return 0;
        }
        (2 * self.buffer.len()).max(self.read_bytes()) - self.buffer.len()
    }

    /// Whether a command has begun to come in that is not whole.
    pub(super) fn is_mid_command(&self) -> bool {
        self.left.is_some() || self.end > self.begin
    }

    fn space(&self) -> usize {
        self.buffer.len() - self.end
    }

    fn read_bytes(&self) -> usize {
        if self.known { READ_BYTES } else { STRANGER_READ_BYTES }
    }

    /// Goes on as far as the received bytes allow.
    pub(super) fn advance(&mut self) -> Result<Step, ProtocolError> {
        loop {
            if self.large_left > 0 {
                return Ok(Step::Read);
            }
            if self.left == Some(0) {
                return Ok(Step::Command);
            }
            let Some(bytes) = self.expected else {
                if !self.header()? {
                    return Ok(Step::Read);
                }
                continue;
            };
            if self.large_open {
                if !self.end_of_argument(0)? {
                    return Ok(Step::Read);
                }
                self.large_open = false;
                continue;
            }
            let whole = self.end - self.at >= bytes + 2;
            let gathered = self.at - self.begin;
            let large = bytes >= LARGE_BYTES || (bytes >= MEDIUM_BYTES && gathered > LONG_COMMAND_BYTES);
            if !whole && large && self.known && !self.gathers && self.is_value() {
                return Ok(Step::Large(bytes as u64));
            }
            if !self.known && gathered + bytes > STRANGER_MAX_BYTES {
                return Err(ProtocolError("NOAUTH Authentication required before a command of this size."));
            }
            if bytes > GATHERED_MAX_BYTES && !self.is_value() {
                return Err(ProtocolError("ERR Protocol error: argument too large"));
            }
            if !whole {
                return if gathered + bytes > COMMAND_MAX_BYTES {
                    Err(ProtocolError("ERR Protocol error: command too large"))
                } else {
                    Ok(Step::Read)
                };
            }
            let from = self.at - self.begin;
            if self.end_of_argument(bytes)? {
                self.arguments.push(Argument::Gathered { from, bytes });
            }
        }
    }

    /// Reads the line that opens a command or an argument. False when it is not whole.
    fn header(&mut self) -> Result<bool, ProtocolError> {
        let received = &self.buffer[self.at..self.end];
        let Some(length) = received.iter().take(LINE_MAX_BYTES).position(|byte| *byte == b'\n') else {
            let top = if self.known { LINE_MAX_BYTES } else { STRANGER_MAX_BYTES };
            let long = received.len() >= top.min(LINE_MAX_BYTES);
            return if long {
                Err(ProtocolError("ERR Protocol error: too big inline request"))
            } else {
                Ok(false)
            };
        };
        let line = received[..length].strip_suffix(b"\r").unwrap_or(&received[..length]);
        let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<i64>().ok());
        match (self.left, line.split_first()) {
            (None, Some((b'*', count))) => {
                let count = number(count).filter(|count| *count <= ARGUMENTS_MAX as i64);
                let count = count.ok_or(ProtocolError("ERR Protocol error: invalid multibulk length"))?;
                if !self.known && count > STRANGER_ARGUMENTS_MAX as i64 {
                    return Err(ProtocolError(
                        "NOAUTH Authentication required before a command of so many arguments.",
                    ));
                }
                self.at += length + 1;
                match usize::try_from(count) {
                    Ok(count) if count > 0 => self.left = Some(count),
                    // An empty command asks for nothing.
                    _ => self.begin = self.at,
                }
            }
            (None, _) if !self.known && length > STRANGER_MAX_BYTES => {
                return Err(ProtocolError("NOAUTH Authentication required before a command of this size."));
            }
            (None, _) => self.typed(length),
            (Some(_), Some((b'$', bytes))) => {
                let bytes = number(bytes).and_then(|bytes| u32::try_from(bytes).ok());
                let bytes = bytes.ok_or(ProtocolError("ERR Protocol error: invalid bulk length"))?;
                self.expected = Some(bytes as usize);
                self.at += length + 1;
            }
            (Some(_), _) => return Err(ProtocolError("ERR Protocol error: expected '$'")),
        }
        Ok(true)
    }

    /// A command typed by hand: words of one line.
    fn typed(&mut self, length: usize) {
        let line = &self.buffer[self.at..self.at + length];
        let offset = self.at - self.begin;
        let mut from = None;
        for (at, byte) in line.iter().chain(b" ").enumerate() {
            match (byte.is_ascii_whitespace(), from) {
                (false, None) => from = Some(at),
                (true, Some(start)) => {
                    from = None;
                    self.arguments.push(Argument::Gathered { from: offset + start, bytes: at - start });
                }
                _ => {}
            }
        }
        self.at += length + 1;
        if self.arguments.is_empty() { self.begin = self.at } else { self.left = Some(0) }
    }

    /// Passes an argument's bytes and the end of line after them. False when that has not come yet.
    fn end_of_argument(&mut self, bytes: usize) -> Result<bool, ProtocolError> {
        let end = self.at + bytes;
        if self.end < end + 2 {
            return Ok(false);
        }
        if self.buffer[end..end + 2] != *b"\r\n" {
            return Err(ProtocolError("ERR Protocol error: expected the end of the argument"));
        }
        self.at = end + 2;
        (self.expected, self.gathers) = (None, false);
        self.left = self.left.map(|left| left - 1);
        Ok(true)
    }

    /// Whether the next argument is a value to be stored.
    fn is_value(&self) -> bool {
        let (name, at) = (self.text(0), self.arguments.len());
        let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
        match at {
            2 if is("SET") || is("SETNX") => true,
            3 if is("SETEX") || is("PSETEX") => true,
            _ => is("MSET") && at > 0 && at % 2 == 0,
        }
    }

    /// Whether the large value that [`Step::Large`] announced is that of a `SET` with an odd number of words after it, as
    /// where one of them is `NX`.
    pub(super) fn may_be_kept_out(&self) -> bool {
        let words = self.left.unwrap_or(0).saturating_sub(1);
        self.text(0).eq_ignore_ascii_case(b"SET") && !words.is_multiple_of(2)
    }

    /// Gathers the large value that [`Step::Large`] announced, in a buffer that has room for all of it.
    pub(super) fn gather_large(&mut self) {
        let bytes = self.expected.expect("a large value is announced");
        self.gathers = true;
        let room = self.at + bytes + READ_BYTES;
        self.buffer.resize(self.buffer.len().max(room), 0);
    }

    /// Opens the large value that [`Step::Large`] announced, and moves its first bytes to its place.
    pub(super) fn begin_large(&mut self, mut ticket: Result<PutTicket, Refusal>) {
        let bytes = self.expected.expect("a large value is announced");
        let here = bytes.min(self.end - self.at);
        let received = &self.buffer[self.at..self.at + here];
        if let Ok(open) = &mut ticket
            && let Err(refusal) = open.append(received)
        {
            ticket = Err(refusal);
        }
        // The copied bytes are cut out, so that the rest of the command follows its earlier arguments.
        self.buffer.copy_within(self.at + here..self.end, self.at);
        self.end -= here;
        (self.large_left, self.large_open) = (bytes - here, true);
        self.arguments.push(Argument::Large(Box::new(ticket)));
    }

    /// Reads once, by `read`, into the place of the large value that is being filled, or else into the buffer.
    /// Returns what `read` did.
    pub(super) fn read_with(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        if self.large_left == 0 {
            self.make_space();
            let top = self.buffer.len().min(self.end + READ_MAX_BYTES);
            let got = read(&mut self.buffer[self.end..top])?;
            self.end += got;
            return Ok(got);
        }
        let Some(Argument::Large(ticket)) = self.arguments.last_mut() else {
            unreachable!("what is being filled is the last argument")
        };
        let top = self.large_left;
        let mut read = Some(read);
        let filled = (**ticket).as_mut().ok().map(|open| {
            open.fill_with(|place| {
                let top = top.min(place.len());
                read.take().expect("called once")(&mut place[..top])
            })
        });
        let got = match filled {
            Some(Ok(got)) => got?,
            Some(Err(refusal)) => {
                **ticket = Err(refusal);
                return self.pass_over(read);
            }
            None => return self.pass_over(read),
        };
        self.large_left -= got;
        Ok(got)
    }

    /// Reads bytes of a value that has no place.
    fn pass_over(
        &mut self,
        read: Option<impl FnOnce(&mut [u8]) -> std::io::Result<usize>>,
    ) -> std::io::Result<usize> {
        // Not read yet only because the place was gone: the next call comes here at once.
        let Some(read) = read else { return Err(std::io::ErrorKind::WouldBlock.into()) };
        let mut nowhere = [0; 16 * 1024];
        let top = self.large_left.min(nowhere.len());
        let got = read(&mut nowhere[..top])?;
        self.large_left -= got;
        Ok(got)
    }

    /// The ticket that is being filled.
    pub(super) fn filling(&mut self) -> Option<&mut PutTicket> {
        match self.arguments.last_mut() {
            Some(Argument::Large(ticket)) if self.large_left > 0 => (**ticket).as_mut().ok(),
            _ => None,
        }
    }

    fn make_space(&mut self) {
        let wanted = self.read_bytes() / 4;
        if self.space() >= wanted {
            return;
        }
        if self.begin > 0 {
            self.buffer.copy_within(self.begin..self.end, 0);
            self.at -= self.begin;
            self.end -= self.begin;
            self.begin = 0;
        }
        if self.space() < wanted {
            let grown = (2 * self.buffer.len()).max(self.read_bytes());
            self.buffer.resize(grown, 0);
        }
    }
}
