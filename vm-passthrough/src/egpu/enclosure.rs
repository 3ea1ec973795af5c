//! What an eGPU manager acts on.

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

    /// Asks its functions who they are.
    ///
    /// # Errors
    /// When one does not answer, or is another.
    fn heartbeat(&mut self) -> Result<(), EgpuError>;

    /// Its temperature in thousandths of a degree Celsius; `None` where nobody tells.
    fn temperature(&mut self) -> Option<i32>;
}

/// What there is of an eGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Where its enclosure is connected; `None` where it is not.
    pub route: Option<Route>,
    /// What is another number each time that it is plugged in; `None` where that is not known.
    pub instance: Option<u64>,
    /// Whether PCIe is tunnelled to it.
    pub authorised: bool,
    /// Its PCI functions that are no bridges.
    pub functions: Vec<PciAddress>,
    /// Who uses them, for people to read.
    pub users: Vec<String>,
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
    /// What is in it is not allowed.
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
        /// Who uses it.
        users: Vec<String>,
    },
    /// A step failed.
    #[error("can't {what}: {reason}")]
    Step {
        /// What was to be done.
        what: String,
        /// Why it was not.
        reason: String,
    },
    /// It was asked to give up.
    #[error("given up, as was asked")]
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
