//! Contexts: primary ones and created ones, each thread's stack of them, peers, and the error that stays.

use crate::{
    error::{Error, Result},
    memory::Kind,
    state::{self, State},
};
use std::{cell::RefCell, collections::BTreeSet, mem::ManuallyDrop, sync::MutexGuard};

/// `CU_CTX_MAP_HOST`, `CU_CTX_LMEM_RESIZE_TO_MAX`, the ways to wait, core dumps and `CU_CTX_SYNC_MEMOPS`.
const FLAGS: u32 = 0xff;

pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// What work of the device failed with: all later calls return it.
    pub(crate) error: Option<Error>,
    /// The contexts whose memory its kernels may access.
    pub(crate) peers: BTreeSet<u64>,
    /// `cuCtxSetLimit`.
    pub(crate) limits: [usize; 10],
    /// How often it is held: by who created it, and by `cuCtxAttach`.
    holders: u32,
}

thread_local! {
    /// Never dropped: what a program registered for its exit calls the driver when its thread's values are gone.
    static STACK: RefCell<ManuallyDrop<Vec<u64>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Uses this thread's stack.
fn stack<T>(with: impl FnOnce(&mut Vec<u64>) -> T) -> Result<T> {
    STACK.try_with(|stack| with(&mut stack.borrow_mut())).map_err(|_| Error::InvalidContext)
}

impl State {
    /// This thread's current context, if it is alive and without error.
    pub(crate) fn current(&self) -> Result<u64> {
        let context = self.current_or_failed()?;
        self.contexts[&context].error.map_or(Ok(context), Err)
    }

    /// This thread's current context, if it is alive.
    pub(crate) fn current_or_failed(&self) -> Result<u64> {
        if !self.initialized {
            return Err(Error::NotInitialized);
        }
        let top = stack(|stack| stack.last().copied())?.filter(|context| *context != 0);
        let context = top.ok_or(Error::InvalidContext)?;
        if self.contexts.contains_key(&context) { Ok(context) } else { Err(Error::ContextIsDestroyed) }
    }

    /// Makes a failure of work of the device stay.
    pub(crate) fn fail(&mut self, context: u64, error: Error) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.error.get_or_insert(error);
        }
    }

    fn add_context(&mut self, id: u64, device: usize, flags: u32) {
        let limits = [1024, 1 << 20, 8 << 20, 2, 2048, 128, 0, 0, 0, 0];
        self.contexts
            .insert(id, Context { device, flags, error: None, peers: BTreeSet::new(), limits, holders: 1 });
    }

    /// Whether a context is there and without error: what runs in it ends otherwise.
    pub(crate) fn works(&self, id: u64) -> bool {
        self.healthy(id).is_ok()
    }

    /// A context's error, once it has one.
    fn healthy(&self, id: u64) -> Result {
        self.contexts.get(&id).ok_or(Error::ContextIsDestroyed)?.error.map_or(Ok(()), Err)
    }

    fn known(&self, context: u64) -> Result<u64> {
        let context = if context == 0 { self.current_or_failed()? } else { context };
        if self.contexts.contains_key(&context) { Ok(context) } else { Err(Error::InvalidContext) }
    }
}

/// Waits for a context's work, then frees all that is its.
fn destroy_context(mut state: MutexGuard<'static, State>, id: u64) -> Result {
    let marks = state.marks_of(id);
    state = state::wait(state, |state| marks.iter().all(|&mark| state.is_done(mark)))?;
    state.contexts.remove(&id);
    let state = &mut *state;
    let owned = |kind: &Kind| !matches!(kind, Kind::Virtual { .. });
    let spans: Vec<u64> = state
        .spans
        .iter()
        .filter(|(_, span)| span.context == id && owned(&span.kind))
        .map(|(&at, _)| at)
        .collect();
    for at in spans {
        state.release(at)?;
    }
    state.release_host(id);
    state.release_arrays(id);
    for (stream, _) in state.marks_of(id) {
        state.retire(stream);
    }
    state.defaults.retain(|&(context, _), _| context != id);
    state.events.retain(|_, event| event.context != id);
    let modules: Vec<u64> =
        state.modules.extract_if(.., |_, module| module.context == id).map(|(id, _)| id).collect();
    let modules_left = &state.modules;
    let functions =
        state.functions.extract_if(.., |_, function| !modules_left.contains_key(&function.module));
    let ended: Vec<u64> = functions.map(|(id, _)| id).chain(modules).collect();
    state.free_ids(ended);
    state.contexts.values_mut().for_each(|context| {
        context.peers.remove(&id);
    });
    Ok(())
}

/// `cuCtxCreate`: pushes it.
pub(crate) fn create(flags: u32, device: i32) -> Result<u64> {
    let mut state = state::lock();
    let device = state.device(device)?;
    if flags & !FLAGS != 0 || flags & 7 == 3 || flags & 7 > 4 {
        return Err(Error::InvalidValue);
    }
    let id = state.id();
    state.add_context(id, device, flags);
    stack(|stack| stack.push(id))?;
    Ok(id)
}

/// `cuCtxDestroy`: pops it where it is current.
pub(crate) fn destroy(id: u64) -> Result {
    let state = state::lock();
    if !state.initialized {
        return Err(Error::NotInitialized);
    }
    if !state.contexts.contains_key(&id) || state.devices.iter().any(|device| device.primary == id) {
        return Err(Error::InvalidContext);
    }
    stack(|stack| {
        if stack.last() == Some(&id) {
            stack.pop();
        }
    })?;
    destroy_context(state, id)?;
    crate::tables::ended(id);
    Ok(())
}

/// `cuCtxAttach`: holds the current one once more.
pub(crate) fn attach(flags: u32) -> Result<u64> {
    let mut state = state::lock();
    let id = state.current()?;
    if flags != 0 {
        return Err(Error::InvalidValue);
    }
    if let Some(context) = state.contexts.get_mut(&id) {
        context.holders += 1;
    }
    Ok(id)
}

/// `cuCtxDetach`: of the current one alone; the last destroys it.
pub(crate) fn detach(id: u64) -> Result {
    let mut state = state::lock();
    if state.current_or_failed()? != id || state.devices.iter().any(|device| device.primary == id) {
        return Err(Error::InvalidContext);
    }
    let context = state.contexts.get_mut(&id).ok_or(Error::InvalidContext)?;
    if context.holders > 1 {
        context.holders -= 1;
        return Ok(());
    }
    drop(state);
    destroy(id)
}

/// `cuCtxGetCurrent`: 0 without one.
pub(crate) fn get_current() -> Result<u64> {
    if !state::lock().initialized {
        return Err(Error::NotInitialized);
    }
    Ok(stack(|stack| stack.last().copied())?.unwrap_or(0))
}

/// `cuCtxSetCurrent`: replaces the top.
pub(crate) fn set_current(id: u64) -> Result {
    let state = state::lock();
    if !state.initialized {
        return Err(Error::NotInitialized);
    }
    if id != 0 && !state.contexts.contains_key(&id) {
        return Err(Error::InvalidContext);
    }
    stack(|stack| {
        stack.pop();
        if id != 0 {
            stack.push(id);
        }
    })
}

/// `cuCtxPushCurrent`.
pub(crate) fn push(id: u64) -> Result {
    let state = state::lock();
    if !state.initialized {
        return Err(Error::NotInitialized);
    }
    if !state.contexts.contains_key(&id) {
        return Err(Error::InvalidContext);
    }
    stack(|stack| stack.push(id))
}

/// `cuCtxPopCurrent`.
pub(crate) fn pop() -> Result<u64> {
    if !state::lock().initialized {
        return Err(Error::NotInitialized);
    }
    stack(|stack| stack.pop())?.ok_or(Error::InvalidContext)
}

/// The current context's device.
pub(crate) fn device() -> Result<i32> {
    let state = state::lock();
    Ok(state.contexts[&state.current_or_failed()?].device as i32)
}

/// The device of a context: of the current one for 0.
pub(crate) fn device_of(id: u64) -> Result<i32> {
    let state = state::lock();
    Ok(state.contexts[&state.known(id)?].device as i32)
}

/// Flags of the current context.
pub(crate) fn flags() -> Result<u32> {
    let state = state::lock();
    Ok(state.contexts[&state.current_or_failed()?].flags)
}

/// `cuCtxSetFlags`.
pub(crate) fn set_flags(flags: u32) -> Result {
    let mut state = state::lock();
    let id = state.current()?;
    if flags & !FLAGS != 0 {
        return Err(Error::InvalidValue);
    }
    if let Some(context) = state.contexts.get_mut(&id) {
        context.flags = flags;
    }
    Ok(())
}

/// A number of the context that no other has had.
pub(crate) fn id_of(id: u64) -> Result<u64> {
    state::lock().known(id)
}

/// `cuCtxGetLimit`, and `cuCtxSetLimit` where there is a value.
pub(crate) fn limit(which: i32, value: Option<usize>) -> Result<usize> {
    let mut state = state::lock();
    let id = state.current()?;
    let limits =
        state.contexts.get_mut(&id).map(|context| &mut context.limits).ok_or(Error::InvalidContext)?;
    let limit = usize::try_from(which).ok().and_then(|at| limits.get_mut(at)).ok_or(Error::InvalidValue)?;
    *limit = value.unwrap_or(*limit);
    Ok(*limit)
}

/// `cuCtxSynchronize`: the current context for 0.
pub(crate) fn synchronize(id: u64) -> Result {
    let mut state = state::lock();
    let id = state.known(id)?;
    state.healthy(id)?;
    state.refuse_in_capture()?;
    state.refuse_captured(id)?;
    let marks = state.marks_of(id);
    state = state::wait(state, |state| marks.iter().all(|&mark| state.is_done(mark)))?;
    state.healthy(id)
}

/// `cuDevicePrimaryCtxRetain`.
pub(crate) fn retain_primary(device: i32) -> Result<u64> {
    let mut state = state::lock();
    let at = state.device(device)?;
    let device = &mut state.devices[at];
    device.primary_count += 1;
    let (id, flags, first) = (device.primary, device.primary_flags, device.primary_count == 1);
    if first {
        state.add_context(id, at, flags);
    }
    Ok(id)
}

/// `cuDevicePrimaryCtxRelease`: the last one resets it.
pub(crate) fn release_primary(device: i32) -> Result {
    let mut state = state::lock();
    let at = state.device(device)?;
    let device = &mut state.devices[at];
    let id = device.primary;
    device.primary_count = device.primary_count.checked_sub(1).ok_or(Error::InvalidContext)?;
    if device.primary_count == 0 { destroy_context(state, id) } else { Ok(()) }
}

/// `cuDevicePrimaryCtxReset`: frees all that is its, also while it is retained.
pub(crate) fn reset_primary(device: i32) -> Result {
    let state = state::lock();
    let at = state.device(device)?;
    let (id, flags) = (state.devices[at].primary, state.devices[at].primary_flags);
    if !state.contexts.contains_key(&id) {
        return Ok(());
    }
    destroy_context(state, id)?;
    crate::tables::ended(id);
    let mut state = state::lock();
    if state.devices[at].primary_count > 0 {
        state.add_context(id, at, flags);
    }
    Ok(())
}

/// `cuDevicePrimaryCtxGetState`: flags, and whether it is active.
pub(crate) fn primary_state(device: i32) -> Result<(u32, i32)> {
    let state = state::lock();
    let device = &state.devices[state.device(device)?];
    Ok((device.primary_flags, (device.primary_count > 0).into()))
}

/// `cuDevicePrimaryCtxSetFlags`.
pub(crate) fn set_primary_flags(device: i32, flags: u32) -> Result {
    let mut state = state::lock();
    let at = state.device(device)?;
    if flags & !FLAGS != 0 {
        return Err(Error::InvalidValue);
    }
    state.devices[at].primary_flags = flags;
    let id = state.devices[at].primary;
    if let Some(context) = state.contexts.get_mut(&id) {
        context.flags = flags;
    }
    Ok(())
}

/// `cuDeviceCanAccessPeer`.
pub(crate) fn can_access(device: i32, peer: i32) -> Result<i32> {
    let state = state::lock();
    Ok((state.device(device)? != state.device(peer)?).into())
}

/// `cuCtxEnablePeerAccess`.
pub(crate) fn enable_peer(peer: u64, flags: u32) -> Result {
    let mut state = state::lock();
    let id = state.current()?;
    let other = state.contexts.get(&peer).ok_or(Error::InvalidContext)?.device;
    if flags != 0 {
        return Err(Error::InvalidValue);
    }
    let context = state.contexts.get_mut(&id).ok_or(Error::InvalidContext)?;
    if peer == id || other == context.device {
        return Err(Error::PeerAccessUnsupported);
    }
    if context.peers.insert(peer) { Ok(()) } else { Err(Error::PeerAccessAlreadyEnabled) }
}

/// `cuCtxDisablePeerAccess`.
pub(crate) fn disable_peer(peer: u64) -> Result {
    let mut state = state::lock();
    let id = state.current()?;
    if !state.contexts.contains_key(&peer) {
        return Err(Error::InvalidContext);
    }
    let context = state.contexts.get_mut(&id).ok_or(Error::InvalidContext)?;
    if context.peers.remove(&peer) { Ok(()) } else { Err(Error::PeerAccessNotEnabled) }
}
