//! Moving what one server holds to the others.

use super::{Cluster, Copies, PutWords, Trouble};
use crate::parts::Parts;
use crate::resp::client::Reply;

/// Times that the whole server is gone through: what was put meanwhile is moved too.
const ROUNDS_MAX: u32 = 4;

/// What a drain has moved so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Values that other servers have now and this one has not.
    pub moved: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Values that others had already.
    pub had: u64,
    /// Values that are here still: the others did not take as many copies as there are to be, or it is pinned.
    pub left: u64,
}

/// A drain under way: [`Draining::step`] moves some, so that progress can be shown and it can be stopped at any time.
#[derive(Debug)]
pub struct Draining<'a> {
    cluster: &'a mut Cluster,
    from: usize,
    address: String,
    cursor: Option<String>,
    rounds: u32,
    /// What the server counts as parts of one object.
    parts: Option<Parts>,
    /// Values that this round met.
    met: u64,
    so_far: Drained,
    /// Why the server is not empty.
    trouble: Option<Trouble>,
}

impl Cluster {
    /// Begins to move what a server holds, of the tenant that its address logs in as, to the others.
    ///
    /// # Errors
    /// It is not one of the servers, or the only one.
    pub fn drain(&mut self, server: &str) -> Result<Draining<'_>, Trouble> {
        let from = self.number(server)?;
        if self.members.len() < 2 {
            return Err(Trouble::Wrong("drain: there is no other server; name more of them".into()));
        }
        self.config.replicas = self.config.replicas.min(self.members.len() - 1);
        let so_far = Drained::default();
        let (address, cursor) = (server.to_owned(), Some("0".to_owned()));
        let (rounds, met, parts, trouble) = (0, 0, None, None);
        Ok(Draining { cluster: self, from, address, cursor, rounds, parts, met, so_far, trouble })
    }
}

impl Draining<'_> {
    /// What was moved so far.
    #[must_use]
    pub fn so_far(&self) -> Drained {
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

    /// What the server counts as parts of one object; one that does not know of parts has none.
    fn rule(&mut self) -> Result<Option<Parts>, Trouble> {
        let Reply::List(words) = self.cluster.ask(self.from, &[b"CONFIG", b"GET", b"parts"])? else {
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
                Some(copy) => copied.push((key, copy)),
                // The rest stays with what could not be moved, or is of no use without what is gone.
                None => return Ok(()),
            }
        }
        copied.into_iter().try_for_each(|(key, (copies, bytes))| self.remove_here(key, &copies, bytes))
    }

    /// Copies a value to the others: how many took it, and its bytes. None when it is gone, or has to stay.
    fn copy_one(&mut self, key: &[u8]) -> Result<Option<(Copies, usize)>, Trouble> {
        let value = match self.cluster.ask(self.from, &[b"GET", key])? {
            Reply::Bulk(value) => value,
            // Gone meanwhile.
            Reply::Nothing => return Ok(None),
            _ => return Err(Trouble::Odd("GET".into())),
        };
        let ttl_ms = match self.cluster.ask(self.from, &[b"PTTL", key])? {
            Reply::Integer(-2) => return Ok(None),
            Reply::Integer(ms) => u64::try_from(ms).ok(),
            _ => return Err(Trouble::Odd("PTTL".into())),
        };
        self.met += 1;
        // What others have under this key was put there since, and is newer or the same.
        let words = PutWords { ttl_ms, keep: true };
        let copies = self.cluster.put_on(key, &value, &words, Some(self.from));
        if copies.stored + copies.present < self.cluster.config.replicas {
            // Removed here, it would have fewer copies than its owner asked for.
            self.so_far.left += 1;
            self.trouble = copies.trouble;
            return Ok(None);
        }
        Ok(Some((copies, value.len())))
    }

    fn remove_here(&mut self, key: &[u8], copies: &Copies, bytes: usize) -> Result<(), Trouble> {
        match self.cluster.ask(self.from, &[b"DEL", key]) {
            Ok(_) if copies.stored == 0 => self.so_far.had += 1,
            Ok(_) => {
                self.so_far.moved += 1;
                self.so_far.moved_bytes += bytes as u64;
            }
            Err(why @ Trouble::Refused(_)) => {
                self.so_far.left += 1;
                self.trouble = Some(why);
            }
            Err(why) => return Err(why),
        }
        Ok(())
    }
}
