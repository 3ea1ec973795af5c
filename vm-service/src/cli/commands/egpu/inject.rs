//! `egpu inject`: breaks the enclosure of a simulated host, or heals it.

use clap::Args;
use vm_passthrough::sim::InjectError;
use vm_passthrough::sim::egpu::SimEgpuFault;
use vm_passthrough::usb4::Route;

use crate::api::{Body, EgpuInjection};
use crate::cli::context::Context;
use crate::failure::Failure;

/// Arguments of `egpu inject`.
#[derive(Debug, Args)]
pub(super) struct InjectArgs {
    /// What happens, in the words of a script for `egpu simulate`: `plug`, `unplug`, `hang soft|hard|reconnect|unplug`, `work TIME`,
    /// `stall`, `temperature CELSIUS`, `fan fails|works`, `sensor fails|works`, `errors P`, `corrupt P`, `tunnel drops|comes`,
    /// `suspend [drops]`, `enumerate works|nothing|no-gpu|other|no-room [N]`, `authorise fails [N]`, `deauthorise fails [N]`,
    /// `reset soft|hard|reconnect works|fails|lies [N]`, `driver sticks TIME`, or `heal`
    #[arg(value_name = "FAULT", required = true, num_args = 1..)]
    fault: Vec<String>,
    /// The enclosure's router, as in 0-1; without it, the only enclosure of the simulated host
    #[arg(long, value_name = "ROUTER")]
    enclosure: Option<Route>,
}

/// Injects a fault, which lasts until something cures it.
///
/// # Errors
/// When the host is not simulated, or the fault is none that it can have.
pub(super) fn run(context: &mut Context<'_>, args: &InjectArgs) -> Result<(), Failure> {
    let Some(sim) = context.sim.clone() else {
        return Err(Failure::usage(
            "faults are injected into a simulated host only; name one with `--sim DIR`",
        ));
    };
    let words = args.fault.join(" ");
    let fault: SimEgpuFault = words.parse().map_err(|error: String| Failure::usage(error))?;
    let route = match (args.enclosure, &*sim.enclosures()?) {
        (Some(route), _) => route,
        (None, [route]) => *route,
        (None, several) => {
            let several: Vec<_> = several.iter().map(ToString::to_string).collect();
            return Err(Failure::usage(format_args!(
                "name the enclosure with `--enclosure`: {}",
                if several.is_empty() { "the simulated host has none".into() } else { several.join(", ") }
            )));
        }
    };
    sim.inject(route, fault).map_err(|error| match error {
        InjectError::Io(_) => Failure::failed(error),
        _ => Failure::usage(error),
    })?;
    tracing::info!(router = %route, "injected: {fault}");
    let json = || Body::EgpuInjection(EgpuInjection { router: route.to_string(), fault: fault.to_string() });
    context.print(json, || format!("{route}: {fault}\n"))
}
