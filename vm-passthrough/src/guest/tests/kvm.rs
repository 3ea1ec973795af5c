//! [`KvmVmm`] on this machine's KVM. Where /dev/kvm does not open, the tests say so and end.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{KVM_CAP_X2APIC_API, KVM_X2APIC_API_USE_32BIT_IDS, kvm_enable_cap};
use kvm_ioctls::Kvm;
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, MmapRegion};

use crate::guest::{BarHit, DecodedBar, KvmVmm, MsiMessage, RamRegion, SharedMemory, Vmm as _};

fn write(trigger: &OwnedFd) {
    rustix::io::write(trigger, &1u64.to_ne_bytes()).unwrap();
}

fn read(trigger: &OwnedFd) -> Option<u64> {
    let mut count = [0; 8];
    rustix::io::read(trigger, &mut count).ok().map(|_| u64::from_ne_bytes(count))
}

fn guest() -> Option<Arc<KvmVmm>> {
    with_slots(1 << 40)
}

/// A guest whose slots have at most N bytes.
fn with_slots(most: u64) -> Option<Arc<KvmVmm>> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            eprintln!("skipped: /dev/kvm does not open: {error}");
            return None;
        }
    };
    let vm = Arc::new(kvm.create_vm().unwrap());
    vm.create_irq_chip().unwrap();
    let ram = [(GuestAddress(0), 0x10_0000), (GuestAddress(0x1_0000_0000), 0x20_0000)];
    Some(KvmVmm::with_slots(vm, GuestMemoryMmap::from_ranges(&ram).unwrap(), most).unwrap())
}

fn memory(len: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new(Arc::new(MmapRegion::<()>::new(len).unwrap())))
}

#[test]
fn memory_is_mapped_and_unmapped() {
    let Some(vmm) = guest() else { return };
    let ram: Vec<_> = vmm.ram().iter().map(|region| (region.guest, region.memory.len())).collect();
    assert_eq!(ram, [(0, 0x10_0000), (0x1_0000_0000, 0x20_0000)]);
    assert_eq!(vmm.memory().num_regions(), 2);
    let first = vmm.map(0xc000_0000, memory(0x4000)).unwrap();
    let error = vmm.map(0xc000_3000, memory(0x1000)).unwrap_err().to_string();
    assert!(error.contains("0x1000 bytes at 0xc0003000"), "{error}");
    assert!(vmm.map(0x8_0000, memory(0x1000)).is_err(), "over RAM");
    let error = vmm.map(u64::MAX - 0xfff, memory(0x2000)).unwrap_err().to_string();
    assert!(error.contains("0x2000 bytes at 0xfffffffffffff000 are no range of addresses"), "{error}");
    vmm.unmap(first).unwrap();
    assert!(vmm.unmap(first).is_err());
    // The slot is used again.
    let second = vmm.map(0xc000_3000, memory(0x1000)).unwrap();
    assert_eq!(first, second);
}

#[test]
fn memory_that_is_longer_than_a_slot_takes_several_and_gives_all_of_them_back() {
    let Some(vmm) = with_slots(0x10_0000) else { return };
    let first = vmm.map(0xc000_0000, memory(0x38_0000)).unwrap();
    for (guest, len) in [(0xc000_0000u64, 0x1000), (0xc020_0000, 0x1000), (0xc037_f000, 0x1000)] {
        assert!(vmm.map(guest, memory(len)).is_err(), "{guest:#x} is taken");
    }
    let beyond = vmm.map(0xc038_0000, memory(0x1000)).unwrap();
    vmm.unmap(beyond).unwrap();
    // Its third part lies over something else: nothing of it is left.
    let other = vmm.map(0xd028_0000, memory(0x1000)).unwrap();
    let error = vmm.map(0xd000_0000, memory(0x38_0000)).unwrap_err().to_string();
    assert!(error.contains("at 0xd0200000"), "{error}");
    vmm.unmap(other).unwrap();
    // Many more times than there are slots.
    vmm.unmap(first).unwrap();
    assert!(vmm.unmap(first).is_err());
    for _ in 0..9_000 {
        let again = vmm.map(0xc000_0000, memory(0x38_0000)).unwrap();
        vmm.unmap(again).unwrap();
    }
}

/// All that `memory` in a guest's file may be. Without a map of pages for each process, as the Linux kernel has with EPT or
/// NPT and its TDP MMU, such slots take no memory of the host.
#[test]
fn sixteen_terabytes_are_mapped() {
    let tdp = std::fs::read_to_string("/sys/module/kvm/parameters/tdp_mmu").unwrap_or_default();
    if tdp.trim() != "Y" {
        eprintln!(
            "skipped: this host's KVM has no TDP MMU, and takes memory for each page that a slot could have"
        );
        return;
    }
    let Some(vmm) = with_slots(super::super::kvm::SLOT_BYTES) else { return };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let region = MmapRegion::<()>::build(None, 16 << 40, libc::PROT_READ | libc::PROT_WRITE, flags).unwrap();
    let id = vmm.map_region(1 << 40, Arc::new(region)).unwrap();
    vmm.unmap(id).unwrap();
}

#[test]
fn a_masked_route_keeps_its_interrupt_and_a_bad_message_hurts_no_other() {
    let Some(vmm) = guest() else { return };
    // Without a vCPU there is no local APIC: KVM takes the eventfd's count, and the message goes nowhere.
    let trigger = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let route = vmm.add_route(trigger.as_fd()).unwrap();
    let message = MsiMessage { address: 0xfee0_0000, data: 0x41 };
    let taken = || {
        for _ in 0..200 {
            if read(&trigger).is_none() {
                return true;
            }
            write(&trigger);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        false
    };
    write(&trigger);
    assert_eq!(read(&trigger), Some(1), "nobody listens while it is masked");
    vmm.set_route(route, Some(message)).unwrap();
    write(&trigger);
    assert!(taken(), "KVM takes it while it is not");
    vmm.set_route(route, None).unwrap();
    write(&trigger);
    assert_eq!(read(&trigger), Some(1));

    // Masking twice, unmasking twice, another message.
    vmm.set_route(route, None).unwrap();
    vmm.set_route(route, Some(message)).unwrap();
    vmm.set_route(route, Some(message)).unwrap();
    vmm.set_route(route, Some(MsiMessage { address: 0xfee0_1000, data: 0x42 })).unwrap();
    vmm.remove_route(route).unwrap();
    assert!(vmm.set_route(route, Some(message)).is_err());
    assert!(vmm.remove_route(route).is_err());
}

#[test]
fn a_message_that_kvm_refuses_is_not_kept() {
    let Some(vmm) = guest() else { return };
    // KVM requires bits 39:32 of a message's address to be zero then.
    let mut enable = kvm_enable_cap { cap: KVM_CAP_X2APIC_API, ..Default::default() };
    enable.args[0] = KVM_X2APIC_API_USE_32BIT_IDS.into();
    vmm.vm().enable_cap(&enable).unwrap();
    let triggers = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let routes = triggers.each_ref().map(|trigger| vmm.add_route(trigger.as_fd()).unwrap());
    let set = |route: usize, address| {
        let message = Some(MsiMessage { address, data: 0x41 });
        vmm.set_route(routes[route], message).map_err(|error| error.to_string())
    };
    let refused = |route| set(route, 0x1_fee0_0000).unwrap_err().contains("set the interrupt routing table");
    assert!(refused(0));
    set(1, 0x100_fee0_0000).unwrap();
    set(0, 0xfee0_0000).unwrap();
    // Replacing a valid message fails too.
    assert!(refused(0));
    set(1, 0xfee0_1000).unwrap();
}

#[test]
fn a_line_is_asserted_by_its_eventfd_until_the_last_is_disconnected() {
    let Some(vmm) = guest() else { return };
    let event = || eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let is_asserted = |gsi: u32| {
        let mut chip = kvm_bindings::kvm_irqchip { chip_id: 2, ..Default::default() };
        vmm.vm().get_irqchip(&mut chip).unwrap();
        ioapic_irr(&chip) & 1 << gsi != 0
    };
    let pairs = [(); 2].map(|()| (event(), event()));
    let routes = [&pairs[0], &pairs[1]]
        .map(|(trigger, resample)| vmm.add_line(17, trigger.as_fd(), resample.as_fd()).unwrap());
    assert_ne!(routes[0], routes[1]);
    assert!(vmm.add_line(24, pairs[0].0.as_fd(), pairs[0].1.as_fd()).is_err());
    assert!(vmm.set_route(routes[0], None).is_err(), "it takes no message");
    // A message's route beside them is none of them, and changes nothing about them.
    let message = vmm.add_route(pairs[0].1.as_fd()).unwrap();
    vmm.set_route(message, Some(MsiMessage { address: 0xfee0_0000, data: 0x41 })).unwrap();
    vmm.remove_route(message).unwrap();

    write(&pairs[0].0);
    let asserted = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        is_asserted(17)
    });
    assert!(asserted);
    vmm.remove_route(routes[0]).unwrap();
    assert!(is_asserted(17), "the other may have asserted it");
    vmm.remove_route(routes[1]).unwrap();
    assert!(!is_asserted(17));
    assert!(vmm.remove_route(routes[1]).is_err());
}

#[test]
fn routes_run_out_with_an_error() {
    let Some(vmm) = guest() else { return };
    if !super::raise_descriptor_limit() {
        return;
    }
    let trigger = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let mut routes = Vec::new();
    let error = loop {
        match vmm.add_route(trigger.as_fd()) {
            Ok(route) => routes.push(route),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("all are used"), "{error}");
    assert!(routes.len() > 500, "{}: {error}", routes.len());
    let last = routes.pop().unwrap();
    vmm.remove_route(last).unwrap();
    assert_eq!(vmm.add_route(trigger.as_fd()).unwrap(), last);
}

#[test]
fn the_interrupt_controllers_keep_their_routes() {
    let Some(vmm) = guest() else { return };
    let trigger = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let route = vmm.add_route(trigger.as_fd()).unwrap();
    vmm.set_route(route, Some(MsiMessage { address: 0xfee0_0000, data: 0x41 })).unwrap();
    // Raising a line that has no route any more would fail silently; what shows is the I/O APIC's input register.
    for gsi in [1, 4, 10, 23] {
        vmm.vm().set_irq_line(gsi, true).unwrap();
        let mut chip = kvm_bindings::kvm_irqchip { chip_id: 2, ..Default::default() };
        vmm.vm().get_irqchip(&mut chip).unwrap();
        assert_ne!(ioapic_irr(&chip) & 1 << gsi, 0, "GSI {gsi}");
        vmm.vm().set_irq_line(gsi, false).unwrap();
    }
}

/// The interrupt request register of the I/O APIC: the fourth 32-bit field of `kvm_ioapic_state`.
fn ioapic_irr(chip: &kvm_bindings::kvm_irqchip) -> u32 {
    crate::guest::sys::ioapic_irr(chip)
}

#[test]
fn ram_comes_and_goes() {
    let Some(vmm) = guest() else { return };
    let region = |guest| {
        let memory = SharedMemory::new(Arc::new(MmapRegion::<()>::new(0x10_0000).unwrap()));
        RamRegion { guest, memory: Arc::new(memory) }
    };
    let ram = || vmm.ram().iter().map(|region| region.guest).collect::<Vec<_>>();
    vmm.add_ram(region(0x2_0000_0000)).unwrap();
    vmm.add_ram(region(0x8000_0000)).unwrap();
    assert_eq!(ram(), [0, 0x8000_0000, 0x1_0000_0000, 0x2_0000_0000]);
    let error = vmm.add_ram(region(0x8000_1000)).unwrap_err();
    assert!(std::error::Error::source(&error).is_some(), "{error}");
    vmm.remove_ram(0x8000_0000).unwrap();
    assert!(
        vmm.remove_ram(0x8000_0000).unwrap_err().to_string().contains("no region of it starts at 0x80000000")
    );
    assert_eq!(ram(), [0, 0x1_0000_0000, 0x2_0000_0000]);
    vmm.add_ram(region(0x8000_0000)).unwrap();
}

#[test]
fn bars_are_found_where_the_device_reported_them() {
    let Some(vmm) = guest() else { return };
    let device = "0000:65:00.0".parse().unwrap();
    vmm.bars_changed(device, &[DecodedBar { bar: 2, address: 0xc000_0000, size: 0x1000, io: false }]);
    assert_eq!(vmm.bars().find(0xc000_0010), Some(BarHit { device, bar: 2, offset: 0x10 }));
    vmm.bars_changed(device, &[]);
    assert_eq!(vmm.bars().find(0xc000_0010), None);
}
