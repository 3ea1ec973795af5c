//! Which parts of BARs are mapped again, and which stay.

use super::*;
use crate::guest::Vmm as _;
use crate::sim::Fault;
use crate::vfio::HostMemory;

/// Has BAR 0 decode at 0x10_8000_0000, and BAR 2 at 0xc000_0000.
fn place(rig: &Rig) {
    rig.write32(0x10, 0x8000_0000);
    rig.write32(0x14, 0x10);
    rig.write32(0x18, 0xc000_0000);
    rig.write16(0x04, 2);
}

/// Mappings added to and removed from the guest since the last call.
fn changes(rig: &Rig) -> Vec<String> {
    rig.log.take().into_iter().filter(|line| line.starts_with("guest ")).collect()
}

#[test]
fn only_a_bar_that_could_not_be_withdrawn_is_mapped_again() {
    let rig = Rig::new();
    place(&rig);
    changes(&rig);
    rig.vmm.fail(Fault::UnmapGuest);
    rig.write32(0x18, 0xd000_0000);
    assert_eq!(changes(&rig), [] as [&str; 0]);
    rig.vmm.heal();
    rig.write16(0x04, 2);
    let again = [
        "guest unmap 0xc0000000+0x2000",
        "guest unmap 0xc0004000+0xc000",
        "guest map 0xc0000000+0x2000",
        "guest map 0xc0004000+0xc000",
    ];
    assert_eq!(changes(&rig), again);
}

#[test]
fn what_is_mapped_of_a_bar_stays_while_the_rest_is_refused() {
    let rig = Rig::new();
    // The VMM has something else where the BAR's first part goes.
    rig.vmm.map(0xc000_0000, Arc::new(HostMemory::new(0x1000).unwrap())).unwrap();
    rig.write32(0x18, 0xc000_0000);
    rig.write16(0x04, 2);
    assert_eq!(rig.vmm.maps(), [(0xc000_0000, 0x1000), (0xc000_4000, 0xc000)]);
    changes(&rig);
    rig.write16(0x04, 6);
    assert_eq!(changes(&rig), [] as [&str; 0]);
}

#[test]
fn a_detached_device_leaves_no_bar_mapped_in_this_process() {
    let rig = Rig::new();
    place(&rig);
    assert_eq!(rig.vmm.maps().len(), 3);
    rig.device.detach().unwrap();
    rig.device.attach().unwrap();
    // A mapping that was kept would be used again.
    rig.sim.fail(Fault::MapBar);
    place(&rig);
    assert_eq!(rig.vmm.maps(), []);
}
