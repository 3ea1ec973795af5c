//! The life of a guest against a model of what its devices and its machine allow, whatever happens in whatever order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn address(number: usize) -> PciAddress {
    PciAddress::new(0, 0x65, number as u8, 0).expect("an address")
}

/// What a device is in the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Free,
    Open,
    /// It is attached, or a part of that is left.
    Attached,
}

/// Who does what [`State`] says, and minds that it may be done.
struct Model {
    state: State,
    devices: BTreeMap<PciAddress, Is>,
    /// The claims that are held, each with what was opened under it.
    claims: BTreeMap<PciAddress, BTreeSet<PciAddress>>,
    /// What each function's claim is, also later.
    claim_of: BTreeMap<PciAddress, PciAddress>,
    runs: bool,
    /// Whether it was asked to end.
    stopped: bool,
    machine: bool,
    asked: Option<Action>,
    wanted: BTreeSet<PciAddress>,
    /// Detaching and releasing that failed, by how often.
    failed: BTreeMap<String, usize>,
    /// Errors that must be reported.
    errors: Vec<String>,
    /// All that was to be done.
    done: Vec<Action>,
}

impl Model {
    fn new(count: usize) -> Self {
        let addresses: Vec<_> = (0..count).map(address).collect();
        Self {
            state: State::new(&addresses),
            devices: addresses.iter().map(|&address| (address, Is::Free)).collect(),
            claims: BTreeMap::new(),
            claim_of: BTreeMap::new(),
            runs: false,
            stopped: false,
            machine: true,
            asked: None,
            wanted: BTreeSet::new(),
            failed: BTreeMap::new(),
            errors: Vec::new(),
            done: Vec::new(),
        }
    }

    /// Something happens; what is to be done then must be allowed.
    fn happens(&mut self, event: &Event) {
        let (state, actions) = self.state.clone().step(event);
        self.state = state;
        for action in actions {
            assert!(self.asked.is_none(), "{action:?} while {:?} is under way", self.asked);
            self.check(action);
            self.done.push(action);
            self.runs |= action == Action::Boot;
            self.stopped |= action == Action::StopGuest;
            if action != Action::StopGuest {
                self.asked = Some(action);
            }
        }
    }

    fn check(&self, action: Action) {
        let is = |address| self.devices[&address];
        let holds =
            |address| self.claim_of.get(&address).is_some_and(|claim| self.claims.contains_key(claim));
        let count = |is: Is| self.devices.values().filter(|&&other| other == is).count();
        match action {
            // Nothing is touched once the guest has ended, or is to.
            Action::Claim(address) => assert!(!holds(address) && self.runs && !self.stopped),
            Action::Open(address) => {
                assert!(holds(address) && is(address) == Is::Free && self.runs && !self.stopped);
                assert!(self.devices.keys().all(|&other| holds(other)), "not all are claimed");
            }
            Action::Attach(address) => assert!(is(address) == Is::Open && self.runs && !self.stopped),
            Action::Boot => assert!(self.machine && self.done.is_empty()),
            Action::StopGuest => assert!(self.runs && !self.stopped),
            Action::DropMachine => assert!(self.machine && !self.runs),
            Action::StopDevices => assert!(!self.machine && count(Is::Attached) > 0),
            Action::Detach(address) => {
                assert!(is(address) == Is::Attached && !self.machine);
                let tried = |address: &PciAddress| self.failed.contains_key(&format!("detach {address}"));
                let is_first = |address: &&PciAddress| is(**address) == Is::Attached && !tried(address);
                // In the first try, those that the host waits for come first.
                let waits = self.wanted.iter().any(|wanted| is_first(&wanted));
                assert!(!waits || self.wanted.contains(&address), "{address} before one that the host wants");
            }
            Action::Close(address) => assert!(is(address) != Is::Free && !self.machine),
            Action::Release(target) => {
                assert!(self.claims.contains_key(&target) && !self.machine);
                let open = self.claims[&target].iter().find(|&&address| is(address) != Is::Free);
                assert_eq!(open, None, "it is open");
            }
        }
    }

    /// Answers what was asked for, well or not.
    fn answer(&mut self, well: bool, covered: bool, unreset: bool) {
        let Some(action) = self.asked.take() else { return };
        let outcome = |what: &str, address: PciAddress| match well {
            true => Ok(()),
            false => Err(format!("{what} {address}")),
        };
        let event = match action {
            Action::Claim(address) if !well && covered => Event::NotClaimed(address),
            Action::Claim(address) => {
                let claim = self.claims.keys().next().copied().filter(|_| covered).unwrap_or(address);
                if well {
                    self.claims.entry(claim).or_default();
                    self.claim_of.insert(address, claim);
                }
                Event::Claimed(address, outcome("claim", address).map(|()| claim))
            }
            Action::Open(address) => {
                if well {
                    self.devices.insert(address, Is::Open);
                    self.claims.entry(self.claim_of[&address]).or_default().insert(address);
                }
                Event::Opened(address, outcome("open", address).map(|()| Backend::Group))
            }
            Action::Attach(address) => {
                self.devices.insert(address, Is::Attached);
                Event::Attached(address, outcome("attach", address))
            }
            Action::DropMachine => {
                self.machine = false;
                Event::MachineDropped
            }
            Action::StopDevices => {
                let attached = self.devices.iter().filter(|(_, is)| **is == Is::Attached);
                let wanted: Vec<_> =
                    attached.map(|(&address, _)| address).filter(|_| unreset).take(1).collect();
                self.wanted.extend(&wanted);
                Event::DevicesStopped(wanted)
            }
            Action::Detach(address) => {
                let how = if unreset { Detached::Unreset } else { Detached::Reset };
                if well {
                    self.devices.insert(address, Is::Open);
                }
                Event::Detached(address, outcome("detach", address).map(|()| how))
            }
            Action::Close(address) => {
                // Closing what is attached is right only when it was tried twice.
                let tried = self.failed.get(&format!("detach {address}")).copied().unwrap_or(0);
                assert!(self.devices[&address] == Is::Open || tried == 2, "{address} is attached");
                self.devices.insert(address, Is::Free);
                Event::Closed(address)
            }
            Action::Release(target) => {
                if well {
                    self.claims.remove(&target);
                }
                Event::Released(target, outcome("release", target))
            }
            Action::Boot => {
                self.runs &= well;
                Event::Booted(if well { Ok(()) } else { Err("boot".into()) })
            }
            Action::StopGuest => unreachable!("it is not answered"),
        };
        match &event {
            Event::Claimed(_, Err(error))
            | Event::Opened(_, Err(error))
            | Event::Attached(_, Err(error))
            | Event::Booted(Err(error)) => {
                self.errors.push(error.clone());
            }
            Event::Detached(_, Err(error)) | Event::Released(_, Err(error)) => {
                let times = self.failed.entry(error.clone()).or_default();
                *times += 1;
            }
            _ => {}
        }
        self.happens(&event);
    }

    /// The guest ends.
    fn end(&mut self, well: bool) {
        if !std::mem::replace(&mut self.runs, false) {
            return;
        }
        let ran = match well {
            true => Ok(RunReport { end: End::Shutdown, restarts: 3, exits: ExitCounts::default() }),
            false => Err("run".to_owned()),
        };
        self.errors.extend(ran.clone().err());
        self.happens(&Event::Ended(ran));
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// What was asked for is answered: well or not, by an earlier claim or not, without a reset or with one.
    Answer(bool, bool, bool),
    Stop,
    Wanted(usize),
    Lost(usize),
    End(bool),
    /// Something that nobody was asked for is answered.
    Stray(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let device = 0..4usize;
    prop_oneof![
        12 => (prop::bool::weighted(0.9), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(well, covered, unreset)| Step::Answer(well, covered, unreset)),
        1 => Just(Step::Stop),
        1 => device.clone().prop_map(Step::Wanted),
        1 => device.clone().prop_map(Step::Lost),
        1 => any::<bool>().prop_map(Step::End),
        2 => (device, any::<bool>()).prop_map(|(device, well)| Step::Stray(device, well)),
    ]
}

fn stray(number: usize, well: bool) -> Vec<Event> {
    let (address, error) = (address(number), || "stray".to_owned());
    vec![
        Event::Claimed(address, if well { Ok(address) } else { Err(error()) }),
        Event::Opened(address, if well { Ok(Backend::Group) } else { Err(error()) }),
        Event::Attached(address, if well { Ok(()) } else { Err(error()) }),
        Event::Booted(if well { Ok(()) } else { Err(error()) }),
        Event::Detached(address, if well { Ok(Detached::Reset) } else { Err(error()) }),
        Event::Closed(address),
        Event::Released(address, if well { Ok(()) } else { Err(error()) }),
        Event::MachineDropped,
        Event::DevicesStopped(vec![address]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn everything_is_undone_in_order_whatever_happens(
        count in 0..4usize,
        steps in prop::collection::vec(step(), 0..60),
        late in any::<bool>(),
    ) {
        let mut model = Model::new(count);
        if !late {
            model.happens(&Event::Start);
        }
        for step in steps {
            match step {
                Step::Answer(well, covered, unreset) => model.answer(well, covered, unreset),
                Step::Stop => model.happens(&Event::Stop),
                Step::Wanted(number) => {
                    // The devices are watched while the guest runs.
                    if model.runs && number < count {
                        model.wanted.insert(address(number));
                        let event = Event::WantedBack(address(number));
                        model.errors.extend(event.loss());
                        model.happens(&event);
                    }
                }
                Step::Lost(number) => {
                    let event = Event::Lost(address(number), "gone".into());
                    model.errors.extend(event.loss());
                    model.happens(&event);
                }
                Step::End(well) => model.end(well),
                Step::Stray(number, well) => {
                    for event in stray(number, well) {
                        if event.answers() != model.asked {
                            let before = format!("{:?}", model.state);
                            model.happens(&event);
                            prop_assert_eq!(before, format!("{:?}", model.state));
                        }
                    }
                }
            }
        }
        // However far that came, it ends once all is answered: each device has 7 steps of which 2 may be needed twice.
        model.happens(&Event::Start);
        model.happens(&Event::Stop);
        let mut left = 9 * count + 5;
        while !model.state.is_over() {
            prop_assert!(model.asked.is_some() || model.runs, "nothing is to be done, and it is not over");
            prop_assert!(left > 0, "it does not end: {:?}", model.done);
            left -= 1;
            if model.runs { model.end(true) } else { model.answer(true, false, false) }
        }
        prop_assert!(!model.machine && !model.runs);
        prop_assert!(model.devices.values().all(|is| *is == Is::Free), "{:?}", model.devices);
        // No error hides another, what succeeded in the second try is none, and what is still claimed is reported.
        let mut errors = model.errors;
        let owed = |(error, times): (&String, &usize)| (*times == 2 && error.starts_with("detach")).then(|| error.clone());
        errors.extend(model.failed.iter().filter_map(owed));
        errors.extend(model.claims.keys().map(|target| format!("release {target}")));
        match model.state.outcome() {
            Ok(_) => prop_assert_eq!(errors, Vec::<String>::new()),
            Err(said) => {
                let said = said.join("\n");
                for error in errors {
                    prop_assert!(said.contains(&error), "{} is not in {}", error, said);
                }
                prop_assert!(!said.contains("stray"), "{}", said);
            }
        }
    }
}

/// Answers everything well but what is in `fails`, and returns what was done, and how it ended.
fn live(
    count: usize,
    events: &[Event],
    fails: &[(Action, usize)],
) -> (Vec<Action>, Result<u32, Vec<String>>) {
    let mut model = Model::new(count);
    let mut fails = fails.to_vec();
    model.happens(&Event::Start);
    let mut events = events.iter();
    while !model.state.is_over() {
        if model.asked.is_some() {
            let fault = fails.iter_mut().find(|(action, times)| Some(*action) == model.asked && *times > 0);
            let fails = fault.map(|(_, times)| *times -= 1).is_some();
            model.answer(!fails, false, false);
        } else if let Some(event) = events.next() {
            if let Event::WantedBack(address) = event {
                model.wanted.insert(*address);
            }
            model.happens(event);
        } else {
            model.end(true);
        }
    }
    (model.done, model.state.outcome().map(|report| report.restarts))
}

#[test]
fn the_order_of_an_end() {
    use Action::{Attach, Boot, Claim, Close, Detach, DropMachine, Open, Release, StopDevices, StopGuest};
    let [a, b] = [address(0), address(1)];
    let start = [Boot, Claim(a), Claim(b), Open(a), Attach(a), Open(b), Attach(b)];
    let check =
        |events: &[Event], fails: &[(Action, usize)], done: &[Action], expect: Result<u32, &[&str]>| {
            let (got, outcome) = live(2, events, fails);
            // What was done of the start, and then.
            let started = start.iter().zip(&got).take_while(|(start, got)| start == got).count();
            let fails_early =
                fails.iter().find_map(|(fails, _)| start.iter().position(|action| action == fails));
            assert_eq!(started, fails_early.map_or(start.len(), |at| at + 1));
            assert_eq!(got[started..], *done);
            match (&outcome, expect) {
                (Ok(got), Ok(expect)) => assert_eq!(*got, expect),
                (Err(said), Err(expect)) => {
                    assert_eq!(said.len(), expect.len(), "{said:?}");
                    assert!(said.iter().zip(expect).all(|(said, expect)| said.contains(expect)), "{said:?}");
                }
                _ => panic!("{outcome:?} instead of {expect:?}"),
            }
        };
    let orderly =
        [DropMachine, StopDevices, Detach(b), Detach(a), Close(a), Close(b), Release(a), Release(b)];
    // The guest ends by itself.
    check(&[], &[], &orderly, Ok(3));
    // Somebody ends it.
    check(&[Event::Stop], &[], &[&[StopGuest], &orderly[..]].concat(), Ok(3));
    // A device is lost, and its guest runs on.
    check(&[Event::Lost(a, "gone".into())], &[], &orderly, Err(&["was lost while"]));
    // The host wants the first one back.
    let wanted = [
        StopGuest,
        DropMachine,
        StopDevices,
        Detach(a),
        Detach(b),
        Close(a),
        Close(b),
        Release(a),
        Release(b),
    ];
    check(&[Event::WantedBack(a)], &[], &wanted, Err(&["the host asked for 0000:65:00.0 back"]));
    // A detach fails, and works when all else is released; or does not, and its claim is released all the same.
    let first = [DropMachine, StopDevices, Detach(b), Detach(a), Close(a), Release(a)];
    let again = [&first[..], &[StopDevices, Detach(b), Close(b), Release(b)]].concat();
    check(&[], &[(Detach(b), 1)], &again, Ok(3));
    let kept = ["not everything could be given back: detach 0000:65:01.0"];
    check(&[], &[(Detach(b), 2)], &again, Err(&kept));
    // So does a release.
    let again = [&orderly[..], &[Release(a)]].concat();
    check(&[], &[(Release(a), 1)], &again, Ok(3));
    let kept = ["not everything could be given back: release 0000:65:00.0"];
    check(&[], &[(Release(a), 2)], &again, Err(&kept));
    // The guest does not start, or a device does not come to it.
    check(&[], &[(Boot, 1)], &[DropMachine], Err(&["boot"]));
    check(&[], &[(Claim(a), 1)], &[StopGuest, DropMachine], Err(&["claim 0000:65:00.0"]));
    let claimed = [StopGuest, DropMachine, Release(a)];
    check(&[], &[(Claim(b), 1)], &claimed, Err(&["claim 0000:65:01.0"]));
    let one = [StopGuest, DropMachine, StopDevices, Detach(a), Close(a), Release(a), Release(b)];
    check(&[], &[(Open(b), 1)], &one, Err(&["open 0000:65:01.0"]));
    check(&[], &[(Attach(b), 1)], &[&[StopGuest], &orderly[..]].concat(), Err(&["attach 0000:65:01.0"]));
    // Neither hides the other.
    let both = [(Detach(b), 2), (Release(a), 2)];
    let again = [&first[..], &[StopDevices, Detach(b), Close(b), Release(a), Release(b)]].concat();
    let kept = ["given back: detach 0000:65:01.0; release 0000:65:00.0"];
    check(&[], &both, &again, Err(&kept));
}
