//! One GPU: what it reported last, how that changes, and its alarms.

use std::time::{Duration, Instant};

use vm_passthrough::egpu::Limits;
use vm_passthrough::telemetry::{Answer, Telemetry};

use super::history::History;
use crate::api::{GpuRates, GpuSample, GpuStatus};
use crate::devices::gpus::Gpu;

/// How long an alarm of new errors is displayed.
const RISEN_FOR: Duration = Duration::from_secs(30);
/// How long a driver may take to answer before that is an alarm.
const PATIENCE: Duration = Duration::from_secs(2);
/// The shortest time of which a rate is made.
const SHORTEST: Duration = Duration::from_millis(1);

/// Whether a GPU is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It is, and has answered.
    There,
    /// It is not, since then.
    Gone(Instant),
    /// Its driver has not answered since then.
    Waiting(Instant),
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Panel {
    gpu: Gpu,
    state: State,
    /// When it was seen last.
    at: Option<Instant>,
    told: Option<(Instant, Box<Telemetry>)>,
    rates: GpuRates,
    /// When errors rose last, and by how many.
    risen: Option<(Instant, String)>,
    was_up: bool,
    pub(super) busy: History,
    pub(super) temperature: History,
    pub(super) power: History,
    pub(super) memory: History,
}

impl Panel {
    /// A GPU that has reported nothing yet.
    pub(super) fn new(gpu: Gpu) -> Self {
        Self {
            gpu,
            state: State::There,
            at: None,
            told: None,
            rates: GpuRates::default(),
            risen: None,
            was_up: false,
            busy: History::default(),
            temperature: History::default(),
            power: History::default(),
            memory: History::default(),
        }
    }

    /// The GPU.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Whether it is there.
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// What it reported last, also where it has not answered since; `None` of one that is gone.
    pub(crate) fn told(&self) -> Option<&Telemetry> {
        self.told.as_ref().map(|(_, told)| &**told)
    }

    /// How fast its counters rise.
    pub(crate) fn rates(&self) -> GpuRates {
        self.rates
    }

    /// Whether this one is gone, and `gpu` is the same one elsewhere.
    pub(super) fn has_moved_to(&self, gpu: &Gpu) -> bool {
        let enclosure = |gpu: &Gpu| gpu.enclosure.as_ref().and_then(|router| router.unique_id);
        matches!(self.state, State::Gone(_))
            && enclosure(gpu).is_some()
            && (enclosure(&self.gpu), self.gpu.function.ids) == (enclosure(gpu), gpu.function.ids)
    }

    /// It is not there.
    pub(super) fn gone(&mut self, at: Instant) {
        self.at = Some(at);
        if !matches!(self.state, State::Gone(_)) {
            self.state = State::Gone(at);
        }
        // Its counters begin again when it comes back.
        (self.told, self.rates, self.risen, self.was_up) = (None, GpuRates::default(), None, false);
        self.remember(None);
    }

    /// Takes its answer.
    pub(super) fn observe(&mut self, at: Instant, gpu: Gpu, answer: Answer) {
        self.gpu = gpu;
        match answer {
            Answer::Gone => return self.gone(at),
            Answer::Waiting(since) => {
                self.state = State::Waiting(since);
                self.rates = GpuRates::default();
                self.remember(None);
            }
            Answer::Told(when, told) => {
                self.state = State::There;
                if let Some((before, former)) = &self.told {
                    let elapsed = when.saturating_duration_since(*before);
                    self.rates = rates(former, &told, elapsed);
                    if let Some(text) = risen(former, &told) {
                        self.risen = Some((at, text));
                    }
                }
                self.was_up |= told.link.is_some_and(|link| !link.is_down());
                self.remember(Some(&told));
                self.told = Some((when, told));
            }
        }
        self.at = Some(at);
    }

    fn remember(&mut self, told: Option<&Telemetry>) {
        let whole = |number: Option<f64>| number.map(|number| number.max(0.0).round() as u64);
        self.busy.push(told.and_then(|told| told.busy).map(u64::from));
        self.temperature.push(whole(told.and_then(temperature)));
        self.power.push(whole(told.and_then(|told| told.power)));
        self.memory.push(told.and_then(|told| told.memory_used));
    }

    /// Its alarms.
    pub(crate) fn alarms(&self) -> Vec<String> {
        let since = |when: Instant| self.at.map_or(Duration::ZERO, |at| at.saturating_duration_since(when));
        match self.state {
            State::Gone(_) => return vec!["the GPU is gone".into()],
            State::Waiting(when) if since(when) >= PATIENCE => {
                return vec![format!("its driver has not answered for {} s", since(when).as_secs())];
            }
            _ => {}
        }
        let Some(told) = self.told() else { return Vec::new() };
        let hottest = f64::from(Limits::default().hottest) / 1000.0;
        let hot = temperature(told).filter(|&degrees| degrees > hottest);
        let hot = hot.map(|degrees| format!("{degrees:.0} °C, more than {hottest:.0} °C"));
        // One that is asleep has no link to be read.
        let lost = told.link.is_some_and(|link| link.is_down() && self.was_up);
        let lost = lost.then(|| "the link was lost".to_owned());
        let down = told.link.is_some_and(|link| link.is_down() && !self.was_up);
        let down = down.then(|| "the link is down".to_owned());
        let risen = self.risen.as_ref().filter(|(when, _)| since(*when) < RISEN_FOR);
        let risen = risen.map(|(_, text)| format!("errors on PCI Express rise: {text}"));
        [hot, lost, down, risen].into_iter().flatten().collect()
    }

    /// As JSON has it.
    pub(crate) fn sample(&self) -> GpuSample {
        let answer = match (self.state, &self.told) {
            (State::Gone(_), _) => Answer::Gone,
            (State::Waiting(since), _) => Answer::Waiting(since),
            (State::There, Some((when, told))) => Answer::Told(*when, told.clone()),
            (State::There, None) => Answer::Gone,
        };
        GpuSample { status: GpuStatus::new(&self.gpu, &answer), rates: self.rates, alarms: self.alarms() }
    }
}

/// The temperature that counts. A hot spot is hotter than the core by its nature, and counts where there is no other.
pub(super) fn temperature(told: &Telemetry) -> Option<f64> {
    told.temperature.or(told.hot_spot)
}

/// How fast counters rise between two moments; `None` of one that began again meanwhile.
fn rates(before: &Telemetry, now: &Telemetry, elapsed: Duration) -> GpuRates {
    let rate = |before: Option<u64>, now: Option<u64>| {
        let more = now?.checked_sub(before?)?;
        (elapsed >= SHORTEST).then(|| more as f64 / elapsed.as_secs_f64())
    };
    let errors = |told: &Telemetry| {
        told.errors
            .as_ref()
            .map(|errors| [errors.correctable.total, errors.nonfatal.total, errors.fatal.total])
    };
    let (from, to) = (errors(before), errors(now));
    let of = |index: usize| {
        let at = |all: Option<[u64; 3]>| all.and_then(|all| all.get(index).copied());
        rate(at(from), at(to))
    };
    GpuRates { correctable: of(0), nonfatal: of(1), fatal: of(2), replays: rate(before.replays, now.replays) }
}

/// The errors that are new, by their severity.
fn risen(before: &Telemetry, now: &Telemetry) -> Option<String> {
    let (before, now) = (before.errors.as_ref()?, now.errors.as_ref()?);
    let new = [
        ("fatal", &before.fatal, &now.fatal),
        ("nonfatal", &before.nonfatal, &now.nonfatal),
        ("correctable", &before.correctable, &now.correctable),
    ];
    let new = new.into_iter().filter_map(|(severity, before, now)| {
        let more = now.total.checked_sub(before.total).filter(|&more| more > 0)?;
        Some(format!("{more} {severity}"))
    });
    let new: Vec<_> = new.collect();
    (!new.is_empty()).then(|| new.join(", "))
}
