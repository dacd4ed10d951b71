//! Tests of the mover.
