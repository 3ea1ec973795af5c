//! Random submissions, doorbells, interrupts and looks, against an obvious reference.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::super::{Command, RingError};
use super::{DATA, DATA_LEN, Rig};

/// Something that happens.
#[derive(Clone, Debug)]
enum Event {
    /// Commands are submitted.
    Submit(Vec<Command>),
    /// The device does the next submission, if there is one.
    Step,
    /// Somebody looks what is done, and takes it or not.
    Look { takes: bool },
    /// A spurious interrupt.
    Interrupt,
    /// Whether the device says where it is, from now on.
    SayWhere(bool),
    /// Whether the device does things as soon as the doorbell rings.
    Manual(bool),
    /// All that is under way is given up, the device is reset, and the ring restarted.
    Reset,
}

const DWORDS: u64 = DATA_LEN as u64 / 4;

fn command() -> impl Strategy<Value = Command> {
    let fill = (0..DWORDS, 1..16u64, any::<u32>()).prop_map(|(at, len, value)| {
        let len = len.min(DWORDS - at) as u32 * 4;
        Command::Fill { at: DATA + at * 4, len, value }
    });
    // From one half to the other.
    let copy = (0..DWORDS / 2, DWORDS / 2..DWORDS, 1..16u64).prop_map(|(from, to, len)| {
        let len = len.min(DWORDS / 2 - from).min(DWORDS - to) as u32 * 4;
        Command::Copy { from: DATA + from * 4, to: DATA + to * 4, len }
    });
    prop_oneof![fill, copy]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => prop::collection::vec(command(), 0..4).prop_map(Event::Submit),
        5 => Just(Event::Step),
        3 => any::<bool>().prop_map(|takes| Event::Look { takes }),
        1 => Just(Event::Interrupt),
        1 => any::<bool>().prop_map(Event::SayWhere),
        1 => any::<bool>().prop_map(Event::Manual),
        1 => Just(Event::Reset),
    ]
}

/// What a command does, obviously.
fn apply(memory: &mut [u32], command: &Command) {
    let index = |at: u64| ((at - DATA) / 4) as usize;
    match *command {
        Command::Fill { at, len, value } => {
            memory[index(at)..index(at) + len as usize / 4].fill(value);
        }
        Command::Copy { from, to, len } => {
            memory.copy_within(index(from)..index(from) + len as usize / 4, index(to));
        }
        Command::Acquire { .. } => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn submissions_end_once_and_in_order(
        entries in prop_oneof![Just(2u32), Just(4), Just(16)],
        first in prop_oneof![Just(0u32), Just(1), Just(u32::MAX), Just(u32::MAX - 7), any::<u32>()],
        events in prop::collection::vec(event(), 0..120),
    ) {
        let mut rig = Rig::new(entries, first);
        rig.gpu.set_manual(true);
        let mut manual = true;
        let mut memory = vec![0u32; DWORDS as usize];
        // What the device has yet to do; what ended and was not taken, and how.
        let mut under_way: VecDeque<(_, Vec<Command>)> = VecDeque::new();
        let mut ended: VecDeque<(_, bool)> = VecDeque::new();
        let mut silent = false;
        for event in events {
            let mut work = |under_way: &mut VecDeque<(_, Vec<Command>)>, ended: &mut VecDeque<_>, most: usize| {
                for _ in 0..most.min(under_way.len()) {
                    if let Some((ticket, commands)) = under_way.pop_front() {
                        commands.iter().for_each(|command| apply(&mut memory, command));
                        ended.push_back((ticket, true));
                    }
                }
            };
            match event {
                Event::Submit(commands) => match rig.ring.submit(&commands) {
                    Ok(ticket) => {
                        under_way.push_back((ticket, commands));
                        prop_assert!(under_way.len() < entries as usize);
                        if !manual {
                            work(&mut under_way, &mut ended, usize::MAX);
                        }
                    }
                    Err(RingError::Full { pending }) => {
                        prop_assert_eq!(pending, entries as usize - 1);
                        prop_assert_eq!(under_way.len(), pending);
                    }
                    Err(RingError::Untaken { .. }) => prop_assert!(ended.len() >= entries as usize),
                    Err(error) => prop_assert!(false, "{}", error),
                },
                Event::Step => {
                    prop_assert_eq!(rig.gpu.step(), !under_way.is_empty());
                    work(&mut under_way, &mut ended, 1);
                }
                Event::Look { takes } => {
                    rig.ring.poll().unwrap();
                    prop_assert_eq!(rig.ring.pending(), under_way.len());
                    if takes {
                        while let Some(done) = rig.ring.take() {
                            prop_assert_eq!(Some((done.ticket, done.result.is_ok())), ended.pop_front());
                        }
                        prop_assert!(ended.is_empty());
                    }
                }
                Event::Interrupt => prop_assert!(rig.gpu.interrupt()),
                Event::SayWhere(says) => {
                    silent = !says;
                    rig.gpu.heal();
                    if silent {
                        rig.gpu.fail(crate::sim::GpuFault::SilentGet);
                    }
                }
                // Only the doorbell makes it look: what waits goes on waiting.
                Event::Manual(is_manual) if under_way.is_empty() => {
                    manual = is_manual;
                    rig.gpu.set_manual(manual);
                }
                Event::Manual(_) => {}
                Event::Reset => {
                    use crate::vfio::DeviceFile as _;
                    // What the device has done and nobody has looked at is seen as done, or not.
                    rig.ring.poll().unwrap();
                    rig.ring.abandon("a reset");
                    ended.extend(under_way.drain(..).map(|(ticket, _)| (ticket, false)));
                    rig.gpu.reset_and_prove().unwrap();
                    rig.gpu.device().set_config(4, &[6, 0]);
                    rig.ring.restart().unwrap();
                }
            }
            prop_assert_eq!(rig.ring.failure(), None, "silent: {}", silent);
        }
        let left: Vec<_> = (0..DWORDS).map(|dword| rig.dword(dword * 4)).collect();
        prop_assert!(left == memory);
        rig.ring.poll().unwrap();
        ended.extend(under_way.drain(..).map(|(ticket, _)| (ticket, false)));
        let rest: VecDeque<_> =
            rig.ring.close().unwrap().into_iter().map(|done| (done.ticket, done.result.is_ok())).collect();
        prop_assert_eq!(rest, ended);
    }
}
