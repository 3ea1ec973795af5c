//! The simulated eGPU: what it consists of, how time passes, and what faults do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::outcomes::Outcomes;
use super::{
    Carried, Coming, Cure, Ending, SimEgpuFault, SimHeat, SimLink, SimScript, SimStep, SplitMix64, Times,
};
use crate::PciAddress;
use crate::egpu::{Action, EgpuError, Rung};
use crate::pci::PciIds;
use crate::usb4::Route;

/// Where its enclosure is connected.
pub(super) const ROUTE: Route = Route { domain: 0, path: 1 };
/// How long after its tunnel a function comes, and the next one.
const COMES: (Duration, Duration) = (Duration::from_millis(800), Duration::from_millis(50));
/// How often functions come and go where that never ends, and for how long after all: longer than any wait.
const ENDLESS: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(120));

/// Where its functions are.
const AT: [PciAddress; 2] = match (PciAddress::new(0, 4, 0, 0), PciAddress::new(0, 4, 0, 1)) {
    (Some(gpu), Some(audio)) => [gpu, audio],
    _ => panic!("no addresses"),
};
const GPU: PciIds = ids(0x2684, 0x16f3);
const OTHER_GPU: PciIds = ids(0x2704, 0x16f3);
const AUDIO: PciIds = ids(0x22ba, 0x16f3);

const fn ids(device: u16, subsystem_device: u16) -> PciIds {
    PciIds { vendor: 0x10de, device, subsystem_vendor: 0x10de, subsystem_device, revision: 0xa1 }
}

/// An eGPU of a model. Clones go their own ways from there on.
#[derive(Clone, Debug)]
pub struct SimEgpu {
    /// Its link.
    pub link: SimLink,
    /// Its heat.
    pub heat: SimHeat,
    pub(super) random: SplitMix64,
    pub(super) now: Duration,
    script: VecDeque<(Duration, SimEgpuFault)>,

    pub(super) is_plugged: bool,
    /// How often it was plugged in.
    pub(super) plugs: u64,
    pub(super) is_tunnelled: bool,
    /// The functions that the host has, and those that come next.
    pub(super) functions: Vec<Function>,
    arriving: VecDeque<(Duration, Function)>,
    /// When a function last came or went.
    pub(super) changed: Duration,
    /// Until when functions come and go.
    endless: Duration,
    hang: Option<Cure>,
    pub(super) is_asleep: bool,

    /// What was found when its functions came.
    pub(super) expected: Vec<(PciAddress, PciIds)>,
    pub(super) jobs: Vec<Job>,
    pub(super) has_guest: bool,
    pub(super) claims: BTreeSet<PciAddress>,

    pub(super) has_sensor: bool,
    /// Until when its driver does not let go of it.
    stuck: Duration,
    pub(super) steps: BTreeMap<&'static str, Outcomes<Ending>>,
    coming: Outcomes<Coming>,

    /// Users that the last action ended.
    pub(super) ended: Option<String>,
    pub(super) actions: u64,
    pub(super) cuts: Vec<Cut>,
}

#[derive(Clone, Debug)]
pub(super) struct Function {
    pub(super) address: PciAddress,
    pub(super) ids: PciIds,
    pub(super) driver: Option<Driver>,
    pub(super) has_bars: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    Native,
    Vfio,
}

/// Work of the host that runs on it.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) number: u64,
    ends: Option<Duration>,
}

/// What is taken of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Tunnels, 0 or 1.
    pub tunnels: usize,
    /// PCI functions that the host has of it.
    pub functions: usize,
    /// Those that are bound to a driver.
    pub bindings: usize,
    /// Those that are claimed for a guest.
    pub claims: usize,
    /// Work of the host that runs on it, and guests that have it.
    pub work: usize,
}

/// A user that lost an eGPU by an action, not by a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The action.
    pub action: Action,
    /// The user.
    pub user: String,
}

impl SimEgpu {
    /// One that is plugged in, without a tunnel; the faults that the script has at its start have happened.
    pub fn new(seed: u64, script: &SimScript) -> Self {
        let mut egpu = Self {
            link: SimLink::default(),
            heat: SimHeat::default(),
            random: SplitMix64::new(seed),
            now: Duration::ZERO,
            script: script.faults().iter().copied().collect(),
            is_plugged: true,
            plugs: 1,
            is_tunnelled: false,
            functions: Vec::new(),
            arriving: VecDeque::new(),
            changed: Duration::ZERO,
            endless: Duration::ZERO,
            hang: None,
            is_asleep: false,
            expected: Vec::new(),
            jobs: Vec::new(),
            has_guest: false,
            claims: BTreeSet::new(),
            has_sensor: true,
            stuck: Duration::ZERO,
            steps: BTreeMap::new(),
            coming: Outcomes::default(),
            ended: None,
            actions: 0,
            cuts: Vec::new(),
        };
        egpu.advance(Duration::ZERO);
        egpu
    }

    /// Forgets what was found of it, as a manager does that is started anew.
    pub fn forget(&mut self) {
        self.expected.clear();
    }

    /// Virtual time since it was made.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Lets time pass.
    pub fn advance(&mut self, time: Duration) {
        self.advance_to(self.now.saturating_add(time));
    }

    fn advance_to(&mut self, until: Duration) {
        while let Some(next) = self.next_event().filter(|&next| next <= until) {
            self.pass(next.max(self.now));
            self.happen();
        }
        self.pass(until.max(self.now));
    }

    /// Time alone.
    fn pass(&mut self, until: Duration) {
        let is_busy = !self.jobs.is_empty() || self.has_guest;
        self.heat.run(until - self.now, self.is_plugged, is_busy);
        self.now = until;
    }

    /// When something happens by itself next.
    fn next_event(&self) -> Option<Duration> {
        let fault = self.script.front().map(|(time, _)| *time);
        let arrival = self.arriving.front().map(|(time, _)| *time);
        let work = self.jobs.iter().filter_map(|job| job.ends).min();
        let lingers = !self.is_tunnelled && !self.functions.is_empty();
        let unstuck = lingers.then_some(self.stuck);
        let endless = (self.now < self.endless).then(|| self.changed + ENDLESS.0);
        [fault, arrival, work, unstuck, endless].into_iter().flatten().min()
    }

    /// What happens by itself now.
    fn happen(&mut self) {
        let now = self.now;
        let is_due = |time: Duration| time <= now;
        self.jobs.retain(|job| !job.ends.is_some_and(is_due));
        while let Some((_, function)) = self.arriving.pop_front_if(|(time, _)| is_due(*time)) {
            self.functions.push(function);
            self.changed = now;
        }
        if now < self.endless && is_due(self.changed + ENDLESS.0) {
            match self.functions.len() {
                0 => self.functions.push(Function::new(AT[1], AUDIO, true)),
                _ => self.functions.clear(),
            }
            self.changed = now;
        }
        if !self.is_tunnelled && is_due(self.stuck) {
            self.functions.clear();
        }
        while let Some((_, fault)) = self.script.pop_front_if(|(time, _)| is_due(*time)) {
            self.inject(fault);
        }
    }

    /// Waits until `is_so`, for a deadline at most; whether it is so then. `quiet` is how long functions must have been the same.
    pub(super) fn wait(
        &mut self,
        deadline: Duration,
        quiet: Duration,
        is_so: impl Fn(&Self) -> bool,
    ) -> bool {
        let until = self.now.saturating_add(deadline);
        while !is_so(self) {
            if self.now >= until {
                return false;
            }
            let settled = Some(self.changed.saturating_add(quiet)).filter(|&time| time > self.now);
            let next = self.next_event().into_iter().chain(settled).min().unwrap_or(until);
            self.advance_to(next.clamp(self.now, until));
        }
        true
    }

    /// Makes a fault happen now.
    pub fn inject(&mut self, fault: SimEgpuFault) {
        match fault {
            SimEgpuFault::Plug => {
                self.plugs += u64::from(!self.is_plugged);
                self.is_plugged = true;
            }
            SimEgpuFault::Unplug => {
                self.lose_tunnel();
                self.is_plugged = false;
                self.hang = None;
            }
            SimEgpuFault::Hang(cure) if self.is_plugged => self.hang = self.hang.max(Some(cure)),
            SimEgpuFault::Work(time) if self.can_be_used() && !self.has_guest => {
                self.is_asleep = false;
                let number = self.random.below(1 << 20);
                self.jobs.push(Job { number, ends: time.map(|time| self.now.saturating_add(time)) });
            }
            SimEgpuFault::Stall => self.jobs.iter_mut().for_each(|job| job.ends = None),
            SimEgpuFault::GuestTakes if self.can_be_used() && self.jobs.is_empty() => {
                self.is_asleep = false;
                self.has_guest = true;
                self.claims = self.functions.iter().map(|function| function.address).collect();
                self.set_driver(Driver::Vfio);
            }
            SimEgpuFault::GuestLeaves if self.has_guest => self.return_from_guest(),
            SimEgpuFault::GuestRefuses(times) => self.outcome_of("guest", Ending::Fails, times),
            SimEgpuFault::Temperature(celsius) => self.heat.set(celsius),
            SimEgpuFault::Fan(works) => self.heat.fan = works,
            SimEgpuFault::Sensor(works) => self.has_sensor = works,
            SimEgpuFault::BitErrors(chance) => self.link.bit_errors = chance,
            SimEgpuFault::Corruption(chance) => self.link.corruption = chance,
            SimEgpuFault::TunnelDrops => self.lose_tunnel(),
            SimEgpuFault::TunnelComes if self.is_plugged && !self.is_tunnelled => self.build_tunnel(),
            SimEgpuFault::Suspend { drops } if self.can_be_used() && self.users().is_empty() => {
                if drops {
                    self.lose_functions();
                } else {
                    self.is_asleep = true;
                }
            }
            SimEgpuFault::Enumeration(coming, times) => self.coming.push(coming, times),
            SimEgpuFault::Fails(step, times) => self.outcome_of(name(step), Ending::Fails, times),
            SimEgpuFault::Reset(rung, ending, times) => self.outcome_of(reset(rung), ending, times),
            SimEgpuFault::DriverSticks(time) => self.stuck = self.now.saturating_add(time),
            SimEgpuFault::Heal => self.heal(),
            SimEgpuFault::Hang(_)
            | SimEgpuFault::Work(_)
            | SimEgpuFault::GuestTakes
            | SimEgpuFault::GuestLeaves
            | SimEgpuFault::TunnelComes
            | SimEgpuFault::Suspend { .. } => {}
        }
    }

    fn heal(&mut self) {
        self.hang = None;
        self.steps.clear();
        self.coming = Outcomes::default();
        (self.link.bit_errors, self.link.corruption) = (0.0, 0.0);
        (self.heat.fan, self.has_sensor) = (true, true);
        self.stuck = self.now;
        self.endless = self.now;
        self.functions.iter_mut().for_each(|function| function.has_bars = true);
        if !self.is_tunnelled {
            self.functions.clear();
        }
    }

    fn outcome_of(&mut self, what: &'static str, ending: Ending, times: Times) {
        self.steps.entry(what).or_default().push(ending, times);
    }

    /// How a step ends this time.
    pub(super) fn ending(&mut self, what: &'static str) -> Ending {
        self.steps.get_mut(what).and_then(Outcomes::take).unwrap_or(Ending::Works)
    }

    /// PCIe is tunnelled to it, and its functions come.
    pub(super) fn build_tunnel(&mut self) {
        self.is_tunnelled = true;
        self.is_asleep = false;
        self.changed = self.now;
        // Those that a driver did not let go of are of no use to anyone.
        self.functions.clear();
        self.cure(Rung::Reconnect);
        let coming = self.coming.take().unwrap_or(Coming::Works);
        self.endless = if coming == Coming::Endless { self.now + ENDLESS.1 } else { self.now };
        let has_bars = coming != Coming::NoRoom;
        let gpu = match coming {
            Coming::Works | Coming::NoRoom => Some(GPU),
            Coming::Other => Some(OTHER_GPU),
            Coming::Nothing | Coming::NoGpu | Coming::Endless => None,
        };
        let audio = (!matches!(coming, Coming::Nothing | Coming::Endless)).then_some(AUDIO);
        let functions = AT.into_iter().zip([gpu, audio]);
        let functions = functions.filter_map(|(at, ids)| Some(Function::new(at, ids?, has_bars)));
        let times = [self.now + COMES.0, self.now + COMES.0 + COMES.1];
        self.arriving = times.into_iter().zip(functions).collect();
    }

    /// Its tunnel is not there any more.
    pub(super) fn lose_tunnel(&mut self) {
        self.is_tunnelled = false;
        self.endless = self.now;
        self.lose_functions();
    }

    /// Its functions are gone, unless a driver does not let go of them, and so are their users.
    fn lose_functions(&mut self) {
        self.is_asleep = false;
        self.arriving.clear();
        self.jobs.clear();
        self.has_guest = false;
        self.changed = self.now;
        if self.is_tunnelled || !self.is_stuck() {
            self.functions.clear();
        }
    }

    /// What a reset brings back.
    pub(super) fn cure(&mut self, by: Rung) {
        let strength = match by {
            Rung::SoftReset => Cure::Soft,
            Rung::HardReset => Cure::Hard,
            Rung::Reconnect => Cure::Reconnect,
        };
        self.hang = self.hang.filter(|&cure| cure > strength);
    }

    pub(super) fn return_from_guest(&mut self) {
        self.has_guest = false;
        self.claims.clear();
        self.set_driver(Driver::Native);
    }

    fn set_driver(&mut self, driver: Driver) {
        self.functions.iter_mut().for_each(|function| function.driver = Some(driver));
    }

    /// Whether a driver does not let go of it, which matters only where one has it.
    pub(super) fn is_stuck(&self) -> bool {
        self.now < self.stuck && self.functions.iter().any(|function| function.driver.is_some())
    }

    /// Whether somebody could begin to use it: its drivers have all that was found of it, and it does something.
    fn can_be_used(&self) -> bool {
        self.hang.is_none()
            && self.is_tunnelled
            && !self.has_guest
            && self.functions.iter().any(|function| function.ids.device != AUDIO.device)
            && self.functions.iter().all(|function| function.driver == Some(Driver::Native))
    }

    /// Whether a function would answer if it were asked now.
    pub fn answers(&self, address: PciAddress) -> bool {
        self.hang.is_none()
            && self.is_tunnelled
            && self.functions.iter().any(|function| function.address == address)
    }

    /// Whether it hangs.
    pub(super) fn is_hung(&self) -> bool {
        self.hang.is_some()
    }

    /// Whether it is what an operator calls ready: tunnelled, the GPU that is known, with room for its BARs; and it answers, or
    /// sleeps.
    pub fn is_well(&self) -> bool {
        let is_there = |&ids: &PciIds| {
            let found = self.functions.iter().find(|function| function.ids == ids);
            found.is_some_and(|function| {
                function.has_bars && (self.is_asleep || self.answers(function.address))
            })
        };
        self.is_tunnelled && [GPU, AUDIO].iter().all(is_there)
    }

    /// The GPU in the enclosure.
    pub(super) fn gpu() -> PciIds {
        GPU
    }

    pub(super) fn is_gpu(ids: &PciIds) -> bool {
        ids.device != AUDIO.device
    }

    /// Its users, for people to read.
    pub fn users(&self) -> Vec<String> {
        let jobs = self.jobs.iter().map(|job| format!("job {} (simulated)", job.number));
        jobs.chain(self.has_guest.then(|| "a guest (simulated)".to_owned())).collect()
    }

    /// What it takes of the host now.
    pub fn resources(&self) -> Resources {
        Resources {
            tunnels: usize::from(self.is_tunnelled),
            functions: self.functions.len(),
            bindings: self.functions.iter().filter(|function| function.driver.is_some()).count(),
            claims: self.claims.len(),
            work: self.users().len(),
        }
    }

    /// The users that lost it by an action so far.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// How many actions it was asked for so far.
    pub fn actions(&self) -> u64 {
        self.actions
    }

    /// Carries bytes to its memory and back at once; what slips through the link's checks is in them afterwards. Time passes.
    ///
    /// # Errors
    /// When it does not answer, or its link or it goes meanwhile.
    pub fn transfer(&mut self, there: &mut [u8], back: &mut [u8]) -> Result<Carried, EgpuError> {
        let step = |reason: String| EgpuError::Step { what: "carry bytes".into(), reason };
        let is_there = |egpu: &Self| egpu.functions.first().is_some_and(|gpu| egpu.answers(gpu.address));
        if !is_there(self) {
            return Err(step("it does not answer".into()));
        }
        match self.link.exchange(there, back, &mut self.random) {
            Ok(carried) => {
                self.advance(carried.duration);
                if is_there(self) { Ok(carried) } else { Err(step("it went meanwhile".into())) }
            }
            Err(down) => {
                self.advance(down.duration);
                Err(step(down.to_string()))
            }
        }
    }
}

impl Function {
    fn new(address: PciAddress, ids: PciIds, has_bars: bool) -> Self {
        Self { address, ids, driver: Some(Driver::Native), has_bars }
    }
}

pub(super) const fn name(step: SimStep) -> &'static str {
    match step {
        SimStep::Observe => "observe",
        SimStep::Authorise => "authorise",
        SimStep::Detach => "detach",
        SimStep::Release => "release",
        SimStep::Deauthorise => "deauthorise",
        SimStep::Settle => "settle",
    }
}

pub(super) const fn reset(rung: Rung) -> &'static str {
    match rung {
        Rung::SoftReset => "soft",
        Rung::HardReset => "hard",
        Rung::Reconnect => "reconnect",
    }
}
