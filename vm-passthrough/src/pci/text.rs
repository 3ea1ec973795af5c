//! Values of sysfs attributes as text. What does not parse is `None`, never a panic.

use super::{Bar, BarKind, PciClass, PciIds, PowerState, ResetMethod, Rom};

/// Flags of a line of `resource` (Linux `include/linux/ioport.h`).
mod flag {
    pub(super) const IO: u64 = 0x0000_0100;
    pub(super) const MEMORY: u64 = 0x0000_0200;
    pub(super) const PREFETCH: u64 = 0x0000_2000;
    pub(super) const MEMORY_64: u64 = 0x0010_0000;
    pub(super) const UNSET: u64 = 0x2000_0000;
}

/// The text without white space around it, `None` when it is not UTF-8.
pub(super) fn trim(text: &[u8]) -> Option<&str> {
    std::str::from_utf8(text).ok().map(str::trim)
}

/// A decimal number.
pub(super) fn decimal<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    trim(text)?.parse().ok()
}

/// A hexadecimal number after `0x`, of 1 to 16 digits.
fn hex(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(b"0x")?;
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0, |value: u64, &byte| {
        let digit = (byte as char).to_digit(16)?;
        Some(value << 4 | u64::from(digit))
    })
}

/// A hexadecimal number after `0x`, with white space around it.
pub(super) fn hex_number(text: &[u8]) -> Option<u64> {
    hex(text.trim_ascii())
}

/// BARs and ROM from `resource`: one line of start, end and flags for each of the six BARs and the ROM. A line
/// that can't be is taken for an absent BAR.
pub(super) fn resource(text: &[u8]) -> (Vec<Bar>, Option<Rom>) {
    let mut bars = Vec::new();
    let mut rom = None;
    for (index, line) in text.split(|&byte| byte == b'\n').take(7).enumerate() {
        let mut words = line.split(|&byte| byte == b' ').map(hex);
        let (Some(Some(start)), Some(Some(end)), Some(Some(flags))) =
            (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if flags & (flag::IO | flag::MEMORY) == 0 {
            continue;
        }
        let Some(size) = end.checked_sub(start).and_then(|size| size.checked_add(1)) else { continue };
        if index == 6 {
            rom = Some(Rom { size });
            continue;
        }
        let kind = match flags {
            _ if flags & flag::IO != 0 => BarKind::Io,
            _ if flags & flag::MEMORY_64 != 0 => BarKind::Memory64,
            _ => BarKind::Memory32,
        };
        let address = if flags & flag::UNSET != 0 { 0 } else { start };
        let prefetchable = flags & flag::PREFETCH != 0;
        bars.push(Bar { index: index as u8, kind, prefetchable, address, size });
    }
    (bars, rom)
}

/// The sizes of a bridge's non-prefetchable and prefetchable windows from `resource`, 0 for one that is closed. The last four
/// lines of a bridge are its windows: port I/O, memory, prefetchable memory, and one that only CardBus has
/// (`PCI_BRIDGE_RESOURCES` in Linux `include/linux/pci.h`).
pub(super) fn windows(text: &[u8]) -> Option<[u64; 2]> {
    const LINES_BEFORE: usize = 7;
    let lines: Vec<_> = text.trim_ascii_end().split(|&byte| byte == b'\n').collect();
    let [_, memory, prefetchable, _] = *lines.get(LINES_BEFORE..)?.last_chunk()?;
    let size = |line: &[u8]| {
        let mut words = line.split(|&byte| byte == b' ').map(hex);
        let (start, end, flags) = (words.next()??, words.next()??, words.next()??);
        if flags & flag::MEMORY == 0 || flags & flag::UNSET != 0 {
            return Some(0);
        }
        end.checked_sub(start)?.checked_add(1)
    };
    Some([size(memory)?, size(prefetchable)?])
}

/// Class and IDs from `uevent`, which the Linux kernel keeps: reading it touches no hardware. The revision is not
/// in it.
pub(super) fn uevent(text: &[u8]) -> Option<(PciClass, PciIds)> {
    let text = std::str::from_utf8(text).ok()?;
    let mut class = None;
    let mut ids = None;
    let mut subsystem = (0, 0);
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        match key {
            "PCI_CLASS" => class = u32::from_str_radix(value, 16).ok().filter(|&class| class < 1 << 24),
            "PCI_ID" => ids = id_pair(value),
            "PCI_SUBSYS_ID" => subsystem = id_pair(value)?,
            _ => {}
        }
    }
    let (vendor, device) = ids?;
    let (subsystem_vendor, subsystem_device) = subsystem;
    Some((PciClass(class?), PciIds { vendor, device, subsystem_vendor, subsystem_device, revision: 0 }))
}

fn id_pair(text: &str) -> Option<(u16, u16)> {
    let (a, b) = text.split_once(':')?;
    Some((u16::from_str_radix(a, 16).ok()?, u16::from_str_radix(b, 16).ok()?))
}

/// A link speed, as in `16.0 GT/s PCIe`, in megatransfers per second; 0 for `Unknown`.
pub(super) fn link_speed(text: &[u8]) -> u32 {
    let Some(number) = trim(text).and_then(|text| text.split(' ').next()) else { return 0 };
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let (Ok(whole), Ok(tenths)) = (whole.parse::<u16>(), tenths.parse::<u8>()) else { return 0 };
    if tenths > 9 { 0 } else { u32::from(whole) * 1000 + u32::from(tenths) * 100 }
}

/// `power_state`.
pub(super) fn power_state(text: &[u8]) -> PowerState {
    trim(text).and_then(|text| text.parse().ok()).unwrap_or(PowerState::Unknown)
}

/// `reset_method`, in its order.
pub(super) fn resets(text: &[u8]) -> Vec<ResetMethod> {
    text.split(|byte| byte.is_ascii_whitespace())
        .filter_map(|word| std::str::from_utf8(word).ok()?.parse().ok())
        // There are seven, and no kernel names one twice.
        .take(7)
        .collect()
}

/// `driver_override`, which is `(null)` when there is none.
pub(super) fn driver_override(text: &[u8]) -> Option<String> {
    trim(text).filter(|text| !text.is_empty() && *text != "(null)").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_resource() {
        fn check(line: &str, expect: Option<(BarKind, bool, u64, u64)>) {
            let (bars, _) = resource(line.as_bytes());
            let found = bars.first().map(|bar| (bar.kind, bar.prefetchable, bar.address, bar.size));
            assert_eq!(found, expect, "{line}");
        }
        use BarKind::{Io, Memory32, Memory64};
        check(
            "0x00000000febf0000 0x00000000febf3fff 0x0000000000140204",
            Some((Memory64, false, 0xfebf_0000, 0x4000)),
        );
        check(
            "0x00000000e0000000 0x00000000e0ffffff 0x0000000000042208",
            Some((Memory32, true, 0xe000_0000, 0x100_0000)),
        );
        check("0x000000000000c000 0x000000000000c0ff 0x0000000000040101", Some((Io, false, 0xc000, 0x100)));
        check("0x0000000000000000 0x0000000000000fff 0x0000000020040200", Some((Memory32, false, 0, 0x1000)));
        check("0x0000000000000000 0x0000000000000000 0x0000000000000000", None);
        // What no kernel writes.
        check("0x2000 0x1000 0x200", None);
        check("0x0 0xffffffffffffffff 0x200", None);
        check("0x0 0x0fffffffffffffffff 0x200", None);
        check("0x0 0xfff", None);
        check("1000 2000 200", None);
        check("\0\0\0", None);
        check("", None);

        let text = format!("{}0x0 0x7ffff 0x46200\n", "0x0 0x0 0x0\n".repeat(6));
        assert_eq!(resource(text.as_bytes()), (vec![], Some(Rom { size: 0x80000 })));
        // The windows of a bridge are not BARs.
        let text = "0x0 0x0 0x0\n".repeat(7) + "0x1000 0x1fff 0x200\n";
        assert_eq!(resource(text.as_bytes()), (vec![], None));
    }

    #[test]
    fn reads_uevent() {
        fn check(text: &str, expect: Option<(u32, u16, u16, u16, u16)>) {
            let found = uevent(text.as_bytes()).map(|(class, ids)| {
                (class.0, ids.vendor, ids.device, ids.subsystem_vendor, ids.subsystem_device)
            });
            assert_eq!(found, expect, "{text}");
        }
        check(
            "DRIVER=nvme\nPCI_CLASS=10802\nPCI_ID=144D:A80A\nPCI_SUBSYS_ID=144D:A801\n",
            Some((0x1_0802, 0x144d, 0xa80a, 0x144d, 0xa801)),
        );
        check("PCI_CLASS=60400\nPCI_ID=8086:3420\n", Some((0x6_0400, 0x8086, 0x3420, 0, 0)));
        check("PCI_CLASS=60400\n", None);
        check("PCI_CLASS=1000000\nPCI_ID=8086:3420\n", None);
        check("PCI_CLASS=60400\nPCI_ID=18086:3420\n", None);
        check("PCI_CLASS=60400\nPCI_ID=8086:3420\nPCI_SUBSYS_ID=x\n", None);
        check("", None);
        assert!(uevent(b"PCI_ID=\xff").is_none());
    }

    #[test]
    fn reads_link_speed() {
        for (text, expect) in [
            ("16.0 GT/s PCIe\n", 16_000),
            ("2.5 GT/s PCIe\n", 2_500),
            ("8 GT/s\n", 8_000),
            ("Unknown\n", 0),
            ("", 0),
            ("99999999.0 GT/s", 0),
            ("1.99 GT/s", 0),
        ] {
            assert_eq!(link_speed(text.as_bytes()), expect, "{text}");
        }
    }

    #[test]
    fn reads_resets() {
        use ResetMethod::{Bus, Flr};
        assert_eq!(resets(b"flr bus\n"), [Flr, Bus]);
        assert_eq!(resets(b"\n"), []);
        assert_eq!(resets(b"magic bus\xff bus"), [Bus]);
        assert_eq!(resets(&b"bus ".repeat(100)).len(), 7);
    }
}
