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
use crate::vfio::{AddressSpace, Backend, DmaPermission, Mapping, Result, VfioError};

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
        lock(&self.inner).routes.len()
    }

    /// Number of VFIO files that it was told of.
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
            return Err(VmmError::new(what, "it is simulated and was told to fail"));
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
        if !guest.is_multiple_of(4096) || !memory.len().is_multiple_of(4096) || memory.is_empty() {
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

    fn remove_route(&self, route: RouteId) -> Result<(), VmmError> {
        let what = "remove an interrupt route";
        let mut inner = lock(&self.inner);
        inner.check(what, Fault::RemoveRoute)?;
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
    /// By start: the memory, and how often it is mapped.
    maps: BTreeMap<u64, (Arc<dyn Mapping>, u32)>,
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

    /// What is mapped, as start and length, sorted.
    pub fn maps(&self) -> Vec<(u64, u64)> {
        lock(&self.inner).maps.iter().map(|(&iova, (memory, _))| (iova, memory.len())).collect()
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

    fn map(&self, iova: u64, memory: Arc<dyn Mapping>, _permission: DmaPermission) -> Result<()> {
        let mut inner = lock(&self.inner);
        let end = iova.saturating_add(memory.len() - 1);
        let refused = |reason: &str| VfioError::Range { start: iova, end, reason: reason.into() };
        if inner.faults.contains(&Fault::MapDma) {
            if inner.after == 0 {
                return Err(refused("the space is simulated and was told to fail"));
            }
            inner.after -= 1;
        }
        if !self.ranges.iter().any(|range| range.contains(&iova) && range.contains(&end)) {
            return Err(refused("it is reserved"));
        }
        if let Some((known, users)) = inner.maps.get_mut(&iova)
            && known.address() == memory.address()
            && known.len() == memory.len()
        {
            *users += 1;
            return Ok(());
        }
        if inner.maps.iter().any(|(&start, (memory, _))| iova < start + memory.len() && start <= end) {
            return Err(refused("it overlaps another"));
        }
        self.log.note(format!("dma map {iova:#x}+{:#x}", memory.len()));
        inner.maps.insert(iova, (memory, 1));
        Ok(())
    }

    fn unmap(&self, iova: u64) -> Result<()> {
        let mut inner = lock(&self.inner);
        let refused = |reason: &str| VfioError::Range { start: iova, end: iova, reason: reason.into() };
        if inner.faults.contains(&Fault::UnmapDma) {
            return Err(refused("the space is simulated and was told to fail"));
        }
        let (_, users) = inner.maps.get_mut(&iova).ok_or_else(|| refused("nothing is mapped there"))?;
        *users -= 1;
        if *users == 0 {
            inner.maps.remove(&iova);
            self.log.note(format!("dma unmap {iova:#x}"));
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
