//! Built scenes.
