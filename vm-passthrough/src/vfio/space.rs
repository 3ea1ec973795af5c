//! The DMA address space of one guest, on either back end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::dma::{self, DmaMappings, Plan, Release};
use super::group::{Container, Opened};
use super::interface::{
    AddressSpace, Backend, DmaPermission, Mapping, ResetEvidence, Result, VfioError, map_in_turn,
};
use super::iommufd::Ioas;
use super::open_devices::OpenDevices;
use super::parse::IommuInfo;
use super::sys;
use super::token::VfToken;
use crate::iommu::IovaRange;
use crate::{Host, PciAddress};

/// The DMA address space of one guest, in the Linux kernel: what [`open_space`](super::open_space) gives.
///
/// Devices join with [`Claimed::open`](crate::manager::Claimed::open), at any time and from any group, and leave when they are
/// closed. Mappings outlast them: on the group back end, where the Linux kernel drops all mappings with the last
/// group, they are made again for the next device that joins.
///
/// Dropping it unmaps all and closes the files; [`close`](Self::close) does so too and tells what failed.
#[derive(Debug)]
pub struct Space {
    backend: Backend,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    mappings: DmaMappings,
    devices: OpenDevices,
    /// What the Linux kernel said of the IOMMU, kept up to date as long as no device joins or leaves. Asking costs as
    /// much as a small mapping.
    info: Option<IommuInfo>,
    closed: bool,
}

#[derive(Debug)]
enum Engine {
    Group(Container),
    Iommufd(Ioas),
}

impl Engine {
    fn path(&self) -> &str {
        match self {
            Self::Group(container) => container.path(),
            Self::Iommufd(ioas) => ioas.path(),
        }
    }

    fn info(&self) -> Result<Option<IommuInfo>> {
        match self {
            Self::Group(container) => container.info(),
            Self::Iommufd(ioas) => ioas.info().map(Some),
        }
    }

    /// What was known of the IOMMU, or else is asked, and is to be put back.
    fn known(&self, info: &mut Option<IommuInfo>) -> Result<IommuInfo> {
        match info.take() {
            Some(known) => Ok(known),
            None => Ok(self.info()?.unwrap_or_else(|| IommuInfo::unlimited(sys::page_size()))),
        }
    }

    fn map(&self, iova: u64, memory: &dyn Mapping, permission: DmaPermission, locked: u64) -> Result<()> {
        match self {
            Self::Group(container) => container.map(iova, memory, permission, locked),
            Self::Iommufd(ioas) => ioas.map(iova, memory, permission, locked),
        }
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<()> {
        match self {
            Self::Group(container) => container.unmap(iova, len),
            Self::Iommufd(ioas) => ioas.unmap(iova, len),
        }
    }
}

/// An address space as another process can have it.
#[derive(Debug)]
pub enum SpaceParts {
    /// A container.
    Group(OwnedFd),
    /// iommufd, and the number of the address space in it.
    Iommufd(OwnedFd, u32),
}

/// A device that is open in a space, and leaves it when the device's file is closed.
#[derive(Debug)]
pub(super) struct Member {
    space: Arc<Space>,
    address: PciAddress,
    /// The group's number and file, on that back end.
    pub(super) group: Option<(u32, Arc<OwnedFd>)>,
    left: bool,
}

impl Space {
    pub(super) fn open(host: &Host, backend: Backend) -> Result<Self> {
        let engine = match backend {
            Backend::Group => Engine::Group(Container::open(host)?),
            Backend::Iommufd => Engine::Iommufd(Ioas::open(host)?),
        };
        Ok(Self::new(engine))
    }

    fn new(engine: Engine) -> Self {
        let backend = match engine {
            Engine::Group(_) => Backend::Group,
            Engine::Iommufd(_) => Backend::Iommufd,
        };
        let (mappings, devices) = (DmaMappings::default(), OpenDevices::default());
        let state = State { engine, mappings, devices, info: None, closed: false };
        Self { backend, state: Mutex::new(state) }
    }

    /// What another process needs to map its memory here, and to [receive](Self::receive) the devices. It maps by itself: what
    /// is mapped here is not known there, nor the other way round.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn share(&self) -> io::Result<SpaceParts> {
        Ok(match &self.state().engine {
            Engine::Group(container) => SpaceParts::Group(container.share()?),
            Engine::Iommufd(ioas) => {
                let (file, id) = ioas.share()?;
                SpaceParts::Iommufd(file, id)
            }
        })
    }

    /// The address space that another process [shares](Self::share). That process closes it.
    pub fn receive(parts: SpaceParts) -> Arc<Self> {
        Arc::new(Self::new(match parts {
            SpaceParts::Group(file) => Engine::Group(Container::received(file)),
            SpaceParts::Iommufd(file, id) => Engine::Iommufd(Ioas::received(file, id)),
        }))
    }

    /// Unmaps all and closes it. No device may be open in it. Calling it twice does nothing.
    ///
    /// # Errors
    /// [`VfioError::Busy`] while devices are open. Otherwise the first thing that the Linux kernel refused; all
    /// that could be undone is undone even then.
    pub fn close(&self) -> Result<()> {
        let mut state = self.state();
        if !state.devices.is_empty() {
            return Err(VfioError::Busy {
                what: state.engine.path().into(),
                reason: format!("open in it are {}; close them first", state.devices.all()),
            });
        }
        if state.closed {
            return Ok(());
        }
        state.closed = true;
        let State { engine, mappings, .. } = &mut *state;
        let mut result = Ok(());
        for (iova, len) in mappings.iter().map(|(iova, entry)| (iova, entry.memory.len())) {
            result = result.and(engine.unmap(iova, len));
        }
        mappings.clear();
        if let Engine::Iommufd(ioas) = engine {
            result = result.and(ioas.destroy());
        }
        result
    }

    /// Opens a function's file in this space. `group` is its group's number, for that back end; `token` is for a virtual function
    /// whose physical one has such.
    pub(super) fn join(
        self: &Arc<Self>,
        host: &Host,
        address: PciAddress,
        group: u32,
        token: Option<&VfToken>,
    ) -> Result<(OwnedFd, Member)> {
        let mut state = self.state();
        state.check_new(address)?;
        let State { engine, mappings, info, .. } = &mut *state;
        *info = None;
        let (file, group) = match engine {
            Engine::Iommufd(ioas) => (ioas.open_device(host, address, token, mappings.bytes())?, None),
            Engine::Group(container) => {
                let Opened { file, group, group_fd } =
                    container.open_device(host, address, group, token, mappings)?;
                (file, Some((group, group_fd)))
            }
        };
        state.devices.open(address);
        Ok((file, Member { space: self.clone(), address, group, left: false }))
    }

    /// Notes a function that another process opened in this space, with its group on that back end.
    pub(super) fn join_received(
        self: &Arc<Self>,
        address: PciAddress,
        group: Option<(u32, OwnedFd)>,
    ) -> Result<Member> {
        let mut state = self.state();
        state.check_new(address)?;
        let State { engine, mappings, info, .. } = &mut *state;
        *info = None;
        let group = match (engine, group) {
            (Engine::Iommufd(_), None) => None,
            (Engine::Group(container), Some((number, file))) => {
                Some((number, container.receive(number, file, mappings)?))
            }
            _ => {
                let reason = "it was opened in a space of another back end".into();
                return Err(VfioError::Busy { what: address.to_string(), reason });
            }
        };
        state.devices.open(address);
        Ok(Member { space: self.clone(), address, group, left: false })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, and every state in between is a valid one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a hot reset of `set` for `address` while nothing else can join or leave. The others of the set are noted with
    /// the evidence that `reset` gives for them.
    ///
    /// `Err` with the functions of the set, less `address`, that are in use, and nothing was done.
    pub(super) fn with_set<T>(
        &self,
        address: PciAddress,
        set: &[PciAddress],
        reset: impl FnOnce() -> (T, Vec<(PciAddress, ResetEvidence)>),
    ) -> Result<T, String> {
        let mut state = self.state();
        let in_use = state.devices.in_use(address, set);
        if !in_use.is_empty() {
            return Err(in_use.to_string());
        }
        let (answer, fresh) = reset();
        state.devices.add_fresh(fresh);
        Ok(answer)
    }

    /// Whether a function was reset along with another since it was last used, and what showed it. True once.
    pub(super) fn take_fresh(&self, address: PciAddress) -> Option<ResetEvidence> {
        self.state().devices.take_fresh(address)
    }

    /// Notes whether an open function is used.
    pub(super) fn set_at_rest(&self, address: PciAddress, at_rest: bool) {
        self.state().devices.set_at_rest(address, at_rest);
    }

    /// The files of open groups, for a hot reset; `Err` with the first that is not open here. Empty with iommufd.
    pub(super) fn group_fds(&self, numbers: &[u32]) -> Result<Vec<Arc<OwnedFd>>, u32> {
        match &self.state().engine {
            Engine::Group(container) => container.group_fds(numbers),
            Engine::Iommufd(_) => Ok(Vec::new()),
        }
    }
}

impl State {
    /// Whether a function may join.
    fn check_new(&self, address: PciAddress) -> Result<()> {
        self.check_open()?;
        if self.devices.contains(address) {
            return Err(VfioError::Busy {
                what: address.to_string(),
                reason: "it is open in this address space already; close it first".into(),
            });
        }
        Ok(())
    }

    fn check_open(&self) -> Result<()> {
        if self.closed {
            return Err(VfioError::Busy {
                what: self.engine.path().into(),
                reason: "the address space was closed; open another".into(),
            });
        }
        Ok(())
    }
}

impl AddressSpace for Space {
    fn backend(&self) -> Backend {
        self.backend
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>> {
        Ok(self.state().engine.info()?.map_or_else(|| vec![0..=u64::MAX], |info| info.ranges))
    }

    fn entries_left(&self) -> Result<Option<u64>> {
        Ok(self.state().engine.info()?.and_then(|info| info.entries_left))
    }

    fn mapped_from(&self, iova: u64) -> Option<u64> {
        self.state().mappings.len_at(iova)
    }

    fn map(&self, iova: u64, memory: Arc<dyn Mapping>, permission: DmaPermission) -> Result<()> {
        let mut state = self.state();
        state.check_open()?;
        if state.mappings.plan(iova, &*memory, permission)? == Plan::Counted {
            return Ok(());
        }
        let State { engine, mappings, info, .. } = &mut *state;
        let mut known = engine.known(info)?;
        let checked = dma::check_range(iova, &*memory, known.page, &known.ranges, known.entries_left);
        if checked.is_ok() {
            // After a failure the Linux kernel is asked again.
            engine.map(iova, &*memory, permission, mappings.bytes())?;
            mappings.insert(iova, memory, permission);
            known.entries_left = known.entries_left.map(|left| left.saturating_sub(1));
        }
        *info = Some(known);
        checked
    }

    fn map_all(&self, ranges: &[(u64, Arc<dyn Mapping>)], permission: DmaPermission) -> Result<()> {
        if self.backend == Backend::Group || ranges.len() < 2 {
            // The Linux kernel maps one at a time, whoever asks.
            return map_in_turn(self, ranges, permission);
        }
        let mut state = self.state();
        state.check_open()?;
        let State { engine, mappings, info, .. } = &mut *state;
        let (mut new, mut counted) = (Vec::new(), Vec::new());
        let planned = ranges.iter().try_for_each(|(iova, memory)| {
            match mappings.plan(*iova, &**memory, permission)? {
                Plan::Map => new.push((*iova, memory)),
                Plan::Counted => counted.push(*iova),
            }
            Ok(())
        });
        let checked = planned.and_then(|()| {
            let known = engine.known(info)?;
            let check = |&(iova, memory): &(u64, &Arc<dyn Mapping>)| {
                dma::check_range(iova, &**memory, known.page, &known.ranges, known.entries_left)
            };
            let checked = new.iter().try_for_each(check);
            *info = Some(known);
            checked
        });
        let locked = mappings.bytes();
        let map =
            |&(iova, memory): &(u64, &Arc<dyn Mapping>)| engine.map(iova, &**memory, permission, locked);
        let mut failed = checked.err();
        let answers = if failed.is_some() { Vec::new() } else { at_once(&new, map) };
        let mut mapped = Vec::new();
        for (range, answer) in new.into_iter().zip(answers) {
            match answer {
                Some(Ok(())) => mapped.push(range),
                Some(Err(error)) => failed = failed.or(Some(error)),
                None => {}
            }
        }
        if failed.is_some() {
            // After a failure the Linux kernel is asked again.
            *info = None;
            for iova in counted {
                // It was counted, and so has another user.
                let _ = mappings.release(iova);
            }
            mapped.retain(|(iova, memory)| {
                let unmapped = engine.unmap(*iova, memory.len());
                unmapped.inspect_err(|error| tracing::error!(%error, "a range stays mapped for DMA")).is_err()
            });
        }
        for (iova, memory) in mapped {
            mappings.insert(iova, memory.clone(), permission);
        }
        failed.map_or(Ok(()), Err)
    }

    fn unmap(&self, iova: u64) -> Result<()> {
        let mut state = self.state();
        match state.mappings.release(iova)? {
            Release::Counted => Ok(()),
            Release::Unmap(len) => {
                let State { engine, mappings, info, .. } = &mut *state;
                let known = info.take();
                engine.unmap(iova, len)?;
                mappings.remove(iova);
                *info = known.map(|known| IommuInfo {
                    entries_left: known.entries_left.map(|left| left.saturating_add(1)),
                    ..known
                });
                Ok(())
            }
        }
    }
}

/// Does all of it by as many threads as there are processors, and answers in order. Once one has failed no other is begun.
fn at_once<T: Sync>(work: &[T], act: impl Fn(&T) -> Result<()> + Sync) -> Vec<Option<Result<()>>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let answers = Mutex::new(work.iter().map(|_| None).collect::<Vec<_>>());
    let run = || {
        while let (at, false) = (next.fetch_add(1, Ordering::Relaxed), failed.load(Ordering::Relaxed))
            && let Some(item) = work.get(at)
        {
            let answer = act(item);
            failed.fetch_or(answer.is_err(), Ordering::Relaxed);
            if let Some(place) = answers.lock().unwrap_or_else(PoisonError::into_inner).get_mut(at) {
                *place = Some(answer);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(work.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Where there is none to be had this one does more.
            let _ = std::thread::Builder::new().name("dma-map".into()).spawn_scoped(scope, run);
        }
        run();
    });
    answers.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Space {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "an address space did not close cleanly");
        }
    }
}

impl Member {
    pub(super) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Leaves the space. The device's file must be closed.
    pub(super) fn leave(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.left, true) {
            return Ok(());
        }
        let group = self.group.take().map(|(number, _)| number);
        let mut state = self.space.state();
        state.info = None;
        state.devices.close(self.address);
        match (&mut state.engine, group) {
            (Engine::Group(container), Some(number)) => container.leave(number),
            _ => Ok(()),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            tracing::error!(%error, "a group did not leave its container cleanly");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_answered_in_order_and_ends_with_a_failure() {
        let check = |work: &[u64], fails: &dyn Fn(u64) -> bool| -> Vec<Option<bool>> {
            let fails = work.iter().map(|&item| fails(item)).collect::<Vec<_>>();
            let act = |&item: &u64| match fails.get(item as usize) {
                Some(false) => Ok(()),
                _ => Err(VfioError::Range { start: item, end: item, reason: "it is to fail".into() }),
            };
            at_once(work, act).into_iter().map(|answer| answer.map(|answer| answer.is_ok())).collect()
        };
        assert_eq!(check(&[], &|_| false), []);
        assert_eq!(check(&[0, 1, 2], &|_| false), [Some(true); 3]);
        let all: Vec<u64> = (0..100).collect();
        assert_eq!(check(&all, &|_| false), [Some(true); 100]);
        for _ in 0..100 {
            let answers = check(&all, &|item| item == 50);
            assert_eq!(answers[..50], [Some(true); 50]);
            assert_eq!(answers[50], Some(false));
            // Those that another thread had begun are answered, too.
            let begun = answers.iter().take_while(|answer| answer.is_some()).count();
            assert!(answers[begun..].iter().all(Option::is_none), "{answers:?}");
        }
    }
}
