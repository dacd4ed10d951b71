//! Scans a machine's sysfs for RDMA devices, NUMA nodes and accelerators, and for the distances between them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::topology_gids::{Gid, line, ranked_gids};

/// NVIDIA's number as a maker of PCI devices.
const NVIDIA: &str = "0x10de";
/// Added to the distance of devices that share no PCI root.
const ACROSS_ROOTS: u32 = 100;
/// The distance of a NUMA node to itself, as the kernel counts.
const NUMA_LOCAL: u32 = 10;

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// Its number, from 1 on.
    pub number: u8,
    /// As the kernel says it: `ACTIVE`, `DOWN`, `INIT`.
    pub state: String,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// As the kernel says it: `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// Its addresses, best first.
    pub gids: Vec<Gid>,
}

impl RdmaPort {
    /// Whether data can go through it.
    pub fn active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// As verbs name it.
    pub name: String,
    /// The NUMA node that it is at; none where the machine does not say, as for software devices.
    pub numa: Option<u16>,
    /// The PCI devices on the way to it, from the root on; none for software devices.
    pub pci: Vec<String>,
    /// Its ports.
    pub ports: Vec<RdmaPort>,
    /// Network interfaces that belong to it, with the largest packet of each in bytes.
    pub interfaces: Vec<(String, u32)>,
}

/// An accelerator with memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// `cuda:N`, numbered by PCI address.
    pub name: String,
    /// As for [`Nic::numa`].
    pub numa: Option<u16>,
    /// As for [`Nic::pci`].
    pub pci: Vec<String>,
}

/// The hardware of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// By name.
    pub nics: Vec<Nic>,
    /// By number: each NUMA node's distances to all, in the order of their numbers.
    pub nodes: BTreeMap<u16, Vec<u32>>,
    /// By number.
    pub accelerators: Vec<Accelerator>,
}

impl Machine {
    /// Reads a sysfs (`/sys`; another place in tests). The scan skips entries that it cannot read.
    pub fn scan(sysfs: &Path) -> Self {
        let nics = entries(&sysfs.join("class/infiniband")).into_iter();
        let nics = nics.map(|name| nic(sysfs, name)).collect();
        Self { nics, nodes: nodes(sysfs), accelerators: accelerators(sysfs) }
    }

    /// How far a device is from a NUMA node: 0 is nearest. A device that does not say is near to all.
    pub(super) fn numa_distance(&self, from: Option<u16>, to: Option<u16>) -> u32 {
        let (Some(from), Some(to)) = (from, to) else { return 0 };
        if from == to {
            return 0;
        }
        let place = self.nodes.keys().position(|number| *number == to);
        let known = self.nodes.get(&from).and_then(|row| row.get(place?)).copied();
        known.unwrap_or(2 * NUMA_LOCAL).saturating_sub(NUMA_LOCAL).max(1)
    }

    /// How far two devices are apart: steps in the PCI tree, and much more across its roots.
    pub(super) fn pci_distance(&self, one: &Accelerator, nic: &Nic) -> u32 {
        let shared = one.pci.iter().zip(&nic.pci).take_while(|(one, other)| one == other).count();
        if shared == 0 {
            return ACROSS_ROOTS + self.numa_distance(one.numa, nic.numa);
        }
        u32::try_from(one.pci.len() + nic.pci.len() - 2 * shared).unwrap_or(ACROSS_ROOTS)
    }
}

/// Names in a folder, in an order that people expect: `mlx5_2` before `mlx5_10`.
fn entries(folder: &Path) -> Vec<String> {
    let read = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = read.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_cached_key(|name| {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (stem, number) = name.split_at(name.len() - digits);
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0), name.clone())
    });
    names
}

fn nic(sysfs: &Path, name: String) -> Nic {
    let folder = sysfs.join("class/infiniband").join(&name);
    // A software device has no place of its own, but the interface under it may have one.
    let under = line(&folder.join("parent")).map(|parent| sysfs.join("class/net").join(parent));
    let places = [Some(folder.clone()), under.clone()].into_iter().flatten();
    let place = places.map(|place| place.join("device")).find(|place| place.exists());
    let mut names = entries(&folder.join("device/net"));
    if let Some(parent) = under.as_ref().and_then(|under| under.file_name()) {
        names.push(parent.to_string_lossy().into_owned());
    }
    let mtu = |name: &String| line(&sysfs.join("class/net").join(name).join("mtu"))?.parse().ok();
    Nic {
        numa: place.as_deref().and_then(numa),
        pci: place.as_deref().map(pci).unwrap_or_default(),
        ports: entries(&folder.join("ports")).iter().filter_map(|port| seen(&folder, port)).collect(),
        interfaces: names.into_iter().map(|name| (name.clone(), mtu(&name).unwrap_or(0))).collect(),
        name,
    }
}

fn seen(folder: &Path, port: &str) -> Option<RdmaPort> {
    let number = port.parse().ok()?;
    let port = folder.join("ports").join(port);
    // The state is `4: ACTIVE`.
    let state = line(&port.join("state")).unwrap_or_default();
    let state = state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
    let text = |name: &str| line(&port.join(name)).unwrap_or_default();
    Some(RdmaPort {
        number,
        state,
        link_layer: text("link_layer"),
        rate: text("rate"),
        gids: ranked_gids(&port),
    })
}

fn numa(device: &Path) -> Option<u16> {
    // -1 where the machine does not say.
    line(&device.join("numa_node"))?.parse().ok()
}

/// The PCI devices on the way to one: the parts of its true path that are PCI addresses or roots.
fn pci(device: &Path) -> Vec<String> {
    let path: PathBuf = fs::canonicalize(device).unwrap_or_default();
    let parts = path.iter().map(|part| part.to_string_lossy().into_owned());
    parts.filter(|part| part.starts_with("pci") || is_pci_address(part)).collect()
}

/// `0000:3b:00.0`
fn is_pci_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let hex = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 4 && parts.iter().all(hex)
}

fn nodes(sysfs: &Path) -> BTreeMap<u16, Vec<u32>> {
    let folder = sysfs.join("devices/system/node");
    let numbered = |name: String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let distances = line(&folder.join(&name).join("distance")).unwrap_or_default();
        Some((number, distances.split_whitespace().filter_map(|one| one.parse().ok()).collect()))
    };
    let mut nodes: BTreeMap<u16, Vec<u32>> = entries(&folder).into_iter().filter_map(numbered).collect();
    if nodes.is_empty() {
        // A kernel without NUMA has one node and does not say so.
        nodes.insert(0, vec![NUMA_LOCAL]);
    }
    nodes
}

fn accelerators(sysfs: &Path) -> Vec<Accelerator> {
    let folder = sysfs.join("bus/pci/devices");
    let gpu = |address: &String| {
        let text = |name: &str| line(&folder.join(address).join(name)).unwrap_or_default();
        // Display and 3D controllers.
        text("vendor") == NVIDIA
            && (text("class").starts_with("0x0300") || text("class").starts_with("0x0302"))
    };
    let found = entries(&folder).into_iter().filter(gpu);
    let one = |(number, address): (usize, String)| {
        let device = folder.join(address);
        Accelerator { name: format!("cuda:{number}"), numa: numa(&device), pci: pci(&device) }
    };
    found.enumerate().map(one).collect()
}
