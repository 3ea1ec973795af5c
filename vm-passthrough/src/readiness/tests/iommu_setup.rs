//! Hosts without an IOMMU: the cause is read from the kernel command line and the ACPI tables.

use super::*;
use crate::readiness::acpi::{Dmar, Iort, Ivrs, RootComplex};

const FIRMWARE: &str = "firmware setup needs no change";

/// The fix on a host with this `cpuinfo`, ACPI table and kernel command line; `nots` are not in it.
fn check(cpuinfo: &str, table: Option<&str>, cmdline: &str, evidence: &[&str], fix: &[&str], nots: &[&str]) {
    let scene = Scene::with(Scene::disk().no_group())
        .delete("sys/class/iommu")
        .delete("sys/kernel/iommu_groups")
        .write("proc/interrupts", "0: 1 IO-APIC timer\n")
        .write("proc/cpuinfo", cpuinfo)
        .write("proc/cmdline", &format!("BOOT_IMAGE=/vmlinuz root=/dev/sda1 {cmdline}\n"));
    if let Some(table) = table {
        scene.sim.write(&format!("sys/firmware/acpi/tables/{table}"), table).unwrap();
    }
    scene.check(Code::NoIommu, Blocks, evidence, fix);
    let found = &scene.explain().blockers[0].remedy;
    assert!(!nots.iter().any(|part| found.contains(part)), "{cmdline}: {found}");
}

#[test]
fn each_misconfigured_boot_gets_its_own_fix() {
    let intel = |table, cmdline, fix: &[&str], nots: &[&str]| {
        let evidence: &[&str] =
            if cmdline == "quiet" { &["has no IOMMU option"] } else { &["cmdline has", cmdline] };
        check("vendor_id : GenuineIntel\n", table, cmdline, evidence, fix, nots);
    };
    let (dmar, enable) = (Some("DMAR"), "enable VT-d");
    intel(dmar, "iommu=pt", &["boot Linux with intel_iommu=on", "iommu=pt alone", FIRMWARE], &[enable]);
    intel(dmar, "quiet", &["boot Linux with intel_iommu=on", FIRMWARE], &[enable]);
    intel(
        dmar,
        "intel-iommu=on,iommu=pt",
        &["write intel_iommu=on iommu=pt with a space", FIRMWARE],
        &[enable],
    );
    intel(None, "intel_iommu=on iommu=pt", &[enable], &["boot Linux with", "remove", "replace", FIRMWARE]);
    intel(None, "iommu=pt", &[enable, "boot Linux with intel_iommu=on"], &[FIRMWARE]);
    intel(dmar, "amd_iommu=on iommu=pt", &["replace amd_iommu=on by intel_iommu=on"], &[enable]);
    intel(dmar, "intel_iommu=on iommu=off", &["remove iommu=off"], &[enable, "boot Linux with"]);
    intel(dmar, "intel_iommu=off", &["replace intel_iommu=off by intel_iommu=on"], &[enable]);
    intel(dmar, "intel_iommu=1", &["replace intel_iommu=1", "no such value"], &[enable]);
    intel(dmar, "inteliommu=on", &["replace inteliommu=on", "no option inteliommu"], &[enable]);
    intel(dmar, "intel-iommu=on", &["DMAR: in dmesg", "CONFIG_INTEL_IOMMU"], &["replace", enable]);
    intel(
        dmar,
        "intel_iommu=off intel_iommu=on vfio_iommu_type1.x=1",
        &["replace intel_iommu=off"],
        &[enable],
    );

    let amd = |table, cmdline, fix: &[&str], nots: &[&str]| {
        check("vendor_id : AuthenticAMD\n", table, cmdline, &[], fix, nots);
    };
    let (ivrs, enable) = (Some("IVRS"), "AMD-Vi) in the firmware");
    amd(ivrs, "amd_iommu=off iommu=pt", &["remove amd_iommu=off", FIRMWARE], &[enable, "intel"]);
    amd(ivrs, "amd_iommu=on", &["AMD-Vi: in dmesg"], &[enable, "intel"]);
    amd(ivrs, "intel_iommu=on", &["remove intel_iommu=on"], &[enable]);
    amd(None, "iommu=pt", &[enable], &["intel", FIRMWARE]);
}

#[test]
fn arm_hosts_get_no_advice_for_x86() {
    let arm = |table, cmdline, fix: &[&str]| {
        let x86 = ["VT-d", "AMD-Vi", "boot Linux with", "intremap", "amd64"];
        check("CPU implementer : 0x41\nCPU part : 0xd0c\n", table, cmdline, &[], fix, &x86);
    };
    arm(None, "quiet", &["enable the SMMU", "CONFIG_ARM_SMMU_V3"]);
    arm(Some("IORT"), "iommu.passthrough=1", &["smmu in dmesg"]);
    arm(Some("IORT"), "intel_iommu=on", &["remove intel_iommu=on", "only x86"]);
    let scene = Scene::new()
        .write("proc/cpuinfo", "CPU implementer : 0x41\nCPU part : 0xd0c\n")
        .write("proc/interrupts", " 24: 0 PCI-MSI 524288 Edge nvme\n");
    scene.check(Code::InterruptRemappingOff, Blocks, &[], &["GICv3 with ITS"]);
    assert!(!scene.explain().blockers[0].remedy.contains("intremap"));
    let unloaded =
        Scene::new().delete("sys/bus/pci/drivers/vfio-pci").write("proc/cpuinfo", "CPU implementer : 0x41\n");
    unloaded.check(Code::VfioPciUnavailable, Blocks, &[], &["linux-image-arm64"]);
}

/// A table of this name; `body` follows the header of 36 bytes.
fn table(name: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 36];
    bytes[..4].copy_from_slice(name.as_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// A DMAR with these flags.
fn dmar(flags: u8) -> Vec<u8> {
    table("DMAR", &[0x26, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
}

/// An IVRS with one IOMMU of type 11h, or none, that has these device entries.
fn ivrs(info: u8, unit: Option<&[u8]>) -> Vec<u8> {
    let mut body = vec![info, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    if let Some(entries) = unit {
        body.extend([0x11, 0, 40 + entries.len() as u8, 0]);
        body.extend([0; 36]);
        body.extend_from_slice(entries);
    }
    table("IVRS", &body)
}

/// All devices from 0 on, then the I/O APIC 9 at 00:14.0, then an HPET.
const ALL: [u8; 4] = [1, 0, 0, 0];
const IO_APIC: [u8; 8] = [72, 0, 0, 0xd7, 9, 0xa0, 0, 1];
const HPET: [u8; 8] = [72, 0, 0, 0, 0, 0xa0, 0, 2];

/// An IORT with an ITS, an SMMU of this type, if any, and a root complex of a segment that maps to the first or the second.
fn iort(smmu: Option<u8>, segment: u8, ats: u8, maps_to_smmu: bool) -> Vec<u8> {
    let node = |kind: u8, len: u8| {
        let mut node = vec![0; usize::from(len)];
        (node[0], node[1]) = (kind, len);
        node
    };
    let its = node(0, 24);
    let smmu = smmu.map(|kind| node(kind, 68));
    let its_at = 48;
    let smmu_at = its_at + its.len();
    let mut root = node(2, 40 + 20);
    (root[8], root[12], root[24], root[28]) = (1, 40, ats, segment);
    root[40 + 12] = if maps_to_smmu { smmu_at } else { its_at } as u8;
    let count = 2 + u8::from(smmu.is_some());
    let mut body = vec![count, 0, 0, 0, 48, 0, 0, 0, 0, 0, 0, 0];
    for node in [its].into_iter().chain(smmu).chain([root]) {
        body.extend(node);
    }
    table("IORT", &body)
}

const INTEL: &str = "vendor_id : GenuineIntel\n";
const AMD: &str = "vendor_id : AuthenticAMD\n";
const ARM: &str = "CPU implementer : 0x41\nCPU part : 0xd0c\n";

/// What explains the first blocker, on a host with this processor, table and kernel command line.
fn answer(scene: Scene, cpuinfo: &str, table: &[u8], cmdline: &str) -> (String, String) {
    let name = std::str::from_utf8(&table[..4]).unwrap();
    let scene =
        scene.write("proc/cpuinfo", cpuinfo).write("proc/cmdline", &format!("root=/dev/sda1 {cmdline}\n"));
    let path = scene.sim.path(&format!("sys/firmware/acpi/tables/{name}"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, table).unwrap();
    let blocker = scene.explain().blockers.remove(0);
    (blocker.evidence, blocker.remedy)
}

/// Without an IOMMU.
fn without() -> Scene {
    Scene::with(Scene::disk().no_group())
        .delete("sys/class/iommu")
        .delete("sys/kernel/iommu_groups")
        .write("proc/interrupts", "0: 1 IO-APIC timer\n")
}

/// With an IOMMU that does not remap interrupts.
fn unremapped() -> Scene {
    Scene::new().write("proc/interrupts", "  0:  42  IO-APIC  2-edge  timer\n")
}

#[track_caller]
fn has(found: &(String, String), evidence: &[&str], fix: &[&str], nots: &[&str]) {
    for part in evidence {
        assert!(found.0.contains(part), "no `{part}` in {}", found.0);
    }
    for part in fix {
        assert!(found.1.contains(part), "no `{part}` in {}", found.1);
    }
    for part in nots {
        assert!(!found.1.contains(part), "`{part}` in {}", found.1);
    }
}

#[test]
fn flags_of_the_dmar_are_read() {
    let found = answer(without(), INTEL, &dmar(5), "quiet");
    has(&found, &["DMAR, flags: INTR_REMAP, DMA_CTRL_PLATFORM_OPT_IN)"], &["intel_iommu=on", FIRMWARE], &[]);
    let remap = |flags, cmdline| answer(unremapped(), INTEL, &dmar(flags), cmdline);
    let enable = "enable VT-d interrupt remapping";
    has(
        &remap(0, "quiet"),
        &["flags of", "DMAR: none"],
        &[enable, "update the firmware"],
        &["remove", FIRMWARE],
    );
    has(
        &remap(0, "intremap=off"),
        &["cmdline has intremap=off"],
        &["remove intremap=off", enable],
        &[FIRMWARE],
    );
    has(&remap(1, "intremap=off"), &["INTR_REMAP"], &["remove intremap=off", FIRMWARE], &[enable]);
    has(&remap(1, "intremap=nosid,off"), &[], &["remove intremap=nosid,off", FIRMWARE], &[enable]);
    has(&remap(1, "nointremap"), &[], &["remove nointremap", FIRMWARE], &[enable]);
    has(&remap(1, "intremap=nosid"), &[], &["DMAR-IR: in dmesg"], &["remove", enable]);
    has(&remap(3, "quiet"), &["X2APIC_OPT_OUT leaves remapping on"], &["DMAR-IR: in dmesg"], &[enable]);
}

#[test]
fn options_that_do_not_enable_the_iommu_stay_beside_one_that_does() {
    let found = |cmdline| answer(without(), INTEL, &dmar(1), cmdline);
    has(&found("intel_iommu=sm_off"), &[], &["boot Linux with intel_iommu=on,sm_off"], &["no such value"]);
    has(&found("intel_iommu=strict,sm_on"), &[], &["intel_iommu=on,strict,sm_on"], &["no such value"]);
    has(&found("intel_iommu=on,sm_off"), &[], &["DMAR: in dmesg"], &["boot Linux", "no such value"]);
}

#[test]
fn entries_of_the_ivrs_are_read() {
    let whole = [&ALL[..], &IO_APIC, &HPET].concat();
    let found = answer(without(), AMD, &ivrs(0, Some(&whole)), "quiet");
    has(&found, &["the firmware has AMD-Vi on"], &["AMD-Vi: in dmesg", FIRMWARE], &[]);
    let found = answer(without(), AMD, &ivrs(0, None), "quiet");
    has(&found, &["IVRS describes no IOMMU"], &["AMD-Vi) in the firmware setup"], &[FIRMWARE]);
    let remap = |unit: Option<&[u8]>, cmdline| answer(unremapped(), AMD, &ivrs(0, unit), cmdline);
    let without_io_apic = [&ALL[..], &HPET].concat();
    let found = remap(Some(&without_io_apic), "quiet");
    has(&found, &["IVRS names no I/O APIC"], &["update the firmware", "ivrs_ioapic["], &["VT-d", "intremap"]);
    has(&remap(Some(&whole), "intremap=off"), &["has intremap=off"], &["remove intremap=off", FIRMWARE], &[]);
    has(&remap(Some(&whole), "quiet"), &[], &["AMD-Vi: in dmesg"], &["intremap", "ivrs_ioapic"]);
    has(&remap(None, "quiet"), &[], &["enable interrupt remapping in the firmware setup"], &["VT-d"]);
}

#[test]
fn nodes_of_the_iort_are_read() {
    let x86 = ["VT-d", "AMD-Vi", "intremap", "intel_iommu", "IRQ_REMAP"];
    let found = |table: &[u8]| {
        let found = answer(without(), ARM, table, "quiet");
        has(&found, &[], &[], &x86);
        found
    };
    let v3 = found(&iort(Some(4), 0, 1, true));
    has(
        &v3,
        &["connects PCI segment 0000 to an SMMUv3", "supports ATS"],
        &["needs CONFIG_ARM_SMMU_V3"],
        &["enable the SMMU"],
    );
    let v2 = found(&iort(Some(3), 0, 0, true));
    has(&v2, &["SMMU of version 1 or 2", "does not support ATS"], &["CONFIG_ARM_SMMU"], &["V3"]);
    let none = found(&iort(None, 0, 0, false));
    has(&none, &["IORT describes no SMMU"], &["enable the SMMU in the firmware setup"], &[]);
    let unconnected = found(&iort(Some(4), 0, 0, false));
    has(&unconnected, &["segment 0000 to no SMMU"], &["update the firmware"], &["enable the SMMU"]);
    let elsewhere = found(&iort(Some(4), 3, 0, true));
    has(&elsewhere, &["no root complex of PCI segment 0000"], &["update the firmware"], &["enable the SMMU"]);
    // On a host whose SMMU serves other slots.
    let slot = |table: &[u8]| {
        let scene = Scene::with(Scene::disk().no_group());
        scene.sim.add(&neighbour().group(7)).unwrap();
        answer(scene, ARM, table, "quiet")
    };
    has(
        &slot(&iort(Some(4), 0, 0, false)),
        &["to no SMMU"],
        &["update the firmware, or use another slot"],
        &x86,
    );
    has(&slot(&iort(Some(4), 0, 1, true)), &["to an SMMUv3"], &["check that the SMMU covers it"], &x86);
    // Interrupts.
    let scene = || Scene::new().write("proc/interrupts", " 24: 0 PCI-MSI 524288 Edge nvme\n");
    has(&answer(scene(), ARM, &iort(Some(4), 0, 0, true), "intremap=off"), &[], &["GICv3 with ITS"], &x86);
    let mut without_its = iort(Some(4), 0, 0, true);
    without_its[48] = 1;
    has(
        &answer(scene(), ARM, &without_its, ""),
        &["no interrupt translation service"],
        &["GICv3 with ITS"],
        &x86,
    );
}

/// Bytes of a host that lies end the reading, and nothing panics.
#[test]
fn malformed_tables_count_as_absent() {
    let whole = [&ALL[..], &IO_APIC].concat();
    for table in [dmar(7), ivrs(2, Some(&whole)), iort(Some(4), 0, 1, true)] {
        for len in (4..table.len()).step_by(5) {
            for cpuinfo in [INTEL, AMD, ARM] {
                answer(without(), cpuinfo, &table[..len], "quiet");
            }
        }
        let mut ones = table.clone();
        ones[36..].fill(0xff);
        for cpuinfo in [INTEL, AMD, ARM] {
            answer(without(), cpuinfo, &ones, "quiet");
            answer(unremapped(), cpuinfo, &ones, "quiet");
        }
    }
}

/// Protection of the host from what is connected by USB4.
#[test]
fn pre_boot_protection_is_read_from_the_firmware() {
    let fix = |cpuinfo, table: &[u8]| {
        let gpu = SimFunction::gpu(address(DISK)).below(address(PORT));
        let scene = Scene::with(gpu).write("proc/sys/kernel/osrelease", "6.18.0\n");
        scene.sim.set(address(DISK), "removable", "removable\n").unwrap();
        scene.sim.add_domain(0, None, &[("iommu_dma_protection", "0\n")]).unwrap();
        let route = crate::usb4::Route { domain: 0, path: 1 };
        scene.sim.add_router(route, &[("authorized", "1\n")]).unwrap();
        let scene = scene.write("proc/cpuinfo", cpuinfo);
        let name = std::str::from_utf8(&table[..4]).unwrap();
        let path = scene.sim.path(&format!("sys/firmware/acpi/tables/{name}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, table).unwrap();
        let blockers = scene.explain().blockers;
        blockers.into_iter().find(|blocker| blocker.code == Code::DmaUnprotected).unwrap().remedy
    };
    let (on, linux) = ("turn on Kernel DMA Protection", "remove what disables the IOMMU");
    for (cpuinfo, without, with) in [(INTEL, dmar(1), dmar(5)), (AMD, ivrs(0, None), ivrs(2, None))] {
        assert!(fix(cpuinfo, &without).contains(on), "{cpuinfo}");
        assert!(fix(cpuinfo, &with).contains(linux), "{cpuinfo}");
    }
}

/// A host with this file as ACPI table `name`.
fn host_with_table(name: &str, table: &[u8]) -> (SimHost, Host) {
    let sim = SimHost::new().unwrap();
    let path = sim.path(&format!("sys/firmware/acpi/tables/{name}"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, table).unwrap();
    let host = sim.plain_host();
    (sim, host)
}

#[test]
fn a_table_has_its_name_as_signature() {
    let read = |table: &[u8]| Dmar::read(&host_with_table("DMAR", table).1);
    assert!(read(&dmar(5)).is_some_and(|dmar| dmar.remaps_interrupts() && dmar.blocks_dma_at_boot()));
    assert_eq!(read(&table("RAMD", &dmar(5)[36..])), None);
}

/// Blocks of types 10h, 11h and 40h are IOMMUs, whose device entries begin after 24 or 40 bytes.
#[test]
fn each_block_of_the_ivrs_is_read() {
    let block = |kind: u8, header: u8, entries: &[u8]| {
        let mut block = vec![0; usize::from(header)];
        (block[0], block[2]) = (kind, header + entries.len() as u8);
        block.extend_from_slice(entries);
        block
    };
    let short = vec![0x22, 0, 4, 0];
    // An ACPI device by its name of 6 bytes.
    let mut named = vec![0; 22];
    (named[0], named[21]) = (240, 6);
    named.extend(b"\\_SB.0");
    named.extend(IO_APIC);
    let two = [IO_APIC, IO_APIC].concat();
    for (blocks, expect) in [
        (vec![block(0x10, 24, &IO_APIC)], (1, 1)),
        (vec![block(0x11, 40, &two)], (1, 2)),
        (vec![block(0x40, 40, &named)], (1, 1)),
        (vec![block(0x11, 40, &ALL), block(0x10, 24, &IO_APIC)], (2, 1)),
        (vec![short, block(0x10, 24, &IO_APIC)], (1, 1)),
        (vec![block(0x21, 32, &[]), block(0x40, 40, &HPET)], (1, 0)),
    ] {
        let body = [vec![0; 12], blocks.concat()].concat();
        let found = Ivrs::read(&host_with_table("IVRS", &table("IVRS", &body)).1).unwrap();
        assert_eq!((found.units, found.io_apics), expect, "{blocks:x?}");
    }
}

#[test]
fn each_node_of_the_iort_is_read() {
    let node = |kind: u8, len: u8| {
        let mut node = vec![0; usize::from(len)];
        (node[0], node[1]) = (kind, len);
        node
    };
    // The first node has no more than a header. The second mapping of the root complex leads to the SMMU at 88.
    let mut root = node(2, 80);
    (root[8], root[12], root[24], root[28]) = (2, 40, 1, 2);
    (root[40 + 12], root[60 + 12]) = (64, 88);
    let header = vec![4, 0, 0, 0, 48, 0, 0, 0, 0, 0, 0, 0];
    let body = [header, node(5, 16), node(0, 24), node(4, 68), root].concat();
    let found = Iort::read(&host_with_table("IORT", &table("IORT", &body)).1);
    let roots = vec![RootComplex { segment: 2, ats: true, smmu: Some(3) }];
    assert_eq!(found, Some(Iort { has_its: true, smmus: (true, false), roots }));
}

#[test]
fn fixes_do_not_name_what_another_processor_has() {
    let off = |cpuinfo, table: &[u8]| answer(unremapped(), cpuinfo, table, "intremap=off");
    // The table is the other vendor's, or has no IOMMU: only the option can be removed.
    has(&off(INTEL, &ivrs(0, None)), &[], &["remove intremap=off"], &["enable VT-d"]);
    has(&off(AMD, &ivrs(0, None)), &[], &["remove intremap=off"], &["enable interrupt remapping"]);
    let on = answer(unremapped(), INTEL, &ivrs(0, None), "quiet");
    has(&on, &[], &["enable VT-d interrupt remapping"], &["remove"]);
    let misspelled = answer(without(), AMD, &ivrs(0, Some(&IO_APIC)), "amdiommu=on");
    has(&misspelled, &[], &["remove amdiommu=on: Linux knows no option amdiommu"], &["intel"]);
    // CONFIG_ARM_SMMU_V3 is for Arm, where the firmware describes no SMMU.
    let driver = "CONFIG_ARM_SMMU_V3";
    for cpuinfo in [INTEL, AMD] {
        has(&answer(without(), cpuinfo, &iort(None, 0, 0, false), "quiet"), &[], &["enable "], &[driver]);
    }
    has(&answer(without(), ARM, &iort(None, 0, 0, false), "quiet"), &[], &[driver], &[]);
    has(&answer(without(), ARM, &iort(Some(4), 0, 0, false), "quiet"), &[], &["update"], &[driver]);
}

/// A virtual machine of Arm's gets an SMMU from the machine below, whatever its tables describe.
#[test]
fn fixes_in_a_virtual_machine_of_arm() {
    let table = iort(Some(4), 0, 0, false);
    let product = |scene: Scene| scene.write("sys/class/dmi/id/product_name", "KVM Virtual Machine\n");
    has(&answer(product(without()), ARM, &table, ""), &[], &["-machine virt,iommu=smmuv3"], &["intel"]);
    let slot = Scene::with(Scene::disk().no_group());
    slot.sim.add(&neighbour().group(7)).unwrap();
    let found = answer(product(slot), ARM, &table, "");
    has(&found, &["though the host has an IOMMU"], &["bypass_iommu"], &["update the firmware"]);
    assert!(!found.0.contains("IORT"), "{}", found.0);
}
