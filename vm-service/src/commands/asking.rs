//! What commands ask of the daemon.

use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vm_passthrough::PciAddress;

use super::serve::DaemonArgs;
use crate::config::is_name;
use crate::context::Context;
use crate::daemon::{Api, ApiError};
use crate::deadlines::API_ANSWER;
use crate::failure::Failure;
use crate::json::{Body, GuestStatus, RefusalCode};
use crate::table::printable;

/// The daemon, as commands ask it.
pub(super) struct Asking(pub(super) Api);

/// Nothing in a query or a body.
pub(super) const NOTHING: &[(&str, &str)] = &[];

impl Asking {
    /// The daemon that the command line means.
    ///
    /// # Errors
    /// When the host is a captured tree, or this process has no descriptors left.
    pub(super) fn of(context: &Context<'_>, args: &DaemonArgs) -> Result<Self, Failure> {
        context.require_machine("this command", "asks the daemon")?;
        Api::new(&context.host, args.socket.as_ref()).map(Self)
    }

    /// Asks for something.
    ///
    /// # Errors
    /// What the daemon says, with the exit status that goes with it. What keeps a device from a guest is printed in JSON.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        context: &mut Context<'_>,
        method: Method,
        path: &str,
        query: &impl Serialize,
        body: Option<&impl Serialize>,
        deadline: Duration,
    ) -> Result<T, Failure> {
        let deadline = deadline.saturating_add(API_ANSWER);
        self.0.call(method, path, query, body, deadline).map_err(|error| failure(context, error))
    }

    pub(super) fn guests(&self, context: &mut Context<'_>) -> Result<Vec<GuestStatus>, Failure> {
        self.call(context, Method::GET, "/v1/guests", &NOTHING, None::<&Value>, Duration::ZERO)
    }

    /// These functions of the host, those of each device together: functions of one slot are of one device, but for virtual
    /// ones, each of which is a device.
    pub(super) fn by_device(
        &self,
        context: &mut Context<'_>,
        addresses: &[PciAddress],
    ) -> Result<Vec<Vec<PciAddress>>, Failure> {
        let (mut devices, mut apart): (Vec<Vec<PciAddress>>, Vec<_>) = (Vec::new(), Vec::new());
        for (at, &address) in addresses.iter().enumerate() {
            if addresses[..at].contains(&address) {
                continue;
            }
            let shares = |other: &PciAddress| *other != address && other.same_slot(address);
            if addresses.iter().any(shares) && self.is_virtual(context, address)? {
                apart.push(address);
            }
            let of = |device: &&mut Vec<PciAddress>| {
                device
                    .iter()
                    .any(|other| shares(other) && !apart.contains(other) && !apart.contains(&address))
            };
            match devices.iter_mut().find(of) {
                Some(device) => device.push(address),
                None => devices.push(vec![address]),
            }
        }
        Ok(devices)
    }

    /// Whether a function is a virtual one. Of one that is not there, what is asked next tells.
    fn is_virtual(&self, context: &mut Context<'_>, address: PciAddress) -> Result<bool, Failure> {
        let path = format!("/v1/devices/{address}");
        match self.0.call::<Value>(Method::GET, &path, &NOTHING, None::<&Value>, API_ANSWER) {
            Ok(found) => Ok(found["sriov"]["kind"] == "virtual"),
            Err(ApiError::Refused(refusal)) if refusal.code == RefusalCode::NotFound => Ok(false),
            Err(error) => Err(failure(context, error)),
        }
    }

    pub(super) fn guest(&self, context: &mut Context<'_>, name: &str) -> Result<GuestStatus, Failure> {
        self.call(context, Method::GET, &path(name, "")?, &NOTHING, None::<&Value>, Duration::ZERO)
    }
}

/// The path of a guest in the API, and of something of it.
///
/// # Errors
/// When no guest can have this name.
pub(super) fn path(guest: &str, of: &str) -> Result<String, Failure> {
    if !is_name(guest) {
        let guest = printable(guest);
        return Err(Failure::usage(format_args!(
            "`{guest}` is no guest's name; `vm-service guests` lists those that run"
        )));
    }
    Ok(format!("/v1/guests/{guest}{of}"))
}

/// What the daemon says, as what this process says and its exit status.
pub(super) fn failure(context: &mut Context<'_>, error: ApiError) -> Failure {
    let refusal = match error {
        ApiError::Refused(refusal) => refusal,
        ApiError::Failed(failure) => return failure,
    };
    match refusal.code {
        RefusalCode::Invalid => Failure::usage(refusal.message),
        RefusalCode::Blocked => {
            if context.json
                && let Err(failure) =
                    context.print(|| Body::Explain { functions: refusal.blockers }, String::new)
            {
                return failure;
            }
            Failure::blocked(refusal.message)
        }
        _ => Failure::failed(refusal.message),
    }
}
