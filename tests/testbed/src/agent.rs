//! The init process of L1 and of Linux guests in L2: sets the machine up, runs its side of the scenario, reports,
//! powers off.

mod accelerator;
mod canary;
mod data;
mod disk;
mod guest;
mod hang;
mod hold;
mod init;
mod killer;
mod l1;
mod l2;
mod limits;
mod log;
pub mod net;
mod pci;
mod port;
mod sys;
mod systemd;
mod verdict;
mod wait;

pub use accelerator::{AcceleratorProgram, GreedyProgram, grab_context_id};
pub use canary::{Canary, ProcessMemory};
pub use data::{check_pattern, pattern};
pub use disk::{Disk, NvmeDisk};
pub use guest::{CLOUD_HYPERVISOR, Ended, Engine, Guest, GuestPlan, Program, processes};
pub use hold::Holder;
pub use killer::{At, Fate, Meanwhile, SAID, Victim, kill_at};
pub use l1::{DMA_BUF, Finished, L1, MAP_RAM, OWN_VMM, VFIO_EDU, VM_SERVICE};
pub use l2::L2;
pub use limits::with_locked_memory;
pub use log::kernel_log;
pub use pci::Function;
pub use port::PortSlot;
pub use sys::Registers;
pub use systemd::Systemd;
pub use wait::wait_until;

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, anyhow, bail};

use crate::report::Report;
use crate::scenario::{Scenario, Variant};
use crate::scenarios;
use crate::sweep::Sweep;

/// Runs the agent, and powers the machine off. Never returns on a machine of the testbed.
pub fn main() {
    systemd::serve(std::env::args());
    if std::process::id() != 1 {
        if let Some(held) = hold::parse(std::env::args()) {
            hold::hold(&held);
        }
        if accelerator::is_greedy(std::env::args()) {
            accelerator::be_greedy();
        }
        eprintln!("testbed-agent is the init process of the testbed's machines; run `cargo testbed` instead");
        std::process::exit(2);
    }
    if let Err(error) = init::set_up() {
        eprintln!("testbed-agent: {error:#}");
        init::power_off();
    }
    if let Err(error) = work() {
        eprintln!("testbed-agent: {error:#}");
    }
    init::power_off();
}

fn work() -> Result<()> {
    let parameter =
        |name: &str| init::parameter(name).with_context(|| format!("the command line lacks {name}"));
    let find = |name: &str| -> Result<&'static Scenario> {
        let found = scenarios::ALL.iter().chain(scenarios::BENCHMARKS).find(|scenario| scenario.name == name);
        found.with_context(|| format!("there is no scenario {name}"))
    };
    let names = parameter("testbed.scenario")?;
    let variant = parameter("testbed.variant")?;
    let variant = Variant::parse(&variant).with_context(|| format!("there is no variant {variant}"))?;
    match parameter("testbed.level")?.as_str() {
        "1" => {
            let sweep = Sweep::parse(init::parameter("testbed.sweep").as_deref())?;
            let batch = names.split(',').map(find).collect::<Result<Vec<_>>>()?;
            for (at, scenario) in batch.iter().enumerate() {
                let mut l1 = L1::new(scenario.name, variant, sweep)?;
                let verdict = judge(|| {
                    if at == 0 {
                        init::load_modules()?;
                    }
                    (scenario.l1)(&mut l1)?;
                    // Once for all: they have left the devices as they were.
                    if at + 1 == batch.len() { verdict::compare_all(&mut l1) } else { Ok(()) }
                });
                l1.report(&verdict);
                if matches!(verdict, Report::Failed { .. }) {
                    break;
                }
            }
        }
        "2" => {
            let mut l2 = L2::new()?;
            let side = find(&names)?.l2.context("the scenario has no Linux guest")?;
            let verdict = judge(|| init::load_modules().and_then(|()| side(&mut l2)));
            l2.report(&verdict);
        }
        level => bail!("there is no level {level}"),
    }
    Ok(())
}

/// Runs one side and turns what comes of it, a panic too, into the closing report.
fn judge(side: impl FnOnce() -> Result<()>) -> Report {
    let result = catch_unwind(AssertUnwindSafe(side)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err(anyhow!("the agent panicked: {}", text.unwrap_or("with no message")))
    });
    match result {
        Ok(()) => Report::Passed,
        Err(error) => Report::Failed { reason: format!("{error:#}") },
    }
}
