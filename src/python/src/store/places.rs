//! Which server a key lives at.

use baton_objects::resp::client::Url;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Servers that a store may have.
const SERVERS_MAX: usize = 64;

/// Reads addresses, separated by commas.
pub(super) fn parse(addresses: &str) -> Result<Vec<Url>, String> {
    let wrong =
        |text: &str| format!("{text:?} is no address of a store; give host:port, several with commas");
    let mut urls: Vec<Url> = Vec::new();
    for text in addresses.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        let url = if text.contains("://") { text.to_owned() } else { format!("redis://{text}") };
        let url = url.parse::<Url>().map_err(|_| wrong(text))?;
        if url.tls.is_some() {
            let store = url.address;
            return Err(format!(
                "{store}: this package speaks no TLS to stores; give redis://, over a network of your own"
            ));
        }
        if urls.iter().any(|known| known.address == url.address) {
            return Err(format!("{text:?} is given twice"));
        }
        urls.push(url);
    }
    match urls.len() {
        0 => Err(wrong(addresses)),
        1..=SERVERS_MAX => Ok(urls),
        more => Err(format!("{more} stores; give at most {SERVERS_MAX}")),
    }
}

/// A pattern that means just this text.
pub(super) fn literal(text: &str) -> String {
    let escaped = |c: char| if "*?[]\\^".contains(c) { vec!['\\', c] } else { vec![c] };
    text.chars().flat_map(escaped).collect()
}

/// Rendezvous hashing: each server draws a number for the key, and the highest has it. A server that leaves moves
/// only what it had, and the order in which servers are given means nothing.
#[derive(Debug)]
pub(super) struct RendezvousHasher {
    seeds: Vec<u64>,
}

impl RendezvousHasher {
    pub(super) fn new<'a>(addresses: impl Iterator<Item = &'a str>) -> Self {
        Self { seeds: addresses.map(|address| xxh3_64(address.as_bytes())).collect() }
    }

    /// The server that ranks first for a key among those whose bit is not set in `but`.
    pub(super) fn best(&self, key: &str, but: u64) -> Option<usize> {
        if self.seeds.len() == 1 {
            return (but & 1 == 0).then_some(0);
        }
        // The parts of an object are all at one server: only there can it know that they are all there.
        let stem = baton_objects::stem(key.as_bytes());
        let stem = stem.as_deref().unwrap_or(key.as_bytes());
        let draw = |(at, seed): (usize, &u64)| (xxh3_64_with_seed(stem, *seed), at);
        let left = self.seeds.iter().enumerate().filter(|(at, _)| but >> at & 1 == 0);
        left.map(draw).max().map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_wrong_ones_named() {
        let read =
            |text: &str| parse(text).map(|urls| urls.into_iter().map(|url| url.address).collect::<Vec<_>>());
        assert_eq!(read("a:1, redis://u:p@b:2 ,c").unwrap(), ["a:1", "b:2", "c:6379"]);
        for (wrong, why) in [
            ("", "give host:port"),
            ("etcd://a:1", "give host:port"),
            ("a:1,a:1", "twice"),
            ("rediss://a", "no TLS"),
        ] {
            assert!(read(wrong).unwrap_err().contains(why), "{wrong}");
        }
        let many: Vec<String> = (0..65).map(|n| format!("h{n}:1")).collect();
        assert!(read(&many.join(",")).unwrap_err().contains("64"));
    }

    #[test]
    fn a_server_that_leaves_moves_only_its_own_keys() {
        let all = ["a:1", "b:1", "c:1", "d:1"];
        let before = RendezvousHasher::new(all.into_iter());
        let after = RendezvousHasher::new(all[..3].iter().copied());
        let mut counts = [0; 4];
        for n in 0..4_000 {
            let key = format!("key {n}");
            let at = before.best(&key, 0).unwrap();
            counts[at] += 1;
            if at < 3 {
                assert_eq!(after.best(&key, 0), Some(at));
            } else {
                assert_eq!(after.best(&key, 0), before.best(&key, 1 << 3), "its second choice");
            }
        }
        assert_eq!(
            (before.best("k", 0b1111), RendezvousHasher::new(["a:1"].into_iter()).best("k", 1)),
            (None, None)
        );
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }

    #[test]
    fn parts_of_an_object_are_at_one_server() {
        let places = RendezvousHasher::new(["a:1", "b:1", "c:1", "d:1"].into_iter());
        let mut used = [false; 4];
        for block in 0..100 {
            let of = |rank: u32| {
                places.best(&format!("m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{block:x}"), 0)
            };
            assert!((1..8).all(|rank| of(rank) == of(0)));
            used[of(0).unwrap()] = true;
        }
        assert_eq!(used, [true; 4]);
    }

    #[test]
    fn a_literal_pattern_means_itself() {
        assert_eq!(literal("a*b/[c]"), "a\\*b/\\[c\\]");
    }
}
