//! An accelerator's errors as the protocol's statuses.

use vm_accel::Error;
use vm_paravirt::Status;

/// The status that says what an error means for the guest.
pub(super) fn of(error: &Error) -> Status {
    match error {
        Error::OutOfMemory { .. } => Status::OutOfMemory,
        Error::PoolLimit { .. } => Status::Quota,
        Error::OutOfRange { .. } | Error::Lengths { .. } => Status::Range,
        Error::Arguments { .. } | Error::Grid { .. } | Error::Extents { .. } => Status::Arguments,
        Error::Load { .. } => Status::Module,
        Error::OutOfFuel { .. } => Status::OutOfFuel,
        Error::DeadlineExceeded { .. } => Status::Deadline,
        Error::Lost { .. } | Error::Stopped => Status::Lost,
        _ => Status::Device,
    }
}
