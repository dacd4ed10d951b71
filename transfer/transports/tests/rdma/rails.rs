//! The network under the rails: cuts it and restores it.

use std::process::Command;

/// How a rail is cut.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// The link of this side is taken down.
    Here,
    /// The link of the peer's side is.
    There,
    /// Every packet is lost in silence.
    Silent,
}

fn run(command: &str) {
    let done = Command::new("bash").args(["-c", command]).status().expect("there is a shell");
    assert!(done.success(), "{command}");
}

/// Cuts a rail; restored when dropped.
pub struct RailCut {
    rail: u32,
    cut: Cut,
}

impl RailCut {
    pub fn new(rail: u32, cut: Cut) -> Self {
        match cut {
            Cut::Here => run(&format!("ip link set a{rail} down")),
            Cut::There => run(&format!("ip link set b{rail} down")),
            Cut::Silent => run(&format!("tc qdisc add dev a{rail} root netem loss 100%")),
        }
        Self { rail, cut }
    }
}

impl Drop for RailCut {
    fn drop(&mut self) {
        let rail = self.rail;
        match self.cut {
            Cut::Silent => run(&format!("tc qdisc del dev a{rail} root")),
            Cut::Here | Cut::There => {
                let script = std::env::var("RAILS").expect("scripts/rdma/test.sh sets RAILS");
                run(&format!(". {script}; rail_up {rail}"));
            }
        }
    }
}

/// Sets the largest packet that a rail's end carries.
pub fn set_mtu(link: &str, bytes: u32) {
    run(&format!("ip link set {link} mtu {bytes}"));
}
