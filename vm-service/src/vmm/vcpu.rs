//! The thread that runs a vCPU.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler};

use super::error::MachineError;
use super::exits::{Access, ExitCounts, HotSpot};
use super::io::Io;
use super::lifecycle::{Event, Lifecycle};
use super::quiesced::Quiesced;
use super::sys;
use crate::deadlines::VCPU_STOP;
use crate::os::sandbox;

/// How long a kicked vCPU has before it is kicked again. The signal could have come just before `KVM_RUN`, where it
/// has no effect; a kick repeated closes that gap without a lock in the path of every exit.
const KICK_INTERVAL: Duration = Duration::from_millis(5);

/// All vCPUs of a machine, none of them in the guest.
#[derive(Debug)]
pub(super) struct Halted(Vec<VcpuFd>);

impl Halted {
    /// vCPUs that were just made.
    pub(super) fn unstarted(vcpus: Vec<VcpuFd>) -> Self {
        Self(vcpus)
    }

    /// The vCPUs in their order.
    pub(super) fn vcpus(&self) -> &[VcpuFd] {
        &self.0
    }
}

/// A vCPU that left the guest, with what it counted.
type Left = (usize, VcpuFd, ExitCounts);

/// The threads of all vCPUs of a machine.
pub(super) struct VcpuThreads {
    threads: Vec<JoinHandle<()>>,
    /// What each of them serves now.
    accesses: Vec<Arc<Access>>,
    left: Receiver<Left>,
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Starts a thread for each vCPU, on `cpus` of the host, or any where these are none. From here on the guest may have its devices write its RAM.
///
/// # Errors
/// When a thread can't be started; those that were are stopped again.
pub(super) fn start(
    vcpus: Halted,
    cpus: &[&[u32]],
    io: &Arc<Io>,
    _: Quiesced,
) -> Result<VcpuThreads, MachineError> {
    let failed = |source| MachineError::Thread { what: "vCPU", source };
    // The handler does nothing; without one the signal would end the process.
    register_signal_handler(SIGRTMIN(), on_kick)
        .map_err(|error| failed(io::Error::from_raw_os_error(error.errno())))?;
    let (sender, left) = channel();
    let mut started = VcpuThreads { threads: Vec::new(), accesses: Vec::new(), left };
    for (index, vcpu) in vcpus.0.into_iter().enumerate() {
        let (io_of_thread, sender_of_thread) = (io.clone(), sender.clone());
        let access = Arc::new(Access::default());
        started.accesses.push(access.clone());
        let run = move || run(index, vcpu, &io_of_thread, &access, &sender_of_thread);
        let spawn = || sandbox::spawn(&format!("vcpu{index}"), run);
        let thread = on_cpus(cpus.get(index).copied().unwrap_or_default(), spawn);
        match thread {
            Ok(thread) => started.threads.push(thread),
            Err(source) => {
                drop(sender);
                started.stop(&io.lifecycle, VCPU_STOP)?;
                return Err(failed(source));
            }
        }
    }
    Ok(started)
}

/// Starts a thread that runs on these processors of the host alone, as far as this process may run there.
fn on_cpus<T>(cpus: &[u32], spawn: impl FnOnce() -> T) -> T {
    let chosen = || {
        let before = sched_getaffinity(None)?;
        let mut set = CpuSet::new();
        // One that is beyond what the set holds is left out.
        for cpu in cpus.iter().map(|&cpu| cpu as usize).filter(|&cpu| cpu < CpuSet::MAX_CPU) {
            if before.is_set(cpu) {
                set.set(cpu);
            }
        }
        sched_setaffinity(None, &set).map(|()| before)
    };
    if cpus.is_empty() {
        return spawn();
    }
    // A thread runs where the one that starts it does.
    let before = chosen();
    let spawned = spawn();
    if let Err(error) = before.and_then(|before| sched_setaffinity(None, &before)) {
        tracing::debug!(%error, "a vCPU runs on any processor");
    }
    spawned
}

impl VcpuThreads {
    /// Whether the guest has left to this process since it was started.
    pub(super) fn have_exited(&self) -> bool {
        self.accesses.iter().any(|access| access.has_begun())
    }

    /// Makes all vCPUs leave the guest and returns them in order, with what they counted together.
    ///
    /// # Errors
    /// When one did not leave within the deadline. Its thread then goes on as far as it gets.
    pub(super) fn stop(
        self,
        lifecycle: &Lifecycle,
        deadline: Duration,
    ) -> Result<(Halted, ExitCounts), MachineError> {
        lifecycle.stop();
        let until = Instant::now() + deadline;
        let mut left: Vec<Option<VcpuFd>> = self.threads.iter().map(|_| None).collect();
        let mut counts = ExitCounts::default();
        while let Some(missing) = left.iter().position(Option::is_none) {
            for (index, thread) in self.threads.iter().enumerate() {
                // A thread that has ended but was not joined still takes signals.
                if left[index].is_none()
                    && let Err(error) = thread.kill(SIGRTMIN())
                {
                    tracing::debug!(index, %error, "a vCPU's thread could not be kicked");
                }
            }
            match self.left.recv_timeout(KICK_INTERVAL) {
                Ok((index, vcpu, counted)) => {
                    counts.add(&counted);
                    left[index] = Some(vcpu);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    let access = self.accesses.get(missing).and_then(|access| access.now());
                    return Err(MachineError::Stuck { vcpu: missing, access, deadline });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(panicked(missing)),
            }
        }
        for (index, thread) in self.threads.into_iter().enumerate() {
            // It has sent its vCPU, the last thing that it does.
            thread.join().map_err(|_| panicked(index))?;
        }
        Ok((Halted(left.into_iter().flatten().collect()), counts))
    }
}

fn panicked(vcpu: usize) -> MachineError {
    MachineError::Vcpu { vcpu, reason: "its thread panicked; this is a bug of this program".into() }
}

/// Ends the whole guest when a vCPU's thread panics.
struct EndOnPanic<'a> {
    lifecycle: &'a Lifecycle,
    vcpu: usize,
}

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lifecycle.announce(Event::Failed(panicked(self.vcpu)));
        }
    }
}

fn run(index: usize, mut vcpu: VcpuFd, io: &Io, access: &Access, left: &Sender<Left>) {
    let _guard = EndOnPanic { lifecycle: &io.lifecycle, vcpu: index };
    let mut counts = ExitCounts::default();
    while !io.lifecycle.stopping() {
        if let Some(event) = run_once(index, &mut vcpu, io, access, &mut counts) {
            io.lifecycle.announce(event);
        }
    }
    // KVM finishes an access at the next KVM_RUN. That must not happen after a reboot has set new registers, so do
    // it now, without entering the guest.
    vcpu.set_kvm_immediate_exit(1);
    if let Err(error) = vcpu.run().map(|exit| tracing::debug!(?exit, "an access took two exits"))
        && error.errno() != libc::EINTR
    {
        tracing::debug!(%error, "a vCPU's last access was not finished");
    }
    vcpu.set_kvm_immediate_exit(0);
    // The receiver is gone when the machine has given up on this thread.
    let _ = left.send((index, vcpu, counts));
}

/// Runs the guest until it leaves once.
fn run_once(
    index: usize,
    vcpu: &mut VcpuFd,
    io: &Io,
    access: &Access,
    counts: &mut ExitCounts,
) -> Option<Event> {
    const PAGE: u64 = 4096;
    let failed = |reason: String| Some(Event::Failed(MachineError::Vcpu { vcpu: index, reason }));
    let mut serve = |spot, work: &mut dyn FnMut()| {
        counts.count(spot);
        access.begin(spot);
        work();
        access.end();
        None
    };
    let (exit, size) = sys::run(vcpu);
    match exit {
        Ok(VcpuExit::IoIn(port, data)) => serve(HotSpot::PortRead(port), &mut || {
            data.chunks_mut(size).for_each(|data| io.port_read(port, data));
        }),
        Ok(VcpuExit::IoOut(port, data)) => serve(HotSpot::PortWrite(port), &mut || {
            data.chunks(size).for_each(|data| io.port_write(port, data));
        }),
        Ok(VcpuExit::MmioRead(address, data)) => {
            serve(HotSpot::MemoryRead(address & !(PAGE - 1)), &mut || io.memory_read(address, data))
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            serve(HotSpot::MemoryWrite(address & !(PAGE - 1)), &mut || io.memory_write(address, data))
        }
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
            counts.interrupted += 1;
            None
        }
        Ok(VcpuExit::Intr) => {
            counts.interrupted += 1;
            None
        }
        other => {
            counts.other += 1;
            match other {
                Ok(VcpuExit::Shutdown) => Some(Event::TripleFault),
                Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => Some(Event::Shutdown),
                Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Some(Event::Reboot),
                Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _)) => Some(Event::TripleFault),
                Ok(VcpuExit::FailEntry(reason, cpu)) => failed(format!(
                    "the processor refused to enter the guest (reason {reason:#x}, host CPU {cpu})"
                )),
                Ok(VcpuExit::InternalError) => {
                    let at = vcpu.get_regs().map_or(0, |regs| regs.rip);
                    failed(format!(
                        "KVM met an instruction or a state that it can't handle at RIP {at:#x}; most often its program is not one for this KVM (kvm_pvm, where there is /sys/module/kvm_pvm, runs only Linux kernels built with CONFIG_PVM_GUEST), or ran into memory that is not its own"
                    ))
                }
                Ok(exit) => {
                    failed(format!("KVM left the guest with {exit:?}, which this machine does not use"))
                }
                Err(error) => failed(format!("KVM_RUN failed: {error}")),
            }
        }
    }
}
