//! The life of an eGPU: each step of it, and any events in any order.

mod host;
mod policy;

use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { missed: 3, rounds: 3, well: 5, hottest: 90_000 };
const FOUND: Event = Event::Found { authorised: false };
const TUNNELLED: Event = Event::Found { authorised: true };
const HOT: Event = Event::Temperature(90_000);

/// What is done and then waited for, from nothing on.
fn check(events: &[Event], state: State, actions: &[Action]) {
    let mut egpu = Egpu::default();
    let mut done = Vec::new();
    for event in events {
        let (next, action) = egpu.step(*event, &LIMITS);
        egpu = next;
        done.extend(action);
    }
    assert_eq!((egpu.state, &*done), (state, actions), "after {events:?}");
}

/// The events of a connection.
fn connected() -> Vec<Event> {
    vec![
        FOUND,
        Event::Connect,
        Event::Done(Action::Authorise),
        Event::Done(Action::Enumerate),
        Event::Done(Action::Verify),
    ]
}

const CONNECT: [Action; 3] = [Action::Authorise, Action::Enumerate, Action::Verify];

/// After a connection.
fn check_connected(events: &[Event], state: State, actions: &[Action]) {
    check(&[&*connected(), events].concat(), state, &[&CONNECT, actions].concat());
}

fn drain(step: DrainStep, force: bool, then: Option<Fault>) -> State {
    let before = then.map_or(Before::Working, Before::Failed);
    State::Draining(Drain { step, force, then, before })
}

const fn stop(force: bool) -> Action {
    Action::StopWork { force }
}

const fn detach(force: bool) -> Action {
    Action::Detach { force }
}

const fn unbind(force: bool) -> Action {
    Action::Unbind { force }
}

#[test]
fn it_is_connected() {
    check(&[], State::Absent, &[]);
    check(&[Event::Connect], State::Absent, &[]);
    check(&[FOUND], State::Disconnected, &[]);
    check(&[FOUND, Event::Gone], State::Absent, &[]);
    check(&[TUNNELLED], State::Enumerating, &[Action::Enumerate]);
    check(&[FOUND, Event::Connect], State::Authorising, &[Action::Authorise]);
    check(
        &[FOUND, Event::Connect, Event::Failed(Action::Authorise)],
        State::Failed(Fault::NotAuthorised),
        &[Action::Authorise],
    );
    check_connected(&[], State::Ready, &[]);
    check_connected(&[Event::Used], State::InUse, &[]);
    check_connected(&[Event::Used, Event::Idle], State::Ready, &[]);
    // What did not come is taken down again.
    let not_enumerated =
        [FOUND, Event::Connect, Event::Done(Action::Authorise), Event::Failed(Action::Enumerate)];
    let failed = State::Failed(Fault::NotEnumerated);
    check(
        &not_enumerated,
        drain(DrainStep::StopWork, false, Some(Fault::NotEnumerated)),
        &[Action::Authorise, Action::Enumerate, stop(false)],
    );
    let drained = [stop(false), detach(false), Action::Release, unbind(false), Action::Deauthorise];
    check(
        &[&not_enumerated[..], &drained.map(Event::Done), &[FOUND]].concat(),
        failed,
        &[&[Action::Authorise, Action::Enumerate], &drained[..]].concat(),
    );
    // Unless somebody uses it, who had it before.
    check(
        &[&not_enumerated[..], &[Event::Failed(stop(false))]].concat(),
        failed,
        &[Action::Authorise, Action::Enumerate, stop(false)],
    );
    // And what somebody else has tunnelled is left to them, also when it is then asked for.
    let found = [TUNNELLED, Event::Failed(Action::Enumerate)];
    check(&found, failed, &[Action::Enumerate]);
    let asked = [TUNNELLED, Event::Connect, Event::Done(Action::Authorise), Event::Failed(Action::Enumerate)];
    let again = [Action::Enumerate, Action::Authorise, Action::Enumerate];
    check(&[&found[..], &asked].concat(), failed, &again);
    check(
        &[&found[..], &[FOUND], &asked[1..]].concat(),
        drain(DrainStep::StopWork, false, Some(Fault::NotEnumerated)),
        &[&again[..], &[stop(false)]].concat(),
    );
    let unsound = [TUNNELLED, Event::Done(Action::Enumerate), Event::Failed(Action::Verify)];
    check(
        &unsound,
        State::Recovering(Recovery::Detach(Rung::SoftReset)),
        &[Action::Enumerate, Action::Verify, detach(true)],
    );
}

#[test]
fn what_was_there_before_is_taken_as_it_is() {
    check(
        &[TUNNELLED, Event::Unfit],
        drain(DrainStep::StopWork, false, Some(Fault::NotEnumerated)),
        &[Action::Enumerate, stop(false)],
    );
    check(&[Event::Adopted { sound: true }], State::Ready, &[]);
    check(&[Event::Adopted { sound: false }], State::Failed(Fault::Unsound), &[]);
    // Whoever has it keeps it, whatever it is worth.
    let before = Before::Failed(Fault::Unsound);
    let state = State::Draining(Drain { step: DrainStep::StopWork, force: false, then: None, before });
    let events = [Event::Adopted { sound: false }, Event::Disconnect { force: false }];
    check(&events, state, &[stop(false)]);
    let events = [&events[..], &[Event::Failed(stop(false))]].concat();
    check(&events, State::Failed(Fault::Unsound), &[stop(false)]);
}

#[test]
fn it_is_disconnected() {
    let done = |force| {
        [stop(force), detach(force), Action::Release, unbind(force), Action::Deauthorise].map(Event::Done)
    };
    for force in [false, true] {
        let actions = [stop(force), detach(force), Action::Release, unbind(force), Action::Deauthorise];
        for used in [&[][..], &[Event::Used]] {
            let events = [used, &[Event::Disconnect { force }], &done(force)].concat();
            check_connected(&events, State::Disconnected, &actions);
        }
    }
    // Who has it keeps it.
    let refused = [Event::Used, Event::Disconnect { force: false }, Event::Failed(stop(false))];
    check_connected(&refused, State::InUse, &[stop(false)]);
    let asked = [Event::Used, Event::Disconnect { force: false }, Event::Done(stop(false))];
    check_connected(
        &[&asked[..], &[Event::Failed(detach(false))]].concat(),
        State::InUse,
        &[stop(false), detach(false)],
    );
    let stuck = [
        &asked[..],
        &[Event::Done(detach(false)), Event::Done(Action::Release), Event::Failed(unbind(false))],
    ]
    .concat();
    check_connected(
        &stuck,
        State::Failed(Fault::Stuck),
        &[stop(false), detach(false), Action::Release, unbind(false)],
    );
    // What did not answer is not said to, nor is there anything to keep of what had failed.
    let missed = [Event::Used, Event::Missed, Event::Disconnect { force: false }, Event::Failed(stop(false))];
    check_connected(&missed, State::Degraded { missed: 1, in_use: true }, &[stop(false)]);
    let again = [&stuck[..], &[Event::Disconnect { force: false }, Event::Failed(stop(false))]].concat();
    check_connected(
        &again,
        State::Failed(Fault::Stuck),
        &[stop(false), detach(false), Action::Release, unbind(false), stop(false)],
    );
    // Whoever began to use it just before it was unbound keeps it.
    let begun = [&stuck[..stuck.len() - 1], &[Event::Busy(unbind(false))]].concat();
    check_connected(&begun, State::InUse, &[stop(false), detach(false), Action::Release, unbind(false)]);
    // By force nobody keeps it.
    let forced = [stop(true), detach(true), Action::Release, unbind(true)].map(Event::Failed);
    let events = [&[Event::Used, Event::Disconnect { force: true }], &forced[..]].concat();
    let actions = [stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise];
    check_connected(&events, drain(DrainStep::Deauthorise, true, None), &actions);
    let left = [&events[..], &[Event::Failed(Action::Deauthorise)]].concat();
    check_connected(&left, State::Failed(Fault::NotDeauthorised), &actions);
    // Somebody else took its tunnel down, or pulled it.
    check_connected(&[FOUND], State::Disconnected, &[Action::Settle]);
    check_connected(&[Event::Used, Event::Gone], State::Absent, &[Action::Settle]);
    check_connected(
        &[Event::Disconnect { force: false }, Event::Gone],
        State::Absent,
        &[stop(false), Action::Settle],
    );
}

#[test]
fn it_is_recovered_rung_by_rung() {
    let soft = Action::Reset(Rung::SoftReset);
    let hard = Action::Reset(Rung::HardReset);
    let reconnect = Action::Reset(Rung::Reconnect);
    let missed = [Event::Missed; 3];
    let recovering = |recovery| State::Recovering(recovery);
    check_connected(&missed[..2], State::Degraded { missed: 2, in_use: false }, &[]);
    check_connected(&[Event::Missed, Event::Answered], State::Ready, &[]);
    check_connected(&[Event::Used, Event::Missed, Event::Answered], State::InUse, &[]);
    check_connected(&missed, recovering(Recovery::Reset(Rung::SoftReset)), &[soft]);
    // Who uses it loses it first.
    check_connected(
        &[&[Event::Used], &missed[..], &[Event::Failed(detach(true))]].concat(),
        recovering(Recovery::Reset(Rung::SoftReset)),
        &[detach(true), soft],
    );
    // A reset that was done has not helped before that is seen.
    check_connected(
        &[&missed[..], &[Event::Done(soft)]].concat(),
        recovering(Recovery::Verify(Rung::SoftReset)),
        &[soft, Action::Verify],
    );
    check_connected(
        &[&missed[..], &[Event::Done(soft), Event::Done(Action::Verify)]].concat(),
        State::Ready,
        &[soft, Action::Verify],
    );
    // What is off the bus can't be reset.
    check_connected(&[Event::Lost], recovering(Recovery::Reset(Rung::Reconnect)), &[reconnect]);
    // Another GPU that comes with the new tunnel is no end of it.
    check_connected(
        &[Event::Lost, Event::Unfit],
        recovering(Recovery::Reset(Rung::SoftReset)),
        &[reconnect, soft],
    );
    // Each rung fails, by the reset or by the look at what came of it, in each of three rounds.
    let round =
        [Event::Failed(soft), Event::Done(hard), Event::Failed(Action::Verify), Event::Failed(reconnect)];
    let acts = [soft, hard, Action::Verify, reconnect];
    for rounds in 1..3 {
        let events = [&missed[..], &round.repeat(rounds)].concat();
        check_connected(
            &events,
            recovering(Recovery::Reset(Rung::SoftReset)),
            &[&acts.repeat(rounds)[..], &[soft]].concat(),
        );
    }
    let given_up = [&missed[..], &round.repeat(3)].concat();
    let actions = [&acts.repeat(3)[..], &[stop(true)]].concat();
    check_connected(&given_up, drain(DrainStep::StopWork, true, Some(Fault::Unrecovered)), &actions);
    // One that is well between its failures has no more rounds either, until it was well for long.
    let recovered = [&missed[..], &[Event::Done(soft), Event::Done(Action::Verify)]].concat();
    let again = [&recovered[..], &[Event::Answered; 4]].concat();
    let thrice = [&again.repeat(3)[..], &missed].concat();
    let acts = [soft, Action::Verify].repeat(3);
    let actions = [&acts[..], &[stop(true)]].concat();
    check_connected(&thrice, drain(DrainStep::StopWork, true, Some(Fault::Unrecovered)), &actions);
    let well = [&again.repeat(3)[..], &[Event::Answered], &missed].concat();
    check_connected(&well, recovering(Recovery::Reset(Rung::SoftReset)), &[&acts[..], &[soft]].concat());
}

#[test]
fn one_reset_is_made_when_asked_for() {
    for rung in [Rung::SoftReset, Rung::HardReset, Rung::Reconnect] {
        let reset = Action::Reset(rung);
        check_connected(
            &[Event::Reset(rung), Event::Done(reset), Event::Done(Action::Verify)],
            State::Ready,
            &[reset, Action::Verify],
        );
        let failed = State::Failed(Fault::Unsound);
        check_connected(&[Event::Reset(rung), Event::Failed(reset)], failed, &[reset]);
        check_connected(&[Event::Reset(rung), Event::Unfit], failed, &[reset]);
        let unverified = [Event::Reset(rung), Event::Done(reset), Event::Failed(Action::Verify)];
        check_connected(&unverified, failed, &[reset, Action::Verify]);
        check_connected(&[Event::Used, Event::Reset(rung)], State::InUse, &[]);
        // The ladder is whole again afterwards.
        let soft = Action::Reset(Rung::SoftReset);
        let later =
            [&[Event::Reset(rung), HOT], &[Event::Gone][..], &connected(), &[Event::Missed; 3]].concat();
        let later = [&later[..], &[Event::Failed(soft)]].concat();
        check_connected(
            &later,
            State::Recovering(Recovery::Reset(Rung::HardReset)),
            &[&[reset, stop(true), Action::Settle], &CONNECT[..], &[soft, Action::Reset(Rung::HardReset)]]
                .concat(),
        );
    }
}

#[test]
fn a_tunnel_that_was_dropped_is_built_again() {
    let reconnect = Action::Reset(Rung::Reconnect);
    let recovering = |recovery| State::Recovering(recovery);
    check_connected(&[Event::Dropped], recovering(Recovery::Reset(Rung::Reconnect)), &[reconnect]);
    check_connected(
        &[Event::Used, Event::Dropped],
        recovering(Recovery::Detach(Rung::Reconnect)),
        &[detach(true)],
    );
    // One that drops again and again is given up.
    let again = [Event::Dropped, Event::Done(reconnect), Event::Done(Action::Verify)];
    let given_up = [&again.repeat(3)[..], &[Event::Dropped]].concat();
    check_connected(
        &given_up,
        drain(DrainStep::StopWork, true, Some(Fault::Unrecovered)),
        &[&[reconnect, Action::Verify].repeat(3)[..], &[stop(true)]].concat(),
    );
    check(&[FOUND, Event::Dropped], State::Disconnected, &[]);
}

#[test]
fn it_is_stopped_when_it_is_too_hot() {
    let hot = drain(DrainStep::StopWork, true, Some(Fault::Overheated));
    check_connected(&[Event::Temperature(89_999)], State::Ready, &[]);
    check_connected(&[HOT], hot, &[stop(true)]);
    check_connected(&[Event::Used, HOT], hot, &[stop(true)]);
    let soft = Action::Reset(Rung::SoftReset);
    check_connected(&[&[Event::Missed; 3][..], &[HOT]].concat(), hot, &[soft, stop(true)]);
    // One that was asked to go waits for nobody any more.
    let asked = [Event::Used, Event::Disconnect { force: false }, HOT];
    check_connected(&asked, hot, &[stop(false), stop(true)]);
    let failed =
        [stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise].map(Event::Failed);
    check_connected(
        &[&[HOT], &failed[..]].concat(),
        State::Failed(Fault::NotStopped),
        &[stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise],
    );
    // That is tried again at each look until its tunnel is down, whoever takes it down.
    let burns = [&[HOT], &failed[..]].concat();
    let acts = [stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise];
    for quiet in [Event::Answered, Event::Temperature(20_000), Event::Idle, HOT] {
        check_connected(&[&burns[..], &[quiet]].concat(), State::Failed(Fault::NotStopped), &acts);
    }
    check_connected(&[&burns[..], &[TUNNELLED]].concat(), hot, &[&acts[..], &[stop(true)]].concat());
    check_connected(
        &[&burns[..], &[FOUND]].concat(),
        State::Failed(Fault::Overheated),
        &[&acts[..], &[Action::Settle]].concat(),
    );
    // It stays one, where somebody else's disconnect fails as well.
    let asked = [&[Event::Disconnect { force: true }], &failed[..]].concat();
    check_connected(&[&burns[..], &asked].concat(), State::Failed(Fault::NotStopped), &[acts, acts].concat());
    // Whoever wants it again says so.
    let done =
        [stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise].map(Event::Done);
    let stopped = [&[HOT], &done[..], &[FOUND, Event::Connect]].concat();
    check_connected(
        &stopped,
        State::Authorising,
        &[stop(true), detach(true), Action::Release, unbind(true), Action::Deauthorise, Action::Authorise],
    );
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => any::<bool>().prop_map(|authorised| Event::Found { authorised }),
        1 => any::<bool>().prop_map(|sound| Event::Adopted { sound }),
        1 => Just(Event::Unfit),
        1 => Just(Event::Gone),
        1 => Just(Event::Lost),
        1 => Just(Event::Dropped),
        1 => Just(Event::Reset(Rung::HardReset)),
        1 => Just(Event::Connect),
        1 => any::<bool>().prop_map(|force| Event::Disconnect { force }),
        1 => Just(Event::Used),
        1 => Just(Event::Idle),
        3 => Just(Event::Answered),
        5 => Just(Event::Missed),
        1 => (0..120_000).prop_map(Event::Temperature),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Events come at any time, and actions end as they like.
    #[test]
    fn whatever_comes_it_settles_and_does_not_lie(
        steps in prop::collection::vec((event(), any::<bool>(), any::<bool>()), 0..200),
    ) {
        let mut egpu = Egpu::default();
        // Since its tunnel was last known to be there: whether it was seen to answer, and nobody uses it.
        let (mut is_verified, mut is_stopped, mut is_free) = (false, false, false);
        for (event, answers, ends) in steps {
            let before = egpu.state;
            let mut event = match before.awaited() {
                Some(action) if ends && answers => Event::Done(action),
                Some(action) if ends => Event::Failed(action),
                _ => event,
            };
            let mut left = 0;
            loop {
                let from = egpu.state;
                let (next, action) = egpu.step(event, &LIMITS);
                match event {
                    Event::Done(Action::Verify) | Event::Answered | Event::Adopted { sound: true } => {
                        is_verified = true;
                    }
                    Event::Done(Action::StopWork { .. }) => is_stopped = true,
                    Event::Done(Action::Detach { .. }) => is_free = is_stopped,
                    _ => {}
                }
                match action {
                    Some(Action::Reset(_) | Action::Authorise | Action::Enumerate | Action::Settle) => is_verified = false,
                    Some(Action::StopWork { .. }) => (is_stopped, is_free) = (false, false),
                    Some(Action::Unbind { force }) => prop_assert!(force || is_free, "{from:?} {event:?}"),
                    _ => {}
                }
                prop_assert_eq!(action.filter(|action| *action != Action::Settle), match next.state != from {
                    true => next.state.awaited(),
                    false => None,
                });
                if event == Event::Gone {
                    prop_assert_eq!(next.state, State::Absent);
                }
                if matches!(next.state, State::Ready | State::InUse) {
                    prop_assert!(is_verified, "{from:?} {event:?} {:?}", next.state);
                }
                egpu = next;
                // One in three is seen to its end, the others are interrupted.
                let Some(action) = egpu.state.awaited().filter(|_| answers != ends) else { break };
                event = match action {
                    action if answers => Event::Done(action),
                    Action::Unbind { .. } => Event::Busy(action),
                    action => Event::Failed(action),
                };
                left += 1;
                prop_assert!(left < 64, "no end from {before:?}");
            }
        }
    }
}
