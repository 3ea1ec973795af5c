//! `run`: boots a guest in the foreground with its devices, and gives them back when it ends, however it ends.

mod console;

use std::time::Instant;

use vm_passthrough::PciAddress;

use crate::cli::{Context, Failure, RunArgs};
use crate::config::{GuestConfig, MAX_DEVICES};
use crate::json::{Body, RunReport};
use crate::signals::StopSignals;
use crate::vmm::{End, Machine, MachineOptions, OnReboot, Stop};

/// Boots a guest.
///
/// # Errors
/// When the guest file is wrong, a device can't be passed to the guest, or anything fails; devices are given back
/// then too.
pub(crate) fn run(context: &mut Context<'_>, args: &RunArgs) -> Result<(), Failure> {
    let started = Instant::now();
    let config = guest(args)?;
    let stop = Stop::new().map_err(Failure::failed)?;
    // From here on the operator's wish to end comes to `stop`, so that nothing is left half done.
    let asked = stop.clone();
    let _signals = StopSignals::start(move |signal| {
        tracing::info!("{signal}: stopping the guest");
        asked.request();
    })
    .map_err(|error| Failure::failed(format_args!("signals can't be waited for: {error}")))?;

    let (console, service) = console::open(&args.console, context.json, &stop).map_err(Failure::failed)?;
    let on_reboot = if args.no_reboot { OnReboot::End } else { OnReboot::Restart };
    let options = MachineOptions { kvm: context.host.dev.join("kvm"), console, on_reboot };
    let mut machine = Machine::new(&config, options).map_err(Failure::failed)?;
    let run = machine.run(&stop).map_err(Failure::failed)?;
    drop(service);
    let report = RunReport::new(&config.name, &run, started.elapsed());
    if context.json {
        context.print(|| Body::Run(report), String::new)?;
    } else {
        tracing::info!("{} after {:.1} s", run.end, started.elapsed().as_secs_f64());
    }
    match run.end {
        End::Shutdown | End::Reboot | End::Stopped => Ok(()),
        End::TripleFault => Err(Failure::failed(format_args!(
            "the guest {} crashed (triple fault): its kernel or program made an error that it does not handle; see \
             its console",
            config.name
        ))),
    }
}

/// The guest as its file and the command line describe it.
fn guest(args: &RunArgs) -> Result<GuestConfig, Failure> {
    let mut config = GuestConfig::load(&args.guest).map_err(Failure::usage)?;
    add_devices(&mut config, &args.devices)?;
    config
        .check_files()
        .map_err(|error| Failure::usage(format_args!("{}: {error}", args.guest.display())))?;
    Ok(config)
}

/// Adds the command line's devices to those of the file, each once.
fn add_devices(config: &mut GuestConfig, devices: &[PciAddress]) -> Result<(), Failure> {
    for device in devices {
        if !config.devices.contains(device) {
            config.devices.push(*device);
        }
    }
    if config.devices.len() > MAX_DEVICES {
        return Err(Failure::usage(format_args!(
            "the guest {} would get {} devices; a guest has at most {MAX_DEVICES}",
            config.name,
            config.devices.len()
        )));
    }
    Ok(())
}
