//! `egpu config`: what GPUs are set to, and setting one.

use std::fmt::Write as _;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Subcommand};
use strum::VariantNames as _;
use vm_passthrough::claim::Cancel;
use vm_passthrough::tuning::{Change, Level, Settings, Tuner, TuningError};

use super::status::{WhichArgs, none};
use crate::api::{Body, GpuClock, GpuConfig, GpuFan, GpuPower};
use crate::cli::context::Context;
use crate::devices::gpus::{self, Gpu, GpuName, Which};
use crate::failure::Failure;
use crate::os::signals::StopSignals;

/// Arguments of `egpu config`.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what GPUs are set to, and what they may be set to
    Show(WhichArgs),
    /// Limit the clocks of the core and the memory
    Clock(ClockArgs),
    /// Limit the power that it draws
    Power(PowerArgs),
    /// Set its fans, or have them driven by temperature
    Fan(FanArgs),
    /// Set the performance level of a GPU of amdgpu
    Pstate(PstateArgs),
}

/// Which GPU.
#[derive(Debug, Args)]
struct OneArgs {
    /// The GPU, as in 0000:65:00.0 or 65:00.0, or its enclosure: the UUID or the router, as in 0-1; without one, that behind a tunnel
    #[arg(long, value_name = "GPU")]
    gpu: Option<GpuName>,
}

#[derive(Debug, Args)]
struct ClockArgs {
    /// The highest clock of the core, in MHz
    #[arg(value_name = "CORE", required_unless_present = "reset", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    core: Option<u32>,
    /// The highest clock of the memory, in MHz; without it that stays as it is
    #[arg(value_name = "MEM", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    memory: Option<u32>,
    /// Its own clocks again, of core and memory
    #[arg(long, conflicts_with_all = ["core", "memory"])]
    reset: bool,
    #[command(flatten)]
    one: OneArgs,
}

#[derive(Debug, Args)]
struct PowerArgs {
    /// Watts
    #[arg(value_name = "WATTS", required_unless_present = "reset", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    watts: Option<u32>,
    /// Its own limit again
    #[arg(long, conflicts_with = "watts")]
    reset: bool,
    #[command(flatten)]
    one: OneArgs,
}

#[derive(Debug, Args)]
struct FanArgs {
    /// Percent of the highest speed, or `auto` to have them driven by temperature
    #[arg(value_name = "PERCENT|auto", value_parser = fan)]
    speed: Fan,
    #[command(flatten)]
    one: OneArgs,
}

/// How fans are to run.
#[derive(Clone, Copy, Debug)]
enum Fan {
    Auto,
    Percent(u32),
}

fn fan(text: &str) -> Result<Fan, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Fan::Auto),
        Ok(percent @ 0..=100) => Ok(Fan::Percent(percent)),
        _ => Err("neither `auto` nor a percentage from 0 to 100".into()),
    }
}

#[derive(Debug, Args)]
struct PstateArgs {
    /// The level, by its name in amdgpu
    #[arg(value_name = "LEVEL", value_parser = PossibleValuesParser::new(Level::VARIANTS).try_map(|name| name.parse::<Level>()))]
    level: Level,
    #[command(flatten)]
    one: OneArgs,
}

impl ConfigArgs {
    /// Whether it only reads.
    pub(super) fn only_reads(&self) -> bool {
        matches!(self.action, Action::Show(_))
    }
}

/// Shows GPUs, or sets one.
///
/// # Errors
/// When there is no such GPU, or it can't be set to that.
pub(super) fn run(context: &mut Context<'_>, args: &ConfigArgs) -> Result<(), Failure> {
    let (change, one) = match &args.action {
        Action::Show(args) => return show(context, args.which()),
        Action::Clock(ClockArgs { core, memory, one, .. }) => {
            let clocks = core.map(|core| Change::Clocks { core, memory: *memory });
            (clocks.unwrap_or(Change::DefaultClocks), one)
        }
        Action::Power(PowerArgs { watts, one, .. }) => {
            (watts.map_or(Change::DefaultPower, Change::Power), one)
        }
        Action::Fan(FanArgs { speed: Fan::Auto, one }) => (Change::AutoFan, one),
        Action::Fan(FanArgs { speed: Fan::Percent(percent), one }) => (Change::Fan(*percent), one),
        Action::Pstate(PstateArgs { level, one }) => (Change::Level(*level), one),
    };
    let gpu = gpus::one(&context.host, one.gpu, "name one with `--gpu`")?;
    // Nothing is left half done: what was begun ends within its deadlines.
    let cancel = Cancel::default();
    let tuner = Tuner::new(&context.host, &gpu.function).with_cancel(cancel.clone());
    let on_signal = move |signal| {
        tracing::warn!("{signal}: what was begun is ended first");
        cancel.request();
    };
    let signals = StopSignals::start(on_signal).map_err(Failure::failed)?;
    let applied = tuner.apply(change).map_err(failure)?;
    drop(signals);
    for note in &applied.notes {
        tracing::warn!("{}: {note}", gpu.address());
    }
    print(context, vec![GpuConfig::new(&gpu, Ok(&applied.settings), applied.notes)])
}

fn failure(error: TuningError) -> Failure {
    match error {
        TuningError::OutOfRange { .. } => Failure::usage(error),
        _ => Failure::failed(error),
    }
}

/// Shows what GPUs are set to. One that can't be asked says why.
fn show(context: &mut Context<'_>, which: Which) -> Result<(), Failure> {
    let gpus = gpus::find(&context.host, which)?;
    if gpus.is_empty() && !context.json {
        return context.print(|| Body::EgpuConfig { gpus: Vec::new() }, || format!("{}\n", none(which)));
    }
    let config = |gpu: &Gpu| {
        let settings: Result<Settings, String> =
            Tuner::new(&context.host, &gpu.function).settings().map_err(|error| error.to_string());
        GpuConfig::new(gpu, settings.as_ref().map_err(Clone::clone), Vec::new())
    };
    let configs = gpus.iter().map(config).collect();
    print(context, configs)
}

fn print(context: &mut Context<'_>, gpus: Vec<GpuConfig>) -> Result<(), Failure> {
    let text = gpus.iter().map(text).collect::<Vec<_>>().join("\n");
    context.print(|| Body::EgpuConfig { gpus }, || text)
}

fn text(gpu: &GpuConfig) -> String {
    let mut text = format!("{} {}\n", gpu.address, gpu.name);
    let mut line = |name: &str, value: String| {
        // A String takes any write.
        let _ = writeln!(text, "  {name:<17}{}", crate::text::table::printable(&value));
    };
    if let Some(why) = &gpu.unknown {
        line("unknown", why.clone());
        return text;
    }
    let can_not = || "can't be set".to_owned();
    line("set by", gpu.source.clone());
    line("core clock", gpu.core_clock.as_ref().map_or_else(can_not, clock));
    line("memory clock", gpu.memory_clock.as_ref().map_or_else(can_not, clock));
    line("power limit", gpu.power.as_ref().map_or_else(can_not, power));
    line("fan", gpu.fan.as_ref().map_or_else(can_not, self::fans));
    line("performance", gpu.performance_state.clone().unwrap_or_else(|| "unknown".into()));
    if let Some(is) = gpu.persistent {
        line("kept", if is { "yes" } else { "no, once nobody uses it" }.into());
    }
    text
}

fn clock(clock: &GpuClock) -> String {
    let now = clock.mhz.map_or("?".into(), |mhz| mhz.to_string());
    let limit = clock.limit_mhz.map_or_else(String::new, |mhz| format!(" of {mhz}"));
    let range =
        clock.min_mhz.zip(clock.max_mhz).map_or_else(String::new, |(min, max)| format!(", {min} to {max}"));
    let steps = match clock.steps_mhz.len() {
        0 => String::new(),
        steps => format!(" in {steps} steps"),
    };
    format!("{now}{limit} MHz{range}{steps}")
}

fn power(power: &GpuPower) -> String {
    let now = power.limit_watts.map_or("?".into(), |watts| watts.to_string());
    let default = power.default_watts.map_or_else(String::new, |watts| format!(", by default {watts}"));
    format!("{now} W, {} to {}{default}", power.min_watts, power.max_watts)
}

fn fans(fan: &GpuFan) -> String {
    let now = fan.percent.map_or("?".into(), |percent| percent.to_string());
    let mode = fan.mode.as_ref().map_or_else(String::new, |mode| format!(" {mode}"));
    format!("{now} %{mode}, {} to {}", fan.min_percent, fan.max_percent)
}
