//! A device for tests: an id, one 4 KiB memory BAR, and a count of resets.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vm_passthrough::PciAddress;
use vm_passthrough::guest::{BarMap, DecodedBar, DeviceError, PassthroughDevice};
use vm_passthrough::pci::regs;
use vm_passthrough::vfio::ErrorSeverity;

use super::error::MachineError;
use super::pci::{ExpectedFunction, PciRoot};

#[derive(Debug)]
pub(crate) struct FakeDevice {
    address: PciAddress,
    resets: AtomicUsize,
    /// How long one takes.
    reset: Duration,
    config: Mutex<[u8; 128]>,
    lines: Mutex<Option<[u32; 4]>>,
    bars: Arc<BarMap>,
}

impl FakeDevice {
    pub(crate) const ID: u32 = 0x5678_1234;
    const BAR_SIZE: u32 = 0x1000;
    /// Where a read of its BAR takes longer than a vCPU may take to stop.
    pub(crate) const STUCK: u64 = 0x800;

    pub(crate) fn new(index: u8) -> Self {
        Self::with_reset(index, Duration::ZERO)
    }

    /// Function `function` of device `device`.
    pub(crate) fn at(device: u8, function: u8) -> Self {
        Self { address: PciAddress::new(0, 1, device, function).unwrap(), ..Self::new(device) }
    }

    pub(crate) fn with_reset(index: u8, reset: Duration) -> Self {
        let mut config = [0; 128];
        config[..4].copy_from_slice(&Self::ID.to_le_bytes());
        let address = PciAddress::new(0, 1, index, 0).unwrap();
        let (resets, config) = (AtomicUsize::new(0), Mutex::new(config));
        Self { address, resets, reset, config, lines: Mutex::default(), bars: Arc::default() }
    }

    /// This one, which tells `bars` where its BAR decodes.
    pub(crate) fn on(self, bars: &Arc<BarMap>) -> Self {
        Self { bars: bars.clone(), ..self }
    }

    /// Gives it a PCI Express capability with this link, and a payload of 256 bytes.
    pub(crate) fn set_link(&self, most: u16, now: u16) {
        const EXPRESS: u16 = 0x40;
        let mut config = self.config.lock().unwrap();
        let mut put = |offset: u16, value: u16| {
            config[usize::from(offset)..][..2].copy_from_slice(&value.to_le_bytes());
        };
        put(regs::STATUS, regs::STATUS_CAP_LIST);
        put(regs::CAPABILITY_LIST, EXPRESS);
        put(EXPRESS, regs::CAP_ID_EXP.into());
        put(EXPRESS + regs::EXP_DEVCTL, 1 << 5);
        put(EXPRESS + regs::EXP_LNKCAP, most);
        put(EXPRESS + regs::EXP_LNKSTA, now);
    }

    pub(crate) fn resets(&self) -> usize {
        self.resets.load(Ordering::Relaxed)
    }

    /// Where its pins were said to lead to.
    pub(crate) fn lines(&self) -> Option<[u32; 4]> {
        *self.lines.lock().unwrap()
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.config.lock().unwrap()[at..at + 4].try_into().unwrap())
    }
}

/// A device that is expected, and has arrived.
pub(crate) fn add(root: &PciRoot, device: Arc<dyn PassthroughDevice>) -> Result<(), MachineError> {
    root.expect(ExpectedFunction::like(&*device))?;
    root.arrive(device)
}

impl PassthroughDevice for FakeDevice {
    fn address(&self) -> PciAddress {
        self.address
    }

    fn attach(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn detach(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn connect_pins(&self, lines: [u32; 4]) {
        *self.lines.lock().unwrap() = Some(lines);
        // Function 0 has INTA, function 1 INTB.
        self.config.lock().unwrap()[0x3d] = self.address.function() + 1;
    }

    fn report_error(&self, _severity: ErrorSeverity) -> bool {
        true
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let config = self.config.lock().unwrap();
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let mut config = self.config.lock().unwrap();
        for (at, byte) in (usize::from(offset)..).zip(data) {
            if at == 4 {
                config[at] = byte & 7;
            } else if at == 0x3c {
                config[at] = *byte;
            } else if (0x10..0x14).contains(&at) {
                config[at] = byte & (!(Self::BAR_SIZE - 1)).to_le_bytes()[at - 0x10];
            }
        }
        drop(config);
        let bar =
            DecodedBar { bar: 0, address: self.word(0x10).into(), size: Self::BAR_SIZE.into(), io: false };
        let decodes = self.word(4) & 2 != 0;
        self.bars.set(self.address, if decodes { std::slice::from_ref(&bar) } else { &[] });
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        if bar != 0 || offset + data.len() as u64 > Self::BAR_SIZE.into() {
            return Err(DeviceError::OutOfRange { bar, offset, len: data.len() });
        }
        if offset == Self::STUCK {
            std::thread::sleep(Duration::from_secs(12));
        }
        data.fill(0xa5);
        Ok(())
    }

    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), DeviceError> {
        std::thread::sleep(self.reset);
        self.resets.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
