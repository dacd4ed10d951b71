//! A node against a scripted conductor, over gRPC: orders that make no sense, that come out of turn or
//! twice, and lines that break.

mod conductor;
mod fetches;
mod lines;
mod lives;
mod orders;
mod random;
mod steps;
