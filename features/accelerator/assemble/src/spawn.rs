//! A child process that is confined before it becomes a program.
//!
//! The child borrows this process's memory until then, as `vfork` and `posix_spawn` do: copying the tables of a process
//! with a GPU's context, or with a guest's memory, takes longer than a small kernel takes to assemble. So between
//! `clone` and `execve` it makes system calls only, on a stack of its own, with every signal blocked. `execve` is not libc's:
//! a library that is preloaded to follow a process into its children (a profiler's, a sanitizer's) puts its own in that
//! place, which allocates and throws.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process_group, waitpid};

/// What the child becomes, and what it does to itself before. It leads a process group of its own.
pub(crate) struct Spawn {
    pub(crate) program: CString,
    /// With the name of the program first.
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    /// Its standard input, output and error output.
    pub(crate) standard: [RawFd; 3],
    /// What else stays open in it.
    pub(crate) given: Vec<RawFd>,
    /// The end to be read of a pipe of its own, which stays open in it, too: the Linux kernel kills its process group once nobody has the other
    /// end, as when this process was killed.
    pub(crate) life: RawFd,
    pub(crate) limits: Vec<(libc::__rlimit_resource_t, u64)>,
}

/// A child that has not been waited for. Dropping it kills its process group and waits for it.
#[derive(Debug)]
pub(crate) struct Child(Option<Pid>);

/// The process groups of children that have not been waited for; `None` once none may be started.
static GROUPS: Mutex<Option<Vec<Pid>>> = Mutex::new(Some(Vec::new()));

fn groups() -> MutexGuard<'static, Option<Vec<Pid>>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills all programs that were started here and have not ended, with what they started in their process groups, and has none be
/// started any more: for a process that is about to exit while others of its threads wait for them.
pub fn end_all() {
    for group in groups().take().into_iter().flatten() {
        // It has not been waited for, so the number is still its own.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

impl Child {
    /// Its number; `None` once it has been waited for.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.0
    }

    /// Kills what is left of its process group, and waits for it.
    pub(crate) fn end(&mut self) -> io::Result<WaitStatus> {
        let pid = self.0.take().ok_or(io::ErrorKind::NotFound)?;
        if let Some(groups) = groups().as_mut() {
            groups.retain(|group| *group != pid);
        }
        // It has not been waited for, so the number is still its own.
        let _ = kill_process_group(pid, Signal::KILL);
        loop {
            match waitpid(Some(pid), WaitOptions::empty()) {
                Ok(Some((_, status))) => return Ok(status),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.0.is_some()
            && let Err(error) = self.end()
        {
            tracing::debug!(%error, "an assembler's process was not waited for");
        }
    }
}

/// Sets the signal of a file (`fcntl(2)`), which libc names for few systems.
const F_SETSIG: c_int = 10;
/// Bytes of the child's stack.
const STACK: usize = 64 << 10;

/// What the child reads, and where it says why it failed.
struct Shared<'a> {
    program: &'a CStr,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    standard: [RawFd; 3],
    given: &'a [RawFd],
    life: RawFd,
    limits: &'a [(libc::__rlimit_resource_t, u64)],
    error: c_int,
}

/// Starts a child.
pub(crate) fn spawn(spawn: &Spawn) -> io::Result<Child> {
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(&spawn.arguments), pointers(&spawn.environment));
    let mut shared = Shared {
        program: &spawn.program,
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        standard: spawn.standard,
        given: &spawn.given,
        life: spawn.life,
        limits: &spawn.limits,
        error: 0,
    };
    let mut stack = vec![MaybeUninit::<u128>::uninit(); STACK / size_of::<u128>()];
    let top = stack.as_mut_ptr_range().end;

    // Held until the child is among them, so that whoever ends them all ends it too.
    let mut held = groups();
    let groups = held.as_mut().ok_or_else(|| io::Error::other("this process is about to end"))?;
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the pointers are to locals.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: as above; the first was filled just now.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    if blocked != 0 {
        return Err(io::Error::from_raw_os_error(blocked));
    }
    // SAFETY: `child` gets a stack that nobody else uses and a `Shared` that lives until it has become the program or
    // has ended: with CLONE_VFORK this thread goes on only then. Other threads know of neither.
    let pid = unsafe {
        libc::clone(
            child,
            top.cast(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            (&raw mut shared).cast(),
        )
    };
    let failed = io::Error::last_os_error();
    // SAFETY: `before` was written when the signals were blocked.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    if pid < 0 {
        return Err(failed);
    }
    let child = Child(Pid::from_raw(pid));
    groups.extend(child.pid());
    // SAFETY: it is a local; the child, which wrote it, has ended or uses other memory by now.
    match unsafe { ptr::read_volatile(&raw const shared.error) } {
        0 => Ok(child),
        error => {
            // Its end takes it from among them.
            drop(held);
            Err(io::Error::from_raw_os_error(error))
        }
    }
}

/// The child: confines itself and becomes the program, or says why not and ends.
extern "C" fn child(argument: *mut c_void) -> c_int {
    let shared: *mut Shared<'_> = argument.cast();
    // SAFETY: `spawn` gives a pointer to a live `Shared`, which only this child uses until it is gone.
    let shared = unsafe { &mut *shared };
    shared.error = become_program(shared);
    // SAFETY: it ends the child at once, and runs nothing of the process whose memory it borrows.
    unsafe { libc::_exit(127) }
}

/// System calls only; returns the first error.
fn become_program(shared: &Shared<'_>) -> c_int {
    let failed = |result: libc::c_long| result < 0;
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    let [input, output, error] = shared.standard;

    // SAFETY: as for all that follow: plain system calls; pointers are to locals or to what `spawn` prepared. The child
    // leads a group, which its parent can end as a whole.
    if failed(unsafe { libc::setpgid(0, 0) }.into())
        // SAFETY: as above. It ends with the thread that waits for it.
        || failed(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }.into())
        // SAFETY: as above. What it runs gains no rights.
        || failed(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())
    {
        return errno();
    }
    for (from, to) in [(input, 0), (output, 1), (error, 2)] {
        // SAFETY: as above.
        if failed(unsafe { libc::dup2(from, to) }.into()) {
            return errno();
        }
    }
    // SAFETY: as above. All others are closed when the program begins.
    if failed(unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    }) {
        return errno();
    }
    for file in shared.given.iter().copied().chain([shared.life]) {
        // SAFETY: as above.
        if failed(unsafe { libc::fcntl(file, libc::F_SETFD, 0) }.into()) {
            return errno();
        }
    }
    // What the program starts is killed by this, too; the signal above is the program's alone. The child has the other end as well until
    // it becomes the program: if nobody else has it then, that is when it is closed.
    // SAFETY: as above.
    let group = unsafe { libc::getpid() };
    for (command, argument) in
        [(libc::F_SETOWN, -group), (F_SETSIG, libc::SIGKILL), (libc::F_SETFL, libc::O_ASYNC)]
    {
        // SAFETY: as above.
        if failed(unsafe { libc::fcntl(shared.life, command, argument) }.into()) {
            return errno();
        }
    }
    for &(resource, most) in shared.limits {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: as above.
        if failed(unsafe { libc::getrlimit(resource, &raw mut limit) }.into()) {
            return errno();
        }
        // Nobody but root may raise the upper one. That of processor time is a second later, and ends it with SIGKILL.
        limit.rlim_max = limit.rlim_max.min(most.saturating_add(u64::from(resource == libc::RLIMIT_CPU)));
        limit.rlim_cur = most.min(limit.rlim_max);
        // SAFETY: as above.
        if failed(unsafe { libc::setrlimit(resource, &raw const limit) }.into()) {
            return errno();
        }
    }
    // A handler of the process would run on its memory; there is none any more when signals are let through.
    for signal in 1..=64 {
        // SAFETY: as above. Those that can't be set are refused.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: as above.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: as above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut()) };
    // SAFETY: as above; both lists end with a null pointer.
    unsafe { libc::syscall(libc::SYS_execve, shared.program.as_ptr(), shared.arguments, shared.environment) };
    errno()
}
