//! Whether the guest's RAM can be locked and mapped for DMA, and the BARs placed beside it.

use super::facts::Memlock;
use super::{BlockerCode, Case};
use crate::iommu;
use crate::pci::BarKind;
use crate::vfio::IovaRange;

pub(super) fn judge(case: &mut Case<'_>) {
    memlock(case);
    reserved(case);
    width(case);
    bars(case);
}

fn memlock(case: &mut Case<'_>) {
    let Some(Memlock { limit: Some(limit), locked }) = case.facts.memlock else { return };
    if case.facts.credentials.locks_freely() {
        return;
    }
    let needed = case.options.memory().saturating_add(locked);
    if limit >= needed {
        return;
    }
    let proc = case.host.proc.display();
    let per_user = if case.host.dev.join("iommu").exists() {
        "; iommufd counts all processes of the user together"
    } else {
        ""
    };
    case.blocker(
        BlockerCode::MemlockTooLow,
        format!(
            "the guest needs {} locked ({} locked already), {proc}/self/limits allows {}{per_user}",
            size_text(needed),
            size_text(locked),
            size_text(limit)
        ),
        format!(
            "raise it in the calling shell: ulimit -l {}; for good: \"* - memlock {0}\" in /etc/security/limits.conf, \
             or LimitMEMLOCK=infinity in the systemd unit; or give the program CAP_IPC_LOCK",
            needed.div_ceil(1024)
        ),
    );
}

fn overlap(a: &IovaRange, b: &IovaRange) -> bool {
    a.start() <= b.end() && b.start() <= a.end()
}

fn reserved(case: &mut Case<'_>) {
    let Some(group) = &case.group else { return };
    let path = case.host.sys.join(format!("kernel/iommu_groups/{}/reserved_regions", group.number));
    let mut hits = Vec::new();
    for region in group.reserved.iter().filter(|region| region.kind.excludes_ram()) {
        for ram in case.options.ram.iter().filter(|ram| overlap(ram, &region.range)) {
            hits.push(format!(
                "{:#x}-{:#x} ({}) lies in the guest's RAM {:#x}-{:#x}",
                region.range.start(),
                region.range.end(),
                region.kind,
                ram.start(),
                ram.end()
            ));
        }
    }
    if hits.is_empty() {
        return;
    }
    let first = group
        .reserved
        .iter()
        .filter(|region| region.kind.excludes_ram())
        .filter(|region| case.options.ram.iter().any(|ram| overlap(ram, &region.range)))
        .map(|region| *region.range.start())
        .min()
        .unwrap_or_default();
    case.blocker(
        BlockerCode::IovaReserved,
        format!("{} says that {}", path.display(), hits.join("; ")),
        format!(
            "give the guest less memory, so that it ends below {}, or lay its RAM around the range",
            size_text(first)
        ),
    );
}

fn width(case: &mut Case<'_>) {
    if case.group.is_none() {
        return;
    }
    let Some(bits) = iommu::address_width(case.host, case.function.address) else { return };
    let Some(end) = case.options.ram.iter().map(|ram| *ram.end()).max() else { return };
    if bits >= 64 || end >> bits == 0 {
        return;
    }
    case.blocker(
        BlockerCode::IovaTooWide,
        format!(
            "the guest's RAM ends at {end:#x}, its IOMMU translates {bits} bits (capability registers in \
             {}/class/iommu)",
            case.host.sys.display()
        ),
        format!("give the guest less memory: it must end below {}", size_text(1 << bits)),
    );
}

fn bars(case: &mut Case<'_>) {
    let taken = case.taken();
    let all =
        || taken.iter().flat_map(|function| function.bars.iter().map(move |bar| (function.address, bar)));
    let sizes = |kind: BarKind| -> Vec<u64> {
        all().filter(|(_, bar)| bar.kind == kind).map(|(_, bar)| bar.size).collect()
    };
    let largest = |kind: BarKind| {
        let found = all().filter(|(_, bar)| bar.kind == kind).max_by_key(|(_, bar)| bar.size);
        found.map_or_else(String::new, |(address, bar)| {
            format!("the largest, BAR {} of {address}, has {}", bar.index, size_text(bar.size))
        })
    };
    let mmio32 = &case.options.mmio32;
    if !fits(sizes(BarKind::Memory32), *mmio32.start(), *mmio32.end()) {
        let evidence = format!(
            "its 32-bit BARs don't fit between {:#x} and {:#x}; {}",
            mmio32.start(),
            mmio32.end(),
            largest(BarKind::Memory32)
        );
        let remedy =
            "give the guest a larger window below 4 GiB, or pass fewer functions together".to_owned();
        case.blocker(BlockerCode::BarsTooLarge, evidence, remedy);
    }

    let Some(bits) = case.options.physical_address_bits.or(case.facts.physical_bits) else { return };
    let ram_end = case.options.ram.iter().map(|ram| ram.end().saturating_add(1)).max().unwrap_or(0);
    let start = ram_end.max(4 << 30);
    let wide = sizes(BarKind::Memory64);
    let fits_in = |bits: u8| match 1u64.checked_shl(u32::from(bits)) {
        Some(end) => start < end && fits(wide.clone(), start, end - 1),
        None => fits(wide.clone(), start, u64::MAX),
    };
    if wide.is_empty() || fits_in(bits) {
        return;
    }
    let source = match case.options.physical_address_bits {
        Some(_) => "the guest's CPU has".to_owned(),
        None => format!("\"address sizes\" in {}/cpuinfo gives", case.host.proc.display()),
    };
    let evidence = format!(
        "its 64-bit BARs don't fit above the guest's RAM (from {start:#x} on): {source} {bits} address bits; {}",
        largest(BarKind::Memory64)
    );
    let remedy = match (bits..=64).find(|&bits| fits_in(bits)) {
        Some(needed) => format!(
            "give the guest {needed} address bits (phys-bits={needed}) on a CPU that has them, less memory, or make \
             the BAR smaller by its resourceN_resize in sysfs"
        ),
        None => "its BAR sizes in sysfs can't be; find it anew with a PCI rescan, or replace it".to_owned(),
    };
    case.blocker(BlockerCode::BarsTooLarge, evidence, remedy);
}

/// Whether blocks of these sizes, each aligned to its size, fit into `start..=end`. They are laid from the top down,
/// the largest first, which leaves no gaps below a top that is aligned to all of them.
fn fits(mut sizes: Vec<u64>, start: u64, end: u64) -> bool {
    sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
    let mut free = u128::from(end) + 1;
    for size in sizes.into_iter().filter(|&size| size > 0).map(u128::from) {
        let Some(at) = free.checked_sub(size).map(|at| at - at % size) else { return false };
        if at < u128::from(start) {
            return false;
        }
        free = at;
    }
    true
}

/// A size as people say it: `16 GiB`, or in bytes when it is no whole number of KiB.
pub(super) fn size_text(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        let count = bytes >> shift;
        if (1..10_000).contains(&count) && bytes.trailing_zeros() >= shift {
            return format!("{count} {unit}");
        }
    }
    // A size that no unit divides is given to a tenth of the largest that fits.
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >> shift >= 10 {
            return format!("{}.{} {unit}", bytes >> shift, (bytes >> (shift - 10) & 1023) * 10 / 1024);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitting() {
        fn check(sizes: &[u64], start: u64, end: u64, expect: bool) {
            assert_eq!(fits(sizes.to_vec(), start, end), expect, "{sizes:x?} in {start:#x}..={end:#x}");
        }
        check(&[], 0, 0, true);
        check(&[0x1000], 0x1000, 0x1fff, true);
        check(&[0x1000], 0x1000, 0x1ffe, false);
        // Alignment costs.
        check(&[0x2000], 0x1000, 0x2fff, false);
        // But what is below a large block is not lost.
        check(&[64 << 40, 0x4000], 4 << 30, (1 << 47) - 1, true);
        check(&[0x1000, 0x2000, 0x1000], 0x2000, 0x5fff, true);
        check(&[1 << 63], 4 << 30, u64::MAX, true);
        check(&[1 << 63, 1], 4 << 30, u64::MAX, true);
        check(&[1 << 63, 1 << 63], 0, u64::MAX, true);
        check(&[u64::MAX, 3], 4 << 30, u64::MAX, false);
        check(&[0, 0], 0, 0xfff, true);
    }

    #[test]
    fn sizes_read_well() {
        for (bytes, expect) in [
            (0, "0 bytes"),
            (1 << 30, "1 GiB"),
            (16 << 20, "16 MiB"),
            ((1 << 30) + 4096, "1024.0 MiB"),
            (10 << 40, "10 TiB"),
            (65_536_000, "62.5 MiB"),
            (100, "100 bytes"),
        ] {
            assert_eq!(size_text(bytes), expect);
        }
    }
}
