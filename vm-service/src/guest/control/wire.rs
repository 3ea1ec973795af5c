//! What goes over a control socket, line by line.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{AttachRequest, DetachRequest, GuestEvent, Refusal, RefusalCode};

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
