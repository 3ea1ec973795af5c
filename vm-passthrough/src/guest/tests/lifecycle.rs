//! Attach, reset, detach: their order, and what is left when a part fails.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::claim::Cancel;
use crate::guest::{DeviceError, DeviceOptions, RamRegion};
use crate::pci::placement;
use crate::sim::Fault;
use crate::vfio::{MSIX_IRQ, VfioError};

const RAM: [(u64, u64); 2] = [(0, 0x10_0000), (0x1_0000_0000, 0x10_0000)];

/// Has a guest use everything.
fn use_it(rig: &Rig) {
    rig.write32(0x18, 0xc000_0000);
    placement::enable(&*rig.device);
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
    assert_eq!(rig.find_bar(0xc000_0000), None);
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
            "config 0x4 = [03, 04]",
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

/// Detaches with something broken, which must be owed until it works again.
#[test]
fn a_failed_detach_undoes_the_rest_and_stays_owed() {
    type Break = fn(&Rig);
    // What to break, what is said then, and what is still there.
    let faults: [(&str, Break, &str); 8] = [
        ("VFIO_DEVICE_RESET", |rig| rig.sim.fail(Fault::Reset), "reset"),
        ("was not reset", |rig| rig.sim.fail(Fault::ResetRefuted), "reset"),
        ("VFIO_DEVICE_SET_IRQS", |rig| rig.sim.fail(Fault::DisableIrqs), "irqs reset"),
        ("remove an interrupt route", |rig| rig.vmm.fail(Fault::RemoveRoute), "routes reset"),
        ("unmap memory from the guest", |rig| rig.vmm.fail(Fault::UnmapGuest), "guest reset"),
        ("forget a file", |rig| rig.vmm.fail(Fault::ForgetFile), "file"),
        ("can't be mapped", |rig| rig.space.fail(Fault::UnmapDma, 0), "dma"),
        (
            "VFIO_DEVICE_RESET",
            |rig| {
                rig.sim.fail(Fault::Reset);
                rig.vmm.fail(Fault::ForgetFile);
                rig.space.fail(Fault::UnmapDma, 0);
            },
            "reset file dma",
        ),
    ];
    let left = |rig: &Rig, what: &str| {
        let has = |word| what.split(' ').any(|each| each == word);
        assert_eq!(rig.sim.enabled(MSIX_IRQ) > 0, has("irqs"), "{what}");
        assert_eq!(rig.vmm.routes() > 0, has("routes"), "{what}");
        assert_eq!(rig.vmm.maps().len(), if has("guest") { 2 } else { 0 }, "{what}");
        assert_eq!(rig.vmm.files() > 0, has("file"), "{what}");
        assert_eq!(rig.space.maps().len(), if has("dma") { 2 } else { 0 }, "{what}");
        // Whatever failed, the guest does not reach it, and it is quiet.
        assert_eq!(rig.find_bar(0xc000_0000), None, "{what}");
        assert_eq!(rig.read32(0), u32::MAX, "{what}");
        assert_eq!(rig.hardware16(4) & 0b110, 0, "{what}");
    };
    for (expect, fail, what) in faults {
        for again in ["detach", "attach", "drop"] {
            let rig = Rig::new();
            use_it(&rig);
            fail(&rig);
            for _ in 0..3 {
                let error = rig.device.detach().unwrap_err().to_string();
                assert!(error.contains(expect), "{error}");
                left(&rig, what);
            }
            // Nor does it become the next guest's.
            rig.device.attach().unwrap_err();
            left(&rig, what);
            let resets = rig.sim.resets();
            rig.sim.heal();
            rig.vmm.heal();
            rig.space.heal();
            match again {
                "detach" => {
                    rig.device.detach().unwrap();
                    left(&rig, "");
                    let owed = u32::from(what.contains("reset"));
                    assert_eq!(rig.sim.resets(), resets + owed, "{what}: what was done is not done again");
                    rig.log.take();
                    rig.device.detach().unwrap();
                    assert_eq!(rig.log.take(), [] as [&str; 0]);
                }
                "attach" => {
                    rig.device.attach().unwrap();
                    use_it(&rig);
                    assert_eq!((rig.space.maps(), rig.vmm.files()), (RAM.to_vec(), 1));
                }
                _ => {
                    // It was said what is left, so the drop does not try again; but RAM stays mapped for nobody.
                    let Rig { device, sim, space, .. } = rig;
                    drop(device);
                    assert_eq!(space.maps(), []);
                    assert_eq!(sim.resets(), resets);
                }
            }
        }
    }
}

#[test]
fn an_attach_that_cannot_be_undone_stays_owed() {
    let rig = Rig::with(builder(&config(4), 4, false));
    rig.space.fail(Fault::MapDma, 1);
    rig.space.fail(Fault::UnmapDma, 1);
    rig.vmm.fail(Fault::ForgetFile);
    let error = rig.device.attach().unwrap_err().to_string();
    assert!(error.contains("0x100000000..=0x1000fffff"), "{error}");
    assert_eq!((rig.space.maps().len(), rig.vmm.files()), (1, 1));
    assert_eq!(rig.read32(0), u32::MAX);
    assert!(rig.device.detach().is_err() && rig.device.attach().is_err());
    rig.space.heal();
    rig.vmm.heal();
    rig.device.detach().unwrap();
    assert_nothing_left(&rig);
}

#[test]
fn a_vanished_device_reads_all_ones_and_can_be_detached() {
    let rig = Rig::new();
    use_it(&rig);
    rig.sim.vanish();
    // Registers that are the guest's own still answer until the guest looks for the function; then none does.
    assert_eq!(rig.read16(4), 7);
    for offset in (0..0x1000).step_by(4) {
        assert_eq!(rig.read32(offset), u32::MAX, "{offset:#x}");
    }
    // So do BARs, the MSI-X table (BAR 2, 0x2000) and pending bits (0x3000) among them.
    for (bar, offset) in [(0, 0), (2, 0x1000), (2, 0x2000), (2, 0x2ff8), (2, 0x3000), (4, 0)] {
        let mut data = [0; 8];
        rig.device.bar_read(bar, offset, &mut data).unwrap();
        assert_eq!(data, [0xff; 8], "{bar} {offset:#x}");
        rig.device.bar_write(bar, offset, &[0; 8]).unwrap();
    }
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
    let second = builder(&config(4), 4, false).log(&rig.log);
    let sim = second.build("0000:66:00.0".parse().unwrap(), rig.space.clone()).unwrap();
    let second = VfioPciDevice::new(sim, rig.vmm.clone()).unwrap();
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
    let options = DeviceOptions::default().without_reset(true);
    let device = VfioPciDevice::with_options(rig.sim.clone(), rig.vmm.clone(), options).unwrap();
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
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while locks() == before && std::time::Instant::now() < deadline {
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

/// The device's own bytes, past the guest.
fn inside(rig: &Rig, bar: u32, offset: u64) -> [u8; 8] {
    rig.sim.memory(bar, offset, 8).try_into().unwrap()
}

#[test]
fn a_device_that_is_not_attached_has_no_bars() {
    // Beside the MSI-X structures, in the page that they are in, in the table, in the pending bits.
    let places = [(4, 0), (2, 0x0), (2, 0x2ff8), (2, 0x2000), (2, 0x3000)];
    let rig = Rig::with(builder(&config(4), 4, false));
    let unreachable = |rig: &Rig, when: &str| {
        for (bar, offset) in places {
            let before = inside(rig, bar.into(), offset);
            let mut data = [0; 8];
            rig.device.bar_read(bar, offset, &mut data).unwrap();
            assert_eq!(data, [0xff; 8], "{when}: BAR {bar}, {offset:#x}");
            rig.device.bar_write(bar, offset, &[0x5a; 8]).unwrap();
            assert_eq!(inside(rig, bar.into(), offset), before, "{when}: BAR {bar}, {offset:#x}");
        }
        // What is no BAR is an error at any time.
        assert!(rig.device.bar_write(1, 0, &[0]).is_err());
    };
    unreachable(&rig, "before it is attached");
    rig.device.attach().unwrap();
    use_it(&rig);
    rig.device.bar_write(4, 0, &[0x11; 8]).unwrap();
    assert_eq!(inside(&rig, 4, 0), [0x11; 8]);
    // A vCPU has found the BAR, and makes its access after the device was taken away.
    let found = rig.find_bar(0xc000_0000);
    rig.device.detach().unwrap();
    assert_eq!(found, Some((2, 0)));
    unreachable(&rig, "after it was detached");
    rig.device.attach().unwrap();
    rig.sim.fail(Fault::Reset);
    rig.device.detach().unwrap_err();
    unreachable(&rig, "after a detach that failed");
}

#[test]
fn a_detach_waits_for_accesses_to_bars() {
    let rig = Rig::new();
    use_it(&rig);
    let resets = rig.sim.resets();
    let hold = rig.sim.hold();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    std::thread::scope(|scope| {
        let access = scope.spawn(|| rig.device.bar_write(4, 0, &[0x22; 8]));
        let is_idle = || format!("{:?}", rig.device).contains("idle: true");
        while is_idle() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert!(!is_idle(), "the access is not under way");
        let refused = scope.spawn(|| rig.device.detach());
        while !refused.is_finished() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        // From when it is to be detached no access begins.
        let mut data = [0; 8];
        rig.device.bar_read(4, 0, &mut data).unwrap();
        assert_eq!(data, [0xff; 8]);
        assert!(!access.is_finished());
        drop(hold);
        let refused = refused.join().unwrap();
        assert!(matches!(refused, Err(DeviceError::Stuck { .. })), "{refused:?}");
        access.join().unwrap().unwrap();
    });
    assert_eq!((rig.sim.resets(), inside(&rig, 4, 0)), (resets, [0x22; 8]));
    rig.device.detach().unwrap();
    assert_eq!(rig.sim.resets(), resets + 1);
    assert_nothing_left(&rig);
}

/// Two vCPUs move BARs, turn decoding on and off, enable and mask vectors and reach for BARs all the while, and then find nothing.
#[test]
fn a_detach_leaves_nothing_whatever_vcpus_write_meanwhile() {
    for _ in 0..20 {
        let rig = Rig::new();
        use_it(&rig);
        let (begun, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let vcpu = |base: u32| {
            for turn in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                rig.write32(0x18, base + (turn % 16) * 0x1_0000);
                rig.write16(4, if turn % 3 == 0 { 0 } else { 7 });
                rig.write16(MSIX + 2, if turn % 5 == 0 { 0xc000 } else { 0x8000 });
                let _ = rig.device.bar_write(2, 0x2000, &[turn as u8; 4]);
                begun.fetch_add(1, Ordering::Relaxed);
            }
        };
        let detached = std::thread::scope(|scope| {
            let vcpus = [0xc000_0000, 0xd000_0000].map(|base| scope.spawn(move || vcpu(base)));
            let go_on = || {
                let until = begun.load(Ordering::Relaxed) + 8;
                while begun.load(Ordering::Relaxed) < until && !vcpus.iter().any(|vcpu| vcpu.is_finished()) {
                    std::thread::yield_now();
                }
            };
            go_on();
            let detached = rig.device.detach();
            go_on();
            stop.store(true, Ordering::Relaxed);
            detached
        });
        detached.unwrap();
        assert_nothing_left(&rig);
        assert_eq!(rig.hardware16(4) & 0b111, 0);
    }
}

/// Whoever takes a function away waits until it is closed, and no reset works before: none is tried, all else is undone.
#[test]
fn what_the_host_wants_back_is_given_up_without_a_reset() {
    for pulled in [false, true] {
        let rig = Rig::new();
        use_it(&rig);
        assert!(!rig.device.was_left_unreset());
        rig.sim.want_back();
        if pulled {
            rig.sim.vanish();
        }
        // Writes of a function that is gone go nowhere, and nothing says so.
        rig.device.stop().unwrap();
        rig.device.detach().unwrap();
        assert!(rig.device.was_left_unreset());
        assert!(!rig.log.take().iter().any(|line| line.starts_with("reset")));
        assert_nothing_left(&rig);
        if !pulled {
            assert_eq!(rig.hardware16(4) & 0b100, 0, "it does no DMA any more");
        }
        assert!(matches!(rig.device.attach(), Err(DeviceError::Device(VfioError::WantedBack { .. }))));
    }
}

#[test]
fn only_failures_of_what_the_host_wants_back_are_forgiven() {
    let rig = Rig::new();
    use_it(&rig);
    rig.sim.fail(Fault::DisableIrqs);
    rig.device.stop().unwrap_err();
    rig.sim.want_back();
    rig.device.stop().unwrap();
    rig.device.detach().unwrap();
    assert!(rig.device.was_left_unreset());
    assert_nothing_left(&rig);
}

#[test]
fn a_device_that_is_gone_is_warned_of_once() {
    let warnings = super::interrupts::Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let rig = Rig::new();
        rig.sim.vanish();
        for _ in 0..3 {
            assert_eq!(rig.read32(0), u32::MAX);
        }
        let found = warnings.take();
        assert!(found.len() == 1 && found[0].contains("the device is gone"), "{found:?}");
    });
}

/// Accesses that begin once a detach waits come after it.
#[test]
fn a_detach_overtakes_accesses_that_begin_after_it() {
    const VCPUS: u64 = 4;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let wait_for = |is_done: &dyn Fn() -> bool| {
        while !is_done() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
    };
    // Several times: without precedence the detach is still first now and then.
    for _ in 0..4 {
        let rig = Rig::new();
        let hold = rig.sim.hold();
        let state = || format!("{:?}", rig.device);
        let locks = || state().matches("<locked>").count();
        let before = locks();
        std::thread::scope(|scope| {
            scope.spawn(|| rig.device.config_read(6, &mut [0; 2]));
            wait_for(&|| locks() != before);
            let detached = scope.spawn(|| rig.device.detach());
            wait_for(&|| state().contains("waiting: 1"));
            for _ in 0..VCPUS {
                scope.spawn(|| rig.write32(VENDOR + 4, 0x5a5a_5a5a));
            }
            wait_for(&|| rig.device.resets_asked() == VCPUS);
            drop(hold);
            detached.join().unwrap().unwrap();
        });
        let written = format!("config {:#x} =", VENDOR + 4);
        let log = rig.log.take();
        assert!(!log.iter().any(|line| line.starts_with(&written)), "{log:#?}");
        assert_nothing_left(&rig);
    }
}

/// A guest whose vCPUs reset the device all at once waits for two resets, not for as many as it has vCPUs.
#[test]
fn resets_that_are_asked_for_at_once_are_one() {
    const VCPUS: u64 = 32;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let rig = Rig::new();
    let before = rig.sim.resets();
    let hold = rig.sim.hold();
    std::thread::scope(|scope| {
        for vcpu in 0..VCPUS {
            let device = &rig.device;
            scope.spawn(move || match vcpu % 2 {
                0 => device.reset().unwrap(),
                _ => device.config_write(EXPRESS + 8, &0x8000u16.to_le_bytes()),
            });
        }
        while rig.device.resets_asked() < VCPUS && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        drop(hold);
    });
    let resets = rig.sim.resets() - before;
    assert!((1..=2).contains(&resets), "{resets}");
    rig.device.reset().unwrap();
    assert_eq!(rig.sim.resets() - before, resets + 1, "one that is asked for later is one more");
}

#[test]
fn much_ram_is_mapped_in_pieces_until_it_is_asked_to_give_up() {
    const MIB: u64 = 1 << 20;
    let rig = Rig::with(builder(&config(4), 4, false));
    let memory = Arc::new(crate::vfio::HostMemory::new(5 * MIB as usize / 2).unwrap());
    let region = RamRegion { guest: 0x2_0000_0000, memory };
    let pieces = [(0, MIB), (MIB, MIB), (2 * MIB, MIB / 2)].map(|(at, len)| (region.guest + at, len));
    rig.device.attach().unwrap();
    let before = rig.space.maps();
    rig.space.fail(Fault::MapDma, 2);
    assert!(rig.device.ram_added(&region).is_err());
    assert_eq!(rig.space.maps(), before, "nothing of it is mapped");
    rig.space.heal();
    rig.device.ram_added(&region).unwrap();
    assert_eq!(rig.space.maps(), [&before[..], &pieces].concat());
    rig.device.ram_removed(region.guest).unwrap();
    assert_eq!(rig.space.maps(), before);
    rig.device.detach().unwrap();
    rig.log.take();

    let cancel = Cancel::default();
    cancel.request();
    let options = DeviceOptions::default().cancel(Some(cancel));
    let device = VfioPciDevice::with_options(rig.sim.clone(), rig.vmm.clone(), options).unwrap();
    assert!(matches!(device.attach(), Err(DeviceError::Cancelled)));
    assert_nothing_left(&rig);
}

#[test]
fn its_dma_follows_the_guests_ram() {
    let rig = Rig::with(builder(&config(4), 4, false));
    let more = || {
        let memory = Arc::new(crate::vfio::HostMemory::new(0x10_0000).unwrap());
        RamRegion { guest: 0x2_0000_0000, memory }
    };
    let (low, high, new) = ((0, 0x10_0000), (0x1_0000_0000, 0x10_0000), (0x2_0000_0000, 0x10_0000));
    rig.device.ram_added(&more()).unwrap();
    assert_eq!(rig.space.maps(), [], "it is not attached");
    rig.device.attach().unwrap();
    let region = more();
    rig.device.ram_added(&region).unwrap();
    rig.device.ram_added(&region).unwrap();
    assert_eq!(rig.space.maps(), [low, high, new]);
    let overlap = RamRegion { guest: 0x2_0000_1000, ..more() };
    assert!(matches!(rig.device.ram_added(&overlap), Err(DeviceError::Device(VfioError::Range { .. }))));
    rig.space.fail(Fault::UnmapDma, 0);
    assert!(rig.device.ram_removed(region.guest).is_err());
    rig.space.heal();
    assert_eq!(rig.space.maps(), [low, high, new]);
    let discard = |guest, len| rig.device.check_discard(guest, len).map_err(|error| error.to_string());
    let refused = discard(region.guest + 0xfff, 2).unwrap_err();
    assert!(refused.contains("pinned for DMA") && refused.contains("ballooning"), "{refused}");
    assert!(discard(region.guest - 0x1000, 0x1001).is_err());
    assert_eq!(discard(region.guest - 0x1000, 0x1000), Ok(()));
    assert!(discard(region.guest + 0xf_ffff, 1).is_err());
    assert_eq!(discard(region.guest + 0x10_0000, 0x1000), Ok(()));
    assert_eq!(discard(region.guest, 0), Ok(()));
    rig.device.ram_removed(region.guest).unwrap();
    assert_eq!(discard(region.guest, 0x1000), Ok(()));
    rig.device.ram_removed(region.guest).unwrap();
    rig.device.ram_removed(0x1000).unwrap();
    assert_eq!(rig.space.maps(), [low, high]);
    rig.device.ram_added(&region).unwrap();
    rig.device.detach().unwrap();
    assert_eq!(rig.space.maps(), [], "what came while it was attached goes with it");
    // A detach that failed leaves something to do, but the guest does not have the device.
    rig.device.attach().unwrap();
    rig.sim.fail(Fault::Reset);
    rig.device.detach().unwrap_err();
    rig.device.ram_added(&region).unwrap();
    assert_eq!(rig.space.maps(), []);
}
