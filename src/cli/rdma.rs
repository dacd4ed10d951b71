//! `baton rdma`: what RDMA this machine has, what is wrong with it, and which devices serve which memory.

mod findings;
#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
mod preflight;
mod verbs;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Error, Result};
use baton_transports::mover::topology::{Machine, Nic, Topology};
use serde_json::{Value, json};

use super::out;
use findings::{Finding, Level, SystemFiles};

/// Arguments of `baton rdma`.
#[derive(clap::Args)]
pub struct RdmaArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show devices, ports and addresses, and say what is wrong and what to do; fails where RDMA
    /// cannot be used
    Doctor(DoctorArgs),
    /// Print which devices serve which memory, as JSON, or check an override of that
    Topology {
        /// A file of the same form to check against this machine
        #[arg(long)]
        check: Option<PathBuf>,
        /// Where sysfs is
        #[arg(long, default_value = "/sys")]
        sysfs: PathBuf,
    },
}

#[derive(clap::Args)]
struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Open a path from every device to a peer that listens (--listen) and time its answers
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "listen")]
    peer: Option<String>,
    /// Be the peer of another node's doctor, until interrupted
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Use this device only, with --peer and --listen; may be given several times
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    /// Where sysfs is
    #[arg(long, default_value = "/sys")]
    sysfs: PathBuf,
}

/// Runs `baton rdma`.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: &RdmaArgs) -> Result<ExitCode> {
    match &args.action {
        Action::Doctor(args) => match (&args.peer, &args.listen) {
            (Some(peer), _) => preflight(peer, &args.devices),
            (_, Some(address)) => listen(address, &args.devices),
            _ => doctor(args),
        },
        Action::Topology { check: None, sysfs } => {
            out::print(&format!("{}\n", Topology::discover(sysfs).to_json()))?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Topology { check: Some(file), sysfs } => {
            let named = || file.display().to_string();
            let text = std::fs::read_to_string(file).with_context(named)?;
            let names: Vec<String> = Machine::scan(sysfs).nics.into_iter().map(|nic| nic.name).collect();
            let checked = Topology::parse(&text).and_then(|topology| topology.check(&names));
            checked.map_err(Error::msg).with_context(named)?;
            out::print(&format!("{}: valid for this machine\n", file.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
use preflight::{listen, preflight};

#[cfg(not(any(feature = "rdma", feature = "rdma-dlopen")))]
fn preflight(_peer: &str, _devices: &[String]) -> Result<ExitCode> {
    anyhow::bail!("rdma doctor: {}", verbs::WITHOUT)
}

#[cfg(not(any(feature = "rdma", feature = "rdma-dlopen")))]
fn listen(address: &str, devices: &[String]) -> Result<ExitCode> {
    preflight(address, devices)
}

fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let places = SystemFiles { sysfs: args.sysfs.clone(), ..SystemFiles::default() };
    let machine = Machine::scan(&places.sysfs);
    let mut found = findings::examine(&machine, &places);
    let views = verbs::views();
    found.extend(verbs::examine(&machine, views.as_deref()));
    let usable = machine.nics.iter().any(findings::usable);
    let topology = Topology::of(&machine);
    let text = match args.json {
        true => document(&machine, &found, &topology, usable)?,
        false => report(&machine, &found, &topology, usable),
    };
    out::print(&text)?;
    let broken = found.iter().any(|one| one.level == Level::Problem);
    Ok(if usable && !broken { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(machine: &Machine, found: &[Finding], topology: &Topology, usable: bool) -> String {
    let mut text = String::new();
    for nic in &machine.nics {
        describe(&mut text, nic);
    }
    let verdict = match usable {
        true => "RDMA can be used on this machine.",
        false => "RDMA cannot be used on this machine: transfers go over TCP and shared memory.",
    };
    let _ = writeln!(text, "{verdict}");
    for one in found {
        let mark = match one.level {
            Level::Fine => "ok     ",
            Level::Note => "note   ",
            Level::Problem => "PROBLEM",
        };
        let _ = writeln!(text, "{mark} {}: {}", one.subject, one.text);
        if let Some(remedy) = &one.remedy {
            let _ = writeln!(text, "        -> {remedy}");
        }
    }
    if usable {
        let _ = writeln!(text, "topology: {}", topology.to_json());
    }
    text
}

fn describe(text: &mut String, nic: &Nic) {
    let numa = nic.numa.map_or("unknown".to_owned(), |node| node.to_string());
    let place = nic.pci.last().map_or("a software device", String::as_str);
    let _ = writeln!(text, "{}: {place}, NUMA node {numa}", nic.name);
    for port in &nic.ports {
        let _ = writeln!(text, "  port {}: {}, {}, {}", port.number, port.state, port.link_layer, port.rate);
        for gid in &port.gids {
            let _ = writeln!(text, "    GID {:>3} {}: {}", gid.index, gid.text(), gid.kind.reason());
        }
    }
    for (name, mtu_bytes) in &nic.interfaces {
        let _ = writeln!(text, "  interface {name}, MTU {mtu_bytes}");
    }
}

fn document(machine: &Machine, found: &[Finding], topology: &Topology, usable: bool) -> Result<String> {
    let topology: Value = serde_json::from_str(&topology.to_json())?;
    let gid = |gid: &baton_transports::mover::topology_gids::Gid| {
        json!({ "index": gid.index, "address": gid.text(), "kind": format!("{:?}", gid.kind),
                "reason": gid.kind.reason(), "interface": gid.interface })
    };
    let port = |port: &baton_transports::mover::topology::RdmaPort| {
        json!({ "number": port.number, "state": port.state, "link_layer": port.link_layer,
                "rate": port.rate, "gids": port.gids.iter().map(gid).collect::<Vec<_>>() })
    };
    let device = |nic: &Nic| {
        let interfaces = nic.interfaces.iter();
        json!({ "name": nic.name, "numa": nic.numa, "pci": nic.pci,
                "ports": nic.ports.iter().map(port).collect::<Vec<_>>(),
                "interfaces": interfaces.map(|(name, mtu)| json!({ "name": name, "mtu_bytes": mtu }))
                    .collect::<Vec<_>>() })
    };
    let finding = |one: &Finding| json!({ "level": one.level.word(), "subject": one.subject, "text": one.text, "remedy": one.remedy });
    let document = json!({
        "usable": usable,
        "devices": machine.nics.iter().map(device).collect::<Vec<_>>(),
        "findings": found.iter().map(finding).collect::<Vec<_>>(),
        "topology": topology,
    });
    let text = serde_json::to_string_pretty(&document).context("rdma doctor")?;
    Ok(text + "\n")
}
