//! The host's statuses and the client's errors, as those of accelerators.

use std::time::Duration;

use vm_accel::Error;
use vm_paravirt_guest::Error as Client;
use vm_paravirt_guest::protocol::Status;

/// What the host allows a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) fuel: u64,
    pub(crate) time: Duration,
}

/// The stream can't be used any more.
pub(crate) fn lost(error: Client) -> Error {
    Error::Lost { cause: error.to_string() }
}

/// Something that this crate asked of the client, and should not have.
pub(crate) fn host(what: &'static str) -> impl Fn(Client) -> Error {
    move |error| Error::Host { what, cause: error.to_string() }
}

/// An operation, or a launch before a fence, ended so; `words` are the host's.
pub(crate) fn of(status: Status, at_fence: bool, words: &str, limits: Limits) -> Error {
    // The host says it as an accelerator does: `kernel NAME was stopped`.
    let kernel = || {
        let named = words.strip_prefix("kernel ").and_then(|rest| rest.split_once(" was stopped"));
        named.map_or(words, |(name, _)| name).to_owned()
    };
    match status {
        Status::Lost => {
            Error::Lost { cause: if words.is_empty() { status.to_string() } else { words.into() } }
        }
        Status::Deadline if at_fence => Error::DeadlineExceeded { kernel: kernel(), limit: limits.time },
        Status::OutOfFuel => Error::OutOfFuel { kernel: kernel(), fuel: limits.fuel },
        _ => Error::Driver {
            call: "an operation on the host",
            code: status.code().into(),
            name: format!("{status:?}"),
            message: if words.is_empty() { status.to_string() } else { words.into() },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_hosts_words() {
        let limits = Limits { fuel: 7, time: Duration::from_secs(2) };
        let check = |status, at_fence, words: &str, expect: &str| {
            assert_eq!(of(status, at_fence, words, limits).to_string(), expect);
        };
        check(
            Status::Deadline,
            true,
            "kernel spin was stopped: it took longer than 2s; give it more time",
            "kernel spin was stopped: it took longer than 2s; give it more time or less to do",
        );
        check(
            Status::OutOfFuel,
            true,
            "kernel spin was stopped: a thread took more than 7",
            "kernel spin was stopped: a thread took more than 7 iterations of its loops; give it more or less to do",
        );
        check(
            Status::Deadline,
            false,
            "the kernel spin: a launch may take 9 operations",
            "an operation on the host failed: Deadline (13), the kernel spin: a launch may take 9 operations",
        );
        check(
            Status::Range,
            false,
            "",
            "an operation on the host failed: Range (8), a range lies outside its buffer or the guest's memory",
        );
        check(
            Status::Lost,
            true,
            "a bus error",
            "the device's context is lost (a bus error): stop this worker, and start again in a new process",
        );
    }
}
