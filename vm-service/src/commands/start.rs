//! `start`: has the daemon start a guest.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use hyper::Method;
use serde_json::{Map, Value, json};
use vm_passthrough::PciAddress;

use super::asking::{Asking, path};
use super::explain::Accept;
use super::guests;
use super::run::BackendArg;
use super::serve::DaemonArgs;
use crate::config::{self, GuestConfig};
use crate::context::Context;
use crate::daemon::StartOptions;
use crate::deadlines::GUEST_START;
use crate::failure::Failure;
use crate::json::{Body, GuestStatus};

/// Arguments of `start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
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
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// How to open devices; without it, iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    pub(crate) backend: Option<BackendArg>,
    /// End when the guest asks for a reboot, or crashes into one, instead of restarting it
    #[arg(long)]
    pub(crate) no_reboot: bool,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Option<Accept>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Starts a guest, and waits until it runs with its devices.
///
/// # Errors
/// When its file is wrong, the daemon can't be asked, or the guest does not start.
pub(crate) fn run(context: &mut Context<'_>, args: &StartArgs) -> Result<(), Failure> {
    let (name, file) = file(args)?;
    let options = StartOptions {
        with_group: args.with_group,
        accept: args.accept,
        backend: args.backend,
        no_reboot: args.no_reboot,
    };
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&name, "")?;
    let guest: GuestStatus = asking.call(context, Method::PUT, &path, &options, Some(&file), GUEST_START)?;
    let text = guests::text(&guest);
    context.print(|| Body::Start(guest), || text)
}

/// The guest's name, and its file as the command line changes it.
fn file(args: &StartArgs) -> Result<(String, Map<String, Value>), Failure> {
    let config = GuestConfig::load(&args.guest).map_err(Failure::usage)?;
    let unread =
        |error: &dyn std::fmt::Display| Failure::usage(format_args!("{}: {error}", args.guest.display()));
    let path = std::path::absolute(&args.guest).map_err(|error| unread(&error))?;
    let text = fs::read_to_string(&path).map_err(|error| unread(&error))?;
    let text = GuestConfig::with_absolute_paths(&text, &path).map_err(Failure::usage)?;
    let mut file: Map<String, Value> = toml::from_str(&text).map_err(|error| unread(&error))?;
    if let Some(vcpus) = args.vcpus {
        file.insert("vcpus".into(), vcpus.into());
    }
    if let Some(memory) = args.memory {
        file.insert("memory".into(), config::format_size(memory).into());
    }
    let added = args.devices.iter().filter(|device| !config.devices.contains(device));
    let added: Vec<_> = added.map(|device| json!({ "address": device.to_string() })).collect();
    if !added.is_empty() {
        let devices = file.entry("devices").or_insert_with(|| json!([]));
        devices.as_array_mut().into_iter().for_each(|devices| devices.extend(added.clone()));
    }
    Ok((config.name, file))
}
