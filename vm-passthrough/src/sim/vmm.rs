//! A simulated VMM and DMA address space, which check what is asked of them as KVM and an IOMMU would.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::MmapRegion;

use super::Fault;
use crate::PciAddress;
use crate::guest::{BarMap, DecodedBar, MapId, MsiMessage, RamRegion, RouteId, SharedMemory, Vmm, VmmError};
use crate::iommu::IovaRange;
use crate::vfio::dma::{self, DmaMappings, Plan, Release};
use crate::vfio::{AddressSpace, Backend, DmaPermission, Mapping, Result, VfioError, load_u32, store_u32};

/// Size of a page.
const PAGE: u64 = 4096;

/// What was done to simulated things, in order. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SimLog(Arc<Mutex<Vec<String>>>);

impl SimLog {
    /// Adds a line.
    pub(super) fn note(&self, line: String) {
        lock(&self.0).push(line);
    }

    /// Takes all lines out.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// A simulated VMM: the guest has RAM, memory that is mapped, and interrupts that were delivered.
#[derive(Debug)]
pub struct SimVmm {
    ram: Vec<RamRegion>,
    bars: Arc<BarMap>,
    log: SimLog,
    inner: Mutex<VmmInner>,
}

#[derive(Debug, Default)]
struct VmmInner {
    next: u32,
    maps: BTreeMap<u32, (u64, Arc<dyn Mapping>)>,
    routes: BTreeMap<u32, (OwnedFd, Option<MsiMessage>)>,
    /// Line, trigger and resample.
    lines: BTreeMap<u32, (u32, OwnedFd, OwnedFd)>,
    asserted: BTreeSet<u32>,
    files: Vec<RawFd>,
    faults: BTreeSet<Fault>,
}

impl SimVmm {
    /// A guest with RAM at `ram`, as start and length, which are multiples of the page size.
    ///
    /// # Errors
    /// When the host has no memory.
    pub fn new(ram: &[(u64, u64)], log: &SimLog) -> io::Result<Arc<Self>> {
        let mut regions = Vec::new();
        for &(guest, len) in ram {
            let memory = MmapRegion::<()>::new(len as usize).map_err(io::Error::other)?;
            regions.push(RamRegion { guest, memory: Arc::new(SharedMemory::new(Arc::new(memory))) });
        }
        Ok(Arc::new(Self { ram: regions, bars: Arc::default(), log: log.clone(), inner: Mutex::default() }))
    }

    /// Fails at `fault` until [`heal`](Self::heal).
    pub fn fail(&self, fault: Fault) {
        lock(&self.inner).faults.insert(fault);
    }

    /// Takes all faults away.
    pub fn heal(&self) {
        lock(&self.inner).faults.clear();
    }

    /// What is mapped into the guest beside its RAM, as start and length, sorted.
    pub fn maps(&self) -> Vec<(u64, u64)> {
        let mut maps: Vec<_> =
            lock(&self.inner).maps.values().map(|(guest, memory)| (*guest, memory.len())).collect();
        maps.sort_unstable();
        maps
    }

    /// Where the BARs of its devices decode.
    pub fn bars(&self) -> &Arc<BarMap> {
        &self.bars
    }

    /// Number of interrupt routes.
    pub fn routes(&self) -> usize {
        let inner = lock(&self.inner);
        inner.routes.len() + inner.lines.len()
    }

    /// The interrupt lines that are asserted now.
    pub fn asserted(&self) -> Vec<u32> {
        let VmmInner { lines, asserted, .. } = &mut *lock(&self.inner);
        let signalled =
            lines.values().filter(|(_, trigger, _)| rustix::io::read(trigger, &mut [0; 8]).is_ok());
        asserted.extend(signalled.map(|(line, ..)| *line));
        asserted.iter().copied().collect()
    }

    /// Ends the interrupt of a line, as the guest does: it is deasserted, and all that are connected to it are told.
    pub fn end_interrupt(&self, line: u32) {
        let inner = &mut *lock(&self.inner);
        inner.asserted.remove(&line);
        for (_, _, resample) in inner.lines.values().filter(|(of, ..)| *of == line) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = rustix::io::write(resample, &1u64.to_ne_bytes());
        }
    }

    /// Number of VFIO files that it knows.
    pub fn files(&self) -> usize {
        lock(&self.inner).files.len()
    }

    /// The interrupts that reach the guest now: the messages of unmasked routes whose eventfd was signalled.
    pub fn delivered(&self) -> Vec<MsiMessage> {
        let inner = lock(&self.inner);
        let routes = inner.routes.values();
        routes
            .filter_map(|(trigger, message)| {
                let message = (*message)?;
                rustix::io::read(trigger, &mut [0; 8]).ok().map(|_| message)
            })
            .collect()
    }
}

impl VmmInner {
    fn check(&self, what: &'static str, fault: Fault) -> Result<(), VmmError> {
        if self.faults.contains(&fault) {
            return Err(VmmError::new(what, "it is simulated and fails on request"));
        }
        Ok(())
    }
}

impl Vmm for SimVmm {
    fn ram(&self) -> Vec<RamRegion> {
        self.ram.clone()
    }

    fn map(&self, guest: u64, memory: Arc<dyn Mapping>) -> Result<MapId, VmmError> {
        let what = "map memory into the guest";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::MapGuest)?;
        let reason = |reason: &str| VmmError::new(what, format!("{guest:#x}: {reason}"));
        let end = guest.checked_add(memory.len()).ok_or_else(|| reason("no such range"))?;
        if !guest.is_multiple_of(PAGE) || !memory.len().is_multiple_of(PAGE) || memory.is_empty() {
            return Err(reason("not a whole number of pages"));
        }
        let ram = self.ram.iter().map(|region| (region.guest, region.memory.len()));
        let maps = inner.maps.values().map(|(guest, memory)| (*guest, memory.len()));
        if ram.chain(maps).any(|(start, len)| guest < start + len && start < end) {
            return Err(reason("it overlaps another"));
        }
        self.log.note(format!("guest map {guest:#x}+{:#x}", memory.len()));
        inner.next += 1;
        let id = inner.next;
        inner.maps.insert(id, (guest, memory));
        Ok(MapId(id))
    }

    fn unmap(&self, id: MapId) -> Result<(), VmmError> {
        let what = "unmap memory from the guest";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::UnmapGuest)?;
        match inner.maps.remove(&id.0) {
            Some((guest, memory)) => {
                self.log.note(format!("guest unmap {guest:#x}+{:#x}", memory.len()));
                Ok(())
            }
            None => Err(VmmError::new(what, format!("there is no mapping {}", id.0))),
        }
    }

    fn bars_changed(&self, device: PciAddress, bars: &[DecodedBar]) {
        self.bars.set(device, bars);
    }

    fn add_route(&self, trigger: BorrowedFd<'_>) -> Result<RouteId, VmmError> {
        let failed = |error| VmmError::new("add an interrupt route", error);
        let trigger = trigger.try_clone_to_owned().map_err(failed)?;
        let mut inner = lock(&self.inner);
        inner.next += 1;
        let id = inner.next;
        inner.routes.insert(id, (trigger, None));
        Ok(RouteId(id))
    }

    fn set_route(&self, route: RouteId, message: Option<MsiMessage>) -> Result<(), VmmError> {
        let what = "set an interrupt route";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::SetRoute)?;
        match inner.routes.get_mut(&route.0) {
            Some(place) => {
                place.1 = message;
                Ok(())
            }
            None => Err(VmmError::new(what, format!("there is no route {}", route.0))),
        }
    }

    fn add_line(
        &self,
        line: u32,
        trigger: BorrowedFd<'_>,
        resample: BorrowedFd<'_>,
    ) -> Result<RouteId, VmmError> {
        let what = "connect an interrupt line";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::SetRoute)?;
        let owned =
            |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(|error| VmmError::new(what, error));
        inner.next += 1;
        let id = inner.next;
        inner.lines.insert(id, (line, owned(trigger)?, owned(resample)?));
        Ok(RouteId(id))
    }

    fn remove_route(&self, route: RouteId) -> Result<(), VmmError> {
        let what = "remove an interrupt route";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::RemoveRoute)?;
        if let Some((line, ..)) = inner.lines.remove(&route.0) {
            if inner.lines.values().all(|(other, ..)| *other != line) {
                inner.asserted.remove(&line);
            }
            return Ok(());
        }
        match inner.routes.remove(&route.0) {
            Some(_) => Ok(()),
            None => Err(VmmError::new(what, format!("there is no route {}", route.0))),
        }
    }

    fn add_vfio_file(&self, file: BorrowedFd<'_>) -> Result<(), VmmError> {
        let mut inner = lock(&self.inner);
        inner.check("tell the hypervisor of a file", Fault::TellVmm)?;
        self.log.note("file add".into());
        inner.files.push(file.as_raw_fd());
        Ok(())
    }

    fn remove_vfio_file(&self, file: BorrowedFd<'_>) -> Result<(), VmmError> {
        let mut inner = lock(&self.inner);
        inner.check("make the hypervisor forget a file", Fault::ForgetFile)?;
        self.log.note("file remove".into());
        inner.files.retain(|&known| known != file.as_raw_fd());
        Ok(())
    }
}

/// A simulated DMA address space.
#[derive(Debug)]
pub struct SimSpace {
    log: SimLog,
    ranges: Vec<IovaRange>,
    inner: Mutex<SpaceInner>,
}

#[derive(Debug, Default)]
struct SpaceInner {
    maps: DmaMappings,
    faults: BTreeSet<Fault>,
    /// Maps that succeed before [`Fault::MapDma`] strikes.
    after: u32,
}

impl SimSpace {
    /// An empty one that takes addresses in `ranges`.
    pub fn new(ranges: Vec<IovaRange>, log: &SimLog) -> Arc<Self> {
        Arc::new(Self { log: log.clone(), ranges, inner: Mutex::default() })
    }

    /// Fails at `fault`, after `after` successes, until [`heal`](Self::heal).
    pub fn fail(&self, fault: Fault, after: u32) {
        let mut inner = lock(&self.inner);
        inner.faults.insert(fault);
        inner.after = after;
    }

    /// Takes all faults away.
    pub fn heal(&self) {
        lock(&self.inner).faults.clear();
    }

    /// Reads a dword by DMA, at a multiple of 4.
    ///
    /// # Errors
    /// When nothing is mapped there.
    pub fn load(&self, iova: u64) -> Result<u32> {
        self.reach(iova, |memory, offset| load_u32(memory, offset))
    }

    /// Writes a dword by DMA, at a multiple of 4.
    ///
    /// # Errors
    /// When nothing is mapped there.
    pub fn store(&self, iova: u64, value: u32) -> Result<()> {
        self.reach(iova, |memory, offset| store_u32(memory, offset, value))
    }

    /// Does something with the memory that is mapped at an address, and the offset in it.
    fn reach<T>(&self, iova: u64, access: impl FnOnce(&dyn Mapping, u64) -> io::Result<T>) -> Result<T> {
        let inner = lock(&self.inner);
        let found = inner.maps.iter().take_while(|(start, _)| *start <= iova).last();
        let done = found.and_then(|(start, entry)| access(&*entry.memory, iova - start).ok());
        done.ok_or_else(|| VfioError::Range {
            start: iova,
            end: iova.saturating_add(3),
            reason: "nothing is mapped there for DMA".into(),
        })
    }

    /// What is mapped, as start and length, sorted.
    pub fn maps(&self) -> Vec<(u64, u64)> {
        lock(&self.inner).maps.iter().map(|(iova, entry)| (iova, entry.memory.len())).collect()
    }
}

impl AddressSpace for SimSpace {
    fn backend(&self) -> Backend {
        Backend::Iommufd
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
        Ok(self.ranges.clone())
    }

    fn entries_left(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn mapped_from(&self, iova: u64) -> Option<u64> {
        lock(&self.inner).maps.len_at(iova)
    }

    fn map(&self, iova: u64, memory: Arc<dyn Mapping>, permission: DmaPermission) -> Result<()> {
        let mut inner = lock(&self.inner);
        // As `Space::map`: what is mapped already takes no ioctl, and so meets no fault.
        if inner.maps.plan(iova, &*memory, permission)? == Plan::Counted {
            return Ok(());
        }
        dma::check_range(iova, &*memory, PAGE, &self.ranges, None)?;
        if inner.faults.contains(&Fault::MapDma) {
            if inner.after == 0 {
                return Err(told_to_fail(iova, iova.saturating_add(memory.len() - 1)));
            }
            inner.after -= 1;
        }
        self.log.note(format!("dma map {iova:#x}+{:#x}", memory.len()));
        inner.maps.insert(iova, memory, permission);
        Ok(())
    }

    fn unmap(&self, iova: u64) -> Result<()> {
        let mut inner = lock(&self.inner);
        if let Release::Unmap(_) = inner.maps.release(iova)? {
            if inner.faults.contains(&Fault::UnmapDma) {
                return Err(told_to_fail(iova, iova));
            }
            inner.maps.remove(iova);
            self.log.note(format!("dma unmap {iova:#x}"));
        }
        Ok(())
    }
}

fn told_to_fail(start: u64, end: u64) -> VfioError {
    VfioError::Range { start, end, reason: "the space is simulated and fails on request".into() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
