//! `start`: has the daemon start a guest.

use std::fs;

use clap::Args;
use hyper::Method;
use serde_json::{Map, Value, json};

use super::asking::{Asking, path};
use super::boot::BootArgs;
use super::guests;
use super::serve::DaemonArgs;
use crate::config::{self, GuestConfig};
use crate::context::Context;
use crate::deadlines::GUEST_START;
use crate::failure::Failure;
use crate::json::{Body, GuestStatus};

/// Arguments of `start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) boot: BootArgs,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Starts a guest, and waits until it runs with its devices.
///
/// # Errors
/// When its file is wrong, the daemon can't be asked, or the guest does not start.
pub(crate) fn run(context: &mut Context<'_>, args: &StartArgs) -> Result<(), Failure> {
    let (name, file) = file(&args.boot)?;
    let asking = Asking::of(context, &args.daemon)?;
    let path = path(&name, "")?;
    let guest: GuestStatus =
        asking.call(context, Method::PUT, &path, &args.boot.options, Some(&file), GUEST_START)?;
    let text = guests::text(&guest);
    context.print(|| Body::Start(guest), || text)
}

/// The guest's name, and its file as the command line changes it.
fn file(args: &BootArgs) -> Result<(String, Map<String, Value>), Failure> {
    let config = args.config()?;
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
    // Those of the file come first.
    let mut extend = |key: &str, all: Vec<Map<String, Value>>| {
        if let Value::Array(own) = file.entry(key).or_insert_with(|| json!([])) {
            own.extend(all.into_iter().skip(own.len()).map(Value::from));
        }
    };
    let devices =
        config.devices.iter().map(|device| Map::from_iter([("address".into(), device.to_string().into())]));
    extend("devices", devices.collect());
    let nets = config.nets.iter().map(|net| {
        let mac = net.mac.map(|mac| ("mac".into(), mac.to_string().into()));
        let vhost = net.vhost.map(|vhost| ("vhost".into(), vhost.into()));
        [("tap".into(), net.tap.as_str().into())].into_iter().chain(mac).chain(vhost).collect()
    });
    extend("net", nets.collect());
    Ok((config.name, file))
}
