//! Hosts without an IOMMU: the cause is read from the kernel command line and the ACPI tables.

use super::*;

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
