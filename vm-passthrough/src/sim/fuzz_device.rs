//! A hostile device and a hostile guest, for fuzzing: bytes decide what the device shows and what the guest does.

use std::sync::Arc;

use super::{Fault, SimDeviceBuilder, SimLog, SimSpace, SimVmm};
use crate::guest::{PassthroughDevice, VfioPciDevice};
use crate::vfio::{MSI_IRQ, MSIX_IRQ};

/// RAM of the guest.
const RAM: (u64, u64) = (0, 0x1_0000);
/// Where the pins of the device's slot lead to.
const LINES: [u32; 4] = [16, 17, 18, 19];
/// Extended capabilities that no guest may see: SR-IOV, ARI, ATS, PRI, PASID, resizable BARs, and those of virtual
/// functions.
const HIDDEN: [u16; 8] = [0x10, 0x0e, 0x0f, 0x11, 0x13, 0x1b, 0x15, 0x24];

/// Feeds arbitrary bytes to a device: the first say what it is, the rest what the guest does to it. It must neither
/// panic nor hang; what it shows must end and hide what it has to; what it maps must not lie over RAM; and when it is
/// detached nothing may be left.
#[doc(hidden)]
pub fn fuzz_config_space(data: &[u8]) {
    let mut input = Input(data);
    let log = SimLog::default();
    let Some(address) = crate::PciAddress::new(0, 0x65, 0, 0) else { return };
    let builder = device(&mut input).log(&log);
    let space = SimSpace::new(vec![0..=u64::MAX], &log);
    let (Ok(sim), Ok(vmm)) = (builder.build(address, space.clone()), SimVmm::new(&[RAM], &log)) else {
        return;
    };
    let Ok(device) = VfioPciDevice::new(sim.clone(), vmm.clone()) else { return };
    let attached = device.attach().is_ok();
    device.connect_pins(LINES);

    for _ in 0..256 {
        let Some(what) = input.byte() else { break };
        let offset = input.number(2);
        let len = 1 << (what >> 4 & 0b11);
        let mut bytes = [0; 8];
        bytes.iter_mut().for_each(|byte| *byte = input.byte().unwrap_or(0));
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        match what & 0xf {
            0 => device.config_write(offset as u16, bytes),
            1..=3 => device.config_write(offset as u16 % 0x110, bytes),
            4 => device.config_read(offset as u16, bytes),
            // A guest's ordinary driver: decoding, bus master, MSI-X.
            5 => device.config_write(0x04, &[bytes.first().copied().unwrap_or(0), 0]),
            6 => {
                let result = device.bar_read((offset % 7) as u8, offset, bytes);
                assert!(
                    result.is_ok() || bytes.iter().all(|&byte| byte == 0xff),
                    "a failed read shows something"
                );
            }
            7..=9 => drop(device.bar_write((offset % 7) as u8, offset / 7, bytes)),
            10 => {
                sim.fire(MSI_IRQ, offset as usize);
                sim.fire(MSIX_IRQ, offset as usize);
                vmm.delivered();
                sim.set_pin(offset & 1 != 0);
                assert!(vmm.asserted().iter().all(|line| LINES.contains(line)), "another line is asserted");
                vmm.end_interrupt(LINES[offset as usize % 4]);
            }
            11 => drop(device.reset()),
            12 => faults(&sim, &vmm, offset),
            13 => {
                sim.heal();
                vmm.heal();
            }
            14 => {
                let found = vmm.bars().find(offset << 12);
                assert!(found.is_none_or(|hit| hit.bar < 7));
            }
            _ if offset < 0x400 => sim.vanish(),
            // The MSI-X table of the device that the test below has.
            _ => drop(device.bar_write(2, 0x2000 + offset % 0x400, bytes)),
        }
        for (start, len) in vmm.maps() {
            assert!(start >= RAM.1 && len != 0, "{start:#x} is mapped over RAM");
        }
    }
    if attached {
        walk(&*device);
    }
    sim.heal();
    vmm.heal();
    // It fails when the device is gone; all else is undone even then.
    drop(device.detach());
    assert_eq!(
        (vmm.maps(), vmm.routes(), vmm.files(), space.maps(), vmm.bars().len()),
        (vec![], 0, 0, vec![], 0),
        "something is left"
    );
}

/// A device of arbitrary bytes: mostly like an endpoint, so that it is not just refused.
fn device(input: &mut Input<'_>) -> SimDeviceBuilder {
    let flags = input.byte().unwrap_or(0);
    let mut config = vec![0; if flags & 1 == 0 { 4096 } else { 256 }];
    for _ in 0..input.byte().unwrap_or(0) {
        // Pieces of arbitrary bytes at arbitrary places.
        let at = input.number(2) as usize % config.len();
        let len = usize::from(input.byte().unwrap_or(0) & 31);
        for place in config.iter_mut().skip(at).take(len) {
            *place = input.byte().unwrap_or(0);
        }
    }
    if flags & 2 == 0
        && let Some(kind) = config.get_mut(0x0e)
    {
        *kind = 0;
    }
    if flags & 4 == 0
        && let Some(status) = config.get_mut(0x06)
    {
        *status |= 0x10;
    }
    let mut builder = SimDeviceBuilder::new(config);
    for index in 0..7 {
        let log = input.byte().unwrap_or(0) & 63;
        if (4..=24).contains(&log) {
            let size = 1u64 << log;
            let start = u64::from(input.byte().unwrap_or(0)) << 8;
            builder = builder.bar(index, size, &[(start.min(size), size - start.min(size))]);
        }
    }
    if flags & 32 != 0 {
        builder = builder.intx();
    }
    builder = builder.msi(input.byte().unwrap_or(0).into());
    // Vectors take descriptors: few enough that a fuzzer has them.
    builder = builder.msix((input.number(2) % 128) as u32, flags & 8 != 0);
    if flags & 16 != 0 { builder.without_reset() } else { builder }
}

fn faults(sim: &Arc<super::SimDevice>, vmm: &Arc<SimVmm>, which: u64) {
    match which % 6 {
        0 => sim.fail(Fault::SetTriggers),
        1 => sim.fail(Fault::MapBar),
        2 => sim.fail(Fault::Reset),
        3 => sim.fail(Fault::DisableIrqs),
        4 => vmm.fail(Fault::MapGuest),
        _ => vmm.fail(Fault::SetRoute),
    }
}

/// Walks what the guest sees as an operating system does.
fn walk(device: &dyn PassthroughDevice) {
    let read = |offset: u16| {
        let mut data = [0; 4];
        device.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    };
    if read(0) == u32::MAX {
        // Gone, or it never was.
        return;
    }
    let mut offset = read(0x34) as u8;
    for step in 0.. {
        assert!(step <= 48, "the capability list does not end");
        if offset == 0 {
            break;
        }
        let [id, next, ..] = read(offset.into()).to_le_bytes();
        assert!(
            offset >= 0x40 && [0x01, 0x05, 0x09, 0x10, 0x11].contains(&id),
            "{id:#x} at {offset:#x} is shown"
        );
        offset = next;
    }
    let mut offset = 0x100;
    for step in 0.. {
        assert!(step <= 960, "the extended capability list does not end");
        if offset == 0 {
            break;
        }
        let header = read(offset);
        assert!(offset >= 0x100 && !HIDDEN.contains(&(header as u16)), "{header:#x} at {offset:#x} is shown");
        offset = (header >> 20) as u16;
    }
}

/// Bytes that are used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// A number of `len` bytes; zeroes where there are none left.
    fn number(&mut self, len: u32) -> u64 {
        (0..len).fold(0, |number, _| number << 8 | u64::from(self.byte().unwrap_or(0)))
    }
}
