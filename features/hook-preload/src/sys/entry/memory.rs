//! Memory that is allocated, freed and copied.

use super::*;

/// Logs an allocation of the driver's own, or its end.
fn log_native(what: &str, address: u64, bytes: u64) {
    log::line(Level::Info, what, &[("address", Value::Address(address)), ("bytes", Value::Number(bytes))]);
}

/// Notes who allocated what is at an address, if that is recorded.
fn noted(address: u64) {
    if let Some(stack) = stacks::current() {
        with(|manager| manager.allocated_by(address, stack));
    }
}

/// The driver allocates itself, within the quota; managed memory is where it is used, and has none. `made` tells the address and the bytes, of
/// which at least `bytes` were asked for.
fn natively(
    bytes: u64,
    is_managed: bool,
    allocate: impl FnOnce() -> u32,
    made: impl FnOnce() -> (u64, u64),
) -> u32 {
    let own = || {
        done(allocate()).inspect_err(|failure| log::event(&Event::Failed { bytes, code: failure.0 }))?;
        Ok(made())
    };
    let note = |manager: &mut Manager<Real>, (address, bytes)| {
        manager.native_allocated(manager.driver().context(), address, bytes, is_managed);
        (address, bytes)
    };
    let allocated = if is_on() && !is_managed && Options::get().quota.is_some() {
        // One look at the manager, so that threads do not pass the quota together.
        with(|manager| {
            manager.admit(bytes)?;
            let made = own()?;
            manager.admit(made.1).inspect_err(|_| {
                let _ = real!(c"cuMemFree_v2"(u64)(made.0));
            })?;
            Ok(note(manager, made))
        })
    } else {
        own().map(|made| with(|manager| note(manager, made)))
    };
    code(allocated.map(|(address, bytes)| {
        noted(address);
        log_native("native-allocated", address, bytes);
    }))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> u32 {
    let _pass = hook::enter(false);
    let own = || real!(c"cuMemAlloc_v2" (*mut u64, usize) (to, bytes));
    if to.is_null() || bytes == 0 || !hook::is_here() {
        return own();
    }
    if is_on() {
        let made = with(|manager| match manager.driver().current() {
            Some((context, device)) => manager.allocate(context, device, bytes as u64),
            None => Ok(None),
        });
        match made {
            Ok(Some(address)) => {
                // SAFETY: the caller gives the place of an address.
                unsafe { *to = address };
                noted(address);
                return 0;
            }
            Err(OUT_OF_MEMORY) => return OUT_OF_MEMORY.0,
            // What virtual memory can't be made of may be had by the driver's own way.
            Ok(None) | Err(_) => {}
        }
    }
    // SAFETY: the driver has written it.
    natively(bytes as u64, false, own, || (unsafe { *to }, bytes as u64))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemAllocManaged(to: *mut u64, bytes: usize, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own = || real!(c"cuMemAllocManaged" (*mut u64, usize, c_uint) (to, bytes, flags));
    if !hook::is_here() {
        return own();
    }
    // SAFETY: the driver has written it.
    natively(bytes as u64, true, own, || (unsafe { *to }, bytes as u64))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemAllocPitch_v2(
    to: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own = || real!(c"cuMemAllocPitch_v2" (*mut u64, *mut usize, usize, usize, c_uint) (to, pitch, width, height, element));
    if !hook::is_here() {
        return own();
    }
    natively((width as u64).saturating_mul(height as u64), false, own, || {
        // SAFETY: the driver has written it.
        let address = unsafe { *to };
        // SAFETY: likewise.
        let pitch = unsafe { *pitch };
        (address, (pitch * height) as u64)
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    let _pass = hook::enter(true);
    if hook::is_here() {
        match with(|manager| manager.begin_free(address)) {
            Ok(Freed::Done) => return 0,
            Ok(Freed::AfterWork(of)) => {
                let waited = hook::inside(|| synchronize(of.context));
                return code(with(|manager| manager.end_free(of, waited)));
            }
            Ok(Freed::Not) => {}
            Err(Failure(code)) => return code,
        }
    }
    let result = real!(c"cuMemFree_v2"(u64)(address));
    if result == 0 && hook::is_here() {
        let bytes = with(|manager| manager.native_freed(address));
        log_native("native-freed", address, bytes);
    }
    result
}

/// A copy that may be put off.
macro_rules! copies {
    ($($function:ident $name:literal ($($stream:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(to: u64, from: u64, bytes: usize $(, $stream: u64)?) -> u32 {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without a nul"),
            };
            static SLOT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let Some(real) = found(&SLOT, NAME) else { return NOT_FOUND };
            let _pass = hook::enter(false);
            let form: Form = Form::Default;
            $(let form: Form = { let _ = form; Form::On($stream) };)?
            // The default stream of a thread is another one in another thread.
            let of_thread = is_of_thread_stream($name) && !matches!(form, Form::On(stream) if stream > 2)
                || matches!(form, Form::On(2));
            match put_off(real, form, to, from, bytes, of_thread) {
                Ok(true) => return 0,
                Ok(false) => {}
                Err(Failure(code)) => return code,
            }
            // SAFETY: the driver's function of this name has this signature.
            let real = unsafe {
                transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(u64, u64, usize $(, copies!(@stream $stream))?) -> u32,
                >(real)
            };
            // SAFETY: the arguments are the caller's, as they are.
            ended($name, unsafe { real(to, from, bytes $(, $stream)?) })
        }
    )*};
    (@stream $stream:ident) => { u64 };
}

copies! {
    cuMemcpyDtoD_v2 "cuMemcpyDtoD_v2" ();
    cuMemcpyDtoD_v2_ptds "cuMemcpyDtoD_v2_ptds" ();
    cuMemcpyDtoDAsync_v2 "cuMemcpyDtoDAsync_v2" (stream);
    cuMemcpyDtoDAsync_v2_ptsz "cuMemcpyDtoDAsync_v2_ptsz" (stream);
    cuMemcpy "cuMemcpy" ();
    cuMemcpy_ptds "cuMemcpy_ptds" ();
    cuMemcpyAsync "cuMemcpyAsync" (stream);
    cuMemcpyAsync_ptsz "cuMemcpyAsync_ptsz" (stream);
}

/// Puts a copy off, if that may be; else what it could see is settled.
fn put_off(real: *mut c_void, form: Form, to: u64, from: u64, bytes: usize, of_thread: bool) -> Result<bool> {
    if of_thread {
        return ready(true).map(|()| false);
    }
    // A target that waits for memory leaves things unsettled.
    if !hook::is_unsettled() || !is_on() {
        return Ok(false);
    }
    with(|manager| {
        let Some((context, _)) = manager.driver().current() else { return manager.settle().map(|()| false) };
        let copy = Copy { function: real as usize, form, context, to, from, bytes };
        manager.copy(to, from, bytes as u64, copy)
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, all: *mut usize) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuMemGetInfo_v2" (*mut usize, *mut usize) (free, all));
    if result == 0 && !free.is_null() && !all.is_null() && is_on() {
        let (promised, (used, quota)) = with(|manager| (manager.promised(), manager.used()));
        // SAFETY: the driver has written it, so it is there.
        let free = unsafe { &mut *free };
        // SAFETY: likewise.
        let all = unsafe { &mut *all };
        *free = free.saturating_sub(promised as usize);
        if let Some(quota) = quota {
            *all = (*all).min(quota as usize);
            *free = (*free).min(quota.saturating_sub(used) as usize);
        }
    }
    result
}
