//! Which accesses of the guest reach the device, and in which pieces.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use super::*;
use crate::PciAddress;
use crate::vfio::{
    AddressSpace, DeviceFile, DeviceInfo, IrqInfo, IrqTrigger, MSI_IRQ, Mapping, RegionInfo, Result,
    VfioError,
};

/// Region, offset and length.
type Access = (u32, u64, usize);

/// A simulated function that records accesses.
#[derive(Debug)]
struct Recorder {
    sim: Arc<SimDevice>,
    /// Reads and writes.
    accesses: Mutex<Vec<Access>>,
    /// Whether eventfds can signal its interrupts.
    eventfd: bool,
    /// How many vectors the host has for MSI whenever it is enabled, which fails then.
    available: Option<u32>,
}

impl Recorder {
    /// Attaches a function whose MSI can't be enabled where the host has `available` vectors.
    fn attach(eventfd: bool, available: Option<u32>) -> (Rig, Arc<Self>) {
        let rig = Rig::with(builder(&config(4), 4, false));
        let accesses = Mutex::default();
        let recorder = Arc::new(Self { sim: rig.sim.clone(), accesses, eventfd, available });
        let device = VfioPciDevice::new(recorder.clone(), rig.vmm.clone()).unwrap();
        device.attach().unwrap();
        recorder.take();
        rig.log.take();
        (Rig { device, ..rig }, recorder)
    }

    fn note(&self, region: u32, offset: u64, len: usize) {
        self.accesses.lock().unwrap().push((region, offset, len));
    }

    fn take(&self) -> Vec<Access> {
        std::mem::take(&mut *self.accesses.lock().unwrap())
    }
}

impl DeviceFile for Recorder {
    fn address(&self) -> PciAddress {
        self.sim.address()
    }

    fn space(&self) -> Arc<dyn AddressSpace> {
        self.sim.space()
    }

    fn info(&self) -> DeviceInfo {
        self.sim.info()
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        self.sim.region(index)
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.note(region, offset, data.len());
        self.sim.read(region, offset, data)
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.note(region, offset, data.len());
        self.sim.write(region, offset, data)
    }

    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        self.sim.map(region, offset, len)
    }

    fn irq(&self, index: u32) -> Result<IrqInfo> {
        let info = self.sim.irq(index)?;
        Ok(IrqInfo { eventfd: info.eventfd && self.eventfd, ..info })
    }

    fn set_triggers(&self, index: u32, start: u32, triggers: &[IrqTrigger<'_>]) -> Result<()> {
        if let Some(available) = self.available.filter(|_| index == MSI_IRQ) {
            let wanted = triggers.len() as u32;
            return Err(VfioError::TooFewVectors { address: self.address(), wanted, available });
        }
        self.sim.set_triggers(index, start, triggers)
    }

    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()> {
        self.sim.set_unmask_event(index, event)
    }

    fn disable_irqs(&self, index: u32) -> Result<()> {
        self.sim.disable_irqs(index)
    }

    fn reset(&self) -> Result<()> {
        self.sim.reset()
    }

    fn kvm_file(&self) -> Option<BorrowedFd<'_>> {
        self.sim.kvm_file()
    }
}

/// Registers may act only on an access of their width.
#[test]
fn accesses_beside_the_msix_structures_are_not_split() {
    let (rig, recorder) = Recorder::attach(true, None);
    rig.write16(4, 2);
    // In BAR 2, the table of 4 entries is from 0x2000 to 0x2040, and the pending bits are from 0x3000 to 0x3008.
    for (bar, offset, len) in [
        (0, 0x2000, 8),
        (0, 0x3000, 4),
        (0, 0xf_fff8, 8),
        (2, 0, 4),
        (2, 0x1ff8, 8),
        (2, 0x2040, 8),
        (2, 0x2ff8, 8),
        (2, 0x3008, 8),
        (2, 0xfff8, 8),
        (4, 0x10, 2),
    ] {
        recorder.take();
        let mut data = [0; 8];
        rig.device.bar_read(bar, offset, &mut data[..len]).unwrap();
        rig.device.bar_write(bar, offset, &data[..len]).unwrap();
        assert_eq!(recorder.take(), [(bar.into(), offset, len); 2]);
    }
    // The table itself is not the device's.
    let mut first = [0xff];
    rig.device.bar_read(2, 0x2000, &mut first).unwrap();
    assert_eq!((first, recorder.take()), ([0], vec![]));
}

#[test]
fn long_accesses_to_config_space_take_each_register() {
    let rig = Rig::new();
    // BAR 0 of 64 bits, BAR 2, and BAR 3, which has ports.
    let registers = [0x8000_0000u32, 0x10, 0xc000_0000, 0xe000];
    rig.device.config_write(0x10, registers.map(u32::to_le_bytes).as_flattened());
    let expect = [0x8000_000c, 0x10, 0xc000_0000, 0xe001];
    assert_eq!([0x10, 0x14, 0x18, 0x1c].map(|offset| rig.read32(offset)), expect);
    let mut data = [0; 16];
    rig.device.config_read(0x10, &mut data);
    assert_eq!(data, *expect.map(u32::to_le_bytes).as_flattened());
}

#[test]
fn power_states_that_are_not_offered_change_nothing() {
    for state in [0, 3] {
        for refused in [1, 2] {
            let rig = Rig::new();
            rig.write16(PM + 4, state);
            rig.write16(PM + 4, refused);
            let now = (rig.read16(PM + 4) & 3, rig.hardware16(PM + 4) & 3);
            assert_eq!(now, (state, state), "D{refused}, in D{state}");
        }
    }
}

#[test]
fn a_register_beside_the_command_does_not_reach_the_device() {
    let (rig, recorder) = Recorder::attach(true, None);
    rig.write32(0, 0x1234_5678);
    assert_eq!(recorder.take(), []);
    // The pin is disabled already when MSI-X is enabled.
    rig.write16(MSIX + 2, 0x8000);
    let log = rig.log.take();
    assert!(!log.is_empty() && !log.iter().any(|line| line.starts_with("config")), "{log:?}");
}

#[test]
fn interrupts_that_no_eventfd_signals_are_hidden() {
    let seen = |eventfd| {
        let (rig, _) = Recorder::attach(eventfd, None);
        [MSI, MSIX].map(|offset| rig.read8(offset))
    };
    assert_eq!(seen(true), [0x05, 0x11]);
    assert_eq!(seen(false), [0, 0]);
}

#[test]
fn a_number_of_vectors_that_makes_no_sense_is_not_tried() {
    for available in [0, 4, u32::MAX] {
        let (rig, recorder) = Recorder::attach(true, Some(available));
        // 4 of 8 vectors.
        rig.write16(MSI + 2, 0x0021);
        assert_eq!((rig.read16(MSI + 2) & 0x71, recorder.sim.enabled(MSI_IRQ)), (0x21, 0), "{available}");
    }
}
