//! An open VFIO device: its regions, interrupts and resets.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, pread, pwrite};
use vfio_bindings::bindings::vfio as uapi;

use super::errors::{ErrorCounts, UncorrectableError};
use super::failure::{check_vectors, invalid_response, system};
use super::group::grown;
use super::interface::{
    AddressSpace, DeviceFile, DeviceInfo, IrqInfo, IrqTrigger, Mapping, RegionInfo, ResetReport, Result,
    VfioError,
};
use super::keeper::{DeviceParts, Keeper};
use super::parse::{self, HotResetInfo, Region};
use super::space::{Member, Space};
use super::sys::device::Action;
use super::{CONFIG_REGION, ERR_IRQ, REQ_IRQ, power, reset, sys};
use crate::pci::regs;
use crate::{Host, PciAddress};

/// Most vectors of an interrupt index: those of MSI-X (PCI Express Base 6.0, 7.7.2.2).
const MAX_VECTORS: u32 = 2048;

/// An open function, in the Linux kernel: what [`Claimed::open`](crate::manager::Claimed::open) gives.
///
/// Dropping it closes the function, which the Linux kernel then resets if it can, and takes its group out of the address
/// space. That waits for the last [`Mapping`] of one of its regions; [`close`](Self::close) tells when one is left.
pub struct VfioDevice {
    inner: Arc<Inner>,
}

/// What a mapped region keeps open.
struct Inner {
    address: PciAddress,
    name: String,
    info: DeviceInfo,
    is_virtual: bool,
    regions: Vec<OnceLock<Region>>,
    identity: OnceLock<[u8; 8]>,
    /// Readable from when the host wants it back.
    wanted: OnceLock<OwnedFd>,
    /// Readable from when it had an uncorrectable error, and what had been counted when that was last looked at.
    errors: OnceLock<(OwnedFd, Mutex<ErrorCounts>)>,
    /// That opening it reset it, until anything is done with it.
    reset_by_open: Mutex<Option<ResetReport>>,
    // The order matters: the file is closed before it leaves the space, and the claim can be released after both.
    file: OwnedFd,
    member: Member,
    origin: Origin,
}

impl AsFd for Inner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Who opened a function.
enum Origin {
    /// This process, on this host; with what holds the function's claim until it is closed.
    Opened(Box<Host>, #[expect(dead_code, reason = "it is only held")] Arc<dyn Any + Send + Sync>),
    /// Another.
    Received(Arc<dyn Keeper>),
}

/// Whether a function is still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It answers as it did when it was opened.
    Present,
    /// It is in a sleep state in which it may not answer.
    Asleep,
    /// It is gone, or another one is in its place: what shows it.
    Gone(String),
}

impl VfioDevice {
    /// `reset` is what shows that opening it reset it.
    pub(super) fn open(
        host: &Host,
        address: PciAddress,
        file: OwnedFd,
        member: Member,
        reset: Option<ResetReport>,
        claim: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let info = match query(&file, &address.to_string()) {
            Ok(info) => info,
            Err(error) => {
                // The file first, as everywhere.
                drop(file);
                drop(member);
                return Err(error);
            }
        };
        let device = Self::new(Inner {
            address,
            name: address.to_string(),
            info,
            is_virtual: host.pci_device(address).join("physfn").exists(),
            regions: Vec::new(),
            identity: OnceLock::new(),
            wanted: OnceLock::new(),
            errors: OnceLock::new(),
            // Where the Linux kernel could not reset it, it says so here.
            reset_by_open: Mutex::new(reset.filter(|_| info.reset)),
            file,
            member,
            origin: Origin::Opened(Box::new(host.clone()), claim),
        });
        device.listen(host)?;
        DeviceFile::wake(&device)?;
        let identity = device.read_identity()?;
        // Nobody else has the value yet.
        let _ = device.inner.identity.set(identity);
        Ok(device)
    }

    fn new(mut inner: Inner) -> Self {
        inner.regions = (0..inner.info.regions).map(|_| OnceLock::new()).collect();
        Self { inner: Arc::new(inner) }
    }

    /// What another process needs to use the function, in a space that it [received](Space::receive) before. It stays open here,
    /// for its [`Keeper`], until both have closed it.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn share(&self) -> io::Result<DeviceParts> {
        let inner = &*self.inner;
        let group = inner.member.group.as_ref();
        Ok(DeviceParts {
            address: inner.address,
            info: inner.info,
            is_virtual: inner.is_virtual,
            file: inner.file.try_clone()?,
            wanted: self.wanted_back().map(|event| event.try_clone_to_owned()).transpose()?,
            group: group
                .map(|(number, file)| Ok::<_, io::Error>((*number, file.try_clone()?)))
                .transpose()?,
            // From now on only who uses it knows.
            reset_by_open: self.take_reset_by_open(),
        })
    }

    /// Puts the function [at rest](DeviceFile::set_at_rest) in the place of the process with which it was [shared](Self::share), and
    /// which has gone without doing so: it is awake, and its DMA, decoding and interrupts are stopped.
    ///
    /// # Errors
    /// When the host takes it away, or it does not answer.
    pub fn put_at_rest(&self) -> Result<()> {
        DeviceFile::wake(self)?;
        reset::begin(self)?;
        self.write(CONFIG_REGION, regs::COMMAND.into(), &regs::COMMAND_INTX_DISABLE.to_le_bytes())?;
        DeviceFile::set_at_rest(self, true);
        Ok(())
    }

    /// The function that another process [shares](Self::share), in the space that it shared. `keeper` does what the descriptors
    /// do not do.
    ///
    /// # Errors
    /// When it is in the space already, or was opened in a space of another back end; on a group's first device, when what is
    /// mapped in the space can't be mapped.
    pub fn receive(parts: DeviceParts, space: &Arc<Space>, keeper: Arc<dyn Keeper>) -> Result<Arc<Self>> {
        let DeviceParts { address, info, is_virtual, reset_by_open, file, wanted, group } = parts;
        let member = space.join_received(address, group)?;
        Ok(Arc::new(Self::new(Inner {
            address,
            name: address.to_string(),
            info,
            is_virtual,
            regions: Vec::new(),
            identity: OnceLock::new(),
            wanted: wanted.map_or_else(OnceLock::new, OnceLock::from),
            errors: OnceLock::new(),
            reset_by_open: Mutex::new(reset_by_open),
            file,
            member,
            origin: Origin::Received(keeper),
        })))
    }

    /// Closes the function and takes its group out of the address space.
    ///
    /// # Errors
    /// [`VfioError::Busy`] when somebody still holds the device or a mapping of it, which then closes it when dropped;
    /// otherwise what the Linux kernel refused. It is closed even then.
    pub fn close(self: Arc<Self>) -> Result<()> {
        let address = self.inner.address;
        let inner = Arc::into_inner(self).and_then(|device| Arc::into_inner(device.inner));
        let Some(Inner { file, mut member, .. }) = inner else {
            return Err(VfioError::Busy {
                what: address.to_string(),
                reason: "it, or a mapping of one of its regions, is still in use; drop that first".into(),
            });
        };
        drop(file);
        member.leave()
    }

    /// What shows that opening it reset it, if nothing was done with it since. Once.
    pub(super) fn take_reset_by_open(&self) -> Option<ResetReport> {
        self.inner.reset_by_open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Has the Linux kernel say when it wants the function back, and when it had an uncorrectable error. Nobody else has the
    /// values yet that are set here.
    fn listen(&self, host: &Host) -> Result<()> {
        if let Some(event) = self.hear(REQ_IRQ)? {
            let _ = self.inner.wanted.set(event);
        }
        let before = ErrorCounts::of(host, self.inner.address);
        if let Some(event) = self.hear(ERR_IRQ)? {
            let _ = self.inner.errors.set((event, Mutex::new(before)));
        }
        Ok(())
    }

    /// What an interrupt of vfio-pci's own makes readable; `None` where there is no such interrupt.
    fn hear(&self, index: u32) -> Result<Option<OwnedFd>> {
        if self.irq(index)?.count == 0 {
            return Ok(None);
        }
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| self.io_error("eventfd", error))?;
        self.set_triggers(index, 0, &[IrqTrigger::Eventfd(event.as_fd())])?;
        Ok(Some(event))
    }

    /// Whether the function, or a port above it, had an uncorrectable error since this was last asked, and which, by the Linux
    /// kernel's counters. Always `None` where the function has no PCI Express capability, or was [received](Self::receive).
    ///
    /// Its guest is told by [`PassthroughDevice::report_error`](crate::PassthroughDevice::report_error).
    pub fn take_error(&self) -> Option<UncorrectableError> {
        let Origin::Opened(host, _) = &self.inner.origin else { return None };
        let (event, before) = self.inner.errors.get()?;
        rustix::io::read(event, &mut [0; 8]).ok()?;
        let now = ErrorCounts::of(host, self.inner.address);
        let mut before = before.lock().unwrap_or_else(PoisonError::into_inner);
        let error = now.since(&before);
        *before = now;
        Some(error)
    }

    /// Readable from when the host wants the function back, as [`DeviceFile::is_wanted_back`] tells; it must not be read.
    /// `None` where the Linux kernel does not say. Other triggers of [`REQ_IRQ`] take its place.
    pub fn wanted_back(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wanted.get().map(AsFd::as_fd)
    }

    /// The address space that it is in.
    pub fn space(&self) -> &Arc<Space> {
        self.inner.member.space()
    }

    /// Whether the function is still there.
    ///
    /// A function that was pulled may read as all ones or as zeros, vfio-pci goes on to report the vendor that it had,
    /// and one that sleeps in D3cold reads as all ones too. So this compares what identifies the function with what
    /// it was when it was opened, and asks sysfs whether it is asleep.
    pub fn presence(&self) -> Presence {
        match &self.inner.origin {
            Origin::Received(keeper) => return keeper.presence(),
            Origin::Opened(host, _) if power::is_cold(host, self.inner.address) => return Presence::Asleep,
            Origin::Opened(..) => {}
        }
        match (self.read_identity(), self.inner.identity.get()) {
            (Ok(now), Some(then)) if now == *then => Presence::Present,
            (Ok(now), Some(then)) => Presence::Gone(format!(
                "class and subsystem read as {now:02x?}, and as {then:02x?} when it was opened"
            )),
            (Ok(_), None) => Presence::Present,
            (Err(error), _) => Presence::Gone(error.to_string()),
        }
    }

    /// Whether the Linux kernel has begun to take it from its driver, by its link in sysfs: whoever has the device open, too, may
    /// have turned off what tells of that.
    fn is_unbound(&self) -> bool {
        let Origin::Opened(host, _) = &self.inner.origin else { return false };
        let link = std::fs::read_link(host.pci_device(self.inner.address).join("driver"));
        link.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    }

    /// Revision, class and subsystem: what vfio-pci does not answer from memory but asks the hardware for.
    fn read_identity(&self) -> Result<[u8; 8]> {
        let mut identity = [0; 8];
        let (class, subsystem) = identity.split_at_mut(4);
        self.read(uapi::VFIO_PCI_CONFIG_REGION_INDEX, 0x08, class)?;
        self.read(uapi::VFIO_PCI_CONFIG_REGION_INDEX, 0x2c, subsystem)?;
        Ok(identity)
    }

    /// Region `index`, asked for once.
    fn region_of(&self, index: u32) -> Result<&Region> {
        const OPERATION: &str = "VFIO_DEVICE_GET_REGION_INFO";
        let inner = &*self.inner;
        let Some(cell) = inner.regions.get(index as usize) else {
            return Err(VfioError::OutOfRegion { region: index, offset: 0, len: 0 });
        };
        if let Some(region) = cell.get() {
            return Ok(region);
        }
        let answer =
            grown(|len| sys::device::region_info(inner.file.as_fd(), index, len), OPERATION, &inner.name);
        let region = match answer {
            Ok(answer) => parse::region(&answer, index, sys::page_size())
                .map_err(|what| invalid_response(OPERATION, &inner.name, what))?,
            // vfio-pci's answer for a region that this device does not have, as the VGA one.
            Err(VfioError::System { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                Region::absent(index)
            }
            Err(error) => return Err(error),
        };
        Ok(cell.get_or_init(|| region))
    }

    /// Where an access falls in the device's file.
    fn locate(&self, index: u32, offset: u64, len: usize) -> Result<u64> {
        let out = || VfioError::OutOfRegion { region: index, offset, len: len as u64 };
        let region = self.region_of(index)?;
        let end = offset.checked_add(len as u64).ok_or_else(out)?;
        if end > region.info.size {
            return Err(out());
        }
        region.offset.checked_add(offset).ok_or_else(out)
    }

    fn io_error(&self, operation: &'static str, error: Errno) -> VfioError {
        system(operation, &self.inner.name, error.into())
    }

    fn short(&self, operation: &'static str, got: usize, wanted: usize) -> VfioError {
        system(
            operation,
            &self.inner.name,
            io::Error::new(io::ErrorKind::UnexpectedEof, format!("{got} of {wanted} bytes")),
        )
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }

    pub(super) fn name(&self) -> &str {
        &self.inner.name
    }

    /// What a hot reset would touch.
    pub(super) fn hot_reset_info(&self) -> Result<HotResetInfo> {
        const OPERATION: &str = "VFIO_DEVICE_GET_PCI_HOT_RESET_INFO";
        let mut room = 8;
        loop {
            match sys::device::hot_reset_info(self.file(), room) {
                Ok(answer) => {
                    return parse::hot_reset_info(&answer)
                        .map_err(|what| invalid_response(OPERATION, self.name(), what));
                }
                Err(Ok(count)) if count > room && count <= parse::MAX_HOT_RESET => room = count,
                Err(Ok(count)) => {
                    return Err(invalid_response(
                        OPERATION,
                        self.name(),
                        format!("a set of {count} functions"),
                    ));
                }
                Err(Err(error)) => return Err(system(OPERATION, self.name(), error)),
            }
        }
    }

    /// Resets the whole slot or bus. Every group in it must be open in the device's address space.
    pub(super) fn hot_reset(&self, groups: &[Arc<OwnedFd>]) -> Result<()> {
        let groups: Vec<_> = groups.iter().map(|group| group.as_fd()).collect();
        sys::device::hot_reset(self.file(), &groups)
            .map_err(|error| system("VFIO_DEVICE_PCI_HOT_RESET", self.name(), error))
    }
}

/// What the device says of itself.
fn query(file: &OwnedFd, name: &str) -> Result<DeviceInfo> {
    const OPERATION: &str = "VFIO_DEVICE_GET_INFO";
    let answer = sys::device::info(file.as_fd()).map_err(|error| system(OPERATION, name, error))?;
    parse::device_info(&answer).map_err(|what| invalid_response(OPERATION, name, what))
}

impl fmt::Debug for VfioDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioDevice")
            .field("address", &self.inner.address)
            .field("info", &self.inner.info)
            .finish_non_exhaustive()
    }
}

/// The length of the next access: the most bytes, up to `most`, that are naturally aligned at `offset`.
fn piece(offset: u64, left: usize, most: usize) -> usize {
    let mut len = most;
    while len > 1 && (len > left || !offset.is_multiple_of(len as u64)) {
        len /= 2;
    }
    len
}

/// The most bytes of one access to a region.
fn most(region: u32) -> usize {
    match region {
        uapi::VFIO_PCI_CONFIG_REGION_INDEX => 4,
        // Reading a ROM has no side effects, and it may be megabytes.
        uapi::VFIO_PCI_ROM_REGION_INDEX => 1 << 16,
        _ => 8,
    }
}

impl DeviceFile for VfioDevice {
    fn address(&self) -> PciAddress {
        self.inner.address
    }

    fn space(&self) -> Arc<dyn AddressSpace> {
        self.inner.member.space().clone()
    }

    fn is_virtual(&self) -> bool {
        self.inner.is_virtual
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info
    }

    fn region(&self, index: u32) -> Result<RegionInfo> {
        Ok(self.region_of(index)?.info.clone())
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        let start = self.locate(region, offset, data.len())?;
        let mut done = 0;
        while let Some(rest) = data.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let position = start + done as u64;
            let len = piece(position, rest.len(), most(region));
            match pread(self.file(), &mut rest[..len], position) {
                Ok(got) if got == len => done += len,
                Ok(got) => return Err(self.short("read", got, len)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.io_error("read", error)),
            }
        }
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let start = self.locate(region, offset, data.len())?;
        if !is_quieting(region, offset, data) {
            self.take_reset_by_open();
        }
        let mut done = 0;
        while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
            let position = start + done as u64;
            let len = piece(position, rest.len(), most(region));
            match pwrite(self.file(), &rest[..len], position) {
                Ok(got) if got == len => done += len,
                Ok(got) => return Err(self.short("write", got, len)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.io_error("write", error)),
            }
        }
        Ok(())
    }

    fn map(&self, index: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>> {
        let out = || VfioError::OutOfRegion { region: index, offset, len };
        let Region { info, offset: start } = self.region_of(index)?;
        let end = offset.checked_add(len).filter(|_| len != 0).ok_or_else(out)?;
        let inside = info.mappable.iter().any(|&(first, size)| offset >= first && end <= first + size);
        if !inside || !offset.is_multiple_of(sys::page_size()) || !len.is_multiple_of(sys::page_size()) {
            return Err(out());
        }
        self.take_reset_by_open();
        let access = (info.readable, info.writable);
        let mapped =
            sys::MappedRegion::new(self.inner.clone(), index, (*start, info.size), offset..end, access);
        mapped
            .map(|mapped| Arc::new(mapped) as Arc<dyn Mapping>)
            .map_err(|error| system("mmap", self.name(), error))
    }

    fn irq(&self, index: u32) -> Result<IrqInfo> {
        const OPERATION: &str = "VFIO_DEVICE_GET_IRQ_INFO";
        if index >= self.inner.info.irqs {
            return Ok(IrqInfo { count: 0, eventfd: false, maskable: false, noresize: false });
        }
        let (flags, count) = match sys::device::irq_info(self.file(), index) {
            Ok(answer) => answer,
            // vfio-pci's answer for an index that this device does not have, as ERR without PCI Express.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (0, 0),
            Err(error) => return Err(system(OPERATION, self.name(), error)),
        };
        if count > MAX_VECTORS {
            return Err(invalid_response(OPERATION, self.name(), format!("{count} vectors")));
        }
        Ok(IrqInfo {
            count,
            eventfd: flags & uapi::VFIO_IRQ_INFO_EVENTFD != 0,
            maskable: flags & uapi::VFIO_IRQ_INFO_MASKABLE != 0,
            noresize: flags & uapi::VFIO_IRQ_INFO_NORESIZE != 0,
        })
    }

    fn set_triggers(&self, index: u32, start: u32, triggers: &[IrqTrigger<'_>]) -> Result<()> {
        const OPERATION: &str = "VFIO_DEVICE_SET_IRQS";
        if triggers.is_empty() {
            return Ok(());
        }
        let count = self.irq(index)?.count;
        let len = u32::try_from(triggers.len()).unwrap_or(u32::MAX);
        if start.checked_add(len).is_none_or(|end| end > count) {
            return Err(VfioError::System {
                operation: OPERATION,
                path: self.name().into(),
                source: io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("vectors {start} to {} of {count}", u64::from(start) + u64::from(len)),
                ),
                remedy: "enable no more vectors than the function has",
            });
        }
        let eventfds = triggers.iter().map(|trigger| match trigger {
            IrqTrigger::Eventfd(fd) => Some(*fd),
            IrqTrigger::None => None,
        });
        let answer = sys::device::set_eventfds(self.file(), Action::Trigger, index, start, eventfds)
            .map_err(|error| system(OPERATION, self.name(), error))?;
        check_vectors(self.inner.address, start + len, answer)
    }

    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()> {
        let eventfds = std::iter::once(Some(event));
        let answer = sys::device::set_eventfds(self.file(), Action::Unmask, index, 0, eventfds)
            .map_err(|error| system("VFIO_DEVICE_SET_IRQS", self.name(), error))?;
        check_vectors(self.inner.address, 1, answer)
    }

    fn disable_irqs(&self, index: u32) -> Result<()> {
        if index >= self.inner.info.irqs {
            return Ok(());
        }
        match sys::device::disable_irqs(self.file(), index) {
            // The Linux kernel refuses to disable what is not enabled. Another process may have enabled it.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                Err(system("VFIO_DEVICE_SET_IRQS", self.name(), error))
            }
            _ => Ok(()),
        }
    }

    fn reset(&self) -> Result<()> {
        self.take_reset_by_open();
        reset::reset_once(self)
    }

    fn is_wanted_back(&self) -> bool {
        let is_told = self.wanted_back().is_some_and(|event| {
            let mut events = [PollFd::new(&event, PollFlags::IN)];
            poll(&mut events, Some(&Timespec::default())) == Ok(1)
        });
        is_told || self.is_unbound()
    }

    fn wake(&self) -> Result<()> {
        match &self.inner.origin {
            Origin::Opened(host, _) => power::wake(host, self),
            Origin::Received(keeper) => keeper.wake(),
        }
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        reset::begin(self)?;
        // Taken now, whatever resets it: it says nothing of what comes after.
        let fresh = self.space().take_fresh(self.inner.address);
        match (self.take_reset_by_open(), &self.inner.origin) {
            (Some(report), _) => Ok(report),
            (None, Origin::Opened(host, _)) => reset::ladder(host, self, fresh),
            (None, Origin::Received(keeper)) => keeper.reset_and_prove(),
        }
    }

    fn set_at_rest(&self, at_rest: bool) {
        match &self.inner.origin {
            Origin::Opened(..) => self.space().set_at_rest(self.inner.address, at_rest),
            Origin::Received(keeper) => keeper.set_at_rest(at_rest),
        }
    }

    fn kvm_file(&self) -> Option<BorrowedFd<'_>> {
        match &self.inner.member.group {
            Some((_, group)) => Some(group.as_fd()),
            None => Some(self.file()),
        }
    }
}

/// Whether a write only turns decoding, DMA and interrupts off, in the Command register (PCI Local Bus 3.0, 6.2.2): there
/// is nothing then that a reset would undo.
fn is_quieting(region: u32, offset: u64, data: &[u8]) -> bool {
    const COMMAND: u64 = 4;
    const INTX_DISABLE: u16 = 1 << 10;
    let command = data.try_into().map(u16::from_le_bytes);
    (region, offset) == (uapi::VFIO_PCI_CONFIG_REGION_INDEX, COMMAND)
        && command.is_ok_and(|command| command & !INTX_DISABLE == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{is_quieting, piece, uapi};

    #[test]
    fn only_writes_that_turn_things_off_are_quieting() {
        fn check(region: u32, offset: u64, data: &[u8], expect: bool) {
            assert_eq!(is_quieting(region, offset, data), expect, "{region} {offset:#x} {data:?}");
        }
        let config = uapi::VFIO_PCI_CONFIG_REGION_INDEX;
        check(config, 4, &[0, 4], true);
        check(config, 4, &[0, 0], true);
        check(config, 4, &[4, 0], false);
        check(config, 4, &[2, 4], false);
        check(config, 4, &[0], false);
        check(config, 4, &[0; 4], false);
        check(config, 6, &[0, 0], false);
        check(0, 4, &[0, 0], false);
    }

    #[test]
    fn accesses_are_naturally_aligned() {
        fn check(offset: u64, len: usize, most: usize, expect: &[usize]) {
            let (mut position, mut left, mut pieces) = (offset, len, Vec::new());
            while left > 0 {
                let now = piece(position, left, most);
                pieces.push(now);
                position += now as u64;
                left -= now;
            }
            assert_eq!(pieces, expect, "{offset:#x}+{len}");
        }
        check(0, 4, 8, &[4]);
        check(0, 8, 8, &[8]);
        check(4, 8, 8, &[4, 4]);
        check(1, 8, 8, &[1, 2, 4, 1]);
        check(0, 8, 4, &[4, 4]);
        check(0x3e, 2, 4, &[2]);
        check(7, 1, 8, &[1]);
        check(0, 0, 8, &[]);
    }

    proptest! {
        #[test]
        fn pieces_make_progress(offset: u64, left in 1usize..64, shift in 0u32..4) {
            let len = piece(offset, left, 1 << shift);
            prop_assert!(len.is_power_of_two() && len <= left && len <= 1 << shift);
            prop_assert!(offset.is_multiple_of(len as u64));
        }
    }
}
