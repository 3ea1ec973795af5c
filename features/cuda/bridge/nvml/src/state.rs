//! How often the library is initialised, and what it was told then.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use vm_bridge::wire::facts::{Device, Facts};

use crate::errors::Error;
use crate::sys::{driver, fork};

/// What is known between the first `nvmlInit` and the last `nvmlShutdown`.
struct State {
    count: u64,
    facts: Arc<Facts>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn locked() -> MutexGuard<'static, Option<State>> {
    static FORKS: Once = Once::new();
    FORKS.call_once(|| fork::at_fork(hold, release));
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static HELD: RefCell<Option<MutexGuard<'static, Option<State>>>> = const { RefCell::new(None) };
}

/// Before a fork: no other thread has the state locked in the child.
extern "C" fn hold() {
    let state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    // A thread that ends forks no more.
    let _ = HELD.try_with(|held| held.borrow_mut().replace(state));
}

/// Behind it, on both sides.
extern "C" fn release() {
    // As above.
    let _ = HELD.try_with(|held| held.borrow_mut().take());
}

pub(crate) fn init() -> Result<(), Error> {
    if let Some(state) = &mut *locked() {
        state.count += 1;
        return Ok(());
    }
    // Others go on meanwhile, and may fork.
    let facts = Arc::new(driver::facts()?);
    locked().get_or_insert(State { count: 0, facts }).count += 1;
    Ok(())
}

pub(crate) fn shutdown() -> Result<(), Error> {
    let mut state = locked();
    let known = state.as_mut().ok_or(Error::Uninitialized)?;
    known.count -= 1;
    if known.count == 0 {
        *state = None;
    }
    Ok(())
}

/// What the server said.
pub(crate) fn facts() -> Result<Arc<Facts>, Error> {
    locked().as_ref().map(|state| state.facts.clone()).ok_or(Error::Uninitialized)
}

/// Handles are numbers from here on: no addresses of anything.
const HANDLES: usize = 0x6e76_6d6c_0000;
const BETWEEN: usize = 16;

/// The handle of a device.
pub(crate) fn handle(index: usize) -> usize {
    HANDLES + index * BETWEEN
}

/// The index of a device, with what the server said.
pub(crate) fn index(handle: usize) -> Result<(usize, Arc<Facts>), Error> {
    let facts = facts()?;
    let offset = handle.checked_sub(HANDLES).filter(|offset| offset.is_multiple_of(BETWEEN));
    let index = offset.map(|offset| offset / BETWEEN).filter(|index| *index < facts.devices.len());
    Ok((index.ok_or(Error::InvalidArgument)?, facts))
}

/// What the server said of a device.
pub(crate) fn device(handle: usize) -> Result<Device, Error> {
    let (index, facts) = index(handle)?;
    Ok(facts.devices[index].clone())
}
