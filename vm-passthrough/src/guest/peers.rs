//! Peer-to-peer DMA: the BARs of a guest's devices, for the DMA of its other devices.
//!
//! What a guest reaches of a BAR with no exit is mapped in the devices' address space too, at the same address. A thread of its own
//! does that, a piece at a time, and nobody waits for it: a transfer that comes before its mapping is an error of the IOMMU's, as
//! it is where the Linux kernel refuses to map BARs. Who takes a BAR from the guest waits until it is unmapped:
//!
//! ```text
//! exposed ──▶ mapped, piece by piece ──▶ withdrawn ──▶ unmapped, piece by piece ──▶ taken from the guest
//! ```
//!
//! The group back end keeps a mapping of a BAR although the device is closed, so one that outlives it would let this guest's devices
//! reach into whoever has the device next. Hence the order, and a BAR that can't be unmapped keeps its device: withdrawing it
//! fails, and is tried again with the next attempt to detach the device.
//!
//! With one device there is nobody to map for, and nothing is mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::DeviceError;
use super::sys::Part;
use crate::PciAddress;
use crate::deadlines::PEERS;
use crate::vfio::{AddressSpace, Backend, DmaPermission, Mapping, VfioError};

/// What is mapped at a time: who takes a BAR from the guest waits for one at most that is on its way.
const PIECE: u64 = if cfg!(test) { 1 << 16 } else { 1 << 30 };
/// How long unmapping may take.
const DEADLINE: Duration = if cfg!(test) { Duration::from_secs(60) } else { PEERS };

/// Maps the BARs of a guest's devices for each other's DMA. All devices of the guest are given a clone of the same
/// ([`DeviceOptions::peers`](super::DeviceOptions::peers)).
#[derive(Clone, Debug)]
pub struct PeerDma(Arc<Owner>);

impl PartialEq for PeerDma {
    /// Whether they are clones of the same.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for PeerDma {}

/// How far the BARs of a guest's devices are mapped for each other's DMA, in bytes. With one device all of it is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PeerReport {
    /// What is mapped.
    pub mapped: u64,
    /// What is on its way.
    pub waiting: u64,
    /// What can't be mapped. Transfers of one device to another fail there, and drivers copy through RAM.
    pub refused: u64,
    /// Why not, of some of it.
    pub reason: Option<String>,
}

/// Names a part of a BAR that is exposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExposedId(u64);

/// Ends the thread when it is dropped.
#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    inner: Mutex<Inner>,
    /// There may be something to do.
    work: Condvar,
    /// Something was done.
    done: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    /// The devices that are attached.
    devices: BTreeSet<PciAddress>,
    exposed: BTreeMap<u64, Exposed>,
    next: u64,
    /// What the thread is at.
    busy: Option<u64>,
    /// Whether a refusal was logged. A guest may cause any number of them.
    has_told: bool,
    ends: bool,
}

/// A part of a BAR.
#[derive(Debug)]
struct Exposed {
    space: Arc<dyn AddressSpace>,
    guest: u64,
    memory: Arc<dyn Mapping>,
    /// How many pieces are mapped, from the first on.
    mapped: u64,
    state: State,
    /// Why a piece could not be unmapped. It is not tried again before somebody asks for it.
    stuck: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// It is to be mapped, and a part of it may be.
    Wanted,
    /// It can't be.
    Refused(String),
    /// It is to be unmapped and forgotten.
    Withdrawn,
}

/// What the thread does next.
struct Job {
    id: u64,
    space: Arc<dyn AddressSpace>,
    iova: u64,
    /// What to map; `None` to unmap.
    memory: Option<Arc<dyn Mapping>>,
    /// How many entries all of it takes, where this is the first.
    entries: Option<u64>,
}

impl PeerDma {
    /// Starts the thread. It ends with the last clone.
    ///
    /// # Errors
    /// When this process has no threads left.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let works = shared.clone();
        let thread = Builder::new().name("peer-dma".into()).spawn(move || works.work())?;
        Ok(Self(Arc::new(Owner { shared, thread: Some(thread) })))
    }

    /// How far it is.
    pub fn report(&self) -> PeerReport {
        let inner = self.0.shared.lock();
        let mut report = PeerReport::default();
        for part in inner.exposed.values().filter(|_| inner.is_shared()) {
            let len = part.memory.len();
            let mapped = len.min(part.mapped.saturating_mul(PIECE));
            match &part.state {
                State::Wanted => {
                    report.mapped += mapped;
                    report.waiting += len - mapped;
                }
                State::Refused(reason) => {
                    report.refused += len;
                    report.reason.get_or_insert_with(|| reason.clone());
                }
                State::Withdrawn => {}
            }
        }
        report
    }

    /// A device is attached.
    pub(super) fn join(&self, device: PciAddress) {
        self.0.shared.lock().devices.insert(device);
        self.0.shared.work.notify_one();
    }

    /// It is detached: all of its BARs are withdrawn.
    pub(super) fn leave(&self, device: PciAddress) {
        self.0.shared.lock().devices.remove(&device);
        self.0.shared.work.notify_one();
    }

    /// Has `memory`, a part of a BAR that the guest reaches at the address `guest`, mapped there for DMA in a while.
    pub(super) fn expose(
        &self,
        space: Arc<dyn AddressSpace>,
        guest: u64,
        memory: Arc<dyn Mapping>,
    ) -> ExposedId {
        let mut inner = self.0.shared.lock();
        let id = inner.next;
        inner.next += 1;
        let part = Exposed { space, guest, memory, mapped: 0, state: State::Wanted, stuck: None };
        inner.exposed.insert(id, part);
        self.0.shared.work.notify_one();
        ExposedId(id)
    }

    /// Unmaps parts of BARs, and waits until they are. Those that are leave `ids`.
    ///
    /// # Errors
    /// [`DeviceError::PeersReach`] when one can't be unmapped, or not in time.
    pub(super) fn withdraw(&self, ids: &mut Vec<ExposedId>) -> Result<(), DeviceError> {
        let shared = &self.0.shared;
        let until = Instant::now() + DEADLINE;
        let mut inner = shared.lock();
        ids.iter().for_each(|id| inner.withdraw(id.0));
        shared.work.notify_one();
        loop {
            ids.retain(|id| inner.exposed.contains_key(&id.0));
            let stuck = |id: &ExposedId| inner.exposed.get(&id.0).and_then(|part| part.stuck.clone());
            if ids.is_empty() {
                return Ok(());
            }
            if let Some(reason) = ids.iter().find_map(stuck) {
                return Err(DeviceError::PeersReach { reason });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("unmapping it takes more than {} s", DEADLINE.as_secs());
                return Err(DeviceError::PeersReach { reason });
            }
            (inner, _) = shared.done.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does.
    fn work(&self) {
        let mut inner = self.lock();
        loop {
            match inner.job() {
                Some(job) => {
                    inner.busy = Some(job.id);
                    drop(inner);
                    let result = job.run();
                    inner = self.lock();
                    inner.busy = None;
                    inner.note(&job, result);
                    self.done.notify_all();
                }
                None if inner.ends => return,
                None => inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Inner {
    /// Whether a device has others that could reach it.
    fn is_shared(&self) -> bool {
        self.devices.len() > 1
    }

    /// What to do next: what is to be unmapped comes first.
    fn job(&self) -> Option<Job> {
        let is_shared = self.is_shared() && !self.ends;
        let free = || self.exposed.iter().filter(|(_, part)| part.stuck.is_none());
        let stays = |part: &Exposed| is_shared && part.state == State::Wanted;
        let unmap = free().find(|(_, part)| part.mapped > 0 && !stays(part));
        if let Some((&id, part)) = unmap {
            let iova = part.guest + (part.mapped - 1) * PIECE;
            return Some(Job { id, space: part.space.clone(), iova, memory: None, entries: None });
        }
        let (&id, part) = free().find(|(_, part)| stays(part) && part.mapped < part.pieces())?;
        let offset = part.mapped * PIECE;
        let memory = match Part::of(&part.memory, offset, PIECE) {
            Some(piece) => Arc::new(piece),
            None => part.memory.clone(),
        };
        let entries = (offset == 0).then(|| part.pieces());
        Some(Job { id, space: part.space.clone(), iova: part.guest + offset, memory: Some(memory), entries })
    }

    fn note(&mut self, job: &Job, result: Result<(), String>) {
        let Some(part) = self.exposed.get_mut(&job.id) else { return };
        match (result, &job.memory) {
            (Ok(()), Some(_)) => part.mapped += 1,
            (Ok(()), None) => part.mapped -= 1,
            (Err(reason), None) => {
                tracing::error!(%reason, "a BAR can't be unmapped, and stays in reach of the guest's other devices");
                part.stuck = Some(reason.clone());
                part.refuse(reason);
            }
            (Err(reason), Some(_)) => {
                if !std::mem::replace(&mut self.has_told, true) {
                    tracing::info!(
                        "the guest's devices reach each other only through RAM, not all of their BARs: {reason}"
                    );
                }
                part.refuse(reason);
            }
        }
        self.forget(job.id);
    }

    fn withdraw(&mut self, id: u64) {
        if let Some(part) = self.exposed.get_mut(&id) {
            (part.state, part.stuck) = (State::Withdrawn, None);
        }
        self.forget(id);
    }

    /// Forgets a part that is withdrawn and unmapped. Another may have been refused on its account.
    fn forget(&mut self, id: u64) {
        let is_gone = |part: &Exposed| part.state == State::Withdrawn && part.mapped == 0;
        if self.busy == Some(id) || !self.exposed.get(&id).is_some_and(is_gone) {
            return;
        }
        self.exposed.remove(&id);
        for part in self.exposed.values_mut().filter(|part| matches!(part.state, State::Refused(_))) {
            part.state = State::Wanted;
        }
    }
}

impl Exposed {
    /// Of how many pieces it is.
    fn pieces(&self) -> u64 {
        self.memory.len().div_ceil(PIECE)
    }

    /// Has it mapped no more, unless it is withdrawn already.
    fn refuse(&mut self, reason: String) {
        if self.state == State::Wanted {
            self.state = State::Refused(reason);
        }
    }
}

impl Job {
    fn run(&self) -> Result<(), String> {
        let done = match &self.memory {
            None => self.space.unmap(self.iova),
            Some(memory) => {
                self.leave_entries()?;
                self.space.map(self.iova, memory.clone(), DmaPermission::ReadWrite)
            }
        };
        done.map_err(|error| match error {
            VfioError::System { source, .. }
                if self.space.backend() == Backend::Iommufd
                    && source.raw_os_error() == Some(libc::EFAULT) =>
            {
                "this Linux kernel maps no BARs for DMA through iommufd, as those from 6.19 on do; the group back end does".into()
            }
            error => error.to_string(),
        })
    }

    /// Leaves half of the mappings that there can be to the RAM of devices that come.
    fn leave_entries(&self) -> Result<(), String> {
        let Some(needed) = self.entries else { return Ok(()) };
        match self.space.entries_left() {
            Ok(Some(left)) if needed > left / 2 => Err(format!(
                "{needed} mappings are needed, and of {left} that are left half are kept for RAM; raise dma_entry_limit of the \
                 module vfio_iommu_type1"
            )),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.work.notify_one();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that maps BARs for other devices panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iommu::IovaRange;
    use crate::sim::{SimLog, SimSpace};
    use crate::vfio::{HostMemory, Result};

    /// An address space with so many mappings left, whose maps fail with an error number.
    #[derive(Debug)]
    struct Limited {
        backend: Backend,
        left: Option<u64>,
        errno: Option<i32>,
    }

    impl AddressSpace for Limited {
        fn backend(&self) -> Backend {
            self.backend
        }

        fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
            Ok(vec![])
        }

        fn entries_left(&self) -> Result<Option<u64>> {
            Ok(self.left)
        }

        fn mapped_from(&self, _iova: u64) -> Option<u64> {
            None
        }

        fn map(&self, _iova: u64, _memory: Arc<dyn Mapping>, _permission: DmaPermission) -> Result<()> {
            let failed = |errno| VfioError::System {
                operation: "IOMMU_IOAS_MAP",
                path: "/dev/iommu".into(),
                source: io::Error::from_raw_os_error(errno),
                remedy: "none",
            };
            self.errno.map_or(Ok(()), |errno| Err(failed(errno)))
        }

        fn unmap(&self, _iova: u64) -> Result<()> {
            Ok(())
        }
    }

    /// Memory of two pieces and a half.
    fn memory() -> Arc<dyn Mapping> {
        Arc::new(HostMemory::new(PIECE as usize * 5 / 2).unwrap())
    }

    /// Maps something that takes this many mappings in all.
    fn map(space: Limited, entries: Option<u64>) -> Result<(), String> {
        Job { id: 0, space: Arc::new(space), iova: 0, memory: Some(memory()), entries }.run()
    }

    #[test]
    fn half_of_the_mappings_are_left_to_ram() {
        let limited = |left| Limited { backend: Backend::Group, left, errno: None };
        for (left, needed, fits) in
            [(10, 4, true), (10, 5, true), (10, 6, false), (11, 5, true), (11, 6, false), (0, 1, false)]
        {
            let mapped = map(limited(Some(left)), Some(needed));
            assert_eq!(mapped.is_ok(), fits, "{needed} of {left}");
            let reason = format!("{needed} mappings are needed, and of {left} that are left");
            assert!(mapped.err().is_none_or(|error| error.contains(&reason)));
        }
        // The later pieces, and an address space without a limit.
        assert_eq!(map(limited(Some(0)), None), Ok(()));
        assert_eq!(map(limited(None), Some(1 << 20)), Ok(()));
    }

    #[test]
    fn only_a_kernel_that_maps_no_bars_through_iommufd_is_named() {
        for (backend, errno, named) in [
            (Backend::Iommufd, libc::EFAULT, true),
            (Backend::Iommufd, libc::EINVAL, false),
            (Backend::Group, libc::EFAULT, false),
        ] {
            let error = map(Limited { backend, left: None, errno: Some(errno) }, None).unwrap_err();
            assert_eq!(error.contains("maps no BARs for DMA through iommufd"), named, "{error}");
            assert_eq!(error.contains("IOMMU_IOAS_MAP"), !named, "{error}");
        }
    }

    #[test]
    fn mappings_are_counted_before_the_first_piece() {
        let space = Arc::new(Limited { backend: Backend::Group, left: None, errno: None });
        let part = Exposed {
            space,
            guest: 0x10_0000,
            memory: memory(),
            mapped: 0,
            state: State::Wanted,
            stuck: None,
        };
        let mut inner = Inner { exposed: BTreeMap::from([(7, part)]), ..Inner::default() };
        inner.devices = [0x65, 0x66].map(|bus| PciAddress::new(0, bus, 0, 0).unwrap()).into();
        for (piece, entries) in [(0, Some(3)), (1, None), (2, None)] {
            let job = inner.job().unwrap();
            assert_eq!((job.id, job.iova, job.entries), (7, 0x10_0000 + piece * PIECE, entries));
            inner.note(&job, Ok(()));
        }
        assert!(inner.job().is_none());
    }

    #[test]
    fn nothing_is_mapped_once_the_last_clone_is_gone() {
        let space = SimSpace::new(vec![0..=u64::MAX], &SimLog::default());
        let peers = PeerDma::new().unwrap();
        for bus in [0x65, 0x66] {
            peers.join(PciAddress::new(0, bus, 0, 0).unwrap());
        }
        peers.expose(space.clone(), 0x10_0000, memory());
        let deadline = Instant::now() + DEADLINE;
        while peers.report().waiting > 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(space.maps().len(), 3);
        drop(peers.clone());
        assert_eq!(space.maps().len(), 3);
        drop(peers);
        assert_eq!(space.maps(), []);
    }
}
