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

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use rustix::process::DumpableBehavior;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vm_passthrough::claim::{ClaimOptions, SharedLease};
use vm_passthrough::vfio::Backend;
use vm_passthrough::{PassthroughManager, PciAddress};

use super::explain::{self, Accept};
use super::{Scan, release};
use crate::config::{self, AcceleratorDevice, GuestConfig, MAX_DEVICES, Net};
use crate::context::Context;
use crate::control::{GuestHome, Server};
use crate::failure::Failure;
use crate::instance::{DeviceOptions, Devices, Instance};
use crate::json::{self, Body};
use crate::signals::StopSignals;
use crate::vmm::{self, End, MachineError, MachineOptions, OnReboot, PowerButton, Stop};
use console::Console;
use live::Live;
use overdue::Overdue;
use progress::Timeline;

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The guest, as a TOML file (docs/guest-toml.md)
    #[arg(value_name = "GUEST.toml")]
    pub(crate) guest: PathBuf,
    /// Number of the guest's vCPUs, instead of its file's
    #[arg(long, value_name = "NUMBER", value_parser = config::vcpus_argument)]
    pub(crate) vcpus: Option<u8>,
    /// The guest's memory, as in 512M or 4G, instead of its file's
    #[arg(long, value_name = "SIZE", value_parser = config::memory_argument)]
    pub(crate) memory: Option<u64>,
    /// Give this PCI function to the guest, beside those of its file
    #[arg(long = "device", value_name = "ADDR")]
    pub(crate) devices: Vec<PciAddress>,
    /// Give the guest a network interface at this tap, beside those of its file: tap=NAME[,mac=ADDRESS][,vhost=on|off]
    #[arg(long = "net", value_name = "tap=NAME")]
    pub(crate) nets: Vec<Net>,
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// How to open devices; without it, iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    pub(crate) backend: Option<BackendArg>,
    /// End when the guest asks for a reboot, or crashes into one, instead of restarting it
    #[arg(long)]
    pub(crate) no_reboot: bool,
    /// Where the guest's serial console goes: stdio, none, pty, pty=LINK or file=PATH
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    pub(crate) console: Console,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
    /// Have a session of its own, and the guest's directory whose lock is standard input, as the daemon starts it
    #[arg(long, hide = true)]
    pub(crate) managed: bool,
}

/// A VFIO back end, as it is said on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BackendArg {
    /// /dev/iommu and /dev/vfio/devices
    Iommufd,
    /// /dev/vfio/vfio and /dev/vfio/GROUP
    Group,
}

/// Boots a guest.
///
/// # Errors
/// When the guest file is wrong, a device can't be passed to the guest, or anything fails; devices are given back
/// then too.
pub(crate) fn run(context: &mut Context<'_>, args: &RunArgs) -> Result<(), Failure> {
    let started = Instant::now();
    context.require_live("run")?;
    let config = guest(args)?;
    // Whoever else runs as this user, such as a worker that was taken over, can't trace this process.
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user may trace this one");
    }
    let home = home(context, &config, args)?;
    let made = Stop::new().and_then(|stop| Ok((stop, PowerButton::new()?)));
    let (stop, button) = made.map_err(|error| {
        Failure::failed(format_args!("no eventfd can be made: {error}; raise `ulimit -n`"))
    })?;
    // From here on the operator's wish to end comes to `stop`, so that nothing is left half done.
    let asked = stop.clone();
    let _signals = StopSignals::start(move |signal| {
        asked.request();
        tracing::info!("{signal}: stopping the guest");
    })
    .map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })?;

    let devices = devices(context, &config, args, &stop)?;
    let _leases = leases(context, &config)?;
    let (console, service) =
        console::open(&args.console, context.json, &stop, &button).map_err(Failure::failed)?;
    let on_reboot = if args.no_reboot { OnReboot::End } else { OnReboot::Restart };
    let kvm = context.host.dev.join("kvm");
    let power_button = Some(button.clone());
    let options = MachineOptions { kvm, console, on_reboot, power_button, ..MachineOptions::default() };
    let instance = Instance::new(&config, options, devices, &stop).map_err(|error| match error {
        MachineError::Boot(error) => Failure::usage(error),
        error => Failure::failed(error),
    })?;
    let live = Live::new(&config, service.terminal(), instance.handle(), button);
    let _control = home.as_ref().map(|home| serve(home, &live)).transpose()?;
    let mut timeline = Timeline {
        guest: &config.name,
        started,
        startup: None,
        console: Some(service),
        backend: None,
        devices: Vec::new(),
    };
    let ran = instance.run(|progress| {
        live.note(&progress);
        timeline.note(progress);
    });
    let ran = ran.map_err(|errors| Failure::failed(errors.join("\nerror: ")))?;
    let _overdue = Overdue::start(&stop)?;
    report(context, &ran, timeline)
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

/// Serves the guest's control socket, until the result is dropped.
fn serve(home: &GuestHome, live: &Arc<Live>) -> Result<Server, Failure> {
    let start = |listener| {
        Server::start(listener, |outbox| {
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
fn report(context: &mut Context<'_>, ran: &vmm::RunReport, timeline: Timeline<'_>) -> Result<(), Failure> {
    let total = timeline.started.elapsed();
    tracing::info!("{}; all was given back {:.1} s after the start", ran.end, total.as_secs_f64());
    if context.json {
        let report = json::RunReport {
            guest: timeline.guest.to_owned(),
            end: ran.end.into(),
            restarts: ran.restarts,
            startup_ms: json::milliseconds(timeline.startup.unwrap_or(total)),
            duration_ms: json::milliseconds(total),
            exits: (&ran.exits).into(),
            backend: timeline.backend.map(|backend| backend.to_string()),
            devices: timeline.devices,
        };
        context.print(|| Body::Run(report), String::new)?;
    }
    match ran.end {
        End::Shutdown | End::Reboot | End::Stopped => Ok(()),
        End::TripleFault => Err(Failure::failed(format_args!(
            "the guest {} crashed (triple fault): its kernel or program made an error that it does not handle; see \
             its console",
            timeline.guest
        ))),
    }
}

/// Keeps others from claiming the GPUs that the guest shares, as long as this lives.
fn leases(context: &Context<'_>, config: &GuestConfig) -> Result<Vec<SharedLease>, Failure> {
    let addresses = config.accelerators.iter().filter_map(|shared| match shared.device {
        AcceleratorDevice::Pci(address) => Some(address),
        AcceleratorDevice::Cpu => None,
    });
    addresses
        .map(|address| crate::kernel::engine::lease(address, &context.host))
        .filter_map(Result::transpose)
        .collect()
}

/// The guest's devices, once claims of dead processes are given back and nothing stands in the way; none is touched yet. `None`
/// where there can be none.
fn devices(
    context: &mut Context<'_>,
    config: &GuestConfig,
    args: &RunArgs,
    stop: &Stop,
) -> Result<Option<Devices>, Failure> {
    let host = context.host.clone();
    let mut manager = match PassthroughManager::with_host(host.clone()) {
        Err(error) if config.devices.is_empty() => {
            tracing::debug!("{error}; the guest gets no devices");
            return Ok(None);
        }
        manager => manager.map_err(Failure::failed)?,
    };
    let explain = vmm::explain_options(config, Some(&host.dev.join("kvm")));
    let mut claim = ClaimOptions::default();
    claim.with_group = args.with_group;
    claim.guest = Some(config.name.clone());
    let taken = DeviceOptions {
        claim,
        backend: args.backend.map(Backend::from),
        without_reset: args.accept.contains(&Accept::NoReset),
    };
    if config.devices.is_empty() {
        return Ok(Some(Devices::new(manager, Vec::new(), taken, explain)));
    }
    release::recover(&mut manager)?;
    let scan = Scan::of(&host)?;
    let mut options = explain.clone();
    options.with_group = args.with_group;
    options.accept = args.accept.iter().map(Into::into).collect();
    let readiness = scan.explain_guest(&config.devices, &options)?;
    let _overdue = Overdue::start(stop)?;
    explain::require_ready(context, &readiness)?;
    let functions = config.devices.iter().map(|&address| scan.function(address).cloned());
    Ok(Some(Devices::new(manager, functions.collect::<Result<_, _>>()?, taken, explain)))
}

/// The guest as its file and the command line describe it.
fn guest(args: &RunArgs) -> Result<GuestConfig, Failure> {
    let mut config = GuestConfig::load(&args.guest).map_err(Failure::usage)?;
    config.vcpus = args.vcpus.unwrap_or(config.vcpus);
    config.memory = args.memory.unwrap_or(config.memory);
    add_devices(&mut config, &args.devices)?;
    config.add_nets(&args.nets).map_err(Failure::usage)?;
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

impl From<BackendArg> for Backend {
    fn from(arg: BackendArg) -> Self {
        match arg {
            BackendArg::Iommufd => Self::Iommufd,
            BackendArg::Group => Self::Group,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: RunArgs,
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("guest.toml");
        let text = "name = \"a\"\nvcpus = 2\nmemory = \"4M\"\nboot.kernel = \"guest.toml\"\n";
        std::fs::write(&file, text).expect("written");
        let check = |options: &str, expect: (u8, u64)| {
            let line = ["run", file.to_str().expect("UTF-8")].into_iter().chain(options.split_whitespace());
            let config = guest(&Line::parse_from(line).run).expect("a guest");
            assert_eq!((config.vcpus, config.memory), expect, "{options}");
        };
        check("", (2, 4 << 20));
        check("--vcpus 255", (255, 4 << 20));
        check("--memory 16T --vcpus 1", (1, 16 << 40));
        let nets = |options: &str| {
            let line = ["run", file.to_str().expect("UTF-8")].into_iter().chain(options.split_whitespace());
            guest(&Line::parse_from(line).run)
                .map(|config| config.nets.len())
                .map_err(|failure| failure.message)
        };
        assert_eq!(nets("--net tap=a --net tap=b,mac=52:54:00:12:34:56"), Ok(2));
        assert_eq!(
            nets("--net tap=a --net tap=a").unwrap_err(),
            "`--net tap=a` has the tap of another; give each its own"
        );
    }
}
