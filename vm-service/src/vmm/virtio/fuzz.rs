//! What a driver does to the registers of the PCI transport, at random: it ends, it gets no feature that was not offered,
//! and a reset undoes it. On this host's `/dev/kvm`; where it does not open, this says so and passes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use vm_memory::{GuestAddress, GuestMemoryMmap, MmapRegion};
use vm_passthrough::guest::{KvmVmm, Vmm as _};
use vm_passthrough::pci::placement::{self, ConfigAccess};
use vm_passthrough::pci::regs;

use super::registers::{DRIVER_OK, FEATURES_OK, TRANSPORT_FEATURES};
use super::worker::Worker;
use super::{Activation, VirtioDevice, VirtioPci};
use crate::vmm::memory;
use crate::vmm::pci::Function;

const RAM: u64 = 1 << 20;
const OWN_FEATURES: u64 = 1 << 5 | 1 << 40;
const COMMON: u64 = 0;
const CONFIG: [u8; 7] = [1, 2, 3, 4, 5, 6, 7];

/// Bytes of the device's shared memory.
const SHARED: u64 = 1 << 16;
const SHARED_BAR: u16 = regs::BASE_ADDRESS_0 + 8;

/// A device with shared memory that counts its starts and checks what it is given.
struct Watch(Arc<AtomicU64>, Arc<MmapRegion>);

impl VirtioDevice for Watch {
    fn name(&self) -> String {
        "watch".into()
    }

    fn id(&self) -> u16 {
        2
    }

    fn class(&self) -> u32 {
        0x01_8000
    }

    fn features(&self) -> u64 {
        OWN_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[8, 256]
    }

    fn config(&self) -> &[u8] {
        &CONFIG
    }

    fn window(&self) -> Option<(u8, Arc<MmapRegion>)> {
        Some((3, self.1.clone()))
    }

    fn stopping(&self) -> (Duration, &'static str) {
        (Duration::from_secs(10), "")
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        assert_eq!(work.features & !(OWN_FEATURES | TRANSPORT_FEATURES), 0);
        assert_ne!(work.features & 1 << 32, 0, "a driver that is not modern");
        for (index, queue, _) in &work.queues {
            assert!(usize::from(*index) < self.queue_sizes().len());
            assert!(virtio_queue::QueueT::is_valid(queue, &work.memory));
        }
        self.0.fetch_add(1, Ordering::Relaxed);
        let (interrupt, kicks) = (work.interrupt, work.queues.into_iter().map(|(.., kick)| kick).collect());
        Worker::start("watch", kicks, move |index, _| {
            interrupt.used(index as u16);
            true
        })
    }
}

/// One thing that a driver does.
#[derive(Clone, Debug)]
enum Step {
    ConfigRead(u16, usize),
    ConfigWrite(u16, Vec<u8>),
    BarRead(u64, usize),
    BarWrite(u64, Vec<u8>),
    /// All that a good driver does until it is ready, with this address of its rings.
    Negotiate(u64),
    /// Reads and writes the BAR at this offset through the window in config space.
    Window(u32, Vec<u8>),
    /// Moves a BAR and turns decoding on or off.
    Move(u16, u64, u16),
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    (prop_oneof![Just(1usize), Just(2), Just(4), Just(8)], any::<[u8; 8]>())
        .prop_map(|(len, bytes)| bytes[..len].to_vec())
}

fn bar_offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0u64..0x40,
        1 => (0u64..8, 0u64..0x40).prop_map(|(page, at)| page << 12 | at),
        1 => any::<u64>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let config = || prop_oneof![0u16..0x100, any::<u16>()];
    let address = || prop_oneof![(0u64..RAM).prop_map(|at| at & !0xf), any::<u64>()];
    prop_oneof![
        2 => (config(), 1usize..9).prop_map(|(at, len)| Step::ConfigRead(at, len)),
        4 => (config(), data()).prop_map(|(at, data)| Step::ConfigWrite(at, data)),
        2 => (bar_offset(), 1usize..9).prop_map(|(at, len)| Step::BarRead(at, len)),
        8 => (bar_offset(), data()).prop_map(|(at, data)| Step::BarWrite(at, data)),
        1 => address().prop_map(Step::Negotiate),
        4 => (bar_offset(), data()).prop_map(|(at, data)| Step::Window(at as u32, data)),
        2 => (prop_oneof![Just(regs::BASE_ADDRESS_0), Just(SHARED_BAR)], address(), any::<u16>())
            .prop_map(|(bar, at, command)| Step::Move(bar, at, command)),
    ]
}

fn perform(function: &VirtioPci, step: &Step) {
    let mut buffer = [0; 8];
    let write = |offset: u64, value: &[u8]| function.bar_write(COMMON + offset, value);
    match step {
        Step::ConfigRead(at, len) => function.config_read(*at, &mut buffer[..*len]),
        Step::ConfigWrite(at, data) => function.config_write(*at, data),
        Step::BarRead(at, len) => function.bar_read(*at, &mut buffer[..*len]),
        Step::BarWrite(at, data) => function.bar_write(*at, data),
        Step::Move(bar, at, command) => {
            function.config_write(*bar, &(*at as u32).to_le_bytes());
            function.config_write(*bar + 4, &((*at >> 32) as u32).to_le_bytes());
            function.config_write(regs::COMMAND, &command.to_le_bytes());
        }
        Step::Window(at, data) => {
            let window = window(function);
            function.config_write(window + 8, &at.to_le_bytes());
            function.config_write(window + 12, &(data.len() as u32).to_le_bytes());
            function.config_read(window + 16, &mut buffer[..data.len()]);
            function.config_write(window + 16, data);
        }
        Step::Negotiate(rings) => {
            for status in [0u8, 1, 3] {
                write(0x14, &[status]);
            }
            for (half, features) in [(0u32, 1u32 << 5), (1, 1 << 8 | 1)] {
                write(0x08, &half.to_le_bytes());
                write(0x0c, &features.to_le_bytes());
            }
            write(0x14, &[3 | FEATURES_OK]);
            for queue in 0..2u16 {
                write(0x16, &queue.to_le_bytes());
                for (register, offset) in [(0x20, 0), (0x28, 0x1000), (0x30, 0x2000u64)] {
                    write(register, &rings.wrapping_add(offset).to_le_bytes());
                }
                write(0x1c, &[1, 0]);
            }
            write(0x14, &[3 | FEATURES_OK | DRIVER_OK]);
        }
    }
}

/// Where in config space the window to the BAR is (section 4.1.4.9).
fn window(function: &VirtioPci) -> u16 {
    let byte = |at| {
        let mut data = [0];
        function.config_read(at, &mut data);
        data[0]
    };
    let mut at = byte(regs::CAPABILITY_LIST);
    for _ in 0..48 {
        if (byte(at.into()), byte(u16::from(at) + 3)) == (9, 5) {
            return at.into();
        }
        at = byte(u16::from(at) + 1);
    }
    panic!("there is no window");
}

/// Everything that a driver can read without changing anything.
fn all(function: &VirtioPci) -> Vec<u8> {
    let mut bytes = vec![0; 256];
    for (word, at) in bytes.chunks_exact_mut(4).zip((0..).step_by(4)) {
        function.config_read(at, word);
    }
    for (at, len) in
        [(0x00, 4), (0x08, 4), (0x0c, 4), (0x10, 2), (0x12, 2), (0x14, 1), (0x16, 2), (0x18, 2), (0x1a, 2)]
            .into_iter()
            .chain([(0x1c, 2), (0x20, 8), (0x28, 8), (0x30, 8), (0x2000, 8), (0x4000, 8), (0x400c, 4)])
    {
        let mut register = vec![0; len];
        function.bar_read(at, &mut register);
        bytes.extend(register);
    }
    bytes
}

/// The function on a guest that has nothing else; `None` where KVM is not to be had.
fn function() -> Option<(VirtioPci, Arc<KvmVmm>, Arc<AtomicU64>)> {
    let Ok(kvm) = kvm_ioctls::Kvm::new() else {
        println!("skipped: /dev/kvm does not open");
        return None;
    };
    let vm = Arc::new(kvm.create_vm().unwrap());
    vm.create_irq_chip().unwrap();
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM as usize)]).unwrap();
    let vmm = KvmVmm::new(vm, memory).unwrap();
    let starts = Arc::new(AtomicU64::new(0));
    let shared = Arc::new(memory::window(SHARED).unwrap());
    let function = VirtioPci::new(vmm.clone(), Box::new(Watch(starts.clone(), shared))).unwrap();
    Some((function, vmm, starts))
}

/// `explain` counts with them before there is a machine.
#[test]
fn its_bars_are_those_that_explain_counts_with() {
    struct Probed<'a>(&'a VirtioPci);
    impl ConfigAccess for Probed<'_> {
        fn read_config(&self, offset: u16, data: &mut [u8]) {
            self.0.config_read(offset, data);
        }

        fn write_config(&self, offset: u16, data: &[u8]) {
            self.0.config_write(offset, data);
        }
    }
    let Some((function, ..)) = function() else { return };
    assert_eq!(placement::probe(&Probed(&function)), VirtioPci::bars(Some(SHARED)));
}

#[test]
fn shared_memory_is_where_its_bar_is() {
    let Some((function, vmm, _)) = function() else { return };
    let other = Arc::new(memory::window(SHARED).unwrap());
    // Where something is already, KVM lets nothing else be.
    let taken = |at| match vmm.map_region(at, other.clone()) {
        Ok(id) => vmm.unmap(id).map(|()| false).unwrap(),
        Err(_) => true,
    };
    let check = |base: u64, command: u16, expect: &[u64]| {
        perform(&function, &Step::Move(SHARED_BAR, base, command));
        for at in [0x100_0000, 0x200_0000, 0x10_0000_0000] {
            assert_eq!(taken(at), expect.contains(&at), "{base:#x} {command}: {at:#x}");
        }
    };
    check(0x100_0000, 0, &[]);
    check(0x100_0000, 2, &[0x100_0000]);
    check(0x200_0000, 2, &[0x200_0000]);
    check(0x10_0000_0000, 2, &[0x10_0000_0000]);
    // It follows to no place that the guest's RAM has, nor to the end of all addresses.
    check(0, 2, &[]);
    check(RAM - SHARED, 2, &[]);
    check(u64::MAX - SHARED + 1, 2, &[]);
    check(0x100_0000, 2, &[0x100_0000]);
    check(0x100_0000, 0, &[]);
    check(0x100_0000, 2, &[0x100_0000]);
    // As firmware sizes it: what is written comes back but for the bits that its length leaves out.
    perform(&function, &Step::Move(SHARED_BAR, u64::MAX, 0));
    let mut size = [0; 8];
    let (low, high) = size.split_at_mut(4);
    function.config_read(SHARED_BAR, low);
    function.config_read(SHARED_BAR + 4, high);
    assert_eq!(u64::from_le_bytes(size), !(SHARED - 1) | 0xc);
    function.stop().unwrap();
    function.reset().unwrap();
    assert!(!taken(0x100_0000));
}

#[test]
fn no_driver_harms() {
    let Some((function, _, starts)) = function() else { return };
    let fresh = all(&function);

    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) });
    let steps = prop::collection::vec(step(), 0..120);
    let checked = runner.run(&steps, |steps| {
        for step in &steps {
            perform(&function, step);
        }
        let mut identity = [0; 4];
        function.config_read(0, &mut identity);
        prop_assert_eq!(identity, [0xf4, 0x1a, 0x42, 0x10]);
        // The driver's own reset ends in time, whatever the device is at.
        function.bar_write(COMMON + 0x14, &[0]);
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut status = [0xff];
        while status != [0] {
            prop_assert!(Instant::now() < deadline, "the reset does not end");
            function.bar_read(COMMON + 0x14, &mut status);
        }
        function.stop().map_err(|error| TestCaseError::fail(error.to_string()))?;
        function.reset().map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(&all(&function), &fresh);
        Ok(())
    });
    checked.unwrap();
    assert!(starts.load(Ordering::Relaxed) > 0, "no driver was ready in any case");
}
