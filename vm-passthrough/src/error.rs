//! One error for all that an embedder calls.

use thiserror::Error;

use crate::claim::ClaimError;
use crate::guest::{DeviceError, VmmError};
use crate::manager::ManagerError;
use crate::pci::placement::PlacementError;
use crate::pci::{ParsePciAddressError, ScanError};
use crate::vfio::VfioError;

/// Any error of this crate, for functions that call more than one of its modules: `?` makes it of each.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The manager's.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// A scan's, and that of what keeps a function from being passed through.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A claim's.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A text is not an address.
    #[error(transparent)]
    Address(#[from] ParsePciAddressError),
    /// VFIO's.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A device's.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The VMM's.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// BARs don't fit.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}
