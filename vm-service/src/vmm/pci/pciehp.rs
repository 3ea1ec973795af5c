//! A port as Linux's pciehp uses it, whatever comes and goes meanwhile: in the end the guest has what is in the slot.

use std::sync::Arc;
use std::time::Instant;

use proptest::prelude::*;
use vm_passthrough::PciAddress;
use vm_passthrough::pci::regs;
use vm_passthrough::sim::{SimLog, SimVmm};

use super::RootPort;
use super::root_port::{Inserted, READY};
use crate::vmm::testing::FakeDevice;

const EXPRESS: u16 = 0x40;
const MSI: u16 = 0x7c;
const EVENTS: u16 = regs::EXP_SLTSTA_ABP | regs::EXP_SLTSTA_PDC | regs::EXP_SLTSTA_DLLSC;
const CHANGED: u16 = regs::EXP_SLTSTA_PDC | regs::EXP_SLTSTA_DLLSC;

/// Where the interrupt handler is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handler {
    Idle,
    /// About to read the events, after having taken some.
    Read(u16),
    /// About to clear those that it has just read.
    Clear {
        all: u16,
        read: u16,
    },
}

/// Where the handler's thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    Idle,
    /// About to have the driver let go of what was there.
    Disable,
    /// About to look whether something is there.
    Look,
    /// About to read its id, and to forget of events until then.
    Enable,
    /// About to have a driver take it.
    Configure,
    /// About to write the indicator.
    Show(u16),
}

/// What Linux 6.12 does with a port that has an attention button.
struct Guest {
    port: RootPort,
    vmm: Arc<SimVmm>,
    /// The interrupt was raised, and its handler has not begun.
    raised: bool,
    handler: Handler,
    thread: Thread,
    pending: u16,
    /// What it has a driver for: which of those that were plugged.
    has: Option<usize>,
    plugged: usize,
}

impl Guest {
    fn new() -> Self {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        let port = RootPort::new(3, 3, vmm.clone()).unwrap();
        port.reset();
        port.config_write(regs::COMMAND, &regs::COMMAND_MASTER.to_le_bytes());
        port.config_write(MSI + regs::MSI_ADDRESS_LO, &0xfee0_1000u32.to_le_bytes());
        port.config_write(MSI + regs::MSI_DATA_64, &[0x41, 0]);
        port.config_write(MSI + regs::MSI_FLAGS, &[1, 0]);
        let (handler, thread) = (Handler::Idle, Thread::Idle);
        Self { port, vmm, raised: false, handler, thread, pending: 0, has: None, plugged: 0 }
    }

    fn read(&self, register: u16) -> u16 {
        let mut data = [0; 2];
        self.port.config_read(EXPRESS + register, &mut data);
        u16::from_le_bytes(data)
    }

    fn write(&self, register: u16, value: u16) {
        self.port.config_write(EXPRESS + register, &value.to_le_bytes());
    }

    /// Writes bits of Slot Control.
    fn command(&self, mask: u16, value: u16) {
        self.write(regs::EXP_SLTCTL, self.read(regs::EXP_SLTCTL) & !mask | value);
    }

    /// What is in the slot.
    fn there(&self) -> Option<usize> {
        self.port.function(0).map(|_| self.plugged)
    }

    fn insert(&self, since: Instant) {
        let name = PciAddress::new(0, 1, 0, 0).unwrap();
        self.port.change(|slot| slot.inserted = Some(Inserted { name, since }));
    }

    /// Whether there is a device that does not answer yet, and has the time.
    fn comes(&self) -> bool {
        self.port.slot().inserted.as_ref().is_some_and(|inserted| inserted.since.elapsed() < READY)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Insert if !self.port.slot().is_occupied() => self.insert(Instant::now()),
            Step::Late if self.comes() => self.insert(Instant::now() - READY),
            Step::Plug if self.there().is_none() => {
                self.plugged += 1;
                self.port.fill(vec![Arc::new(FakeDevice::at(1, 0))]);
            }
            Step::Insert | Step::Late | Step::Plug => {}
            Step::Unplug => self.port.change(|slot| {
                slot.functions.clear();
                slot.inserted = None;
            }),
            Step::Enable(enable) => {
                let events = regs::EXP_SLTCTL_DLLSCE | regs::EXP_SLTCTL_ABPE | regs::EXP_SLTCTL_HPIE;
                self.command(events, if enable { events } else { 0 });
            }
            Step::Mask(mask) => drop(self.port.config_write(MSI + regs::MSI_MASK_64, &[mask.into()])),
            Step::Ask => self.port.ask(Box::new(|_| ())),
            Step::Unask => self.port.unask(),
            Step::Handler => self.handle(),
            Step::Thread => self.run(),
        }
        self.raised |= !self.vmm.delivered().is_empty();
    }

    /// One access of `pciehp_isr`.
    fn handle(&mut self) {
        self.handler = match self.handler {
            Handler::Idle if std::mem::take(&mut self.raised) => Handler::Read(0),
            Handler::Idle => Handler::Idle,
            Handler::Read(all) => match self.read(regs::EXP_SLTSTA) & EVENTS {
                0 => {
                    self.pending |= all;
                    Handler::Idle
                }
                read => Handler::Clear { all: all | read, read },
            },
            Handler::Clear { all, read } => {
                self.write(regs::EXP_SLTSTA, read);
                Handler::Read(all)
            }
        };
    }

    /// One access of `pciehp_ist`; buttons are pressed for nothing.
    fn run(&mut self) {
        self.thread = match self.thread {
            Thread::Idle if std::mem::take(&mut self.pending) & CHANGED == 0 => Thread::Idle,
            Thread::Idle if self.has.is_some() => Thread::Disable,
            Thread::Idle => Thread::Look,
            Thread::Disable => {
                self.has = None;
                self.command(regs::EXP_SLTCTL_PIC, regs::EXP_SLTCTL_PWR_IND_OFF);
                Thread::Look
            }
            Thread::Look => {
                let present = self.read(regs::EXP_SLTSTA) & regs::EXP_SLTSTA_PDS != 0;
                if present || self.read(regs::EXP_LNKSTA) & regs::EXP_LNKSTA_DLLLA != 0 {
                    self.command(regs::EXP_SLTCTL_PIC, regs::EXP_SLTCTL_PWR_IND_BLINK);
                    Thread::Enable
                } else {
                    Thread::Idle
                }
            }
            // It reads it again and again.
            Thread::Enable if self.comes() => Thread::Enable,
            Thread::Enable => {
                let mut id = [0; 4];
                self.port.function_read(0, 0, &mut id);
                if id == [0xff; 4] {
                    Thread::Show(regs::EXP_SLTCTL_PWR_IND_OFF)
                } else {
                    self.pending &= !CHANGED;
                    Thread::Configure
                }
            }
            Thread::Configure => {
                self.has = self.there();
                let on = self.has.map_or(regs::EXP_SLTCTL_PWR_IND_OFF, |_| regs::EXP_SLTCTL_PWR_IND_ON);
                Thread::Show(on)
            }
            Thread::Show(indicator) => {
                self.command(regs::EXP_SLTCTL_PIC, indicator);
                Thread::Idle
            }
        };
    }

    fn is_quiet(&self) -> bool {
        !self.raised
            && self.handler == Handler::Idle
            && self.thread == Thread::Idle
            && self.pending & CHANGED == 0
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert,
    /// What was inserted is late.
    Late,
    Plug,
    Unplug,
    Enable(bool),
    Mask(bool),
    Ask,
    Unask,
    Handler,
    Thread,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Insert),
        1 => Just(Step::Late),
        3 => Just(Step::Plug),
        3 => Just(Step::Unplug),
        1 => any::<bool>().prop_map(Step::Enable),
        1 => any::<bool>().prop_map(Step::Mask),
        1 => Just(Step::Ask),
        1 => Just(Step::Unask),
        8 => Just(Step::Handler),
        8 => Just(Step::Thread),
    ]
}

/// What is unplugged after a press of the button was taken back, which the guest was interrupted for.
#[test]
fn a_press_that_is_taken_back_hides_no_going() {
    let mut guest = Guest::new();
    guest.step(Step::Enable(true));
    guest.step(Step::Plug);
    for _ in 0..20 {
        guest.step(Step::Handler);
        guest.step(Step::Thread);
    }
    assert_eq!(guest.has, guest.there());
    for step in [Step::Ask, Step::Unask, Step::Handler, Step::Handler, Step::Unplug] {
        guest.step(step);
    }
    for _ in 0..20 {
        guest.step(Step::Handler);
        guest.step(Step::Thread);
    }
    assert!(guest.is_quiet() && guest.has.is_none());
}

proptest! {
    #[test]
    fn no_coming_or_going_is_lost(steps in proptest::collection::vec(step(), 0..200), plugs in any::<bool>()) {
        let mut guest = Guest::new();
        for step in steps {
            guest.step(step);
        }
        // What comes is there in the end, or never.
        if guest.port.slot().inserted.is_some() {
            guest.step(if plugs { Step::Plug } else { Step::Unplug });
        }
        // Unmasking and enabling tell what came before.
        guest.step(Step::Mask(false));
        guest.step(Step::Enable(true));
        for _ in 0..100 {
            guest.step(Step::Handler);
            guest.step(Step::Thread);
        }
        prop_assert!(guest.is_quiet());
        prop_assert_eq!(guest.has, guest.there());
    }
}
