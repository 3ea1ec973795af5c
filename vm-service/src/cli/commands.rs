//! What the commands do, one file each.

mod asking;
pub(crate) mod attach;
pub(crate) mod boot;
pub(crate) mod bridge;
pub(crate) mod claim;
pub(crate) mod claims;
pub(crate) mod compile;
pub(crate) mod console;
pub(crate) mod detach;
pub(crate) mod egpu;
pub(crate) mod events;
pub(crate) mod explain;
mod following;
pub(crate) mod guests;
pub(crate) mod info;
pub(crate) mod launch;
pub(crate) mod list;
pub(crate) mod logs;
mod model;
pub(crate) mod release;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod start;
pub(crate) mod stop;
mod targets;
pub(crate) mod tune;
pub(crate) mod vfs;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use vm_passthrough::pci::ScanError;
use vm_passthrough::readiness::{ExplainOptions, Explainer, Readiness};
use vm_passthrough::{Host, PassthroughManager, PciAddress, PciFunction};

use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::text::describe;

/// Which host is read.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// Read the captured tree DIR (DIR/sys, DIR/dev, DIR/proc, DIR/run) instead of this machine
    #[arg(long, value_name = "DIR", conflicts_with = "sim")]
    pub(crate) root: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

/// Whether the host is simulated.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// Work on the simulated host in DIR instead of this machine; where there is none it is made, with a dozen kinds of device
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) sim: Option<PathBuf>,
}

/// The host's functions, as found by one scan, and what is to be said of them.
struct Scan<'a> {
    manager: PassthroughManager,
    explainer: Explainer<'a>,
}

impl<'a> Scan<'a> {
    fn of(host: &'a Host) -> Result<Self, Failure> {
        let begun = Instant::now();
        let mut manager = PassthroughManager::with_host(host.clone()).map_err(Failure::failed)?;
        manager.scan_devices().map_err(Failure::failed)?;
        tracing::debug!(
            "{} PCI functions found below {} in {:.1?}",
            manager.devices().len(),
            host.sys.display(),
            begun.elapsed()
        );
        Ok(Self { manager, explainer: Explainer::new(host) })
    }

    fn functions(&self) -> &[PciFunction] {
        self.manager.devices()
    }

    fn function(&self, address: PciAddress) -> Result<&PciFunction, Failure> {
        let found = self.functions().iter().find(|function| function.address == address);
        found.ok_or_else(|| Failure::failed(describe::not_there(address)))
    }

    /// The other functions of a function's IOMMU group.
    fn companions(&self, of: &PciFunction) -> impl Iterator<Item = &PciFunction> {
        let (group, address) = (of.iommu_group, of.address);
        self.functions().iter().filter(move |function| {
            group.is_some() && function.iommu_group == group && function.address != address
        })
    }

    /// What keeps a function from being passed through; `None` when it has vanished since the scan.
    fn explain(
        &self,
        function: &PciFunction,
        options: &ExplainOptions,
    ) -> Result<Option<Readiness>, Failure> {
        let begun = Instant::now();
        match self.explainer.explain_function(function.clone(), options) {
            Ok(readiness) => {
                let verdict = readiness.first_blocker().map_or("ready", |blocker| blocker.code.as_str());
                tracing::debug!("{}: {verdict}, judged in {:.1?}", function.address, begun.elapsed());
                Ok(Some(readiness))
            }
            Err(ScanError::NotFound { .. }) => Ok(None),
            Err(error) => Err(Failure::failed(error)),
        }
    }

    /// The functions of a guest, which must be there.
    fn guest_functions(&self, guest: &GuestConfig) -> Result<Vec<&PciFunction>, Failure> {
        guest.devices.iter().map(|&address| self.function(address)).collect()
    }

    /// What keeps a guest from having all of its functions, which must be there.
    fn explain_guest(
        &self,
        guest: &GuestConfig,
        options: &ExplainOptions,
    ) -> Result<Vec<Readiness>, Failure> {
        self.explainer.explain_guest(&self.guest_functions(guest)?, options).map_err(Failure::failed)
    }

    /// As [`explain`](Self::explain), of one function that must be there.
    fn explain_one(&self, address: PciAddress, options: &ExplainOptions) -> Result<Readiness, Failure> {
        self.explain(self.function(address)?, options)?.ok_or_else(|| {
            Failure::failed(format_args!("PCI function {address} has just vanished; see its slot"))
        })
    }
}
