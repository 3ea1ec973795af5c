//! A modelled GPU: a PCI function with boot registers, power management, a doorbell, one channel that does DMA, an interrupt, a
//! thermometer, and faults on demand.
//!
//! Its registers are where NVIDIA publishes them, but for the thermometer, the throttle and those that make a channel, from
//! [`SimGpu::TEMPERATURE`] on, which no chip has. What its channel understands of methods is what [`gpu::Ring`](crate::gpu::Ring)
//! sends.
//!
//! It is a [`DeviceFile`] like one that VFIO opened, so that a [`VfioPciDevice`](crate::guest::VfioPciDevice) gives it to a guest.

mod engine;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::engine::{Channel, DISPATCH};
use super::{SimConfig, SimDevice, SimDeviceBuilder, SimLog, SimSpace};
use crate::PciAddress;
use crate::gpu::{ChannelSetup, Clock, DOORBELL, Layout, RegisterError, identify};
use crate::pci::regs;
use crate::vfio::{
    AddressSpace, CONFIG_REGION, DeviceFile, DeviceInfo, IrqInfo, IrqTrigger, MSI_IRQ, Mapping, RegionInfo,
    ResetReport, Result, VfioError,
};

/// Where its capabilities are: power management, message signalled interrupts, PCI Express.
const PM: u16 = 0x60;
const MSI: u8 = 0x68;
const EXPRESS: u8 = 0x78;
/// Bytes of its BAR 0.
const BAR_0: u64 = 16 << 20;
/// Nanoseconds since it was powered: `NV_PTIMER_TIME_0` and `NV_PTIMER_TIME_1`, the lower and the upper half.
const PTIMER_TIME_0: u64 = 0x9400;
const PTIMER_TIME_1: u64 = 0x9410;
/// What a register that is not there reads (`dev_pri_ringstation_sys.h`: a decode error).
const NO_REGISTER: u32 = 0xbadf_1100;

/// Something that a modelled GPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuFault {
    /// It takes no work from its ring.
    Hang,
    /// Its registers read this, and config space is as it was.
    Registers(u32),
    /// The boot register reads this and never tells the chip.
    Boot(u32),
    /// It stays in the power state that it is in.
    StuckPower,
    /// These bits of Command stay as they are.
    StuckCommand(u16),
    /// Its clock stands still.
    Frozen,
    /// It does not write `GP_GET` back.
    SilentGet,
    /// It raises no interrupt.
    NoInterrupt,
}

/// A modelled GPU, behind VFIO. Its chip is GH100.
#[derive(Debug)]
pub struct SimGpu {
    device: Arc<SimDevice>,
    space: Arc<SimSpace>,
    clock: Arc<dyn Clock>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    boot_0: u32,
    /// How long the boot register does not tell after a reset, and until when it does not now.
    boot_time: Duration,
    ready_at: Duration,
    faults: BTreeSet<GpuFault>,
    /// Millidegrees.
    temperature: i32,
    throttle: u32,
    channel: Option<Channel>,
    /// What [`SimGpu::CHANNEL`] holds below its control register: the address, in two halves, and the number of entries.
    ring: [u32; 3],
    /// Number of channels made, by which their handles differ.
    channels: u32,
    /// Whether a doorbell only rings, and the work is done by [`SimGpu::step`].
    is_manual: bool,
    soft_reset: bool,
}

impl Inner {
    /// Makes a channel. Its handle.
    fn attach(&mut self, layout: Layout) -> u32 {
        self.channels += 1;
        self.channel = Some(Channel::new(self.channels, layout));
        self.channels
    }
}

impl SimGpu {
    /// The register of its temperature in millidegrees Celsius, of two's complement. No chip has it there.
    pub const TEMPERATURE: u64 = 0xff_0000;
    /// The register by which it is slowed down, in hundredths of its speed: 0 for full speed, 100 for none. No chip has it there.
    pub const THROTTLE: u64 = 0xff_0004;
    /// Four registers that stand for all by which a chip's driver makes a channel: the lower and the upper half of a ring's
    /// address, its number of entries, and one that makes a channel of it by 1, ends it by 0, and reads its handle, or 0 for none.
    /// No chip has them there.
    pub const CHANNEL: u64 = 0xff_0010;
    const CHANNEL_CONTROL: u64 = Self::CHANNEL + 12;
    /// The register that counts nanoseconds: it goes on for as long as the function lives.
    pub const HEARTBEAT: u64 = PTIMER_TIME_0;

    /// A GPU at rest: in D0, with memory decoding and bus mastering turned off, 40 °C warm. All that it does is noted in `log`.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub fn new(address: PciAddress, clock: Arc<dyn Clock>, log: &SimLog) -> io::Result<Arc<Self>> {
        let mut config = SimConfig::new(0x10de, 0x2330, 0x03_0200);
        // Version 3; No_Soft_Reset.
        config.capability(regs::CAP_ID_PM, PM as u8, &[0x03, 0x00, 0x08, 0x00, 0x00, 0x00]);
        // One vector, at a 64-bit address.
        config.capability(regs::CAP_ID_MSI, MSI, &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // An endpoint, version 2; Function Level Reset.
        let mut express = [0; 0x3a];
        (express[0], express[5]) = (0x02, 0x10);
        config.capability(regs::CAP_ID_EXP, EXPRESS, &express);
        let space = SimSpace::new(vec![0..=(1 << 40) - 1], log);
        let device = SimDeviceBuilder::new(config.bytes()).bar(0, BAR_0, &[]).msi(1).log(log);
        let device = device.build(address, space.clone())?;
        // Opening it turned decoding on.
        device.write(CONFIG_REGION, regs::COMMAND.into(), &[0, 0]).map_err(io::Error::other)?;
        Ok(Arc::new(Self {
            device,
            space,
            clock,
            inner: Mutex::new(Inner {
                boot_0: 0x1800_00a1,
                boot_time: Duration::ZERO,
                ready_at: Duration::ZERO,
                faults: BTreeSet::new(),
                temperature: 40_000,
                throttle: 0,
                channel: None,
                ring: [0; 3],
                channels: 0,
                is_manual: false,
                soft_reset: false,
            }),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function itself: for what is to fail in VFIO, and to pull it out.
    pub fn device(&self) -> &Arc<SimDevice> {
        &self.device
    }

    /// The addresses that it reaches.
    pub fn dma(&self) -> &Arc<SimSpace> {
        &self.space
    }

    /// Does what it should not, until [`heal`](Self::heal).
    pub fn fail(&self, fault: GpuFault) {
        self.lock().faults.insert(fault);
    }

    /// Takes all faults away. What it left undone it does when the doorbell rings again.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// How long its registers read all ones after each reset.
    pub fn set_boot_time(&self, time: Duration) {
        self.lock().boot_time = time;
    }

    /// Whether it forgets what its registers hold on its way from D3hot to D0 (`No_Soft_Reset` is 0).
    pub fn set_soft_reset(&self, soft_reset: bool) {
        self.lock().soft_reset = soft_reset;
        let control = usize::from(PM + regs::PM_CTRL);
        self.device.set_config(control, &[if soft_reset { 0 } else { regs::PM_CTRL_NO_SOFT_RESET as u8 }]);
    }

    /// Its temperature in millidegrees Celsius.
    pub fn set_temperature(&self, millidegrees: i32) {
        self.lock().temperature = millidegrees;
    }

    /// How far it is slowed down, in hundredths.
    pub fn throttle(&self) -> u32 {
        self.lock().throttle
    }

    /// Whether work waits for [`step`](Self::step) when the doorbell rings.
    pub fn set_manual(&self, is_manual: bool) {
        self.lock().is_manual = is_manual;
    }

    /// Does the next submission of its channel. Whether there was one, and it was done.
    pub fn step(&self) -> bool {
        self.work(&mut self.lock(), 1) == 1
    }

    /// Writes a dword by DMA, as a device that lies does.
    ///
    /// # Errors
    /// When nothing is mapped there.
    pub fn poke(&self, iova: u64, value: u32) -> Result<()> {
        self.space.store(iova, value)
    }

    /// Raises its interrupt. Whether anybody hears it.
    pub fn interrupt(&self) -> bool {
        self.device.fire(MSI_IRQ, 0)
    }

    fn command(&self) -> u16 {
        let config = self.device.config();
        u16::from_le_bytes([config[usize::from(regs::COMMAND)], config[usize::from(regs::COMMAND) + 1]])
    }

    fn power(&self) -> u16 {
        u16::from(self.device.config()[usize::from(PM + regs::PM_CTRL)]) & regs::PM_CTRL_STATE_MASK
    }

    /// What vfio-pci answers for a BAR that the function does not decode.
    fn not_decoding(&self, operation: &'static str) -> VfioError {
        VfioError::System {
            operation,
            path: self.device.address().to_string(),
            source: io::Error::from_raw_os_error(libc::EIO),
            remedy: "the function does not decode its BARs, or sleeps",
        }
    }

    fn decodes(&self) -> bool {
        self.command() & regs::COMMAND_MEMORY != 0 && self.power() == 0
    }

    /// All that a reset takes away.
    fn forget(&self, inner: &mut Inner) {
        inner.channel = None;
        inner.ring = [0; 3];
        inner.throttle = 0;
        inner.ready_at = self.clock.now() + inner.boot_time;
        let control = usize::from(PM + regs::PM_CTRL);
        let bits = if inner.soft_reset { 0 } else { regs::PM_CTRL_NO_SOFT_RESET };
        self.device.set_config(control, &bits.to_le_bytes());
    }

    fn register(&self, inner: &Inner, offset: u64) -> u32 {
        for fault in &inner.faults {
            match *fault {
                GpuFault::Registers(value) => return value,
                GpuFault::Boot(value) if offset == identify::BOOT_0 => return value,
                _ => {}
            }
        }
        let now = self.clock.now();
        if now < inner.ready_at {
            return u32::MAX;
        }
        let frozen = inner.faults.contains(&GpuFault::Frozen);
        let nanoseconds = if frozen { 0 } else { now.as_nanos() as u64 };
        match offset {
            identify::BOOT_0 => inner.boot_0,
            identify::BOOT_1 => 0,
            identify::BOOT_42 => inner.boot_0 & 0x1ff0_0000 | (inner.boot_0 & 0xff) << 12,
            PTIMER_TIME_0 => nanoseconds as u32,
            PTIMER_TIME_1 => (nanoseconds >> 32) as u32,
            Self::TEMPERATURE => inner.temperature as u32,
            Self::THROTTLE => inner.throttle,
            Self::CHANNEL..Self::CHANNEL_CONTROL => inner.ring[(offset - Self::CHANNEL) as usize / 4],
            Self::CHANNEL_CONTROL => inner.channel.as_ref().map_or(0, |channel| channel.handle),
            _ => NO_REGISTER,
        }
    }

    /// Does up to `most` submissions, if it can. How many were done.
    fn work(&self, inner: &mut Inner, most: usize) -> usize {
        let Inner { channel: Some(channel), faults, .. } = inner else { return 0 };
        if faults.contains(&GpuFault::Hang) || !self.decodes() || self.command() & regs::COMMAND_MASTER == 0 {
            return 0;
        }
        let writes_get = !faults.contains(&GpuFault::SilentGet);
        let is_loud = !faults.contains(&GpuFault::NoInterrupt);
        let done = channel.run(&self.space, most, writes_get);
        if std::mem::take(&mut channel.interrupts) != 0 && is_loud {
            self.interrupt();
        }
        done
    }
}

impl ChannelSetup for SimGpu {
    fn attach(&self, layout: Layout) -> std::result::Result<u32, RegisterError> {
        // A function that was pulled makes no channel.
        if self.device.is_gone() {
            return Err(self.not_decoding("making a channel").into());
        }
        Ok(self.lock().attach(layout))
    }

    fn detach(&self, handle: u32) -> std::result::Result<(), RegisterError> {
        if self.device.is_gone() {
            return Err(self.not_decoding("ending a channel").into());
        }
        let mut inner = self.lock();
        if inner.channel.as_ref().is_some_and(|channel| channel.handle == handle) {
            inner.channel = None;
        }
        Ok(())
    }
}

impl DeviceFile for SimGpu {
    fn address(&self) -> PciAddress {
        self.device.address()
    }

    fn space(&self) -> Arc<dyn AddressSpace> {
        self.space.clone()
    }

    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        self.device.region(index)
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.device.read(region, offset, data)?;
        if region != 0 || self.device.is_gone() {
            return Ok(());
        }
        if !self.decodes() {
            return Err(self.not_decoding("a read"));
        }
        let inner = self.lock();
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset + index as u64;
            *byte = self.register(&inner, at & !3).to_le_bytes()[(at & 3) as usize];
        }
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let mut inner = self.lock();
        if region == CONFIG_REGION {
            return self.write_config(&mut inner, offset, data);
        }
        self.device.write(region, offset, data)?;
        if region != 0 || self.device.is_gone() {
            return Ok(());
        }
        if !self.decodes() {
            return Err(self.not_decoding("a write"));
        }
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else { return Ok(()) };
        match offset {
            Self::THROTTLE => inner.throttle = value.min(100),
            Self::CHANNEL..Self::CHANNEL_CONTROL => {
                inner.ring[(offset - Self::CHANNEL) as usize / 4] = value;
            }
            Self::CHANNEL_CONTROL => {
                let [low, high, entries] = inner.ring;
                inner.channel = None;
                let layout = Layout::new(u64::from(high) << 32 | u64::from(low), entries);
                if let Some(layout) = layout.filter(|_| value == 1 && low.is_multiple_of(0x1000)) {
                    inner.attach(layout);
                }
            }
            DOORBELL if inner.channel.as_ref().is_some_and(|channel| channel.handle == value) => {
                let most = if inner.is_manual { 0 } else { DISPATCH };
                self.work(&mut inner, most);
            }
            // Registers that are only read, or not there.
            _ => {}
        }
        Ok(())
    }

    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        self.device.map(region, offset, len)
    }

    fn irq(&self, index: u32) -> Result<IrqInfo> {
        self.device.irq(index)
    }

    fn set_triggers(&self, index: u32, start: u32, triggers: &[IrqTrigger<'_>]) -> Result<()> {
        self.device.set_triggers(index, start, triggers)
    }

    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()> {
        self.device.set_unmask_event(index, event)
    }

    fn disable_irqs(&self, index: u32) -> Result<()> {
        self.device.disable_irqs(index)
    }

    fn reset(&self) -> Result<()> {
        let mut inner = self.lock();
        self.device.reset()?;
        self.forget(&mut inner);
        Ok(())
    }

    fn is_wanted_back(&self) -> bool {
        self.device.is_wanted_back()
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        let mut inner = self.lock();
        let report = self.device.reset_and_prove()?;
        self.forget(&mut inner);
        Ok(report)
    }

    fn set_at_rest(&self, at_rest: bool) {
        self.device.set_at_rest(at_rest);
    }

    fn kvm_file(&self) -> Option<BorrowedFd<'_>> {
        // KVM takes only files that VFIO opened.
        None
    }
}

impl SimGpu {
    /// Config space keeps what is written but for what is stuck, and power management does what is asked of it.
    fn write_config(&self, inner: &mut Inner, offset: u64, data: &[u8]) -> Result<()> {
        let before = self.device.config();
        self.device.write(CONFIG_REGION, offset, data)?;
        let after = self.device.config();
        let word = |config: &[u8], at: u16| {
            let at = usize::from(at);
            config.get(at..at + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
        };
        for fault in &inner.faults {
            if let GpuFault::StuckCommand(bits) = *fault {
                let stuck = word(&after, regs::COMMAND) & !bits | word(&before, regs::COMMAND) & bits;
                self.device.set_config(regs::COMMAND.into(), &stuck.to_le_bytes());
            }
        }
        let control = PM + regs::PM_CTRL;
        let (old, new) = (word(&before, control), word(&after, control));
        if old == new {
            return Ok(());
        }
        let state =
            if inner.faults.contains(&GpuFault::StuckPower) { old } else { new } & regs::PM_CTRL_STATE_MASK;
        let read_only = old & !regs::PM_CTRL_STATE_MASK;
        self.device.set_config(control.into(), &(read_only | state).to_le_bytes());
        let woke = old & regs::PM_CTRL_STATE_MASK == regs::PM_CTRL_D3HOT && state == 0;
        if woke && inner.soft_reset {
            self.forget(inner);
        }
        Ok(())
    }
}
