//! What a worker gives up before it looks at anything that a guest wrote.
//!
//! First, before it opens the accelerator: all descriptors but the socket and standard error, its session and so its
//! terminal, new privileges, core dumps, and memory beyond a limit. Then, once the accelerator is open and all threads
//! run: every system call that it has no need of.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};

use super::sys;

/// Descriptors that a worker may have: those of a GPU's driver are dozens.
const FILES: u64 = 1024;

/// Which calls a worker needs depends on what its accelerator is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "which accelerators there are is the build's choice")]
pub(super) enum Confinement {
    /// Code that this program maps itself: any other call ends the process.
    Own,
    /// A driver's library, which opens files and talks to device nodes: other calls fail.
    Driver,
}

/// The first part. Answers with the socket: of all descriptors only the three standard ones are kept.
///
/// # Errors
/// The Linux kernel's, with what it refused.
pub(super) fn enter() -> Result<OwnedFd, String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what} failed: {error}");
    let socket = sys::keep_standard().map_err(failed("closing inherited descriptors"))?;
    // It fails when the process leads a session already, as when it is started by hand.
    let _ = rustix::process::setsid();
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| failed("giving up new privileges")(error.into()))?;
    limit(Resource::Core, 0)?;
    limit(Resource::Nofile, FILES)?;
    Ok(socket)
}

/// Limits the memory that only this process has (`RLIMIT_DATA`) to `bytes`: the guest's RAM does not count.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn limit_memory(bytes: u64) -> Result<(), String> {
    limit(Resource::Data, bytes)
}

fn limit(resource: Resource, most: u64) -> Result<(), String> {
    let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(resource, limit).map_err(|error| format!("limiting resources failed: {error}"))
}

/// What every worker needs: memory, threads and their clock, its eventfds and socket, and to end.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// New namespaces, for `clone`.
const NAMESPACES: libc::c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// What fails without more ado, where no driver needs it.
const SOFT: &[i64] = &[libc::SYS_clone3, libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_statx];

/// What a driver's library needs beside that, once its context is there: it asks its device nodes, maps from them, and
/// reads about the machine.
const DRIVER: &[i64] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_clock_getres,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_get_mempolicy,
    libc::SYS_getcpu,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getuid,
    libc::SYS_gettimeofday,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// The second part: from here on, on all threads, only the calls that a worker needs.
///
/// # Errors
/// When the Linux kernel takes no filter.
pub(super) fn confine(confinement: Confinement) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("confining the worker failed: {error}");
    // The strict one last: it allows no further filter.
    for program in [soft(confinement), filter(confinement)] {
        apply_filter_all_threads(&program.map_err(|error| failed(&error))?)
            .map_err(|error| failed(&error))?;
    }
    Ok(())
}

/// Lets calls fail that a worker can do without. `clone3` seems to be missing: a filter can't see whether it makes a thread
/// or a namespace, and the C library then falls back to `clone`, of which it can. For a worker of our own files seem to be
/// missing too: what is read for a message, say, is then left out of it.
fn soft(confinement: Confinement) -> Result<BpfProgram, seccompiler::BackendError> {
    let calls = match confinement {
        Confinement::Own => SOFT,
        Confinement::Driver => &[libc::SYS_clone3],
    };
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect();
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}

fn filter(confinement: Confinement) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = COMMON.iter().map(|call| (*call, Vec::new())).collect();
    let refuse = match confinement {
        Confinement::Own => {
            // Threads, but no processes.
            let thread = SeccompCondition::new(
                0,
                SeccompCmpArgLen::Dword,
                SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64),
                libc::CLONE_THREAD as u64,
            )?;
            rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![thread])?]);
            let name = SeccompCondition::new(
                0,
                SeccompCmpArgLen::Dword,
                SeccompCmpOp::Eq,
                libc::PR_SET_NAME as u64,
            )?;
            rules.insert(libc::SYS_prctl, vec![SeccompRule::new(vec![name])?]);
            // The other filter answers these.
            rules.extend(SOFT.iter().map(|call| (*call, Vec::new())));
            SeccompAction::KillProcess
        }
        Confinement::Driver => {
            rules.extend(DRIVER.iter().map(|call| (*call, Vec::new())));
            // Threads and processes, but no namespaces.
            let plain = SeccompCondition::new(
                0,
                SeccompCmpArgLen::Dword,
                SeccompCmpOp::MaskedEq(NAMESPACES as u64),
                0,
            )?;
            rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![plain])?]);
            // The other filter answers this.
            rules.insert(libc::SYS_clone3, Vec::new());
            SeccompAction::Errno(libc::EPERM as u32)
        }
    };
    SeccompFilter::new(rules, refuse, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, as a filter is for ever.
    #[test]
    fn a_driver_has_threads_and_no_namespaces() {
        const CONFINED: &str = "VM_SERVICE_TEST_CONFINED";
        if std::env::var_os(CONFINED).is_some() {
            rustix::thread::set_no_new_privs(true).unwrap();
            confine(Confinement::Driver).unwrap();
            std::thread::spawn(|| ()).join().unwrap();
            sys::process(0).expect("a process");
            for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWUSER | libc::CLONE_NEWPID] {
                let refused = sys::process(flag).expect_err("a namespace");
                assert_eq!(refused.raw_os_error(), Some(libc::EPERM), "{flag:#x}");
            }
            println!("as it should be");
            return;
        }
        let name = "accelerator::sandbox::tests::a_driver_has_threads_and_no_namespaces";
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CONFINED, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("as it should be"), "{output:?}");
    }

    #[test]
    fn filters_compile_and_know_no_call_that_opens_a_way_out() {
        for confinement in [Confinement::Own, Confinement::Driver] {
            assert!(!filter(confinement).unwrap().is_empty() && !soft(confinement).unwrap().is_empty());
        }
        for call in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_ptrace,
            libc::SYS_process_vm_writev,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_unlinkat,
            libc::SYS_mount,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
        ] {
            assert!(!COMMON.contains(&call) && !DRIVER.contains(&call), "{call}");
        }
    }
}
