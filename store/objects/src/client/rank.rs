//! In which order servers are asked for a key: rendezvous hashing.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Numbers of the servers, the highest hash of server and key first; one order for all parts of an object.
pub(super) fn order<'a>(servers: impl Iterator<Item = &'a str>, key: &[u8]) -> Vec<usize> {
    let stem = crate::parts::stem(key);
    let key = stem.as_deref().unwrap_or(key);
    let of = |server: &str| xxh3_64_with_seed(key, xxh3_64_with_seed(server.as_bytes(), 0));
    let mut hashes: Vec<(u64, usize)> = servers.zip(0..).map(|(server, at)| (of(server), at)).collect();
    hashes.sort_unstable_by(|a, b| b.cmp(a));
    hashes.into_iter().map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVERS: [&str; 5] = ["a:1", "b:1", "c:1", "d:1", "e:1"];

    #[test]
    fn keys_spread_evenly() {
        let mut counts = [0u32; 5];
        for n in 0..20_000u32 {
            counts[order(SERVERS.into_iter(), &n.to_le_bytes())[0]] += 1;
        }
        assert!(counts.iter().all(|count| (3_700..4_300).contains(count)), "{counts:?}");
    }

    #[test]
    fn parts_of_an_object_belong_together() {
        for block in 0..200 {
            let of = |rank: u32| order(SERVERS.into_iter(), format!("m@tp_rank:{rank}@{block:x}").as_bytes());
            assert!((1..16).all(|rank| of(rank) == of(0)));
        }
    }

    #[test]
    fn a_server_that_goes_moves_its_own_keys_alone_and_the_list_s_order_does_not_matter() {
        for n in 0..2_000u32 {
            let key = n.to_le_bytes();
            let names = |servers: &[&'static str]| {
                let order = order(servers.iter().copied(), &key);
                order.into_iter().map(|at| servers[at]).collect::<Vec<_>>()
            };
            let all = names(&SERVERS);
            let mut without = all.clone();
            without.retain(|server| *server != "c:1");
            assert_eq!(names(&["e:1", "d:1", "b:1", "a:1"]), without);
        }
    }
}
