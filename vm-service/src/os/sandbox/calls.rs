//! The system calls that a process or a thread may make, and with which arguments, by seccomp.
//!
//! A call that is on a list with rules may be made with arguments that one of them allows. What acts on a process by its
//! number acts on the caller alone, whoever its user is.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, apply_filter_all_threads,
};

use super::{Confinement, Profile};

/// What all need: memory, threads and their clock, what they have open, and to end.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_membarrier,
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

/// What fails without more ado, where no driver needs it.
const SOFT: &[i64] = &[libc::SYS_clone3, libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_statx];

/// What a driver's library needs beside that, once its context is there: it asks its device nodes, maps from them, and
/// reads about the machine.
const DRIVER: &[i64] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_clock_getres,
    libc::SYS_dup,
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
    libc::SYS_lseek,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_newfstatat,
    libc::SYS_pipe2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// What vCPUs and devices need beside that: files of disks, eventfds, taps, and connections over vsock.
const MACHINE: &[i64] = &[libc::SYS_accept4, libc::SYS_eventfd2, libc::SYS_fdatasync, libc::SYS_writev];

/// What `ioctl` may do for them. KVM: run the guest, map a BAR, route its interrupts, signal its doorbells. VFIO: look at a
/// region, set interrupts. vhost and taps: start and stop a queue.
const IOCTL_MACHINE: &[u64] = &[
    0xae80,      // KVM_RUN: the one that counts
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0x4008_ae6a, // KVM_SET_GSI_ROUTING
    0x4020_ae76, // KVM_IRQFD
    0x4040_ae79, // KVM_IOEVENTFD
    0x8090_ae81, // KVM_GET_REGS
    0x3b6c,      // VFIO_DEVICE_GET_REGION_INFO
    0x3b6d,      // VFIO_DEVICE_GET_IRQ_INFO
    0x3b6e,      // VFIO_DEVICE_SET_IRQS
    0x4008_af00, // VHOST_SET_FEATURES
    0x4008_af03, // VHOST_SET_MEM_TABLE
    0x4008_af10, // VHOST_SET_VRING_NUM
    0x4028_af11, // VHOST_SET_VRING_ADDR
    0x4008_af12, // VHOST_SET_VRING_BASE
    0xc008_af12, // VHOST_GET_VRING_BASE
    0x4008_af20, // VHOST_SET_VRING_KICK
    0x4008_af21, // VHOST_SET_VRING_CALL
    0x4008_af22, // VHOST_SET_VRING_ERR
    0x4008_af30, // VHOST_NET_SET_BACKEND
    0x4004_af61, // VHOST_VSOCK_SET_RUNNING
    0x4004_54d0, // TUNSETOFFLOAD
];

/// What a VMM's other threads need beside what vCPUs and devices do: to read the guest's program once more, to stop vCPUs, and
/// to confine those that it starts further.
const VMM: &[i64] = &[libc::SYS_capset, libc::SYS_lseek, libc::SYS_seccomp];

/// What `ioctl` may do for them. KVM: put vCPUs and interrupt controllers into the state in which a guest starts, and know a
/// device. VFIO: ask a device and its address space, and map memory of this process, or a device's, in it.
const IOCTL_VMM: &[u64] = &[
    0x8208_ae63, // KVM_SET_IRQCHIP
    0x4090_ae82, // KVM_SET_REGS
    0x8138_ae83, // KVM_GET_SREGS
    0x4138_ae84, // KVM_SET_SREGS
    0xc008_ae88, // KVM_GET_MSRS
    0x4008_ae89, // KVM_SET_MSRS
    0x4400_ae8f, // KVM_SET_LAPIC
    0x4004_ae99, // KVM_SET_MP_STATE
    0x4040_aea0, // KVM_SET_VCPU_EVENTS
    0x4080_aea2, // KVM_SET_DEBUGREGS
    0x5000_aea5, // KVM_SET_XSAVE
    0x4188_aea7, // KVM_SET_XCRS
    0xc00c_aee0, // KVM_CREATE_DEVICE
    0x4018_aee1, // KVM_SET_DEVICE_ATTR
    0x3b6b,      // VFIO_DEVICE_GET_INFO
    0x3b75,      // VFIO_DEVICE_FEATURE
    0x3b70,      // VFIO_IOMMU_GET_INFO
    0x3b71,      // VFIO_IOMMU_MAP_DMA
    0x3b72,      // VFIO_IOMMU_UNMAP_DMA
    0x3b84,      // IOMMU_IOAS_IOVA_RANGES
    0x3b85,      // IOMMU_IOAS_MAP
    0x3b86,      // IOMMU_IOAS_UNMAP
    0x3b8f,      // IOMMU_IOAS_MAP_FILE
];

/// New namespaces, for `clone`.
const NAMESPACES: libc::c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// What `fcntl` may do: none that sends signals, takes locks, or makes a pipe larger.
const FCNTL: &[libc::c_int] =
    &[libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL];
/// What it may do for a driver beside that.
const FCNTL_DRIVER: &[libc::c_int] = &[libc::F_ADD_SEALS, libc::F_GET_SEALS];
/// Advice from here on takes pages from the machine (`MADV_HWPOISON`).
const MADVISE_END: libc::c_int = libc::MADV_HWPOISON;
/// What `ioctl` may not do on any descriptor: have signals sent, or write to a terminal's input or console.
const IOCTL_REFUSED: &[u64] = &[
    libc::FIOASYNC,
    0x8901, // FIOSETOWN
    0x8902, // SIOCSPGRP
    libc::TIOCCONS,
    libc::TIOCLINUX,
    libc::TIOCSCTTY,
    libc::TIOCSPGRP,
    libc::TIOCSTI,
];
/// What `prctl` may do for a driver: name threads and memory.
const PRCTL_DRIVER: &[libc::c_int] =
    &[libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA, libc::PR_GET_DUMPABLE];

/// The last part of the confinement: from here on, on all threads, only the calls that a worker needs.
///
/// # Errors
/// When the Linux kernel takes no filter.
pub(crate) fn confine(profile: Profile, confinement: &Confinement) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("confining the process failed: {error}");
    // The strict one last: it allows no further filter.
    for program in [soft(profile), filter(profile, confinement)] {
        apply_filter_all_threads(&program.map_err(|error| failed(&error))?)
            .map_err(|error| failed(&error))?;
    }
    Ok(())
}

/// From here on this thread, and those that it begins, make only the calls that vCPUs and devices need.
///
/// # Errors
/// When the Linux kernel takes no filter.
pub(super) fn confine_thread() -> Result<(), String> {
    static FILTERS: OnceLock<Result<[BpfProgram; 2], String>> = OnceLock::new();
    let filters = FILTERS.get_or_init(|| {
        let filter = filter(Profile::Machine, &Confinement::default());
        filter.and_then(|filter| Ok([soft(Profile::Machine)?, filter])).map_err(|error| error.to_string())
    });
    let filters = filters.as_ref().map_err(Clone::clone)?;
    filters.iter().try_for_each(|filter| apply_filter(filter)).map_err(|error| error.to_string())
}

/// Lets calls fail that can be done without. `clone3` seems to be missing: a filter can't see whether it makes a thread
/// or a namespace, and the C library then falls back to `clone`, of which it can. Without a
/// driver's library files seem to be missing too: what is read for a message, say, is then left out of it.
fn soft(profile: Profile) -> Result<BpfProgram, BackendError> {
    let calls = match profile {
        Profile::Own | Profile::Machine | Profile::Vmm => SOFT,
        Profile::Driver | Profile::Npu => &[libc::SYS_clone3],
    };
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect();
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}

fn filter(profile: Profile, confinement: &Confinement) -> Result<BpfProgram, BackendError> {
    let refuse = match profile {
        Profile::Own => SeccompAction::KillProcess,
        Profile::Driver | Profile::Npu | Profile::Machine | Profile::Vmm => {
            SeccompAction::Errno(libc::EPERM as u32)
        }
    };
    let rules = rules(profile, confinement)?;
    SeccompFilter::new(rules, refuse, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

/// The calls, each with the rules of which one must hold; without any it may always be made.
fn rules(
    profile: Profile,
    confinement: &Confinement,
) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = COMMON.iter().map(|call| (*call, Vec::new())).collect();
    let mut may = |call: i64, alternatives: Vec<SeccompRule>| drop(rules.insert(call, alternatives));
    // Threads, but no processes: these would outlive the worker's end.
    let thread = libc::CLONE_THREAD as u64;
    may(libc::SYS_clone, vec![all(&[masked(0, thread | NAMESPACES as u64, thread)])?]);
    may(libc::SYS_madvise, vec![all(&[(2, SeccompCmpOp::Lt, MADVISE_END as u64)])?]);
    let mut fcntl = one_of(1, FCNTL)?;
    // Who else has the file, an eventfd say, would wait in the place of getting an error.
    let waits = if matches!(profile, Profile::Driver | Profile::Npu) { 0 } else { libc::O_NONBLOCK as u64 };
    fcntl.push(all(&[equal(1, libc::F_SETFL as u64), masked(2, libc::O_ASYNC as u64 | waits, waits)])?);
    // A stack that grows is in no limit on data, and memory that is shared is not either.
    let grows = masked(3, libc::MAP_GROWSDOWN as u64, 0);
    match profile {
        Profile::Own => {
            may(
                libc::SYS_mmap,
                vec![
                    all(&[grows.clone(), masked(3, libc::MAP_ANONYMOUS as u64, 0)])?,
                    all(&[grows, masked(3, libc::MAP_SHARED as u64, 0)])?,
                ],
            );
            may(libc::SYS_prctl, one_of(0, &[libc::PR_SET_NAME])?);
            // The other filter answers these.
            for call in SOFT {
                may(*call, Vec::new());
            }
        }
        Profile::Machine | Profile::Vmm => {
            for call in MACHINE.iter().chain(SOFT) {
                may(*call, Vec::new());
            }
            // No code but what there is.
            let is_data = masked(2, libc::PROT_EXEC as u64, 0);
            may(libc::SYS_mmap, vec![all(&[grows, is_data.clone()])?]);
            may(libc::SYS_mprotect, vec![all(&[is_data])?]);
            let (mut names, mut requests) = (vec![libc::PR_SET_NAME], IOCTL_MACHINE.to_vec());
            if profile == Profile::Vmm {
                VMM.iter().for_each(|call| may(*call, Vec::new()));
                names.push(libc::PR_SET_NO_NEW_PRIVS);
                requests.extend(IOCTL_VMM);
                let own = u64::from(std::process::id());
                may(libc::SYS_tgkill, vec![all(&[equal(0, own)])?]);
                // Where the thread itself runs, and so the vCPUs that it starts.
                may(libc::SYS_sched_setaffinity, vec![all(&[equal(0, 0)])?]);
            }
            may(libc::SYS_prctl, one_of(0, &names)?);
            let requests = requests.iter().map(|request| all(&[equal(1, *request)]));
            may(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
        }
        Profile::Driver | Profile::Npu => {
            for call in DRIVER {
                may(*call, Vec::new());
            }
            may(libc::SYS_mmap, vec![all(&[grows])?]);
            fcntl.extend(one_of(1, FCNTL_DRIVER)?);
            may(libc::SYS_prctl, one_of(0, PRCTL_DRIVER)?);
            let refused: Vec<_> =
                IOCTL_REFUSED.iter().map(|request| (1, SeccompCmpOp::Ne, *request)).collect();
            may(libc::SYS_ioctl, vec![all(&refused)?]);
            // No new files. `O_TMPFILE` is a bit of its own beside `O_DIRECTORY`.
            let new = libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY;
            may(libc::SYS_openat, vec![all(&[masked(2, new as u64, 0)])?]);
            // On sockets that it has: what `sendmsg` and `recvmsg` may do.
            let nowhere = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
            may(libc::SYS_sendto, vec![SeccompRule::new(vec![nowhere.clone()])?]);
            may(libc::SYS_recvfrom, vec![SeccompRule::new(vec![nowhere])?]);
            let receives = [equal(1, libc::SOL_SOCKET as u64), equal(2, libc::SO_RCVTIMEO as u64)];
            may(libc::SYS_setsockopt, vec![all(&receives)?]);
            // It asks for limits of its own, and changes none: root could raise them.
            let asks = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
            let own = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
            may(libc::SYS_prlimit64, vec![SeccompRule::new(vec![own, asks])?]);
            // A thread by its number: another user's is refused by the Linux kernel, which a filter can't tell apart.
            may(
                libc::SYS_sched_setaffinity,
                match confinement.user {
                    Some(_) => Vec::new(),
                    None => vec![all(&[equal(0, 0)])?],
                },
            );
            // The other filter answers this.
            may(libc::SYS_clone3, Vec::new());
        }
    }
    may(libc::SYS_fcntl, fcntl);
    Ok(rules)
}

/// What an argument must be like. The Linux kernel looks at the lower half of all of these: they are `int`s,
/// or flags of 32 bits.
type Condition = (u8, SeccompCmpOp, u64);

fn equal(argument: u8, value: u64) -> Condition {
    (argument, SeccompCmpOp::Eq, value)
}

fn masked(argument: u8, mask: u64, value: u64) -> Condition {
    (argument, SeccompCmpOp::MaskedEq(mask), value)
}

fn all(conditions: &[Condition]) -> Result<SeccompRule, BackendError> {
    let conditions = conditions.iter().cloned();
    SeccompRule::new(
        conditions
            .map(|(argument, is, value)| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value))
            .collect::<Result<_, _>>()?,
    )
}

fn one_of(argument: u8, values: &[libc::c_int]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|value| all(&[equal(argument, *value as u64)])).collect()
}
