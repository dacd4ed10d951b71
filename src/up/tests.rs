//! The service without its front door: conductor, control plane and nodes over loopback, in one process.

mod cluster;
mod drift;
mod engines;
mod equality;
mod front;
mod room;
mod servers;
mod spans;
