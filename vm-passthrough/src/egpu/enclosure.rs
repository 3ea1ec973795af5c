//! What an eGPU's manager acts on.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::{Action, Refusal};
use crate::PciAddress;
use crate::usb4::Route;

/// An enclosure with what is in it, of the host or simulated. Each call returns within a deadline.
pub trait Enclosure: fmt::Debug {
    /// Looks at what there is, and changes nothing.
    ///
    /// # Errors
    /// When it can't be looked at.
    fn observe(&mut self) -> Result<Observation, EgpuError>;

    /// Does something, and reads back that it is done.
    ///
    /// # Errors
    /// When it is not done.
    fn act(&mut self, action: Action) -> Result<(), EgpuError>;

    /// Reads the identity of its functions.
    ///
    /// # Errors
    /// When one does not answer, or is another.
    fn heartbeat(&mut self) -> Result<(), EgpuError>;

    /// Its temperature in thousandths of a degree Celsius; `None` where it can't be read, as while a guest has it.
    fn temperature(&mut self) -> Option<i32>;

    /// What the last temperature was read from, for people to read.
    fn sensor(&self) -> Option<String> {
        None
    }

    /// The users that the last action ended, for people to read; `None` where it ended none.
    fn ended(&mut self) -> Option<String> {
        None
    }

    /// Why it was not sound when it was taken as it was.
    fn unsound(&self) -> Option<String> {
        None
    }
}

/// What there is of an eGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Where its enclosure is connected; `None` where it is not.
    pub route: Option<Route>,
    /// A number that it has from being plugged in until it is pulled; `None` where it is not known.
    pub instance: Option<u64>,
    /// Whether PCIe is tunnelled to it.
    pub authorised: bool,
    /// Its PCI functions that are no bridges.
    pub functions: Vec<PciAddress>,
    /// The users of these, for people to read.
    pub users: Vec<String>,
    /// Set where the tunnel that was built to it is gone, and no command took it down.
    pub dropped: Option<Dropped>,
}

/// A tunnel that is gone unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// What is known of that, and what to do.
    pub why: String,
    /// Whether the policy wants it built again.
    pub comes_back: bool,
}

/// Why something can't be done with an eGPU.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EgpuError {
    /// It is not connected.
    #[error("the enclosure {0} is not connected; see `vm-service egpu info`")]
    NotConnected(String),
    /// Its functions did not come.
    #[error(
        "no GPU came behind the router {route} in {} s{}; see what the Linux kernel says of its port (dmesg), and whether the port has \
         room for its BARs",
        .waited.as_secs(),
        found(.others)
    )]
    NoGpu {
        /// Its router.
        route: Route,
        /// How long they were waited for.
        waited: Duration,
        /// What came instead.
        others: Vec<PciAddress>,
    },
    /// Another GPU is in it than the one that is known.
    #[error(
        "in the enclosure {enclosure} is {found}, and the one that is known has {known}; connect it with --remember if that is right"
    )]
    AnotherGpu {
        /// The enclosure's UUID.
        enclosure: String,
        /// What is there.
        found: String,
        /// What was there when it was made known.
        known: String,
    },
    /// The policy does not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A function does not answer as it should.
    #[error("{address}: {what}")]
    Unsound {
        /// The function.
        address: PciAddress,
        /// What is wrong.
        what: String,
    },
    /// It is used.
    #[error("{what} is used by {}; end that first, or use --force", .users.join(", "))]
    Used {
        /// What is used.
        what: String,
        /// Its users.
        users: Vec<String>,
    },
    /// A step failed.
    #[error("cannot {what}: {reason}")]
    Step {
        /// What was to be done.
        what: String,
        /// Why it was not.
        reason: String,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

fn found(others: &[PciAddress]) -> String {
    match others {
        [] => String::new(),
        _ => {
            let others: Vec<String> = others.iter().map(ToString::to_string).collect();
            format!(", only {}", others.join(", "))
        }
    }
}
