//! Moving what one server holds to the others.

use super::{Cluster, Trouble};
use crate::parts::Parts;
use crate::resp::client::Reply;

/// Times that the whole server is gone through: what was put meanwhile is moved too.
const ROUNDS_MAX: u32 = 4;

/// The progress of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Values that other servers have now and this one has not.
    pub moved: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Values that others had already.
    pub had: u64,
    /// Values that are here still: the others did not take as many copies as there are to be or have another value, it
    /// is pinned, or it cannot be read.
    pub left: u64,
}

/// Which value counts where another server has another one under the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictRule {
    /// That of the server that is drained: it replaces the other.
    Drained,
    /// That of the other server: the one here is removed.
    Other,
}

/// A drain under way: [`DrainRun::step`] moves some, so that progress can be shown and it can be stopped at any time.
#[derive(Debug)]
pub struct DrainRun<'a> {
    cluster: &'a mut Cluster,
    from: usize,
    address: String,
    cursor: Option<String>,
    rounds: u32,
    newer: Option<ConflictRule>,
    /// The server's rule for parts of one object.
    parts: Option<Parts>,
    /// Values that this round met.
    met: u64,
    so_far: DrainProgress,
    /// Why the server is not empty.
    trouble: Option<Trouble>,
}

/// The facts about a value on a server.
struct Stat {
    sum: Sum,
    generation: u64,
    ttl_ms: Option<u64>,
}

/// The fields that distinguish values of one key.
#[derive(Clone, PartialEq, Eq)]
struct Sum {
    bytes: u64,
    crc32c: Option<String>,
}

impl Sum {
    fn of(value: &[u8]) -> Self {
        Self { bytes: value.len() as u64, crc32c: Some(format!("{:08x}", crate::checksum(value))) }
    }
}

/// A value that enough others have.
struct CopiedValue<'k> {
    key: &'k [u8],
    sum: Sum,
    /// Of the value here.
    generation: u64,
    /// Servers that took it just now.
    took: Vec<usize>,
}

/// A server's answer to an offered value.
enum OfferOutcome {
    Took,
    Had,
    Differs,
}

impl Cluster {
    /// Begins to move what a server holds, of the tenant that its address logs in as, to the others.
    ///
    /// # Errors
    /// It is not one of the servers, or the only one.
    pub fn drain(&mut self, server: &str) -> Result<DrainRun<'_>, Trouble> {
        let from = self.number(server)?;
        if self.members.len() < 2 {
            return Err(Trouble::Wrong("drain: there is no other server; name more of them".into()));
        }
        self.config.replicas = self.config.replicas.min(self.members.len() - 1);
        let so_far = DrainProgress::default();
        let (address, cursor, newer) = (server.to_owned(), Some("0".to_owned()), None);
        let (rounds, met, parts, trouble) = (0, 0, None, None);
        Ok(DrainRun { cluster: self, from, address, cursor, rounds, newer, parts, met, so_far, trouble })
    }
}

impl DrainRun<'_> {
    /// Which value counts where two differ. Without it both stay, and the one here is left.
    #[must_use]
    pub fn newer(mut self, newer: Option<ConflictRule>) -> Self {
        self.newer = newer;
        self
    }

    /// The progress so far.
    #[must_use]
    pub fn so_far(&self) -> DrainProgress {
        self.so_far
    }

    /// Why something was left, or may be, if anything is.
    #[must_use]
    pub fn trouble(&self) -> Option<&Trouble> {
        self.trouble.as_ref()
    }

    /// Moves some values. False when all is done.
    ///
    /// # Errors
    /// The server that is drained does not answer; what was moved is moved.
    pub fn step(&mut self) -> Result<bool, Trouble> {
        let Some(cursor) = self.cursor.take() else { return Ok(false) };
        if cursor == "0" {
            self.parts = self.rule()?;
        }
        let (keys, next) = self.cluster.scan(&self.address, &cursor, "*")?;
        for key in keys {
            self.move_object(&key)?;
        }
        if next != "0" {
            self.cursor = Some(next);
            return Ok(true);
        }
        self.rounds += 1;
        let more = self.met > 0 && self.so_far.left == 0;
        let again = more && self.rounds < ROUNDS_MAX;
        if more && !again {
            let words = "values are put there all the while; take it out of the writers' lists first";
            self.trouble = Some(Trouble::Wrong(words.into()));
        }
        self.met = 0;
        self.cursor = again.then(|| "0".to_owned());
        Ok(again)
    }

    /// The server's rule for parts of one object; none for a server that does not know parts.
    fn rule(&mut self) -> Result<Option<Parts>, Trouble> {
        let Reply::List(words) = self.cluster.request(self.from, &[b"CONFIG", b"GET", b"parts"])? else {
            return Err(Trouble::Odd("CONFIG GET".into()));
        };
        match words.get(1) {
            Some(Reply::Bulk(rule)) if !rule.is_empty() => {
                String::from_utf8_lossy(rule).parse().map(Some).map_err(Trouble::Wrong)
            }
            _ => Ok(None),
        }
    }

    /// Moves the value of a key, and those of the other parts of its object: none can be read here once one is gone.
    fn move_object(&mut self, key: &[u8]) -> Result<(), Trouble> {
        let mut keys = Vec::new();
        let take = |key: &[u8]| {
            keys.push(key.to_vec());
            true
        };
        match self.parts.as_ref().and_then(|rule| rule.split(key)) {
            Some(part) => _ = part.all(take),
            None => keys.push(key.to_vec()),
        }
        let mut copied = Vec::new();
        for key in &keys {
            match self.copy_one(key)? {
                Some(copy) => copied.push(copy),
                // The rest stays with what could not be moved, or is of no use without what is gone; there it would be
                // a part of an object that is not whole.
                None => return copied.iter().try_for_each(|copy| self.take_back(copy)),
            }
        }
        // Where another value was put meanwhile, all stays here, and is met again.
        let mut is_begun = false;
        for at in 0..copied.len() {
            if self.remove_here(&copied[at])? {
                is_begun = true;
            } else if !is_begun {
                return copied.iter().try_for_each(|copy| self.take_back(copy));
            }
        }
        Ok(())
    }

    /// Counts a value that stays, and why.
    fn leave(&mut self, why: Trouble) {
        self.so_far.left += 1;
        self.trouble = Some(why);
    }

    /// A value that was listed is not given: it is gone, or it is left.
    fn missed(&mut self, key: &[u8]) -> Result<(), Trouble> {
        match self.cluster.request(self.from, &[b"EXISTS", key])? {
            // Another look shows whether its copy was being written to the SSD at this moment.
            Reply::Integer(0) => self.met += 1,
            Reply::Integer(_) => {
                let key = String::from_utf8_lossy(key).into_owned();
                self.leave(Trouble::Gone(format!("'{key}' is there and cannot be read; look at its disk")));
            }
            _ => return Err(Trouble::Odd("EXISTS".into())),
        }
        Ok(())
    }

    /// Copies a value to the others. None when it is gone, or has to stay.
    fn copy_one<'k>(&mut self, key: &'k [u8]) -> Result<Option<CopiedValue<'k>>, Trouble> {
        let Some(stat) = self.stat(self.from, key)? else { return self.missed(key).map(|()| None) };
        let value = match self.cluster.request(self.from, &[b"GET", key])? {
            Reply::Bulk(value) => value,
            Reply::Nothing => return self.missed(key).map(|()| None),
            _ => return Err(Trouble::Odd("GET".into())),
        };
        self.met += 1;
        let sum = Sum::of(&value);
        let mut copied = CopiedValue { key, sum, generation: stat.generation, took: Vec::new() };
        let (mut had, mut trouble) = (0, None);
        for at in self.cluster.ranked(key).into_iter().filter(|at| *at != self.from).collect::<Vec<_>>() {
            if copied.took.len() + had == self.cluster.config.replicas {
                break;
            }
            match self.offer(at, &copied, &value, stat.ttl_ms) {
                Ok(OfferOutcome::Took) => copied.took.push(at),
                Ok(OfferOutcome::Had) => had += 1,
                Ok(OfferOutcome::Differs) => {
                    let key = String::from_utf8_lossy(key).into_owned();
                    trouble = Some(Trouble::Wrong(format!(
                        "{} has another value under '{key}'; say which counts (--newer drained or other)",
                        self.cluster.members[at].address()
                    )));
                    break;
                }
                Err(why) => trouble = Some(why),
            }
        }
        if copied.took.len() + had == self.cluster.config.replicas {
            return Ok(Some(copied));
        }
        // Removed here, it would have fewer copies than its owner asked for. A copy that stayed there would be the
        // older one as soon as another value is put here.
        self.leave(trouble.unwrap_or_else(|| Trouble::Gone("too few other servers answer".into())));
        self.take_back(&copied)?;
        Ok(None)
    }

    /// Asks a server for the facts about a value; another server also for those about a part whose object is not whole
    /// there.
    fn stat(&mut self, at: usize, key: &[u8]) -> Result<Option<Stat>, Trouble> {
        let words: [&[u8]; 3] = [b"BATON.STAT", key, b"ANY"];
        let any = at != self.from && self.parts.is_some();
        let parts = match self.cluster.request(at, if any { &words } else { &words[..2] })? {
            Reply::List(parts) => parts,
            Reply::Nothing => return Ok(None),
            _ => return Err(Trouble::Odd("BATON.STAT".into())),
        };
        let of = |name: &str| {
            let found = parts.chunks_exact(2).find(|pair| pair[0] == Reply::Bulk(name.into()));
            found.map(|pair| &pair[1])
        };
        let number = |name: &str| match of(name) {
            Some(Reply::Integer(number)) => u64::try_from(*number).ok(),
            _ => None,
        };
        let crc32c = match of("crc32c") {
            Some(Reply::Bulk(sum)) => Some(String::from_utf8_lossy(sum).into_owned()),
            _ => None,
        };
        let (Some(bytes), Some(generation)) = (number("bytes"), number("generation")) else {
            return Err(Trouble::Odd("BATON.STAT".into()));
        };
        Ok(Some(Stat { sum: Sum { bytes, crc32c }, generation, ttl_ms: number("ttl_ms") }))
    }

    /// Puts a value where there is none of its key.
    fn put(&mut self, at: usize, key: &[u8], value: &[u8], ttl_ms: Option<u64>) -> Result<bool, Trouble> {
        let ttl = ttl_ms.map(|ms| ms.max(1).to_string());
        let mut command: Vec<&[u8]> = vec![b"SET", key, value, b"NX"];
        if let Some(ms) = &ttl {
            command.extend([&b"PX"[..], ms.as_bytes()]);
        }
        match self.cluster.request(at, &command)? {
            Reply::Simple(_) => Ok(true),
            Reply::Nothing => Ok(false),
            _ => Err(Trouble::Odd("SET".into())),
        }
    }

    /// Removes this very value.
    fn remove(&mut self, at: usize, key: &[u8], generation: u64) -> Result<bool, Trouble> {
        match self.cluster.request(at, &[b"BATON.DEL", key, generation.to_string().as_bytes()])? {
            Reply::Integer(count) => Ok(count > 0),
            _ => Err(Trouble::Odd("BATON.DEL".into())),
        }
    }

    /// Offers a value to a server.
    fn offer(
        &mut self,
        at: usize,
        copied: &CopiedValue<'_>,
        value: &[u8],
        ttl_ms: Option<u64>,
    ) -> Result<OfferOutcome, Trouble> {
        if self.put(at, copied.key, value, ttl_ms)? {
            return Ok(OfferOutcome::Took);
        }
        let Some(there) = self.stat(at, copied.key)? else {
            return Err(Trouble::Gone(format!(
                "{} has a value under a key that it cannot read",
                self.cluster.members[at].address()
            )));
        };
        if there.sum == copied.sum || self.newer == Some(ConflictRule::Other) {
            return Ok(OfferOutcome::Had);
        }
        let replaced = self.newer == Some(ConflictRule::Drained)
            && self.remove(at, copied.key, there.generation)?
            && self.put(at, copied.key, value, ttl_ms)?;
        Ok(if replaced { OfferOutcome::Took } else { OfferOutcome::Differs })
    }

    /// Takes copies away that were put on others just now.
    fn take_back(&mut self, copied: &CopiedValue<'_>) -> Result<(), Trouble> {
        for at in copied.took.iter().copied() {
            let there = self.stat(at, copied.key)?.filter(|there| there.sum == copied.sum);
            if let Some(there) = there {
                self.remove(at, copied.key, there.generation)?;
            }
        }
        Ok(())
    }

    /// Removes what was copied. False when it is another value by now.
    fn remove_here(&mut self, copied: &CopiedValue<'_>) -> Result<bool, Trouble> {
        match self.remove(self.from, copied.key, copied.generation) {
            Ok(false) => return Ok(false),
            Ok(true) if copied.took.is_empty() => self.so_far.had += 1,
            Ok(true) => {
                self.so_far.moved += 1;
                self.so_far.moved_bytes += copied.sum.bytes;
            }
            Err(why @ Trouble::Refused(_)) => self.leave(why),
            Err(why) => return Err(why),
        }
        Ok(true)
    }
}
