//! Each rung of the ladder that works, fails or lies, alone and beside the others.

use super::*;
use crate::egpu::{Fault, Rung};

const RUNGS: [Rung; 3] = [Rung::SoftReset, Rung::HardReset, Rung::Reconnect];
const ENDINGS: [Ending; 3] = [Ending::Works, Ending::Fails, Ending::Lies];
const CURES: [Cure; 4] = [Cure::Soft, Cure::Hard, Cure::Reconnect, Cure::Unplug];
const USERS: [Option<SimEgpuFault>; 3] =
    [None, Some(SimEgpuFault::Work(None)), Some(SimEgpuFault::GuestTakes)];

/// Hangs it while `user` has it, and climbs the ladder: it has to come back exactly if `helps`.
fn check(cure: Cure, endings: &[(Rung, Ending, Times)], user: Option<SimEgpuFault>, helps: bool) {
    let mut rig = Rig::new(1, &SimScript::default());
    rig.poll(Duration::ZERO);
    assert_eq!(rig.take(Event::Connect), State::Ready);
    let reset = |(rung, ending, times): &(Rung, Ending, Times)| SimEgpuFault::Reset(*rung, *ending, *times);
    let faults = user.into_iter().chain([SimEgpuFault::Hang(cure)]).chain(endings.iter().map(reset));
    let faults: Vec<SimEgpuFault> = faults.collect();
    faults.iter().for_each(|fault| rig.egpu().inject(*fault));
    let before = rig.egpu().actions();
    for _ in 0..3 {
        rig.poll(Duration::from_secs(1));
        let (state, is_well) = (rig.state(), rig.egpu().is_well());
        assert!(!matches!(state, State::Ready | State::InUse) || is_well, "{faults:?}: {state:?}");
    }
    let wanted = if helps { State::Ready } else { State::Failed(Fault::Unrecovered) };
    assert_eq!(rig.state(), wanted, "{faults:?}: {:?}", rig.manager.failure());
    assert!(rig.egpu().actions() - before < 32, "{faults:?}");
    let resources = rig.egpu().resources();
    assert!(helps || resources == Resources::default(), "{faults:?}: {resources:?}");
    assert!(resources.claims == 0 && resources.work == 0, "{faults:?}: {resources:?}");
}

/// Whether a rung that works is strong enough.
fn helps(cure: Cure, endings: &[(Rung, Ending, Times)]) -> bool {
    let strength = |rung: Rung| match rung {
        Rung::SoftReset => Cure::Soft,
        Rung::HardReset => Cure::Hard,
        Rung::Reconnect => Cure::Reconnect,
    };
    endings.iter().any(|&(rung, ending, _)| ending == Ending::Works && strength(rung) >= cure)
}

#[test]
fn it_comes_back_only_if_a_rung_helps() {
    for user in USERS {
        for cure in CURES {
            for soft in ENDINGS {
                for hard in ENDINGS {
                    for reconnect in ENDINGS {
                        let endings = [soft, hard, reconnect];
                        let endings: Vec<_> = RUNGS
                            .into_iter()
                            .zip(endings)
                            .map(|(rung, ending)| (rung, ending, None))
                            .collect();
                        check(cure, &endings, user, helps(cure, &endings));
                    }
                }
            }
        }
    }
}

#[test]
fn a_rung_that_failed_is_tried_again() {
    for cure in CURES {
        for rung in RUNGS {
            for ending in [Ending::Fails, Ending::Lies] {
                // Three rounds: what works at the third time is enough, and at the fourth it is too late.
                for times in 1..=4 {
                    let others = RUNGS.into_iter().filter(|other| *other != rung);
                    let mut endings: Vec<_> = others.map(|other| (other, Ending::Fails, None)).collect();
                    endings.extend([(rung, ending, Some(times)), (rung, Ending::Works, None)]);
                    check(cure, &endings, None, times < 3 && helps(cure, &endings));
                }
            }
        }
    }
}
