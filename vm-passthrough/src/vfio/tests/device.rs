//! An open device: regions, interrupts, and whether it is there.

use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, SealFlags, fcntl_add_seals, fcntl_getfl};
use rustix::io::{Errno, FdFlags, fcntl_getfd};

use super::*;

#[test]
fn a_device_is_opened_and_closed() {
    for backend in BACKENDS {
        let (kernel, gpu, device) = opened(backend);
        assert_eq!(device.address(), gpu);
        assert_eq!(device.info(), DeviceInfo { regions: 9, irqs: 5, reset: true });
        assert!(!device.is_virtual());
        let mut id = [0; 4];
        device.read(CONFIG_REGION, 0, &mut id).unwrap();
        assert_eq!(id, [0xde, 0x10, 0x84, 0x26]);
        let space = device.space().clone();
        refused(device.clone().close(), "still in use");
        refused(space.close(), GPU);
        device.close().unwrap();
        space.close().unwrap();
        let state = kernel.state();
        assert!(state.ioases.is_empty());
        assert!(!state.groups[&12].in_container);
    }
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    symlink("../0000:65:00.0", kernel.host.pci_device(gpu).join("physfn")).unwrap();
    assert!(open_in(&kernel, gpu, &space(&kernel, Backend::Group)).unwrap().is_virtual());
    // A device that is not PCI.
    kernel.state().twist(number::DEVICE_INFO, |bytes, answer| {
        kernel::put32(bytes, 4, 1);
        answer
    });
    let audio = kernel.add(AUDIO, 13, &config());
    refused(open_in(&kernel, audio, &space(&kernel, Backend::Iommufd)), AUDIO);
}

#[test]
fn reads_and_writes_stay_in_their_region() {
    let (kernel, gpu, device) = opened(Backend::Group);
    let pattern: Vec<u8> = (1..=255).collect();
    for region in [0, 2, 4, 6, 7] {
        kernel.state().device(gpu).write(region, 0, &pattern);
        // Offset and length, at every alignment.
        for (offset, len) in [(0, 1), (1, 21), (2, 16), (4, 12), (7, 9), (0x40, 64)] {
            let mut data = vec![0; len];
            device.read(region as u32, offset, &mut data).unwrap();
            assert_eq!(data, pattern[offset as usize..offset as usize + len], "{region} {offset}+{len}");
        }
    }
    for (region, offset, data) in
        [(0, 0x1001, &pattern[..21]), (4, 0xf_fff8, &pattern[..8]), (2, 3, &pattern[..2])]
    {
        let before = kernel.state().device(gpu).read(region, offset - 1, 1);
        device.write(region as u32, offset, data).unwrap();
        let device = &kernel.state().devices[&gpu];
        assert_eq!(device.read(region, offset, data.len()), data);
        assert_eq!(device.read(region, offset - 1, 1), before);
    }
    // The last bytes of a region are in it, and the next is not.
    for (region, size) in [(0, 0x1_0000), (2, 0x2000), (4, 0x10_0000), (6, 0x2_0000), (7, 0x100)] {
        device.read(region, size - 4, &mut [0; 4]).unwrap();
        device.read(region, 0, &mut [0; 4]).unwrap();
        for offset in [size - 3, size, size + 1, u64::MAX - 3, u64::MAX] {
            let outside = device.read(region, offset, &mut [0; 4]);
            assert!(matches!(outside, Err(VfioError::OutOfRegion { .. })), "{region} {offset:#x}");
            let outside = device.write(region, offset, &[0; 4]);
            assert!(matches!(outside, Err(VfioError::OutOfRegion { .. })), "{region} {offset:#x}");
        }
    }
    // Regions that the device does not have.
    for region in [1, 8, 9, u32::MAX] {
        assert!(matches!(device.read(region, 0, &mut [0]), Err(VfioError::OutOfRegion { .. })), "{region}");
    }
    assert_eq!(device.region(8).unwrap().size, 0);
    kernel.state().fail(number::REGION_INFO, Errno::IO, 1);
    refused(device.region(3), GPU);
}

#[test]
fn a_short_read_is_an_error_and_accesses_have_a_size() {
    // BARs by 8 bytes, the ROM by 64 KiB, config space by 4.
    for (region, end, expect) in
        [(0u32, 0x104, "4 of 8 bytes"), (6, 0x102, "258 of 65536 bytes"), (7, 0x102, "2 of 4 bytes")]
    {
        let (kernel, gpu, device) = opened_as(Backend::Group, |device| device.regions[7].size = 0x1000);
        kernel.state().device(gpu).file.set_len(Device::at(region.into(), end)).unwrap();
        let mut data = vec![0; if region == 6 { 0x1_0000 } else { 16 }];
        refused(device.read(region, if region == 6 { 0 } else { 0x100 }, &mut data), expect);
    }
}

#[test]
fn a_short_write_is_an_error() {
    let (kernel, gpu, device) = opened(Backend::Group);
    {
        // Linux writes the page that there is, and makes no other.
        let mut state = kernel.state();
        let file = &state.device(gpu).file;
        file.set_len(Device::at(6, 0x1000)).unwrap();
        fcntl_add_seals(file, SealFlags::GROW).unwrap();
    }
    device.write(ROM_REGION, 0, &[1; 0x1000]).unwrap();
    refused(device.write(ROM_REGION, 0, &[2; 0x2000]), "write on 0000:65:00.0 failed");
}

#[test]
fn regions_are_as_the_kernel_says() {
    let (kernel, _, device) = opened(Backend::Iommufd);
    let check = |index, size, access: (bool, bool), mappable: &[(u64, u64)]| {
        let info = device.region(index).unwrap();
        let (readable, writable) = access;
        let expect = RegionInfo { index, size, readable, writable, mappable: mappable.to_vec() };
        assert_eq!(info, expect);
    };
    check(0, 0x1_0000, (true, true), &[(0, 0x1_0000)]);
    check(1, 0, (false, false), &[]);
    check(2, 0x2000, (true, true), &[(0, 0x2000)]);
    check(4, 0x10_0000, (true, true), &[(0, 0x4000), (0x8_0000, 0x1_0000)]);
    check(ROM_REGION, 0x2_0000, (true, false), &[]);
    check(CONFIG_REGION, 0x100, (true, true), &[]);
    check(8, 0, (false, false), &[]);
    // Capabilities take a second call, and an answer is asked for once.
    let asked = kernel.state().count(number::REGION_INFO);
    check(4, 0x10_0000, (true, true), &[(0, 0x4000), (0x8_0000, 0x1_0000)]);
    assert_eq!(kernel.state().count(number::REGION_INFO), asked);
    // One whose size never suffices.
    let mut size = 32;
    kernel.state().twist(number::REGION_INFO, move |bytes, answer| {
        size += 64;
        kernel::put32(bytes, 0, size);
        answer
    });
    refused(device.region(3), "a size that grows");
}

#[test]
fn only_whole_pages_of_mappable_parts_are_mapped() {
    let (kernel, gpu, device) = opened(Backend::Group);
    let check = |region, offset, len, fits: bool| {
        let mapped = device.map(region, offset, len);
        assert_eq!(mapped.is_ok(), fits, "{region} {offset:#x}+{len:#x}: {mapped:?}");
        let Ok(mapped) = mapped else { return };
        assert_eq!(mapped.len(), len);
        assert!(!mapped.is_empty());
        for at in [0, len - 4] {
            let value = 0x1357_0000 | (offset + at) as u32;
            store_u32(&*mapped, at, value).unwrap();
            let bytes = kernel.state().device(gpu).read(region.into(), offset + at, 4);
            assert_eq!(bytes, value.to_le_bytes(), "{offset:#x}+{at:#x}");
        }
    };
    check(0, 0, 0x1_0000, true);
    check(0, 0x3000, 0x1000, true);
    check(4, 0, 0x4000, true);
    check(4, 0x1000, 0x1000, true);
    check(4, 0x8_0000, 0x1_0000, true);
    check(4, 0x8_f000, 0x1000, true);
    for (offset, len) in [
        (0, 0),
        (0, 0x800),
        (0x800, 0x1000),
        (0x1000, 0x800),
        (0, 0x5000),
        (0x4000, 0x1000),
        (0x7_f000, 0x2000),
        (0x8_f000, 0x2000),
        (0x9_0000, 0x1000),
        (0xf_f000, 0x1000),
        (u64::MAX - 0xfff, 0x2000),
    ] {
        check(4, offset, len, false);
    }
    check(0, 0, 0x1_1000, false);
    check(ROM_REGION, 0, 0x1000, false);
    check(1, 0, 0x1000, false);
    // A mapping keeps the device open.
    let mapped = device.map(0, 0, 0x1000).unwrap();
    refused(device.close(), "mapping");
    drop(mapped);
    assert!(!kernel.state().groups[&12].in_container);
}

#[test]
fn interrupts_are_as_the_kernel_says() {
    let (kernel, gpu, device) = opened_as(Backend::Iommufd, |device| device.irqs[3] = None);
    let irq =
        |count, [eventfd, maskable, noresize]: [bool; 3]| IrqInfo { count, eventfd, maskable, noresize };
    let none = irq(0, [false; 3]);
    assert_eq!(device.irq(INTX_IRQ).unwrap(), irq(1, [true, true, false]));
    assert_eq!(device.irq(MSI_IRQ).unwrap(), irq(4, [true, false, true]));
    assert_eq!(device.irq(MSIX_IRQ).unwrap(), irq(8, [true, false, true]));
    assert_eq!(device.irq(ERR_IRQ).unwrap(), none);
    assert_eq!(device.irq(REQ_IRQ).unwrap(), irq(1, [true, false, true]));
    let asked = kernel.state().count(number::IRQ_INFO);
    assert_eq!(device.irq(5).unwrap(), none);
    assert_eq!(kernel.state().count(number::IRQ_INFO), asked, "an index that it does not have");
    kernel.state().device(gpu).irqs[1] = Some((0, 2048));
    assert_eq!(device.irq(MSI_IRQ).unwrap(), irq(2048, [false; 3]));
    for vectors in [2049, u32::MAX] {
        kernel.state().device(gpu).irqs[1] = Some((0, vectors));
        assert!(matches!(device.irq(MSI_IRQ), Err(VfioError::InvalidResponse { .. })), "{vectors}");
    }
    kernel.state().fail(number::IRQ_INFO, Errno::IO, 1);
    assert!(matches!(device.irq(INTX_IRQ), Err(VfioError::System { .. })));
}

#[test]
fn vectors_are_enabled_and_disabled() {
    let (kernel, gpu, device) = opened(Backend::Group);
    let events: Vec<_> = (0..3).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
    let triggers: Vec<_> = events.iter().map(|event| IrqTrigger::Eventfd(event.as_fd())).collect();
    let vectors = |index| {
        let state = kernel.state();
        let triggers = state.devices[&gpu].triggers.iter();
        triggers
            .filter(|((of, _), _)| *of == index)
            .map(|((_, at), to)| (*at, to.is_some()))
            .collect::<Vec<_>>()
    };
    device.set_triggers(MSIX_IRQ, 5, &triggers).unwrap();
    assert_eq!(vectors(MSIX_IRQ), [(5, true), (6, true), (7, true)]);
    kernel.state().device(gpu).fire(MSIX_IRQ, 6);
    for (event, fired) in events.iter().zip([false, true, false]) {
        assert_eq!(rustix::io::read(event, &mut [0; 8]).is_ok(), fired);
    }
    device.set_triggers(MSIX_IRQ, 6, &[IrqTrigger::None]).unwrap();
    assert_eq!(vectors(MSIX_IRQ), [(5, true), (6, false), (7, true)]);
    let made = kernel.state().count(number::SET_IRQS);
    for (index, start) in [(MSIX_IRQ, 6), (MSIX_IRQ, 8), (MSI_IRQ, 2), (MSIX_IRQ, u32::MAX), (9, 0)] {
        refused(device.set_triggers(index, start, &triggers), "no more vectors than the function has");
    }
    device.set_triggers(9, 0, &[]).unwrap();
    assert_eq!(kernel.state().count(number::SET_IRQS), made);
    device.disable_irqs(MSIX_IRQ).unwrap();
    assert_eq!(vectors(MSIX_IRQ), []);
    // Again, when Linux refuses it.
    device.disable_irqs(MSIX_IRQ).unwrap();
    let made = kernel.state().count(number::SET_IRQS);
    device.disable_irqs(5).unwrap();
    assert_eq!(kernel.state().count(number::SET_IRQS), made);
    kernel.state().fail(number::SET_IRQS, Errno::IO, 1);
    refused(device.disable_irqs(INTX_IRQ), "VFIO_DEVICE_SET_IRQS on 0000:65:00.0");

    // The host has too few vectors: all up to the last one count.
    kernel.state().device(gpu).free_vectors = 4;
    match device.set_triggers(MSIX_IRQ, 3, &triggers) {
        Err(VfioError::TooFewVectors { address, wanted, available }) => {
            assert_eq!((address, wanted, available), (gpu, 6, 4));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(vectors(MSIX_IRQ), []);
    device.set_triggers(MSIX_IRQ, 1, &triggers).unwrap();

    refused(device.set_unmask_event(INTX_IRQ, events[0].as_fd()), "VFIO_DEVICE_SET_IRQS");
    device.disable_irqs(MSIX_IRQ).unwrap();
    device.set_triggers(INTX_IRQ, 0, &triggers[..1]).unwrap();
    device.set_unmask_event(INTX_IRQ, events[1].as_fd()).unwrap();
    let unmask = kernel.state().device(gpu).unmask.take().unwrap();
    rustix::io::write(unmask, &1u64.to_ne_bytes()).unwrap();
    rustix::io::read(&events[1], &mut [0; 8]).unwrap();
}

#[test]
fn the_host_says_when_it_wants_the_function_and_when_it_had_an_error() {
    for backend in BACKENDS {
        let mut kernel = Kernel::new();
        let gpu = kernel.add(GPU, 12, &config());
        for severity in ["correctable", "nonfatal", "fatal"] {
            kernel.sysfs(gpu, &format!("aer_dev_{severity}"), "TLP 1\n");
        }
        let device = open_in(&kernel, gpu, &space(&kernel, backend)).unwrap();
        // The eventfds are non-blocking and close-on-exec.
        let flags = fcntl_getfl(kernel.state().device(gpu).triggers[&(ERR_IRQ, 0)].as_ref().unwrap());
        assert!(flags.unwrap().contains(OFlags::NONBLOCK));
        let wanted = device.wanted_back().unwrap();
        assert!(fcntl_getfd(wanted).unwrap().contains(FdFlags::CLOEXEC));
        assert_eq!(device.take_error(), None);
        kernel.sysfs(gpu, "aer_dev_fatal", "SDES 2\nTLP 1\n");
        kernel.state().device(gpu).fire(ERR_IRQ, 0);
        let error = device.take_error().unwrap();
        assert_eq!(error.severity, ErrorSeverity::Fatal);
        assert_eq!(error.evidence, "0000:65:00.0 counted 2 fatal errors (SDES)");
        assert_eq!(device.take_error(), None);

        assert!(!device.is_wanted_back());
        kernel.state().device(gpu).fire(REQ_IRQ, 0);
        assert!(device.is_wanted_back());
        assert!(matches!(DeviceFile::reset_and_prove(&*device), Err(VfioError::WantedBack { .. })));
        assert!(matches!(device.put_at_rest(), Err(VfioError::WantedBack { .. })));
        assert_eq!(kernel.state().device(gpu).reset_count, 0);
    }
    // One that tells neither.
    let (kernel, gpu, device) = opened_as(Backend::Group, |device| device.irqs[3..].fill(None));
    assert!(device.wanted_back().is_none());
    assert_eq!(device.take_error(), None);
    assert!(!device.is_wanted_back());
    assert!(kernel.state().device(gpu).triggers.is_empty());
    std::fs::remove_file(kernel.host.pci_device(gpu).join("driver")).unwrap();
    assert!(device.is_wanted_back());
}

#[test]
fn a_function_that_is_gone_is_told_from_one_that_sleeps() {
    let (kernel, gpu, device) = opened(Backend::Iommufd);
    let check = |expect: &str| {
        let presence = format!("{:?}", device.presence());
        assert!(presence.contains(expect), "{presence}, expected {expect}");
    };
    check("Present");
    kernel.sysfs(gpu, "power_state", "D3cold\n");
    check("Asleep");
    kernel.sysfs(gpu, "power_state", "D3hot\n");
    check("Present");
    // Revision and class, then the subsystem.
    for offset in [0x08, 0x0b, 0x2c, 0x2f] {
        let before = kernel.state().device(gpu).read(7, offset, 1);
        kernel.state().device(gpu).write(7, offset, &[0xff]);
        check("Gone(\"class and subsystem read as");
        kernel.state().device(gpu).write(7, offset, &before);
        check("Present");
    }
    // Command is not its identity.
    kernel.state().device(gpu).write(7, 4, &[6]);
    check("Present");
    kernel.state().device(gpu).file.set_len(0).unwrap();
    check("Gone(\"read on 0000:65:00.0");
}

#[test]
fn a_function_that_was_left_is_put_at_rest() {
    for backend in BACKENDS {
        let (kernel, gpu, device) = opened(backend);
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        device.set_triggers(MSIX_IRQ, 0, &[IrqTrigger::Eventfd(event.as_fd())]).unwrap();
        // Decoding and DMA are on, and it sleeps.
        kernel.state().device(gpu).write(7, 4, &[6, 0]);
        kernel.state().device(gpu).write(7, 0x64, &[3]);
        device.put_at_rest().unwrap();
        let state = kernel.state();
        let device = &state.devices[&gpu];
        assert_eq!(device.read(7, 4, 2), [0, 4], "only INTx is disabled");
        assert_eq!(device.read(7, 0x64, 1), [0]);
        assert!(device.triggers.keys().all(|&(index, _)| index == ERR_IRQ || index == REQ_IRQ));
    }
}

#[test]
fn a_device_is_shared_with_another_process() {
    let (kernel, gpu, device) = opened_as(Backend::Group, |device| device.open_resets = true);
    let parts = device.share().unwrap();
    assert_eq!((parts.address, parts.info, parts.is_virtual), (gpu, device.info(), false));
    let opened = ResetReport { method: None, evidence: ResetEvidence::Register("MSI-X Function Mask") };
    assert_eq!(parts.reset_by_open, Some(opened));
    assert!(parts.wanted.is_some());
    assert_eq!(parts.group.as_ref().map(|(number, _)| *number), Some(12));
    let other = Space::receive(device.space().share().unwrap());
    other.map(0x10_0000, memory(0x1000), DmaPermission::ReadWrite).unwrap();
    assert!(kernel.state().container.is_empty());
    let received = VfioDevice::receive(parts, &other, device.clone()).unwrap();
    // The first device of a group maps what is mapped already.
    assert_eq!(kernel.state().container.keys().copied().collect::<Vec<_>>(), [0x10_0000]);
    let mut id = [0; 2];
    received.read(CONFIG_REGION, 2, &mut id).unwrap();
    assert_eq!(id, [0x84, 0x26]);
    // Its keeper wakes it.
    kernel.state().device(gpu).write(7, 0x64, &[3]);
    DeviceFile::wake(&*received).unwrap();
    assert_eq!(kernel.state().device(gpu).read(7, 0x64, 1), [0]);
    assert_eq!(received.presence(), Presence::Present);
    drop(received);
    // It did not take the group out of the container.
    assert!(kernel.state().groups[&12].in_container);
    device.close().unwrap();
    assert!(!kernel.state().groups[&12].in_container);
}
