//! The addresses (GIDs) of an RDMA port, as the kernel lists them, best first and each with the reason.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

/// The kind of network that a GID belongs to; the order is the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GidKind {
    /// RoCE v2 over IPv4: routed, and what operators configure.
    RoceV2Ipv4,
    /// RoCE v2 over a global IPv6 address: routed.
    RoceV2Ipv6,
    /// RoCE v2 over a link-local address: reaches one network only.
    RoceV2LinkLocal,
    /// InfiniBand: its subnet manager gave it.
    Infiniband,
    /// RoCE v1: Ethernet frames without IP, so one network only, and both ends must choose it.
    RoceV1,
}

impl GidKind {
    /// Why it stands where it does.
    pub fn reason(self) -> &'static str {
        match self {
            Self::RoceV2Ipv4 => "RoCE v2 with an IPv4 address: routed and the usual choice",
            Self::RoceV2Ipv6 => "RoCE v2 with a global IPv6 address: routed",
            Self::RoceV2LinkLocal => "RoCE v2 with a link-local address: not beyond this network",
            Self::Infiniband => "InfiniBand: given by the subnet manager",
            Self::RoceV1 => "RoCE v1: not routed, and only with peers that choose it too",
        }
    }
}

/// One address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the port's table.
    pub index: u8,
    /// The address.
    pub bytes: [u8; 16],
    /// Its kind.
    pub kind: GidKind,
    /// The network interface that it belongs to, where there is one.
    pub interface: Option<String>,
}

impl Gid {
    /// The address as people write it: `10.0.0.1` for one that stands for an IPv4 address.
    pub fn text(&self) -> String {
        let address = Ipv6Addr::from(self.bytes);
        address.to_ipv4_mapped().map_or_else(|| address.to_string(), |four| four.to_string())
    }
}

/// The GIDs of a port's folder in sysfs (`.../infiniband/NAME/ports/N`), best first. Empty places are left out.
pub fn ranked_gids(port: &Path) -> Vec<Gid> {
    let infiniband = line(&port.join("link_layer")).is_some_and(|layer| layer == "InfiniBand");
    let mut gids: Vec<Gid> =
        (0..=u8::MAX).map_while(|index| gid(port, index, infiniband)).flatten().collect();
    gids.sort_by_key(|gid| (gid.kind, gid.index));
    gids
}

/// `None` behind the end of the table, `Some(None)` for an empty place.
fn gid(port: &Path, index: u8, infiniband: bool) -> Option<Option<Gid>> {
    let text = line(&port.join("gids").join(index.to_string()))?;
    let Some(bytes) = text.parse::<Ipv6Addr>().ok().map(|address| address.octets()) else {
        return Some(None);
    };
    // The second half names the port: a table's empty places are all zero there.
    if bytes[8..] == [0; 8] {
        return Some(None);
    }
    let attribute = |what: &str| line(&port.join("gid_attrs").join(what).join(index.to_string()));
    let kind = match attribute("types") {
        _ if infiniband => GidKind::Infiniband,
        Some(text) if text.starts_with("RoCE v2") => roce_v2(bytes),
        _ => GidKind::RoceV1,
    };
    Some(Some(Gid { index, bytes, kind, interface: attribute("ndevs") }))
}

fn roce_v2(bytes: [u8; 16]) -> GidKind {
    match Ipv6Addr::from(bytes) {
        address if address.to_ipv4_mapped().is_some() => GidKind::RoceV2Ipv4,
        address if address.is_unicast_link_local() => GidKind::RoceV2LinkLocal,
        _ => GidKind::RoceV2Ipv6,
    }
}

/// A file's only line.
pub(super) fn line(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// How many leading bits two addresses share: ends of one network share most.
pub fn shared_bits(one: [u8; 16], other: [u8; 16]) -> u32 {
    (u128::from_be_bytes(one) ^ u128::from_be_bytes(other)).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(layer: &str, gids: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("link_layer"), format!("{layer}\n")).unwrap();
        for (index, (gid, kind)) in gids.iter().enumerate() {
            fs::write(at(&format!("gids/{index}")), format!("{gid}\n")).unwrap();
            if !kind.is_empty() {
                fs::write(at(&format!("gid_attrs/types/{index}")), format!("{kind}\n")).unwrap();
                fs::write(at(&format!("gid_attrs/ndevs/{index}")), "eth0\n").unwrap();
            }
        }
        folder
    }

    #[test]
    fn the_routed_ipv4_address_comes_first_wherever_it_stands() {
        let empty = "0000:0000:0000:0000:0000:0000:0000:0000";
        let folder = port(
            "Ethernet",
            &[
                ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),
                ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2"),
                (empty, ""),
                ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2"),
                ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
                ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
            ],
        );
        let gids = ranked_gids(folder.path());
        let order: Vec<(u8, GidKind)> = gids.iter().map(|gid| (gid.index, gid.kind)).collect();
        use GidKind as K;
        assert_eq!(
            order,
            [(5, K::RoceV2Ipv4), (3, K::RoceV2Ipv6), (1, K::RoceV2LinkLocal), (0, K::RoceV1), (4, K::RoceV1)]
        );
        assert_eq!(gids[0].text(), "10.0.0.1");
        assert_eq!(gids[0].interface.as_deref(), Some("eth0"));
    }

    #[test]
    fn infiniband_has_one_kind() {
        let folder = port("InfiniBand", &[("fe80:0000:0000:0000:0002:c903:0001:e8a1", "IB/RoCE v1")]);
        assert_eq!(ranked_gids(folder.path())[0].kind, GidKind::Infiniband);
        assert_eq!(ranked_gids(&folder.path().join("nowhere")), []);
    }

    #[test]
    fn ends_of_one_network_share_more_bits() {
        let four = |last: [u8; 4]| std::net::Ipv4Addr::from(last).to_ipv6_mapped().octets();
        let here = four([10, 0, 0, 1]);
        assert!(shared_bits(here, four([10, 0, 0, 2])) > shared_bits(here, four([10, 0, 1, 2])));
        assert_eq!(shared_bits(here, here), 128);
    }
}
