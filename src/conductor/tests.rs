//! The driver against scripted nodes.
