//! A pure crate has at least as many lines of test code as of production code.
//!
//! Only lines that bear code count, on both sides: documenting an item must not make the balance worse, and a
//! commented test does not make it better.

use crate::finding::Finding;
use crate::graph;
use crate::outline::Outline;
use crate::reach::Purpose;
use std::collections::BTreeMap;

/// Code lines of one crate.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Balance {
    /// Outside tests.
    pub production: usize,
    /// In test modules and integration tests.
    pub test: usize,
}

/// Code lines per pure crate; benchmarks and examples are neither side.
pub fn balances(
    sources: &BTreeMap<String, String>,
    purposes: &BTreeMap<String, Purpose>,
) -> BTreeMap<&'static str, Balance> {
    let mut found: BTreeMap<&'static str, Balance> =
        graph::pure_dirs().map(|dir| (dir, Balance::default())).collect();
    for (path, source) in sources {
        let Some(balance) = crate_of(path).and_then(|dir| found.get_mut(dir)) else { continue };
        let (production, test) = Outline::of(source).code_lines();
        match purposes.get(path) {
            Some(Purpose::Production) => {
                balance.production += production;
                balance.test += test;
            }
            Some(Purpose::Test) => balance.test += production + test,
            Some(Purpose::Bench | Purpose::Example) | None => {}
        }
    }
    found
}

/// The innermost crate of the table that a path lies in.
fn crate_of(path: &str) -> Option<&'static str> {
    let inside = graph::TABLE.iter().map(|row| row.dir).filter(|dir| path.starts_with(&format!("{dir}/")));
    inside.max_by_key(|dir| dir.len())
}

/// Crates whose production code outweighs their tests.
pub fn check_balance(balances: &BTreeMap<&'static str, Balance>) -> Vec<Finding> {
    let light = balances.iter().filter(|(_, b)| b.test < b.production);
    light
        .map(|(dir, b)| {
            let rule = format!("{} lines of test code for {} of production code", b.test, b.production);
            Finding::new(
                dir,
                0,
                rule,
                "a pure crate needs at least as many: add properties against a naive reference",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::{house, reach};

    #[test]
    fn pure_crates_are_tested_at_least_as_much_as_written() {
        let sources = reach::house_sources();
        let purposes = reach::reached(house::crates(), &sources);
        let balances = balances(&sources, &purposes);
        println!("{balances:#?}");
        assert_eq!(balances.len(), 5);
        assert_clean(check_balance(&balances));
    }

    #[test]
    fn planted_untested_crate_is_caught() {
        let files = [
            (
                "store/src/lib.rs",
                "/// Doc.\nfn a() {}\n\nfn b() {}\n#[cfg(test)]\nmod tests {}\n",
                Purpose::Production,
            ),
            ("store/src/c.rs", "fn c() {}\n", Purpose::Production),
            ("store/tiers/src/lib.rs", "fn d() {}\n", Purpose::Production),
            ("store/benches/e.rs", "fn e() {}\nfn f() {}\n", Purpose::Bench),
            ("transfer/src/lib.rs", "fn g() {}\n", Purpose::Production),
            ("transfer/tests/h.rs", "fn h() {}\n", Purpose::Test),
        ];
        let sources = files.iter().map(|(path, text, _)| ((*path).to_owned(), (*text).to_owned())).collect();
        let purposes = files.iter().map(|(path, _, purpose)| ((*path).to_owned(), *purpose)).collect();
        let balances = balances(&sources, &purposes);
        assert_eq!(balances["store"], Balance { production: 3, test: 2 });
        assert_eq!(balances["transfer"], Balance { production: 1, test: 1 });
        let found = check_balance(&balances);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 0, "store:0: 2 lines of test code for 3");
    }
}
