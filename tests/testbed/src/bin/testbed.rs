//! `cargo testbed`: provisions the testbed, boots it, runs its scenarios.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use testbed::host::{Options, Outcome, Programs, Purpose, Run, Verdict, run_all, workspace};
use testbed::provision::{
    Cache, LinuxKernel, provision_built, provision_disk, provision_qemu, provision_stock, provision_systemd,
};
use testbed::scenario::{Contents, Scenario, Variant};
use testbed::scenarios;
use testbed::sweep::{Sweep, VARIABLE};

/// Boots Linux in QEMU with an emulated IOMMU and PCI devices, and runs scenarios of device passthrough in it.
///
/// Needs no hardware and no /dev/kvm. Installs and builds what it needs; Linux kernels are cached in
/// ~/.cache/vm-testbed, logs are kept in target/testbed. A number in SWEEP_SEED selects a third of the scenarios,
/// one back end for each, and a part of each long sweep. The last line is `N passed, N failed, N skipped`.
#[derive(Debug, Parser)]
#[command(name = "cargo testbed")]
struct Arguments {
    /// Scenarios to run; without names all but benchmarks.
    scenarios: Vec<String>,
    /// Name the scenarios and do nothing else.
    #[arg(long)]
    list: bool,
    /// Only on this VFIO back end: `group` (Debian's stock Linux) or `iommufd` (self-built Linux).
    #[arg(long)]
    variant: Option<String>,
    /// How many to run at once.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Print outcomes as JSON to standard output, before the last line.
    #[arg(long)]
    json: bool,
    /// Print what was measured as a Markdown table to standard output, before the last line.
    #[arg(long)]
    markdown: bool,
    /// A static cloud-hypervisor that `bench` measures too; without it, its rows say that they were skipped.
    #[arg(long, value_name = "PROGRAM")]
    cloud_hypervisor: Option<PathBuf>,
    /// Processors of L1. With more than one, QEMU 10.0 may stop or hang by itself: for benchmarks alone, run again then.
    #[arg(long, value_name = "N", default_value_t = 1)]
    processors: u8,
    /// Run on this bzImage in place of the self-built Linux: another version, made with tests/testbed/linux-6.12.config.
    #[arg(long, value_name = "IMAGE")]
    linux: Option<PathBuf>,
    /// Run a scenario that failed once more; one that passes then counts as passed, and is named as flaky at the end.
    #[arg(long)]
    retry: bool,
    /// Print every step.
    #[arg(long, short)]
    verbose: bool,
    /// Install and build what the testbed needs, and do nothing else.
    #[arg(long)]
    provision: bool,
}

/// A partial sweep runs one scenario of each group of this many.
const PART: usize = 3;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("testbed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.list {
        for scenario in scenarios::ALL.iter().chain(scenarios::BENCHMARKS) {
            println!("{:18} {:15} {}", scenario.name, scenario.variants, scenario.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let sweep = Sweep::of_environment()?;
    let chosen = choose(arguments, sweep)?;
    if let Some(seed) = sweep.seed() {
        eprintln!("testbed: parts of sweeps, chosen by {VARIABLE}={seed}");
    }
    let cache = Cache::of_user()?;
    provision_qemu(&cache)?;
    if chosen.iter().any(|(scenario, _)| scenario.contents.systemd) {
        provision_systemd(&cache)?;
    }
    if chosen.iter().any(|(scenario, _)| scenario.contents.cupy) {
        provision_disk(&cache)?;
    }
    let needed = |variant| arguments.provision || chosen.iter().any(|(_, chosen)| *chosen == variant);
    let kernel = |variant| -> Result<LinuxKernel, String> {
        if !needed(variant) {
            return Err("it was not asked for".to_owned());
        }
        match (variant, &arguments.linux) {
            (Variant::Group, _) => provision_stock(&cache),
            (Variant::Iommufd, Some(image)) => LinuxKernel::from_image(image),
            (Variant::Iommufd, None) => provision_built(&cache),
        }
        .map_err(|error| format!("{error:#}"))
    };
    let (stock, built) = (kernel(Variant::Group), kernel(Variant::Iommufd));
    if arguments.provision {
        for (what, kernel) in [("stock", &stock), ("self-built", &built)] {
            if let Err(reason) = kernel {
                bail!("the {what} Linux kernel could not be provisioned: {reason}");
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let runs: Vec<Run> = chosen
        .into_iter()
        .map(|(scenario, variant)| Run {
            scenario,
            variant,
            processors: arguments.processors,
            sweep,
            kernel: match variant {
                Variant::Group => stock.clone(),
                Variant::Iommufd => built.clone(),
            },
        })
        .collect();
    let measures = runs.iter().any(|run| scenarios::BENCHMARKS.iter().any(|it| it.name == run.scenario.name));
    let purpose = if measures { Purpose::Benchmark } else { Purpose::Test };
    let contents = runs.iter().fold(Contents::NONE, |all, run| all.union(run.scenario.contents));
    let mut programs = Programs::build(&workspace().join("target/testbed"), purpose, contents)?;
    programs.cloud_hypervisor.clone_from(&arguments.cloud_hypervisor);
    let options = Options { jobs: arguments.jobs, retry: arguments.retry, verbose: arguments.verbose };
    let outcomes = run_all(&runs, &programs, options);
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&outcomes.iter().map(as_json).collect::<Vec<_>>())?);
    }
    if arguments.markdown {
        println!("| scenario | back end | figure | value |\n| --- | --- | --- | --- |");
        for outcome in &outcomes {
            for (name, value, unit) in &outcome.figures {
                println!("| {} | {} | {name} | {value:.3} {unit} |", outcome.scenario, outcome.variant);
            }
            for (name, reason) in &outcome.unmeasured {
                println!("| {} | {} | {name} | skipped: {reason} |", outcome.scenario, outcome.variant);
            }
        }
        println!();
    }
    for (outcome, reason) in outcomes.iter().filter_map(|outcome| Some((outcome, outcome.flaky.as_ref()?))) {
        println!("flaky: {} ({}), which failed the first time: {reason}", outcome.scenario, outcome.variant);
    }
    let count = |is: fn(&Verdict) -> bool| outcomes.iter().filter(|outcome| is(&outcome.verdict)).count();
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_)));
    println!(
        "{} passed, {failed} failed, {} skipped",
        count(|verdict| *verdict == Verdict::Passed),
        count(|verdict| matches!(verdict, Verdict::Skipped(_)))
    );
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The runs that the arguments ask for, and the sweep takes.
fn choose(arguments: &Arguments, sweep: Sweep) -> Result<Vec<(&'static Scenario, Variant)>> {
    let only = match arguments.variant.as_deref() {
        None => None,
        Some(name) => match Variant::parse(name) {
            Some(variant) => Some(variant),
            None => bail!("there is no variant {name}; there are `group` and `iommufd`"),
        },
    };
    let mut scenarios: Vec<&'static Scenario> = Vec::new();
    for name in &arguments.scenarios {
        match scenarios::ALL.iter().chain(scenarios::BENCHMARKS).find(|scenario| scenario.name == name) {
            Some(scenario) => scenarios.push(scenario),
            None => bail!("there is no scenario {name}; `cargo testbed --list` names them"),
        }
    }
    if scenarios.is_empty() {
        let taken = |(place, scenario): &(usize, &Scenario)| {
            sweep.takes(*place, PART) || scenario.name == scenarios::ALWAYS
        };
        scenarios.extend(scenarios::ALL.iter().enumerate().filter(taken).map(|(_, scenario)| scenario));
    }
    let mut runs = Vec::new();
    for scenario in scenarios {
        let place = scenarios::ALL.iter().position(|other| other.name == scenario.name).unwrap_or_default();
        match only {
            Some(only) => runs.extend(scenario.variants.all().contains(&only).then_some((scenario, only))),
            None => runs.extend(scenario.variants.taken(place, sweep).map(|variant| (scenario, variant))),
        }
    }
    Ok(runs)
}

fn as_json(outcome: &Outcome) -> serde_json::Value {
    let (verdict, reason) = match &outcome.verdict {
        Verdict::Passed => ("passed", None),
        Verdict::Failed(reason) => ("failed", Some(reason)),
        Verdict::Skipped(reason) => ("skipped", Some(reason)),
    };
    let figures: Vec<_> = outcome
        .figures
        .iter()
        .map(|(name, value, unit)| serde_json::json!({ "name": name, "value": value, "unit": unit }))
        .collect();
    let unmeasured: Vec<_> = outcome
        .unmeasured
        .iter()
        .map(|(name, reason)| serde_json::json!({ "name": name, "reason": reason }))
        .collect();
    serde_json::json!({
        "scenario": outcome.scenario,
        "variant": outcome.variant.name(),
        "verdict": verdict,
        "reason": reason,
        "flaky": outcome.flaky,
        "seconds": outcome.took.as_secs_f64(),
        "proved": outcome.proved,
        "figures": figures,
        "unmeasured": unmeasured,
        "logs": outcome.logs.display().to_string(),
    })
}
