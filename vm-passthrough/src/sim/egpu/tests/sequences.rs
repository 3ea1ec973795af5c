//! Random sequences of faults and of what operators do. Whatever happens: each call ends, no state lies, no user loses it without
//! need, and all is released.

use super::*;
use crate::egpu::{Drain, Enclosure as _, Fault, Rung};

/// How many sequences, and how many in a part.
const RUNS: [u64; 2] = [10_000, 2500];
/// The most actions that follow from one call, and the longest that they take: three rounds on the ladder, and a drain.
const ACTIONS: u64 = 40;
const LONGEST: Duration = Duration::from_secs(20 * 60);

/// What an operator does, or a clock.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// A look at it after so many milliseconds.
    Poll(u64),
    Connect,
    Disconnect {
        force: bool,
    },
    /// The manager's process is restarted, and knows nothing any more.
    Restart,
}

/// What happens in a run.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    faults: Vec<(Duration, SimEgpuFault)>,
    steps: Vec<Step>,
    /// Whether it is unplugged in the end, instead of disconnected by force.
    unplug: bool,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let faults = (0..random.below(9)).map(|_| {
            let time = Duration::from_millis(random.below(60_000));
            (time, fault(&mut random))
        });
        let faults = faults.collect();
        let steps = (0..10 + random.below(20)).map(|_| match random.below(20) {
            0 | 1 => Step::Connect,
            2 => Step::Disconnect { force: false },
            3 => Step::Disconnect { force: true },
            4 => Step::Restart,
            _ => Step::Poll(random.below(5000)),
        });
        let steps = [Step::Poll(0), Step::Connect].into_iter().chain(steps).collect();
        Self { seed, faults, steps, unplug: random.below(2) == 0 }
    }

    /// Runs it, and answers what was wrong.
    fn run(&self) -> Result<(), String> {
        let mut rig = Rig::new(self.seed, &SimScript::new(self.faults.clone()));
        for (at, step) in self.steps.iter().enumerate() {
            take(&mut rig, *step).map_err(|wrong| format!("step {at}, {step:?}: {wrong}"))?;
        }
        let end = self.end(&mut rig);
        end.map_err(|wrong| format!("in the end: {wrong} ({:?}, {:?})", rig.state(), rig.manager.failure()))
    }

    /// All is released by force, and comes back when asked for.
    fn end(&self, rig: &mut Rig) -> Result<(), String> {
        // All faults have happened, and a manager that was restarted has seen them.
        let last = self.faults.iter().map(|(time, _)| *time).max().unwrap_or_default();
        let left = last.saturating_sub(rig.egpu().now()).as_millis() as u64;
        take(rig, Step::Poll(left))?;
        let ended = match self.unplug {
            true => {
                rig.egpu().inject(SimEgpuFault::Unplug);
                State::Absent
            }
            false => {
                take(rig, Step::Disconnect { force: true })?;
                State::Disconnected
            }
        };
        take(rig, Step::Poll(1000))?;
        // What is broken for good may keep a tunnel, which then is said.
        rig.egpu().inject(SimEgpuFault::Heal);
        take(rig, Step::Poll(1000))?;
        if !self.unplug && rig.state() != ended {
            take(rig, Step::Disconnect { force: true })?;
        }
        let is_absent = !self.unplug && rig.state() == State::Absent;
        let resources = rig.egpu().resources();
        let is_released = resources == Resources::default() || rig.is_new;
        if (rig.state() != ended && !is_absent) || resources.tunnels > 0 || !is_released {
            return Err(format!("not released: {resources:?}"));
        }
        if rig.manager.leftover().is_some() {
            return Err(format!("not settled: {:?}", rig.manager.leftover()));
        }
        rig.egpu().inject(SimEgpuFault::Unplug);
        rig.egpu().inject(SimEgpuFault::Plug);
        rig.egpu().inject(SimEgpuFault::Temperature(30_000));
        // That it was gone, and that it is there.
        take(rig, Step::Poll(0))?;
        take(rig, Step::Poll(0))?;
        take(rig, Step::Connect)?;
        if rig.state() != State::Ready {
            return Err("it does not come back".into());
        }
        take(rig, Step::Disconnect { force: true })?;
        match rig.egpu().resources() {
            left if left == Resources::default() && rig.state() == State::Disconnected => Ok(()),
            left => Err(format!("not released at last: {left:?}")),
        }
    }

    /// The case with as little in it as still goes wrong.
    fn minimal(mut self, wrong: &str) -> Self {
        let kind = |wrong: &str| wrong.split([':', '{', '(']).take(2).last().unwrap_or_default().to_owned();
        let is_same = |case: &Self| case.run().is_err_and(|other| kind(&other) == kind(wrong));
        loop {
            let smaller = (0..self.faults.len()).map(|at| {
                let mut case = self.clone();
                case.faults.remove(at);
                case
            });
            let shorter = (0..self.steps.len()).map(|at| {
                let mut case = self.clone();
                case.steps.remove(at);
                case
            });
            match smaller.chain(shorter).find(is_same) {
                Some(case) => self = case,
                None => return self,
            }
        }
    }
}

fn fault(random: &mut SplitMix64) -> SimEgpuFault {
    let times = |random: &mut SplitMix64| match random.below(4) {
        0 => None,
        times => Some(times as u32),
    };
    let one_of = |random: &mut SplitMix64, all: &[SimEgpuFault]| all[random.below(all.len() as u64) as usize];
    let times = times(random);
    let time = Duration::from_millis(random.below(20_000));
    let cures = [Cure::Soft, Cure::Hard, Cure::Reconnect, Cure::Unplug].map(SimEgpuFault::Hang);
    let coming = [Coming::Nothing, Coming::NoGpu, Coming::Other, Coming::Endless, Coming::NoRoom]
        .map(|coming| SimEgpuFault::Enumeration(coming, times));
    let steps = [
        SimStep::Observe,
        SimStep::Authorise,
        SimStep::Detach,
        SimStep::Release,
        SimStep::Deauthorise,
        SimStep::Settle,
    ]
    .map(|step| SimEgpuFault::Fails(step, times));
    let rungs = [Rung::SoftReset, Rung::HardReset, Rung::Reconnect];
    let resets = rungs
        .map(|rung| [Ending::Fails, Ending::Lies].map(|ending| SimEgpuFault::Reset(rung, ending, times)));
    match random.below(25) {
        0..3 => SimEgpuFault::Unplug,
        3..5 => SimEgpuFault::Plug,
        5..8 => one_of(random, &cures),
        8..10 => SimEgpuFault::Work(Some(time)),
        10 => SimEgpuFault::Work(None),
        11 => one_of(random, &[SimEgpuFault::Stall, SimEgpuFault::GuestLeaves, SimEgpuFault::Heal]),
        12 => SimEgpuFault::GuestTakes,
        13 => SimEgpuFault::GuestRefuses(times),
        14 => SimEgpuFault::Temperature(60_000 + random.below(60_000) as i32),
        15 => one_of(random, &[SimEgpuFault::Fan(false), SimEgpuFault::Sensor(false)]),
        16 => SimEgpuFault::BitErrors([1e-6, 1e-4, 1e-3, 0.1][random.below(4) as usize]),
        17 => one_of(random, &[SimEgpuFault::TunnelDrops, SimEgpuFault::TunnelComes]),
        18 => one_of(random, &[true, false].map(|drops| SimEgpuFault::Suspend { drops })),
        19 => one_of(random, &coming),
        20 | 21 => one_of(random, &steps),
        22 => one_of(random, resets.as_flattened()),
        23 => SimEgpuFault::Corruption([1e-3, 0.1, 0.5][random.below(3) as usize]),
        _ => SimEgpuFault::DriverSticks(time),
    }
}

/// Takes a step, and says what of it is wrong.
fn take(rig: &mut Rig, step: Step) -> Result<(), String> {
    rig.been.clear();
    if let Step::Poll(after) = step {
        rig.egpu().advance(Duration::from_millis(after));
    }
    let egpu = rig.egpu();
    let (actions, now, cuts) = (egpu.actions(), egpu.now(), egpu.cuts().len());
    let is_seen = match step {
        Step::Poll(_) => rig.poll(Duration::ZERO),
        Step::Connect => {
            rig.take(Event::Connect);
            // It is asked by nobody else.
            rig.been.contains(&State::Verifying)
        }
        Step::Disconnect { force } => {
            rig.take(Event::Disconnect { force });
            false
        }
        Step::Restart => {
            let mut egpu = rig.egpu().clone();
            egpu.forget();
            rig.manager = Manager::new(egpu, LIMITS);
            rig.is_new = true;
            false
        }
    };
    let state = rig.state();
    // Its tunnel was read back to be down.
    let is_drained = rig.been.iter().any(|state| matches!(state, State::Draining(_)));
    let is_forced = step == Step::Disconnect { force: true } || rig.been.iter().copied().any(is_last_resort);
    rig.is_new &= !rig.been.contains(&State::Verifying);
    let been = rig.been();
    let leftover = rig.is_new || rig.manager.leftover().is_some();
    let egpu = rig.egpu();
    let resources = egpu.resources();
    let celsius = egpu.temperature().unwrap_or_default();
    let wrong = |what: String| Err(format!("{what}: {state:?} after {been}, {resources:?}"));
    if !state.is_settled() {
        return wrong("it waits for something".into());
    }
    if egpu.actions() - actions > ACTIONS || egpu.now() - now > LONGEST {
        return wrong(format!("{} actions in {:?}", egpu.actions() - actions, egpu.now() - now));
    }
    if let [cut, ..] = &egpu.cuts()[cuts..]
        && !is_forced
    {
        return wrong(format!("{cut:?}"));
    }
    let is_free = Resources { tunnels: 0, ..resources } == Resources::default();
    match state {
        State::Ready | State::InUse if is_seen && !egpu.is_well() => wrong("it is not well".into()),
        State::Ready | State::InUse
            if matches!(step, Step::Poll(_)) && is_seen && celsius >= LIMITS.hottest =>
        {
            wrong("it is too hot".into())
        }
        State::Failed(Fault::Overheated | Fault::Unrecovered) if is_drained && resources.tunnels > 0 => {
            wrong("it has a tunnel still".into())
        }
        State::Disconnected | State::Absent
            if (is_seen || is_drained) && (resources.tunnels > 0 || !(is_free || leftover)) =>
        {
            wrong("it has something still".into())
        }
        _ => Ok(()),
    }
}

/// Whether users may lose it, though nobody asked for that: it is dead, or burns.
fn is_last_resort(state: State) -> bool {
    match state {
        State::Recovering(_) => true,
        State::Draining(Drain { then, .. }) => matches!(then, Some(Fault::Unrecovered | Fault::Overheated)),
        _ => false,
    }
}

#[test]
fn whatever_happens_it_ends_well() {
    // Others are tried by a seed to begin with, and one is tried again by its own.
    let number = |name: &str| std::env::var(name).ok().and_then(|seed| seed.parse().ok());
    let (own, part): (Option<u64>, Option<u64>) = (number("SIM_EGPU_SEED"), number("SWEEP_SEED"));
    let runs = RUNS[usize::from(own.is_none() && part.is_some())];
    let first = own.or(part.map(|part| part % RUNS[0])).unwrap_or(0);
    for seed in first..first.saturating_add(runs) {
        let case = Case::random(seed);
        if let Err(wrong) = case.run() {
            let minimal = case.minimal(&wrong);
            let now = minimal.run();
            panic!(
                "SIM_EGPU_SEED={seed}: {wrong}\nas little as still goes wrong ({now:?}):\n{}steps {:?}, unplug {}",
                SimScript::new(minimal.faults.clone()),
                minimal.steps,
                minimal.unplug
            );
        }
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..50 {
        let run = || {
            let case = Case::random(seed);
            let mut rig = Rig::new(seed, &SimScript::new(case.faults));
            let been: Vec<String> = case
                .steps
                .into_iter()
                .map(|step| {
                    let _ = take(&mut rig, step);
                    format!("{:?} {:?} {:?}", rig.state(), rig.egpu().now(), rig.egpu().heat.millidegrees())
                })
                .collect();
            been
        };
        assert_eq!(run(), run());
    }
}
