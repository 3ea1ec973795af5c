//! The state of fresh vCPUs and interrupt controllers, kept to return to it when the guest reboots.
//!
//! KVM has no reset of a vCPU, and one that was closed can't be made again in the same VM, so a reboot in place
//! restores all that KVM lets user space set.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MP_STATE_RUNNABLE,
    KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::vmm::error::MachineError;
use crate::vmm::sys;

/// The time stamp counter runs on: setting it on one vCPU after the other would take them apart.
const IA32_TSC: u32 = 0x10;
const IA32_MISC_ENABLE: u32 = 0x1a0;
const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_ENABLED: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const LVT_NMI: u32 = 4 << 8;
const LVT_EXTINT: u32 = 7 << 8;

/// All that a fresh vCPU holds.
pub(in crate::vmm) struct ResetState {
    first: bool,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Box<kvm_xsave>,
    xcrs: Option<kvm_xcrs>,
    debugregs: kvm_debugregs,
    events: kvm_vcpu_events,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
}

impl ResetState {
    /// Takes the state of a vCPU that has never run, and corrects in it what firmware would set up: memory is
    /// write-back, LINT0 takes external interrupts and LINT1 NMIs. `first` is the vCPU that starts the guest; the
    /// others wait for it.
    ///
    /// # Errors
    /// When KVM refuses.
    pub(in crate::vmm) fn take(kvm: &Kvm, vcpu: &VcpuFd, first: bool) -> Result<Self, MachineError> {
        let mut msrs = read_msrs(kvm, vcpu)?;
        for (index, data) in [
            (IA32_MTRR_DEF_TYPE, MTRR_ENABLED | MTRR_WRITE_BACK),
            (IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        ] {
            match msrs.iter_mut().find(|msr| msr.index == index) {
                Some(msr) if index == IA32_MISC_ENABLE => msr.data |= data,
                Some(msr) => msr.data = data,
                None => msrs.push(kvm_msr_entry { index, data, ..kvm_msr_entry::default() }),
            }
        }
        let mut lapic = vcpu.get_lapic().map_err(MachineError::kvm("KVM_GET_LAPIC"))?;
        set_lvt(&mut lapic, LVT_LINT0, LVT_EXTINT);
        set_lvt(&mut lapic, LVT_LINT1, LVT_NMI);
        Ok(Self {
            first,
            regs: vcpu.get_regs().map_err(MachineError::kvm("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(MachineError::kvm("KVM_GET_SREGS"))?,
            xsave: Box::new(vcpu.get_xsave().map_err(MachineError::kvm("KVM_GET_XSAVE"))?),
            // Absent where the processor has no XSAVE.
            xcrs: vcpu.get_xcrs().ok(),
            debugregs: vcpu.get_debug_regs().map_err(MachineError::kvm("KVM_GET_DEBUGREGS"))?,
            events: vcpu.get_vcpu_events().map_err(MachineError::kvm("KVM_GET_VCPU_EVENTS"))?,
            lapic,
            msrs,
        })
    }

    /// Puts a vCPU back to this state.
    ///
    /// # Errors
    /// When KVM refuses.
    pub(in crate::vmm) fn restore(&self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        vcpu.set_regs(&self.regs).map_err(MachineError::kvm("KVM_SET_REGS"))?;
        if let Some(xcrs) = &self.xcrs {
            vcpu.set_xcrs(xcrs).map_err(MachineError::kvm("KVM_SET_XCRS"))?;
        }
        sys::set_xsave(vcpu, &self.xsave).map_err(MachineError::kvm("KVM_SET_XSAVE"))?;
        // The APIC base comes with these, and the APIC's state depends on it.
        vcpu.set_sregs(&self.sregs).map_err(MachineError::kvm("KVM_SET_SREGS"))?;
        vcpu.set_debug_regs(&self.debugregs).map_err(MachineError::kvm("KVM_SET_DEBUGREGS"))?;
        write_msrs(vcpu, &self.msrs)?;
        vcpu.set_lapic(&self.lapic).map_err(MachineError::kvm("KVM_SET_LAPIC"))?;
        vcpu.set_vcpu_events(&self.events).map_err(MachineError::kvm("KVM_SET_VCPU_EVENTS"))?;
        let mp_state = if self.first { KVM_MP_STATE_RUNNABLE } else { KVM_MP_STATE_UNINITIALIZED };
        vcpu.set_mp_state(kvm_mp_state { mp_state }).map_err(MachineError::kvm("KVM_SET_MP_STATE"))
    }
}

/// Sets a local vector table entry, unmasked.
fn set_lvt(lapic: &mut kvm_lapic_state, register: usize, value: u32) {
    for (slot, byte) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
        *slot = byte as std::ffi::c_char;
    }
}

/// Reads every MSR that KVM saves and restores, except those that this vCPU turns out not to have.
fn read_msrs(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Vec<kvm_msr_entry>, MachineError> {
    let list = kvm.get_msr_index_list().map_err(MachineError::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    let wanted: Vec<kvm_msr_entry> = list
        .as_slice()
        .iter()
        .filter(|&&index| index != IA32_TSC)
        .map(|&index| kvm_msr_entry { index, ..kvm_msr_entry::default() })
        .collect();
    get_msrs(vcpu, &wanted)
}

/// Reads MSRs, leaving out those that can't be read.
fn get_msrs(vcpu: &VcpuFd, mut rest: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, MachineError> {
    let mut read = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let mut msrs = Msrs::from_entries(rest).map_err(|_| no_room())?;
        // KVM stops at the first one that it can't read.
        let count = vcpu.get_msrs(&mut msrs).map_err(MachineError::kvm("KVM_GET_MSRS"))?.min(rest.len());
        read.extend_from_slice(&msrs.as_slice()[..count]);
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(read)
}

fn no_room() -> MachineError {
    MachineError::KvmLacks { what: "room for the list of MSRs" }
}

/// Writes the MSRs that hold something else, except those that refuse even the value that was read from them.
fn write_msrs(vcpu: &VcpuFd, wanted: &[kvm_msr_entry]) -> Result<(), MachineError> {
    let now = get_msrs(vcpu, wanted)?;
    let changed: Vec<kvm_msr_entry> = wanted
        .iter()
        .filter(|msr| !now.iter().any(|other| (other.index, other.data) == (msr.index, msr.data)))
        .copied()
        .collect();
    let mut rest = changed.as_slice();
    while !rest.is_empty() {
        let msrs = Msrs::from_entries(rest).map_err(|_| no_room())?;
        let count = vcpu.set_msrs(&msrs).map_err(MachineError::kvm("KVM_SET_MSRS"))?.min(rest.len());
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(())
}

/// The state of the interrupt controllers that the vCPUs share.
pub(in crate::vmm) struct IrqChips(Vec<kvm_irqchip>);

impl IrqChips {
    /// Takes the state of fresh interrupt controllers.
    ///
    /// # Errors
    /// When KVM refuses.
    pub(in crate::vmm) fn take(vm: &VmFd) -> Result<Self, MachineError> {
        let mut chips = Vec::new();
        for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC] {
            let mut chip = kvm_irqchip { chip_id, ..kvm_irqchip::default() };
            vm.get_irqchip(&mut chip).map_err(MachineError::kvm("KVM_GET_IRQCHIP"))?;
            chips.push(chip);
        }
        Ok(Self(chips))
    }

    /// Puts them back to this state.
    ///
    /// # Errors
    /// When KVM refuses.
    pub(in crate::vmm) fn restore(&self, vm: &VmFd) -> Result<(), MachineError> {
        self.0.iter().try_for_each(|chip| vm.set_irqchip(chip)).map_err(MachineError::kvm("KVM_SET_IRQCHIP"))
    }
}
