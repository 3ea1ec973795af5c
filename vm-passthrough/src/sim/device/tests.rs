//! The simulated function answers as vfio-pci does.

use std::os::fd::{AsFd as _, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::sim::SimConfig;

const PM: u8 = 0x40;
const MSI: u8 = 0x50;
const EXPRESS: u8 = 0x70;
const MSIX: u8 = 0xb0;

/// BAR 0: 4 KiB of memory with the MSI-X table at 0x800. BAR 2: ports. A ROM of 2 KiB. Four vectors of MSI-X, eight of MSI.
fn builder() -> SimDeviceBuilder {
    let mut express = [0; 0x3a];
    (express[0], express[5]) = (0x02, 0x10);
    let mut config = SimConfig::new(0x1234, 0x5678, 0x01_0802);
    config
        .put(0x04, &[0x04, 0x04])
        .put(0x10, &[0x04, 0, 0, 0xfe, 1, 0, 0, 0, 0x01, 0xe0])
        .put(0x3d, &[1])
        .capability(regs::CAP_ID_PM, PM, &[0x03, 0xf8, 0x08, 0x81])
        .capability(regs::CAP_ID_MSI, MSI, &[0x86, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        .capability(regs::CAP_ID_EXP, EXPRESS, &express)
        .capability(regs::CAP_ID_MSIX, MSIX, &[3, 0, 0, 8, 0, 0, 0, 9, 0, 0])
        // A debug port, which vfio-pci hides.
        .capability(0x0a, 0xc0, &[0x77, 0x77])
        .extended(0x0001, 0x100, &[0; 0x28])
        .extended(0x001b, 0x140, &[0x55; 4])
        .extended(0x0003, 0x150, &[1; 8]);
    SimDeviceBuilder::new(config.bytes())
        .bar(0, 0x1000, &[(0, 0x1000)])
        .bar(2, 32, &[])
        .bar(ROM_REGION, 0x800, &[(0, 0x800)])
        .intx()
        .msi(8)
        .msix(4, false)
}

fn open(builder: SimDeviceBuilder) -> Arc<SimDevice> {
    let space = SimSpace::new(vec![], &SimLog::default());
    builder.build("0000:65:00.0".parse().unwrap(), space).unwrap()
}

fn device() -> Arc<SimDevice> {
    open(builder())
}

fn read16(device: &SimDevice, offset: u64) -> u16 {
    let mut value = [0; 2];
    device.read(CONFIG_REGION, offset, &mut value).unwrap();
    u16::from_le_bytes(value)
}

fn write16(device: &SimDevice, offset: u64, value: u16) {
    device.write(CONFIG_REGION, offset, &value.to_le_bytes()).unwrap();
}

fn hardware16(device: &SimDevice, offset: usize) -> u16 {
    get16(&device.config(), offset)
}

/// The error number of what failed.
fn errno<T: std::fmt::Debug>(result: Result<T>) -> i32 {
    match result.unwrap_err() {
        VfioError::System { source, .. } => source.raw_os_error().unwrap(),
        error => panic!("{error}"),
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

#[test]
fn regions_are_those_of_vfio_pci() {
    let device = device();
    let rom = device.region(ROM_REGION).unwrap();
    assert_eq!((rom.readable, rom.writable, rom.mappable), (true, false, vec![]));
    assert_eq!(device.region(8).unwrap().size, 0, "the VGA region");
    assert!(matches!(device.region(9), Err(VfioError::OutOfRegion { region: 9, .. })));
    assert_eq!(errno(device.write(ROM_REGION, 0, &[0])), libc::EINVAL);
    assert_eq!(errno(device.map(ROM_REGION, 0, 0x800)), libc::EINVAL);
}

#[test]
fn interrupt_indexes_are_those_of_vfio_pci() {
    let device = device();
    let info = |index| {
        let IrqInfo { count, maskable, noresize, .. } = device.irq(index).unwrap();
        (count, maskable, noresize)
    };
    assert_eq!(info(INTX_IRQ), (1, true, false));
    assert_eq!(info(MSI_IRQ), (8, false, true));
    assert_eq!(info(MSIX_IRQ), (4, false, false));
    assert_eq!((info(ERR_IRQ), info(REQ_IRQ)), ((1, false, true), (1, false, true)));
    let conventional = open(SimDeviceBuilder::new(SimConfig::new(1, 2, 3).bytes()));
    assert_eq!(conventional.irq(ERR_IRQ).unwrap().count, 0);
}

#[test]
fn opening_enables_decoding_and_disables_bus_mastering() {
    assert_eq!(hardware16(&device(), 4), 0x0003);
    let memory = open(SimDeviceBuilder::new(SimConfig::new(1, 2, 3).bytes()).bar(0, 0x1000, &[]));
    assert_eq!(read16(&memory, 4), 0x0002);
}

/// Checks each register: the value written, the value read back, and the value in the hardware.
#[test]
fn config_space_is_written_as_vfio_pci_permits() {
    let check = |offset: u64, value: u16, seen: u16, reached: u16| {
        let device = device();
        write16(&device, offset, value);
        assert_eq!(read16(&device, offset), seen, "read back at {offset:#x}");
        assert_eq!(hardware16(&device, offset as usize), reached, "hardware at {offset:#x}");
    };
    let at = |capability: u8, register: u16| u64::from(capability) + u64::from(register);
    check(0x00, 0xffff, 0x1234, 0x1234);
    // INTx Disable is virtual; masking the pin, Linux sets it in the hardware too.
    check(0x04, 0x0407, 0x0407, 0x0407);
    check(0x06, 0xffff, 0x0010, 0x0010);
    check(0x08, 0xffff, 0x0201, 0x0201);
    check(0x0c, 0xffff, 0xffff, 0xffff);
    check(0x10, 0xffff, 0xf004, 0x0004);
    check(0x14, 0xffff, 0xffff, 0x0001);
    check(0x18, 0xffff, 0xffe1, 0xe001);
    check(0x1c, 0xffff, 0, 0);
    check(0x2c, 0, 0x1234, 0x1234);
    check(0x30, 0xffff, 0xf801, 0);
    check(0x3c, 0xffff, 0x01ff, 0x0100);
    // PME is hidden; the Linux kernel changes the power state.
    check(at(PM, 2), 0, 0x0003, 0xf803);
    check(at(PM, 4), 0xffff, 0x7eff, 0xffff);
    // Only an ioctl enables MSI; messages are Linux's.
    check(at(MSI, 2), 0xffff, 0x01fe, 0x0186);
    check(at(MSI, 4), 0xffff, 0xffff, 0);
    check(at(MSI, 12), 0xffff, 0xffff, 0);
    check(at(MSI, 16), 0xffff, 0xffff, 0xffff);
    check(at(MSIX, 2), 0xffff, 0x0003, 0x0003);
    check(at(EXPRESS, 0x0a), 0xffff, 0, 0);
    check(at(EXPRESS, 0x10), 0xffff, 0, 0);
    check(at(EXPRESS, 0x28), 0xffff, 0xffdf, 0xffdf);
    check(0x154, 0, 0x0101, 0x0101);
    // Registers that belong to no capability, and hidden ones, are the hardware's.
    check(0xf0, 0xabcd, 0xabcd, 0xabcd);
    check(0x400, 0xabcd, 0xabcd, 0xabcd);
}

#[test]
fn payload_size_is_the_hosts_and_the_least_read_request() {
    let device = device();
    device.set_config(usize::from(EXPRESS) + 8, &0x0040u16.to_le_bytes());
    write16(&device, u64::from(EXPRESS) + 8, 0x1080);
    assert_eq!(read16(&device, u64::from(EXPRESS) + 8), 0x1080);
    assert_eq!(hardware16(&device, usize::from(EXPRESS) + 8), 0x2040);
}

#[test]
fn capabilities_that_vfio_pci_does_not_know_are_unlinked() {
    let device = device();
    let mut config = vec![0; 4096];
    device.read(CONFIG_REGION, 0, &mut config).unwrap();
    let ids: Vec<_> = crate::pci::config::capabilities(&config).iter().map(|known| known.id).collect();
    assert_eq!(ids, [0x01, 0x05, 0x10, 0x11]);
    let ids: Vec<_> =
        crate::pci::config::extended_capabilities(&config[..]).iter().map(|known| known.id).collect();
    assert_eq!(ids, [0x0001, 0x0003]);
}

#[test]
fn a_virtual_function_has_the_ids_that_linux_knows() {
    let mut config = SimConfig::new(0xffff, 0xffff, 0x02_0000);
    config.put(0x3d, &[1]);
    let device =
        open(SimDeviceBuilder::new(config.bytes()).bar(0, 0x1000, &[]).virtual_function(0x8086, 0x154c));
    assert!(device.is_virtual());
    assert_eq!((read16(&device, 0), read16(&device, 2)), (0x8086, 0x154c));
    assert_eq!(read16(&device, 0x3c), 0, "it has no pin");
    // It has no memory enable bit, and always decodes.
    assert_eq!((read16(&device, 4), hardware16(&device, 4)), (0x0002, 0));
    write16(&device, 4, 0);
    assert_eq!(read16(&device, 4), 0);
    device.read(0, 0, &mut [0; 4]).unwrap();
}

#[test]
fn bars_answer_while_they_decode() {
    let device = device();
    let read = |region| device.read(region, 0, &mut [0; 4]);
    device.write(0, 0, &[1, 2, 3, 4]).unwrap();
    write16(&device, 4, 0);
    assert_eq!(errno(read(0)), libc::EIO);
    assert_eq!(errno(read(ROM_REGION)), libc::EIO);
    assert_eq!(errno(device.write(0, 0, &[0])), libc::EIO);
    read(2).unwrap();
    write16(&device, 4, 2);
    read(0).unwrap();
    write16(&device, u64::from(PM) + 4, 3);
    assert_eq!(errno(read(0)), libc::EIO, "it sleeps");
}

#[test]
fn the_msix_table_is_out_of_reach() {
    let device = device();
    device.set_memory(0, 0x7f8, &[7; 0x50]).unwrap();
    device.write(0, 0x7fc, &[9; 0x48]).unwrap();
    let mut data = [0; 0x50];
    device.read(0, 0x7f8, &mut data).unwrap();
    let expect = [&[7; 4][..], &[9; 4], &[0xff; 0x40], &[9; 4], &[7; 4]].concat();
    assert_eq!(data[..], expect);
    assert_eq!(device.memory(0, 0x800, 0x40), [7; 0x40]);
}

#[test]
fn a_function_that_is_gone_reads_ones_and_fails_no_access() {
    let device = device();
    device.vanish();
    // vfio-pci answers the IDs, INTx Disable and PME from its copy.
    assert_eq!((read16(&device, 0), read16(&device, 4), read16(&device, 6)), (0x1234, 0xfbff, 0xffff));
    assert_eq!((read16(&device, 8), read16(&device, u64::from(PM) + 4)), (0xffff, 0x7eff));
    let mut data = [0; 4];
    device.read(0, 0, &mut data).unwrap();
    assert_eq!(data, [0xff; 4]);
    device.write(0, 0, &[0; 4]).unwrap();
    write16(&device, 4, 6);
    assert_eq!(hardware16(&device, 4), 3);
    device.set_triggers(MSIX_IRQ, 0, &[IrqTrigger::None]).unwrap();
    assert_eq!(errno(device.reset()), libc::ENOTTY);
}

#[test]
fn a_reset_keeps_what_linux_restores() {
    let device = device();
    write16(&device, 4, 0x0407);
    write16(&device, u64::from(EXPRESS) + 8, 0x0010);
    write16(&device, 0xf0, 0xabcd);
    write16(&device, 0x10, 0xf000);
    device.reset().unwrap();
    assert_eq!((read16(&device, 4), read16(&device, u64::from(EXPRESS) + 8)), (0x0407, 0x0010));
    assert_eq!((read16(&device, 0xf0), read16(&device, 0x10)), (0, 0xf004));
    // By the guest's own means.
    write16(&device, u64::from(EXPRESS) + 8, regs::EXP_DEVCTL_BCR_FLR);
    assert_eq!((device.resets(), read16(&device, u64::from(EXPRESS) + 8)), (2, 0));
}

#[test]
fn a_function_without_reset_says_so_before_it_is_locked() {
    let device = open(builder().without_reset());
    device.want_back();
    assert_eq!(errno(device.reset()), libc::EINVAL);
    let device = self::device();
    device.want_back();
    assert_eq!(errno(device.reset()), libc::EAGAIN);
}

#[test]
fn a_failure_takes_the_triggers_of_its_block() {
    let device = device();
    device.set_host_vectors(3);
    let events = [event(), event()];
    let triggers = events.each_ref().map(|event| IrqTrigger::Eventfd(event.as_fd()));
    device.set_triggers(MSIX_IRQ, 0, &triggers).unwrap();
    assert!(device.fire(MSIX_IRQ, 1));
    // The third vector is allocated, the fourth is not.
    let wider = [triggers[0], triggers[1], triggers[0]];
    assert_eq!(errno(device.set_triggers(MSIX_IRQ, 1, &wider)), libc::ENOSPC);
    assert_eq!([0, 1, 2].map(|vector| device.fire(MSIX_IRQ, vector)), [true, false, false]);
    // Vectors of MSI are allocated together.
    device.disable_irqs(MSIX_IRQ).unwrap();
    device.set_triggers(MSI_IRQ, 0, &triggers).unwrap();
    assert_eq!(errno(device.set_triggers(MSI_IRQ, 1, &triggers)), libc::EINVAL);
    assert_eq!([0, 1].map(|vector| device.fire(MSI_IRQ, vector)), [true, false]);
}

#[test]
fn the_pin_is_unmasked_by_one_eventfd() {
    let device = device();
    let (trigger, unmask) = (event(), event());
    let set = || device.set_unmask_event(INTX_IRQ, unmask.as_fd());
    assert_eq!(errno(set()), libc::EINVAL, "it is not enabled");
    device.set_triggers(INTX_IRQ, 0, &[IrqTrigger::Eventfd(trigger.as_fd())]).unwrap();
    set().unwrap();
    assert_eq!(errno(set()), libc::EBUSY);
    device.disable_irqs(INTX_IRQ).unwrap();
    device.set_triggers(MSIX_IRQ, 0, &[IrqTrigger::None]).unwrap();
    assert_eq!(errno(device.set_unmask_event(MSIX_IRQ, unmask.as_fd())), libc::ENOTTY);
}

/// Clearing INTx Disable unmasks the pin, as `vfio_basic_config_write` does.
#[test]
fn intx_disable_masks_and_unmasks_the_pin() {
    let device = device();
    let trigger = event();
    device.set_triggers(INTX_IRQ, 0, &[IrqTrigger::Eventfd(trigger.as_fd())]).unwrap();
    let fired = || rustix::io::read(&trigger, &mut [0; 8]).is_ok();
    device.set_pin(true);
    assert!(fired() && !device.update_pin());
    assert_eq!(hardware16(&device, 4) & regs::COMMAND_INTX_DISABLE, regs::COMMAND_INTX_DISABLE);
    assert_eq!(read16(&device, 4) & regs::COMMAND_INTX_DISABLE, 0);
    write16(&device, 4, 0x0403);
    assert!(!fired());
    write16(&device, 4, 0x0003);
    assert!(fired());
}

/// As in the address space that the Linux kernel makes: memory that is mapped already takes no ioctl.
#[test]
fn only_what_takes_an_ioctl_fails() {
    use crate::vfio::DmaPermission::ReadWrite;
    let space = SimSpace::new(vec![0..=0xffff], &SimLog::default());
    let memory = MmapRegion::<()>::new(0x1000).unwrap();
    let memory: Arc<dyn Mapping> = Arc::new(SharedMemory::new(Arc::new(memory)));
    space.map(0, memory.clone(), ReadWrite).unwrap();
    space.fail(Fault::MapDma, 0);
    space.fail(Fault::UnmapDma, 0);
    space.map(0, memory.clone(), ReadWrite).unwrap();
    space.map(0x1000, memory.clone(), ReadWrite).unwrap_err();
    space.unmap(0).unwrap();
    space.unmap(0).unwrap_err();
    let overlapping = space.map(0x800, memory, ReadWrite).unwrap_err().to_string();
    assert!(overlapping.contains("is mapped already"), "{overlapping}");
}
