//! The open-loop load generator and the small servers that router measurements are made against.
//!
//! - [`live`] offers a trace to a running endpoint at the trace's own times and measures what a
//!   client sees; [`figures`] turns that into the simulator's report, by the simulator's definitions.
//! - [`mod@bench`] measures what a router adds; [`proxy`] and [`upstream`] are what it is compared with.

pub mod answer;
pub mod bench;
pub mod bodies;
pub mod clock;
pub mod compare;
pub mod figures;
pub mod live;
pub mod pace;
pub mod process;
pub mod prompt;
pub mod proxy;
pub mod serve;
pub mod sse;
pub mod summary;
pub mod target;
pub mod upstream;
