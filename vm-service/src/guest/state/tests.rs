//! The life of a guest against a model of what its devices and its machine allow, whatever happens in whatever order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn address(number: usize) -> PciAddress {
    PciAddress::new(0, 0x65, number as u8, 0).expect("an address")
}

/// What a function is in the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Free,
    Open,
    /// It is attached, or a part of that is left.
    Attached,
    Stopped,
}

/// The functions of a slot, and what becomes of it.
#[derive(Clone, Debug)]
struct Slotted {
    functions: Vec<PciAddress>,
    /// Whether the guest starts with it.
    boots: bool,
    plugged: bool,
    /// Whether it has come to a guest that ran.
    came: bool,
    /// Whether the guest was asked to let go of it, and whether it is taken all the same.
    asked: Option<bool>,
    /// Whether there is a reason to take it from a guest that runs.
    goes: bool,
}

/// Who does what [`State`] says, and minds that it may be done.
struct Model {
    state: State,
    functions: BTreeMap<PciAddress, Is>,
    slots: Vec<Slotted>,
    /// The claims that are held, each with what was opened under it.
    claims: BTreeMap<PciAddress, BTreeSet<PciAddress>>,
    /// What each function's claim is, also later.
    claim_of: BTreeMap<PciAddress, PciAddress>,
    runs: bool,
    /// Whether it was asked to end, and whether there was a reason to.
    stopped: bool,
    may_end: bool,
    machine: bool,
    pending: Option<Action>,
    /// The function that is being claimed.
    claiming: Option<PciAddress>,
    wanted: BTreeSet<PciAddress>,
    /// Detaching that failed once.
    failed: BTreeSet<String>,
    /// What failed twice to be detached.
    given_up: BTreeSet<PciAddress>,
    /// Errors that must be reported.
    errors: Vec<String>,
    /// The requests that were made, and the answers that came.
    requests: u64,
    answers: BTreeMap<u64, Answer>,
    /// All that was to be done.
    done: Vec<Action>,
}

impl Model {
    /// Of a guest that starts with slots of this number of functions each.
    fn new(counts: &[usize]) -> Self {
        let mut next = 0..;
        let slots: Vec<Vec<_>> =
            counts.iter().map(|&count| next.by_ref().take(count).map(address).collect()).collect();
        let slotted = |functions: &Vec<PciAddress>| Slotted {
            functions: functions.clone(),
            boots: true,
            plugged: true,
            came: false,
            asked: None,
            goes: false,
        };
        Self {
            state: State::new(&slots),
            functions: (0..MOST).map(|number| (address(number), Is::Free)).collect(),
            slots: slots.iter().map(slotted).collect(),
            claims: BTreeMap::new(),
            claim_of: BTreeMap::new(),
            runs: false,
            stopped: false,
            may_end: false,
            machine: true,
            pending: None,
            claiming: None,
            wanted: BTreeSet::new(),
            failed: BTreeSet::new(),
            given_up: BTreeSet::new(),
            errors: Vec::new(),
            requests: 0,
            answers: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    fn slot(&mut self, address: PciAddress) -> Option<&mut Slotted> {
        self.slots.iter_mut().find(|slot| slot.functions.contains(&address))
    }

    /// Whether the guest reaches a function.
    fn is_reached(&self, address: PciAddress) -> bool {
        let mut slots = self.slots.iter();
        self.machine && slots.any(|slot| slot.plugged && slot.functions.contains(&address))
    }

    fn holds(&self, address: PciAddress) -> bool {
        self.claim_of.get(&address).is_some_and(|claim| self.claims.contains_key(claim))
    }

    /// Something happens; what is to be done then must be allowed.
    fn happens(&mut self, event: &Event) {
        let (state, actions) = self.state.clone().step(event);
        self.state = state;
        for action in actions {
            if action.is_awaited() {
                assert!(self.pending.is_none(), "{action:?} while {:?} is under way", self.pending);
                self.check_beside_claim(&action);
                match action {
                    Action::Claim(address) => self.claiming = Some(address),
                    _ => self.pending = Some(action.clone()),
                }
            }
            self.check(&action);
            self.done.push(action);
        }
    }

    /// While a function is claimed, only other slots are emptied.
    fn check_beside_claim(&self, action: &Action) {
        let Some(claiming) = self.claiming else { return };
        let (Action::Unplug(of)
        | Action::Stop(of)
        | Action::Detach(of)
        | Action::Close(of)
        | Action::Release(of)) = action
        else {
            panic!("{action:?} while {claiming} is claimed");
        };
        let mut slots = self.slots.iter();
        assert!(!slots.any(|slot| slot.functions.contains(of) && slot.functions.contains(&claiming)));
    }

    /// Returns the action that is answered next: the pending one, or the claim.
    fn due(&self, claim_first: bool) -> Option<Action> {
        let claim = self.claiming.map(Action::Claim);
        if claim_first { claim.or(self.pending.clone()) } else { self.pending.clone().or(claim) }
    }

    fn check(&mut self, action: &Action) {
        let is = |address: &PciAddress| self.functions[address];
        let may_come = self.runs && !self.stopped;
        match action {
            // Nothing is touched once the guest has ended, or is to.
            Action::Explain(_) => assert!(may_come),
            Action::Claim(address) => assert!(is(address) == Is::Free && may_come),
            Action::Open(address) => {
                assert!(self.holds(*address) && is(address) == Is::Free && may_come);
                let slot = self.slots.iter().find(|slot| slot.functions.contains(address)).expect("a slot");
                assert!(slot.functions.iter().all(|&other| self.holds(other)), "not all are claimed");
            }
            Action::Attach(address) => assert!(is(address) == Is::Open && may_come),
            Action::Insert(slot) => {
                let functions = self.slot(*slot).expect("a slot").functions.clone();
                assert!(may_come && !self.is_reached(*slot));
                assert!(functions.iter().all(|&address| self.holds(address)));
            }
            Action::Plug(slot) => {
                let functions = self.slot(*slot).expect("a slot").functions.clone();
                assert!(may_come && self.is_reached(*slot));
                assert!(functions.iter().all(|address| self.functions[address] == Is::Attached));
            }
            Action::Ask(slot, _) => assert!(self.is_reached(*slot) && self.runs),
            Action::Unask(slot) => {
                let asked = self.slot(*slot).expect("a slot").asked.take();
                assert_eq!(asked, Some(false));
            }
            Action::ReportError(address, _) => assert!(self.is_reached(*address) && self.runs),
            Action::Unplug(slot) => {
                let slot = self.slot(*slot).expect("a slot");
                assert!(slot.plugged && slot.goes, "nothing takes {slot:?}");
            }
            Action::Boot => {
                assert!(self.machine && self.done.iter().all(|done| matches!(done, Action::Answer(..))));
                self.runs = true;
            }
            Action::StopGuest => {
                assert!(self.runs && !self.stopped && self.may_end);
                self.stopped = true;
            }
            Action::DropMachine => assert!(self.machine && !self.runs),
            Action::Stop(address) => {
                assert!(is(address) == Is::Attached && !self.is_reached(*address));
            }
            Action::Detach(address) => {
                assert!(is(address) == Is::Stopped && !self.is_reached(*address));
                // In the first try, those that the host waits for come first of what leaves together.
                let together = |other: &PciAddress| {
                    !self.machine
                        || self
                            .slots
                            .iter()
                            .any(|slot| slot.functions.contains(address) && slot.functions.contains(other))
                };
                let waits = self.wanted.iter().any(|other| is(other) == Is::Stopped && together(other));
                assert!(!waits || self.wanted.contains(address), "{address} before one that the host wants");
            }
            Action::Close(address) => assert!(is(address) != Is::Free && !self.is_reached(*address)),
            Action::Release(target) => {
                let open = self.claims[target].iter().find(|address| is(address) != Is::Free);
                assert_eq!(open, None, "it is open");
            }
            Action::Answer(id, answer) => {
                assert!(id.0 < self.requests);
                assert_eq!(self.answers.insert(id.0, answer.clone()), None, "it was answered before");
            }
        }
    }

    /// Answers what was asked for, well or not.
    fn answer(&mut self, well: bool, covered: bool, unreset: bool) {
        let Some(action) = self.due(unreset) else { return };
        match action {
            Action::Claim(_) => self.claiming = None,
            _ => self.pending = None,
        }
        let outcome = |what: &str, address: PciAddress| match well {
            true => Ok(()),
            false => Err(format!("{what} {address}")),
        };
        let event = match action {
            Action::Explain(request) => {
                let blocked = || Refused::Blocked(Vec::new(), None);
                Event::Explained(request, if well { Ok(()) } else { Err(blocked()) })
            }
            Action::Claim(address) if !well && covered => {
                self.may_end = true;
                Event::NotClaimed(address)
            }
            Action::Claim(address) => {
                // One that a claim had before, and which is not released yet, has it still.
                let stays = |claim: &PciAddress| self.pending != Some(Action::Release(*claim));
                let had = self.claims.iter().find(|(claim, has)| has.contains(&address) && stays(claim));
                let had = had.map(|(claim, _)| *claim);
                let other = || self.claims.keys().copied().find(|claim| covered && stays(claim));
                let claim = had.or_else(other).unwrap_or(address);
                if well {
                    self.claims.entry(claim).or_default();
                    self.claim_of.insert(address, claim);
                }
                Event::Claimed(address, outcome("claim", address).map(|()| claim))
            }
            Action::Open(address) => {
                if well {
                    self.functions.insert(address, Is::Open);
                    self.claims.entry(self.claim_of[&address]).or_default().insert(address);
                }
                Event::Opened(address, outcome("open", address).map(|()| Backend::Group))
            }
            Action::Attach(address) if !well && covered => {
                self.may_end = true;
                self.functions.insert(address, Is::Attached);
                Event::NotAttached(address)
            }
            Action::Attach(address) => {
                self.functions.insert(address, Is::Attached);
                Event::Attached(address, outcome("attach", address))
            }
            Action::Insert(slot) => {
                self.slot(slot).expect("a slot").plugged = well;
                Event::Inserted(slot, outcome("insert", slot))
            }
            Action::Plug(slot) => {
                self.slot(slot).expect("a slot").came = well;
                Event::Plugged(slot, outcome("plug", slot).map(|()| Attached::default()))
            }
            Action::Unplug(slot) => {
                self.slot(slot).expect("a slot").plugged = false;
                Event::Unplugged(slot)
            }
            Action::DropMachine => {
                self.machine = false;
                Event::MachineDropped
            }
            Action::Stop(address) => {
                self.functions.insert(address, Is::Stopped);
                if unreset {
                    self.wanted.insert(address);
                }
                Event::Stopped(address, unreset)
            }
            Action::Detach(address) => {
                let how = if unreset { Detached::Unreset } else { Detached::Reset };
                self.functions.insert(address, if well { Is::Open } else { Is::Attached });
                Event::Detached(address, outcome("detach", address).map(|()| how))
            }
            Action::Close(address) => {
                // Closing what is attached is right only when it was tried twice.
                let tried = self.given_up.remove(&address);
                assert!(self.functions[&address] == Is::Open || tried, "{address} is attached");
                self.functions.insert(address, Is::Free);
                self.wanted.remove(&address);
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
            action => unreachable!("{action:?} is not awaited"),
        };
        match &event {
            Event::Booted(Err(error)) => self.errors.push(error.clone()),
            Event::Claimed(address, Err(error))
            | Event::Opened(address, Err(error))
            | Event::Attached(address, Err(error))
            | Event::Inserted(address, Err(error))
            | Event::Plugged(address, Err(error)) => {
                let slot = self.slot(*address).expect("a slot");
                let (boots, goes) = (slot.boots, std::mem::replace(&mut slot.goes, true));
                self.errors.extend((boots && !goes).then(|| error.clone()));
                self.may_end |= boots;
            }
            Event::Detached(address, Err(error)) if !self.failed.insert(error.clone()) => {
                self.failed.remove(error);
                self.given_up.insert(*address);
                self.errors.push(error.clone());
            }
            Event::Detached(address, Ok(_)) => drop(self.failed.remove(&format!("detach {address}"))),
            _ => {}
        }
        self.happens(&event);
        if let Event::Released(_, Err(error)) = &event
            && !self.state.retries(&event)
        {
            self.errors.push(error.clone());
        }
    }

    /// Somebody wants a device in the guest.
    fn attach(&mut self, functions: &[PciAddress]) {
        let (id, request) = self.request(functions);
        let boots = false;
        let slot = Slotted {
            functions: functions.to_vec(),
            boots,
            plugged: false,
            came: false,
            asked: None,
            goes: false,
        };
        // What is refused is not taken, and nothing of it is there any more otherwise.
        let there: Vec<_> = self.state.functions().map(|(address, _)| address).collect();
        if !functions.iter().any(|address| there.contains(address)) {
            self.slots.retain(|other| !other.functions.iter().any(|address| functions.contains(address)));
            self.slots.push(slot);
        }
        self.happens(&Event::Attach(RequestId(id), request));
    }

    fn request(&mut self, functions: &[PciAddress]) -> (u64, AttachRequest) {
        self.requests += 1;
        (self.requests - 1, AttachRequest { functions: functions.to_vec(), ..AttachRequest::default() })
    }

    /// Somebody wants a device of the guest, orderly or by surprise, or first the one and then the other.
    fn detach(&mut self, address: PciAddress, orderly: bool, then_surprise: bool) {
        self.requests += 1;
        let (id, before) = (RequestId(self.requests - 1), self.slots.clone());
        if let Some(slot) = self.slot(address) {
            // A guest is not asked for what has not come to it.
            match orderly && (slot.came || slot.boots) {
                true => slot.asked = slot.asked.or(Some(then_surprise)),
                false => slot.goes = true,
            }
        }
        let how = match orderly {
            true => DetachHow::Orderly { deadline: Duration::from_secs(1), then_surprise },
            false => DetachHow::Surprise,
        };
        self.happens(&Event::Detach(id, address, how));
        // One that is refused is no reason.
        if let Some(Answer::Detach(Err(_))) = self.answers.get(&id.0) {
            self.slots.clone_from(&before);
        }
    }

    /// Somebody resets the guest.
    fn reset(&mut self) {
        self.requests += 1;
        self.happens(&Event::Reset(RequestId(self.requests - 1)));
    }

    /// The guest lets go of a slot, or does not.
    fn lets_go(&mut self, address: PciAddress, lets_go: bool) {
        let Some(slot) = self.slot(address) else { return };
        slot.goes |= slot.asked.is_some_and(|then_surprise| lets_go || then_surprise);
        let name = slot.functions[0];
        match lets_go {
            true => self.happens(&Event::LetGo(name)),
            false => self.happens(&Event::Kept(name, format!("{name} is kept"))),
        }
    }

    /// The host wants a device back, or it is lost.
    fn goes(&mut self, event: &Event, address: PciAddress) {
        if let Some(slot) = self.slot(address) {
            match event {
                Event::Lost(..) => slot.goes = true,
                _ => {
                    slot.asked = Some(true);
                    // One that has not come to the guest yet does not.
                    slot.goes |= !slot.came;
                }
            }
        }
        if matches!(event, Event::WantedBack(_)) && self.functions[&address] != Is::Free {
            self.wanted.insert(address);
        }
        self.errors.extend(event.loss().filter(|_| matches!(event, Event::Lost(..))));
        self.happens(event);
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

/// Most functions.
const MOST: usize = 6;

#[derive(Clone, Debug)]
enum Step {
    /// What was asked for is answered: well or not, by an earlier claim or not, without a reset or with one.
    Answer(bool, bool, bool),
    Stop,
    Attach(usize, usize),
    /// Orderly or not, and then by surprise or not.
    Detach(usize, bool, bool),
    LetsGo(usize, bool),
    Reset,
    Restarted,
    Wanted(usize),
    Lost(usize),
    Erred(usize),
    End(bool),
    /// Something that nobody was asked for is answered.
    Stray(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let device = 0..MOST;
    prop_oneof![
        40 => (prop::bool::weighted(0.9), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(well, covered, unreset)| Step::Answer(well, covered, unreset)),
        1 => Just(Step::Stop),
        4 => (device.clone(), 0..3usize).prop_map(|(device, count)| Step::Attach(device, count)),
        4 => (device.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(device, orderly, then_surprise)| Step::Detach(device, orderly, then_surprise)),
        4 => (device.clone(), prop::bool::weighted(0.7)).prop_map(|(device, well)| Step::LetsGo(device, well)),
        2 => Just(Step::Reset),
        1 => Just(Step::Restarted),
        2 => device.clone().prop_map(Step::Wanted),
        1 => device.clone().prop_map(Step::Lost),
        1 => device.clone().prop_map(Step::Erred),
        1 => any::<bool>().prop_map(Step::End),
        4 => (device, any::<bool>()).prop_map(|(device, well)| Step::Stray(device, well)),
    ]
}

fn stray(number: usize, well: bool) -> Vec<Event> {
    let (address, error) = (address(number), || "stray".to_owned());
    let request = AttachRequest { functions: vec![address], with_group: true, ..AttachRequest::default() };
    vec![
        Event::Explained(request, if well { Ok(()) } else { Err(Refused::Failed(error())) }),
        Event::Claimed(address, if well { Ok(address) } else { Err(error()) }),
        Event::Opened(address, if well { Ok(Backend::Group) } else { Err(error()) }),
        Event::Attached(address, if well { Ok(()) } else { Err(error()) }),
        Event::Inserted(address, if well { Ok(()) } else { Err(error()) }),
        Event::Plugged(address, if well { Ok(Attached::default()) } else { Err(error()) }),
        Event::Unplugged(address),
        Event::Booted(if well { Ok(()) } else { Err(error()) }),
        Event::Stopped(address, well),
        Event::Detached(address, if well { Ok(Detached::Reset) } else { Err(error()) }),
        Event::Closed(address),
        Event::Released(address, if well { Ok(()) } else { Err(error()) }),
        Event::MachineDropped,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::sweep::count(1024) as u32))]

    #[test]
    fn everything_is_undone_in_order_whatever_happens(
        counts in prop::collection::vec(1..3usize, 0..3),
        steps in prop::collection::vec(step(), 0..200),
        late in any::<bool>(),
    ) {
        let mut model = Model::new(&counts);
        if !late {
            model.happens(&Event::Start);
        }
        for step in steps {
            match step {
                Step::Answer(well, covered, unreset) => model.answer(well, covered, unreset),
                Step::Stop => {
                    model.may_end = true;
                    model.happens(&Event::Stop);
                }
                Step::Attach(first, count) => {
                    let functions: Vec<_> = (first..MOST).take(count).map(address).collect();
                    model.attach(&functions);
                }
                Step::Detach(number, orderly, then_surprise) => {
                    model.detach(address(number), orderly, then_surprise);
                }
                Step::LetsGo(number, lets_go) => model.lets_go(address(number), lets_go),
                Step::Reset => model.reset(),
                Step::Restarted if model.runs => model.happens(&Event::Restarted),
                Step::Restarted => {}
                // The devices are watched while the guest runs, and they are there.
                Step::Wanted(number) if model.runs => {
                    model.goes(&Event::WantedBack(address(number)), address(number));
                }
                Step::Wanted(_) => {}
                Step::Erred(number) => {
                    let error = UncorrectableError { severity: ErrorSeverity::Fatal, evidence: "SDES".into() };
                    model.happens(&Event::Erred(address(number), error));
                }
                Step::Lost(number) => {
                    model.goes(&Event::Lost(address(number), "gone".into()), address(number));
                }
                Step::End(well) => model.end(well),
                Step::Stray(number, well) => {
                    for event in stray(number, well) {
                        let answered = event.answers();
                        if answered != model.pending && answered != model.claiming.map(Action::Claim) {
                            let before = format!("{:?}", model.state);
                            model.happens(&event);
                            prop_assert_eq!(before, format!("{:?}", model.state));
                        }
                    }
                }
            }
        }
        // However far that came, it ends once all is answered: each function has 9 steps of which 3 may be needed twice.
        model.happens(&Event::Start);
        model.may_end = true;
        model.happens(&Event::Stop);
        let mut left = 12 * MOST + 5;
        while !model.state.is_over() {
            prop_assert!(model.due(false).is_some() || model.runs, "nothing is to be done, and it is not over");
            prop_assert!(left > 0, "it does not end: {:?}", model.done);
            left -= 1;
            if model.runs { model.end(true) } else { model.answer(true, false, false) }
        }
        prop_assert!(!model.machine && !model.runs);
        prop_assert!(model.functions.values().all(|is| *is == Is::Free), "{:?}", model.functions);
        model.errors.extend(model.claims.keys().map(|target| format!("release {target}")));
        // Whoever asks is answered.
        prop_assert_eq!(model.answers.len() as u64, model.requests);
        // No error hides another, what succeeded in the second try is none, and what is still claimed is reported.
        match model.state.outcome() {
            Ok(_) => prop_assert_eq!(model.errors, Vec::<String>::new()),
            Err(said) => {
                prop_assert!(!model.errors.is_empty(), "{:?}", said);
                let said = said.join("\n");
                for error in model.errors {
                    prop_assert!(said.contains(&error), "{} is not in {}", error, said);
                }
                prop_assert!(!said.contains("stray"), "{}", said);
            }
        }
    }
}

/// Answers everything well but what is in `fails`, and returns what was done, and how it ended.
fn live(
    counts: &[usize],
    happens: &[&dyn Fn(&mut Model)],
    fails: &[(Action, usize)],
) -> (Model, Result<u32, Vec<String>>) {
    let mut model = Model::new(counts);
    let mut fails = fails.to_vec();
    model.happens(&Event::Start);
    let mut happens = happens.iter();
    while !model.state.is_over() {
        if let Some(due) = model.due(false) {
            let fault = fails.iter_mut().find(|(action, times)| *action == due && *times > 0);
            let fails = fault.map(|(_, times)| *times -= 1).is_some();
            model.answer(!fails, false, false);
        } else if let Some(happens) = happens.next() {
            happens(&mut model);
        } else {
            model.may_end = true;
            model.end(true);
        }
    }
    let outcome = model.state.clone().outcome().map(|report| report.restarts);
    (model, outcome)
}

/// A sequence of actions in short.
fn short(actions: &[Action]) -> String {
    let one = |action: &Action| {
        let text = format!("{action:?}").replace("PciAddress", "");
        let name = text.split(['(', ' ']).next().unwrap_or_default().to_owned();
        let (Action::Claim(at)
        | Action::Open(at)
        | Action::Attach(at)
        | Action::Insert(at)
        | Action::Plug(at)
        | Action::Ask(at, _)
        | Action::Unask(at)
        | Action::Unplug(at)
        | Action::Stop(at)
        | Action::Detach(at)
        | Action::Close(at)
        | Action::Release(at)) = action
        else {
            return name;
        };
        format!("{name}:{}", at.device())
    };
    actions.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_order_of_an_end() {
    let [a, b] = [address(0), address(1)];
    const START: &str = "Boot Claim:0 Claim:1 Open:0 Attach:0 Open:1 Attach:1";
    let check = |events: &[Event], fails: &[(Action, usize)], done: &str, expect: Result<u32, &[&str]>| {
        let happens: Vec<_> = events
            .iter()
            .map(|event| {
                move |model: &mut Model| {
                    model.may_end = true;
                    model.happens(event);
                }
            })
            .collect();
        let happens: Vec<_> = happens.iter().map(|happens| happens as &dyn Fn(&mut Model)).collect();
        let (model, outcome) = live(&[1, 1], &happens, fails);
        assert_eq!(short(&model.done), done);
        match (&outcome, expect) {
            (Ok(got), Ok(expect)) => assert_eq!(*got, expect),
            (Err(said), Err(expect)) => {
                assert_eq!(said.len(), expect.len(), "{said:?}");
                assert!(said.iter().zip(expect).all(|(said, expect)| said.contains(expect)), "{said:?}");
            }
            _ => panic!("{outcome:?} instead of {expect:?}"),
        }
    };
    let orderly = "DropMachine Stop:0 Stop:1 Detach:1 Detach:0 Close:0 Close:1 Release:0 Release:1";
    let whole = |end: &str| format!("{START} {end}");
    // The guest ends by itself.
    check(&[], &[], &whole(orderly), Ok(3));
    // Somebody ends it.
    check(&[Event::Stop], &[], &whole(&format!("StopGuest {orderly}")), Ok(3));
    // A detach fails, and works when all else is released; or does not, and its claim is released all the same.
    let first = "DropMachine Stop:0 Stop:1 Detach:1 Detach:0 Close:0 Release:0";
    let again = whole(&format!("{first} Stop:1 Detach:1 Close:1 Release:1"));
    check(&[], &[(Action::Detach(b), 1)], &again, Ok(3));
    let kept = ["not everything could be released: detach 0000:65:01.0"];
    check(&[], &[(Action::Detach(b), 2)], &again, Err(&kept));
    // So does a release.
    let again = whole(&format!("{orderly} Release:0"));
    check(&[], &[(Action::Release(a), 1)], &again, Ok(3));
    let kept = ["not everything could be released: release 0000:65:00.0"];
    check(&[], &[(Action::Release(a), 2)], &again, Err(&kept));
    // The guest does not start, or a device does not come to it.
    check(&[], &[(Action::Boot, 1)], "Boot DropMachine", Err(&["boot"]));
    let early = "Boot Claim:0 StopGuest DropMachine";
    check(&[], &[(Action::Claim(a), 1)], early, Err(&["claim 0000:65:00.0"]));
    let claimed = "Boot Claim:0 Claim:1 StopGuest DropMachine Release:0";
    check(&[], &[(Action::Claim(b), 1)], claimed, Err(&["claim 0000:65:01.0"]));
    let one = "Boot Claim:0 Claim:1 Open:0 Attach:0 Open:1 StopGuest DropMachine Stop:0 Detach:0 Close:0 Release:0 Release:1";
    check(&[], &[(Action::Open(b), 1)], one, Err(&["open 0000:65:01.0"]));
    let both = whole(&format!("StopGuest {orderly}"));
    check(&[], &[(Action::Attach(b), 1)], &both, Err(&["attach 0000:65:01.0"]));
    // Neither hides the other.
    let both = [(Action::Detach(b), 2), (Action::Release(a), 2)];
    let again = whole(&format!("{first} Stop:1 Detach:1 Close:1 Release:0 Release:1"));
    let kept = ["released: detach 0000:65:01.0; release 0000:65:00.0"];
    check(&[], &both, &again, Err(&kept));
}

#[test]
fn devices_come_and_go_while_the_guest_runs() {
    const COMES: &str = "Explain Claim:4 Claim:5 Insert:4 Open:4 Open:5 Attach:4 Attach:5 Plug:4 Answer";
    const GOES: &str = "Unplug:4 Stop:4 Stop:5 Detach:5 Detach:4 Close:4 Close:5 Release:4 Release:5 Answer";
    let both = [address(4), address(5)];
    let attach = |model: &mut Model| model.attach(&both);
    let check = |happens: &[&dyn Fn(&mut Model)], fails: &[(Action, usize)], done: &str, answers: &[&str]| {
        let (model, outcome) = live(&[], happens, fails);
        assert_eq!(short(&model.done), format!("Boot {done} DropMachine"));
        let got: Vec<_> = model.answers.values().map(|answer| format!("{answer:?}")).collect();
        assert_eq!(got.len(), answers.len(), "{got:?}");
        assert!(got.iter().zip(answers).all(|(got, expect)| got.contains(expect)), "{got:?}");
        assert_eq!(outcome.ok(), Some(3));
    };
    let ask = |model: &mut Model| model.detach(address(5), true, false);
    let insist = |model: &mut Model| model.detach(address(5), true, true);
    let pull = |model: &mut Model| model.detach(address(4), false, false);
    let lets_go = |model: &mut Model| model.lets_go(address(4), true);
    let keeps = |model: &mut Model| model.lets_go(address(4), false);
    let wants = |model: &mut Model| model.goes(&Event::WantedBack(address(4)), address(4));
    const THERE: &str = "Attach(Ok(";
    let whole = |goes: &str| format!("{COMES} {goes}");
    check(&[&attach, &pull], &[], &whole(GOES), &[THERE, "Detach(Ok(Surprise))"]);
    check(&[&attach, &ask, &lets_go], &[], &whole(&format!("Ask:4 {GOES}")), &[THERE, "Detach(Ok(Orderly))"]);
    check(
        &[&attach, &insist, &keeps],
        &[],
        &whole(&format!("Ask:4 {GOES}")),
        &[THERE, "Detach(Ok(Surprise))"],
    );
    let kept = "Detach(Err(Failed(\"0000:65:04.0 is kept\")))";
    let then = whole(&format!("Ask:4 Unask:4 Answer {GOES}"));
    check(&[&attach, &ask, &keeps, &pull], &[], &then, &[THERE, kept, "Detach(Ok(Surprise))"]);
    // Whoever is asked for it already is, and may be pressed.
    let then = whole(&format!("Ask:4 Answer {GOES} Answer"));
    let busy = "Detach(Err(Conflict(\"the guest is asked";
    check(
        &[&attach, &ask, &ask, &pull],
        &[],
        &then,
        &[THERE, "Detach(Ok(Surprise))", busy, "Detach(Ok(Surprise))"],
    );
    // The host wants it back; who attaches it hears of it no more. One function of the device is enough.
    let goes = GOES.replace("Detach:5 Detach:4", "Detach:4 Detach:5").replace(" Answer", "");
    check(&[&attach, &wants, &keeps], &[], &whole(&format!("Ask:4 {goes}")), &[THERE]);
    // It can come again.
    let again = whole(&format!("{GOES} {COMES} {GOES}"));
    let answers = [THERE, "Detach(Ok(Surprise))", THERE, "Detach(Ok(Surprise))"];
    check(&[&attach, &pull, &attach, &pull], &[], &again, &answers);
    // What fails turns it back, and it alone.
    let failed = |what: &str| format!("Attach(Err(Failed(\"{what}");
    let request = AttachRequest { functions: both.to_vec(), ..AttachRequest::default() };
    check(&[&attach], &[(Action::Explain(request), 1)], "Explain Answer", &["Attach(Err(Blocked"]);
    let claim = "Explain Claim:4 Claim:5 Release:4 Answer";
    check(&[&attach], &[(Action::Claim(both[1]), 1)], claim, &[&failed("claim 0000:65:05.0")]);
    let insert = "Explain Claim:4 Claim:5 Insert:4 Release:4 Release:5 Answer";
    check(&[&attach], &[(Action::Insert(both[0]), 1)], insert, &[&failed("insert 0000:65:04.0")]);
    let open = "Explain Claim:4 Claim:5 Insert:4 Open:4 Open:5 Unplug:4 Close:4 Release:4 Release:5 Answer";
    check(&[&attach], &[(Action::Open(both[1]), 1)], open, &[&failed("open 0000:65:05.0")]);
    let plug = whole(GOES).replace("Plug:4 Answer", "Plug:4");
    check(&[&attach], &[(Action::Plug(both[0]), 1)], &plug, &[&failed("plug 0000:65:04.0")]);
    // What is detached on its way turns back, from wherever it has come to.
    let pulled = |until: fn(&Action) -> bool, done: &str, how: &str| {
        let on_its_way = |model: &mut Model| {
            model.attach(&both);
            while !model.due(false).as_ref().is_some_and(until) {
                model.answer(true, false, false);
            }
            ask(model);
        };
        let attach = "Attach(Err(Conflict(\"0000:65:05.0 was detached before";
        check(&[&on_its_way], &[], done, &[attach, &format!("Detach(Ok({how}))")]);
    };
    pulled(|action| matches!(action, Action::Explain(_)), "Explain Answer Answer", "Orderly");
    pulled(|action| matches!(action, Action::Claim(_)), "Explain Claim:4 Answer Release:4 Answer", "Orderly");
    let attached = "Explain Claim:4 Claim:5 Insert:4 Open:4 Open:5 Attach:4 Answer Unplug:4 Stop:4 Detach:4 Close:5 Close:4 \
                    Release:4 Release:5 Answer";
    pulled(|action| matches!(action, Action::Attach(_)), attached, "Orderly");
    pulled(|action| matches!(action, Action::Plug(_)), &whole(GOES), "Surprise");
    // A step that ends early for it ends nothing else.
    let turned_back = |until: fn(&Action) -> bool, done: &str| {
        let on_its_way = |model: &mut Model| {
            model.attach(&both);
            while !model.due(false).as_ref().is_some_and(until) {
                model.answer(true, false, false);
            }
            ask(model);
            model.answer(false, true, false);
        };
        let attach = "Attach(Err(Conflict(\"0000:65:05.0 was detached before";
        check(&[&on_its_way], &[], done, &[attach, "Detach(Ok(Orderly))"]);
    };
    turned_back(|action| matches!(action, Action::Claim(_)), "Explain Claim:4 Answer Answer");
    turned_back(|action| matches!(action, Action::Attach(_)), attached);
    // One that is named twice comes once.
    let doubled = |model: &mut Model| model.attach(&[both[0], both[1], both[0]]);
    check(&[&doubled, &pull], &[], &whole(GOES), &[THERE, "Detach(Ok(Surprise))"]);
    // There is no such device, or it is there already.
    check(&[&pull], &[], "Answer", &["Detach(Err(NotFound(\"the guest has no 0000:65:04.0"]);
    let twice = whole(&format!("Answer {GOES}"));
    check(&[&attach, &attach, &pull], &[], &twice, &[THERE, "Attach(Err(Conflict(", "Detach(Ok(Surprise))"]);
}

#[test]
fn a_lost_device_goes_and_the_guest_runs_on() {
    let lost = |model: &mut Model| model.goes(&Event::Lost(address(0), "gone".into()), address(0));
    let (model, outcome) = live(&[1, 1], &[&lost], &[(Action::Detach(address(0)), 2)]);
    let goes = "Unplug:0 Stop:0 Detach:0 Stop:0 Detach:0 Close:0 Release:0";
    let ends = "DropMachine Stop:1 Detach:1 Close:1 Release:1";
    let starts = "Boot Claim:0 Claim:1 Open:0 Attach:0 Open:1 Attach:1";
    assert_eq!(short(&model.done), format!("{starts} {goes} {ends}"));
    let said = outcome.expect_err("it is reported");
    assert!(said[0].contains("was lost while") && said[1].contains("detach 0000:65:00.0"), "{said:?}");
}

#[test]
fn a_claim_that_waits_delays_no_removal() {
    let [there, comes] = [address(0), address(4)];
    let check = |takes: &dyn Fn(&mut Model), goes: &str| {
        let attach = |model: &mut Model| {
            model.attach(&[comes]);
            while model.due(false) != Some(Action::Claim(comes)) {
                model.answer(true, false, false);
            }
            takes(model);
            while model.pending.is_some() {
                model.answer(true, false, false);
            }
            assert_eq!(model.due(false), Some(Action::Claim(comes)));
        };
        let (model, _) = live(&[1], &[&attach], &[]);
        let done = short(&model.done);
        let expect =
            format!("Boot Claim:0 Open:0 Attach:0 Explain Claim:4 {goes} Insert:4 Open:4 Attach:4 Plug:4");
        assert!(done.starts_with(&expect), "{done}");
    };
    const GOES: &str = "Unplug:0 Stop:0 Detach:0 Close:0 Release:0";
    check(&|model| model.goes(&Event::Lost(there, "gone".into()), there), GOES);
    check(&|model| model.detach(there, false, false), &format!("{GOES} Answer"));
    let wanted = |model: &mut Model| {
        model.goes(&Event::WantedBack(there), there);
        model.lets_go(there, true);
    };
    check(&wanted, &format!("Ask:0 {GOES}"));
}

#[test]
fn what_waits_at_the_end_is_answered() {
    let check = |happens: &[&dyn Fn(&mut Model)], answers: &[&str]| {
        let (model, _) = live(&[1], happens, &[]);
        let got: Vec<_> = model.answers.values().map(|answer| format!("{answer:?}")).collect();
        assert!(got.iter().zip(answers).all(|(got, expect)| got.contains(expect)), "{got:?}");
        assert_eq!(got.len(), answers.len());
    };
    let ask = |model: &mut Model| model.detach(address(0), true, false);
    let stop = |model: &mut Model| {
        model.may_end = true;
        model.happens(&Event::Stop);
    };
    let attach = |model: &mut Model| model.attach(&[address(3)]);
    let both = |model: &mut Model| {
        model.attach(&[address(3)]);
        stop(model);
    };
    let restarts = |model: &mut Model| model.happens(&Event::Restarted);
    let resets = |model: &mut Model| {
        model.reset();
        let end = RunReport { end: End::Reset, restarts: 0, exits: ExitCounts::default() };
        model.runs = false;
        model.happens(&Event::Ended(Ok(end)));
    };
    let dies = |model: &mut Model| {
        model.reset();
        model.end(false);
    };
    let late = "Reset(Err(Conflict(\"the guest ended before it was reset";
    check(&[&Model::reset, &Model::reset, &restarts, &Model::reset], &["Reset(Ok", "Reset(Ok", late]);
    check(&[&resets], &["Reset(Ok"]);
    check(&[&dies], &["Reset(Err(Failed(\"run"]);
    check(&[&stop, &Model::reset], &["Reset(Err(Conflict(\"the guest is ending"]);
    check(&[&ask], &["Detach(Err(Conflict(\"the guest ended"]);
    check(&[&both], &["Attach(Err(Conflict(\"the guest ended before"]);
    check(&[&stop, &attach, &ask], &["Attach(Err(Conflict(\"the guest is ending", "Detach(Err(Conflict("]);
}

#[test]
fn why_the_guest_and_its_device_ended_is_told_once() {
    let (device, gone) = (address(0), || "the VMM is gone".to_owned());
    let happens = [
        Event::Start,
        Event::Booted(Ok(())),
        Event::Claimed(device, Ok(device)),
        Event::Opened(device, Err(gone())),
        Event::Ended(Err(gone())),
    ];
    let state = State::new(&[vec![device]]);
    let state = happens.iter().fold(state, |state, event| state.step(event).0);
    assert_eq!(state.outcome().expect_err("it failed"), [gone()]);
}
