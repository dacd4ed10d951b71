//! Every package in the build has a licence that requires attribution at most.

use crate::finding::Finding;
use crate::house::{list, text};
use crate::spdx::satisfied;
use serde_json::Value;

/// The licences that we accept. Copyleft, file-level copyleft included, is not among them.
const ACCEPTED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// The licence of every package of a resolved graph.
pub fn check_licences(resolved: &Value) -> Vec<Finding> {
    let accepts = |name: &str| ACCEPTED.contains(&name);
    let judged = list(&resolved["packages"]).iter().filter_map(|package| {
        let who = format!("{} {}", text(&package["name"]), text(&package["version"]));
        let rule = match package["license"].as_str() {
            None => format!("{who} names no licence expression"),
            Some(expression) => match satisfied(expression, &accepts) {
                Ok(true) => return None,
                Ok(false) => format!("{who} is under '{expression}'"),
                Err(why) => format!("{who}: licence '{expression}' cannot be read: {why}"),
            },
        };
        Some(Finding::new(
            "Cargo.lock",
            0,
            rule,
            "use another crate, or accept the licence in licences.rs with a reason",
        ))
    });
    judged.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::house;
    use serde_json::json;

    fn judge(licence: Value) -> Vec<Finding> {
        check_licences(&json!({"packages": [{"name": "planted", "version": "1.0.0", "license": licence}]}))
    }

    #[test]
    fn everything_we_build_on_is_permissive() {
        assert!(list(&house::resolved()["packages"]).len() > 30, "the graph is suspiciously small");
        assert_clean(check_licences(house::resolved()));
    }

    #[test]
    fn planted_copyleft_is_caught() {
        for licence in
            ["GPL-3.0-only", "MIT AND GPL-3.0-only", "MPL-2.0", "Apache-2.0 WITH Classpath-exception-2.0"]
        {
            assert_caught(&judge(json!(licence)), 0, licence);
        }
        assert_eq!(judge(json!("GPL-3.0-only OR MIT")), []);
    }

    #[test]
    fn planted_missing_or_broken_licence_is_caught() {
        assert_caught(&judge(Value::Null), 0, "names no licence");
        assert_caught(&judge(json!("MIT AND")), 0, "cannot be read");
    }
}
