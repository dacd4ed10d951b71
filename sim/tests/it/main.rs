//! The simulator against its own oracle, against stepping, and against published figures.

mod calibration;
mod determinism;
mod liveness;
mod regressions;
mod scenario;
mod seeds;
mod stepping;
