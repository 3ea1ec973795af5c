//! [`VfioPciDevice`]: a function behind VFIO as a device of a guest.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::bars::Bar;
use super::config::{ConfigSpace, Facts};
use super::dma::DmaRam;
use super::gate::{Gate, POLL};
use super::interrupts::Vectors;
use super::intx::Intx;
use super::state::State;
use super::{DeviceError, PassthroughDevice, PeerDma, RamRegion, Vmm, bars};
use crate::claim::Cancel;
use crate::pci::config::{CONFIG_SIZE, EXTENDED_CONFIG_SIZE};
use crate::pci::{RomImage, placement, regs};
use crate::vfio::{
    CONFIG_REGION, DeviceFile, ErrorSeverity, MSI_IRQ, MSIX_IRQ, ROM_REGION, Result, VfioError,
};
use crate::{PciAddress, deadlines};

/// Most vectors of MSI (PCI Express Base 6.0, 7.7.1) and of MSI-X (7.7.2).
const MSI_VECTORS: u32 = 32;
const MSIX_VECTORS: u32 = 2048;
/// How long an access that is under way may take when the device is to be attached, stopped, reset or detached.
const ACCESS_DEADLINE: Duration = if cfg!(test) { Duration::from_secs(5) } else { deadlines::ACCESS };

/// How a device is given to its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Whether it is given, and taken back, although none of its resets works or is proved. It then may hold what its last
    /// user left there, and keep what this guest leaves.
    pub without_reset: bool,
    /// Gives up [attaching](PassthroughDevice::attach) it while the guest's RAM is mapped for it, which takes long where there is
    /// much that was never used.
    pub cancel: Option<Cancel>,
    /// What its guest finds as its expansion ROM.
    pub rom: Rom,
    /// What maps its BARs for the DMA of the guest's other devices. Without it these reach it only through RAM.
    pub peers: Option<PeerDma>,
}

/// What a guest finds as a device's expansion ROM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rom {
    /// The device's own, where it has one that can be read.
    #[default]
    Device,
    /// None.
    Hidden,
    /// This one.
    Image(RomImage),
}

impl DeviceOptions {
    /// These, with [`without_reset`](#structfield.without_reset) as given.
    #[must_use]
    pub fn without_reset(self, without_reset: bool) -> Self {
        Self { without_reset, ..self }
    }

    /// These, with [`cancel`](#structfield.cancel) as given.
    #[must_use]
    pub fn cancel(self, cancel: Option<Cancel>) -> Self {
        Self { cancel, ..self }
    }

    /// These, with [`rom`](#structfield.rom) as given.
    #[must_use]
    pub fn rom(self, rom: Rom) -> Self {
        Self { rom, ..self }
    }

    /// These, with [`peers`](#structfield.peers) as given.
    #[must_use]
    pub fn peers(self, peers: Option<PeerDma>) -> Self {
        Self { peers, ..self }
    }
}

/// A PCI function behind VFIO, as a device of a guest.
///
/// Until it is attached, from when it is to be detached, and when the function is gone, the guest reads all ones and its
/// writes are dropped.
#[derive(Debug)]
pub struct VfioPciDevice {
    file: Arc<dyn DeviceFile>,
    vmm: Arc<dyn Vmm>,
    options: DeviceOptions,
    /// Sizes of the BARs by index, the ROM's last.
    sizes: [u64; 7],
    /// What is in the ROM, once the guest has read it.
    rom: OnceLock<Vec<u8>>,
    /// Where the MSI-X table and pending bits are.
    msix: Option<MsixPlaces>,
    inner: Mutex<Inner>,
    /// The number of threads that wait for `inner` to attach, stop, reset or detach the device. vCPUs yield to them.
    waiting: AtomicUsize,
    /// How many resets the guest has asked for. Those who wait for the same one share it: any number of vCPUs that reset the
    /// device at once cost two resets, the one that was under way when they asked and one more.
    resets_asked: AtomicU64,
    /// Whether config space could not be read, or read as that of a function that is gone.
    gone: AtomicBool,
    /// Whether the guest's traces may still be in it, as the host took it away before it could be reset.
    unreset: AtomicBool,
    /// Open while the device is attached. Opened and closed with `inner` locked.
    gate: Gate,
}

#[derive(Debug)]
struct Inner {
    state: State,
    /// What detaching has to do, besides clearing `state`: from when it is attached until all of it is done.
    owed: Option<Owed>,
    /// How many resets had been asked for when the last one began. All of them are done.
    resets_served: u64,
    /// Whether that one failed.
    reset_failed: bool,
}

/// What detaching a device has to do. What is done is taken out.
#[derive(Debug)]
struct Owed {
    ram: DmaRam,
    /// Whether the VMM knows the device's file.
    told: bool,
    /// Whether the guest has used the function since its last reset.
    reset: bool,
    /// Whether it was tried.
    tried: bool,
}

#[derive(Clone, Debug)]
struct MsixPlaces {
    table: (u8, Range<u64>),
    pending: (u8, Range<u64>),
}

impl VfioPciDevice {
    /// Makes a device of `file`, for the guest that `vmm` runs. All of a guest's devices must be open in one address space,
    /// which is its own. Reads the device, changes nothing.
    ///
    /// # Errors
    /// When the device can't be read, is no endpoint, or gives answers that cannot be.
    pub fn new(file: Arc<dyn DeviceFile>, vmm: Arc<dyn Vmm>) -> Result<Arc<Self>, DeviceError> {
        Self::with_options(file, vmm, DeviceOptions::default())
    }

    /// As [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_options(
        file: Arc<dyn DeviceFile>,
        vmm: Arc<dyn Vmm>,
        options: DeviceOptions,
    ) -> Result<Arc<Self>, DeviceError> {
        let config = read_config(&*file)?;
        let bars = bars::find(&*file, &config, &options.rom)?;
        let (msi_vectors, _) = vectors(&*file, MSI_IRQ, MSI_VECTORS)?;
        let (msix_vectors, growable) = vectors(&*file, MSIX_IRQ, MSIX_VECTORS)?;
        let sizes = bars::sizes(&bars);
        let facts = Facts {
            bars: bars::registers(&bars),
            msi_vectors,
            msix_vectors,
            bar_sizes: std::array::from_fn(|index| {
                let is_memory = |bar: &&Bar| usize::from(bar.index) == index && !bar.io;
                bars.iter().find(is_memory).map_or(0, |bar| bar.size)
            }),
            reset: file.info().reset,
        };
        let config_pin = config.get(usize::from(regs::INTERRUPT_PIN)).copied().unwrap_or(0);
        let config = ConfigSpace::new(&config, &facts);
        let msi_count = config.msi.map_or(0, |msi| msi.capable);
        let msix_count = config.msix.map_or(0, |msix| msix.vectors);
        let msix = config.msix.map(|msix| MsixPlaces {
            table: (msix.table.0, msix.table.1..msix.table.1 + msix.table_len()),
            pending: (msix.pending.0, msix.pending.1..msix.pending.1 + msix.pending_len()),
        });
        let irqs = (
            Vectors::new(file.clone(), vmm.clone(), MSI_IRQ, msi_count, false),
            Vectors::new(file.clone(), vmm.clone(), MSIX_IRQ, msix_count, growable),
            Intx::new(file.clone(), vmm.clone(), config_pin)?,
        );
        let state = State::new(file.clone(), vmm.clone(), config, bars, irqs, options.peers.clone());
        Ok(Arc::new(Self {
            file,
            vmm,
            options,
            sizes,
            rom: OnceLock::new(),
            msix,
            inner: Mutex::new(Inner { state, owed: None, resets_served: 0, reset_failed: false }),
            waiting: AtomicUsize::new(0),
            resets_asked: AtomicU64::new(0),
            gone: AtomicBool::new(false),
            unreset: AtomicBool::new(false),
            gate: Gate::default(),
        }))
    }

    /// Whether the host takes the function away ([`DeviceFile::is_wanted_back`]): detach and drop it before others, as
    /// whoever takes it waits for that.
    pub fn is_wanted_back(&self) -> bool {
        self.file.is_wanted_back()
    }

    /// Whether it was detached without a reset, which can't be made while the host takes the function away. What its guest
    /// left in it stays there until it loses power, or the next guest that gets it starts.
    pub fn was_left_unreset(&self) -> bool {
        self.unreset.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn resets_asked(&self) -> u64 {
        self.resets_asked.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // These threads poll, so vCPUs that access the device without pause could keep them out until their deadline.
        while self.waiting.load(Ordering::SeqCst) > 0 {
            sleep(POLL);
        }
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`lock`](Self::lock), for what must end even when a vCPU is stuck in an access to the device.
    fn lock_in_time(&self) -> Result<MutexGuard<'_, Inner>, DeviceError> {
        let until = Instant::now() + ACCESS_DEADLINE;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let locked = loop {
            match self.inner.try_lock() {
                Ok(inner) => break Ok(inner),
                Err(TryLockError::Poisoned(inner)) => break Ok(inner.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(POLL),
                Err(TryLockError::WouldBlock) => {
                    break Err(DeviceError::Stuck { deadline: ACCESS_DEADLINE });
                }
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        locked
    }

    /// Tells the VMM where BARs decode.
    fn publish(&self, state: &State) {
        self.vmm.bars_changed(self.address(), &state.decoded());
    }

    /// Reads the device's config space; a failure means that it is gone.
    fn read_device(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        let result = self.file.read(CONFIG_REGION, offset as u64, data);
        self.note_gone(result)
    }

    /// Checks that the function answers, where the guest looks for it. vfio-pci knows the IDs by heart: what it asks the function
    /// for is revision and class, which never read all ones.
    fn check_present(&self) -> Result<()> {
        let mut class = [0; 4];
        self.read_device(regs::CLASS_REVISION.into(), &mut class)?;
        if class != [0xff; 4] {
            return Ok(());
        }
        let reason = "its class reads all ones".into();
        self.note_gone(Err(VfioError::Lost { address: self.address(), reason }))
    }

    fn write_device(&self, offset: usize, data: &[u8]) -> Result<()> {
        let result = self.file.write(CONFIG_REGION, offset as u64, data);
        self.note_gone(result)
    }

    fn note_gone(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result
            && !self.gone.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(device = %self.address(), %error, "the device is gone: its guest reads all ones");
        }
        result
    }

    /// Stops DMA, decoding and INTx in the device.
    fn quiesce(&self) -> Result<()> {
        self.write_device(regs::COMMAND.into(), &regs::COMMAND_INTX_DISABLE.to_le_bytes())
    }

    /// Resets the function, with the guest's view already cleared.
    fn reset_function(&self) -> Result<()> {
        if self.is_wanted_back() {
            return Err(VfioError::WantedBack { address: self.address() });
        }
        self.file.wake()?;
        self.quiesce()?;
        match self.file.reset_and_prove() {
            Ok(report) => tracing::debug!(device = %self.address(), ?report, "the device was reset"),
            Err(error @ VfioError::Reset { .. }) if self.options.without_reset => {
                tracing::warn!("{error} (accepted)");
            }
            Err(error) => return Err(error),
        }
        self.quiesce()?;
        self.gone.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Asks for a reset, before it waits for its turn.
    fn ask_for_reset(&self) -> u64 {
        self.resets_asked.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Resets the function, unless a reset began after this one was asked for.
    fn reset_asked(&self, inner: &mut Inner, number: u64) -> Result<(), DeviceError> {
        if inner.resets_served < number {
            inner.resets_served = self.resets_asked.load(Ordering::SeqCst);
            let reset = self.clear_and_reset(&mut inner.state);
            inner.reset_failed = reset.is_err();
            return reset;
        }
        match inner.reset_failed {
            false => Ok(()),
            true => {
                let reason = "the one that it was made with failed".to_owned();
                Err(VfioError::Reset { address: self.address(), reason }.into())
            }
        }
    }

    /// Takes everything from the guest and resets the function. Does all of it even if a part fails, and returns the
    /// first failure.
    fn clear_and_reset(&self, state: &mut State) -> Result<(), DeviceError> {
        let cleared = self.clear(state);
        cleared.and(self.reset_function().map_err(DeviceError::from))
    }

    /// Takes everything from the guest. Does all of it even if a part fails, and returns the first failure.
    fn clear(&self, state: &mut State) -> Result<(), DeviceError> {
        let master = self.stop_master();
        let cleared = state.clear();
        self.publish(state);
        self.file.set_at_rest(true);
        // One that was pulled does not answer any more; one that was not does no more DMA once it is closed.
        let forgiven = |result| match result {
            Err(DeviceError::Device(_)) if self.is_wanted_back() => Ok(()),
            result => result,
        };
        forgiven(master.map_err(DeviceError::from)).and(forgiven(cleared))
    }

    /// Stops the device's DMA and interrupts, and nothing else.
    fn stop_master(&self) -> Result<()> {
        let mut command = [0; 2];
        self.read_device(regs::COMMAND.into(), &mut command)?;
        let command = u16::from_le_bytes(command) & !regs::COMMAND_MASTER | regs::COMMAND_INTX_DISABLE;
        self.write_device(regs::COMMAND.into(), &command.to_le_bytes())
    }

    /// Reads at most 4 bytes of config space of an attached device.
    fn read_chunk(&self, state: &mut State, offset: usize, data: &mut [u8]) -> Result<()> {
        if overlaps(offset, data.len(), regs::VENDOR_ID.into(), 4) {
            self.check_present()?;
        }
        if state.config.is_live(offset, data.len()) {
            self.read_device(offset, data)?;
        }
        if let Some(at) = state.config.msi.and_then(|msi| msi.pending())
            && overlaps(offset, data.len(), at.into(), 4)
        {
            let pending = state.msi.pending(0) as u32;
            state.config.set32(at, pending);
        }
        state.config.merge(offset, data);
        Ok(())
    }

    /// Writes at most 4 bytes of config space of an attached device.
    fn write_chunk(
        &self,
        inner: &mut Inner,
        offset: usize,
        data: &[u8],
        reset: u64,
    ) -> Result<(), DeviceError> {
        let state = &mut inner.state;
        let len = data.len();
        let mut chunk = [0; 4];
        let Some(data_copy) = chunk.get_mut(..len) else { return Ok(()) };
        data_copy.copy_from_slice(data);
        let data = data_copy;

        if let Some(express) = state.config.express {
            let high = usize::from(express + regs::EXP_DEVCTL) + 1;
            let bit = (regs::EXP_DEVCTL_BCR_FLR >> 8) as u8;
            if high.checked_sub(offset).and_then(|at| data.get(at)).is_some_and(|byte| byte & bit != 0)
                && self.file.info().reset
            {
                return self.reset_asked(inner, reset);
            }
        }
        if let Some(power) = state.config.power {
            let control = usize::from(power + regs::PM_CTRL);
            let now = state.config.get16(power + regs::PM_CTRL) & regs::PM_CTRL_STATE_MASK;
            if let Some(byte) = control.checked_sub(offset).and_then(|at| data.get_mut(at)) {
                // D1 and D2 are not offered: a write of an unsupported state changes nothing.
                if !matches!(u16::from(*byte) & regs::PM_CTRL_STATE_MASK, 0 | regs::PM_CTRL_D3HOT) {
                    *byte = *byte & !(regs::PM_CTRL_STATE_MASK as u8) | now as u8;
                }
            }
        }

        let commanded = overlaps(offset, len, regs::COMMAND.into(), 2);
        let moved = commanded
            || overlaps(offset, len, regs::BASE_ADDRESS_0.into(), 24)
            || overlaps(offset, len, regs::ROM_ADDRESS.into(), 4)
            || state
                .config
                .power
                .is_some_and(|power| overlaps(offset, len, (power + regs::PM_CTRL).into(), 2));
        let before = state.config.bytes(offset);
        state.config.write(offset, data);
        if moved {
            let withdrawn = state.withdraw_bars();
            if withdrawn.is_err() {
                // The device keeps decoding where it did, and the guest must read that.
                state.config.restore(offset, &before[..len]);
                state.expose_bars();
            }
            self.publish(state);
            withdrawn?;
        }
        if commanded && state.is_on() {
            self.file.set_at_rest(false);
        }
        if state.config.is_through(offset, len) {
            let mut device = [0; 4];
            if let Some(device) = device.get_mut(..len) {
                self.read_device(offset, device)?;
                state.config.compose(offset, data, device);
                self.write_device(offset, device)?;
            }
        }
        if moved {
            state.expose_bars();
            self.publish(state);
        }
        let msi = state.config.msi.is_some_and(|msi| msi.touched(offset, len));
        let msix = state.config.msix.is_some_and(|msix| msix.touched(offset, len));
        if msi {
            state.sync_msi()?;
        }
        if msix {
            state.sync_msix()?;
        }
        if commanded || msi || msix {
            state.sync_intx();
            self.set_intx_disable(state)?;
        }
        Ok(())
    }

    /// Has the device, for which VFIO stands in, disable its pin as the guest wants it, and while it leads nowhere: nobody on the
    /// host would answer it, and that would cost others on the same line their interrupts.
    fn set_intx_disable(&self, state: &State) -> Result<()> {
        let mut command = [0; 2];
        self.read_device(regs::COMMAND.into(), &mut command)?;
        let command = u16::from_le_bytes(command);
        let asked = state.config.get16(regs::COMMAND) & regs::COMMAND_INTX_DISABLE;
        let wanted = if state.intx.is_connected() { asked } else { regs::COMMAND_INTX_DISABLE };
        match command & !regs::COMMAND_INTX_DISABLE | wanted {
            same if same == command => Ok(()),
            other => self.write_device(regs::COMMAND.into(), &other.to_le_bytes()),
        }
    }

    /// Attaches a device that is not. Undoes everything if a part fails; what can't be undone stays owed.
    fn give(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        self.file.set_at_rest(true);
        self.reset_function()?;
        let ram = DmaRam::new(self.file.space());
        let owed = inner.owed.insert(Owed { ram, told: false, reset: false, tried: false });
        match self.give_memory(owed) {
            Ok(()) => {
                owed.reset = true;
                self.unreset.store(false, Ordering::Relaxed);
                self.options.peers.iter().for_each(|peers| peers.join(self.address()));
                self.gate.open();
                Ok(())
            }
            Err(cause) => {
                if let Err(error) = self.take_back(inner) {
                    tracing::error!(device = %self.address(), %error, "attaching it failed and is not undone yet");
                }
                Err(cause)
            }
        }
    }

    fn give_memory(&self, owed: &mut Owed) -> Result<(), DeviceError> {
        if let Some(file) = self.file.kvm_file() {
            self.vmm.add_vfio_file(file)?;
            owed.told = true;
        }
        owed.ram.map(&self.vmm.ram(), self.options.cancel.as_ref())
    }

    /// Takes everything from the guest that it still has. Does all of it even if a part fails, and returns the first
    /// failure; what failed stays owed.
    fn take_back(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        let Inner { state, owed: place, .. } = inner;
        let Some(owed) = place else { return Ok(()) };
        self.gate.close(ACCESS_DEADLINE)?;
        owed.tried = true;
        let mut result = self.clear(state);
        if owed.reset {
            let reset = self.reset_function().or_else(|error| match error {
                VfioError::WantedBack { .. } => {
                    self.unreset.store(true, Ordering::Relaxed);
                    Ok(())
                }
                error => Err(error),
            });
            // A guest that could still reach it may have used it since.
            owed.reset = reset.is_err() || result.is_err();
            result = result.and(reset.map_err(DeviceError::from));
        }
        state.forget_mappings();
        if let Some(file) = self.file.kvm_file().filter(|_| owed.told) {
            let forgotten = self.vmm.remove_vfio_file(file);
            owed.told = forgotten.is_err();
            result = result.and(forgotten.map_err(DeviceError::from));
        }
        result = result.and(owed.ram.unmap_all().map_err(DeviceError::from));
        if result.is_ok() {
            *place = None;
            self.options.peers.iter().for_each(|peers| peers.leave(self.address()));
        }
        result
    }

    /// Whether the guest reaches the device.
    fn is_served(&self) -> bool {
        self.gate.is_open() && !self.gone.load(Ordering::Relaxed)
    }

    /// Checks that an access lies in a BAR.
    fn check(&self, bar: u8, offset: u64, len: usize) -> Result<(), DeviceError> {
        let size = self.sizes.get(usize::from(bar)).copied().unwrap_or(0);
        match offset.checked_add(len as u64) {
            Some(end) if end <= size => Ok(()),
            _ => Err(DeviceError::OutOfRange { bar, offset, len }),
        }
    }

    /// The expansion ROM. The device's is read once: nothing in it changes, and its guest reads it in small pieces, each an exit.
    fn read_rom(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let rom = match self.rom.get() {
            Some(rom) => rom,
            None => {
                let mut rom = vec![0xff; self.sizes[usize::from(bars::ROM)] as usize];
                match &self.options.rom {
                    Rom::Image(image) => {
                        rom.iter_mut().zip(image.bytes()).for_each(|(byte, &image)| *byte = image);
                    }
                    _ => self.file.read(ROM_REGION, 0, &mut rom)?,
                }
                self.rom.get_or_init(|| rom)
            }
        };
        if let Some(bytes) = rom.get(offset as usize..).and_then(|rest| rest.get(..data.len())) {
            data.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The MSI-X structures, if the access touches one.
    fn msix_at(&self, bar: u8, offset: u64, len: usize) -> Option<&MsixPlaces> {
        let end = offset + len as u64;
        let hit = |place: &(u8, Range<u64>)| place.0 == bar && offset < place.1.end && place.1.start < end;
        self.msix.as_ref().filter(|msix| hit(&msix.table) || hit(&msix.pending))
    }

    /// Reads a BAR into `data`, which is all ones. An error may leave some bytes read.
    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        self.check(bar, offset, data.len())?;
        let Some(msix) = self.msix_at(bar, offset, data.len()) else {
            let Some(_access) = self.gate.enter().filter(|_| self.is_served()) else { return Ok(()) };
            return Ok(match bar {
                bars::ROM => self.read_rom(offset, data),
                _ => self.file.read(bar.into(), offset, data),
            }?);
        };
        let inner = self.lock();
        if !self.is_served() {
            return Ok(());
        }
        let mut pending = (None, 0u64);
        for (at, byte) in (offset..).zip(data) {
            if msix.table.0 == bar && msix.table.1.contains(&at) {
                *byte = inner.state.table.byte(at - msix.table.1.start);
            } else if msix.pending.0 == bar && msix.pending.1.contains(&at) {
                let at = at - msix.pending.1.start;
                let first = (at / 8 * 64) as u32;
                if pending.0 != Some(first) {
                    pending = (Some(first), inner.state.msix.pending(first));
                }
                *byte = (pending.1 >> (at % 8 * 8)) as u8;
            } else {
                let mut single = [0xff];
                self.file.read(bar.into(), at, &mut single)?;
                *byte = single[0];
            }
        }
        Ok(())
    }
}

impl PassthroughDevice for VfioPciDevice {
    fn address(&self) -> PciAddress {
        self.file.address()
    }

    fn slot(&self) -> PciAddress {
        placement::slot_of(self.address(), self.file.is_virtual())
    }

    fn connect_pins(&self, lines: [u32; 4]) {
        self.lock().state.connect_pins(lines);
    }

    fn attach(&self) -> Result<(), DeviceError> {
        let mut inner = self.lock_in_time()?;
        if self.gate.is_open() {
            return Ok(());
        }
        // What an earlier detach could not do.
        self.take_back(&mut inner)?;
        inner.state.config.reset();
        inner.state.table.reset();
        self.give(&mut inner)
    }

    fn stop(&self) -> Result<(), DeviceError> {
        let mut inner = self.lock_in_time()?;
        if inner.owed.is_none() {
            return Ok(());
        }
        let cleared = self.clear(&mut inner.state);
        cleared.and(self.quiesce().map_err(DeviceError::from))
    }

    fn detach(&self) -> Result<(), DeviceError> {
        let mut inner = self.lock_in_time()?;
        self.take_back(&mut inner)
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        let mut inner = self.lock();
        if !self.gate.is_open() {
            return;
        }
        let offset = usize::from(offset);
        let len = data.len().min(EXTENDED_CONFIG_SIZE.saturating_sub(offset));
        let Some(inside) = data.get_mut(..len) else { return };
        for (index, chunk) in inside.chunks_mut(4).enumerate() {
            if self.gone.load(Ordering::Relaxed)
                || self.read_chunk(&mut inner.state, offset + index * 4, chunk).is_err()
            {
                chunk.fill(0xff);
            }
        }
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        // In case that it is one.
        let reset = self.ask_for_reset();
        let mut inner = self.lock();
        if !self.is_served() {
            return;
        }
        let offset = usize::from(offset);
        let Some(inside) = data.get(..data.len().min(EXTENDED_CONFIG_SIZE.saturating_sub(offset))) else {
            return;
        };
        for (index, chunk) in inside.chunks(4).enumerate() {
            if let Err(error) = self.write_chunk(&mut inner, offset + index * 4, chunk, reset) {
                // A guest may cause this as often as it likes: whoever shows it limits how often.
                tracing::warn!(device = %self.address(), offset, %error, "a config write of the guest failed");
            }
        }
    }

    fn ram_added(&self, region: &RamRegion) -> Result<(), DeviceError> {
        let mut inner = self.lock_in_time()?;
        match &mut inner.owed {
            Some(owed) if self.gate.is_open() => owed.ram.map(std::slice::from_ref(region), None),
            _ => Ok(()),
        }
    }

    fn ram_removed(&self, guest: u64) -> Result<(), DeviceError> {
        let mut inner = self.lock_in_time()?;
        inner.owed.as_mut().map_or(Ok(()), |owed| Ok(owed.ram.unmap(guest)?))
    }

    fn check_discard(&self, guest: u64, len: u64) -> Result<(), DeviceError> {
        let inner = self.lock_in_time()?;
        match &inner.owed {
            Some(owed) if owed.ram.reaches(guest, len) => {
                Err(DeviceError::Pinned { guest, len, device: self.address() })
            }
            _ => Ok(()),
        }
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        data.fill(0xff);
        let result = self.read_bar(bar, offset, data);
        if result.is_err() {
            data.fill(0xff);
        }
        result
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.check(bar, offset, data.len())?;
        let Some(msix) = self.msix_at(bar, offset, data.len()) else {
            let Some(_access) = self.gate.enter().filter(|_| self.is_served() && bar != bars::ROM) else {
                return Ok(());
            };
            return Ok(self.file.write(bar.into(), offset, data)?);
        };
        let mut inner = self.lock();
        if !self.is_served() {
            return Ok(());
        }
        let end = offset + data.len() as u64;
        // What of the access lies in the table, then what lies in neither structure; pending bits can't be written.
        if msix.table.0 == bar {
            let inside = offset.max(msix.table.1.start)..end.min(msix.table.1.end);
            if let Some(part) = slice(data, offset, &inside)
                && let Some(vectors) = inner.state.table.write(inside.start - msix.table.1.start, part)
            {
                inner.state.sync_vectors(vectors.clone()).inspect_err(|error| {
                    let device = self.address();
                    tracing::warn!(%device, ?vectors, %error, "the guest may lose interrupts of the device");
                })?;
            }
        }
        for (at, byte) in (offset..).zip(data) {
            let ours = |place: &(u8, Range<u64>)| place.0 == bar && place.1.contains(&at);
            if !ours(&msix.table) && !ours(&msix.pending) {
                self.file.write(bar.into(), at, std::slice::from_ref(byte))?;
            }
        }
        Ok(())
    }

    fn report_error(&self, severity: ErrorSeverity) -> bool {
        self.lock_in_time()
            .is_ok_and(|mut inner| self.is_served() && inner.state.config.report_error(severity))
    }

    fn reset(&self) -> Result<(), DeviceError> {
        let number = self.ask_for_reset();
        let mut inner = self.lock_in_time()?;
        if inner.owed.is_none() { Ok(()) } else { self.reset_asked(&mut inner, number) }
    }
}

impl Drop for VfioPciDevice {
    fn drop(&mut self) {
        // What was tried failed, and its caller knows. Another try would only take as long as the last.
        let tried = self.lock().owed.as_ref().is_none_or(|owed| owed.tried);
        if !tried && let Err(error) = self.detach() {
            tracing::error!(device = %self.address(), %error, "the device could not be detached in order");
        }
    }
}

/// The part of `data`, which starts at `offset`, that lies in `range`.
fn slice<'a>(data: &'a [u8], offset: u64, range: &Range<u64>) -> Option<&'a [u8]> {
    let start = usize::try_from(range.start.checked_sub(offset)?).ok()?;
    let end = usize::try_from(range.end.checked_sub(offset)?).ok()?;
    data.get(start..end)
}

fn overlaps(offset: usize, len: usize, start: usize, size: usize) -> bool {
    offset < start + size && start < offset + len
}

/// All of the device's config space: 256 or 4096 bytes.
fn read_config(file: &dyn DeviceFile) -> Result<Vec<u8>> {
    let invalid_response = |what: String| VfioError::InvalidResponse {
        operation: "a read of config space",
        path: file.address().to_string(),
        what,
    };
    let size = file.region(CONFIG_REGION)?.size;
    let size = if size >= EXTENDED_CONFIG_SIZE as u64 {
        EXTENDED_CONFIG_SIZE
    } else {
        CONFIG_SIZE.min(size as usize)
    };
    let mut config = vec![0; size];
    file.read(CONFIG_REGION, 0, &mut config)?;
    match config.get(..16) {
        None => Err(invalid_response(format!("{size} bytes, which are too few"))),
        Some([0xff, 0xff, 0xff, 0xff, ..]) => {
            Err(invalid_response("all ones: it is gone, without power, or hung".into()))
        }
        Some(header) => match header.get(14).map(|kind| kind & 0x7f) {
            Some(0) => Ok(config),
            Some(kind) => Err(invalid_response(format!("header type {kind}, where an endpoint has 0"))),
            None => Err(invalid_response("no header".into())),
        },
    }
}

/// How many vectors VFIO has of an interrupt index, and whether it can enable more while some are.
fn vectors(file: &dyn DeviceFile, index: u32, most: u32) -> Result<(u32, bool)> {
    let info = file.irq(index)?;
    if info.count == 0 || !info.eventfd {
        return Ok((0, false));
    }
    Ok((info.count.min(most), !info.noresize))
}
