//! CPUID: what the host's KVM can do, made consistent for a guest with a core for each vCPU, and a package for each NUMA node.
//!
//! Sources: Intel SDM volume 2, "CPUID"; AMD APM volume 3, appendix E;
//! Documentation/virt/kvm/x86/cpuid.rst.

use std::ops::Range;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::vmm::error::MachineError;
use crate::vmm::numa::VcpuPlace;

const LEAF1_ECX_X2APIC: u32 = 1 << 21;
const LEAF1_ECX_TSC_DEADLINE: u32 = 1 << 24;
const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
const LEAF1_EDX_HTT: u32 = 1 << 28;
const DEFAULT_PHYS_BITS: u8 = 36;

/// What the host's KVM can give to any vCPU.
///
/// # Errors
/// When KVM refuses.
pub(in crate::vmm) fn supported(kvm: &Kvm) -> Result<CpuId, MachineError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(MachineError::kvm("KVM_GET_SUPPORTED_CPUID"))
}

fn leaf(supported: &CpuId, function: u32) -> Option<&kvm_cpuid_entry2> {
    supported.as_slice().iter().find(|entry| entry.function == function)
}

/// Number of guest-physical address bits. Where KVM translates fewer than the processor has, as with 4 levels of page tables
/// on one that has 52, it says so in bits 23:16 (`GuestPhysBits`, Linux 6.10).
pub(in crate::vmm) fn phys_bits(supported: &CpuId) -> u8 {
    let width = |bits: u32| Some(bits as u8).filter(|&bits| bits >= 32);
    let eax = leaf(supported, 0x8000_0008).map_or(0, |entry| entry.eax);
    match (width(eax & 0xff), width(eax >> 16 & 0xff)) {
        (Some(bits), Some(translated)) => bits.min(translated),
        (Some(bits), None) => bits,
        (None, _) => DEFAULT_PHYS_BITS,
    }
}

/// Guest-physical addresses that AMD's and Hygon's processors keep to themselves, for HyperTransport: 12 GiB below the end of
/// what their address bits reach; before family 17h, below 1 TiB. Those with less than 40 bits hide them (BIOS and
/// Kernel Developer's Guides, "Memory Map"; Linux `vm_compute_max_gfn` in the tests of KVM).
pub(in crate::vmm) fn reserved(supported: &CpuId) -> Range<u64> {
    const SIZE: u64 = 12 << 30;
    let vendor = leaf(supported, 0).map(|entry| [entry.ebx, entry.edx, entry.ecx].map(u32::to_le_bytes));
    let is_amd =
        vendor.is_some_and(|name| [&b"AuthenticAMD"[..], b"HygonGenuine"].contains(&name.as_flattened()));
    let bits = leaf(supported, 0x8000_0008).map_or(0, |entry| entry.eax as u8);
    if !is_amd || !(40..=52).contains(&bits) {
        return 0..0;
    }
    let version = leaf(supported, 1).map_or(0, |entry| entry.eax);
    let family = match version >> 8 & 0xf {
        0xf => 0xf + (version >> 20 & 0xff),
        family => family,
    };
    let end = if family < 0x17 { 1 << 40 } else { 1 << bits };
    end - SIZE..end
}

/// CPUID of a vCPU.
///
/// # Errors
/// When there are more leaves than KVM takes.
pub(in crate::vmm) fn for_vcpu(
    supported: &CpuId,
    place: VcpuPlace,
    tsc_deadline: bool,
) -> Result<CpuId, MachineError> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported
        .as_slice()
        .iter()
        // These are rebuilt below, as many subleaves as the topology has.
        .filter(|entry| !matches!(entry.function, 0xb | 0x1f))
        .copied()
        .collect();
    let basic =
        supported.as_slice().iter().map(|entry| entry.function).filter(|&function| function < 0x4000_0000);
    let highest = basic.max().unwrap_or(0);
    for entry in &mut entries {
        adapt(entry, place, tsc_deadline);
    }
    if highest >= 0xb {
        topology(&mut entries, 0xb, place);
    }
    if highest >= 0x1f {
        topology(&mut entries, 0x1f, place);
    }
    CpuId::from_entries(&entries).map_err(|_| MachineError::KvmLacks { what: "room for the guest's CPUID" })
}

fn adapt(entry: &mut kvm_cpuid_entry2, place: VcpuPlace, tsc_deadline: bool) {
    let (apic_id, cores, bits) = (u32::from(place.apic_id), u32::from(place.cores), place.bits);
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0xffff | cores << 16 | apic_id << 24;
            entry.ecx |= LEAF1_ECX_HYPERVISOR | LEAF1_ECX_X2APIC;
            if tsc_deadline {
                entry.ecx |= LEAF1_ECX_TSC_DEADLINE;
            } else {
                entry.ecx &= !LEAF1_ECX_TSC_DEADLINE;
            }
            if cores > 1 {
                entry.edx |= LEAF1_EDX_HTT;
            } else {
                entry.edx &= !LEAF1_EDX_HTT;
            }
        }
        // Intel's caches: the first two levels belong to a core, the third to the package.
        4 if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & 0x3fff | ((1 << bits) - 1) << 26 | sharing(entry.eax, bits) << 14;
        }
        // Power and thermal management: only the APIC timer that always runs.
        6 => {
            entry.eax &= 1 << 2;
            entry.ebx = 0;
            entry.ecx = 0;
            entry.edx = 0;
        }
        0x8000_0008 => entry.ecx = bits << 12 | (cores - 1),
        // AMD's caches, likewise.
        0x8000_001d if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & 0x3fff | sharing(entry.eax, bits) << 14;
        }
        0x8000_001e => {
            entry.eax = apic_id;
            entry.ebx = place.core.into();
            entry.ecx = place.node.into();
        }
        _ => {}
    }
}

/// How many APIC ids share a cache of the level in bits 7:5, less one.
fn sharing(eax: u32, bits: u32) -> u32 {
    if eax >> 5 & 7 >= 3 { (1 << bits) - 1 } else { 0 }
}

/// Leaf 0xb or 0x1f: threads in a core (one), cores in the package.
fn topology(entries: &mut Vec<kvm_cpuid_entry2>, function: u32, place: VcpuPlace) {
    const SIGNIFICANT_INDEX: u32 = 1;
    for (subleaf, (shift, count, kind)) in
        [(0, 1, 1), (place.bits, u32::from(place.cores), 2), (0, 0, 0)].into_iter().enumerate()
    {
        entries.push(kvm_cpuid_entry2 {
            function,
            index: subleaf as u32,
            flags: SIGNIFICANT_INDEX,
            eax: shift,
            ebx: count,
            ecx: kind << 8 | subleaf as u32,
            edx: place.apic_id.into(),
            ..kvm_cpuid_entry2::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::numa::GuestNuma;

    fn leaf(function: u32, index: u32, eax: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ..kvm_cpuid_entry2::default() }
    }

    #[test]
    fn each_vcpu_is_a_core_of_its_own() {
        let host =
            CpuId::from_entries(&[leaf(0, 0, 0x1f), leaf(1, 0, 0), leaf(4, 3, 3 << 5 | 3), leaf(0x1f, 0, 7)])
                .unwrap();
        for (index, vcpus, bits) in [(0u8, 1, 0), (1, 2, 1), (2, 3, 2), (254, 255, 8)] {
            let places = GuestNuma::default().vcpus(vcpus).unwrap();
            let cpuid = for_vcpu(&host, places[usize::from(index)], true).unwrap();
            let find = |function, subleaf| {
                *cpuid.as_slice().iter().find(|e| e.function == function && e.index == subleaf).unwrap()
            };
            assert_eq!(find(1, 0).ebx >> 24, u32::from(index));
            assert_eq!(find(1, 0).edx & LEAF1_EDX_HTT != 0, vcpus > 1);
            assert_ne!(find(1, 0).ecx & LEAF1_ECX_TSC_DEADLINE, 0);
            assert_eq!(find(4, 3).eax >> 14 & 0xfff, (1 << bits) - 1);
            for function in [0xb, 0x1f] {
                assert_eq!(find(function, 0).ebx, 1);
                assert_eq!((find(function, 1).eax, find(function, 1).ebx), (bits, u32::from(vcpus)));
                assert_eq!(find(function, 1).edx, u32::from(index));
                assert_eq!(find(function, 2).ecx >> 8, 0);
            }
        }
    }

    #[test]
    fn address_width_is_never_below_32() {
        for (entries, expect) in [
            (vec![leaf(0x8000_0008, 0, 0x3028)], 40),
            (vec![leaf(0x8000_0008, 0, 0x30_3934)], 48),
            (vec![leaf(0x8000_0008, 0, 0x34_392e)], 46),
            (vec![leaf(0x8000_0008, 0, 0)], DEFAULT_PHYS_BITS),
            (vec![leaf(0, 0, 1)], DEFAULT_PHYS_BITS),
        ] {
            assert_eq!(phys_bits(&CpuId::from_entries(&entries).unwrap()), expect);
        }
    }

    #[test]
    fn hyper_transport_has_addresses_of_its_own() {
        fn check(vendor: &[u8; 12], version: u32, bits: u32, expect: Range<u64>) {
            let word =
                |at: usize| u32::from_le_bytes([vendor[at], vendor[at + 1], vendor[at + 2], vendor[at + 3]]);
            let name = kvm_cpuid_entry2 { ebx: word(0), edx: word(4), ecx: word(8), ..leaf(0, 0, 1) };
            let entries = [name, leaf(1, 0, version), leaf(0x8000_0008, 0, bits)];
            assert_eq!(reserved(&CpuId::from_entries(&entries).unwrap()), expect, "{version:#x} {bits}");
        }
        const GIB: u64 = 1 << 30;
        let (zen, bulldozer) = (0x80_0f12, 0x60_0f12);
        check(b"AuthenticAMD", zen, 0x3030, (1 << 48) - 12 * GIB..1 << 48);
        check(b"HygonGenuine", 0x90_0f00, 43, (1 << 43) - 12 * GIB..1 << 43);
        check(b"AuthenticAMD", bulldozer, 48, 1012 * GIB..1024 * GIB);
        check(b"AuthenticAMD", zen, 39, 0..0);
        check(b"AuthenticAMD", zen, 255, 0..0);
        check(b"GenuineIntel", 0xa_0671, 46, 0..0);
    }
}
