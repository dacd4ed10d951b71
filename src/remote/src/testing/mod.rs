//! Strict stand-ins for real engines.
