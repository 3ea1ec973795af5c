//! `run`: boots a guest in the foreground with its devices, and gives them back when it ends, however it ends.
//!
//! ```text
//! guest file ─▶ recover ─▶ scan, explain ─▶ machine ─▶ instance: boot, claim … release ─▶ report
//! └────────── nothing of a device is touched ───────┘
//! ```

mod console;
mod live;
mod overdue;
mod progress;
mod shutdown;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use rustix::process::DumpableBehavior;
use vm_passthrough::claim::{ClaimOptions, SharedLease};
use vm_passthrough::readiness::check_huge_pages;
use vm_passthrough::vfio::Backend;
use vm_passthrough::{Host, PassthroughManager, numa};

use super::boot::BootArgs;
use super::explain;
use super::{Scan, release};
use crate::api::{self, Accept, Body, StartOptions};
use crate::cli::context::Context;
use crate::config::{AcceleratorDevice, GuestConfig};
use crate::failure::Failure;
use crate::guest::control::{GuestHome, Server};
use crate::guest::{DeviceOptions, Devices, Inbox, Instance, RomFile, VmmError, VmmOptions};
use crate::os::process::ChildProgram;
use crate::os::signals::StopSignals;
use crate::vmm::{self, End, GuestNuma, MachineOptions, OnReboot, PowerButton, Stop};
use console::Console;
use live::Live;
use overdue::Overdue;
use progress::Timeline;
use shutdown::Shutdown;

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) boot: BootArgs,
    /// Where the guest's serial console goes: stdio, stdio=raw, none, pty, pty=LINK or file=PATH. A terminal gets only control sequences that place, color and edit text, unless it is raw
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    pub(crate) console: Console,
    /// Have a session of its own, the guest's directory whose lock is standard input, and who hears of it at standard output, as the daemon starts it
    #[arg(long, hide = true)]
    pub(crate) managed: bool,
}

/// Boots a guest.
///
/// # Errors
/// When the guest file is wrong, a device can't be passed to the guest, or anything fails; devices are released
/// then too.
pub(crate) fn run(context: &mut Context<'_>, args: &RunArgs) -> Result<(), Failure> {
    let started = Instant::now();
    let config = args.boot.config()?;
    let start = StartOptions::from(&args.boot.options);
    config
        .check_files()
        .map_err(|error| Failure::usage(format_args!("{}: {error}", args.boot.guest.display())))?;
    // Whoever else runs as this user, such as a worker that was taken over, can't trace this process.
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user may trace this one");
    }
    let first = args.managed.then(connection_of_standard_output).transpose()?;
    let home = home(context, &config, args)?;
    let made = Stop::new().and_then(|stop| Ok((Inbox::new(&stop)?, stop, PowerButton::new()?)));
    let (inbox, stop, button) = made.map_err(|error| {
        Failure::failed(format_args!("no eventfd can be made: {error}; raise `ulimit -n`"))
    })?;
    // From here on the operator's wish to end comes to `stop`, so that nothing is left half done.
    let shutdown = Shutdown::new(stop.clone(), button.clone(), start.shutdown_timeout());
    let asked = shutdown.clone();
    let _signals = StopSignals::start(move |signal| asked.signalled(signal)).map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })?;

    let devices = devices(context, &config, &start, &stop)?;
    let _leases = leases(context, &config)?;
    let (console, service) =
        console::open(&args.console, context.json, &stop, &button).map_err(Failure::failed)?;
    let on_reboot = if start.no_reboot { OnReboot::End } else { OnReboot::Restart };
    let kvm = context.host.dev.join("kvm");
    let power_button = Some(button.clone());
    let numa = numa_of(&context.host, &config, devices.as_ref())?;
    let worker = ChildProgram::worker(&context.program);
    let options =
        MachineOptions { kvm, console, on_reboot, numa, worker, power_button, ..MachineOptions::default() };
    let vmm = VmmOptions { program: ChildProgram::vmm(&context.program), ..VmmOptions::default() };
    // Who asks sees that it starts, and may end it.
    let live = Live::new(&config, service.terminal(), inbox.handle(), button);
    let _control = home.as_ref().map(|home| serve(home, first, &live)).transpose()?;
    let made = Instance::new(&config, options, vmm, devices, inbox);
    let instance = made.inspect_err(|error| live.failed(error)).map_err(|error| match error {
        VmmError::Boot(error) => Failure::usage(error),
        error => Failure::failed(error),
    })?;
    let confinement = api::Confinement::from(instance.confinement());
    live.made(confinement.clone());
    let mut timeline = Timeline {
        guest: &config.name,
        started,
        startup: None,
        console: Some(service),
        backend: None,
        devices: Vec::new(),
    };
    let ran = instance.run(|progress| {
        shutdown.note(&progress);
        live.note(&progress);
        timeline.note(progress);
    });
    let ran = ran.map_err(|errors| Failure::failed(errors.join("\nerror: ")))?;
    let _overdue = Overdue::start(&stop)?;
    report(context, &ran, timeline, confinement)
}

/// The guest's directory, which keeps others from its name; `None` where this user may have none.
fn home(context: &Context<'_>, config: &GuestConfig, args: &RunArgs) -> Result<Option<GuestHome>, Failure> {
    let taken = match args.managed {
        true => {
            // It fails only where a session begins with this process already.
            let _ = rustix::process::setsid();
            let lock = lock_of_standard_input().map_err(|error| {
                Failure::failed(format_args!(
                    "the lock of the guest's directory can't be taken over: {error}"
                ))
            });
            GuestHome::inherit(&context.host, &config.name, lock?)
        }
        false => GuestHome::take(&context.host, &config.name),
    };
    match taken {
        Err(error) if error.is_forbidden() => {
            tracing::info!("{error}; other commands do not see the guest");
            Ok(None)
        }
        taken => taken.map(Some).map_err(Failure::failed),
    }
}

/// What is standard input, which is nothing from here on.
fn lock_of_standard_input() -> io::Result<File> {
    let lock = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(lock.into())
}

/// What is standard output, where the daemon hears of the guest; from here on that is where messages go.
fn connection_of_standard_output() -> Result<UnixStream, Failure> {
    let taken = || -> io::Result<_> {
        let stream = io::stdout().as_fd().try_clone_to_owned()?;
        rustix::stdio::dup2_stdout(io::stderr())?;
        Ok(stream.into())
    };
    taken().map_err(|error| {
        Failure::failed(format_args!("the daemon's connection can't be taken over: {error}"))
    })
}

/// Serves the guest's control socket, until the result is dropped.
fn serve(home: &GuestHome, first: Option<UnixStream>, live: &Arc<Live>) -> Result<Server, Failure> {
    let start = |listener| {
        Server::start(listener, first, |outbox| {
            live.tell(outbox);
            live.clone()
        })
    };
    home.listen().and_then(start).map_err(|error| {
        Failure::failed(format_args!(
            "the guest's control socket in {} can't be served: {error}; see that directory, and `ulimit -n`",
            home.path().display()
        ))
    })
}

/// Tells how the guest ran.
fn report(
    context: &mut Context<'_>,
    ran: &vmm::RunReport,
    timeline: Timeline<'_>,
    confinement: api::Confinement,
) -> Result<(), Failure> {
    let total = timeline.started.elapsed();
    tracing::info!("{}; all was released {:.1} s after the start", ran.end, total.as_secs_f64());
    if context.json {
        let report = api::RunReport {
            guest: timeline.guest.to_owned(),
            how: ran.end.into(),
            restarts: ran.restarts,
            startup_ms: api::milliseconds(timeline.startup.unwrap_or(total)),
            duration_ms: api::milliseconds(total),
            exits: (&ran.exits).into(),
            backend: timeline.backend.map(|backend| backend.to_string()),
            devices: timeline.devices,
            confinement,
        };
        context.print(|| Body::Run(report), String::new)?;
    }
    match ran.end {
        End::Shutdown | End::Reboot | End::Reset | End::Stopped => Ok(()),
        End::TripleFault => Err(Failure::failed(format_args!(
            "the guest {} crashed (triple fault): its kernel or program made an error that it does not handle; see \
             its console",
            timeline.guest
        ))),
    }
}

/// The NUMA nodes of the guest: those that its file names, and else those of its devices, where the host has more than one.
fn numa_of(host: &Host, config: &GuestConfig, devices: Option<&Devices>) -> Result<GuestNuma, Failure> {
    let nodes = numa::nodes(host);
    let chosen = match &config.numa_nodes {
        Some(chosen) => GuestNuma::on(chosen, &nodes)
            .and_then(|chosen| chosen.check(config).map(|()| chosen))
            .map_err(Failure::usage)?,
        None if nodes.len() < 2 => GuestNuma::default(),
        None => GuestNuma::of_devices(devices.into_iter().flat_map(Devices::numa_nodes), config, &nodes),
    };
    if chosen.hosts().len() > 0 {
        let names: Vec<_> = chosen.hosts().map(|node| node.to_string()).collect();
        tracing::info!(
            "the guest {} prefers NUMA node {} for its RAM and vCPUs",
            config.name,
            names.join(" and ")
        );
    }
    Ok(chosen)
}

/// Keeps others from claiming the GPUs and NPUs that the guest shares, as long as this lives.
fn leases(context: &Context<'_>, config: &GuestConfig) -> Result<Vec<SharedLease>, Failure> {
    if config.accelerators.iter().any(|shared| matches!(shared.device, AcceleratorDevice::Npu(_))) {
        crate::devices::npus::check_libraries()?;
    }
    let addresses = config.accelerators.iter().filter_map(|shared| match shared.device {
        AcceleratorDevice::Pci(address) => Some(address),
        AcceleratorDevice::Npu(number) => crate::devices::npus::address(&context.host, number),
        AcceleratorDevice::Cpu => None,
    });
    addresses
        .map(|address| crate::cli::kernel::engine::lease(address, &context.host))
        .filter_map(Result::transpose)
        .collect()
}

/// The guest's devices, once claims of dead processes are released and nothing stands in the way; none is touched yet. `None`
/// where there can be none.
fn devices(
    context: &mut Context<'_>,
    config: &GuestConfig,
    asked: &StartOptions,
    stop: &Stop,
) -> Result<Option<Devices>, Failure> {
    let host = context.host.clone();
    if let (Some(size), []) = (config.hugepages, &config.devices[..]) {
        check_huge_pages(&host, size, config.memory).map_err(Failure::failed)?;
    }
    let mut manager = match PassthroughManager::with_host(host.clone()) {
        Err(error) if config.devices.is_empty() => {
            tracing::debug!("{error}; the guest gets no devices");
            return Ok(None);
        }
        manager => manager.map_err(Failure::failed)?,
    };
    let explain = vmm::explain_options(config, Some(&host.dev.join("kvm")));
    let mut claim = ClaimOptions::default();
    claim.with_group = asked.with_group;
    claim.guest = Some(config.name.clone());
    claim.bar_sizes = config.bar_sizes();
    let mut taken = DeviceOptions {
        claim,
        backend: asked.backend.map(Backend::from),
        without_reset: asked.accept.contains(&Accept::NoReset),
        roms: BTreeMap::new(),
        vf_tokens: config.vf_tokens(),
    };
    if config.devices.is_empty() {
        return Ok(Some(Devices::new(manager, Vec::new(), taken, explain)));
    }
    release::recover_near(&mut manager, &config.devices)?;
    let scan = Scan::of(&host)?;
    let mut options = explain.clone();
    options.with_group = asked.with_group;
    options.accept = asked.accept.iter().map(Into::into).collect();
    let readiness = scan.explain_guest(config, &options)?;
    let _overdue = Overdue::start(stop)?;
    explain::require_ready(context, &readiness)?;
    let functions = scan.guest_functions(config)?;
    taken.roms = RomFile::open_all(functions.iter().copied(), &config.settings).map_err(Failure::usage)?;
    let functions = functions.into_iter().cloned().collect();
    Ok(Some(Devices::new(manager, functions, taken, explain)))
}
