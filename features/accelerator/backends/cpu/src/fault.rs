//! Kernels whose memory has pages that may not be accessed: a fault there ends the kernel's blocks on this thread, and not the process.
//!
//! [`call`] notes how to go on behind the call of the kernel. The handler of the signal, where the kernel's own code touched the
//! memory that it was given, has the thread go on there. The code holds nothing that would have to be released: it takes no locks,
//! calls nothing, and its memory is the caller's. All other signals go to who handled them before.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{SIGBUS, SIGSEGV, c_int, c_void, sigaction, siginfo_t, ucontext_t};

/// A kernel's function.
pub(crate) type Function = unsafe extern "C" fn(*const u8, *const [u32; 3], u64, u64, *mut u8);

/// How a thread goes on behind the kernel that it runs.
#[repr(C)]
struct Frame {
    /// Stack pointer, frame pointer, the register that is the compiler's, and the address.
    resume: [Cell<u64>; 4],
    code: Range<u64>,
    memory: Range<u64>,
    /// What was touched.
    fault: Cell<u64>,
}

thread_local! {
    /// Without initialiser and destructor, so that the handler may read it.
    static FRAME: Cell<*const Frame> = const { Cell::new(null()) };
}

/// All code that may fault lies between these: of a thread that is elsewhere the handler need not know what it runs.
static HULL: [AtomicU64; 2] = [AtomicU64::new(u64::MAX), AtomicU64::new(0)];

/// Addresses at which nothing ever is, and where code touches what it knows to be out of bounds.
const NOWHERE: Range<u64> = 0..4096;

/// Who handled the two signals before.
static BEFORE: OnceLock<Result<[sigaction; 2], i32>> = OnceLock::new();

/// Has faults of kernels handled from now on.
///
/// # Errors
/// The operating system's.
pub(crate) fn expect() -> io::Result<()> {
    let known = BEFORE.get_or_init(|| Ok([install(SIGSEGV)?, install(SIGBUS)?]));
    known.as_ref().map(drop).map_err(|code| io::Error::from_raw_os_error(*code))
}

/// Handles a signal: who did before, or the number of the error.
fn install(signal: c_int) -> Result<sigaction, i32> {
    // SAFETY: zeros are a value of this structure of C's.
    let mut ours: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = handle as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: as above.
    let mut before: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: both outlive the call, and the handler does only what handlers of signals may.
    match unsafe { sigaction(signal, &raw const ours, &raw mut before) } {
        0 => Ok(before),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes what it says of the signal.
    let told = unsafe { &*info };
    // SAFETY: of these two signals it says an address.
    let address = unsafe { told.si_addr() } as u64;
    // SAFETY: the system passes the thread's state.
    let state = unsafe { &mut *context.cast::<ucontext_t>() };
    let (at, hull) = (counter(state), [0, 1].map(|end: usize| HULL[end].load(Ordering::Relaxed)));
    if (hull[0]..hull[1]).contains(&at) {
        // SAFETY: a frame is there while it is noted: its thread is in the kernel.
        let frame = unsafe { FRAME.get().as_ref() };
        if let Some(frame) = frame
            && (frame.memory.contains(&address) || NOWHERE.contains(&address))
            && frame.code.contains(&at)
        {
            frame.fault.set(address);
            go_on(state, &frame.resume);
            return;
        }
    }
    let before = match (BEFORE.get(), signal) {
        (Some(Ok([before, _])), SIGSEGV) | (Some(Ok([_, before])), _) => before,
        // A signal before it is known who was to handle it.
        _ => return default(signal),
    };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => default(signal),
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: whoever installed it said that it is of this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Has the access, which is done over when this returns, end the process as it does where nobody handles it.
fn default(signal: c_int) {
    // SAFETY: zeros are a value of this structure: the default action.
    let action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: it outlives the call.
    unsafe { sigaction(signal, &raw const action, null_mut()) };
}

/// Where a thread is.
fn counter(state: &ucontext_t) -> u64 {
    #[cfg(target_arch = "x86_64")]
    return state.uc_mcontext.gregs[libc::REG_RIP as usize] as u64;
    #[cfg(target_arch = "aarch64")]
    return state.uc_mcontext.pc;
}

/// Has a thread go on elsewhere, where it finds a one as the result.
fn go_on(state: &mut ucontext_t, resume: &[Cell<u64>; 4]) {
    let [stack, frame, own, at] = [0, 1, 2, 3].map(|index: usize| resume[index].get());
    #[cfg(target_arch = "x86_64")]
    {
        let places = [libc::REG_RSP, libc::REG_RBP, libc::REG_RBX, libc::REG_RIP, libc::REG_RAX];
        for (place, value) in places.into_iter().zip([stack, frame, own, at, 1]) {
            state.uc_mcontext.gregs[place as usize] = value as i64;
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        let state = &mut state.uc_mcontext;
        (state.sp, state.pc) = (stack, at);
        (state.regs[29], state.regs[19], state.regs[0]) = (frame, own, 1);
    }
}

/// Runs the blocks from `first` up to `end` by a kernel's function that lies in `code`: where it touched what of `memory` may not be
/// accessed, if it did; then it has not gone on.
///
/// # Safety
/// As for the function, but that pages of `memory` may be missing; [`expect`] knows of it.
#[expect(clippy::too_many_arguments)]
pub(crate) unsafe fn call(
    function: Function,
    code: Range<u64>,
    memory: Range<u64>,
    params: *const u8,
    grid: *const [u32; 3],
    first: u64,
    end: u64,
    scratch: *mut u8,
) -> Option<u64> {
    HULL[0].fetch_min(code.start, Ordering::Relaxed);
    HULL[1].fetch_max(code.end, Ordering::Relaxed);
    let frame = Frame { resume: [const { Cell::new(0) }; 4], code, memory, fault: Cell::new(0) };
    let before = FRAME.replace(&raw const frame);
    let faulted: u64;
    // SAFETY: the call is that of a function of C's with these arguments, as the caller promises. When the handler has the thread go
    // on at the label, stack pointer and frame pointer and the register of the compiler's are what they were, and all others are
    // given up here.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "mov [r9], rsp",
            "mov [r9 + 8], rbp",
            "mov [r9 + 16], rbx",
            "lea r10, [rip + 2f]",
            "mov [r9 + 24], r10",
            "call rax",
            "xor eax, eax",
            "2:",
            inout("rax") function => faulted,
            inout("rdi") params => _, inout("rsi") grid => _, inout("rdx") first => _, inout("rcx") end => _,
            inout("r8") scratch => _, inout("r9") frame.resume.as_ptr() => _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            clobber_abi("C"),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "mov x9, sp",
            "str x9, [x5]",
            "str x29, [x5, #8]",
            "str x19, [x5, #16]",
            "adr x9, 2f",
            "str x9, [x5, #24]",
            "blr x6",
            "mov x0, xzr",
            "2:",
            inout("x0") params => faulted,
            inout("x1") grid => _, inout("x2") first => _, inout("x3") end => _, inout("x4") scratch => _,
            inout("x5") frame.resume.as_ptr() => _, inout("x6") function => _,
            out("x20") _, out("x21") _, out("x22") _, out("x23") _, out("x24") _, out("x25") _, out("x26") _,
            out("x27") _, out("x28") _,
            out("v8") _, out("v9") _, out("v10") _, out("v11") _, out("v12") _, out("v13") _, out("v14") _,
            out("v15") _,
            clobber_abi("C"),
        );
    }
    FRAME.set(before);
    (faulted != 0).then(|| frame.fault.get())
}
