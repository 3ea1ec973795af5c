//! A simulated function behind VFIO: config space, BARs and interrupts in memory, and faults on demand.
//!
//! The device takes every write that reaches it (nothing here is read-only but what a test asks about), so that a
//! write that must not reach it shows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use vm_memory::{FileOffset, MmapRegion};

use super::{SimLog, SimSpace};
use crate::PciAddress;
use crate::guest::SharedMemory;
use crate::pci::regs;
use crate::vfio::{
    AddressSpace, CONFIG_REGION, DeviceFile, DeviceInfo, INTX_IRQ, IrqInfo, IrqTrigger, MSI_IRQ, MSIX_IRQ,
    Mapping, RegionInfo, ResetEvidence, ResetReport, Result, VfioError, check_vectors,
};

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
    has_reset: bool,
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
    config: Vec<u8>,
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
    log: SimLog,
}

impl SimDeviceBuilder {
    /// A function with these bytes in its config space: 256 of them, or 4096.
    pub fn new(config: Vec<u8>) -> Self {
        Self { config, bars: Vec::new(), irqs: BTreeMap::new(), has_reset: true, log: SimLog::default() }
    }

    /// Adds a BAR whose parts `mappable` (offset and length) may be mapped.
    pub fn bar(mut self, index: u32, size: u64, mappable: &[(u64, u64)]) -> Self {
        self.bars.push((index, size, mappable.to_vec()));
        self
    }

    /// Gives it `count` vectors of MSI, which as in Linux can't grow while enabled.
    pub fn msi(mut self, count: u32) -> Self {
        self.irqs.insert(MSI_IRQ, IrqInfo { count, eventfd: true, maskable: true, noresize: true });
        self
    }

    /// Gives it `count` vectors of MSI-X; `noresize` as in Linux before 6.5.
    pub fn msix(mut self, count: u32, noresize: bool) -> Self {
        self.irqs.insert(MSIX_IRQ, IrqInfo { count, eventfd: true, maskable: true, noresize });
        self
    }

    /// Has VFIO deliver the interrupt pin that its config space tells of.
    pub fn intx(mut self) -> Self {
        self.irqs.insert(INTX_IRQ, IrqInfo { count: 1, eventfd: true, maskable: true, noresize: true });
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
        let kvm_file = File::from(rustix::fs::memfd_create("sim-vfio", MemfdFlags::CLOEXEC)?);
        Ok(Arc::new(SimDevice {
            address,
            bars,
            irqs: self.irqs,
            has_reset: self.has_reset,
            config_len: self.config.len(),
            kvm_file: Some(kvm_file),
            space,
            log: self.log,
            inner: Mutex::new(Inner {
                initial: self.config.clone(),
                config: self.config,
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

    /// Takes the function from the bus: every access fails from now on.
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

    /// The bytes of its config space now.
    pub fn config(&self) -> Vec<u8> {
        self.lock().config.clone()
    }

    /// Sets bytes of its config space, as the hardware would by itself.
    pub fn set_config(&self, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.lock().config.get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
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

    /// Does what VFIO does about the pin: unmasks it when it is asked to, and signals its trigger when it is asserted and not
    /// masked, by VFIO or by INTx Disable. Whether it did.
    pub fn update_pin(&self) -> bool {
        let mut inner = self.lock();
        let unmask = inner.intx.unmask.as_ref();
        if unmask.is_some_and(|unmask| rustix::io::read(unmask, &mut [0; 8]).is_ok()) {
            inner.intx.masked = false;
        }
        let disabled =
            inner.config[usize::from(regs::COMMAND) + 1] & (regs::COMMAND_INTX_DISABLE >> 8) as u8 != 0;
        let trigger = inner.triggers.get(&INTX_IRQ).and_then(|triggers| triggers.first()?.as_ref());
        let fires = inner.intx.asserted && !inner.intx.masked && !disabled && trigger.is_some();
        if let Some(trigger) = trigger.filter(|_| fires) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = rustix::io::write(trigger, &1u64.to_ne_bytes());
            inner.intx.masked = true;
        }
        fires
    }

    fn system(&self, operation: &'static str, error: rustix::io::Errno) -> VfioError {
        VfioError::System {
            operation,
            path: self.address.to_string(),
            source: error.into(),
            remedy: "this device is simulated and was made to fail",
        }
    }

    /// Fails if the function is gone, or made to fail.
    fn check(&self, inner: &Inner, operation: &'static str, fault: Option<Fault>) -> Result<()> {
        if inner.gone || fault.is_some_and(|fault| inner.faults.contains(&fault)) {
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

    fn info(&self) -> DeviceInfo {
        DeviceInfo { regions: 9, irqs: 5, reset: self.has_reset }
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        let (size, mappable) = match self.bars.get(&index) {
            Some(bar) => (bar.size, bar.mappable.clone()),
            None if index == CONFIG_REGION => (self.config_len as u64, Vec::new()),
            None => (0, Vec::new()),
        };
        Ok(RegionInfo { index, size, readable: size != 0, writable: size != 0, mappable })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        self.check_range(region, offset, data.len() as u64)?;
        let inner = self.lock();
        self.check(&inner, "a read", None)?;
        if let Some(bar) = self.bars.get(&region) {
            let done = bar.memory.read_exact_at(data, offset);
            return done.map_err(|_| self.system("a read", rustix::io::Errno::IO));
        }
        if let Some(bytes) = inner.config.get(offset as usize..offset as usize + data.len()) {
            data.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.check_range(region, offset, data.len() as u64)?;
        let mut inner = self.lock();
        self.check(&inner, "a write", None)?;
        if let Some(bar) = self.bars.get(&region) {
            let done = bar.memory.write_all_at(data, offset);
            return done.map_err(|_| self.system("a write", rustix::io::Errno::IO));
        }
        self.log.note(format!("config {offset:#x} = {data:02x?}"));
        for (index, &byte) in data.iter().enumerate() {
            let at = offset as usize + index;
            if let Some(place) = inner.config.get_mut(at) {
                // The upper half of Status is cleared by writing 1, the lower is read-only.
                *place = match at {
                    6 => *place,
                    7 => *place & !byte,
                    _ => byte,
                };
            }
        }
        Ok(())
    }

    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        self.check_range(region, offset, len)?;
        self.check(&self.lock(), "mmap", Some(Fault::MapBar))?;
        let refused = || self.system("mmap", rustix::io::Errno::INVAL);
        let bar = self.bars.get(&region).ok_or_else(refused)?;
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
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Some(Fault::SetTriggers))?;
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
        let enabled = inner.triggers.get(&index).map(Vec::len);
        if end > info.count as usize || enabled.is_some_and(|enabled| info.noresize && end > enabled) {
            return Err(refused());
        }
        let available = inner.host_vectors;
        match enabled {
            Some(enabled) if end <= enabled.max(available as usize) => {}
            None if end <= available as usize => {}
            None if available != 0 => return check_vectors(self.address, end as u32, available),
            _ => return Err(failed(rustix::io::Errno::NOSPC)),
        }
        let enabled = inner.triggers.entry(index).or_default();
        enabled.resize_with(enabled.len().max(end), || None);
        for (place, trigger) in enabled.iter_mut().skip(start as usize).zip(triggers) {
            *place = match trigger {
                IrqTrigger::Eventfd(fd) => Some(fd.try_clone_to_owned().map_err(|_| refused())?),
                IrqTrigger::None => None,
            };
        }
        Ok(())
    }

    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Some(Fault::SetTriggers))?;
        let refused = || self.system("VFIO_DEVICE_SET_IRQS", rustix::io::Errno::INVAL);
        if index != INTX_IRQ || !inner.triggers.contains_key(&index) {
            return Err(refused());
        }
        inner.intx.unmask = Some(event.try_clone_to_owned().map_err(|_| refused())?);
        Ok(())
    }

    fn disable_irqs(&self, index: u32) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_SET_IRQS", Some(Fault::DisableIrqs))?;
        self.log.note(format!("irq {index} off"));
        inner.triggers.remove(&index);
        if index == INTX_IRQ {
            inner.intx = SimIntx { asserted: inner.intx.asserted, ..SimIntx::default() };
        }
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        let mut inner = self.lock();
        self.check(&inner, "VFIO_DEVICE_RESET", Some(Fault::Reset))?;
        if inner.wanted {
            self.log.note("reset refused".into());
            return Err(self.system("VFIO_DEVICE_RESET", rustix::io::Errno::AGAIN));
        }
        if !self.has_reset {
            return Err(self.system("VFIO_DEVICE_RESET", rustix::io::Errno::INVAL));
        }
        self.log.note("reset".into());
        inner.config = inner.initial.clone();
        inner.intx.asserted = false;
        inner.resets += 1;
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
