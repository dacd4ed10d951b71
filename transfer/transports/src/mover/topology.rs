//! Which network devices serve which memory: found, shown, and overridden.
//!
//! The text form is a JSON object: per place of memory (`cpu:0` is main memory at NUMA node 0, `cuda:0` the
//! first GPU's) a pair of lists, the preferred devices and the others, best first:
//! `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`.

use std::collections::BTreeMap;
use std::path::Path;

use super::Location;
pub use super::topology_scan::{Accelerator, Machine, Nic, RdmaPort};

/// Transport, device and distance of the devices that reach a place; 0 is nearest.
pub type Ranks = BTreeMap<Location, Vec<(String, String, u8)>>;

/// The preferred devices of a place, and the others.
type Row = (Vec<String>, Vec<String>);

/// Network devices by place of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    rows: BTreeMap<String, Row>,
}

impl Topology {
    /// Reads the topology of this machine from its sysfs (`/sys`; another place in tests).
    pub fn discover(sysfs: &Path) -> Self {
        Self::of(&Machine::scan(sysfs))
    }

    /// Of a machine: memory at a NUMA node prefers the devices that are nearest to the node, an accelerator's
    /// those that are nearest in the PCI tree. Devices without an active port are left out.
    pub fn of(machine: &Machine) -> Self {
        let live: Vec<&Nic> =
            machine.nics.iter().filter(|nic| nic.ports.iter().any(RdmaPort::active)).collect();
        let node = |number: &u16| {
            let far = |nic: &&Nic| machine.numa_distance(Some(*number), nic.numa);
            (format!("cpu:{number}"), row(&live, far))
        };
        let accelerator =
            |one: &Accelerator| (one.name.clone(), row(&live, |nic: &&Nic| machine.pci_distance(one, nic)));
        let rows = machine.nodes.keys().map(node);
        Self { rows: rows.chain(machine.accelerators.iter().map(accelerator)).collect() }
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// One line that names the place and what is wrong there.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rows: BTreeMap<String, Row> = serde_json::from_str(text).map_err(|error| {
            format!("the topology is not of the form {{\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]]}}: {error}")
        })?;
        for (place, (preferred, others)) in &rows {
            location(place)?;
            let mut seen: Vec<&String> = preferred.iter().chain(others).collect();
            if seen.is_empty() {
                return Err(format!("topology: {place} has no device"));
            }
            let count = seen.len();
            seen.sort_unstable();
            seen.dedup();
            if seen.len() < count || seen.iter().any(|name| name.is_empty()) {
                return Err(format!("topology: {place} names a device twice, or one without a name"));
            }
        }
        Ok(Self { rows })
    }

    /// Whether every device that it names is among `devices`.
    ///
    /// # Errors
    /// One line that names the first that is not, and those that there are.
    pub fn check(&self, devices: &[String]) -> Result<(), String> {
        for (place, (preferred, others)) in &self.rows {
            let mut named = preferred.iter().chain(others);
            if let Some(name) = named.find(|name| !devices.contains(name)) {
                let there = devices.join(", ");
                return Err(format!("topology: {place} names {name}, which is not here; there are: {there}"));
            }
        }
        Ok(())
    }

    /// The text form, by place.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(&self.rows).expect("strings and lists can always be written")
    }

    /// Preferred and other devices of a place; none where it says nothing of it.
    pub fn devices(&self, place: &str) -> Option<(&[String], &[String])> {
        self.rows.get(place).map(|(preferred, others)| (preferred.as_slice(), others.as_slice()))
    }

    /// For the settings of the mover: per place, how far each device of a transport is.
    pub fn ranks(&self, transport: &str) -> Ranks {
        let ranked = |(place, (preferred, others)): (&String, &Row)| {
            let near = preferred.iter().map(|name| (transport.to_owned(), name.clone(), 0));
            let steps = 1_u8..=u8::MAX;
            let far = others.iter().zip(steps).map(|(name, step)| (transport.to_owned(), name.clone(), step));
            Some((location(place).ok()?, near.chain(far).collect()))
        };
        self.rows.iter().filter_map(ranked).collect()
    }
}

fn row(nics: &[&Nic], far: impl Fn(&&Nic) -> u32) -> Row {
    let mut ranked: Vec<(u32, &str)> = nics.iter().map(|nic| (far(nic), nic.name.as_str())).collect();
    // Stable: equals stay in the order of their names.
    ranked.sort_by_key(|(distance, _)| *distance);
    let least = ranked.first().map_or(0, |(distance, _)| *distance);
    let (near, rest): (Vec<_>, Vec<_>) = ranked.into_iter().partition(|(distance, _)| *distance == least);
    let names = |some: Vec<(u32, &str)>| some.into_iter().map(|(_, name)| name.to_owned()).collect();
    (names(near), names(rest))
}

fn location(place: &str) -> Result<Location, String> {
    let wrong = || format!("topology: '{place}' is no place of memory; give cpu:N or cuda:N");
    let (kind, number) = place.split_once(':').ok_or_else(wrong)?;
    let number = number.parse().map_err(|_| wrong())?;
    match kind {
        "cpu" => Ok(Location::Cpu(number)),
        "cuda" => Ok(Location::Device(number)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A machine of two sockets: two devices at the first (the second of them beside the GPU), one at the
    /// second, one that is down, one in software.
    fn sysfs() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let put = |name: &str, text: &str| {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), format!("{text}\n")).unwrap();
        };
        put("devices/system/node/node0/distance", "10 21");
        put("devices/system/node/node1/distance", "21 10");
        let nic = |name: &str, place: &str, node: &str, state: &str| {
            put(&format!("devices/{place}/numa_node"), node);
            fs::create_dir_all(at(&format!("class/infiniband/{name}"))).unwrap();
            symlink(at(&format!("devices/{place}")), at(&format!("class/infiniband/{name}/device"))).unwrap();
            put(&format!("class/infiniband/{name}/ports/1/state"), state);
            put(&format!("class/infiniband/{name}/ports/1/link_layer"), "Ethernet");
        };
        nic("mlx5_10", "pci0000:00/0000:00:01.0/0000:01:00.0", "0", "4: ACTIVE");
        nic("mlx5_2", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0", "0", "4: ACTIVE");
        nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", "1", "4: ACTIVE");
        nic("mlx5_0", "pci0000:80/0000:80:02.0/0000:82:00.0", "1", "1: DOWN");
        let gpu = "devices/pci0000:10/0000:10:01.0/0000:11:01.0/0000:13:00.0";
        put(&format!("{gpu}/vendor"), "0x10de");
        put(&format!("{gpu}/class"), "0x030200");
        put(&format!("{gpu}/numa_node"), "0");
        fs::create_dir_all(at("bus/pci/devices")).unwrap();
        symlink(at(gpu), at("bus/pci/devices/0000:13:00.0")).unwrap();
        folder
    }

    #[test]
    fn memory_prefers_what_is_near() {
        let folder = sysfs();
        let topology = Topology::discover(folder.path());
        let text = topology.to_json().replace([' ', '\n'], "");
        assert_eq!(
            text,
            r#"{"cpu:0":[["mlx5_2","mlx5_10"],["mlx5_1"]],"cpu:1":[["mlx5_1"],["mlx5_2","mlx5_10"]],"cuda:0":[["mlx5_2"],["mlx5_10","mlx5_1"]]}"#
        );
        assert_eq!(Topology::parse(&text), Ok(topology));
    }

    #[test]
    fn software_devices_are_near_to_all_and_no_device_gives_empty_rows() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Topology::discover(folder.path()).devices("cpu:0"), Some((&[][..], &[][..])));
        let port = folder.path().join("class/infiniband/rxe0/ports/1");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        let topology = Topology::discover(folder.path());
        assert_eq!(topology.devices("cpu:0"), Some((&["rxe0".to_owned()][..], &[][..])));
    }

    #[test]
    fn an_override_is_read_and_judged() {
        let refused = |text: &str| Topology::parse(text).unwrap_err();
        assert!(refused("[]").contains("not of the form"));
        assert!(refused(r#"{"cpu:0": [["a"]]}"#).contains("not of the form"));
        assert!(refused(r#"{"gpu:0": [["a"], []]}"#).contains("'gpu:0' is no place"));
        assert!(refused(r#"{"cpu:x": [["a"], []]}"#).contains("no place"));
        assert!(refused(r#"{"cpu:0": [[], []]}"#).contains("has no device"));
        assert!(refused(r#"{"cpu:0": [["a"], ["a"]]}"#).contains("twice"));
        let topology = Topology::parse(r#"{"cpu:0": [["a"], ["b"]], "cuda:3": [["b"], []]}"#).unwrap();
        assert_eq!(topology.check(&["a".into(), "b".into()]), Ok(()));
        assert!(topology.check(&["a".into()]).unwrap_err().contains("names b, which is not here"));
        let ranks = topology.ranks("rdma");
        let of = |name: &str, far| ("rdma".to_owned(), name.to_owned(), far);
        assert_eq!(ranks[&Location::Cpu(0)], [of("a", 0), of("b", 1)]);
        assert_eq!(ranks[&Location::Device(3)], [of("b", 0)]);
    }

    #[test]
    fn a_machine_tells_of_its_ports() {
        let folder = sysfs();
        let machine = Machine::scan(folder.path());
        let names: Vec<&str> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]);
        assert_eq!(machine.nics[0].ports[0].state, "DOWN");
        assert_eq!(machine.nics[1].numa, Some(1));
        assert_eq!(machine.nics[1].pci, ["pci0000:80", "0000:80:01.0", "0000:81:00.0"]);
        assert_eq!(machine.accelerators[0].name, "cuda:0");
    }
}
