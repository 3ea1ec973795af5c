//! A ring: submissions, waits, deadlines and resets.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use super::super::{
    Command, HostClock, Interrupt, RegionRegisters, Registers as _, Ring, RingError, bring_up,
};
use super::{DATA, DATA_LEN, RING, Rig, TIMEOUT, fill, gpu};
use crate::pci::regs;
use crate::sim::{Fault, GpuFault, SimGpu};
use crate::vfio::{CONFIG_REGION, DeviceFile as _, MSI_IRQ};

#[test]
fn commands_are_done_and_the_interrupt_tells() {
    let mut rig = Rig::new(8, 1);
    rig.set_dword(0x800, 0x5555_5555);
    let commands = [
        Command::Fill { at: DATA, len: 0x40, value: 0x1234_5678 },
        Command::Copy { from: DATA, to: DATA + 0x100, len: 0x20 },
        Command::Acquire { at: DATA + 0x11c, value: 0x1234_5670 },
        Command::Copy { from: DATA + 0x800, to: DATA + 0x3c, len: 4 },
    ];
    let ticket = rig.ring.submit(&commands).unwrap();
    assert_eq!((ticket.fence(), rig.ring.pending()), (1, 1));
    rig.wait(ticket).unwrap();
    assert_eq!(rig.clock_now(), 0, "the interrupt came, and nothing was waited for");
    assert_eq!(rig.ring.pending(), 0);
    assert_eq!((rig.dword(0x0), rig.dword(0x38), rig.dword(0x3c)), (0x1234_5678, 0x1234_5678, 0x5555_5555));
    assert_eq!((rig.dword(0x100), rig.dword(0x11c), rig.dword(0x120)), (0x1234_5678, 0x1234_5678, 0));
    // Its completion was taken by the wait.
    assert!(matches!(rig.wait(ticket), Err(RingError::NotPending(_))));
    assert_eq!(rig.ended(), []);
}

#[test]
fn an_interrupt_that_is_lost_is_no_deadlock() {
    let mut rig = Rig::new(8, 1);
    rig.gpu.fail(GpuFault::NoInterrupt);
    let ticket = rig.ring.submit(&[fill(0, 1)]).unwrap();
    rig.wait(ticket).unwrap();
    // Nor are two that are merged.
    rig.gpu.heal();
    let tickets = [2, 3].map(|value| rig.ring.submit(&[fill(0, value)]).unwrap());
    rig.wait(tickets[1]).unwrap();
    assert_eq!(rig.ended(), [(tickets[0], Ok(()))]);
}

#[test]
fn a_ring_wraps_and_so_do_its_fences() {
    // The fence passes 0 after 5 submissions, and the ring its end again and again.
    let mut rig = Rig::new(4, u32::MAX - 4);
    for number in 0..20 {
        let ticket = rig.ring.submit(&[fill(0, number)]).unwrap();
        assert_eq!(ticket.fence(), (u32::MAX - 4).wrapping_add(number));
        rig.wait(ticket).unwrap();
        assert_eq!(rig.dword(0), number);
    }
}

#[test]
fn a_full_ring_takes_no_more_until_the_device_has_done_some() {
    for entries in [2, 4, 64] {
        let mut rig = Rig::new(entries, 1);
        rig.gpu.set_manual(true);
        let room = entries as usize - 1;
        let mut tickets: Vec<_> = (0..room).map(|_| rig.ring.submit(&[]).unwrap()).collect();
        assert!(matches!(rig.ring.submit(&[]), Err(RingError::Full { pending }) if pending == room));
        assert!(rig.gpu.step());
        tickets.push(rig.ring.submit(&[]).unwrap());
        assert!(matches!(rig.ring.submit(&[]), Err(RingError::Full { .. })));
        while rig.gpu.step() {}
        let expect: Vec<_> = tickets.into_iter().map(|ticket| (ticket, Ok(()))).collect();
        assert_eq!(rig.ended(), expect);
    }
}

#[test]
fn completions_must_be_taken() {
    let mut rig = Rig::new(4, 1);
    let submitted = (0..).take_while(|_| match rig.ring.submit(&[]) {
        Ok(_) => true,
        Err(RingError::Untaken { ended }) => {
            assert!(ended >= 4);
            false
        }
        Err(error) => panic!("{error}"),
    });
    assert!(submitted.count() < 10);
    assert!(!rig.ended().is_empty());
    rig.ring.submit(&[]).unwrap();
}

#[test]
fn what_is_not_done_in_time_is_still_under_way() {
    let mut rig = Rig::new(8, 1);
    let blocked = rig.ring.submit(&[Command::Acquire { at: DATA, value: 7 }, fill(8, 1)]).unwrap();
    let behind = rig.ring.submit(&[fill(8, 2)]).unwrap();
    let error = rig.wait(blocked).unwrap_err().to_string();
    assert!(
        error.contains("the submission of fence 0x1 was not done within 3s: the fence reads 0x0"),
        "{error}"
    );
    assert!(error.contains("at entry 0 of 2, and its boot register reads 0x180000a1"), "{error}");
    // A storm of spurious interrupts makes no wait longer, and ends nothing.
    assert!(rig.gpu.interrupt());
    rig.wait(behind).unwrap_err();
    assert_eq!((rig.ended(), rig.ring.pending()), (vec![], 2));
    assert_eq!(rig.dword(8), 0);
    rig.set_dword(0, 7);
    // The doorbell makes it look again.
    let last = rig.ring.submit(&[]).unwrap();
    rig.wait(last).unwrap();
    assert_eq!(rig.ended(), [(blocked, Ok(())), (behind, Ok(()))]);
    assert_eq!(rig.dword(8), 2);
}

#[test]
fn a_device_that_hangs_is_told_of_by_what_it_reads() {
    let check = |fault: GpuFault, expect: &str| {
        let mut rig = Rig::new(8, 1);
        rig.gpu.fail(GpuFault::Hang);
        let ticket = rig.ring.submit(&[]).unwrap();
        rig.gpu.fail(fault);
        let error = rig.wait(ticket).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(GpuFault::Hang, "boot register reads 0x180000a1");
    check(GpuFault::Registers(u32::MAX), "boot register reads 0xffffffff");
    let mut rig = Rig::new(8, 1);
    rig.gpu.fail(GpuFault::Hang);
    let ticket = rig.ring.submit(&[]).unwrap();
    rig.gpu.device().vanish();
    let error = rig.wait(ticket).unwrap_err().to_string();
    assert!(error.contains("boot register reads 0xffffffff"), "{error}");
    let mut rig = Rig::new(8, 1);
    rig.gpu.fail(GpuFault::Hang);
    let ticket = rig.ring.submit(&[]).unwrap();
    stop_decoding(&rig.gpu);
    let error = rig.wait(ticket).unwrap_err().to_string();
    assert!(error.contains("boot register reads nothing"), "{error}");
}

#[test]
fn a_reset_in_mid_flight_ends_all_with_an_error_and_once() {
    let mut rig = Rig::new(8, 1);
    rig.gpu.set_manual(true);
    let tickets = [1, 2, 3, 4].map(|value| rig.ring.submit(&[fill(0, value)]).unwrap());
    assert!(rig.gpu.step());
    rig.ring.poll().unwrap();
    rig.ring.abandon("the guest was reset");
    // The device does not know yet, and goes on.
    assert!(rig.gpu.step());
    let lost = Err("it was given up: the guest was reset".to_owned());
    let expect: Vec<_> = tickets
        .iter()
        .map(|&ticket| (ticket, if ticket == tickets[0] { Ok(()) } else { lost.clone() }))
        .collect();
    assert_eq!(rig.ended(), expect);
    assert!(matches!(rig.ring.submit(&[]), Err(RingError::Failed(_))));
    let registers = RegionRegisters::new(rig.gpu.clone(), 0).unwrap();
    bring_up(&*rig.gpu, &registers, &*rig.clock).unwrap();
    assert!(!rig.gpu.step(), "it has forgotten the channel");
    rig.ring.restart().unwrap();
    rig.gpu.set_manual(false);
    assert_eq!(rig.ended(), []);
    // The reset disabled the interrupt in hardware; VFIO has it enabled still.
    let ticket = rig.ring.submit(&[fill(0, 9)]).unwrap();
    assert!(ticket > tickets[3] && ticket.fence() == 5);
    rig.wait(ticket).unwrap();
    assert_eq!((rig.dword(0), rig.ended()), (9, vec![]));
}

#[test]
fn a_restart_that_the_device_refuses_leaves_the_ring_failed() {
    let mut rig = Rig::new(8, 1);
    rig.ring.abandon("it is pulled");
    rig.gpu.device().vanish();
    rig.ring.restart().unwrap_err();
    assert!(matches!(rig.ring.submit(&[]), Err(RingError::Failed(_))));
    rig.ring.close().unwrap();
}

/// Has vfio-pci answer accesses of BARs with an error.
fn stop_decoding(gpu: &SimGpu) {
    gpu.write(CONFIG_REGION, regs::COMMAND.into(), &[0, 0]).unwrap();
}

#[test]
fn a_doorbell_that_can_t_be_rung_ends_what_is_under_way() {
    let mut rig = Rig::new(8, 1);
    rig.gpu.set_manual(true);
    let first = rig.ring.submit(&[]).unwrap();
    stop_decoding(&rig.gpu);
    let second = rig.ring.submit(&[]).unwrap();
    let ended = rig.ended();
    assert_eq!([ended[0].0, ended[1].0], [first, second]);
    for (_, result) in ended {
        assert!(result.unwrap_err().contains("the doorbell can't be rung: "));
    }
}

#[test]
fn what_a_ring_can_t_do_is_refused_and_nothing_is_submitted() {
    let mut rig = Rig::new(8, 1);
    let mut check = |commands: &[Command], expect: &str| {
        let error = rig.ring.submit(commands).unwrap_err().to_string();
        assert!(error.contains(expect), "{commands:x?}: {error}");
        assert_eq!(rig.ring.pending(), 0);
    };
    let fill = |at, len| Command::Fill { at, len, value: 0 };
    check(&[fill(DATA, 0)], "can't be used");
    check(&[fill(DATA + 2, 4)], "can't be used");
    check(&[fill(DATA, 6)], "can't be used");
    check(&[fill(u64::MAX - 3, 4)], "can't be used");
    check(&[fill((1 << 40) - 4, 8)], "can't be used");
    check(&[Command::Acquire { at: 1 << 40, value: 0 }], "can't be used");
    check(&[Command::Copy { from: DATA, to: DATA + 4, len: 8 }], "no copy onto itself");
    check(&[Command::Copy { from: 2, to: DATA, len: 8 }], "can't be used");
    check(&[fill(DATA, 4); 20], "dwords, and a submission has 128");
    rig.ring.submit(&[fill(DATA, DATA_LEN as u32)]).unwrap();

    let (gpu, _) = gpu();
    let registers = Arc::new(RegionRegisters::new(gpu.clone(), 0).unwrap());
    let new = |iova, entries| Ring::new(registers.clone(), gpu.clone(), gpu.dma().clone(), iova, entries, 0);
    for entries in [0, 1, 3, 1 << 13, u32::MAX] {
        assert!(matches!(new(RING, entries), Err(RingError::Entries { .. })), "{entries}");
    }
    assert!(matches!(new((1 << 40) - 0x1000, 8), Err(RingError::Range { .. })));
    assert!(matches!(new(u64::MAX, 8), Err(RingError::Range { .. })));
    assert!(matches!(new(RING + 4, 8), Err(RingError::Vfio(_))));
    gpu.dma().fail(Fault::MapDma, 0);
    assert!(matches!(new(RING, 8), Err(RingError::Vfio(_))));
    gpu.dma().heal();
    assert_eq!(gpu.dma().maps(), []);
    gpu.device().vanish();
    assert!(matches!(new(RING, 8), Err(RingError::Register(_))));
    assert_eq!(gpu.dma().maps(), [], "what was mapped is unmapped");
}

#[test]
fn closing_returns_what_is_left_and_takes_the_memory_away() {
    let mut rig = Rig::new(8, 1);
    let done = rig.ring.submit(&[]).unwrap();
    rig.ring.poll().unwrap();
    rig.gpu.set_manual(true);
    let lost = rig.ring.submit(&[]).unwrap();
    let left = rig.ring.close().unwrap();
    assert_eq!(left.iter().map(|ended| ended.ticket).collect::<Vec<_>>(), [done, lost]);
    assert!(left[0].result.is_ok() && left[1].result.is_err());
    let rest = [(DATA, DATA_LEN as u64)];
    assert_eq!(rig.gpu.dma().maps(), rest);
    assert!(!rig.gpu.step());
    rig.interrupt.close().unwrap();
    assert_eq!(rig.gpu.device().enabled(MSI_IRQ), 0);
    // Dropping does the same.
    let mut rig = Rig::new(8, 1);
    rig.ring.submit(&[]).unwrap();
    let (gpu, interrupt) = (rig.gpu.clone(), rig.interrupt);
    drop(rig.ring);
    assert_eq!(gpu.dma().maps(), rest);
    drop(interrupt);
    assert_eq!(gpu.device().enabled(MSI_IRQ), 0);
}

#[test]
fn an_interrupt_that_can_t_be_enabled_is_an_error() {
    let (gpu, _) = gpu();
    gpu.device().fail(Fault::SetTriggers);
    Interrupt::enable(gpu.clone()).unwrap_err();
    gpu.device().heal();
    drop(Interrupt::enable(gpu).unwrap());
}

/// A device works on its own while the driver submits: what it is given is whole, and in order.
#[test]
fn a_device_works_beside_the_driver() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut rig = Rig::new(4, 1);
    rig.gpu.set_manual(true);
    let gpu = rig.gpu.clone();
    /// Ends the device's thread, also when an assertion fails.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let ends = AtomicBool::new(false);
    let clock = HostClock::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                gpu.step();
            }
        });
        let _end = End(&ends);
        let mut last = None;
        for value in 0..2000u32 {
            let commands = [fill(0, value), Command::Copy { from: DATA, to: DATA + 0x100, len: 4 }];
            let ticket = loop {
                match rig.ring.submit(&commands) {
                    Ok(ticket) => break ticket,
                    Err(RingError::Full { .. } | RingError::Untaken { .. }) => {
                        rig.ring.poll().unwrap();
                        while let Some(ended) = rig.ring.take() {
                            assert_eq!(ended.result, Ok(()));
                            assert!(last.replace(ended.ticket) < Some(ended.ticket));
                        }
                    }
                    Err(error) => panic!("{error}"),
                }
            };
            if value % 100 == 99 {
                rig.ring.wait(ticket, rig.interrupt.as_fd(), &clock, Duration::from_secs(60)).unwrap();
                assert_eq!((rig.dword(0), rig.dword(0x100)), (value, value));
            }
        }
    });
    assert_eq!(rig.ring.pending(), 0);
}

/// A device without bus mastering, or asleep, does no work and faults nothing.
#[test]
fn a_device_that_may_not_do_dma_does_none() {
    let mut rig = Rig::new(8, 1);
    rig.gpu.device().set_config(4, &[2, 0]);
    let ticket = rig.ring.submit(&[fill(0, 1)]).unwrap();
    assert!(matches!(rig.wait(ticket), Err(RingError::Deadline { timeout: TIMEOUT, .. })));
    rig.gpu.device().set_config(4, &[6, 0]);
    RegionRegisters::new(rig.gpu.clone(), 0).unwrap().write32(super::super::DOORBELL, 1).unwrap();
    rig.wait(ticket).unwrap();
    assert_eq!(rig.gpu.address().to_string(), "0000:65:00.0");
}

impl Rig {
    /// Seconds that were waited for.
    fn clock_now(&self) -> u64 {
        use super::super::Clock as _;
        self.clock.now().as_secs()
    }
}
