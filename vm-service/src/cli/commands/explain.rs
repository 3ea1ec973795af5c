//! `explain`: every reason why a function can't be passed to a guest, each with its remedy.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::Args;
use vm_passthrough::PciAddress;
use vm_passthrough::readiness::{ExplainOptions, Readiness, Severity};

use super::{Scan, SourceArgs};
use crate::api::{self, Accept, Body};
use crate::cli::context::Context;
use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::wrap;
use crate::vmm;

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// PCI addresses, each for itself; without any, every accelerator
    #[arg(value_name = "ADDR")]
    pub(crate) addresses: Vec<PciAddress>,
    /// Explain for this guest: for as much memory as it has and, without ADDR, all its devices
    #[arg(long, value_name = "GUEST.toml")]
    pub(crate) guest: Option<PathBuf>,
    /// Explain for giving away every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Explain for this VFIO driver: vfio-pci, or a variant of it; without, for the one that fits best
    #[arg(long, value_name = "DRIVER")]
    pub(crate) vfio_driver: Option<String>,
    /// Go on although this stands in the way; it is reported as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// Explains functions, a guest's functions, or every accelerator.
///
/// # Errors
/// When one of them can't be passed to a guest, which the output says then, or when the host can't be read.
pub(crate) fn run(context: &mut Context<'_>, args: &ExplainArgs) -> Result<(), Failure> {
    let host = context.host.clone();
    let guest = args.guest.as_deref().map(GuestConfig::load).transpose().map_err(Failure::usage)?;
    let scan = Scan::of(&host)?;
    let mut options = guest.as_ref().map_or_else(ExplainOptions::default, |guest| {
        let kvm = host.dev.join("kvm");
        vmm::explain_options(guest, (args.source.root.is_none() && !context.is_simulated()).then_some(&kvm))
    });
    options.with_group = args.with_group;
    options.accept = args.accept.iter().map(Into::into).collect();
    options.driver = super::claim::vfio_driver(args.vfio_driver.as_ref());
    let mut failed = Vec::new();
    let readiness: Vec<Readiness> = match &guest {
        _ if !args.addresses.is_empty() => {
            let mut seen = BTreeSet::new();
            let asked = args.addresses.iter().filter(|&&address| seen.insert(address));
            let explained = asked.map(|&address| scan.explain_one(address, &options));
            explained
                .filter_map(|readiness| readiness.map_err(|error| failed.push(error.message)).ok())
                .collect()
        }
        Some(guest) => scan.explain_guest(guest, &options)?,
        None => scan
            .functions()
            .iter()
            .filter(|function| describe::is_accelerator(function.device_type))
            .filter_map(|function| scan.explain(function, &options).transpose())
            .collect::<Result<_, _>>()?,
    };
    if failed.is_empty() || !readiness.is_empty() {
        print(context, &readiness, guest.is_some())?;
    }
    if !failed.is_empty() {
        Err(Failure::failed(failed.join("\nerror: ")))
    } else if readiness.iter().all(Readiness::is_ready) {
        Ok(())
    } else {
        // The output has said why.
        Err(Failure::blocked(String::new()))
    }
}

fn print(context: &mut Context<'_>, readiness: &[Readiness], of_guest: bool) -> Result<(), Failure> {
    let width = context.width;
    context.print(
        || body(readiness),
        || match (readiness.is_empty(), of_guest) {
            (true, true) => "the guest has no devices\n".into(),
            (true, false) => {
                "no accelerators found; `vm-service list --all` lists every PCI function\n".into()
            }
            _ => readiness.iter().map(|readiness| wrap(&readiness.to_string(), width)).collect(),
        },
    )
}

fn body(readiness: &[Readiness]) -> Body {
    Body::Explain { functions: readiness.iter().map(api::Readiness::from).collect() }
}

/// Refuses to go on when something keeps a function from being passed through: tells all of it, on standard error or,
/// in JSON, on standard output.
///
/// # Errors
/// [`Failure::blocked`] then, and when the output can't be written.
pub(super) fn require_ready(context: &mut Context<'_>, readiness: &[Readiness]) -> Result<(), Failure> {
    let blocked: Vec<&Readiness> = readiness.iter().filter(|readiness| !readiness.is_ready()).collect();
    for warning in readiness.iter().flat_map(|readiness| &readiness.blockers) {
        if warning.severity == Severity::Warning {
            tracing::warn!("{warning}");
        }
    }
    if blocked.is_empty() {
        return Ok(());
    }
    if context.json {
        context.print(|| body(readiness), String::new)?;
    }
    Err(Failure::blocked(describe::blocked(blocked)))
}
