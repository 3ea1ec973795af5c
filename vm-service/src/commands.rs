//! What the commands do, one file each.

pub mod explain;
pub mod info;
pub mod list;

use vm_passthrough::readiness::Readiness;
use vm_passthrough::{Host, PassthroughManager, PciAddress, PciFunction};

use crate::cli::Failure;
use crate::json;
