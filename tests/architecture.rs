//! The rules for this repository as tests.
//!
//! Each rule is a function from data (a source, a crate table, a changelog) to findings. So the tests run it on
//! the workspace and on a planted violation, which proves that the rule can fail. A finding names the file and
//! line, the rule, and the remedy.

#[path = "architecture/balance.rs"]
mod balance;
#[path = "architecture/changelog.rs"]
mod changelog;
#[path = "architecture/declared.rs"]
mod declared;
#[path = "architecture/dependencies.rs"]
mod dependencies;
#[path = "architecture/documents.rs"]
mod documents;
#[path = "architecture/finding.rs"]
mod finding;
#[path = "architecture/graph.rs"]
mod graph;
#[path = "architecture/house.rs"]
mod house;
#[path = "architecture/lex.rs"]
mod lex;
#[path = "architecture/licences.rs"]
mod licences;
#[path = "architecture/lints.rs"]
mod lints;
#[path = "architecture/names.rs"]
mod names;
#[path = "architecture/outline.rs"]
mod outline;
#[path = "architecture/policies.rs"]
mod policies;
#[path = "architecture/purity.rs"]
mod purity;
#[path = "architecture/reach.rs"]
mod reach;
#[path = "architecture/repeats.rs"]
mod repeats;
#[path = "architecture/served.rs"]
mod served;
#[path = "architecture/sizes.rs"]
mod sizes;
#[path = "architecture/spdx.rs"]
mod spdx;
#[path = "architecture/unreached.rs"]
mod unreached;
#[path = "architecture/words.rs"]
mod words;
