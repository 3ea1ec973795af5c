//! Streams, and what is captured of them.

use super::*;

/// Remembers a stream that was made.
///
/// # Safety
/// Where `result` is success, the driver has written `stream`.
unsafe fn made(stream: *mut u64, result: u32) -> u32 {
    if result == 0 && hook::is_here() {
        // SAFETY: the driver has written it.
        let stream = unsafe { *stream };
        with(|manager| {
            let driver = manager.driver();
            let of = Of::context(driver.context());
            driver.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, of);
        });
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuStreamCreate(stream: *mut u64, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuStreamCreate" (*mut u64, c_uint) (stream, flags));
    // SAFETY: the driver takes no null.
    unsafe { made(stream, result) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    flags: c_uint,
    priority: c_int,
) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuStreamCreateWithPriority" (*mut u64, c_uint, c_int) (stream, flags, priority));
    // SAFETY: the driver takes no null.
    unsafe { made(stream, result) }
}

macro_rules! destroys {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(stream: u64) -> u32 {
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = before() {
                return code;
            }
            let own = || real!($name (u64) (stream));
            if !hook::is_here() {
                return own();
            }
            // Nobody may ask it from here on, and its handle may come again.
            let streams = |f: &mut dyn FnMut(&mut BTreeMap<u64, Of>)| {
                with(|manager| f(&mut manager.driver().streams.lock().unwrap_or_else(PoisonError::into_inner)));
            };
            let mut known = None;
            streams(&mut |streams| known = streams.remove(&stream));
            if let Some(of) = known {
                with(|manager| manager.driver().leave(stream, of));
            }
            let result = own();
            if result != 0 && let Some(of) = known {
                streams(&mut |streams| {
                    streams.insert(stream, of);
                });
                return result;
            }
            released(stream, result, true)
        }
    )*};
}

destroys! {
    cuStreamDestroy c"cuStreamDestroy";
    cuStreamDestroy_v2 c"cuStreamDestroy_v2";
}

/// A stream's handle, which is that of the thread's default stream where a function takes 0 for it.
pub(super) fn stream_of(name: &str, stream: u64) -> u64 {
    if stream == 0 && is_of_thread_stream(name) { 2 } else { stream }
}

/// Begins a capture.
fn captured(stream: u64, begin: impl FnOnce() -> u32) -> u32 {
    if !is_on() {
        return begin();
    }
    if let Err(Failure(code)) = with(|manager| manager.begin_capture()) {
        return code;
    }
    let result = begin();
    if result == 0 {
        with(|manager| {
            let driver = manager.driver();
            let of = Of::context(driver.context());
            driver.captures.lock().unwrap_or_else(PoisonError::into_inner).push((stream, of));
        });
    } else if let Err(Failure(code)) = with(|manager| manager.end_capture()) {
        return code;
    }
    result
}

/// Behind a call that ends a stream's capture, if there is one; one that fails may end it, or not.
fn released(stream: u64, result: u32, is_gone: bool) -> u32 {
    if !is_on() {
        return result;
    }
    let ended = with(|manager| {
        if !is_gone && result != 0 && manager.driver().is_captured(stream) {
            return Ok(());
        }
        let mut captures = manager.driver().captures.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = captures.iter().position(|(of, _)| *of == stream) else { return Ok(()) };
        captures.swap_remove(at);
        drop(captures);
        manager.end_capture()
    });
    if result == 0 { code(ended) } else { result }
}

macro_rules! captures {
    ($($function:ident $name:literal ($stream:ident: u64 $(, $argument:ident: $ty:ty)*);)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function($stream: u64 $(, $argument: $ty)*) -> u32 {
            let _pass = hook::enter(false);
            let own = || real!($name (u64 $(, $ty)*) ($stream $(, $argument)*));
            captured(stream_of(stringify!($function), $stream), own)
        }
    )*};
}

captures! {
    cuStreamBeginCapture c"cuStreamBeginCapture" (stream: u64);
    cuStreamBeginCapture_ptsz c"cuStreamBeginCapture_ptsz" (stream: u64);
    cuStreamBeginCapture_v2 c"cuStreamBeginCapture_v2" (stream: u64, mode: c_int);
    cuStreamBeginCapture_v2_ptsz c"cuStreamBeginCapture_v2_ptsz" (stream: u64, mode: c_int);
    cuStreamBeginCaptureToGraph c"cuStreamBeginCaptureToGraph" (stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: c_int);
    cuStreamBeginCaptureToGraph_ptsz c"cuStreamBeginCaptureToGraph_ptsz" (stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: c_int);
    cuStreamBeginRecaptureToGraph c"cuStreamBeginRecaptureToGraph" (stream: u64, mode: c_int, graph: u64, function: *const c_void, data: *mut c_void);
    cuStreamBeginRecaptureToGraph_ptsz c"cuStreamBeginRecaptureToGraph_ptsz" (stream: u64, mode: c_int, graph: u64, function: *const c_void, data: *mut c_void);
    cuStreamBeginCaptureToCig c"cuStreamBeginCaptureToCig" (stream: u64, parameters: *mut c_void);
    cuStreamBeginCaptureToCig_ptsz c"cuStreamBeginCaptureToCig_ptsz" (stream: u64, parameters: *mut c_void);
}

macro_rules! captures_end {
    ($($function:ident $name:literal ($($graph:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $function(stream: u64 $(, $graph: *mut u64)?) -> u32 {
            let _pass = hook::enter(false);
            let result = real!($name (u64 $(, captures_end!(@place $graph))?) (stream $(, $graph)?));
            released(stream_of(stringify!($function), stream), result, false)
        }
    )*};
    (@place $graph:ident) => { *mut u64 };
}

captures_end! {
    cuStreamEndCapture c"cuStreamEndCapture" (graph);
    cuStreamEndCapture_ptsz c"cuStreamEndCapture_ptsz" (graph);
    cuStreamEndCaptureToCig c"cuStreamEndCaptureToCig" ();
    cuStreamEndCaptureToCig_ptsz c"cuStreamEndCaptureToCig_ptsz" ();
}
