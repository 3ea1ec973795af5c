//! Contexts that begin and end.

use std::sync::MutexGuard;

use super::*;

/// A device has a context: it reaches the memory that there is.
fn join(device: c_int) {
    if !is_on() {
        return;
    }
    with(|manager| {
        let driver = manager.driver();
        if !driver.join(device) {
            return;
        }
        let own = manager
            .tracker()
            .all()
            .flat_map(|of| of.pieces.iter().map(move |piece| (of.address + piece.offset, piece.bytes)));
        for (address, bytes) in own.chain(sharing::pieces()) {
            if let Err(Failure(code)) = driver.give_access(address, bytes, device) {
                let values = [("address", Value::Address(address)), ("code", Value::Number(code.into()))];
                log::line(Level::Error, "no-access", &values);
            }
        }
    });
}

/// A context is there, which can make what is reserved for pauses.
fn reserve(context: u64) {
    if is_on() {
        reserve::start(context);
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuDevicePrimaryCtxRetain" (*mut u64, c_int) (context, device));
    if result == 0 {
        join(device);
        // SAFETY: the driver has written it.
        reserve(unsafe { *context });
    }
    result
}

/// Makes contexts, which are waited for when the program is paused.
macro_rules! makes {
    ($($function:ident $name:literal ($($argument:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(context: *mut u64, $($argument: $ty),*) -> u32 {
            let _pass = hook::enter(false);
            let result = real!($name (*mut u64, $($ty),*) (context, $($argument),*));
            if result == 0 && hook::is_here() {
                // SAFETY: the driver has written it.
                let context = unsafe { *context };
                let made = with(|manager| {
                    let driver = manager.driver();
                    held(driver).insert(context, (Of::context(context), 1));
                    // It is the thread's.
                    driver.current()
                });
                if let Some((_, device)) = made {
                    join(device);
                    reserve(context);
                }
            }
            result
        }
    )*};
}

makes! {
    cuCtxCreate c"cuCtxCreate" (flags: c_uint, device: c_int);
    cuCtxCreate_v2 c"cuCtxCreate_v2" (flags: c_uint, device: c_int);
    cuCtxCreate_v3 c"cuCtxCreate_v3" (affinity: *const c_void, count: c_int, flags: c_uint, device: c_int);
    cuCtxCreate_v4 c"cuCtxCreate_v4" (parameters: *const c_void, flags: c_uint, device: c_int);
}

/// Contexts that the program made, and how often they are held.
fn held(driver: &Real) -> MutexGuard<'_, BTreeMap<u64, (Of, u32)>> {
    driver.contexts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What there was before a context ended: all that comes later is of another context, as the driver may give the handle again at once.
struct Before {
    memory: Mark,
    others: u64,
}

impl Before {
    fn now() -> Self {
        with(|manager| Before { memory: manager.mark(), others: Of::count() })
    }

    /// The context is gone, and with it its memory, its streams and their captures.
    fn gone(self, context: u64) {
        with(|manager| {
            let captures = manager.driver().forget(context, self.others);
            let _ = manager.end_context(context, self.memory);
            for _ in 0..captures {
                let _ = manager.end_capture();
            }
        });
        sharing::end_context(context, self.others);
        reserve::end_context(context, self.others);
    }
}

/// Ends a context, which takes its memory with it; what the driver refuses to end keeps it.
fn end(context: u64, destroy: impl FnOnce() -> u32) -> u32 {
    if !hook::is_here() {
        return destroy();
    }
    if let Err(Failure(code)) = before() {
        return code;
    }
    // What can't be waited for, or was lost, goes with the context.
    let _ = hook::inside(|| synchronize(context));
    pause::leave(context);
    let before = Before::now();
    let result = destroy();
    if result == 0 {
        before.gone(context);
    }
    result
}

/// Holds a context once more, which ends when as many have let go of it.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuCtxAttach(context: *mut u64, flags: c_uint) -> u32 {
    let result = real!(c"cuCtxAttach" (*mut u64, c_uint) (context, flags));
    if result == 0 && hook::is_here() {
        // SAFETY: the driver has written it.
        let context = unsafe { *context };
        with(|manager| {
            if let Some((_, holders)) = held(manager.driver()).get_mut(&context) {
                *holders += 1;
            }
        });
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuCtxDetach(context: u64) -> u32 {
    let _pass = hook::enter(true);
    let own = || real!(c"cuCtxDetach"(u64)(context));
    let holders = |change: fn(&mut u32)| {
        let change = |(_, holders): &mut (Of, u32)| {
            change(holders);
            *holders
        };
        hook::is_here()
            .then(|| with(|manager| held(manager.driver()).get_mut(&context).map(change)))
            .flatten()
    };
    if holders(|_| ()) == Some(1) {
        return end(context, own);
    }
    if let Err(Failure(code)) = before() {
        return code;
    }
    let result = own();
    if result == 0 {
        holders(|holders| *holders -= 1);
    }
    result
}

macro_rules! ends {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(context: u64) -> u32 {
            let _pass = hook::enter(true);
            end(context, || real!($name (u64) (context)))
        }
    )*};
}

ends! {
    cuCtxDestroy c"cuCtxDestroy";
    cuCtxDestroy_v2 c"cuCtxDestroy_v2";
}

macro_rules! primary {
    ($($function:ident $name:literal $resets:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(device: c_int) -> u32 {
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = before() {
                return code;
            }
            let context = if hook::is_here() { with(|manager| manager.driver().primary(device)) } else { None };
            context.into_iter().for_each(pause::leave);
            let before = context.map(|_| Before::now());
            let result = real!($name (c_int) (device));
            if let (Some(context), Some(before)) = (context, before)
                // What is retained is there behind a reset, without its memory.
                && (result == 0 && $resets || !with(|manager| manager.driver().has_primary(device)))
            {
                before.gone(context);
            } else {
                context.into_iter().for_each(reserve);
            }
            result
        }
    )*};
}

primary! {
    cuDevicePrimaryCtxReset c"cuDevicePrimaryCtxReset" true;
    cuDevicePrimaryCtxReset_v2 c"cuDevicePrimaryCtxReset_v2" true;
    cuDevicePrimaryCtxRelease c"cuDevicePrimaryCtxRelease" false;
    cuDevicePrimaryCtxRelease_v2 c"cuDevicePrimaryCtxRelease_v2" false;
}
