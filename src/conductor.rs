//! The conductor in the live service: what surrounds the pure core.

#[cfg_attr(
    not(test),
    expect(dead_code, unused_imports, reason = "the driver of the live service writes journals")
)]
pub mod journal;
