//! Whether the guest's RAM can be had, locked and mapped for DMA.

use super::facts::Memlock;
use super::{BlockerCode, Case, RamPages, Severity, VmmProcess, huge_pages};
use crate::iommu::{self, IovaRange, ReservedKind};

pub(super) fn judge(case: &mut Case<'_>) {
    match case.options.pages {
        RamPages::Any => host_memory(case),
        // They are no part of what is available, nor in the limit of a cgroup.
        RamPages::Huge(_) | RamPages::HugeReserved => huge_pages::judge(case),
    }
    memlock(case);
    reserved(case);
    width(case);
}

/// All of it is pinned while the guest runs, so that no swap helps.
fn host_memory(case: &mut Case<'_>) {
    if case.options.ram_is_assumed || case.options.ram_is_pinned {
        return;
    }
    let needed = case.options.memory();
    let (total, available) = (case.facts.total_memory, case.facts.available_memory);
    if let Some((limit, file)) = case.facts.memory_limit.as_ref().filter(|(limit, _)| needed > *limit) {
        let evidence = format!(
            "the guest's {} of RAM stay pinned for the device; {} allows {}",
            size_text(needed),
            file.display(),
            size_text(*limit)
        );
        let remedy = "give the guest less memory, or its cgroup more (MemoryMax= in the systemd unit)";
        case.add(BlockerCode::HostMemoryTooLow, Severity::Blocker, case.function.address, evidence, remedy);
    }
    let (severity, limit, remedy) = match (total, available) {
        (Some(total), _) if needed > total => (Severity::Blocker, total, "give the guest less memory"),
        (_, Some(available)) if needed > available => (
            Severity::Warning,
            available,
            "give the guest less memory, end what uses it, or set the guest's RAM aside as huge pages (hugepages in the guest \
                 file), which are also pinned faster",
        ),
        _ => return,
    };
    let which = if severity == Severity::Blocker { "in all" } else { "available now" };
    case.add(
        BlockerCode::HostMemoryTooLow,
        severity,
        case.function.address,
        format!(
            "the guest's {} of RAM stay pinned for the device; {}/meminfo gives {} {which}",
            size_text(needed),
            case.host.proc.display(),
            size_text(limit)
        ),
        remedy,
    );
}

fn memlock(case: &mut Case<'_>) {
    if case.options.vmm.is_some() {
        return vmm_memlock(case);
    }
    let Some(Memlock { limit: Some(limit), locked }) = case.facts.memlock else { return };
    if case.facts.credentials.locks_freely() || case.options.ram_is_pinned {
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
             or LimitMEMLOCK=infinity in the systemd unit; or give the program CAP_IPC_LOCK, and CAP_SYS_RESOURCE where the \
             guest's process is another user",
            needed.div_ceil(1024)
        ),
    );
}

/// Judges the limit of a running guest's VMM, which is another user than this process and may have fewer rights.
fn vmm_memlock(case: &mut Case<'_>) {
    let Some(VmmProcess { pid, memlock: Some(limit) }) = case.options.vmm else { return };
    let needed = case.options.memory();
    if limit >= needed || case.options.ram_is_pinned {
        return;
    }
    case.blocker(
        BlockerCode::MemlockTooLow,
        format!(
            "the guest needs {} locked, and its VMM, process {pid}, may lock {}: it has a user of its own, without the rights of the \
             process that started it",
            size_text(needed),
            size_text(limit)
        ),
        "start the guest again with a higher hard limit (LimitMEMLOCK=infinity in the systemd unit, --ulimit memlock=-1 of a \
         container) or with CAP_SYS_RESOURCE, which raises it",
    );
}

fn overlap(a: &IovaRange, b: &IovaRange) -> bool {
    a.start() <= b.end() && b.start() <= a.end()
}

fn reserved(case: &mut Case<'_>) {
    let Some(group) = &case.group else { return };
    let path = case.host.sys.join(format!("kernel/iommu_groups/{}/reserved_regions", group.number));
    let mut hits = Vec::new();
    // Linux refuses a group with a direct region wherever the RAM is: `firmware-memory` reports it.
    let excludes_ram = |kind: ReservedKind| kind.excludes_ram() && kind != ReservedKind::Direct;
    for region in group.reserved.iter().filter(|region| excludes_ram(region.kind)) {
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
        .filter(|region| excludes_ram(region.kind))
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

/// A size as people say it: `16 GiB`, or in bytes when it is no whole number of KiB.
pub(crate) fn size_text(bytes: u64) -> String {
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
