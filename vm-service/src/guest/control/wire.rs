//! What goes over a control socket, line by line.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vm_passthrough::PciAddress;
use vm_passthrough::pci::ParsePciAddressError;

use crate::api::{GuestEvent, Refusal, RefusalCode};
use crate::cli::commands::boot::BackendArg;
use crate::cli::commands::explain::Accept;

/// Version of the protocol.
pub(super) const VERSION: u32 = 1;
/// Most bytes of a line that a guest reads.
pub(super) const MAX_LINE: usize = 64 << 10;

/// A request on its way.
#[derive(Debug, Serialize)]
pub(super) struct Call<'a> {
    pub(super) id: u64,
    pub(super) request: &'a Request,
}

/// What may be asked of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub(super) enum Request {
    /// Which versions both speak.
    Hello {
        /// Those of the client.
        versions: Vec<u32>,
    },
    /// How the guest is.
    Status,
    /// From now on, what happens to it.
    Subscribe,
    /// Press its power button.
    PowerButton,
    /// End it, as if its power were cut.
    Stop,
    /// Reset its machine.
    Reset,
    /// Give it a device.
    Attach(AttachRequest),
    /// Take a device from it.
    Detach(DetachRequest),
}

/// The address of a function of the host, as in `0000:65:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(inline)]
pub(crate) struct Address(#[schemars(with = "String")] pub(crate) PciAddress);

impl TryFrom<String> for Address {
    type Error = ParsePciAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

impl From<Address> for String {
    fn from(Address(address): Address) -> Self {
        address.to_string()
    }
}

/// A device that a guest is to get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    /// Which: a function of it.
    pub(crate) address: Address,
    /// How.
    #[serde(flatten)]
    pub(crate) options: AttachOptions,
}

/// How a device is given to a guest.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AttachOptions {
    /// Other functions of the same device of the host that the guest gets with it.
    #[arg(skip)]
    #[serde(rename = "with")]
    pub(crate) others: Vec<Address>,
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is reported as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
    /// How to open devices; without it, as the guest's others are, or iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<BackendArg>,
}

/// A device that a guest is to lose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DetachRequest {
    /// Which.
    pub(crate) address: Address,
    /// How.
    #[serde(flatten)]
    pub(crate) options: DetachOptions,
}

/// How a device is taken from a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DetachOptions {
    /// Whether the guest is asked first.
    pub(crate) how: DetachHow,
    /// How long the guest has to let go of it, in milliseconds.
    #[serde(deserialize_with = "crate::deadlines::milliseconds")]
    #[schemars(range(max = 86_400_000))]
    pub(crate) deadline_ms: u64,
}

impl Default for DetachOptions {
    fn default() -> Self {
        Self { how: DetachHow::Orderly, deadline_ms: 30_000 }
    }
}

/// Whether a guest is asked before a device is taken from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DetachHow {
    /// It is asked, and keeps the device when it does not let go of it in time.
    #[default]
    Orderly,
    /// It is asked, and loses the device at the deadline whatever it says.
    OrderlyThenSurprise,
    /// It loses the device at once.
    Surprise,
}

/// What a guest sends.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Message {
    /// What came of a request.
    Answer {
        /// That of the request; of one that can't be read, 0.
        id: u64,
        answer: Outcome,
    },
    /// What happened.
    Event { event: GuestEvent },
}

/// What came of a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    Ok(Value),
    Error(Refusal),
}

/// A request from its line; what is refused has the id, if that can be read.
pub(super) fn parse(line: &[u8]) -> Result<(u64, Request), (u64, Refusal)> {
    #[derive(Deserialize)]
    struct Incoming {
        id: u64,
        request: Value,
    }
    let refused = |id, error: serde_json::Error| {
        let message = format!("this is no request: {error}; see the protocol's description");
        (id, Refusal::new(RefusalCode::Invalid, message))
    };
    let Incoming { id, request } = serde_json::from_slice(line).map_err(|error| refused(0, error))?;
    let request = serde_json::from_value(request).map_err(|error| refused(id, error))?;
    Ok((id, request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_requests_and_refuses_the_rest() {
        fn check(line: &str, expect: Result<(u64, &str), (u64, &str)>) {
            match (parse(line.as_bytes()), expect) {
                (Ok((id, request)), Ok(expect)) => {
                    let text = serde_json::to_string(&request).expect("JSON");
                    assert_eq!((id, text.as_str()), expect, "{line}");
                }
                (Err((id, refusal)), Err((expect, part))) => {
                    assert!(id == expect && refusal.message.contains(part), "{line}: {id} {refusal:?}");
                }
                (got, expect) => panic!("{line}: {got:?} and not {expect:?}"),
            }
        }
        check(r#"{"id":7,"request":{"type":"status"}}"#, Ok((7, r#"{"type":"status"}"#)));
        check(
            r#"{"id":7,"request":{"type":"status","newer":[]},"newer":1}"#,
            Ok((7, r#"{"type":"status"}"#)),
        );
        check(
            r#"{"id":1,"request":{"type":"detach","address":"65:00.0"}}"#,
            Ok((1, r#"{"type":"detach","address":"0000:65:00.0","how":"orderly","deadline_ms":30000}"#)),
        );
        check(
            r#"{"id":1,"request":{"type":"attach","address":"65:00.0","backend":"group"}}"#,
            Ok((
                1,
                r#"{"type":"attach","address":"0000:65:00.0","with":[],"with_group":false,"accept":[],"backend":"group"}"#,
            )),
        );
        check(r#"{"id":3,"request":{"type":"dance"}}"#, Err((3, "unknown variant `dance`")));
        check(r#"{"id":3,"request":{"type":"detach","address":"x"}}"#, Err((3, "`x` is")));
        check(r#"{"id":-3,"request":{"type":"stop"}}"#, Err((0, "invalid value")));
        check("", Err((0, "EOF")));
        check(&"[".repeat(1000), Err((0, "invalid type: sequence")));
        check("\u{0}", Err((0, "this is no request")));
    }
}
