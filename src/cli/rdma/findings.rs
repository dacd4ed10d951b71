//! Findings on RDMA from sysfs, the devices' files and this process's limits, each with a remedy.

use std::path::PathBuf;

use baton_transports::mover::topology::{Machine, Nic, RdmaPort};
use baton_transports::mover::topology_gids::GidKind;

/// An interface with this MTU or more carries the largest RDMA packets (4,096 bytes and their headers).
const LARGE_MTU_BYTES: u32 = 4_200;
/// Less locked memory than this is no use for KV blocks.
const LOCKED_BYTES_MIN: u64 = 8 << 30;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// As it should be.
    Fine,
    /// Works, and could be better.
    Note,
    /// Does not work.
    Problem,
}

impl Level {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Fine => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) subject: String,
    pub(super) text: String,
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn new(level: Level, subject: &str, text: String, remedy: Option<&str>) -> Self {
        Self { level, subject: subject.to_owned(), text, remedy: remedy.map(str::to_owned) }
    }
}

/// Where to look; other places in tests.
pub(super) struct SystemFiles {
    pub(super) sysfs: PathBuf,
    /// `/dev/infiniband`
    pub(super) devices: PathBuf,
    /// `/proc/self/limits`
    pub(super) limits: PathBuf,
}

impl Default for SystemFiles {
    fn default() -> Self {
        let path = PathBuf::from;
        Self { sysfs: path("/sys"), devices: path("/dev/infiniband"), limits: path("/proc/self/limits") }
    }
}

/// Whether paths can start from a device.
pub(super) fn usable(nic: &Nic) -> bool {
    nic.ports.iter().any(|port| port.active() && !port.gids.is_empty())
}

/// Everything that can be said without libibverbs.
pub(super) fn examine(machine: &Machine, places: &SystemFiles) -> Vec<Finding> {
    if machine.nics.is_empty() {
        return vec![absent(places)];
    }
    let mut found = Vec::new();
    found.extend(device_files(places));
    found.extend(locked_memory(places));
    for nic in &machine.nics {
        nic.ports.iter().for_each(|port| found.push(state(nic, port)));
        nic.ports.iter().filter(|port| port.active()).for_each(|port| found.push(address(nic, port)));
        found.extend(packets(nic));
        if nic.numa.is_none() && machine.nodes.len() > 1 {
            let text = "does not say at which NUMA node it is; it is taken to be near to all".to_owned();
            let remedy = "give a topology (baton rdma topology) that says it";
            found.push(Finding::new(Level::Note, &nic.name, text, Some(remedy)));
        }
    }
    found.extend(accelerators(machine, places));
    found
}

fn absent(places: &SystemFiles) -> Finding {
    let (text, remedy) = match places.sysfs.join("class/infiniband").exists() {
        true => (
            "the kernel can do RDMA but has no device",
            "load the driver of the network card (mlx5_ib, irdma, bnxt_re, efa), or for a trial on any \
             Ethernet interface: rdma link add rxe0 type rxe netdev INTERFACE",
        ),
        false => (
            "the kernel has no RDMA, or this container does not see it",
            "load ib_uverbs and the driver of the network card; a container needs the devices under \
             /dev/infiniband and the host's /sys; a virtual machine needs a card passed through",
        ),
    };
    Finding::new(Level::Problem, "machine", text.to_owned(), Some(remedy))
}

fn device_files(places: &SystemFiles) -> Option<Finding> {
    let entries = std::fs::read_dir(&places.devices).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    if names.any(|name| name.starts_with("uverbs")) {
        return None;
    }
    let text = format!("there is no uverbs device under {}", places.devices.display());
    let remedy = "load ib_uverbs; give /dev/infiniband to the container";
    Some(Finding::new(Level::Problem, "machine", text, Some(remedy)))
}

fn locked_memory(places: &SystemFiles) -> Option<Finding> {
    let limits = std::fs::read_to_string(&places.limits).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let soft = line.split_whitespace().next()?;
    let fine = || Finding::new(Level::Fine, "limits", format!("locked memory: {soft}"), None);
    let Ok(bytes) = soft.parse::<u64>() else { return Some(fine()) };
    if bytes >= LOCKED_BYTES_MIN {
        return Some(fine());
    }
    let text = format!("locked memory is limited to {} MiB: KV memory cannot be registered", bytes >> 20);
    let remedy =
        "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit; the capability IPC_LOCK in a container";
    Some(Finding::new(Level::Problem, "limits", text, Some(remedy)))
}

fn state(nic: &Nic, port: &RdmaPort) -> Finding {
    let subject = format!("{} port {}", nic.name, port.number);
    match port.state.as_str() {
        "ACTIVE" => Finding::new(Level::Fine, &subject, format!("active, {}", port.rate), None),
        "INIT" => {
            let remedy = "start a subnet manager on the InfiniBand network (opensm)";
            Finding::new(Level::Note, &subject, "waits for a subnet manager".into(), Some(remedy))
        }
        other => {
            let text = format!("is {other}: it is not used");
            let remedy = "set the interface up and check cable and switch";
            Finding::new(Level::Note, &subject, text, Some(remedy))
        }
    }
}

fn address(nic: &Nic, port: &RdmaPort) -> Finding {
    let subject = format!("{} port {}", nic.name, port.number);
    let Some(best) = port.gids.first() else {
        let remedy = "give its interface an IPv4 address";
        return Finding::new(Level::Problem, &subject, "has no address (GID)".into(), Some(remedy));
    };
    let text = format!("uses GID {}, {}: {}", best.index, best.text(), best.kind.reason());
    match best.kind {
        GidKind::RoceV2Ipv4 | GidKind::RoceV2Ipv6 | GidKind::Infiniband => {
            Finding::new(Level::Fine, &subject, text, None)
        }
        GidKind::RoceV2LinkLocal => {
            let remedy = "give its interface an IPv4 address, so that peers beyond this network can reach it";
            Finding::new(Level::Note, &subject, text, Some(remedy))
        }
        GidKind::RoceV1 => {
            let remedy = "let the driver do RoCE v2, and give the interface an IPv4 address";
            Finding::new(Level::Note, &subject, text, Some(remedy))
        }
    }
}

fn packets(nic: &Nic) -> Option<Finding> {
    let ethernet = nic.ports.iter().any(|port| port.link_layer == "Ethernet" && port.active());
    let (name, mtu_bytes) = nic.interfaces.first().filter(|_| ethernet)?;
    if *mtu_bytes >= LARGE_MTU_BYTES || *mtu_bytes == 0 {
        return None;
    }
    let text = format!("{name} has an MTU of {mtu_bytes}: RDMA packets are small, up to four times as many");
    let remedy = format!("ip link set {name} mtu 9000, there, at the peers and on the switches between");
    Some(Finding::new(Level::Note, &nic.name, text, Some(&remedy)))
}

fn accelerators(machine: &Machine, places: &SystemFiles) -> Option<Finding> {
    let first = machine.accelerators.first()?;
    let module = |name: &str| places.sysfs.join("module").join(name).exists();
    if module("nvidia_peermem") || module("nvidia_fs") {
        let text = format!(
            "{} accelerators, whose driver lets network cards reach them",
            machine.accelerators.len()
        );
        return Some(Finding::new(Level::Fine, &first.name, text, None));
    }
    let text = "its memory reaches the network through DMA buffers only, or through main memory".to_owned();
    let remedy = "use the open kernel modules of the driver (DMA buffers), or load nvidia_peermem";
    Some(Finding::new(Level::Note, &first.name, text, Some(remedy)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            let fake = Self(tempfile::tempdir().expect("a folder"));
            fake.put("dev/uverbs0", "");
            fake.put("limits", "Max locked memory         unlimited            unlimited            bytes");
            fake
        }

        fn put(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            fs::create_dir_all(path.parent().expect("inside")).expect("a folder");
            fs::write(path, format!("{text}\n")).expect("a file");
        }

        fn port(&self, state: &str, gid: &str, kind: &str, mtu: &str) {
            let port = "sys/class/infiniband/mlx5_0/ports/1";
            self.put(&format!("{port}/state"), state);
            self.put(&format!("{port}/link_layer"), "Ethernet");
            self.put(&format!("{port}/rate"), "100 Gb/sec (4X EDR)");
            self.put(&format!("{port}/gids/0"), gid);
            self.put(&format!("{port}/gid_attrs/types/0"), kind);
            self.put("sys/class/infiniband/mlx5_0/device/net/eth0/x", "");
            self.put("sys/class/net/eth0/mtu", mtu);
        }

        fn findings(&self) -> Vec<Finding> {
            let at = |name: &str| self.0.path().join(name);
            let places = SystemFiles { sysfs: at("sys"), devices: at("dev"), limits: at("limits") };
            examine(&Machine::scan(&places.sysfs), &places)
        }
    }

    fn texts(found: &[Finding], level: Level) -> String {
        found
            .iter()
            .filter(|one| one.level == level)
            .map(|one| format!("{}: {}\n", one.subject, one.text))
            .collect()
    }

    #[test]
    fn a_machine_without_rdma_is_told_what_it_needs() {
        let fake = Fake::new();
        let found = fake.findings();
        assert_eq!(found.len(), 1);
        assert!(found[0].text.contains("no RDMA"));
        assert!(found[0].remedy.as_ref().is_some_and(|text| text.contains("/dev/infiniband")));
        fs::create_dir_all(fake.0.path().join("sys/class/infiniband")).expect("a folder");
        assert!(fake.findings()[0].remedy.as_ref().is_some_and(|text| text.contains("rxe")));
    }

    #[test]
    fn a_good_port_has_no_remedies() {
        let fake = Fake::new();
        fake.port("4: ACTIVE", "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "9000");
        let found = fake.findings();
        assert!(found.iter().all(|one| one.level == Level::Fine), "{found:?}");
        assert!(texts(&found, Level::Fine).contains("uses GID 0, 10.0.0.1"));
    }

    #[test]
    fn each_trouble_is_named_with_its_remedy() {
        let fake = Fake::new();
        fake.port("4: ACTIVE", "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "1500");
        fake.put("limits", "Max locked memory         8388608              8388608              bytes");
        fs::remove_file(fake.0.path().join("dev/uverbs0")).expect("it is there");
        let found = fake.findings();
        assert!(found.iter().all(|one| one.level == Level::Fine || one.remedy.is_some()), "{found:?}");
        let (problems, notes) = (texts(&found, Level::Problem), texts(&found, Level::Note));
        assert!(problems.contains("limited to 8 MiB") && problems.contains("no uverbs device"), "{problems}");
        assert!(notes.contains("link-local") && notes.contains("MTU of 1500"), "{notes}");
        fake.port("1: DOWN", "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "1500");
        assert!(texts(&fake.findings(), Level::Note).contains("is DOWN"));
    }
}
