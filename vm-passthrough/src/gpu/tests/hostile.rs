//! A device that lies, or whose memory somebody else writes to.

use super::super::{Layout, RingError, RingFailure};
use super::{DATA, Rig, fill};
use crate::sim::SimGpu;

const GET: u64 = 0x88;

/// Three submissions of a ring of 8 entries are under way and one is done, when the device does something: all that are under way end with
/// this error, once, and whatever comes then changes nothing.
fn check(lie: &dyn Fn(&SimGpu, Layout), expect: &RingFailure) {
    let mut rig = Rig::new(8, 100);
    rig.gpu.set_manual(true);
    let tickets = [1, 2, 3, 4].map(|value| rig.ring.submit(&[fill(0, value)]).unwrap());
    assert!(rig.gpu.step());
    assert_eq!(rig.ended(), [(tickets[0], Ok(()))]);
    let layout = rig.ring.layout();
    lie(&rig.gpu, layout);
    let ended = rig.ended();
    let lost: Vec<_> = tickets[1..].iter().map(|&ticket| (ticket, Err(expect.to_string()))).collect();
    assert_eq!(ended, lost, "{expect}");
    assert_eq!(rig.ring.failure(), Some(expect));
    // Doing it all right now is too late, as are spurious interrupts.
    while rig.gpu.step() {}
    rig.gpu.interrupt();
    assert_eq!(rig.ended(), []);
    assert!(matches!(rig.ring.submit(&[]), Err(RingError::Failed(_))));
    assert!(matches!(rig.wait(tickets[3]), Err(RingError::NotPending(_))));
    // A reset and a restart end that.
    use crate::vfio::DeviceFile as _;
    rig.gpu.reset_and_prove().unwrap();
    rig.gpu.device().set_config(4, &[6, 0]);
    rig.gpu.set_manual(false);
    rig.ring.restart().unwrap();
    let ticket = rig.ring.submit(&[fill(0, 5)]).unwrap();
    rig.wait(ticket).unwrap();
    assert_eq!(rig.dword(0), 5);
}

#[test]
fn lies_end_every_submission_with_an_error() {
    let get = |value: u32| move |gpu: &SimGpu, layout: Layout| gpu.poke(layout.userd() + GET, value).unwrap();
    for value in [8, 9, 1 << 31, u32::MAX] {
        check(&get(value), &RingFailure::Outside { get: value, entries: 8 });
    }
    // It was at 1, and the next entry goes to 4.
    for value in [0, 5, 7] {
        check(&get(value), &RingFailure::Astray { get: value, last: 1, put: 4 });
    }
    let fence = |value: u32| move |gpu: &SimGpu, layout: Layout| gpu.poke(layout.fence(), value).unwrap();
    for value in [104, 99, 0, 1 << 31, u32::MAX] {
        check(&fence(value), &RingFailure::Fence { read: value, completed: 100, submitted: 103 });
    }
    let error = |gpu: &SimGpu, layout: Layout| {
        gpu.poke(layout.notifier() + 8, 79).unwrap();
        gpu.poke(layout.notifier() + 12, 0x1_0000).unwrap();
    };
    check(&error, &RingFailure::Fault { code: 79 });
    // Memory that reads all ones: the fence is looked at first.
    let ones = |gpu: &SimGpu, layout: Layout| {
        for offset in (0..0x220).step_by(4) {
            gpu.poke(layout.userd() + offset, u32::MAX).unwrap();
        }
    };
    check(&ones, &RingFailure::Fence { read: u32::MAX, completed: 100, submitted: 103 });
}

/// What is done is done, also where the device lies of something else.
#[test]
fn what_was_done_before_a_lie_is_done() {
    let mut rig = Rig::new(8, 100);
    rig.gpu.set_manual(true);
    let tickets = [1, 2].map(|value| rig.ring.submit(&[fill(0, value)]).unwrap());
    rig.gpu.poke(rig.ring.layout().fence(), 100).unwrap();
    rig.gpu.poke(rig.ring.layout().userd() + GET, 77).unwrap();
    let failure = RingFailure::Outside { get: 77, entries: 8 };
    assert_eq!(rig.ended(), [(tickets[0], Ok(())), (tickets[1], Err(failure.to_string()))]);
}

/// `GP_GET` may stand still, or lag behind the fence: room is counted by fences.
#[test]
fn a_device_that_does_not_say_where_it_is_is_believed_by_its_fences() {
    let mut rig = Rig::new(4, 1);
    rig.gpu.fail(crate::sim::GpuFault::SilentGet);
    for value in 0..20 {
        let ticket = rig.ring.submit(&[fill(0, value)]).unwrap();
        rig.wait(ticket).unwrap();
        assert_eq!(rig.dword(0), value);
    }
}

/// What the device itself finds wrong reaches the ring as its error.
#[test]
fn faults_of_the_device_end_what_is_behind_them_too() {
    let check = |break_it: &dyn Fn(&mut Rig), code: u32| {
        let mut rig = Rig::new(8, 1);
        rig.gpu.set_manual(true);
        let first = rig.ring.submit(&[fill(0, 1)]).unwrap();
        break_it(&mut rig);
        let behind = rig.ring.submit(&[fill(0, 3)]).unwrap();
        while rig.gpu.step() {}
        let ended = rig.ended();
        assert_eq!(ended.first(), Some(&(first, Ok(()))));
        let error = Err(RingFailure::Fault { code }.to_string());
        assert_eq!(ended.last(), Some(&(behind, error.clone())));
        assert!(ended[1..].iter().all(|(_, result)| *result == error), "{ended:?}");
        assert_eq!(rig.dword(0), 1, "nothing behind it was done");
    };
    // A page fault: nothing is mapped there.
    check(
        &|rig| {
            rig.ring.submit(&[super::Command::Fill { at: 0x4000, len: 4, value: 0 }]).unwrap();
        },
        31,
    );
    let wild = super::Command::Copy { from: DATA, to: 0x4000, len: 4 };
    check(
        &|rig| {
            rig.ring.submit(&[wild]).unwrap();
        },
        31,
    );
    let unmapped = super::Command::Acquire { at: 0x4000, value: 0 };
    check(
        &|rig| {
            rig.ring.submit(&[unmapped]).unwrap();
        },
        31,
    );
    // The segment of entry 1 is overwritten, in several ways, behind the ring's back.
    let second = |offset: u64, value: u32| {
        move |rig: &mut Rig| {
            rig.ring.submit(&[fill(0, 2)]).unwrap();
            let segments = rig.ring.layout().entries() + 8 * 8;
            rig.gpu.poke(segments + 512 + offset, value).unwrap();
        }
    };
    // No header; more data than there is; a method that nobody has; a class that is not bound.
    check(&second(0, 0xe000_0000), 32);
    check(&second(0, 0x3fff_8000), 32);
    check(&second(8, 0x2001_8040), 39);
    check(&second(4, 0x1234), 32);
    // An entry that says of no segment, and one of a segment that is not there.
    let entry = |offset: u64, value: u32| {
        move |rig: &mut Rig| {
            rig.ring.submit(&[fill(0, 2)]).unwrap();
            rig.gpu.poke(rig.ring.layout().entries() + 8 + offset, value).unwrap();
        }
    };
    check(&entry(4, 1), 32);
    check(&entry(4, 0x7fff_ffff), 31);
}
