//! `detach`: takes devices from guests that run.

use std::time::Duration;

use clap::Args;
use hyper::Method;
use serde_json::Value;
use vm_passthrough::PciAddress;

use super::asking::{Asking, path};
use super::serve::DaemonArgs;
use crate::api::{Body, DetachedDevice, DetachedHow, GuestState, GuestStatus};
use crate::api::{DetachHow, DetachOptions};
use crate::cli::context::Context;
use crate::deadlines::{self, GUEST_DETACH};
use crate::failure::Failure;

/// Arguments of `detach`.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// PCI addresses, as in 0000:65:00.0 or 65:00.0; all functions of a device go together
    #[arg(value_name = "ADDR", required = true)]
    pub(crate) addresses: Vec<PciAddress>,
    /// The guest that has them; without it, whichever does
    #[arg(long, value_name = "NAME")]
    pub(crate) guest: Option<String>,
    /// How long a guest has to let go of each; Linux lets its users change their minds for 5 seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = deadlines::seconds, conflicts_with = "surprise")]
    pub(crate) deadline: Duration,
    /// Take a device that the guest does not let go of in time all the same, as if it were pulled
    #[arg(long, conflicts_with = "surprise")]
    pub(crate) then_surprise: bool,
    /// Take it at once, as if it were pulled
    #[arg(long)]
    pub(crate) surprise: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Takes devices from guests, each whatever becomes of the others.
///
/// # Errors
/// When no guest has one, or one does not let go of it.
pub(crate) fn run(context: &mut Context<'_>, args: &DetachArgs) -> Result<(), Failure> {
    let asking = Asking::of(context, &args.daemon)?;
    let guests = match &args.guest {
        Some(_) => Vec::new(),
        None => asking.guests()?,
    };
    let how = match (args.surprise, args.then_surprise) {
        (true, _) => DetachHow::Surprise,
        (false, true) => DetachHow::OrderlyThenSurprise,
        (false, false) => DetachHow::Orderly,
    };
    let query = DetachOptions { how, deadline_ms: args.deadline.as_millis() as u64 };
    let (mut devices, mut failures) = (Vec::<DetachedDevice>::new(), Vec::new());
    for device in asking.by_device(&args.addresses)? {
        // All functions of a device go with the first.
        let Some(&address) = device.first() else { continue };
        let detached = guest_of(address, args.guest.as_deref(), &guests).and_then(|guest| {
            let path = path(guest, &format!("/devices/{address}"))?;
            let deadline = args.deadline.saturating_add(GUEST_DETACH);
            Ok(asking.call(Method::DELETE, &path, &query, None::<&Value>, deadline)?)
        });
        match detached {
            Ok(detached) => devices.push(detached),
            Err(failure) => failures.push(failure),
        }
    }
    if failures.is_empty() || !devices.is_empty() {
        let text: String = devices.iter().map(line).collect();
        context.print(|| Body::Detach { devices }, || text)?;
    }
    Failure::all(failures)
}

fn line(device: &DetachedDevice) -> String {
    let how = match device.how {
        DetachedHow::Orderly => "the guest let go of it",
        DetachedHow::Surprise => "the guest had not let go of it",
        DetachedHow::Other => "in another way",
    };
    format!("{} detached: {how}\n", device.address)
}

/// The guest that has a function.
fn guest_of<'a>(
    address: PciAddress,
    named: Option<&'a str>,
    guests: &'a [GuestStatus],
) -> Result<&'a str, Failure> {
    let text = address.to_string();
    let has = |guest: &&GuestStatus| guest.devices.iter().any(|device| device.address == text);
    named.or_else(|| guests.iter().find(has).map(|guest| guest.name.as_str())).ok_or_else(|| {
        let unknown = guests.iter().find(|guest| guest.state == GuestState::Unresponsive);
        let but =
            unknown.map_or_else(String::new, |guest| format!(" but {}, which does not answer", guest.name));
        Failure::failed(format_args!(
            "no guest that runs has {address}{but}; `vm-service guests` shows which has what"
        ))
    })
}
