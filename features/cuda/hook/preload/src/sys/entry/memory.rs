//! Memory that is allocated, freed and copied.

use super::*;

/// Notes who allocated something, if that is recorded.
fn noted(id: Id) {
    if let Some(stack) = stacks::current() {
        with(|manager| manager.allocated_by(id, stack));
    }
}

/// The driver allocates itself, within the quota. `made` tells the address or the handle and how many bytes, of which at least `bytes` were asked for.
pub(super) fn natively(
    kind: Kind,
    bytes: u64,
    allocate: impl FnOnce() -> u32,
    made: impl FnOnce() -> (u64, u64),
) -> u32 {
    let own = || {
        done(allocate()).inspect_err(|failure| log::event(&Event::Failed { bytes, code: failure.0 }))?;
        let (number, bytes) = made();
        Ok((kind.id(number), bytes))
    };
    let note = |manager: &mut Manager<Real>, (id, bytes)| {
        // Pools and physical memory are of a device.
        let is_of_context = !matches!(kind, Kind::Pool | Kind::Physical);
        let context = if is_of_context { manager.driver().context() } else { 0 };
        manager.native_allocated(kind, id, context, bytes);
        id
    };
    let allocated = if is_on() && kind != Kind::Managed && Options::get().quota.is_some() {
        // One look at the manager, so that threads do not pass the quota together.
        with(|manager| {
            manager.admit(bytes, kind)?;
            let (id, all) = own()?;
            if all > bytes {
                manager.admit(all, kind).inspect_err(|_| {
                    let _ = real!(c"cuMemFree_v2"(u64)(id.number()));
                })?;
            }
            Ok(note(manager, (id, all)))
        })
    } else {
        own().map(|made| with(|manager| note(manager, made)))
    };
    code(allocated.map(noted))
}

/// What the driver allocated itself is freed.
pub(super) fn natively_freed(id: Id, free: impl FnOnce() -> u32) -> u32 {
    if !hook::is_here() {
        return free();
    }
    let number = with(|manager| manager.native_number(id));
    let result = free();
    if result == 0 && number.is_some() {
        with(|manager| manager.native_freed(id, number));
    }
    result
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
                noted(Id::Address(address));
                return 0;
            }
            Err(OUT_OF_MEMORY) => return OUT_OF_MEMORY.0,
            // What virtual memory can't be made of may be had by the driver's own way.
            Ok(None) | Err(_) => {}
        }
    }
    // SAFETY: the driver has written it.
    natively(Kind::Device, bytes as u64, own, || (unsafe { *to }, bytes as u64))
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
    natively(Kind::Managed, bytes as u64, own, || (unsafe { *to }, bytes as u64))
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
    natively(Kind::Device, (width as u64).saturating_mul(height as u64), own, || {
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
    free(address)
        .unwrap_or_else(|| natively_freed(Id::Address(address), || real!(c"cuMemFree_v2"(u64)(address))))
}

/// Frees virtual memory behind all work; none where the driver's own function is to.
pub(super) fn free(address: u64) -> Option<u32> {
    if !hook::is_here() {
        return None;
    }
    match with(|manager| manager.begin_free(address)) {
        Ok(Freed::Done) => Some(0),
        Ok(Freed::AfterWork(of)) => {
            let waited = hook::inside(|| synchronize(of.context));
            Some(code(with(|manager| manager.end_free(of, waited))))
        }
        Ok(Freed::Not) => None,
        Err(Failure(code)) => Some(code),
    }
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
        // A stream that is none, or another context's, is the driver's to judge at once.
        let is_known = |stream| stream <= 1 || manager.driver().context_of(stream) == Some(context);
        if matches!(form, Form::On(stream) if !is_known(stream)) {
            return manager.settle().map(|()| false);
        }
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
