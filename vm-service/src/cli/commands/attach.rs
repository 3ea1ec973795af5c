//! `attach`: gives devices to a guest that runs.

use clap::Args;
use hyper::Method;
use vm_passthrough::PciAddress;

use super::asking::{Asking, NOTHING, path};
use super::serve::DaemonArgs;
use crate::api::{Accept, Address, AttachOptions, AttachedDevice, Body, VfioBackend};
use crate::cli::context::Context;
use crate::daemon::ApiError;
use crate::deadlines::GUEST_ATTACH;
use crate::failure::Failure;

/// Arguments of `attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// PCI addresses, as in 0000:65:00.0 or 65:00.0; functions of one device come to the guest together
    #[arg(value_name = "ADDR", required = true)]
    pub(crate) addresses: Vec<PciAddress>,
    /// The guest that gets them
    #[arg(long, value_name = "NAME")]
    pub(crate) guest: String,
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is reported as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
    /// How to open devices; without it, as the guest's others are, or iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    pub(crate) backend: Option<VfioBackend>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Gives a guest devices, one after the other, each whatever becomes of the others.
///
/// # Errors
/// When no such guest runs, or it can't have a device; it keeps the others.
pub(crate) fn run(context: &mut Context<'_>, args: &AttachArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let (mut devices, mut blocked, mut failures) = (Vec::<AttachedDevice>::new(), Vec::new(), Vec::new());
    for device in asking.by_device(&args.addresses)? {
        let Some((&address, others)) = device.split_first() else { continue };
        let options = AttachOptions {
            others: others.iter().copied().map(Address).collect(),
            with_group: args.with_group,
            accept: args.accept.clone(),
            backend: args.backend,
        };
        let path = path(&args.guest, &format!("/devices/{address}"))?;
        match asking.call::<Vec<_>>(Method::PUT, &path, &NOTHING, Some(&options), GUEST_ATTACH) {
            Ok(attached) => devices.extend(attached),
            Err(error) => {
                if let ApiError::Refused(refusal) = &error {
                    blocked.extend_from_slice(&refusal.blockers);
                }
                let failure = Failure::from(error);
                let message = format!("{address} was not attached: {}", failure.message);
                failures.push(Failure { message, ..failure });
            }
        }
    }
    if failures.is_empty() || !devices.is_empty() || !blocked.is_empty() {
        let text: String = devices.iter().map(|device| line(device, &args.guest)).collect();
        context.print(|| Body::Attach { guest: args.guest.clone(), devices, blocked }, || text)?;
    }
    Failure::all(failures)
}

fn line(device: &AttachedDevice, guest: &str) -> String {
    let mut text = match &device.guest_address {
        Some(there) => format!("{} attached to {guest}, where it is {there}\n", device.address),
        None => format!("{} attached to {guest}\n", device.address),
    };
    text.extend(device.left.iter().map(|left| format!("{left}\n")));
    text
}
