//! Attach, reset, detach: their order, and what is left when a part fails.

use super::*;
use crate::guest::{DeviceError, DeviceOptions, placement};
use crate::sim::Fault;
use crate::vfio::{MSIX_IRQ, VfioError};

const RAM: [(u64, u64); 2] = [(0, 0x10_0000), (0x1_0000_0000, 0x10_0000)];

/// Has a guest use everything.
fn use_it(rig: &Rig) {
    rig.write32(0x18, 0xc000_0000);
    placement::enable_memory(&*rig.device);
    rig.write16(MSIX + 2, 0x8000);
    rig.entry(0, message(0), false);
    assert_eq!((rig.vmm.maps().len(), rig.vmm.routes(), rig.sim.enabled(MSIX_IRQ)), (2, 1, 1));
    assert_eq!(rig.hardware16(4) & 0b110, 0b110);
    rig.log.take();
}

fn assert_nothing_left(rig: &Rig) {
    assert_eq!(rig.vmm.maps(), []);
    assert_eq!(rig.vmm.routes(), 0);
    assert_eq!(rig.vmm.files(), 0);
    assert_eq!(rig.space.maps(), []);
    assert_eq!(rig.device.find_bar(0xc000_0000), None);
    assert_eq!(rig.read32(0), u32::MAX);
}

#[test]
fn each_step_comes_in_its_order() {
    let rig = Rig::with(builder(&config(4), 4, false));
    assert_eq!(rig.read32(0), u32::MAX, "it is not attached yet");
    rig.write16(4, 2);
    assert_eq!(rig.log.take(), [] as [&str; 0]);

    rig.device.attach().unwrap();
    rig.device.attach().unwrap();
    assert_eq!(
        rig.log.take(),
        [
            "config 0x4 = [00, 04]",
            "reset",
            "config 0x4 = [00, 04]",
            "file add",
            "dma map 0x0+0x100000",
            "dma map 0x100000000+0x100000",
        ]
    );
    use_it(&rig);
    rig.device.detach().unwrap();
    assert_eq!(
        rig.log.take(),
        [
            // Bus master off, interrupts off, BARs out of the guest.
            "config 0x4 = [02, 04]",
            "irq 2 off",
            "guest unmap 0xc0000000+0x2000",
            "guest unmap 0xc0004000+0xc000",
            "config 0x4 = [00, 04]",
            "reset",
            "config 0x4 = [00, 04]",
            "file remove",
            "dma unmap 0x100000000",
            "dma unmap 0x0",
        ]
    );
    assert_nothing_left(&rig);
    rig.device.detach().unwrap();
    assert_eq!(rig.log.take(), [] as [&str; 0]);

    // And again.
    rig.device.attach().unwrap();
    assert_eq!(rig.read16(4), 0);
    use_it(&rig);
}

#[test]
fn a_failed_attach_leaves_nothing() {
    let rig = Rig::with(builder(&config(4), 4, false));
    let faults: [(&str, &dyn Fn()); 4] = [
        ("VFIO_DEVICE_RESET", &|| rig.sim.fail(Fault::Reset)),
        ("tell the hypervisor", &|| rig.vmm.fail(Fault::TellVmm)),
        ("0x0..=0xfffff", &|| rig.space.fail(Fault::MapDma, 0)),
        ("0x100000000..=0x1000fffff", &|| rig.space.fail(Fault::MapDma, 1)),
    ];
    for (expect, fail) in faults {
        fail();
        let error = rig.device.attach().unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        assert_nothing_left(&rig);
        assert_eq!(rig.hardware16(4) & 0b110, 0);
        rig.sim.heal();
        rig.vmm.heal();
        rig.space.heal();
    }
    rig.device.attach().unwrap();
    assert_eq!(rig.space.maps(), RAM);
}

#[test]
fn a_failed_detach_undoes_the_rest_and_says_so() {
    type Break = fn(&Rig);
    let faults: [(&str, Break); 4] = [
        ("VFIO_DEVICE_RESET", |rig| rig.sim.fail(Fault::Reset)),
        ("VFIO_DEVICE_SET_IRQS", |rig| rig.sim.fail(Fault::DisableIrqs)),
        ("unmap memory from the guest", |rig| rig.vmm.fail(Fault::UnmapGuest)),
        ("can't be mapped", |rig| rig.space.fail(Fault::UnmapDma, 0)),
    ];
    for (expect, fail) in faults {
        let rig = Rig::new();
        use_it(&rig);
        fail(&rig);
        let error = rig.device.detach().unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        assert_eq!(rig.vmm.routes(), 0);
        assert_eq!(rig.vmm.files(), 0);
        assert_eq!(rig.device.find_bar(0xc000_0000), None);
        assert_eq!(rig.hardware16(4) & 0b110, 0);
        if !expect.contains("mapped") {
            assert_eq!(rig.space.maps(), []);
        }
        rig.device.detach().unwrap();
    }
}

#[test]
fn a_vanished_device_reads_all_ones_and_can_be_detached() {
    let rig = Rig::new();
    use_it(&rig);
    rig.sim.vanish();
    // Registers that are the guest's own still answer until a read fails; then none does.
    for offset in (0..0x1000).step_by(4) {
        assert_eq!(rig.read32(offset), u32::MAX, "{offset:#x}");
    }
    let mut data = [0; 8];
    assert!(rig.device.bar_read(0, 0, &mut data).is_err());
    assert_eq!(data, [0xff; 8]);
    assert!(rig.device.bar_write(0, 0, &data).is_err());
    for offset in (0..0x1000).step_by(4) {
        rig.write32(offset, 0xffff_ffff);
    }
    let error = rig.device.detach().unwrap_err();
    assert!(matches!(error, crate::guest::DeviceError::Device(VfioError::System { .. })), "{error}");
    assert_nothing_left(&rig);
}

#[test]
fn a_reset_takes_back_what_the_guest_did() {
    let by_the_vmm: fn(&Rig) = |rig| rig.device.reset().unwrap();
    let by_the_guest: fn(&Rig) = |rig| rig.write16(EXPRESS + 8, 0x8000);
    for reset in [by_the_vmm, by_the_guest] {
        let rig = Rig::new();
        let before: Vec<u32> = (0..0x1000).step_by(4).map(|offset| rig.read32(offset)).collect();
        use_it(&rig);
        let resets = rig.sim.resets();
        reset(&rig);
        assert_eq!(rig.sim.resets(), resets + 1);
        let after: Vec<u32> = (0..0x1000).step_by(4).map(|offset| rig.read32(offset)).collect();
        assert_eq!(before, after);
        assert_eq!((rig.vmm.maps(), rig.vmm.routes(), rig.sim.enabled(MSIX_IRQ)), (vec![], 0, 0));
        assert_eq!(rig.hardware16(4) & 0b110, 0);
        let mut control = [0; 4];
        rig.device.bar_read(2, 0x200c, &mut control).unwrap();
        assert_eq!(control, [1, 0, 0, 0]);
        // Its memory is still the guest's, and it works.
        assert_eq!(rig.space.maps(), RAM);
        use_it(&rig);
    }
}

#[test]
fn devices_of_one_guest_share_its_memory() {
    let rig = Rig::new();
    let sim = builder(&config(4), 4, false).log(&rig.log).build("0000:66:00.0".parse().unwrap()).unwrap();
    let second = VfioPciDevice::new(sim, rig.space.clone(), rig.vmm.clone()).unwrap();
    second.attach().unwrap();
    assert_eq!(rig.space.maps(), RAM);
    rig.device.detach().unwrap();
    assert_eq!(rig.space.maps(), RAM);
    // Dropped without being detached.
    drop(second);
    assert_eq!(rig.space.maps(), []);
    assert_eq!(rig.vmm.files(), 0);
}

#[test]
fn a_device_is_at_rest_unless_the_guest_uses_it() {
    let rig = Rig::with(builder(&config(4), 4, false));
    assert!(!rig.sim.is_at_rest(), "nobody knows yet what it does");
    rig.device.stop().unwrap();
    rig.device.attach().unwrap();
    assert!(rig.sim.is_at_rest());
    // What is not in the command register uses nothing.
    rig.write32(0x18, 0xc000_0000);
    rig.write16(4, 0x400);
    assert!(rig.sim.is_at_rest());
    for command in [2, 4] {
        rig.write16(4, command);
        assert!(!rig.sim.is_at_rest(), "{command}");
        rig.device.reset().unwrap();
        assert!(rig.sim.is_at_rest());
    }
    // Resets that take several devices need each to be stopped first.
    use_it(&rig);
    let resets = rig.sim.resets();
    rig.device.stop().unwrap();
    assert!(rig.sim.is_at_rest());
    assert_eq!((rig.vmm.maps(), rig.vmm.routes(), rig.sim.enabled(MSIX_IRQ)), (vec![], 0, 0));
    assert_eq!((rig.hardware16(4) & 0b110, rig.sim.resets()), (0, resets));
    rig.device.reset().unwrap();
    use_it(&rig);
    rig.device.detach().unwrap();
    assert!(rig.sim.is_at_rest());
}

#[test]
fn a_device_without_reset_is_given_only_to_those_who_accept_it() {
    let rig = Rig::with(builder(&config(4), 4, false));
    rig.sim.fail(Fault::ResetRefuted);
    let error = rig.device.attach().unwrap_err().to_string();
    assert!(error.contains("was not reset"), "{error}");
    let options = DeviceOptions { without_reset: true };
    let device =
        VfioPciDevice::with_options(rig.sim.clone(), rig.space.clone(), rig.vmm.clone(), options).unwrap();
    device.attach().unwrap();
    device.config_write(4, &[6, 0]);
    assert_eq!(rig.hardware16(4) & 0b110, 0b110);
    device.reset().unwrap();
    assert_eq!(rig.hardware16(4) & 0b110, 0, "it is quiet all the same");
    device.detach().unwrap();
    assert_nothing_left(&rig);
    // What is no matter of resets is not accepted.
    rig.sim.heal();
    rig.sim.fail(Fault::Reset);
    assert!(device.attach().is_err());
}

#[test]
fn a_stuck_access_does_not_hold_up_the_end() {
    let rig = Rig::with(builder(&config(4), 4, false));
    rig.device.attach().unwrap();
    let hold = rig.sim.hold();
    let locks = || format!("{:?}", rig.device).matches("<locked>").count();
    let before = locks();
    std::thread::scope(|scope| {
        // Byte 6 of the header, the status, is read from the device.
        let access = scope.spawn(|| rig.device.config_read(6, &mut [0; 2]));
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while locks() == before && std::time::Instant::now() < patience {
            std::thread::yield_now();
        }
        let refused = [rig.device.detach(), rig.device.reset(), rig.device.stop()];
        assert!(!access.is_finished());
        drop(hold);
        for refused in refused {
            assert!(matches!(refused, Err(DeviceError::Stuck { .. })), "{refused:?}");
        }
    });
    rig.device.detach().unwrap();
    assert_nothing_left(&rig);
}
