//! What a worker or a thread that a guest has taken over can try against others, from within: each attack in a process of its
//! own that is confined as that is.

use std::ffi::{CString, c_long};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;

/// An argument of a system call.
#[derive(Clone, Copy)]
enum Arg {
    /// A number.
    Is(u64),
    /// The process that is attacked.
    Victim,
    /// A file of the attacked process in `/proc`.
    Proc(&'static str),
    /// A path.
    Path(&'static str),
    /// A page of zeros.
    Page,
    /// What the step before answered.
    File,
}
use Arg::{File, Is, Page, Path, Proc, Victim};

/// System calls of which all must be made.
type Attack = (&'static str, &'static [(c_long, &'static [Arg])]);

/// The worker's socket.
const SOCKET: Arg = Is(3);
const HERE: Arg = Is(libc::AT_FDCWD as u64);
const GIB: Arg = Is(1 << 30);
const WRITE: u64 = libc::PROT_READ as u64 | libc::PROT_WRITE as u64;
const ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;

const ATTACKS: &[Attack] = &[
    // Signals.
    ("kill", &[(libc::SYS_kill, &[Victim, Is(9)])]),
    ("tkill", &[(libc::SYS_tkill, &[Victim, Is(9)])]),
    ("tgkill", &[(libc::SYS_tgkill, &[Victim, Victim, Is(9)])]),
    ("rt_sigqueueinfo", &[(libc::SYS_rt_sigqueueinfo, &[Victim, Is(10), Page])]),
    ("pidfd_open", &[(libc::SYS_pidfd_open, &[Victim, Is(0)])]),
    ("pidfd_send_signal", &[(libc::SYS_pidfd_send_signal, &[SOCKET, Is(9), Is(0), Is(0)])]),
    ("F_SETOWN", &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_SETOWN as u64), Victim])]),
    ("F_SETOWN_EX", &[(libc::SYS_fcntl, &[SOCKET, Is(15), Page])]),
    ("F_SETSIG", &[(libc::SYS_fcntl, &[SOCKET, Is(10), Is(9)])]),
    ("O_ASYNC", &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_SETFL as u64), Is(libc::O_ASYNC as u64)])]),
    ("FIOASYNC", &[(libc::SYS_ioctl, &[SOCKET, Is(libc::FIOASYNC), Page])]),
    ("FIOSETOWN", &[(libc::SYS_ioctl, &[SOCKET, Is(0x8901), Page])]),
    ("SIOCSPGRP", &[(libc::SYS_ioctl, &[SOCKET, Is(0x8902), Page])]),
    ("TIOCSTI", &[(libc::SYS_ioctl, &[Is(2), Is(libc::TIOCSTI), Page])]),
    ("F_NOTIFY", &[(libc::SYS_fcntl, &[Is(0), Is(1026), Is(1)])]),
    ("F_SETLEASE", &[(libc::SYS_fcntl, &[SOCKET, Is(1024), Is(1)])]),
    ("F_SETLK", &[(libc::SYS_fcntl, &[SOCKET, Is(6), Page])]),
    ("F_SETPIPE_SZ", &[(libc::SYS_fcntl, &[Is(1), Is(1031), Is(1 << 20)])]),
    ("timer_create", &[(libc::SYS_timer_create, &[Is(1), Page, Page])]),
    ("setitimer", &[(libc::SYS_setitimer, &[Is(0), Page, Is(0)])]),
    // Memory and files of other processes.
    ("ptrace", &[(libc::SYS_ptrace, &[Is(libc::PTRACE_SEIZE as u64), Victim, Is(0), Is(0)])]),
    ("process_vm_readv", &[(libc::SYS_process_vm_readv, &[Victim, Page, Is(1), Page, Is(1), Is(0)])]),
    ("process_vm_writev", &[(libc::SYS_process_vm_writev, &[Victim, Page, Is(1), Page, Is(1), Is(0)])]),
    ("process_madvise", &[(libc::SYS_process_madvise, &[SOCKET, Page, Is(1), Is(4), Is(0)])]),
    ("pidfd_getfd", &[(libc::SYS_pidfd_getfd, &[SOCKET, Is(0), Is(0)])]),
    ("kcmp", &[(libc::SYS_kcmp, &[Victim, Victim, Is(0), Is(0), Is(0)])]),
    ("/proc/PID/mem", &[(libc::SYS_openat, &[HERE, Proc("mem"), Is(libc::O_RDWR as u64)])]),
    ("/proc/PID/environ", &[(libc::SYS_openat, &[HERE, Proc("environ"), Is(0)])]),
    ("/proc/PID/maps", &[(libc::SYS_openat, &[HERE, Proc("maps"), Is(0)])]),
    ("/proc/PID/root", &[(libc::SYS_openat, &[HERE, Proc("root/"), Is(0)])]),
    ("oom_score_adj", &[(libc::SYS_openat, &[HERE, Proc("oom_score_adj"), Is(libc::O_WRONLY as u64)])]),
    ("core_pattern", &[(libc::SYS_openat, &[HERE, Path("/proc/sys/kernel/core_pattern"), Is(1)])]),
    ("sysrq-trigger", &[(libc::SYS_openat, &[HERE, Path("/proc/sysrq-trigger"), Is(1)])]),
    ("/dev/kvm", &[(libc::SYS_openat, &[HERE, Path("/dev/kvm"), Is(2)])]),
    ("/dev/kmsg", &[(libc::SYS_openat, &[HERE, Path("/dev/kmsg"), Is(1)])]),
    ("/dev/zero", &[(libc::SYS_openat, &[HERE, Path("/dev/zero"), Is(2)])]),
    ("a file of root's", &[(libc::SYS_openat, &[HERE, Path("/etc/passwd"), Is(2)])]),
    ("root's folder", &[(libc::SYS_openat, &[HERE, Path("/root"), Is(0)])]),
    ("/tmp", &[(libc::SYS_openat, &[HERE, Path("/tmp"), Is(libc::O_DIRECTORY as u64)])]),
    ("a new file", &[(libc::SYS_openat, &[HERE, Path("/tmp/.vm-attack"), Is(0o101), Is(0o600)])]),
    ("a nameless file", &[(libc::SYS_openat, &[HERE, Path("/tmp"), Is(0o20200002), Is(0o600)])]),
    ("openat2", &[(libc::SYS_openat2, &[HERE, Path("/etc/hostname"), Page, Is(24)])]),
    ("open_by_handle_at", &[(libc::SYS_open_by_handle_at, &[HERE, Page, Is(0)])]),
    ("unlinkat", &[(libc::SYS_unlinkat, &[HERE, Path("/tmp/.vm-attack"), Is(0)])]),
    ("renameat2", &[(libc::SYS_renameat2, &[HERE, Path("/tmp/.a"), HERE, Path("/tmp/.b"), Is(0)])]),
    ("mkdirat", &[(libc::SYS_mkdirat, &[HERE, Path("/tmp/.vm-attack"), Is(0o700)])]),
    ("mknodat", &[(libc::SYS_mknodat, &[HERE, Path("/tmp/.vm-attack"), Is(0o10600), Is(0)])]),
    ("symlinkat", &[(libc::SYS_symlinkat, &[Path("/"), HERE, Path("/tmp/.vm-attack")])]),
    ("fchmodat", &[(libc::SYS_fchmodat, &[HERE, Path("/tmp"), Is(0o1777)])]),
    ("chdir", &[(libc::SYS_chdir, &[Path("/")])]),
    ("inotify_init1", &[(libc::SYS_inotify_init1, &[Is(0)])]),
    ("fanotify_init", &[(libc::SYS_fanotify_init, &[Is(0), Is(0)])]),
    // Other processes' limits and places.
    ("prlimit of others", &[(libc::SYS_prlimit64, &[Victim, Is(7), Page, Is(0)])]),
    ("a limit of its own", &[(libc::SYS_prlimit64, &[Is(0), Is(7), Page, Is(0)])]),
    ("setrlimit", &[(libc::SYS_setrlimit, &[Is(7), Page])]),
    ("sched_setaffinity of others", &[(libc::SYS_sched_setaffinity, &[Victim, Is(4096), Page])]),
    ("sched_setscheduler", &[(libc::SYS_sched_setscheduler, &[Victim, Is(5), Page])]),
    ("sched_setattr", &[(libc::SYS_sched_setattr, &[Victim, Page, Is(0)])]),
    ("setpriority", &[(libc::SYS_setpriority, &[Is(0), Victim, Is(19)])]),
    ("ioprio_set", &[(libc::SYS_ioprio_set, &[Is(1), Victim, Is(3 << 13)])]),
    ("move_pages", &[(libc::SYS_move_pages, &[Victim, Is(0), Is(0), Is(0), Is(0), Is(0)])]),
    ("migrate_pages", &[(libc::SYS_migrate_pages, &[Victim, Is(0), Page, Page])]),
    // Memory beyond the limit.
    ("a stack", &[(libc::SYS_mmap, &[Is(0), GIB, Is(WRITE), Is(ANONYMOUS | 0x102), Is(!0), Is(0)])]),
    (
        "a file in memory",
        &[(libc::SYS_memfd_create, &[Path("x"), Is(0)]), (libc::SYS_ftruncate, &[File, GIB])],
    ),
    (
        "fallocate",
        &[(libc::SYS_memfd_create, &[Path("x"), Is(0)]), (libc::SYS_fallocate, &[File, Is(0), Is(0), GIB])],
    ),
    ("memfd_secret", &[(libc::SYS_memfd_secret, &[Is(0)])]),
    ("shmget", &[(libc::SYS_shmget, &[Is(0), GIB, Is(0o600)])]),
    ("msgget", &[(libc::SYS_msgget, &[Is(0), Is(0o600)])]),
    ("mq_open", &[(libc::SYS_mq_open, &[Path("x"), Is(0o102), Is(0o600), Is(0)])]),
    ("userfaultfd", &[(libc::SYS_userfaultfd, &[Is(1)])]),
    ("io_uring_setup", &[(libc::SYS_io_uring_setup, &[Is(8), Page])]),
    ("io_setup", &[(libc::SYS_io_setup, &[Is(8), Page])]),
    ("vmsplice", &[(libc::SYS_vmsplice, &[Is(1), Page, Is(1), Is(0)])]),
    ("MADV_HWPOISON", &[(libc::SYS_madvise, &[Page, Is(4096), Is(100)])]),
    ("MADV_SOFT_OFFLINE", &[(libc::SYS_madvise, &[Page, Is(4096), Is(101)])]),
    ("swapon", &[(libc::SYS_swapon, &[Path("/tmp/x"), Is(0)])]),
    // Other programs, namespaces and rights.
    ("execve", &[(libc::SYS_execve, &[Path("/bin/true"), Page, Page])]),
    ("execveat", &[(libc::SYS_execveat, &[HERE, Path("/bin/true"), Page, Page, Is(0)])]),
    ("a process", &[(libc::SYS_clone, &[Is(17), Is(0), Is(0), Is(0), Is(0)])]),
    ("fork", &[(libc::SYS_fork, &[])]),
    ("vfork by clone3", &[(libc::SYS_clone3, &[Page, Is(88)])]),
    ("a user namespace", &[(libc::SYS_clone, &[Is(0x1000_0011), Is(0), Is(0), Is(0), Is(0)])]),
    ("unshare", &[(libc::SYS_unshare, &[Is(libc::CLONE_NEWUSER as u64)])]),
    ("setns", &[(libc::SYS_setns, &[SOCKET, Is(0)])]),
    ("mount", &[(libc::SYS_mount, &[Path("none"), Path("/tmp"), Path("tmpfs"), Is(0), Is(0)])]),
    ("umount2", &[(libc::SYS_umount2, &[Path("/tmp/x"), Is(0)])]),
    ("fsopen", &[(libc::SYS_fsopen, &[Path("tmpfs"), Is(0)])]),
    ("open_tree", &[(libc::SYS_open_tree, &[HERE, Path("/"), Is(1)])]),
    ("chroot", &[(libc::SYS_chroot, &[Path("/")])]),
    ("pivot_root", &[(libc::SYS_pivot_root, &[Path("/"), Path("/")])]),
    ("setuid", &[(libc::SYS_setuid, &[Is(0)])]),
    ("setresuid", &[(libc::SYS_setresuid, &[Is(0), Is(0), Is(0)])]),
    ("setgroups", &[(libc::SYS_setgroups, &[Is(0), Page])]),
    ("capset", &[(libc::SYS_capset, &[Page, Page])]),
    ("PR_SET_DUMPABLE", &[(libc::SYS_prctl, &[Is(libc::PR_SET_DUMPABLE as u64), Is(1)])]),
    ("PR_SET_PDEATHSIG", &[(libc::SYS_prctl, &[Is(libc::PR_SET_PDEATHSIG as u64), Is(0)])]),
    ("PR_SET_PTRACER", &[(libc::SYS_prctl, &[Is(0x5961_6d61), Is(!0)])]),
    ("PR_SET_MM", &[(libc::SYS_prctl, &[Is(libc::PR_SET_MM as u64), Is(1), Is(0), Is(0), Is(0)])]),
    ("PR_SET_CHILD_SUBREAPER", &[(libc::SYS_prctl, &[Is(36), Is(1)])]),
    ("keyctl", &[(libc::SYS_keyctl, &[Is(0), Is(-3i64 as u64), Is(1)])]),
    ("add_key", &[(libc::SYS_add_key, &[Path("user"), Path("x"), Path("x"), Is(1), Is(-3i64 as u64)])]),
    ("bpf", &[(libc::SYS_bpf, &[Is(0), Page, Is(72)])]),
    ("perf_event_open", &[(libc::SYS_perf_event_open, &[Page, Victim, Is(!0), Is(!0), Is(0)])]),
    ("iopl", &[(libc::SYS_iopl, &[Is(3)])]),
    ("modify_ldt", &[(libc::SYS_modify_ldt, &[Is(0), Page, Is(16)])]),
    ("finit_module", &[(libc::SYS_finit_module, &[SOCKET, Page, Is(0)])]),
    ("init_module", &[(libc::SYS_init_module, &[Page, Is(1), Page])]),
    ("kexec_load", &[(libc::SYS_kexec_load, &[Is(0), Is(0), Is(0), Is(0)])]),
    ("reboot", &[(libc::SYS_reboot, &[Is(0xfee1_dead), Is(672_274_793), Is(0), Is(0)])]),
    ("sethostname", &[(libc::SYS_sethostname, &[Path("x"), Is(1)])]),
    ("clock_settime", &[(libc::SYS_clock_settime, &[Is(0), Page])]),
    ("syslog", &[(libc::SYS_syslog, &[Is(3), Page, Is(16)])]),
    ("quotactl", &[(libc::SYS_quotactl, &[Is(0), Path("/"), Is(0), Page])]),
    ("acct", &[(libc::SYS_acct, &[Is(0)])]),
    // Other programs that listen.
    ("socket", &[(libc::SYS_socket, &[Is(1), Is(1), Is(0)])]),
    ("a network socket", &[(libc::SYS_socket, &[Is(2), Is(1), Is(0)])]),
    ("socketpair", &[(libc::SYS_socketpair, &[Is(1), Is(1), Is(0), Page])]),
    ("connect", &[(libc::SYS_connect, &[SOCKET, Page, Is(16)])]),
    ("bind", &[(libc::SYS_bind, &[SOCKET, Page, Is(16)])]),
    ("setsockopt", &[(libc::SYS_setsockopt, &[SOCKET, Is(1), Is(7), Page, Is(4)])]),
    ("setsid", &[(libc::SYS_setsid, &[])]),
    ("setpgid", &[(libc::SYS_setpgid, &[Is(0), Is(0)])]),
];

/// Memory beyond a worker's own limit.
const ATTACKS_WORKER: &[Attack] =
    &[("private memory", &[(libc::SYS_mmap, &[Is(0), GIB, Is(WRITE), Is(ANONYMOUS | 2), Is(!0), Is(0)])])];

/// What a VMM has descriptors for, but no business with. Where its memory is a guest's RAM, it is the guest's to fill.
const ATTACKS_VMM: &[Attack] = &[
    ("a file that waits", &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_SETFL as u64), Is(libc::O_RDWR as u64)])]),
    ("FIONBIO", &[(libc::SYS_ioctl, &[SOCKET, Is(libc::FIONBIO), Page])]),
    ("code", &[(libc::SYS_mmap, &[Is(0), Is(4096), Is(CODE), Is(ANONYMOUS | 2), Is(!0), Is(0)])]),
    ("data as code", &[(libc::SYS_mprotect, &[Page, Is(4096), Is(CODE)])]),
    ("KVM_CREATE_VM", &[(libc::SYS_ioctl, &[SOCKET, Is(0xae01), Is(0)])]),
    ("VFIO_GROUP_GET_DEVICE_FD", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b6a), Page])]),
    ("VFIO_DEVICE_RESET", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b6f), Is(0)])]),
    ("what the machine says of itself", &[(libc::SYS_openat, &[HERE, Path("/proc/cpuinfo"), Is(0)])]),
];
/// What a thread of the VMM has descriptors for, but no business with.
const ATTACKS_MACHINE: &[Attack] = &[
    ("a file that waits", &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_SETFL as u64), Is(libc::O_RDWR as u64)])]),
    ("FIONBIO", &[(libc::SYS_ioctl, &[SOCKET, Is(libc::FIONBIO), Page])]),
    ("code", &[(libc::SYS_mmap, &[Is(0), Is(4096), Is(CODE), Is(ANONYMOUS | 2), Is(!0), Is(0)])]),
    ("data as code", &[(libc::SYS_mprotect, &[Page, Is(4096), Is(CODE)])]),
    ("KVM_CREATE_VM", &[(libc::SYS_ioctl, &[SOCKET, Is(0xae01), Is(0)])]),
    ("VFIO_GROUP_GET_DEVICE_FD", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b6a), Page])]),
    ("VFIO_DEVICE_FEATURE", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b75), Page])]),
    ("IOMMU_IOAS_MAP", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b85), Page])]),
    ("IOMMU_IOAS_MAP_FILE", &[(libc::SYS_ioctl, &[SOCKET, Is(0x3b8f), Page])]),
];
const CODE: u64 = libc::PROT_READ as u64 | libc::PROT_EXEC as u64;

/// What shared memory a driver's library may map, and what addresses it may reserve, only a memory cgroup limits.
const ATTACKS_OWN: &[Attack] = &[
    ("shared memory", &[(libc::SYS_mmap, &[Is(0), GIB, Is(WRITE), Is(ANONYMOUS | 1), Is(!0), Is(0)])]),
    // A page of tables for every 2 MiB of it that are read.
    (
        "page tables",
        &[(
            libc::SYS_mmap,
            &[Is(0), Is(8 << 40), Is(libc::PROT_READ as u64), Is(ANONYMOUS | 0x4002), Is(!0), Is(0)],
        )],
    ),
];

/// What must go on working, in both.
const NEEDED: &[Attack] = &[
    ("memory", &[(libc::SYS_mmap, &[Is(0), Is(1 << 20), Is(WRITE), Is(ANONYMOUS | 2), Is(!0), Is(0)])]),
    (
        "the socket's flags",
        &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_SETFL as u64), Is(libc::O_NONBLOCK as u64)])],
    ),
    ("another descriptor", &[(libc::SYS_fcntl, &[SOCKET, Is(libc::F_DUPFD_CLOEXEC as u64), Is(5)])]),
    ("a thread's name", &[(libc::SYS_prctl, &[Is(libc::PR_SET_NAME as u64), Path("x")])]),
];
const NEEDED_MACHINE: &[Attack] = &[("an eventfd", &[(libc::SYS_eventfd2, &[Is(0), Is(0)])])];
const NEEDED_DRIVER: &[Attack] = &[
    ("about itself", &[(libc::SYS_openat, &[HERE, Path("/proc/self/maps"), Is(0)])]),
    ("about the machine", &[(libc::SYS_openat, &[HERE, Path("/sys/devices/system/cpu/online"), Is(0)])]),
    ("libraries", &[(libc::SYS_openat, &[HERE, Path("/usr/lib"), Is(libc::O_DIRECTORY as u64)])]),
    ("nothing", &[(libc::SYS_openat, &[HERE, Path("/dev/null"), Is(2)])]),
    ("a limit", &[(libc::SYS_prlimit64, &[Is(0), Is(7), Is(0), Page])]),
    (
        "its own place",
        &[(libc::SYS_sched_setaffinity, &[Is(0), Is(8), Path("\u{7f}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}")])],
    ),
];

/// Tells the attacker what it is to do: profile, list, place in it, victim.
const ORDER: &str = "VM_SERVICE_TEST_ATTACK";

fn lists(profile: Profile) -> [Vec<Attack>; 2] {
    match profile {
        Profile::Own => [[ATTACKS, ATTACKS_WORKER, ATTACKS_OWN].concat(), NEEDED.to_vec()],
        Profile::Driver | Profile::Npu => {
            [[ATTACKS, ATTACKS_WORKER].concat(), [NEEDED, NEEDED_DRIVER].concat()]
        }
        Profile::Vmm => [[ATTACKS, ATTACKS_VMM].concat(), [NEEDED, NEEDED_MACHINE].concat()],
        Profile::Machine => [[ATTACKS, ATTACKS_MACHINE].concat(), [NEEDED, NEEDED_MACHINE].concat()],
    }
}

/// The attacker: confines itself, and tries.
#[allow(unsafe_code)]
fn attack(order: &str) {
    let [profile, list, index, victim] =
        order.split('/').map(|word| word.parse::<usize>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!("{order}")
    };
    let profile = [Profile::Own, Profile::Driver, Profile::Npu, Profile::Vmm, Profile::Machine][profile];
    let (_, steps) = lists(profile)[list][index];
    let socket = enter((profile != Profile::Vmm).then_some(WORKER_FILES)).unwrap();
    // It stays open, as a worker's does.
    assert_eq!(std::os::fd::IntoRawFd::into_raw_fd(socket), 3);
    if profile == Profile::Machine {
        threads::confine().unwrap();
        println!("{}", Confinement { calls: true, ..Confinement::default() });
    } else {
        let confinement = settle(profile, Measures::without(&[]), Nodes::None, &[]).unwrap();
        // What this has already is more than a limit would be.
        limit_memory(512 << 20, (profile == Profile::Own).then_some(0)).unwrap();
        println!("{confinement}");
        confine(profile, &confinement).unwrap();
    }
    std::thread::spawn(|| ()).join().unwrap();
    let page = [0u64; 512];
    let mut answer = 0;
    for (number, arguments) in steps {
        let mut strings = Vec::new();
        let mut values = [0; 6];
        for (value, argument) in values.iter_mut().zip(*arguments) {
            let path = match argument {
                Is(number) => {
                    *value = *number;
                    continue;
                }
                Victim => {
                    *value = victim as u64;
                    continue;
                }
                Page => {
                    *value = page.as_ptr() as u64;
                    continue;
                }
                File => {
                    *value = answer;
                    continue;
                }
                Path(path) => (*path).to_owned(),
                Proc(name) => format!("/proc/{victim}/{name}"),
            };
            let path = CString::new(path).unwrap();
            *value = path.as_ptr() as u64;
            strings.push(path);
        }
        // SAFETY: pointers are to strings, or to a page that is as long as any of these calls reads or writes.
        match unsafe { sys::call(*number, values) } {
            // A copy of this process has nothing more to say.
            Ok(0) if [libc::SYS_clone, libc::SYS_fork, libc::SYS_clone3].contains(number) => {
                crate::os::sys::exit_at_once(0)
            }
            Ok(done) => answer = done,
            Err(error) => {
                println!("refused: {error}");
                return;
            }
        }
    }
    println!("done");
}

/// Has it tried, and answers with what became of it.
fn tried(profile: Profile, list: usize, index: usize, victim: &Child) -> (Output, String) {
    let (_keep, theirs): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let name = "os::sandbox::tests::what_is_tried_against_others_is_refused";
    let mut command = Command::new(std::env::current_exe().unwrap());
    // What was not to be inherited, as a worker's own parent may have been given it.
    inherit_standard(&mut command);
    let output = command
        .args(["--exact", name, "--nocapture"])
        .env(ORDER, format!("{}/{list}/{index}/{}", profile as usize, victim.id()))
        .stdin(theirs)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, said)
}

#[test]
fn what_is_tried_against_others_is_refused() {
    use std::os::unix::process::ExitStatusExt as _;

    if let Ok(order) = std::env::var(ORDER) {
        return attack(&order);
    }
    let mut victim = Command::new("sleep").arg("1000").spawn().unwrap();
    let number = victim.id();
    let seen = |what: &str| {
        let of = |file| std::fs::read_to_string(format!("/proc/{number}/{file}")).unwrap();
        [
            of("limits"),
            of("oom_score_adj"),
            of("status").lines().filter(|line| line.starts_with(what)).collect(),
        ]
    };
    let before = seen("Cpus_allowed");
    let mut reached = Vec::new();
    for profile in [Profile::Own, Profile::Driver, Profile::Npu, Profile::Vmm, Profile::Machine] {
        let [attacks, needed] = lists(profile);
        for (index, (name, _)) in attacks.iter().enumerate() {
            let (output, said) = tried(profile, 0, index, &victim);
            let killed = output.status.signal() == Some(libc::SIGSYS);
            assert!(said.contains("system calls"), "{profile:?}: {name}: {output:?}");
            if !(killed && profile == Profile::Own || said.contains("refused: ")) {
                reached.push(format!("{profile:?}: {name}: {}, {said}", output.status));
            }
        }
        for (index, (name, _)) in needed.iter().enumerate() {
            let (output, said) = tried(profile, 1, index, &victim);
            if !said.contains("done") {
                reached.push(format!("{profile:?}: {name} must work: {}, {said}", output.status));
            }
        }
    }
    let unharmed = victim.try_wait().unwrap().is_none() && seen("Cpus_allowed") == before;
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(unharmed && reached.is_empty(), "{}", reached.join("\n"));
}

#[test]
fn a_worker_of_root_is_nobody_else() {
    let (mut victim, root) =
        (Command::new("sleep").arg("1000").spawn().unwrap(), rustix::process::geteuid().is_root());
    let (_, said) = tried(Profile::Own, 1, 0, &victim);
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert_eq!(said.contains(", as user "), root, "{said}");
}

/// Tells a worker whose nodes it has, and the folder that is its root.
const WORKER: &str = "VM_SERVICE_TEST_NODES";

/// A worker: settles, and tells what it can open of each driver's nodes.
fn opens(order: &str) {
    let (nodes, root) = order.split_once(' ').unwrap();
    let (nodes, root) = (ALL_NODES[nodes.parse::<usize>().unwrap()].0, std::path::Path::new(root));
    let confinement = settle_below(root, Profile::Driver, Measures::without(&[]), nodes, &[]).unwrap();
    println!("{confinement}");
    for node in ALL_NODES.iter().flat_map(|(_, nodes)| *nodes) {
        let open = std::fs::File::options().read(true).write(true).open(root.join("dev").join(node));
        match open.map_err(|error| error.kind()) {
            Ok(_) => println!("opened {node}"),
            Err(error) => println!("{node}: {error:?}"),
        }
    }
    println!("done");
}

const ALL_NODES: [(Nodes, &[&str]); 4] = [
    (Nodes::None, &[]),
    (Nodes::Nvidia, &["nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap1"]),
    (Nodes::Amd, &["kfd", "dri/renderD128"]),
    (Nodes::Npu, &["accel/accel0", "davinci0"]),
];

#[test]
fn each_worker_opens_its_own_drivers_nodes_alone() {
    use std::os::unix::fs::PermissionsExt as _;

    if let Ok(order) = std::env::var(WORKER) {
        return opens(&order);
    }
    let root = tempfile::tempdir().unwrap();
    let open_to_all = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open_to_all(root.path(), 0o755);
    let write = |path: String, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        // As drivers of which everybody may use the devices have them.
        open_to_all(&path, 0o666);
    };
    ALL_NODES.iter().flat_map(|(_, nodes)| *nodes).for_each(|node| write(format!("dev/{node}"), ""));
    write("sys/class/drm/renderD128/device/vendor".into(), "0x1002\n");
    for (index, (nodes, own)) in ALL_NODES.iter().enumerate() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "os::sandbox::tests::each_worker_opens_its_own_drivers_nodes_alone",
                "--nocapture",
            ])
            .env(WORKER, format!("{index} {}", root.path().display()))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        if !said.contains("system calls, files") {
            return println!("skipped: no Landlock: {said}");
        }
        assert!(said.contains("done"), "{nodes:?}: {output:?}");
        let opened: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("opened ")).collect();
        assert_eq!(opened, *own, "{nodes:?}: {said}");
        let refused = said.matches(": PermissionDenied").count();
        assert_eq!(
            refused + own.len(),
            ALL_NODES.iter().map(|(_, all)| all.len()).sum::<usize>(),
            "{nodes:?}: {said}"
        );
    }
}

#[test]
fn what_confines_a_process_is_told_in_words() {
    let check = |confinement: &Confinement, one: &str, several: &str| {
        assert_eq!((format!("{confinement}"), format!("{confinement:#}")), (one.into(), several.into()));
    };
    let all = Confinement { calls: true, files: true, signals: true, user: Some(7), missing: Vec::new() };
    check(
        &all,
        "system calls, files, signals, as user 7",
        "system calls, files, signals, each as a user of its own",
    );
    let none = Confinement { missing: vec!["a (b)".into(), "c".into()], ..Confinement::default() };
    let text = "nothing listed; without a (b); without c";
    check(&none, text, text);
}

#[test]
fn what_could_be_waived_is_tried_alone_and_then_together() {
    let further = |may: &[Measure], waived: &[Measure]| -> Vec<String> {
        further_waivers(may, waived).map(|waived| Measure::names(&waived)).collect()
    };
    assert_eq!(further(&Measure::ALL, &[]), ["user", "files", "calls", "user,files,calls"]);
    assert_eq!(further(&Measure::ALL, &[Measure::Files]), ["files,user", "files,calls", "files,user,calls"]);
    assert_eq!(further(&[Measure::User], &[]), ["user"]);
    assert!(further(&[Measure::User], &[Measure::User]).is_empty());
}
