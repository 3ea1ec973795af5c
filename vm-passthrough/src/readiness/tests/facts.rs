//! Facts about the whole host.

use super::*;
use crate::readiness::facts::{CpuVendor, HostFacts};

#[test]
fn permission_bits_of_the_first_class_that_fits_count() {
    const DAC_OVERRIDE: u64 = 1 << 1;
    let scene = Scene::new();
    // Mode, owner and group of a file, and whether user 1000 of group 100 may read and write it.
    for (mode, owner, group, expect) in [
        (0o600, 1000, 0, true),
        (0o600, 0, 100, false),
        (0o066, 1000, 100, false),
        (0o060, 0, 100, true),
        (0o040, 0, 100, false),
        (0o060, 0, 7, false),
        (0o006, 0, 7, true),
        (0o606, 0, 100, false),
    ] {
        for capabilities in [0, DAC_OVERRIDE] {
            scene.sim.set_credentials(1000, 100, capabilities).unwrap();
            let credentials = HostFacts::read(&scene.sim.plain_host()).credentials;
            let expect = expect || capabilities != 0;
            assert_eq!(credentials.may(mode, owner, group, 6), expect, "{mode:o} of {owner}:{group}");
        }
    }
}

#[test]
fn processors() {
    let check = |cpuinfo: &str, vendor, is_virtual| {
        let facts = HostFacts::read(&Scene::new().write("proc/cpuinfo", cpuinfo).sim.plain_host());
        assert_eq!((facts.vendor, facts.is_virtual), (vendor, is_virtual), "{cpuinfo}");
    };
    check("vendor_id : GenuineIntel\nflags : fpu vme\n", CpuVendor::Intel, false);
    check("vendor_id : AuthenticAMD\nflags : fpu hypervisor vme\n", CpuVendor::Amd, true);
    check("CPU implementer : 0x41\nCPU part : 0xd0c\n", CpuVendor::Arm, false);
    check("hart : 0\nisa : rv64imafdc\n", CpuVendor::Other, false);
}

/// Without privilege, all addresses in `iomem` are zeros.
#[test]
fn hidden_address_ranges_are_left_out() {
    let scene = Scene::new().write(
        "proc/iomem",
        "00000000-00000000 : PCI Bus 0000:01\n  00000000-00000000 : efifb\n81000000-812fffff : vesafb\n",
    );
    let resources = HostFacts::read(&scene.sim.plain_host()).resources;
    assert_eq!(resources, [(0x8100_0000, 0x812f_ffff, "vesafb".into())]);
}
