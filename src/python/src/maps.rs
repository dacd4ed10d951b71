//! Whether a range of addresses is memory that this process can use, by what the kernel says of its mappings.

use std::fs;

/// Whether all of it is mapped, to be read and written, as memory of this machine.
///
/// # Errors
/// What is wrong with it, with the remedy.
pub(crate) fn check(address: u64, bytes: u64) -> Result<(), String> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|e| format!("read /proc/self/maps: {e}"))?;
    covered(&maps, address, bytes)
}

fn covered(maps: &str, address: u64, bytes: u64) -> Result<(), String> {
    let said = format!("{bytes} bytes at {address:#x}");
    let end =
        address.checked_add(bytes).ok_or_else(|| format!("{said}: they end beyond the last address"))?;
    if address == 0 || bytes == 0 {
        return Err(format!("{said}: give an address and a length"));
    }
    let mut from = address;
    for (start, stop, kind) in maps.lines().filter_map(line) {
        if start > from || from >= end {
            break;
        }
        if stop <= from {
            continue;
        }
        match kind {
            Kind::Usable => from = stop,
            Kind::Device => {
                return Err(format!("{said}: memory of a device; only memory of the host is moved"));
            }
            Kind::Closed => break,
        }
    }
    if from >= end {
        return Ok(());
    }
    Err(format!("{said}: {from:#x} is not mapped to be read and written here; give memory of this process"))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Usable,
    Device,
    Closed,
}

/// `start-end rwxp offset device inode path`.
fn line(text: &str) -> Option<(u64, u64, Kind)> {
    let mut words = text.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let access = words.next()?;
    let path = words.nth(3).unwrap_or_default();
    // Drivers of accelerators map registers and apertures, which are no place for copies.
    let device =
        path.starts_with("/dev/") && !path.starts_with("/dev/shm/") && !path.starts_with("/dev/zero");
    let kind = match (device, access.starts_with("rw")) {
        (true, _) => Kind::Device,
        (false, true) => Kind::Usable,
        (false, false) => Kind::Closed,
    };
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0 \n\
3000-4000 rw-s 00000000 00:01 5 /dev/shm/cache (deleted)\n\
4000-5000 r--p 00000000 00:01 6 /usr/lib/some.so\n\
6000-7000 rw-s 00000000 00:01 7 /dev/nvidia0\n\
7000-8000 rw-p 00000000 00:00 0 [heap]\n";

    #[test]
    fn only_memory_that_can_be_used_passes() {
        assert_eq!(covered(MAPS, 0x1000, 0x3000), Ok(()));
        assert_eq!(covered(MAPS, 0x2fff, 2), Ok(()));
        assert_eq!(covered(MAPS, 0x7000, 0x1000), Ok(()));
        let refused = |at: u64, bytes: u64, why: &str| {
            let text = covered(MAPS, at, bytes).unwrap_err();
            assert!(text.contains(why), "{text}");
        };
        refused(0x3000, 0x1001, "0x4000 is not mapped");
        refused(0xfff, 2, "0xfff is not mapped");
        refused(0x7fff, 2, "0x8000 is not mapped");
        refused(0x6000, 1, "device");
        refused(0x9000, 1, "not mapped");
        refused(0, 1, "give an address");
        refused(0x1000, 0, "give an address");
        refused(u64::MAX, 2, "beyond");
    }

    #[test]
    fn our_own_memory_is_ours() {
        let held = vec![1_u8; 100_000];
        let address = held.as_ptr().expose_provenance() as u64;
        assert_eq!(check(address, 100_000), Ok(()));
        assert!(check(check as fn(_, _) -> _ as usize as u64, 16).is_err(), "code is not to be written");
    }
}
