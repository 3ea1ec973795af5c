//! INTx from the device to the guest.

use super::*;
use crate::guest::Vmm as _;
use crate::pci::regs::{COMMAND, COMMAND_INTX_DISABLE, COMMAND_MASTER, COMMAND_MEMORY, STATUS};
use crate::sim::Fault;
use crate::vfio::{INTX_IRQ, MSI_IRQ, MSIX_IRQ};

const LINES: [u32; 4] = [20, 21, 22, 23];
const ON: u16 = COMMAND_MEMORY | COMMAND_MASTER;
/// No line is asserted.
const NONE: [u32; 0] = [];

/// An attached device with pin INTB beside MSI and MSI-X, in a slot, and turned on.
fn rig() -> Rig {
    let mut config = config(4);
    config.put(0x3d, &[2]);
    let rig = Rig::with(builder(&config, 4, false).intx());
    rig.device.attach().unwrap();
    rig.device.connect_pins(LINES);
    rig.write16(COMMAND, ON);
    rig
}

/// Whether the device has its pin disabled.
fn disabled(rig: &Rig) -> bool {
    rig.hardware16(COMMAND) & COMMAND_INTX_DISABLE != 0
}

/// Which kinds of interrupts VFIO has enabled: INTx, MSI, MSI-X.
fn enabled(rig: &Rig) -> [bool; 3] {
    [INTX_IRQ, MSI_IRQ, MSIX_IRQ].map(|index| rig.sim.enabled(index) != 0)
}

#[test]
fn the_pin_is_shown_once_it_leads_somewhere() {
    let mut config = config(4);
    config.put(0x3c, &[11, 2]);
    let rig = Rig::with(builder(&config, 4, false).intx());
    rig.device.attach().unwrap();
    rig.write16(COMMAND, ON);
    assert_eq!((rig.read16(0x3c), rig.vmm.routes()), (0, 0));
    rig.device.connect_pins(LINES);
    assert_eq!((rig.read16(0x3c), rig.vmm.routes()), (0x200, 0));
    rig.write16(0x3c, 0xff0a);
    assert_eq!(rig.read16(0x3c), 0x20a);
    // Nothing asked the function to do anything that it could interrupt for.
    rig.device.reset().unwrap();
    assert_eq!((rig.read16(0x3c), rig.vmm.routes()), (0x200, 0));
    rig.write16(COMMAND, COMMAND_INTX_DISABLE);
    assert_eq!(rig.vmm.routes(), 0);
    rig.write16(COMMAND, ON);
    assert_eq!((rig.vmm.routes(), enabled(&rig)), (1, [true, false, false]));

    // No pin, none that there is, and none that VFIO delivers.
    assert!(!disabled(&rig));
    for (pin, vfio) in [(0, true), (5, true), (0xff, true), (1, false)] {
        config.put(0x3d, &[pin]);
        let builder = builder(&config, 4, false);
        let rig = Rig::with(if vfio { builder.intx() } else { builder });
        rig.device.attach().unwrap();
        rig.device.connect_pins(LINES);
        rig.write16(COMMAND, ON);
        assert_eq!((rig.read16(0x3c), rig.vmm.routes()), (0, 0), "{pin}");
        // Nobody on the host would answer it.
        assert!(disabled(&rig) && rig.read16(COMMAND) == ON, "{pin}");
    }
}

#[test]
fn it_is_asserted_until_the_device_is_served() {
    let rig = rig();
    assert_eq!(rig.vmm.asserted(), NONE);
    rig.sim.set_pin(true);
    assert_eq!(rig.vmm.asserted(), [21]);
    // The guest has not ended it: VFIO signals no more, whatever the device does.
    for _ in 0..3 {
        rig.sim.set_pin(true);
        assert!(!rig.sim.update_pin());
    }
    // Each end lets one more through, for as long as the device asserts it.
    for _ in 0..3 {
        rig.vmm.end_interrupt(21);
        assert_eq!(rig.vmm.asserted(), NONE);
        assert!(rig.sim.update_pin() && !rig.sim.update_pin());
        assert_eq!(rig.vmm.asserted(), [21]);
    }
    rig.sim.set_pin(false);
    rig.vmm.end_interrupt(21);
    assert!(!rig.sim.update_pin());
    assert_eq!(rig.vmm.asserted(), NONE);
    // N interrupts are N services.
    for _ in 0..100 {
        rig.sim.set_pin(true);
        assert_eq!(rig.vmm.asserted(), [21]);
        rig.sim.set_pin(false);
        rig.vmm.end_interrupt(21);
        assert!(!rig.sim.update_pin());
        assert_eq!(rig.vmm.asserted(), NONE);
    }
}

#[test]
fn what_comes_while_the_guest_has_disabled_it_comes_afterwards() {
    let rig = rig();
    for _ in 0..3 {
        rig.write16(COMMAND, ON | COMMAND_INTX_DISABLE);
        assert!(disabled(&rig));
        rig.sim.set_pin(true);
        assert_eq!(rig.vmm.asserted(), NONE);
        // The guest sees why it would be.
        rig.sim.set_config(STATUS.into(), &[0x18]);
        assert_eq!(rig.read16(STATUS) & 8, 8);
        rig.write16(COMMAND, ON);
        rig.sim.update_pin();
        assert_eq!(rig.vmm.asserted(), [21]);
        rig.sim.set_pin(false);
        rig.vmm.end_interrupt(21);
        rig.sim.update_pin();
    }
    assert_eq!(rig.vmm.routes(), 1);
}

#[test]
fn a_line_may_be_shared() {
    let (one, other) = (rig(), rig());
    // Another device of the same guest.
    let triggers =
        [(); 2].map(|()| rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap());
    let route =
        one.vmm.add_line(21, std::os::fd::AsFd::as_fd(&triggers[0]), std::os::fd::AsFd::as_fd(&triggers[1]));
    one.sim.set_pin(true);
    assert_eq!((one.vmm.asserted(), other.vmm.asserted()), (vec![21], vec![]));
    one.vmm.end_interrupt(21);
    assert!(
        rustix::io::read(&triggers[1], &mut [0; 8]).is_ok(),
        "all on the line look whether it was for them"
    );
    assert!(one.sim.update_pin());
    assert_eq!(one.vmm.asserted(), [21]);
    one.vmm.remove_route(route.unwrap()).unwrap();
    assert_eq!(one.vmm.asserted(), [21]);
    one.device.detach().unwrap();
    assert_eq!((one.vmm.asserted(), one.vmm.routes()), (vec![], 0));
}

#[test]
fn kinds_of_interrupts_follow_each_other_in_any_order() {
    let rig = rig();
    let msi = |on: u16| rig.write16(MSI + 2, on);
    let msix = |on: bool| rig.write16(MSIX + 2, u16::from(on) << 15);
    let kinds = |intx, msi, msix| assert_eq!(enabled(&rig), [intx, msi, msix]);
    for _ in 0..3 {
        kinds(true, false, false);
        msi(1);
        kinds(false, true, false);
        rig.write16(COMMAND, ON);
        assert!(disabled(&rig), "it leads nowhere meanwhile");
        msi(0);
        kinds(true, false, false);
        assert!(!disabled(&rig));
        msix(true);
        kinds(false, false, true);
        // The guest's flag is kept meanwhile.
        rig.write16(COMMAND, ON | COMMAND_INTX_DISABLE);
        kinds(false, false, true);
        msix(false);
        kinds(true, false, false);
        assert!(disabled(&rig));
        rig.write16(COMMAND, ON);
        msix(true);
        msix(false);
        // One that asserts its pin all the while.
        rig.sim.set_pin(true);
        msi(1);
        assert_eq!(rig.vmm.asserted(), NONE);
        msi(0);
        rig.sim.update_pin();
        assert_eq!(rig.vmm.asserted(), [21]);
        // A reset by the guest: function level, then with MSI-X on.
        rig.write16(EXPRESS + 8, 0x8000);
        kinds(false, false, false);
        assert_eq!(rig.vmm.asserted(), NONE);
        rig.write16(COMMAND, ON);
        msix(true);
        rig.write16(EXPRESS + 8, 0x8000);
        kinds(false, false, false);
        rig.write16(COMMAND, ON);
    }
    rig.device.detach().unwrap();
    kinds(false, false, false);
    assert_eq!(rig.vmm.routes(), 0);
    // And again, elsewhere.
    rig.device.attach().unwrap();
    rig.device.connect_pins([16, 17, 18, 19]);
    rig.write16(COMMAND, ON);
    rig.sim.set_pin(true);
    assert_eq!(rig.vmm.asserted(), [17]);
}

#[test]
fn a_line_that_is_refused_is_left_until_a_reset() {
    for fault in [Fault::SetTriggers, Fault::SetRoute] {
        let rig = rig();
        rig.device.reset().unwrap();
        rig.sim.fail(fault);
        rig.vmm.fail(fault);
        // The write itself takes effect.
        rig.write16(COMMAND, ON);
        assert_eq!((rig.read16(COMMAND), enabled(&rig), rig.vmm.routes()), (ON, [false; 3], 0));
        assert!(disabled(&rig));
        rig.sim.heal();
        rig.vmm.heal();
        rig.write16(COMMAND, ON);
        assert_eq!(rig.vmm.routes(), 0);
        rig.device.reset().unwrap();
        rig.write16(COMMAND, ON);
        assert_eq!((enabled(&rig), rig.vmm.routes()), ([true, false, false], 1));
        // What can't be undone is, once it can.
        rig.vmm.fail(Fault::RemoveRoute);
        rig.sim.fail(Fault::DisableIrqs);
        assert!(rig.device.detach().is_err());
        rig.sim.heal();
        rig.vmm.heal();
        rig.device.detach().unwrap();
        assert_eq!((enabled(&rig), rig.vmm.routes()), ([false; 3], 0));
    }
}

#[test]
fn a_pin_that_vfio_does_not_signal_is_disabled() {
    let rig = rig();
    rig.device.reset().unwrap();
    // The route exists and can't be removed.
    rig.sim.fail(Fault::SetTriggers);
    rig.vmm.fail(Fault::RemoveRoute);
    rig.write16(COMMAND, ON);
    assert_eq!((rig.vmm.routes(), enabled(&rig), disabled(&rig)), (1, [false; 3], true));
    rig.sim.heal();
    rig.vmm.heal();
    rig.device.detach().unwrap();
    assert_eq!(rig.vmm.routes(), 0);
}

#[test]
fn a_guest_that_changes_its_mind_while_the_device_is_taken_keeps_nothing() {
    let rig = rig();
    std::thread::scope(|scope| {
        let rig = &rig;
        let guest = scope.spawn(move || {
            for turn in 0..2000u16 {
                rig.write16(COMMAND, if turn % 3 == 0 { ON | COMMAND_INTX_DISABLE } else { ON });
                rig.write16(MSIX + 2, turn << 15);
                rig.write16(MSI + 2, turn >> 2 & 1);
                rig.sim.set_pin(turn % 2 == 0);
            }
        });
        while !guest.is_finished() {
            rig.device.detach().unwrap();
            assert_eq!((enabled(rig), rig.vmm.routes(), rig.vmm.asserted()), ([false; 3], 0, vec![]));
            rig.device.attach().unwrap();
        }
    });
    rig.device.detach().unwrap();
    assert_eq!((enabled(&rig), rig.vmm.routes()), ([false; 3], 0));
}
