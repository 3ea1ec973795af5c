//! Sees to it that the guest's time stamp counter runs.
//!
//! KVM gives a new vCPU the counter frequency that it learned when it was loaded. Linux may refine its own idea of
//! the frequency later, and if the two then differ by more than 250 parts per million on a processor without TSC
//! scaling, KVM refuses its own default, logs "user requested TSC rate below hardware speed", and the vCPU goes on
//! with a counter that KVM takes to stand still: its deadline timer never fires in time. Asking for the frequency
//! that the counter really has puts it right.

use std::time::{Duration, Instant};

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::vmm::error::MachineError;
use crate::vmm::sys;

const IA32_TSC: u32 = 0x10;
/// Time over which the host's counter is measured. Its two ends are known to within microseconds.
const MEASURE: Duration = Duration::from_millis(40);
/// How often a measurement that was disturbed is repeated.
const ATTEMPTS: usize = 5;

/// Makes sure that KVM sees the counters of `vcpus` advance; `false` when it does not, and the guest must not use
/// the deadline timer.
///
/// # Errors
/// When KVM refuses to read the counter.
pub(in crate::vmm) fn ensure_running(vcpus: &[VcpuFd]) -> Result<bool, MachineError> {
    let mut all = true;
    for vcpu in vcpus {
        all = all && (runs(vcpu)? || repair(vcpu)?);
    }
    Ok(all)
}

fn runs(vcpu: &VcpuFd) -> Result<bool, MachineError> {
    let before = read(vcpu)?;
    Ok(read(vcpu)? != before)
}

fn repair(vcpu: &VcpuFd) -> Result<bool, MachineError> {
    for _ in 0..ATTEMPTS {
        let khz = measure();
        if vcpu.set_tsc_khz(khz).is_ok() && runs(vcpu)? {
            tracing::debug!(khz, "KVM's default frequency of the time stamp counter was wrong");
            return Ok(true);
        }
    }
    tracing::warn!(
        "the guest's time stamp counter does not run in KVM; the guest does without its deadline timer"
    );
    Ok(false)
}

fn read(vcpu: &VcpuFd) -> Result<u64, MachineError> {
    let entry = kvm_msr_entry { index: IA32_TSC, ..kvm_msr_entry::default() };
    let mut msrs =
        Msrs::from_entries(&[entry]).map_err(|_| MachineError::KvmLacks { what: "room for one MSR" })?;
    vcpu.get_msrs(&mut msrs).map_err(MachineError::kvm("KVM_GET_MSRS"))?;
    Ok(msrs.as_slice().first().map_or(0, |msr| msr.data))
}

/// Frequency of the host's counter in kHz.
fn measure() -> u32 {
    let (start, first) = sample();
    std::thread::sleep(MEASURE);
    let (end, last) = sample();
    let nanoseconds = end.duration_since(start).as_nanos().max(1);
    u32::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / nanoseconds).unwrap_or(u32::MAX)
}

/// The time and the counter at one moment: of several tries, the one that took the least.
fn sample() -> (Instant, u64) {
    let one = || {
        let before = sys::timestamp();
        let now = Instant::now();
        let after = sys::timestamp();
        (after.wrapping_sub(before), now, before.wrapping_add(after.wrapping_sub(before) / 2))
    };
    let mut best = one();
    for _ in 0..16 {
        let next = one();
        if next.0 < best.0 {
            best = next;
        }
    }
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let (a, b) = (measure(), measure());
        assert!(a > 100_000, "{a} kHz");
        assert!(a.abs_diff(b) < a / 100, "{a} and {b} kHz");
    }
}
