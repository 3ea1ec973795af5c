//! A simulated function behind VFIO: config space, BARs and interrupts in memory, and faults on demand.
//!
//! It answers as vfio-pci of Linux 6.12 does. Each method follows the Linux function that serves its ioctl:
//!
//! | ioctl or call | Linux function | answer |
//! | --- | --- | --- |
//! | `VFIO_DEVICE_GET_INFO` | `vfio_pci_ioctl_get_info` | 9 regions, 5 interrupt indexes, and whether the reset at open worked |
//! | `VFIO_DEVICE_GET_REGION_INFO` | `vfio_pci_ioctl_get_region_info` | a ROM is not writable; there is no region past the last |
//! | `VFIO_DEVICE_GET_IRQ_INFO` | `vfio_pci_ioctl_get_irq_info` | only INTx is maskable, and it alone is not `NORESIZE` besides dynamic MSI-X; errors need PCI Express |
//! | `VFIO_DEVICE_SET_IRQS` | `vfio_set_irqs_validate_and_prepare`, `vfio_pci_set_irqs_ioctl` | `EINVAL` for vectors that the function lacks and for a second kind of interrupt, `ENOTTY` to unmask MSI |
//! | … to enable MSI, MSI-X | `vfio_msi_enable` | the host's vectors as a positive number, with none enabled, or `ENOSPC` |
//! | … to change enabled vectors | `vfio_msi_set_block` | a failure takes the triggers of the vectors up to the one that failed |
//! | … to unmask INTx by an eventfd | `vfio_pci_set_intx_unmask`, `vfio_virqfd_enable` | `EINVAL` unless enabled, `EBUSY` if there is one |
//! | `VFIO_DEVICE_RESET` | `vfio_pci_ioctl_reset` | `EINVAL` without a reset, then `EAGAIN` while locked, `ENOTTY` when no method works; restores the header |
//! | read, write of config space | `vfio_pci_config_rw` | see [`vfio_config`](super::vfio_config) |
//! | read, write of a BAR | `vfio_pci_bar_rw` | `EIO` while memory decoding is off, ones in the MSI-X table |
//! | write of the ROM | `vfio_pci_rw` | `EINVAL` |
//! | mmap | `vfio_pci_core_mmap` | `EINVAL` for other than whole pages of a mappable BAR |
//!
//! A function that is gone still answers: its hardware reads ones and takes no writes, and what vfio-pci keeps in its own
//! copy stays. The simulation differs where a test decides: [`Fault`]s, vectors of the host, and
//! [`SimDeviceBuilder::msix`].
//!
//! The log has every write that reaches VFIO, so that one that must not does show.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use vm_memory::{FileOffset, MmapRegion};

use super::vfio_config::{ConfigAction, VfioConfig, get16, set16};
use super::{SimLog, SimSpace};
use crate::PciAddress;
use crate::guest::SharedMemory;
use crate::pci::regs;
use crate::vfio::{
    AddressSpace, CONFIG_REGION, DeviceFile, DeviceInfo, ERR_IRQ, INTX_IRQ, IrqInfo, IrqTrigger, MSI_IRQ,
    MSIX_IRQ, Mapping, REQ_IRQ, ROM_REGION, RegionInfo, ResetEvidence, ResetReport, Result, VfioError,
    check_vectors,
};

/// Regions of vfio-pci (`VFIO_PCI_NUM_REGIONS`).
const REGIONS: u32 = 9;

/// Something that a simulated device, address space or VMM does, and can be made to fail at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Resetting.
    Reset,
    /// Proving that it was reset.
    ResetRefuted,
    /// Mapping a BAR into this process.
    MapBar,
    /// Setting the triggers of vectors.
    SetTriggers,
    /// Disabling interrupts.
    DisableIrqs,
    /// Mapping memory for DMA.
    MapDma,
    /// Unmapping memory from DMA.
    UnmapDma,
    /// Telling the VMM of the device's file.
    TellVmm,
    /// Having the VMM forget the device's file.
    ForgetFile,
    /// Mapping memory into the guest.
    MapGuest,
    /// Unmapping memory from the guest.
    UnmapGuest,
    /// Pointing an interrupt route at a message.
    SetRoute,
    /// Removing an interrupt route.
    RemoveRoute,
}

/// A simulated function, as VFIO exposes it.
#[derive(Debug)]
pub struct SimDevice {
    address: PciAddress,
    bars: BTreeMap<u32, SimBar>,
    irqs: BTreeMap<u32, IrqInfo>,
    /// BARs of port I/O.
    io_bars: BTreeSet<u32>,
    has_reset: bool,
    is_virtual: bool,
    config_len: usize,
    kvm_file: Option<File>,
    space: Arc<SimSpace>,
    log: SimLog,
    inner: Mutex<Inner>,
}

/// Parts of a BAR that may be mapped, as offset and length.
type Parts = Vec<(u64, u64)>;

#[derive(Debug)]
struct SimBar {
    memory: File,
    size: u64,
    mappable: Parts,
}

#[derive(Debug)]
struct Inner {
    /// Config space of the hardware.
    config: Vec<u8>,
    /// How vfio-pci virtualizes it.
    virtual_config: VfioConfig,
    initial: Vec<u8>,
    /// Triggers of the vectors that are enabled, by interrupt index.
    triggers: BTreeMap<u32, Vec<Option<OwnedFd>>>,
    intx: SimIntx,
    /// Vectors that the host can enable.
    host_vectors: u32,
    faults: BTreeSet<Fault>,
    gone: bool,
    wanted: bool,
    at_rest: bool,
    resets: u32,
}

/// The interrupt pin, which VFIO masks whenever it fires.
#[derive(Debug, Default)]
struct SimIntx {
    asserted: bool,
    masked: bool,
    unmask: Option<OwnedFd>,
}

/// Describes a [`SimDevice`].
#[derive(Debug)]
pub struct SimDeviceBuilder {
    config: Vec<u8>,
    bars: Vec<(u32, u64, Parts)>,
    irqs: BTreeMap<u32, IrqInfo>,
    has_reset: bool,
    /// Vendor and device ID of a virtual function.
    virtual_ids: Option<[u16; 2]>,
    log: SimLog,
}

impl SimDeviceBuilder {
    /// A function with these bytes in its config space: 256 of them, or 4096.
    pub fn new(config: Vec<u8>) -> Self {
        let single = IrqInfo { count: 1, eventfd: true, maskable: false, noresize: true };
        let has_express =
            crate::pci::config::capabilities(&config).iter().any(|known| known.id == regs::CAP_ID_EXP);
        let mut irqs = BTreeMap::from([(REQ_IRQ, single)]);
        if has_express {
            irqs.insert(ERR_IRQ, single);
        }
        Self { config, bars: Vec::new(), irqs, has_reset: true, virtual_ids: None, log: SimLog::default() }
    }

    /// Adds a BAR whose parts `mappable` (offset and length) may be mapped.
    pub fn bar(mut self, index: u32, size: u64, mappable: &[(u64, u64)]) -> Self {
        self.bars.push((index, size, mappable.to_vec()));
        self
    }

    /// Gives it `count` vectors of MSI, which as in Linux can't grow while enabled.
    pub fn msi(mut self, count: u32) -> Self {
        self.irqs.insert(MSI_IRQ, IrqInfo { count, eventfd: true, maskable: false, noresize: true });
        self
    }

    /// Gives it `count` vectors of MSI-X; `noresize` as in Linux before 6.5.
    pub fn msix(mut self, count: u32, noresize: bool) -> Self {
        self.irqs.insert(MSIX_IRQ, IrqInfo { count, eventfd: true, maskable: false, noresize });
        self
    }

    /// Has VFIO deliver the interrupt pin that its config space tells of.
    pub fn intx(mut self) -> Self {
        self.irqs.insert(INTX_IRQ, IrqInfo { count: 1, eventfd: true, maskable: true, noresize: false });
        self
    }

    /// Makes it a virtual function: Linux takes its IDs from the physical function, as its own read all ones.
    pub fn virtual_function(mut self, vendor: u16, device: u16) -> Self {
        self.virtual_ids = Some([vendor, device]);
        self
    }

    /// Takes its reset away.
    pub fn without_reset(mut self) -> Self {
        self.has_reset = false;
        self
    }

    /// Notes what is done to it in `log`.
    pub fn log(mut self, log: &SimLog) -> Self {
        self.log = log.clone();
        self
    }

    /// Makes it, open in `space`.
    ///
    /// # Errors
    /// When the host has no memory for its BARs.
    pub fn build(self, address: PciAddress, space: Arc<SimSpace>) -> io::Result<Arc<SimDevice>> {
        let mut bars = BTreeMap::new();
        for (index, size, mappable) in self.bars {
            let memory = File::from(rustix::fs::memfd_create("sim-bar", MemfdFlags::CLOEXEC)?);
            memory.set_len(size)?;
            bars.insert(index, SimBar { memory, size, mappable });
        }
        let mut sizes = [0; 7];
        for (&index, bar) in &bars {
            if let Some(size) = sizes.get_mut(index as usize) {
                *size = bar.size;
            }
        }
        // `vfio_pci_core_enable` disables bus mastering, and enables decoding and the pin.
        let mut config = self.config;
        let register = |bar: u32| usize::from(regs::BASE_ADDRESS_0) + 4 * bar as usize;
        let is_io = |bar: u32| bar < 6 && get16(&config, register(bar)) & 1 != 0;
        let io_bars = bars.keys().copied().filter(|&bar| is_io(bar)).collect::<BTreeSet<_>>();
        let mut command = get16(&config, regs::COMMAND.into());
        command &= !(regs::COMMAND_MASTER | regs::COMMAND_INTX_DISABLE);
        if !io_bars.is_empty() {
            command |= regs::COMMAND_IO;
        }
        if self.virtual_ids.is_none() && bars.keys().any(|bar| !io_bars.contains(bar)) {
            command |= regs::COMMAND_MEMORY;
        }
        set16(&mut config, regs::COMMAND.into(), command);
        let virtual_config = VfioConfig::new(&config, sizes, self.virtual_ids);
        let kvm_file = File::from(rustix::fs::memfd_create("sim-vfio", MemfdFlags::CLOEXEC)?);
        Ok(Arc::new(SimDevice {
            address,
            bars,
            irqs: self.irqs,
            io_bars,
            has_reset: self.has_reset,
            is_virtual: self.virtual_ids.is_some(),
            config_len: config.len(),
            kvm_file: Some(kvm_file),
            space,
            log: self.log,
            inner: Mutex::new(Inner {
                initial: config.clone(),
                config,
                virtual_config,
                triggers: BTreeMap::new(),
                intx: SimIntx::default(),
                host_vectors: u32::MAX,
                faults: BTreeSet::new(),
                gone: false,
                wanted: false,
                at_rest: false,
                resets: 0,
            }),
        }))
    }
}

impl SimDevice {
    /// Makes every access of the device wait until what this answers is dropped.
    pub fn hold(&self) -> impl Sized + '_ {
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it was said to be at rest, so that it may be reset along with another.
    pub fn is_at_rest(&self) -> bool {
        self.lock().at_rest
    }

    /// Removes the function from the bus: its hardware reads ones from now on, and no reset works.
    pub fn vanish(&self) {
        self.lock().gone = true;
    }

    /// Has the host want the function back: it can't be reset any more, whatever is tried.
    pub fn want_back(&self) {
        self.lock().wanted = true;
    }

    /// Fails at `fault` until [`heal`](Self::heal).
    pub fn fail(&self, fault: Fault) {
        self.lock().faults.insert(fault);
    }

    /// Sets how many vectors the host can enable.
    pub fn set_host_vectors(&self, available: u32) {
        self.lock().host_vectors = available;
    }

    /// Takes all faults away.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// The bytes of config space in the hardware now.
    pub fn config(&self) -> Vec<u8> {
        self.lock().config.clone()
    }

    /// Sets bytes of config space in the hardware, as it would by itself.
    pub fn set_config(&self, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.lock().config.get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Reads bytes of a BAR or the ROM without VFIO. Returns nothing for a region that the function lacks.
    pub fn memory(&self, region: u32, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.bars.get(&region).map(|bar| bar.memory.read_exact_at(&mut bytes, offset));
        if matches!(read, Some(Ok(()))) { bytes } else { Vec::new() }
    }

    /// Sets bytes of a BAR or the ROM without VFIO.
    ///
    /// # Errors
    /// When the function has no such region.
    pub fn set_memory(&self, region: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check_range(region, offset, bytes.len() as u64)?;
        let bar = self.bars.get(&region).ok_or(VfioError::OutOfRegion { region, offset, len: 0 })?;
        bar.memory.write_all_at(bytes, offset).map_err(|_| self.system("a write", rustix::io::Errno::IO))
    }

    /// Whether the function is gone from the bus.
    pub fn is_gone(&self) -> bool {
        self.lock().gone
    }

    /// How often it was reset.
    pub fn resets(&self) -> u32 {
        self.lock().resets
    }

    /// Number of vectors that are enabled of an interrupt index.
    pub fn enabled(&self, index: u32) -> usize {
        self.lock().triggers.get(&index).map_or(0, Vec::len)
    }

    /// Fires a vector. False if nobody is signalled: the vector is not enabled, or has no trigger.
    pub fn fire(&self, index: u32, vector: usize) -> bool {
        let inner = self.lock();
        match inner.triggers.get(&index).and_then(|vectors| vectors.get(vector)) {
            Some(Some(trigger)) => rustix::io::write(trigger, &1u64.to_ne_bytes()).is_ok(),
            _ => false,
        }
    }

    /// Asserts the interrupt pin or not, until it is changed.
    pub fn set_pin(&self, asserted: bool) {
        self.lock().intx.asserted = asserted;
        self.update_pin();
    }

    /// Handles the pin as VFIO does: unmasks it if the eventfd for that was signaled, then signals the trigger if the pin is
    /// asserted and unmasked. Returns whether it signaled.
    pub fn update_pin(&self) -> bool {
        Self::update(&mut self.lock())
    }

    fn update(inner: &mut Inner) -> bool {
        let disabled = inner.virtual_config.intx_disabled();
        let unmask = inner.intx.unmask.as_ref();
        if unmask.is_some_and(|unmask| rustix::io::read(unmask, &mut [0; 8]).is_ok()) && !disabled {
            inner.intx.masked = false;
        }
        let trigger = inner.triggers.get(&INTX_IRQ).and_then(|triggers| triggers.first()?.as_ref());
        let fires = inner.intx.asserted && !inner.intx.masked && !disabled && trigger.is_some();
        if let Some(trigger) = trigger.filter(|_| fires) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = rustix::io::write(trigger, &1u64.to_ne_bytes());
            inner.intx.masked = true;
        }
        // The bit in the hardware is how VFIO masks the pin.
        let is_masked = disabled || inner.triggers.contains_key(&INTX_IRQ) && inner.intx.masked;
        let command = get16(&inner.config, regs::COMMAND.into()) & !regs::COMMAND_INTX_DISABLE;
        let mask = if is_masked { regs::COMMAND_INTX_DISABLE } else { 0 };
        set16(&mut inner.config, regs::COMMAND.into(), command | mask);
        fires
    }

    /// Config space as read from the hardware.
    fn answer(inner: &Inner) -> Vec<u8> {
        if inner.gone { vec![0xff; inner.config.len()] } else { inner.config.clone() }
    }

    /// Checks that a BAR answers an access.
    fn check_decoding(&self, inner: &Inner, region: u32, operation: &'static str) -> Result<()> {
        if self.io_bars.contains(&region) || inner.virtual_config.decodes_memory(&inner.config) {
            return Ok(());
        }
        Err(self.system(operation, rustix::io::Errno::IO))
    }

    /// Resets the hardware.
    fn reset_hardware(inner: &mut Inner) {
        let Inner { config, initial, virtual_config, .. } = inner;
        virtual_config.reset(config, initial);
        inner.intx.asserted = false;
        inner.resets += 1;
        Self::update(inner);
    }

    fn system(&self, operation: &'static str, error: rustix::io::Errno) -> VfioError {
        VfioError::System {
            operation,
            path: self.address.to_string(),
            source: error.into(),
            remedy: "this device is simulated and was made to fail",
        }
    }

    /// Fails if `fault` is injected.
    fn check(&self, inner: &Inner, operation: &'static str, fault: Fault) -> Result<()> {
        if inner.faults.contains(&fault) {
            return Err(self.system(operation, rustix::io::Errno::IO));
        }
        Ok(())
    }

    fn check_range(&self, region: u32, offset: u64, len: u64) -> Result<()> {
        let size = if region == CONFIG_REGION {
            self.config_len as u64
        } else {
            self.bars.get(&region).map_or(0, |bar| bar.size)
        };
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(VfioError::OutOfRegion { region, offset, len }),
        }
    }
}

impl DeviceFile for SimDevice {
    fn address(&self) -> PciAddress {
        self.address
    }

    fn space(&self) -> Arc<dyn AddressSpace> {
        self.space.clone()
    }

    fn is_virtual(&self) -> bool {
        self.is_virtual
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo { regions: REGIONS, irqs: 5, reset: self.has_reset }
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        if index >= REGIONS {
            return Err(VfioError::OutOfRegion { region: index, offset: 0, len: 0 });
        }
        let (size, mappable) = match self.bars.get(&index) {
            Some(bar) if index == ROM_REGION => (bar.size, Vec::new()),
            Some(bar) => (bar.size, bar.mappable.clone()),
            None if index == CONFIG_REGION => (self.config_len as u64, Vec::new()),
            None => (0, Vec::new()),
        };
        let writable = size != 0 && index != ROM_REGION;
        Ok(RegionInfo { index, size, readable: size != 0, writable, mappable })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.check_range(region, offset, data.len() as u64)?;
        let mut inner = self.lock();
        let Some(bar) = self.bars.get(&region) else {
            let hardware = Self::answer(&inner);
            inner.virtual_config.read(&hardware, offset as usize, data);
            return Ok(());
        };
        self.check_decoding(&inner, region, "a read")?;
        let done = bar.memory.read_exact_at(data, offset);
        done.map_err(|_| self.system("a read", rustix::io::Errno::IO))?;
        let table = inner.virtual_config.msix_table().filter(|(bar, _)| *bar == region);
        for (byte, at) in data.iter_mut().zip(offset..) {
            if inner.gone || table.as_ref().is_some_and(|(_, table)| table.contains(&at)) {
                *byte = 0xff;
            }
        }
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.check_range(region, offset, data.len() as u64)?;
        let mut inner = self.lock();
        if let Some(bar) = self.bars.get(&region) {
            if region == ROM_REGION {
                return Err(self.system("a write", rustix::io::Errno::INVAL));
            }
            self.check_decoding(&inner, region, "a write")?;
            let table = inner.virtual_config.msix_table().filter(|(bar, _)| *bar == region);
            for (byte, at) in data.iter().zip(offset..) {
                if !inner.gone && table.as_ref().is_none_or(|(_, table)| !table.contains(&at)) {
                    let done = bar.memory.write_all_at(std::slice::from_ref(byte), at);
                    done.map_err(|_| self.system("a write", rustix::io::Errno::IO))?;
                }
            }
            return Ok(());
        }
        self.log.note(format!("config {offset:#x} = {data:02x?}"));
        let mut hardware = Self::answer(&inner);
        let actions = inner.virtual_config.write(&mut hardware, offset as usize, data);
        if !inner.gone {
            inner.config = hardware;
        }
        for action in actions {
            match action {
                ConfigAction::Reset if inner.gone => {}
                ConfigAction::Reset => Self::reset_hardware(&mut inner),
                ConfigAction::IntxDisable(disabled) => inner.intx.masked = disabled,
            }
        }
        Self::update(&mut inner);
        Ok(())
    }

    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        self.check_range(region, offset, len)?;
        self.check(&self.lock(), "mmap", Fault::MapBar)?;
        let refused = || self.system("mmap", rustix::io::Errno::INVAL);
        let bar = self.bars.get(&region).filter(|_| region != ROM_REGION).ok_or_else(refused)?;
        if !bar.mappable.iter().any(|&(start, size)| start <= offset && offset + len <= start + size) {
            return Err(refused());
        }
        let memory = bar.memory.try_clone().map_err(|_| refused())?;
        let mapping = MmapRegion::<()>::from_file(FileOffset::new(memory, offset), len as usize);
        Ok(Arc::new(SharedMemory::new(Arc::new(mapping.map_err(|_| refused())?))))
    }

    fn irq(&self, index: u32) -> Result<IrqInfo> {
        let none = IrqInfo { count: 0, eventfd: false, maskable: false, noresize: false };
        Ok(self.irqs.get(&index).copied().unwrap_or(none))
    }

    fn set_triggers(&self, index: u32, start: u32, triggers: &[IrqTrigger<'_>]) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Fault::SetTriggers)?;
        self.log.note(format!("irq {index} set {start}+{}", triggers.len()));
        let failed = |error| self.system("VFIO_DEVICE_SET_IRQS", error);
        let refused = || failed(rustix::io::Errno::INVAL);
        if triggers.is_empty() {
            return Ok(());
        }
        // One kind of interrupts at a time.
        let is_other = |&other: &u32| other != index && [INTX_IRQ, MSI_IRQ, MSIX_IRQ].contains(&other);
        if inner.triggers.keys().any(is_other) {
            return Err(refused());
        }
        let info = self.irq(index)?;
        let end = start as usize + triggers.len();
        if end > info.count as usize {
            return Err(refused());
        }
        let available = inner.host_vectors as usize;
        let enabled = inner.triggers.get(&index).map(Vec::len);
        match enabled {
            None if ![MSI_IRQ, MSIX_IRQ].contains(&index) || end <= available => {}
            None if available != 0 => return check_vectors(self.address, end as u32, available as u32),
            None => return Err(failed(rustix::io::Errno::NOSPC)),
            Some(_) => {}
        }
        let is_dynamic = !info.noresize;
        let place = inner.triggers.entry(index).or_default();
        if enabled.is_none() {
            place.resize_with(end, || None);
        }
        let mut answer = Ok(());
        let mut done = start as usize;
        for (vector, trigger) in (start as usize..).zip(triggers) {
            done = vector + 1;
            if vector >= place.len() {
                // A vector is allocated for its trigger, where the Linux kernel can allocate single ones.
                if let IrqTrigger::None = trigger {
                    continue;
                }
                if !is_dynamic || vector >= available {
                    answer = Err(failed(if is_dynamic {
                        rustix::io::Errno::NOSPC
                    } else {
                        rustix::io::Errno::INVAL
                    }));
                    break;
                }
                place.resize_with(vector + 1, || None);
            }
            place[vector] = match trigger {
                IrqTrigger::Eventfd(fd) => Some(fd.try_clone_to_owned().map_err(|_| refused())?),
                IrqTrigger::None => None,
            };
        }
        if answer.is_err() {
            place.iter_mut().take(done).skip(start as usize).for_each(|trigger| *trigger = None);
        } else if index == INTX_IRQ && enabled.is_none() {
            inner.intx.masked = inner.virtual_config.intx_disabled();
        }
        Self::update(&mut inner);
        answer
    }

    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Fault::SetTriggers)?;
        let failed = |error| self.system("VFIO_DEVICE_SET_IRQS", error);
        if self.irq(index)?.count == 0 {
            return Err(failed(rustix::io::Errno::INVAL));
        }
        if index != INTX_IRQ {
            return Err(failed(rustix::io::Errno::NOTTY));
        }
        if !inner.triggers.contains_key(&index) {
            return Err(failed(rustix::io::Errno::INVAL));
        }
        if inner.intx.unmask.is_some() {
            return Err(failed(rustix::io::Errno::BUSY));
        }
        let event = event.try_clone_to_owned().map_err(|_| failed(rustix::io::Errno::INVAL))?;
        inner.intx.unmask = Some(event);
        Self::update(&mut inner);
        Ok(())
    }

    fn disable_irqs(&self, index: u32) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Fault::DisableIrqs)?;
        self.log.note(format!("irq {index} off"));
        inner.triggers.remove(&index);
        if index == INTX_IRQ {
            inner.intx = SimIntx { asserted: inner.intx.asserted, ..SimIntx::default() };
        }
        Self::update(&mut inner);
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_RESET", Fault::Reset)?;
        let failed = |error| Err(self.system("VFIO_DEVICE_RESET", error));
        if !self.has_reset {
            return failed(rustix::io::Errno::INVAL);
        }
        if inner.wanted {
            self.log.note("reset refused".into());
            return failed(rustix::io::Errno::AGAIN);
        }
        if inner.gone {
            return failed(rustix::io::Errno::NOTTY);
        }
        self.log.note("reset".into());
        Self::reset_hardware(&mut inner);
        Ok(())
    }

    fn is_wanted_back(&self) -> bool {
        self.lock().wanted
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        if self.lock().faults.contains(&Fault::ResetRefuted) {
            return Err(VfioError::Reset { address: self.address, reason: "nothing was reset".into() });
        }
        self.reset()?;
        Ok(ResetReport { method: None, evidence: ResetEvidence::LinuxReport })
    }

    fn set_at_rest(&self, at_rest: bool) {
        self.lock().at_rest = at_rest;
    }

    fn kvm_file(&self) -> Option<BorrowedFd<'_>> {
        self.kvm_file.as_ref().map(|file| file.as_fd())
    }
}

#[cfg(test)]
mod tests;
