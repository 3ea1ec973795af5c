//! `egpu simulate`: what `egpu watch` makes of an eGPU that a script breaks, in virtual time.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use vm_passthrough::egpu::{Action, Change, EgpuError, Enclosure, Event, Manager, Observation, State};
use vm_passthrough::sim::{SimEgpu, SimScript};

use super::enclosure::action_text;
use super::watch::HeartbeatArgs;
use crate::api::{Body, EgpuSimulation, SimulatedChange, action_of, fault_of};
use crate::cli::context::Context;
use crate::failure::Failure;

/// How long it goes on after the script's last line, where nothing else is said.
const AFTERWARDS: Duration = Duration::from_secs(60);
/// Most looks at it.
const LOOKS: u128 = 1_000_000;
/// Most bytes of a script.
const LONGEST: u64 = 1 << 20;

/// Arguments of `egpu simulate`.
#[derive(Debug, Args)]
pub(super) struct SimulateArgs {
    /// The faults, one a line, as in `at 10s hang hard`; `-` reads it from standard input
    #[arg(value_name = "SCRIPT")]
    script: PathBuf,
    /// What chance begins with: the same seed and script give the same run
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// How long it is watched in virtual time, in seconds; without it, until a minute after the script's last line
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    #[command(flatten)]
    heartbeat: HeartbeatArgs,
}

/// Watches over a simulated eGPU from its connection on.
///
/// # Errors
/// When the script can't be read, or would take too long.
pub(super) fn run(context: &mut Context<'_>, args: &SimulateArgs) -> Result<(), Failure> {
    let script = read(args)?;
    let last = script.faults().last().map_or(Duration::ZERO, |(time, _)| *time);
    let length = args.seconds.map_or(last.saturating_add(AFTERWARDS), Duration::from_secs);
    let interval = args.heartbeat.interval();
    if length.as_millis() / interval.as_millis() > LOOKS {
        return Err(Failure::usage(format_args!(
            "{} s are more than {LOOKS} looks at it; lengthen `--interval`, or shorten `--seconds` or the script",
            length.as_secs()
        )));
    }
    let told = simulate(&script, args, length);
    let text = text(&told);
    context.print(|| Body::EgpuSimulation(told), || text)
}

fn read(args: &SimulateArgs) -> Result<SimScript, Failure> {
    let path = &args.script;
    let named = || match path.as_os_str() == "-" {
        true => "standard input".into(),
        false => path.display().to_string(),
    };
    let mut text = String::new();
    let length = match path.as_os_str() == "-" {
        true => std::io::stdin().take(LONGEST + 1).read_to_string(&mut text),
        false => std::fs::File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text)),
    };
    let length = length.map_err(|error| Failure::usage(format_args!("can't read {}: {error}", named())))?;
    if length as u64 > LONGEST {
        return Err(Failure::usage(format_args!("{} is longer than {LONGEST} bytes", named())));
    }
    text.parse().map_err(|error| Failure::usage(format_args!("{}: {error}", named())))
}

fn simulate(script: &SimScript, args: &SimulateArgs, length: Duration) -> EgpuSimulation {
    let (interval, limits) = (args.heartbeat.interval(), args.heartbeat.limits());
    let egpu = SimEgpu::new(args.seed, script);
    let clock = Rc::new(Cell::new(egpu.now()));
    let mut manager = Manager::new(Timed { egpu, clock: clock.clone() }, limits);
    let mut changes = Vec::new();
    loop {
        let came = manager.state() == State::Absent;
        // A step begins when the one before it has ended.
        let mut note = |change: &Change| changes.push(told(clock.get(), change));
        let looked = manager.poll(&mut note);
        if came && manager.state() == State::Disconnected {
            manager.take(Event::Connect, &mut note);
        }
        if let Err(error) = looked {
            tracing::debug!("at {} ms: {error}", clock.get().as_millis());
        }
        let now = clock.get().min(length);
        manager.enclosure().advance(interval.min(length - now));
        if clock.get() >= length {
            break;
        }
    }
    let state = manager.state();
    let egpu = &manager.enclosure().egpu;
    let cut = egpu.cuts().iter().map(|cut| format!("{} by {}", cut.user, action_text(cut.action))).collect();
    let left = egpu.resources();
    EgpuSimulation {
        seed: args.seed,
        seconds: egpu.now().as_secs_f64(),
        changes,
        state: state.name().into(),
        fault: fault_of(state),
        cut,
        tunnels: left.tunnels,
        functions: left.functions,
        bindings: left.bindings,
        claims: left.claims,
        users: left.work,
    }
}

/// A simulated eGPU whose time is known also while something is done with it.
#[derive(Debug)]
struct Timed {
    egpu: SimEgpu,
    clock: Rc<Cell<Duration>>,
}

impl Timed {
    fn advance(&mut self, time: Duration) {
        self.does(|egpu| egpu.advance(time));
    }

    fn does<T>(&mut self, does: impl FnOnce(&mut SimEgpu) -> T) -> T {
        let done = does(&mut self.egpu);
        self.clock.set(self.egpu.now());
        done
    }
}

impl Enclosure for Timed {
    fn observe(&mut self) -> Result<Observation, EgpuError> {
        self.does(SimEgpu::observe)
    }

    fn act(&mut self, action: Action) -> Result<(), EgpuError> {
        self.does(|egpu| egpu.act(action))
    }

    fn heartbeat(&mut self) -> Result<(), EgpuError> {
        self.does(SimEgpu::heartbeat)
    }

    fn temperature(&mut self) -> Option<i32> {
        self.does(SimEgpu::temperature)
    }

    fn sensor(&self) -> Option<String> {
        self.egpu.sensor()
    }

    fn ended(&mut self) -> Option<String> {
        self.egpu.ended()
    }

    fn unsound(&self) -> Option<String> {
        self.egpu.unsound()
    }
}

fn told(at: Duration, change: &Change) -> SimulatedChange {
    SimulatedChange {
        milliseconds: at.as_secs_f64() * 1000.0,
        from: change.from.name().into(),
        state: change.to.name().into(),
        action: action_of(change.to),
        fault: fault_of(change.to),
        error: change.error.clone(),
    }
}

fn text(told: &EgpuSimulation) -> String {
    let mut text = format!("simulated eGPU, seed {}, virtual time\n", told.seed);
    // A String takes any write.
    for change in &told.changes {
        let detail = change.fault.as_ref().or(change.action.as_ref());
        let detail = detail.map(|detail| format!(" ({detail})")).unwrap_or_default();
        let because = change.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        let _ = writeln!(text, "{:>9.3} s {}{detail}{because}", change.milliseconds / 1000.0, change.state);
    }
    for cut in &told.cut {
        let _ = writeln!(text, "cut off: {cut}");
    }
    let _ = writeln!(
        text,
        "{:>9.3} s end: {}; {} tunnels, {} functions, {} drivers, {} claims, {} users",
        told.seconds, told.state, told.tunnels, told.functions, told.bindings, told.claims, told.users
    );
    text
}
