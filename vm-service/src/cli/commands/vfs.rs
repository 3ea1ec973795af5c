//! `vfs`: virtual functions of a physical function that supports SR-IOV.

use std::time::Duration;

use clap::{Args, Subcommand};
use vm_passthrough::claim::VfOptions;
use vm_passthrough::pci::Sriov;
use vm_passthrough::{PassthroughManager, PciAddress};

use super::SimArgs;
use crate::api::{Body, PhysicalFunction};
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::text::table::Table;

/// Arguments of `vfs`.
#[derive(Debug, Args)]
pub(crate) struct VfsArgs {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

impl VfsArgs {
    /// Whether it only reads.
    pub(crate) fn only_reads(&self) -> bool {
        matches!(self.action, Action::List)
    }
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List physical functions, how many virtual functions each can have, and those that it has
    List,
    /// Create virtual functions, each a device of its own; the physical function stays with its driver
    Create {
        /// PCI address of the physical function, as in 0000:65:00.0 or 65:00.0
        #[arg(value_name = "ADDR")]
        address: PciAddress,
        /// How many
        #[arg(value_name = "COUNT")]
        count: u16,
        /// Let the host's drivers take them; else they have none, ready for guests
        #[arg(long)]
        host_drivers: bool,
        #[command(flatten)]
        within: Within,
    },
    /// Remove all virtual functions of a physical function; none may be claimed
    Remove {
        /// PCI address of the physical function
        #[arg(value_name = "ADDR")]
        address: PciAddress,
        /// Remove them although the host uses one
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        within: Within,
    },
}

#[derive(Debug, Args)]
struct Within {
    /// How long the Linux kernel may take
    #[arg(long, value_name = "SECONDS", default_value_t = VfOptions::default().deadline.as_secs())]
    deadline: u64,
}

/// Lists, creates or removes virtual functions.
///
/// # Errors
/// When the Linux kernel refuses, one is claimed or in use, or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>, args: &VfsArgs) -> Result<(), Failure> {
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    let mut options = VfOptions::default();
    let of = match &args.action {
        Action::List => None,
        Action::Create { address, count, host_drivers, within } => {
            options.host_drivers = *host_drivers;
            options.deadline = Duration::from_secs(within.deadline);
            manager.create_vfs(*address, *count, &options).map_err(Failure::failed)?;
            Some(*address)
        }
        Action::Remove { address, force, within } => {
            options.force = *force;
            options.deadline = Duration::from_secs(within.deadline);
            manager.remove_vfs(*address, &options).map_err(Failure::failed)?;
            Some(*address)
        }
    };
    let all = manager.scan_devices().map_err(Failure::failed)?;
    let physical: Vec<_> = all
        .iter()
        .filter(|function| of.is_none_or(|address| address == function.address))
        .filter_map(|function| match function.sriov? {
            Sriov::Physical { total_vfs, .. } => Some((function, total_vfs)),
            Sriov::Virtual { .. } => None,
        })
        .collect();
    let virtual_of = |address: PciAddress| {
        all.iter().filter(move |function| function.sriov == Some(Sriov::Virtual { physical: address }))
    };
    let mut table = Table::new(["PHYSICAL", "VFS", "VIRTUAL", "GROUP", "DRIVER"]);
    for (function, total) in &physical {
        let found: Vec<_> = virtual_of(function.address).collect();
        let dash = || "-".to_owned();
        let name = [function.address.to_string(), format!("{} of {total}", found.len())];
        let lines = found.iter().map(|found| {
            let group = found.iommu_group.map_or_else(dash, |group| group.to_string());
            [found.address.to_string(), group, found.driver.clone().unwrap_or_else(dash)]
        });
        let mut lines: Vec<_> = lines.collect();
        if lines.is_empty() {
            lines.push([dash(), dash(), dash()]);
        }
        for [address, group, driver] in lines {
            let [physical, count] = name.clone();
            table.push([physical, count, address, group, driver]);
        }
    }
    let text = if physical.is_empty() {
        "no function of this host supports SR-IOV\n".into()
    } else {
        table.fit(context.width)
    };
    let json = || Body::Vfs {
        physical: physical
            .iter()
            .map(|(function, total)| PhysicalFunction {
                address: function.address.to_string(),
                total_vfs: *total,
                functions: virtual_of(function.address)
                    .map(|function| function.address.to_string())
                    .collect(),
            })
            .collect(),
    };
    context.print(json, || text)
}
