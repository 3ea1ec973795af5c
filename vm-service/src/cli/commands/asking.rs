//! What commands ask of the daemon.

use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vm_passthrough::PciAddress;

use super::serve::DaemonArgs;
use crate::api::{GuestStatus, Refusal, RefusalCode};
use crate::cli::context::Context;
use crate::config::{is_name, name_rule};
use crate::daemon::{Api, ApiError};
use crate::deadlines::API_ANSWER;
use crate::failure::Failure;
use crate::text::table::printable;

/// The daemon, as commands ask it.
pub(super) struct Asking(pub(super) Api);

/// Nothing in a query or a body.
pub(super) const NOTHING: &[(&str, &str)] = &[];

impl Asking {
    /// The daemon that the command line means.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(super) fn of(context: &Context<'_>, args: &DaemonArgs) -> Result<Self, Failure> {
        Api::new(&context.host, args.socket.as_ref()).map(Self)
    }

    /// Asks for something.
    ///
    /// # Errors
    /// What the daemon says.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &impl Serialize,
        body: Option<&impl Serialize>,
        deadline: Duration,
    ) -> Result<T, ApiError> {
        self.0.call(method, path, query, body, deadline.saturating_add(API_ANSWER))
    }

    pub(super) fn guests(&self) -> Result<Vec<GuestStatus>, ApiError> {
        self.call(Method::GET, "/v1/guests", &NOTHING, None::<&Value>, Duration::ZERO)
    }

    /// These functions of the host, those of each device together: functions of one slot are of one device, but for virtual
    /// ones, each of which is a device.
    pub(super) fn by_device(&self, addresses: &[PciAddress]) -> Result<Vec<Vec<PciAddress>>, ApiError> {
        let (mut devices, mut apart): (Vec<Vec<PciAddress>>, Vec<_>) = (Vec::new(), Vec::new());
        for (at, &address) in addresses.iter().enumerate() {
            if addresses[..at].contains(&address) {
                continue;
            }
            let shares = |other: &PciAddress| *other != address && other.same_slot(address);
            if addresses.iter().any(shares) && self.is_virtual(address)? {
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
    fn is_virtual(&self, address: PciAddress) -> Result<bool, ApiError> {
        let path = format!("/v1/devices/{address}");
        match self.call::<Value>(Method::GET, &path, &NOTHING, None::<&Value>, Duration::ZERO) {
            Ok(found) => Ok(found["sriov"]["kind"] == "virtual"),
            Err(ApiError::Refused(refusal)) if refusal.code == RefusalCode::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) fn guest(&self, name: &str) -> Result<GuestStatus, Failure> {
        Ok(self.call(Method::GET, &path(name, "")?, &NOTHING, None::<&Value>, Duration::ZERO)?)
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
            "`{guest}` is no guest's name ({}); `vm-service guests` lists those that run",
            name_rule()
        )));
    }
    Ok(format!("/v1/guests/{guest}{of}"))
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Failed(failure) => failure,
            ApiError::Refused(Refusal { code: RefusalCode::Invalid, message, .. }) => Self::usage(message),
            ApiError::Refused(Refusal { code: RefusalCode::Blocked, message, .. }) => Self::blocked(message),
            ApiError::Refused(Refusal { message, .. }) => Self::failed(message),
        }
    }
}
