//! Objects of several parts: what the ranks and layer groups of one engine put under keys of their own is one block
//! of KV, of use to nobody while a part is missing.
//!
//! Two ways of naming parts are known: LMCache's, where the number of parts stands in the key, as `MODEL@WORLD@RANK@HASH…`
//! or, of its multiprocess cache, `MODEL@WWRRLLll@GROUP@HASH…` with world, rank, local world and local rank in two
//! hexadecimal digits each; and `…@tp_rank:T@pcpP@dcpD@pp_rank:Q@group:G@HASH` (vLLM's connector of the Mooncake store),
//! where it does not.

use std::fmt;
use std::str::FromStr;

/// Most parts of an object.
pub const PARTS_MAX: u32 = 256;

/// Numbers of a part in keys of the second kind: their names, and the text before them.
const FIELDS: [(&str, &[u8]); 5] = [
    ("tp_rank", b"tp_rank:"),
    ("pcp", b"pcp"),
    ("dcp", b"dcp"),
    ("pp_rank", b"pp_rank:"),
    ("group", b"group:"),
];

/// The rule by which keys are parts of one object, and how many parts there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// LMCache's keys, which tell their world: as many parts as it has ranks.
    World,
    /// Numbers in the key by their names, and how many values each has: as many parts as there are combinations.
    Counts(Vec<(String, u32)>),
}

impl FromStr for Parts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "world" {
            return Ok(Self::World);
        }
        let mut counts: Vec<(String, u32)> = Vec::new();
        for pair in text.split(',') {
            let (name, count) = pair.split_once('=').unwrap_or((pair, ""));
            if !FIELDS.iter().any(|(known, _)| *known == name) {
                let known = FIELDS.map(|(known, _)| known).join(", ");
                return Err(format!(
                    "parts: no {name:?}; give `world`, or counts such as tp_rank=8 of {known}"
                ));
            }
            if counts.iter().any(|(given, _)| given == name) {
                return Err(format!("parts: {name} is given twice"));
            }
            let count = count.parse().ok().filter(|count| (1..=PARTS_MAX).contains(count));
            let count = count.ok_or_else(|| format!("parts: {name}: give a count from 1 to {PARTS_MAX}"))?;
            counts.push((name.to_owned(), count));
        }
        let all = counts.iter().try_fold(1, |all: u32, (_, count)| all.checked_mul(*count));
        match all {
            Some(2..=PARTS_MAX) => Ok(Self::Counts(counts)),
            _ => Err(format!("parts: {text}: give from 2 to {PARTS_MAX} together")),
        }
    }
}

impl fmt::Display for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::World => write!(f, "world"),
            Self::Counts(counts) => {
                let pairs: Vec<String> =
                    counts.iter().map(|(name, count)| format!("{name}={count}")).collect();
                write!(f, "{}", pairs.join(","))
            }
        }
    }
}

impl Parts {
    /// The numbers that say which part of its object a key is; none for an object by itself.
    pub(crate) fn split<'a>(&self, key: &'a [u8]) -> Option<Part<'a>> {
        let numbers = match self {
            Self::World => vec![rank_of_world(key)?],
            Self::Counts(counts) => {
                let numbers = counts.iter().map(|(name, count)| {
                    let (_, text) = FIELDS.iter().find(|(known, _)| known == name)?;
                    let number = segments(key).find_map(|segment| number_after(key, segment, text))?;
                    let among = Number { count: *count, ..number };
                    plain(&key[among.from..among.to]).filter(|at| at < count).map(|_| among)
                });
                let mut numbers = numbers.collect::<Option<Vec<_>>>()?;
                numbers.sort_unstable_by_key(|number| number.from);
                numbers
            }
        };
        Some(Part { key, numbers })
    }
}

/// A key without the numbers that say which part of its object it is, by whichever of the known ways it is named:
/// parts of one object belong on one server. None for a key that has none.
#[must_use]
pub fn stem(key: &[u8]) -> Option<Vec<u8>> {
    let fields = segments(key)
        .filter_map(|segment| FIELDS.iter().find_map(|(_, text)| number_after(key, segment, text)));
    let mut numbers: Vec<Number> = fields.collect();
    if numbers.is_empty() {
        numbers.push(rank_of_world(key)?);
    }
    Some(Part { key, numbers }.stem())
}

/// A number in a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number {
    /// Where its digits begin and end.
    from: usize,
    to: usize,
    /// Number of values that it takes.
    count: u32,
    form: Form,
}

/// How a number is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Decimal,
    /// World, rank, and the same within a machine that has so many ranks, two hexadecimal digits each.
    Packed {
        local: u32,
    },
}

impl Number {
    fn write(&self, at: u32, into: &mut Vec<u8>) {
        let text = match self.form {
            Form::Decimal => at.to_string(),
            Form::Packed { local } => format!("{:02x}{at:02x}{local:02x}{:02x}", self.count, at % local),
        };
        into.extend_from_slice(text.as_bytes());
    }
}

/// A key that is a part of an object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part<'a> {
    key: &'a [u8],
    /// In the order in which they stand in the key.
    numbers: Vec<Number>,
}

impl Part<'_> {
    /// The key without the numbers.
    pub(crate) fn stem(&self) -> Vec<u8> {
        let mut stem = Vec::with_capacity(self.key.len());
        let mut from = 0;
        for number in &self.numbers {
            stem.extend_from_slice(&self.key[from..number.from]);
            from = number.to;
        }
        stem.extend_from_slice(&self.key[from..]);
        stem
    }

    /// Calls `visit` with the key of every part, this one's too, until it says no. Whether it never did.
    pub(crate) fn all(&self, mut visit: impl FnMut(&[u8]) -> bool) -> bool {
        let mut at = vec![0; self.numbers.len()];
        let mut key = Vec::with_capacity(self.key.len() + 4);
        loop {
            key.clear();
            let mut from = 0;
            for (number, at) in self.numbers.iter().zip(&at) {
                key.extend_from_slice(&self.key[from..number.from]);
                number.write(*at, &mut key);
                from = number.to;
            }
            key.extend_from_slice(&self.key[from..]);
            if !visit(&key) {
                return false;
            }
            let next = at.iter_mut().zip(&self.numbers).find_map(|(at, number)| {
                *at = (*at + 1) % number.count;
                (*at > 0).then_some(())
            });
            if next.is_none() {
                return true;
            }
        }
    }
}

/// The segments between `@`: where each begins and ends.
fn segments(key: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    key.split(|byte| *byte == b'@').map(move |segment| {
        let at = (from, from + segment.len());
        from = at.1 + 1;
        at
    })
}

/// The number of a segment that is this text and digits.
fn number_after(key: &[u8], (from, to): (usize, usize), text: &[u8]) -> Option<Number> {
    let digits = key[from..to].strip_prefix(text)?;
    plain(digits).map(|_| Number { from: from + text.len(), to, count: 1, form: Form::Decimal })
}

/// The number, if it is written as everybody writes it: so that each has one key.
fn plain(digits: &[u8]) -> Option<u32> {
    let plain = digits.len() <= 6 && digits.iter().all(u8::is_ascii_digit);
    let plain = plain && !digits.is_empty() && (digits.len() == 1 || digits[0] != b'0');
    plain.then(|| digits.iter().fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0')))
}

/// The rank in a key of LMCache, of a world of several.
fn rank_of_world(key: &[u8]) -> Option<Number> {
    let mut segments = segments(key).skip(1);
    let (first, second) = (segments.next()?, segments.next()?);
    segments.next()?;
    let text = |(from, to): (usize, usize)| &key[from..to];
    if let Some((count, local)) = packed(text(first)) {
        let (from, to) = first;
        return Some(Number { from, to, count, form: Form::Packed { local } });
    }
    let count = plain(text(first)).filter(|count| (2..=PARTS_MAX).contains(count))?;
    let rank = plain(text(second)).filter(|at| *at < count);
    rank.map(|_| Number { from: second.0, to: second.1, count, form: Form::Decimal })
}

/// The world and the local world of `WWRRLLll`, where the ranks are dealt to machines one after the other.
fn packed(digits: &[u8]) -> Option<(u32, u32)> {
    if digits.len() != 8 || !digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let all = u32::from_str_radix(core::str::from_utf8(digits).ok()?, 16).ok()?;
    let [world, rank, local, local_rank] = all.to_be_bytes().map(u32::from);
    let fits = world >= 2 && rank < world && local >= 1 && world.is_multiple_of(local);
    (fits && local_rank == rank % local).then_some((world, local))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(rule: &str, key: &str) -> Option<Vec<String>> {
        let rule: Parts = rule.parse().unwrap();
        let part = rule.split(key.as_bytes())?;
        let mut keys = Vec::new();
        assert!(part.all(|key| {
            keys.push(String::from_utf8(key.to_vec()).unwrap());
            true
        }));
        let stems = keys.iter().map(|key| rule.split(key.as_bytes()).unwrap().stem());
        assert!(stems.zip(std::iter::repeat(part.stem())).all(|(one, other)| one == other));
        assert!(keys.contains(&key.to_owned()));
        Some(keys)
    }

    #[test]
    fn parts_of_both_ways_of_naming_are_known() {
        let keys = all("world", "llama@3@1@ab12@bfloat16").unwrap();
        assert_eq!(keys, ["llama@3@0@ab12@bfloat16", "llama@3@1@ab12@bfloat16", "llama@3@2@ab12@bfloat16"]);
        assert_eq!(
            all("world", "llama@04010202@0@ab12"),
            None,
            "of two ranks a machine, rank 1 is its machine's 1"
        );
        let keys = all("world", "llama@04010201@0@ab12@salt").unwrap();
        let written =
            ["04000200", "04010201", "04020200", "04030201"].map(|rank| format!("llama@{rank}@0@ab12@salt"));
        assert_eq!(keys, written);
        let key = "llama@tp_rank:1@pcp0@dcp0@pp_rank:0@group:3@ab12";
        let keys = all("pp_rank=2,tp_rank=2", key).unwrap();
        assert_eq!(keys[2], "llama@tp_rank:0@pcp0@dcp0@pp_rank:1@group:3@ab12");
        assert_eq!(keys.len(), 4);
        assert_eq!(all("tp_rank=12", key).unwrap()[11], "llama@tp_rank:11@pcp0@dcp0@pp_rank:0@group:3@ab12");
        assert_eq!(all("tp_rank=2,group=4,pcp=2", key).unwrap().len(), 16);
    }

    #[test]
    fn other_keys_are_objects_by_themselves() {
        let world = [
            "llama@1@0@ab",
            "llama@2@2@ab",
            "llama@2@01@ab",
            "llama@2@1",
            "llama@x@1@ab",
            "llama",
            "",
            "@@@",
            "llama@2@@ab",
            "llama@257@1@ab",
            "llama@99999999999@1@ab",
            "llama@2@-1@ab",
            "llama@01000100@0@ab",
            "llama@02020200@0@ab",
            "llama@03000200@0@ab",
            "llama@0200020A@0@ab",
        ];
        world.iter().for_each(|key| assert_eq!(all("world", key), None, "{key}"));
        let named = [
            "m@tp_rank:2@ab",
            "m@tp_rank:@ab",
            "m@tp_rank:+1@ab",
            "m@pcp1@ab",
            "m@xtp_rank:1@ab",
            "m@tp_rank1@ab",
        ];
        named.iter().for_each(|key| assert_eq!(all("tp_rank=2", key), None, "{key}"));
    }

    #[test]
    fn stems_are_those_of_any_rule() {
        let text = |key: &str| stem(key.as_bytes()).map(|stem| String::from_utf8(stem).unwrap());
        assert_eq!(text("llama@2@1@ab@half").unwrap(), "llama@2@@ab@half");
        assert_eq!(
            text("m@tp_rank:7@pcp0@dcp1@pp_rank:0@group:3@ab").unwrap(),
            "m@tp_rank:@pcp@dcp@pp_rank:@group:@ab"
        );
        assert_eq!(text("llama@02010201@0@ab").unwrap(), "llama@@0@ab");
        assert_eq!(text("plain"), None);
    }

    #[test]
    fn wrong_rules_are_named() {
        let wrong = [
            ("", "no \"\""),
            ("rank=2", "no \"rank\""),
            ("tp_rank", "count from 1"),
            ("tp_rank=0", "count from 1"),
            ("tp_rank=1", "2 to 256 together"),
            ("tp_rank=16,pp_rank=17", "2 to 256 together"),
            ("tp_rank=2,tp_rank=2", "twice"),
            ("tp_rank=999", "count from 1"),
            ("world,tp_rank=2", "no \"world\""),
        ];
        for (rule, why) in wrong {
            let said = rule.parse::<Parts>().unwrap_err();
            assert!(said.contains(why), "{rule}: {said}");
        }
        for good in ["world", "tp_rank=8,pp_rank=2"] {
            assert_eq!(good.parse::<Parts>().unwrap().to_string(), good);
        }
    }
}
