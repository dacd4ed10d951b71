//! The engines through their port.

mod checkpoint;
mod exactness;
mod play;
mod reference;
mod running;
mod starts;
mod timed;
