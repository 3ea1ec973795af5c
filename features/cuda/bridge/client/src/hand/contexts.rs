//! Contexts: which are current is known on this side, and what is kept of them ends with them.

use std::collections::BTreeMap;
use std::sync::Mutex;

use vm_bridge::wire::{code, own};

use super::{end_registered, the};
use crate::client::{client, locked};
use crate::sys::{caller, tables};
use crate::{current, forward};

/// Makes a context, which is current then.
fn create(words: [usize; 3]) -> Result<(), u32> {
    forward::ask(the("cuCtxCreate_v2")?, &words)?;
    current::push(caller::word(words[0]));
    Ok(())
}

pub(crate) fn cuCtxCreate_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    create([words[0], words[1], words[2]])
}

pub(crate) fn cuCtxCreate_v3(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, affinity, count, flags, device] = *words else { return Err(code::INVALID_VALUE) };
    if affinity != 0 || count as u32 != 0 { Err(code::NOT_SUPPORTED) } else { create([to, flags, device]) }
}

pub(crate) fn cuCtxCreate_v4(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, parameters, flags, device] = *words else { return Err(code::INVALID_VALUE) };
    // A `CUctxCreateParams`: affinities, how many, and graphics. All of it may be nothing.
    let asks = parameters != 0
        && (caller::half(parameters + 8) != 0 || [0, 16].iter().any(|at| caller::word(parameters + at) != 0));
    if asks { Err(code::NOT_SUPPORTED) } else { create([to, flags, device]) }
}

pub(crate) fn cuCtxDestroy_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    let context = words[0] as u64;
    tables::end_context(context);
    forward::ask(number, words)?;
    locked(&ATTACHED).remove(&context);
    end_registered(&client()?, context);
    if current::get() == context {
        current::pop();
    }
    change()
}

/// How often contexts were attached to, beside by who made them.
static ATTACHED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

pub(crate) fn cuCtxAttach(_: usize, words: &[usize]) -> Result<(), u32> {
    let context = current::get();
    if context == 0 {
        return Err(code::INVALID_CONTEXT);
    }
    if words[0] == 0 || words[1] as u32 != 0 {
        return Err(code::INVALID_VALUE);
    }
    *locked(&ATTACHED).entry(context).or_default() += 1;
    caller::write(words[0], context);
    Ok(())
}

/// Of the current context alone; the last ends it.
pub(crate) fn cuCtxDetach(_: usize, words: &[usize]) -> Result<(), u32> {
    let context = words[0] as u64;
    if context == 0 || current::get() != context {
        return Err(code::INVALID_CONTEXT);
    }
    if let Some(count) = locked(&ATTACHED).get_mut(&context).filter(|count| **count > 0) {
        *count -= 1;
        return Ok(());
    }
    cuCtxDestroy_v2(the("cuCtxDestroy_v2")?, words)
}

pub(crate) fn cuCtxGetCurrent(_: usize, words: &[usize]) -> Result<(), u32> {
    if words[0] == 0 {
        return Err(code::INVALID_VALUE);
    }
    if !client()?.ready.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(code::NOT_INITIALIZED);
    }
    caller::write(words[0], current::get());
    Ok(())
}

pub(crate) fn cuCtxSetCurrent(number: usize, words: &[usize]) -> Result<(), u32> {
    let context = words[0] as u64;
    if context != 0 && current::get() == context {
        return client().map(drop);
    }
    forward::ask(number, words)?;
    current::set(context);
    Ok(())
}

pub(crate) fn cuCtxPushCurrent_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    current::push(words[0] as u64);
    Ok(())
}

pub(crate) fn cuCtxPopCurrent_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    current::pop();
    Ok(())
}

pub(crate) fn cuDevicePrimaryCtxRetain(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    locked(&client()?.retained).insert(words[1] as i32, caller::word(words[0]));
    change()
}

pub(crate) fn cuDevicePrimaryCtxSetFlags(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    change()
}

pub(crate) fn cuDevicePrimaryCtxSetFlags_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    cuDevicePrimaryCtxSetFlags(number, words)
}

/// Libraries ask this at each of their calls. Only this program changes it.
pub(crate) fn cuDevicePrimaryCtxGetState(number: usize, words: &[usize]) -> Result<(), u32> {
    let [device, flags, active] = *words else { return Err(code::INVALID_VALUE) };
    if flags == 0 || active == 0 {
        return Err(code::INVALID_VALUE);
    }
    let client = client()?;
    let mut primaries = locked(&client.primaries);
    let state = match primaries.get(&(device as i32)) {
        Some(state) => *state,
        None => {
            forward::ask(number, words)?;
            let state = (caller::half(flags), caller::half(active));
            primaries.insert(device as i32, state);
            state
        }
    };
    caller::write_half(flags, state.0);
    caller::write_half(active, state.1);
    Ok(())
}

/// Primary contexts may be in another state from now on.
fn change() -> Result<(), u32> {
    locked(&client()?.primaries).clear();
    Ok(())
}

pub(crate) fn cuDevicePrimaryCtxRelease(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    change()?;
    let (mut flags, mut active) = (0u32, 0u32);
    let state = [words[0], &raw mut flags as usize, &raw mut active as usize];
    cuDevicePrimaryCtxGetState(the("cuDevicePrimaryCtxGetState")?, &state)?;
    if active == 0 {
        let client = client()?;
        let context = locked(&client.retained).remove(&(words[0] as i32)).unwrap_or(0);
        client.end_context(context);
    }
    Ok(())
}

pub(crate) fn cuDevicePrimaryCtxRelease_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    cuDevicePrimaryCtxRelease(number, words)
}

/// What was asked once of a context may be another from now on.
pub(crate) fn cuCtxSetLimit(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::ask(number, words)?;
    locked(&client()?.known).forget_answers();
    Ok(())
}

/// Everything of the primary context ends, whatever it is called: what is kept of it goes.
fn reset(number: usize, words: &[usize]) -> Result<(), u32> {
    let mut context = 0u64;
    // It has its old number as long as it is retained.
    if forward::ask(the("cuDevicePrimaryCtxRetain")?, &[&raw mut context as usize, words[0]]).is_ok() {
        forward::ask(the("cuDevicePrimaryCtxRelease_v2")?, words)?;
        tables::end_context(context);
    }
    forward::ask(number, words)?;
    let client = client()?;
    end_registered(&client, context);
    client.end_context(context);
    change()
}

pub(crate) fn cuDevicePrimaryCtxReset(number: usize, words: &[usize]) -> Result<(), u32> {
    reset(number, words)
}

pub(crate) fn cuDevicePrimaryCtxReset_v2(number: usize, words: &[usize]) -> Result<(), u32> {
    reset(number, words)
}

/// The device of the current context, or what is wrong before anything can be allocated, as it is told elsewhere.
pub(crate) fn current_device() -> Result<i32, u32> {
    let mut device = 0i32;
    forward::keep(the("cuCtxGetDevice")?, &[&raw mut device as usize])?;
    Ok(device)
}

/// The primary context of a device, which the runtime asks for: it is retained from then on.
pub(crate) fn primary(to: usize, device: i32) -> Result<(), u32> {
    cuDevicePrimaryCtxRetain(the("cuDevicePrimaryCtxRetain")?, &[to, device as usize])
}

/// The number that no other context has or had.
/// The number of a stream.
pub(crate) fn stream_number(stream: u64, to: usize) -> Result<(), u32> {
    forward::keep(the("cuStreamGetId")?, &[stream as usize, to])
}

/// Where the multiprocessors of the current context's device are: two arrays, one behind the other.
pub(crate) fn topology() -> Result<Vec<u8>, u32> {
    Ok(forward::kept(own::TOPOLOGY.into(), Vec::new())?.to_vec())
}

pub(crate) fn context_number(context: u64, to: usize) -> Result<(), u32> {
    forward::keep(the("cuCtxGetId")?, &[context as usize, to])
}
